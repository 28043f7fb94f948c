//! Decodes a few random bytes and the ledger's state into one operation, deterministically. The random tests in Rust,
//! the soak run and Hypothesis all use this decoder.
//!
//! A byte string is read from its start. Behind its end all bytes are 0, so a shorter or smaller string is a simpler
//! operation, which helps a shrinker. The first byte says whether the operation is meant to succeed (0..=239) or may
//! be anything (240..=255): unknown rows, repeated rows, lengths out of range, steps that are over, arrays that do not
//! fit. The second byte picks a verb by its weight, among the verbs that have something to work on. The rest are its
//! arguments. [`OP_BYTES`] bytes are enough for every choice that a batch of 8 rows needs.
//!
//! A new verb of the ledger needs an arm in `weight`, in `call` and in `anything`, or a place in `never_drawn`.
//!
//! `rust/specpool-core/tests/suite/main.rs` compiles this file into itself by `#[path]`: it is a second user, which no
//! `Cargo.toml` shows.

use std::sync::LazyLock;

use specpool_core::{Call, StepState, Verb};

use crate::scene::{Scene, SceneStep};

/// Bytes that one operation may read.
pub const OP_BYTES: usize = 24;

/// A byte string that goes on with zeros for ever.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        }
    }

    /// A number in `0..n`; 0 if `n` is 0.
    fn below(&mut self, n: usize) -> usize {
        usize::from(self.next()) % n.max(1)
    }

    /// True for `n` of 16 bytes; a byte of 0 gives false.
    fn is_rare(&mut self, n: u8) -> bool {
        self.next() % 16 >= 16 - n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        from.get(self.below(from.len())).copied()
    }
}

/// The ledger's verbs, in the order of its table; first those of every scene. The order decides what a code means, and
/// so what the seed of a soak run does.
static VERBS: LazyLock<Vec<Verb>> = LazyLock::new(|| {
    let mut verbs = [Verb::LOGGED, Verb::UNLOGGED].concat();
    let plain = Scene::default();
    verbs.sort_by_key(|&verb| !is_of(verb, &plain));
    verbs
});

/// A pattern: the verbs that no operation is. `Finish` stands for all that give a row back, and `Forget` also for a
/// forget of everything, and `PrepareExtend` for those that keep recurrent states; an operation saves no whole state; the
/// last ones are of no ledger.
macro_rules! never_drawn {
    () => {
        Verb::Retract
            | Verb::Abort
            | Verb::ForgetAll
            | Verb::PrepareExtendKeeping
            | Verb::Snapshot
            | Verb::Restore
            | Verb::None
            | Verb::Take
            | Verb::Drop
            | Verb::Put
            | Verb::Keep
            | Verb::Unkeep
    };
}

/// The operation that `bytes` mean in this scene.
#[must_use]
pub fn decode(bytes: &[u8], scene: &Scene) -> Call<'static> {
    let mut bytes = Bytes(bytes);
    if bytes.next() >= 240 {
        let verbs: Vec<Verb> = VERBS.iter().copied().filter(|&verb| is_of(verb, scene)).collect();
        let verb = verbs[bytes.below(verbs.len())];
        return anything(verb, &mut bytes, scene);
    }
    let able = Able::of(scene);
    let weights: Vec<usize> = VERBS.iter().map(|&verb| able.weight(verb, scene)).collect();
    let total: usize = weights.iter().sum();
    // Two bytes, so that every verb keeps its weight whatever the total is.
    let mut at = (bytes.below(256) * 256 + bytes.below(256)) * total / 65_536;
    for (&verb, weight) in VERBS.iter().zip(weights) {
        if at < weight {
            return able.call(verb, &mut bytes, scene);
        }
        at -= weight;
    }
    Call::Admit {}
}

/// Whether the scene is for operations of that kind.
fn is_of(verb: Verb, scene: &Scene) -> bool {
    match verb {
        Verb::Index | Verb::AdmitCached | Verb::Forget => scene.has_index,
        Verb::Lend | Verb::Rebind | Verb::AdmitLent | Verb::ReleaseLent => scene.has_loans,
        Verb::Export | Verb::ImportRow => scene.has_moves,
        never_drawn!() => false,
        // A new verb is of every scene. The matches below have no such arm: there the compiler asks for it.
        _ => true,
    }
}

