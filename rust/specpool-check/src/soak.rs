//! Random operations on random configurations: cheap invariants after each, a full audit now and then, and in some
//! episodes the model and the device beside the ledger. A failure is shrunk to a short trace.

use std::panic::{AssertUnwindSafe, catch_unwind};

use specpool_core::{
    Call, Given, Group, Layout, Ledger, LedgerConfig, Plan, Policy, Row, Shape, Snapshots, StateGroup, StepKind,
};

use crate::decode::{OP_BYTES, decode};
use crate::device::{Fault, Plant};
use crate::pools::least_pages;
use crate::scene::{Scene, span};
use crate::world::{Event, World};

/// `SplitMix64`: small, and the same on every machine.
#[derive(Debug, Clone, Copy)]
pub struct Rng(u64);

impl Rng {
    /// A stream of its own for every seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: i64) -> i64 {
        (self.word() % n.max(1) as u64) as i64
    }

    fn flip(&mut self) -> bool {
        self.word() & 1 == 1
    }

    fn bytes(&mut self) -> [u8; OP_BYTES] {
        let mut bytes = [0; OP_BYTES];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.word().to_le_bytes());
        }
        bytes
    }
}

/// A configuration of one to three groups of any page size, kind and layout, on pools from the smallest on.
#[must_use]
pub fn random_config(rng: &mut Rng) -> LedgerConfig {
    let layout = if rng.flip() { Layout::Holey } else { Layout::Dense };
    let window = |rng: &mut Rng| if rng.below(3) == 0 { Some(1 + rng.below(20)) } else { None };
    let group = |name: &str, rng: &mut Rng, hosts_drafts: bool| Group {
        name: name.into(),
        page_size: [1, 2, 3, 4, 5, 16][rng.below(6) as usize],
        num_pages: 1 << 20,
        hosts_drafts,
        layout: if hosts_drafts { layout } else { Layout::Dense },
        window: window(rng),
        sink: 0,
    };
    let mut groups = vec![group("draft", rng, true)];
    if rng.flip() {
        groups.push(group("target", rng, false));
    }
    if rng.below(4) == 0 {
        groups.push(group("sliding", rng, false));
    }
    let shape = |num_steps, topk, num_draft_tokens| Shape { num_steps, topk, num_draft_tokens };
    let shapes = [shape(0, 1, 1), shape(3, 1, 4), shape(2, 2, 4), shape(1, 1, 1), shape(4, 3, 9), shape(1, 4, 3)];
    let num_shapes = 1 + rng.below(shapes.len() as i64) as usize;
    let num_rows = 1 + rng.below(8);
    let mut config = LedgerConfig::new(groups, shapes[..num_shapes].to_vec(), num_rows, 8 + rng.below(60));
    config.overlap_depth = rng.below(4);
    config.policy = if rng.below(4) == 0 { Policy::DoubleBuffer } else { Policy::Exact };
    (config.draft_kv, config.sessions, config.digest) = (rng.flip(), rng.flip(), rng.flip());
    config.page_fencing = rng.below(4) > 0;
    config.max_chunk = rng.flip().then(|| 1 + rng.below(16));
    config.max_batch = rng.flip().then(|| 1 + rng.below(num_rows));
    for group in &mut config.groups {
        group.window = group.window.map(|window| window.min(config.max_context_len));
        let max_sink = group.window.map_or(0, |window| config.max_context_len - window);
        group.sink = if rng.flip() { rng.below(max_sink.min(12) + 1) } else { 0 };
    }
    for at in 0..config.groups.len() {
        let least = least_pages(&config, at);
        config.groups[at].num_pages = least + rng.below(least * num_rows);
    }
    config
}

/// A state group for the configuration, with slots from the least on.
fn random_states(rng: &mut Rng, config: &LedgerConfig) -> StateGroup {
    let num_slots = 1 + i64::from(config.sessions) + rng.below(config.num_rows + 2);
    let flush = [1, 1, 2, 4][rng.below(4) as usize];
    StateGroup { name: "states".into(), num_slots, flush, eager: rng.flip() }
}