/// What an operation can work on.
struct Able<'a> {
    live: Vec<i32>,
    can_extend: Vec<i32>,
    can_decode: Vec<i32>,
    /// Rows with a page edge of every group between p and r.
    can_lend: Vec<i32>,
    next_launch: Option<u64>,
    newest_unlaunched: Option<u64>,
    is_stuck: bool,
    unresolved: Vec<&'a SceneStep>,
    incomplete: Vec<u64>,
}

impl<'a> Able<'a> {
    fn of(scene: &'a Scene) -> Self {
        let of_state = |state| scene.steps.iter().filter(move |step| step.state == state);
        let is_launched = |step: &&SceneStep| matches!(step.state, StepState::Launched | StepState::Resolved);
        let unlaunched = scene.steps.iter().find(|step| !is_launched(step));
        Self {
            live: scene.rows_where(|_| true),
            can_extend: (scene.rows_where(|row| row.in_flight == 0 && row.resolved < scene.max_context_len))
                .into_iter()
                .filter(|&row| !scene.has_unlaunched_extend(row))
                .collect(),
            can_decode: scene.rows_where(|row| {
                row.has_root && row.in_flight <= scene.overlap_depth && row.resolved < scene.max_context_len
            }),
            can_lend: (scene
                .rows_where(|row| scene.has_loans && row.resolved / scene.span > row.protected / scene.span)),
            next_launch: unlaunched.filter(|step| step.state == StepState::Prepared).map(|step| step.step),
            newest_unlaunched: scene.steps.iter().rev().find(|step| !is_launched(step)).map(|step| step.step),
            is_stuck: of_state(StepState::Stale).next().is_some(),
            unresolved: of_state(StepState::Launched).filter(|step| !step.is_extend).collect(),
            incomplete: scene.steps.iter().filter(is_launched).filter(|s| !s.is_complete).map(|s| s.step).collect(),
        }
    }

    /// The weight of the verb; 0 if it could only be refused.
    fn weight(&self, verb: Verb, scene: &Scene) -> usize {
        let given = |weight, is_able: bool| if is_able { weight } else { 0 };
        let has_row = self.live.len() + 1 < scene.rows.len();
        let has_lent = scene.lent.iter().any(|pages| !pages.is_empty());
        if !is_of(verb, scene) {
            return 0;
        }
        match verb {
            Verb::Admit => given(6, has_row),
            Verb::AdmitOn => given(4, has_row && !scene.prefixes.is_empty()),
            Verb::Fork => given(3, has_row && !self.can_extend.is_empty()),
            Verb::PinPrefix => given(2, !self.live.is_empty()),
            Verb::ReleasePrefix => scene.prefixes.len().min(4),
            Verb::PrepareExtend => given(14, !self.is_stuck && !self.can_extend.is_empty()),
            Verb::PrepareDecode => given(20, !self.is_stuck && !self.can_decode.is_empty()),
            Verb::Launch => given(24, self.next_launch.is_some()),
            Verb::Resolve => given(16, !self.unresolved.is_empty()),
            Verb::Complete => given(8, !self.incomplete.is_empty()),
            Verb::Cancel => given(if self.is_stuck { 40 } else { 3 }, self.newest_unlaunched.is_some()),
            Verb::Abandon => given(1, !self.incomplete.is_empty()),
            Verb::Trim => given(3, !self.live.is_empty()),
            Verb::EndTurn => given(2, scene.has_sessions && !self.live.is_empty()),
            Verb::Finish => given(if has_row { 2 } else { 4 }, !self.live.is_empty()),
            Verb::TakeDelta | Verb::AckDelta => given(3, !scene.steps.is_empty()),
            Verb::Export => given(3, !self.can_extend.is_empty()),
            Verb::ImportRow => given(4, has_row),
            Verb::Lend => given(10, !self.can_lend.is_empty()),
            Verb::Rebind => given(16, has_lent && !self.can_lend.is_empty()),
            Verb::AdmitLent => given(10, has_row && scene.lent.iter().all(|pages| !pages.is_empty())),
            Verb::ReleaseLent => given(2, has_lent),
            Verb::Index => given(8, self.live.iter().any(|&row| scene.resolved(row) > 0)),
            Verb::AdmitCached => given(10, has_row),
            Verb::Forget => 1,
            never_drawn!() => 0,
        }
    }