/// With a state group, pins are refused. In their place come the calls that move states.
fn instead_of_a_pin(ledger: &Ledger, op: Call<'static>) -> Call<'static> {
    let Call::PinPrefix { row, length } = op else { return op };
    match (length % 4, ledger.kept_state(0, Row(row))) {
        (0, Ok(_)) => Call::EndTurn { row, length },
        (1, Ok(kept)) => Call::Trim { row, length: kept.map_or(length, |(_, len)| len) },
        (2, Ok(_)) => Call::Fork { row },
        _ => op,
    }
}

/// Whether the model knows the prefix index of such a ledger.
fn has_small_pages(config: &LedgerConfig) -> bool {
    matches!(&config.groups[..], [group] if group.page_size == 1 && group.window.is_none())
}

/// In a world whose texts are known, the index gets a row's own tokens, and has one salt.
fn with_its_text(world: &World, op: Call<'static>) -> Call<'static> {
    match op {
        Call::Index { row, tokens, salt } => {
            let is_row = (1..=world.ledger.num_rows() as i32).contains(&row);
            let own = if is_row { world.text(row, tokens.len() as i32) } else { None };
            Call::Index { row, tokens: own.map_or(tokens, Into::into), salt: one_salt(&salt) }
        }
        Call::AdmitCached { tokens, salt, limit, .. } => {
            Call::AdmitCached { tokens, salt: one_salt(&salt), limit, needs_draft: false }
        }
        op => op,
    }
}

/// The empty salt, unless the given one is refused.
fn one_salt(salt: &[u8]) -> std::borrow::Cow<'static, [u8]> {
    if salt.len() > 256 { salt.to_vec().into() } else { Vec::new().into() }
}

/// Lanes of the plan that write a state.
fn num_folds(plan: &Plan) -> u64 {
    plan.states.as_ref().map_or(0, |folds| folds.dst.iter().filter(|&&slot| slot != 0).count() as u64)
}

/// The settings of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Episode {
    /// The seed of the configuration and of every operation.
    pub seed: u64,
    /// Operations.
    pub ops: u64,
    /// Whether the model and the device run beside the ledger.
    pub has_device: bool,
    /// Whether the ledger has a state group.
    pub has_states: bool,
    /// A planted fault; only with a device.
    pub plant: Option<Plant>,
}

/// What an episode did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations.
    pub ops: u64,
    /// Operations that the ledger refused.
    pub refused: u64,
    /// Forwards that the device ran.
    pub forwards: u64,
    /// Rows that began with tokens of the prefix index.
    pub hits: u64,
    /// Pages and entries that the index gave up to make room.
    pub evictions: u64,
    /// Events that a connector followed.
    pub events: u64,
    /// States that steps write.
    pub folds: u64,
}

impl Tally {
    /// Operations, in millions.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a figure to be read, of a few digits")]
    pub fn millions(&self) -> f64 {
        self.ops as f64 / 1e6
    }
}

/// A failed episode.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The law that was broken.
    pub fault: Fault,
    /// The configuration.
    pub config: LedgerConfig,
    /// The shrunk operations. The last one breaks the law.
    pub trace: Vec<Call<'static>>,
    /// Number of operations before shrinking.
    pub found_after: usize,
}

/// One run over a list of undecoded operations.
struct Run {
    world: Option<World>,
    ledger: Option<Ledger>,
    scene: Scene,
    tally: Tally,
    /// Whether to check everything after each operation.
    is_thorough: bool,
}

/// Refused calls between two comparisons of the state hash.
const HASHED_REFUSALS: u64 = 64;
/// Operations between two audits.
const AUDITED_OPS: u64 = 1024;

impl Run {
    fn new(config: &LedgerConfig, episode: &Episode, is_thorough: bool) -> Result<Self, Fault> {
        let mut world = episode.has_device.then(|| World::new(config, episode.plant)).transpose()?;
        // Neither a connector nor a cache outside knows of states.
        let has_states = !config.states.is_empty();
        world.as_mut().filter(|_| !has_states).map_or(Ok(()), World::connect)?;
        let ledger = match &world {
            Some(_) => None,
            None => Some(Ledger::new(config.clone()).map_err(|error| error.to_string())?),
        };
        // The model's index has pages of one token; `tests/suite/prefix_cache.rs` of the core has a device beside the others.
        let has_texts = has_states && has_small_pages(config);
        world.as_mut().filter(|_| has_texts).into_iter().for_each(World::tell_texts);
        // Without fences, an import has to wait for launched forwards, which the decoder does not know.
        let has_moves = world.is_none() || config.page_fencing;
        let (has_index, keeps_states) = (ledger.is_some() || has_texts, has_states);
        let scene = Scene { has_index, keeps_states, has_loans: !has_states, has_moves, ..Scene::default() };
        Ok(Self { world, ledger, scene, tally: Tally::default(), is_thorough })
    }

    fn step(&mut self, bytes: &[u8], trace: Option<&mut Vec<Call<'static>>>) -> Result<(), Fault> {
        self.tally.ops += 1;
        if let Some(world) = &mut self.world {
            self.scene.read(&world.ledger);
            let op = with_its_text(world, instead_of_a_pin(&world.ledger, decode(bytes, &self.scene)));
            if let Some(trace) = trace {
                trace.push(op.clone());
            }
            // The device draws from the operation's own bytes, so leaving one operation out does not change the others.
            let mut rng = Rng::new(bytes.iter().fold(0, |word: u64, &byte| word.rotate_left(8) ^ u64::from(byte)));
            let admits = matches!(op, Call::AdmitCached { .. });
            let done = drive(world, op, &mut rng, &mut self.tally)?;
            if admits && done {
                self.tally.hits += u64::from(world.last_admitted_len() > 0);
            }
            self.tally.refused += u64::from(!done);
            // A connector that looks rarely must find the same.
            if bytes[0].is_multiple_of(4) {
                self.tally.events = world.follow_events()?;
            }
            if self.is_thorough || self.tally.ops.is_multiple_of(64) {
                world.check()?;
            }
        } else if let Some(ledger) = &mut self.ledger {
            self.scene.read(ledger);
            let op = instead_of_a_pin(ledger, decode(bytes, &self.scene));
            if let Some(trace) = trace {
                trace.push(op.clone());
            }
            let is_hashed = self.is_thorough || self.tally.refused.is_multiple_of(HASHED_REFUSALS);
            let before = is_hashed.then(|| ledger.state_hash());
            let done = op.run(ledger, None, &mut Snapshots::default());
            if let (Call::AdmitCached { .. }, Ok(Given::Row(row))) = (&op, &done) {
                self.tally.hits += u64::from(ledger.resolved_len()[row.at()] > 0);
            }
            if let Ok(Given::Plan(plan)) = &done {
                self.tally.folds += num_folds(plan);
            }
            if done.is_err() {
                self.tally.refused += 1;
                if before.is_some_and(|before| before != ledger.state_hash()) {
                    return Err(format!("{op:?} was refused and changed the state"));
                }
            }
            check_lengths(ledger, self.tally.ops)?;
            if self.is_thorough || self.tally.ops.is_multiple_of(AUDITED_OPS) {
                ledger.check().map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }
}

/// Checks `0 <= e <= r` and `0 <= p <= r <= r + k <= a <= row_width` of one row, a different one each time, and the
/// pool.
fn check_lengths(ledger: &Ledger, turn: u64) -> Result<(), Fault> {
    let at = 1 + turn as usize % ledger.num_rows();
    let (r, k) = (ledger.resolved_len()[at], ledger.in_flight()[at]);
    let group = turn as usize / ledger.num_rows() % ledger.num_groups();
    let text = |error: specpool_core::Error| error.to_string();
    let (a, p) = (ledger.allocated_len(group).map_err(text)?[at], ledger.protected_len(group).map_err(text)?[at]);
    let (e, width) = (ledger.evicted_len(group).map_err(text)?[at], ledger.row_width(group).map_err(text)?);
    let spec = ledger.group_spec(group).map_err(text)?;
    let is_ordered = 0 <= p && p <= r && 0 <= e && e <= r && 0 <= k && r + k <= a && i64::from(a) <= width;
    // A row protects its indexed tokens to the last one.
    let is_whole = [a, e].iter().all(|&len| i64::from(len) % spec.page_size == 0);
    let unused = [ledger.free_pages(group), ledger.fenced_pages(group), ledger.cached_pages(group)];
    let free: usize = unused.into_iter().sum::<specpool_core::Result<_>>().map_err(text)?;
    if is_ordered && is_whole && free as i64 <= spec.num_pages {
        return check_state(ledger, at);
    }
    Err(format!(
        "row {at}, group {group}: r={r} k={k} a={a} p={p} e={e} width={width}, {free} pages free, fenced or cached"
    ))
}

/// Checks that a row has no more states than tokens, and the pool of slots.
fn check_state(ledger: &Ledger, at: usize) -> Result<(), Fault> {
    let Some(spec) = ledger.state_groups().first() else { return Ok(()) };
    let text = |error: specpool_core::Error| error.to_string();
    let (slot, len) = (ledger.state_slot(0).map_err(text)?[at], ledger.state_len(0).map_err(text)?[at]);
    // An eager round folds its own root.
    let most = ledger.resolved_len()[at] + i32::from(spec.eager && ledger.in_flight()[at] > 0);
    let counts = [ledger.free_state_slots(0), ledger.fenced_state_slots(0), ledger.cached_state_slots(0)];
    let unused: usize = counts.into_iter().sum::<specpool_core::Result<_>>().map_err(text)?;
    let is_held = slot != 0 && unused as i64 == spec.num_slots;
    if (slot == 0) == (len == 0) && len <= most && unused as i64 <= spec.num_slots && !is_held {
        return Ok(());
    }
    Err(format!("row {at}: slot {slot} of {len} tokens, at most {most}; {unused} slots are free, fenced or cached"))
}

/// Makes the operation on the world as an engine could: what must have run on the device before it runs first. Returns
/// whether the call succeeded.
fn drive(world: &mut World, op: Call<'static>, rng: &mut Rng, tally: &mut Tally) -> Result<bool, Fault> {
    let op = match op {
        Call::Resolve { step, accept_lens } => {
            let is_up = world.flights.iter().any(|flight| flight.plan.step == step && flight.is_launched());
            if is_up {
                run_up_to(world, step, rng, tally)?;
            }
            // If the operation is a sensible resolve, the device decides what was accepted.
            let flight = world.flights.iter().find(|flight| flight.plan.step == step);
            let ran = flight.and_then(|flight| flight.ran.clone()).filter(|ran| ran.len() == accept_lens.len());
            match (flight, ran) {
                (Some(flight), Some(_)) if flight.has_failed && world.device.plant != Some(Plant::SkipAbandon) => {
                    Call::Abandon { step }
                }
                (Some(flight), Some(ran)) if flight.plan.kind == StepKind::Decode => {
                    let more = i32::from(world.device.plant == Some(Plant::ResolveMore));
                    let shapes = world.ledger.shapes();
                    let most = flight.plan.shapes.iter().map(|&shape| shapes[shape as usize].max_accept_len() as i32);
                    let accept_lens = ran.iter().zip(most).map(|(len, most)| (len + more).min(most)).collect();
                    Call::Resolve { step, accept_lens }
                }
                _ => Call::Resolve { step, accept_lens },
            }
        }
        Call::Complete { step } => {
            let is_up = world.flights.iter().any(|flight| flight.plan.step == step && flight.is_launched());
            if is_up && world.device.plant != Some(Plant::CompleteEarly) {
                run_up_to(world, step, rng, tally)?;
                let is_left = world.device.plant == Some(Plant::SkipAbandon);
                let failed: Vec<u64> = (world.flights.iter())
                    .filter(|flight| flight.has_failed && flight.plan.step <= step && !is_left)
                    .map(|flight| flight.plan.step)
                    .collect();
                for step in failed {
                    world.apply(&Event::Call(Call::Abandon { step }))?;
                }
            }
            Call::Complete { step }
        }
        // The world takes and acknowledges every delta itself, at launch.
        Call::TakeDelta { .. } | Call::AckDelta { .. } => {
            run_next(world, rng, tally)?;
            return Ok(true);
        }
        // The device knows contents, so these name what the cache outside has found.
        Call::AdmitLent { length, pages } if !all_lent(world, &pages) => Call::AdmitLent { length, pages },
        Call::Rebind { row, start, end, pages } if !all_lent(world, &pages) => Call::Rebind { row, start, end, pages },
        Call::AdmitLent { length, .. } => match pick_loan(world, rng, length) {
            Some((loan, len)) => world.admit_lent(loan, len),
            None => Call::Admit {},
        },
        Call::Rebind { row, start, end, pages } => {
            let is_live = world.ledger.is_live(Row(row));
            let span = span(&world.ledger);
            let is_range = 0 <= start && start < end && start % span == 0 && end % span == 0;
            match pick_loan(world, rng, end).filter(|&(_, len)| is_live && is_range && len == end) {
                Some((loan, _)) => world.rebind(loan, row, start, end),
                // No page of the cache can stand for itself in a range that it does not have.
                None => Call::Rebind { row, start, end, pages: vec![0; pages.len()].into() },
            }
        }
        op => op,
    };
    let is_launch = matches!(op, Call::Launch { .. });
    let is_done = world.apply(&Event::Call(op))?;
    if is_launch && !is_done && world.device.plant == Some(Plant::LaunchStale) {
        world.run_stale()?;
    }
    Ok(is_done)
}

/// Whether a call with these pages could succeed.
fn all_lent(world: &World, pages: &[i32]) -> bool {
    let lent = |group| world.ledger.lent_pages(group).unwrap_or_default();
    let lent: Vec<i32> = (0..world.ledger.num_groups()).flat_map(lent).collect();
    pages.iter().all(|page| *page == 0 || lent.contains(page))
}

/// Some loan, and as much of `len` tokens as it has.
fn pick_loan(world: &World, rng: &mut Rng, len: i32) -> Option<(usize, i32)> {
    let loan = rng.below(world.loans.len() as i64) as usize;
    let loan_len = world.loans.get(loan)?.len();
    let span = span(&world.ledger);
    Some((loan, len.min(loan_len).max(0) / span * span)).filter(|&(_, len)| len > 0)
}

fn run_up_to(world: &mut World, step: u64, rng: &mut Rng, tally: &mut Tally) -> Result<(), Fault> {
    while world.flights.iter().any(|flight| flight.plan.step <= step && flight.is_launched() && flight.ran.is_none()) {
        run_next(world, rng, tally)?;
    }
    Ok(())
}

/// Runs the oldest launched forward, if there is one. Now and then it fails.
fn run_next(world: &mut World, rng: &mut Rng, tally: &mut Tally) -> Result<(), Fault> {
    let Some(flight) = world.flights.iter().find(|flight| flight.ran.is_none()) else { return Ok(()) };
    if !flight.is_launched() {
        return Ok(());
    }
    let plan = &flight.plan;
    tally.folds += num_folds(plan);
    let shapes = world.ledger.shapes();
    let accept = |&shape: &i32| match plan.kind {
        StepKind::Extend => 1,
        StepKind::Decode => 1 + rng.below(shapes[shape as usize].max_accept_len().into()) as i32,
    };
    let accept_lens = plan.shapes.iter().map(accept).collect();
    let event = if rng.below(50) == 0 { Event::Fail } else { Event::Run { accept_lens } };
    world.apply(&event)?;
    tally.forwards += 1;
    Ok(())
}

/// Runs an episode.
///
/// # Errors
/// The broken law with a shrunk trace.
pub fn run(episode: &Episode) -> Result<Tally, Box<Failure>> {
    let mut rng = Rng::new(episode.seed);
    let mut config = random_config(&mut rng);
    if episode.has_states {
        let mut rng = Rng::new(!episode.seed);
        if episode.has_device && rng.flip() {
            config.groups.truncate(1);
            (config.groups[0].page_size, config.groups[0].window, config.groups[0].sink) = (1, None, 0);
            let least = least_pages(&config, 0);
            config.groups[0].num_pages = least + rng.below(least * config.num_rows);
        }
        config.states = vec![random_states(&mut rng, &config)];
    }
    let script = rng;
    let mut done = 0;
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let mut run = Run::new(&config, episode, false)?;
        for _ in 0..episode.ops {
            done += 1;
            run.step(&rng.bytes(), None)?;
        }
        finish(&mut run)?;
        Ok(run.tally)
    }));
    let fault = match caught.unwrap_or_else(|panic| Err(panic_text(panic.as_ref()))) {
        Ok(tally) => return Ok(tally),
        Err(fault) => fault,
    };
    let mut rng = script;
    let all: Vec<[u8; OP_BYTES]> = (0..done).map(|_| rng.bytes()).collect();
    let (script, fault) = shrink(&config, episode, all, fault);
    let mut trace = Vec::new();
    replay(&config, episode, &script, Some(&mut trace)).err();
    Err(Box::new(Failure { fault, config, trace, found_after: done }))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> Fault {
    let text = panic.downcast_ref::<String>().cloned();
    format!("a panic: {}", text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default())
}