    /// Some of `rows`: at most a batch, usually all.
    fn batch(rows: &[i32], bytes: &mut Bytes, scene: &Scene) -> Vec<i32> {
        let start = bytes.below(rows.len());
        let mut batch: Vec<i32> = rows.iter().cycle().skip(start).take(rows.len()).copied().collect();
        batch.retain(|_| !bytes.is_rare(5));
        if batch.is_empty() {
            batch.extend(rows.get(start));
        }
        batch.truncate(scene.max_batch);
        batch
    }

    fn call(&self, verb: Verb, bytes: &mut Bytes, scene: &Scene) -> Call<'static> {
        let row = |bytes: &mut Bytes| bytes.pick(&self.live).unwrap_or(0);
        // Lengths near the row's end, where cuts usually are, and now and then any length.
        let len_of = |row: i32, bytes: &mut Bytes| {
            let longest = scene.resolved(row) + 1;
            if bytes.is_rare(4) {
                bytes.below(longest as usize + 1) as i32
            } else {
                (longest - bytes.below(6) as i32).max(0)
            }
        };
        match verb {
            Verb::AdmitOn => {
                let (prefix, prefix_len) = bytes.pick(&scene.prefixes).unwrap_or_default();
                let length = (!bytes.is_rare(8)).then(|| prefix_len - bytes.below(prefix_len as usize + 1) as i32);
                Call::AdmitOn { prefix, length }
            }
            Verb::Fork => Call::Fork { row: bytes.pick(&self.can_extend).unwrap_or(0) },
            Verb::PinPrefix => {
                let row = row(bytes);
                Call::PinPrefix { row, length: (scene.resolved(row) - bytes.below(8) as i32).max(1) }
            }
            Verb::ReleasePrefix => Call::ReleasePrefix { prefix: bytes.pick(&scene.prefixes).unwrap_or_default().0 },
            Verb::PrepareExtend => {
                let writes_draft = !bytes.is_rare(1);
                let rows = Self::batch(&self.can_extend, bytes, scene);
                let new_len = |&row: &i32| {
                    let room = (scene.max_context_len - scene.resolved(row)).min(scene.max_chunk);
                    let add = if bytes.is_rare(2) { bytes.below(room as usize) as i32 } else { bytes.below(9) as i32 };
                    scene.resolved(row) + (add + 1).min(room)
                };
                let new_lens = rows.iter().map(new_len).collect();
                let is_kept = |_: &i32| scene.keeps_states && bytes.is_rare(8);
                let keep: Vec<i32> = (0..rows.len() as i32).filter(is_kept).collect();
                extend(rows, new_lens, keep, writes_draft)
            }
            Verb::PrepareDecode => {
                let writes_draft = !bytes.is_rare(1);
                let rows = Self::batch(&self.can_decode, bytes, scene);
                let shapes = rows.iter().map(|_| bytes.below(scene.max_accept_lens.len()) as i32).collect();
                Call::PrepareDecode { rows: rows.into(), shapes, writes_draft }
            }
            Verb::Launch => Call::Launch { step: self.next_launch.unwrap_or(0) },
            Verb::Resolve => {
                // Usually the oldest, which must come first.
                let at = if bytes.is_rare(2) { bytes.below(self.unresolved.len()) } else { 0 };
                let Some(step) = self.unresolved.get(at) else { return Call::Admit {} };
                let accept = |&shape: &i32| {
                    let max_accept_len = scene.max_accept_lens.get(shape as usize).copied().unwrap_or(1);
                    1 + bytes.below(max_accept_len as usize) as i32
                };
                Call::Resolve { step: step.step, accept_lens: step.shapes.iter().map(accept).collect() }
            }
            Verb::Complete => Call::Complete { step: bytes.pick(&self.incomplete).unwrap_or(0) },
            Verb::Cancel => Call::Cancel { step: self.newest_unlaunched.unwrap_or(0) },
            Verb::Abandon => Call::Abandon { step: bytes.pick(&self.incomplete).unwrap_or(0) },
            Verb::Trim | Verb::EndTurn => {
                let row = row(bytes);
                let length = len_of(row, bytes);
                if matches!(verb, Verb::Trim) { Call::Trim { row, length } } else { Call::EndTurn { row, length } }
            }
            Verb::Finish => give_back(row(bytes), bytes),
            Verb::TakeDelta => Call::TakeDelta { step: any_step(bytes, scene) },
            Verb::AckDelta => Call::AckDelta { step: any_step(bytes, scene) },
            Verb::Lend => {
                let row = bytes.pick(&self.can_lend).unwrap_or(0);
                let (start, end) = range(row, bytes, scene);
                Call::Lend { row, start, end }
            }
            Verb::Rebind => {
                let row = bytes.pick(&self.can_lend).unwrap_or(0);
                let (start, end) = range(row, bytes, scene);
                Call::Rebind { row, start, end, pages: some_lent(end - start, bytes, scene).into() }
            }
            Verb::AdmitLent => {
                let max_spans = scene.max_context_len / scene.span;
                let length = (1 + bytes.below(max_spans.clamp(1, 3) as usize) as i32) * scene.span;
                Call::AdmitLent { length, pages: some_lent(length, bytes, scene).into() }
            }
            Verb::ReleaseLent => release_lent(bytes, scene),
            Verb::Export => Call::Export { row: bytes.pick(&self.can_extend).unwrap_or(0) },
            Verb::ImportRow => {
                let length = 1 + bytes.below(scene.max_context_len as usize) as i32;
                let undrafted = if bytes.is_rare(4) { bytes.below(9) as i32 % length } else { 0 };
                Call::ImportRow { length, drafted_len: length - undrafted }
            }
            Verb::Index => {
                let row = row(bytes);
                let len = scene.resolved(row) - if bytes.is_rare(5) { bytes.below(9) as i32 } else { 0 };
                // Usually one text for a row, so that what it indexes goes on.
                let number = if bytes.is_rare(4) { bytes.next() } else { row as u8 };
                Call::Index { row, tokens: text(number, len).into(), salt: salt(bytes).into() }
            }
            Verb::AdmitCached => {
                let len = 1 + bytes.below(scene.max_context_len as usize) as i32;
                let (tokens, salt) = (text(bytes.next(), len).into(), salt(bytes).into());
                let limit = bytes.is_rare(4).then(|| bytes.below(len as usize + 1) as i32);
                Call::AdmitCached { tokens, salt, limit, needs_draft: bytes.is_rare(5) }
            }
            Verb::Forget if bytes.is_rare(8) => Call::Forget { salt: salt(bytes).into() },
            Verb::Forget => Call::ForgetAll {},
            #[allow(clippy::unnested_or_patterns, reason = "a macro gives the others")]
            Verb::Admit | never_drawn!() => Call::Admit {},
        }
    }
}