/// Checks that nothing leaks: with every row, prefix and step gone, the pools are full.
fn finish(run: &mut Run) -> Result<(), Fault> {
    let text = |error: specpool_core::Error| error.to_string();
    let Some(ledger) = &mut run.ledger else { return Ok(()) };
    run.tally.evictions = ledger.index_size().2;
    for row in 1..=ledger.num_rows() as i32 {
        if ledger.is_live(Row(row)) {
            ledger.finish(Row(row)).map_err(text)?;
        }
    }
    for prefix in ledger.prefixes().collect::<Vec<_>>() {
        ledger.release_prefix(prefix).map_err(text)?;
    }
    for group in 0..ledger.num_groups() {
        let lent = ledger.lent_pages(group).map_err(text)?;
        ledger.release_lent(group, &lent).map_err(text)?;
    }
    ledger.forget(None).map_err(text)?;
    let steps: Vec<_> = ledger.steps().collect();
    for &(step, _, state) in steps.iter().rev() {
        match state {
            specpool_core::StepState::Prepared | specpool_core::StepState::Stale => {
                ledger.cancel(step).map_err(text)?;
            }
            _ => {
                ledger.complete(step).map_err(text)?;
                break;
            }
        }
    }
    for group in 0..ledger.num_groups() {
        let (free, all) = (ledger.free_pages(group).map_err(text)?, ledger.group_spec(group).map_err(text)?.num_pages);
        if free as i64 != all {
            return Err(format!("everything is over, {free} of {all} pages of group {group} are free"));
        }
    }
    for (group, spec) in ledger.state_groups().iter().enumerate() {
        let free = ledger.free_state_slots(group).map_err(text)?;
        if free as i64 != spec.num_slots {
            return Err(format!("everything is over, {free} of {} state slots are free", spec.num_slots));
        }
    }
    ledger.check().map_err(text)
}