/// An extend that keeps the states of the lanes `keep`, if it names any.
fn extend(rows: Vec<i32>, new_lens: Vec<i32>, keep: Vec<i32>, writes_draft: bool) -> Call<'static> {
    let (rows, new_lens) = (rows.into(), new_lens.into());
    if keep.is_empty() {
        Call::PrepareExtend { rows, new_lens, writes_draft }
    } else {
        Call::PrepareExtendKeeping { rows, new_lens, keep: keep.into(), writes_draft }
    }
}

/// `len` tokens of one of eight texts, which part after 0 to 14 tokens.
fn text(number: u8, len: i32) -> Vec<i32> {
    let number = i32::from(number % 8);
    (0..len).map(|at| if at < 2 * number { at % 3 } else { number }).collect()
}

fn salt(bytes: &mut Bytes) -> Vec<u8> {
    if bytes.is_rare(3) { vec![1] } else { Vec::new() }
}

/// Tokens of the row from a page edge up to p on, to one up to r. Usually all that is not read-only.
fn range(row: i32, bytes: &mut Bytes, scene: &Scene) -> (i32, i32) {
    let edge = |len: i32| len / scene.span * scene.span;
    let start = edge(scene.protected(row)) - if bytes.is_rare(3) { scene.span * bytes.below(3) as i32 } else { 0 };
    let end = edge(scene.resolved(row)) - if bytes.is_rare(3) { scene.span * bytes.below(3) as i32 } else { 0 };
    (start.max(0), end)
}