/// Runs the script with every check after each operation.
fn replay(
    config: &LedgerConfig,
    episode: &Episode,
    script: &[[u8; OP_BYTES]],
    mut trace: Option<&mut Vec<Call<'static>>>,
) -> Result<(), (Fault, usize)> {
    let mut at = 0;
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let mut run = Run::new(config, episode, true)?;
        for bytes in script {
            at += 1;
            run.step(bytes, trace.as_deref_mut())?;
        }
        finish(&mut run)
    }));
    caught.unwrap_or_else(|panic| Err(panic_text(panic.as_ref()))).map_err(|fault| (fault, at))
}

/// Shrinks the trace: leaves out runs of operations (half of them, a quarter, ..., one) as long as a law is still
/// broken.
fn shrink(
    config: &LedgerConfig,
    episode: &Episode,
    mut script: Vec<[u8; OP_BYTES]>,
    mut fault: Fault,
) -> (Vec<[u8; OP_BYTES]>, Fault) {
    if let Err((found, at)) = replay(config, episode, &script, None) {
        fault = found;
        script.truncate(at);
    }
    let mut chunk = script.len().div_ceil(2);
    while chunk > 0 {
        let mut start = 0;
        while start < script.len() {
            let mut shorter = script.clone();
            shorter.drain(start..(start + chunk).min(script.len()));
            match replay(config, episode, &shorter, None) {
                Err((found, at)) => {
                    shorter.truncate(at);
                    (script, fault) = (shorter, found);
                }
                Ok(()) => start += chunk,
            }
        }
        chunk = if chunk == 1 { 0 } else { chunk.div_ceil(2) };
    }
    (script, fault)
}