/// Lent pages for `len` tokens, group after group, one after the other from any of them on. Now and then 0 in front, as
/// behind a window.
fn some_lent(len: i32, bytes: &mut Bytes, scene: &Scene) -> Vec<i32> {
    let mut pages = Vec::new();
    for (lent, page_size) in scene.lent.iter().zip(&scene.page_sizes) {
        let (count, first) = ((len.max(0) / page_size) as usize, bytes.below(lent.len()));
        let gone = if bytes.is_rare(4) { bytes.below(count + 1) } else { 0 };
        pages.extend((0..count).map(
            |at| {
                if at < gone || lent.is_empty() { 0 } else { lent[(first + at) % lent.len()] }
            },
        ));
    }
    pages
}

fn release_lent(bytes: &mut Bytes, scene: &Scene) -> Call<'static> {
    let group = bytes.below(scene.lent.len());
    let lent = scene.lent.get(group).map_or(&[][..], Vec::as_slice);
    let (count, first) = (bytes.below(4), bytes.below(lent.len()));
    let pages = (0..(count + 1).min(lent.len())).map(|at| lent[(first + at) % lent.len()]);
    Call::ReleaseLent { group: group as i32, pages: pages.collect() }
}

fn give_back(row: i32, bytes: &mut Bytes) -> Call<'static> {
    match bytes.below(3) {
        0 => Call::Retract { row },
        1 => Call::Finish { row },
        _ => Call::Abort { row },
    }
}

fn any_step(bytes: &mut Bytes, scene: &Scene) -> u64 {
    scene.steps.get(bytes.below(scene.steps.len())).map_or(0, |step| step.step)
}

/// The verb with arguments of any kind.
fn anything(verb: Verb, bytes: &mut Bytes, scene: &Scene) -> Call<'static> {
    let row = |bytes: &mut Bytes| bytes.below(scene.rows.len() + 2) as i32 - 1;
    let len = |bytes: &mut Bytes| match bytes.below(10) {
        0 => -1,
        1 => i32::MIN,
        2 => i32::MAX,
        3 => scene.max_context_len + 1,
        4 => scene.max_context_len,
        _ => bytes.below(scene.max_context_len as usize + 1) as i32,
    };
    let step = |bytes: &mut Bytes| match bytes.below(6) {
        0 => 0,
        1 => u64::MAX,
        2 => scene.steps.last().map_or(1, |step| step.step + 1),
        3 => scene.steps.first().map_or(1, |step| step.step.saturating_sub(1 + bytes.below(4) as u64)),
        _ => any_step(bytes, scene),
    };
    let prefix = |bytes: &mut Bytes| match bytes.below(4) {
        0 => bytes.below(8) as u64,
        1 => u64::MAX,
        _ => bytes.pick(&scene.prefixes).map_or(1, |(prefix, _)| prefix),
    };
    match verb {
        Verb::AdmitOn => Call::AdmitOn { prefix: prefix(bytes), length: bytes.is_rare(12).then(|| len(bytes)) },
        Verb::Fork => Call::Fork { row: row(bytes) },
        Verb::PinPrefix => Call::PinPrefix { row: row(bytes), length: len(bytes) },
        Verb::ReleasePrefix => Call::ReleasePrefix { prefix: prefix(bytes) },
        Verb::PrepareExtend | Verb::PrepareDecode => {
            let rows: Vec<i32> = (0..bytes.below(4)).map(|_| row(bytes)).collect();
            let num_entries = if bytes.is_rare(2) { bytes.below(4) } else { rows.len() };
            let writes_draft = !bytes.is_rare(4);
            if matches!(verb, Verb::PrepareExtend) {
                let new_lens = (0..num_entries).map(|_| len(bytes)).collect();
                let num_kept = if scene.keeps_states { bytes.below(3) } else { 0 };
                let keep = (0..num_kept).map(|_| bytes.below(4) as i32 - 1).collect();
                extend(rows, new_lens, keep, writes_draft)
            } else {
                let num_shapes = scene.max_accept_lens.len();
                let shapes = (0..num_entries).map(|_| bytes.below(num_shapes + 2) as i32 - 1).collect();
                Call::PrepareDecode { rows: rows.into(), shapes, writes_draft }
            }
        }
        Verb::Launch => Call::Launch { step: step(bytes) },
        Verb::Resolve => {
            let step = step(bytes);
            let lanes = scene.steps.iter().find(|known| known.step == step).map_or(1, |known| known.rows.len());
            let num_entries = if bytes.is_rare(2) { bytes.below(4) } else { lanes };
            Call::Resolve { step, accept_lens: (0..num_entries).map(|_| bytes.below(6) as i32 - 1).collect() }
        }
        Verb::Complete => Call::Complete { step: step(bytes) },
        Verb::Cancel => Call::Cancel { step: step(bytes) },
        Verb::Abandon => Call::Abandon { step: step(bytes) },
        Verb::Trim => Call::Trim { row: row(bytes), length: len(bytes) },
        Verb::EndTurn => Call::EndTurn { row: row(bytes), length: len(bytes) },
        Verb::Finish => give_back(row(bytes), bytes),
        Verb::TakeDelta => Call::TakeDelta { step: step(bytes) },
        Verb::AckDelta => Call::AckDelta { step: step(bytes) },
        Verb::Export => Call::Export { row: row(bytes) },
        Verb::ImportRow => Call::ImportRow { length: len(bytes), drafted_len: len(bytes) },
        Verb::Lend => Call::Lend { row: row(bytes), start: len(bytes), end: len(bytes) },
        Verb::Rebind | Verb::AdmitLent | Verb::ReleaseLent => {
            let any_page = |bytes: &mut Bytes| match bytes.below(8) {
                0 => -1,
                1 => i32::MAX,
                2 => 1 + bytes.below(6) as i32,
                _ => {
                    let lent = scene.lent.get(bytes.below(scene.lent.len())).map_or(&[][..], Vec::as_slice);
                    bytes.pick(lent).unwrap_or(1)
                }
            };
            let row = row(bytes);
            let (start, end) = if bytes.is_rare(8) { range(row, bytes, scene) } else { (len(bytes), len(bytes)) };
            let pages = (0..bytes.below(4)).map(|_| any_page(bytes)).collect();
            match verb {
                Verb::Rebind => Call::Rebind { row, start, end, pages },
                Verb::AdmitLent => Call::AdmitLent { length: end, pages },
                _ => Call::ReleaseLent { group: bytes.below(scene.lent.len() + 1) as i32, pages },
            }
        }
        Verb::Index => {
            let (row, num_tokens) = (row(bytes), bytes.below(scene.max_context_len as usize + 2) as i32);
            let salt = if bytes.is_rare(2) { vec![7; 300] } else { salt(bytes) }.into();
            Call::Index { row, tokens: text(bytes.next(), num_tokens).into(), salt }
        }
        Verb::AdmitCached => {
            let num_tokens = bytes.below(2 * scene.max_context_len as usize) as i32;
            let salt = if bytes.is_rare(2) { vec![7; 300] } else { salt(bytes) }.into();
            let limit = bytes.is_rare(8).then(|| len(bytes));
            let tokens = text(bytes.next(), num_tokens).into();
            Call::AdmitCached { tokens, salt, limit, needs_draft: bytes.is_rare(8) }
        }
        Verb::Forget if bytes.is_rare(8) => Call::Forget { salt: vec![9; 40 * bytes.below(9)].into() },
        Verb::Forget => Call::ForgetAll {},
        #[allow(clippy::unnested_or_patterns, reason = "a macro gives the others")]
        Verb::Admit | never_drawn!() => Call::Admit {},
    }
}
