//! The prefix cache: random calls on a ledger whose pages' contents are kept beside it, and examples.
//!
//! The contents say for each slot which tokens its KV was computed from, so a row that begins with another row's pages
//! must find there what it would have computed itself. A plain list of everything that was indexed says how long the
//! hit must be.
#![allow(clippy::print_stdout, reason = "`make prove` and `make soak` show the counts")]

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use specpool_core::{
    Error, Group, Layout, Ledger, LedgerConfig, PageNames, Plan, Replay, Row, Shape, StepKind, StepState,
};

const SALTS: [&[u8]; 2] = [b"", b"tenant"];

fn group(name: &str, page_size: i64, num_pages: i64, window: Option<i64>) -> Group {
    Group { name: name.into(), page_size, num_pages, hosts_drafts: true, layout: Layout::Dense, window, sink: 0 }
}

fn new_ledger(groups: Vec<Group>, num_rows: i64, overlap_depth: i64, page_fencing: bool) -> Result<Ledger, Error> {
    let mut config = LedgerConfig::new(groups, vec![Shape::eagle(2, 1, 3).unwrap()], num_rows, 60);
    (config.overlap_depth, config.sessions, config.digest) = (overlap_depth, true, true);
    config.page_fencing = page_fencing;
    Ledger::new(config)
}

/// Page sizes and windows.
type Geometry = &'static [(i64, Option<i64>)];
const GEOMETRIES: [Geometry; 9] = [
    &[(1, None)],
    &[(4, None)],
    &[(16, None)],
    &[(64, None)],
    &[(2, None), (3, None)],
    &[(8, None), (2, None)],
    &[(4, None), (4, Some(6))],
    &[(4, Some(5))],
    &[(2, None), (8, Some(1)), (4, Some(9))],
];

/// What one slot holds: the tokens that its KV was computed from, as a hash, and whether draft KV is there.
type Slot = (u64, bool);
const GARBAGE: Slot = (u64::MAX, false);

struct Known {
    tokens: Vec<i32>,
    salt: usize,
    /// Tokens that the device has written, unresolved rounds included.
    written: usize,
    is_checked: bool,
    /// The row's life, and a new number after each cut.
    life: u64,
}

/// A step that the device has not run yet, with what it was launched with.
struct Launched {
    plan: Arc<Plan>,
    lanes: Vec<LaunchedLane>,
}

struct LaunchedLane {
    life: u64,
    /// Per group: the row's cells.
    table: Vec<Vec<i32>>,
    /// Per group: the end of what the row has.
    allocated: Vec<usize>,
}

struct World {
    ledger: Ledger,
    rng: TestRng,
    slots: HashMap<(usize, i32, i64), Slot>,
    rows: HashMap<i32, Known>,
    plans: HashMap<u64, (Arc<Plan>, Vec<i32>)>,
    /// What the device has still to run, oldest first, and how long each life of a row is there.
    launched: VecDeque<Launched>,
    lens: HashMap<u64, usize>,
    next_life: u64,
    /// Text and salt of each pinned prefix.
    pins: Vec<(u64, Vec<i32>, usize)>,
    /// Everything that was indexed, as long as nothing was given up.
    indexed: Vec<(usize, Vec<i32>)>,
    is_complete: bool,
    texts: Vec<Vec<i32>>,
    num_hits: usize,
}

fn hash_of(salt: usize, tokens: &[i32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (salt, tokens).hash(&mut hasher);
    hasher.finish()
}

fn common(a: &[i32], b: &[i32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Checks that every page of the index holds the KV of its tokens.
fn check_index(ledger: &Ledger, slots: &HashMap<(usize, i32, i64), Slot>) {
    let mut path = Vec::new();
    let mut starts = ledger.index_entries().map(|entry| entry.start).skip(1);
    for entry in ledger.index_entries() {
        path.truncate(entry.start);
        path.extend_from_slice(entry.tokens);
        let has_more = starts.next().is_some_and(|start| start > entry.start);
        let has_page = entry.pages.iter().any(|pages| pages.iter().any(|&page| page > 0));
        assert!(has_more || has_page, "an entry without pages leads nowhere: {path:?}");
        let salt = SALTS.iter().position(|&salt| salt == entry.salt).unwrap();
        for (at, pages) in entry.pages.iter().enumerate() {
            let size = ledger.group_spec(at).unwrap().page_size as usize;
            for offset in (0..entry.tokens.len()).filter(|offset| pages[offset / size] > 0) {
                let (found, is_drafted) = slots[&(at, pages[offset / size], (offset % size) as i64)];
                let expected = hash_of(salt, &path[..=entry.start + offset]);
                assert_eq!(found, expected, "group {at}: {path:?} at {offset}");
                assert!(is_drafted || offset >= entry.drafted, "group {at}: {path:?} draft KV at {offset}");
            }
        }
    }
}

/// How many of the tokens the entries know, one path of entries after the other.
fn known_len(ledger: &Ledger, tokens: &[i32], salt: &[u8], needs_draft: bool) -> usize {
    let (mut path, mut has_draft, mut best) = (Vec::new(), Vec::new(), 0);
    for entry in ledger.index_entries().filter(|entry| entry.salt == salt) {
        path.truncate(entry.start);
        has_draft.truncate(entry.start);
        path.extend_from_slice(entry.tokens);
        has_draft.extend((0..entry.tokens.len()).map(|at| at < entry.drafted));
        let drafted = has_draft.iter().take_while(|&&has| has).count();
        best = best.max(common(&path, tokens).min(if needs_draft { drafted } else { path.len() }));
    }
    best
}

/// A claim may be refused for want of pages only if there are not enough free and cached ones.
fn allow(error: &Error, available: &[usize]) {
    match error {
        Error::OutOfPages { group, need, .. } => assert!(*need > available[group.parse::<usize>().unwrap()]),
        Error::Order(_) | Error::NotReady(_) | Error::DraftLag { .. } | Error::ContextEnd { .. } => {}
        error => panic!("{error}"),
    }
}

impl World {
    fn new(geometry: Geometry, seed: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let (num_rows, overlap, page_fencing) = (4, rng.random_range(0..3), rng.random_bool(0.7));
        let mut num_pages: Vec<i64> = vec![1; geometry.len()];
        let of = |num_pages: &[i64]| {
            let of_group = |(at, &(size, window)): (usize, &(i64, Option<i64>))| {
                group(&at.to_string(), size, num_pages[at], window)
            };
            geometry.iter().enumerate().map(of_group).collect::<Vec<_>>()
        };
        for at in 0..geometry.len() {
            let fits = |pages: i64| {
                let mut alone = of(&num_pages)[at].clone();
                alone.num_pages = pages;
                new_ledger(vec![alone], num_rows, overlap, page_fencing).is_ok()
            };
            let least = (1..1_000).find(|&pages| fits(pages)).unwrap();
            num_pages[at] = least + rng.random_range(0..=least);
        }
        let ledger = new_ledger(of(&num_pages), num_rows, overlap, page_fencing).unwrap();
        let (slots, rows, plans) = (HashMap::new(), HashMap::new(), HashMap::new());
        let (indexed, texts) = (Vec::new(), vec![Vec::new()]);
        let (launched, lens, next_life, pins) = (VecDeque::new(), HashMap::new(), 0, Vec::new());
        let is_complete = true;
        Self {
            ledger,
            rng,
            slots,
            rows,
            plans,
            launched,
            lens,
            next_life,
            pins,
            indexed,
            is_complete,
            texts,
            num_hits: 0,
        }
    }

    /// A new life of a row, with `len` tokens on the device.
    fn live(&mut self, len: usize) -> u64 {
        self.next_life += 1;
        self.lens.insert(self.next_life, len);
        self.next_life
    }

    fn seat(&mut self, row: Row, tokens: Vec<i32>, salt: usize, written: usize) {
        let life = self.live(written);
        self.rows.insert(row.0, Known { tokens, salt, written, is_checked: written == 0, life });
    }

    fn some_row(&mut self) -> Option<i32> {
        let mut rows: Vec<i32> = self.rows.keys().copied().collect();
        rows.sort_unstable();
        (!rows.is_empty()).then(|| rows[self.rng.random_range(0..rows.len())])
    }

    fn text(&mut self) -> Vec<i32> {
        let from = self.rng.random_range(0..self.texts.len());
        let mut text = self.texts[from].clone();
        text.truncate(self.rng.random_range(0..=text.len()));
        let len = self.rng.random_range(1..50_usize).max(text.len() + 1).min(50);
        while text.len() < len {
            text.push(self.rng.random_range(0..3));
        }
        if self.texts.len() < 12 {
            self.texts.push(text.clone());
        }
        text
    }

    fn admit(&mut self) {
        let (tokens, salt) = (self.text(), self.rng.random_range(0..2));
        let needs_draft = self.rng.random_bool(0.3);
        let limit = self.rng.random_bool(0.3).then(|| self.rng.random_range(0..=tokens.len() as i32));
        let found = self.ledger.match_prefix(&tokens, SALTS[salt], limit, needs_draft).unwrap();
        let known = known_len(&self.ledger, &tokens, SALTS[salt], needs_draft) as i32;
        let before = self.available();
        let row = match self.ledger.admit_cached(&tokens, SALTS[salt], limit, needs_draft, None) {
            Ok(row) => row,
            Err(Error::OutOfRows { .. }) => return,
            Err(Error::OutOfPages { group, need, free, cached, .. }) => {
                let group: usize = group.parse().unwrap();
                assert!(need > free && before[group] < found.taken[group], "{group} {need} {free} {cached}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let at = row.at();
        assert_eq!(self.ledger.resolved_len()[at], found.len);
        let taken: Vec<_> = before.iter().zip(self.available()).map(|(before, after)| before - after).collect();
        assert_eq!(taken, found.taken, "a match says what the admission takes");
        let longest = self.indexed.iter().filter(|(other, _)| *other == salt);
        let longest = longest.map(|(_, other)| common(other, &tokens)).max().unwrap_or(0);
        let most = longest.min(limit.map_or(tokens.len() - 1, |limit| limit as usize)) as i32;
        let has_windows = self.has_windows();
        if self.is_complete && !needs_draft && !has_windows {
            assert_eq!(found.len, most, "complete");
        }
        if needs_draft {
            assert_eq!(self.ledger.drafted_len()[at], found.len);
        }
        if !has_windows {
            assert_eq!(found.len, known.min(limit.unwrap_or(tokens.len() as i32 - 1)), "as long as the entries allow");
        }
        self.num_hits += usize::from(found.len > 0);
        self.seat(row, tokens, salt, found.len as usize);
    }

    fn has_windows(&self) -> bool {
        (0..self.ledger.num_groups()).any(|at| self.ledger.group_spec(at).unwrap().window.is_some())
    }

    fn available(&self) -> Vec<usize> {
        let of = |at| self.ledger.free_pages(at).unwrap() + self.ledger.cached_pages(at).unwrap();
        (0..self.ledger.num_groups()).map(of).collect()
    }

    fn extend(&mut self) {
        let Some(row) = self.some_row() else { return };
        let (len, resolved) = (self.rows[&row].tokens.len() as i32, self.ledger.resolved_len()[row as usize]);
        if resolved >= len {
            return;
        }
        let to = self.rng.random_range(resolved + 1..=len);
        let writes_draft = self.rng.random_bool(0.8);
        let available = self.available();
        match self.ledger.prepare_extend(&[row], &[to], writes_draft) {
            Ok(plan) => drop(self.plans.insert(plan.step, (plan, vec![]))),
            Err(error) => allow(&error, &available),
        }
    }

    fn decode(&mut self) {
        let mut rows: Vec<i32> = self.rows.keys().copied().collect();
        rows.sort_unstable();
        rows.retain(|&row| self.ledger.has_root(Row(row)) && self.rows[&row].written < 55);
        rows.truncate(self.rng.random_range(0..=rows.len()));
        if rows.is_empty() {
            return;
        }
        let writes_draft = self.rng.random_bool(0.8);
        let available = self.available();
        match self.ledger.prepare_decode(&rows, &vec![self.rng.random_range(0..2); rows.len()], writes_draft) {
            Ok(plan) => drop(self.plans.insert(plan.step, (plan, vec![]))),
            Err(error) => allow(&error, &available),
        }
    }

    /// Launches the oldest prepared step. The device does it later.
    fn launch(&mut self) {
        let Some((step, ..)) = self.ledger.steps().find(|(.., state)| state.name() == "prepared") else { return };
        if self.ledger.launch(step).is_err() {
            return;
        }
        let plan = self.plans[&step].0.clone();
        let lane = |&row: &i32| {
            let groups = 0..self.ledger.num_groups();
            let table = groups.clone().map(|at| self.ledger.page_table(at).unwrap().row(Row(row)).to_vec());
            let allocated = groups.map(|at| self.ledger.allocated_len(at).unwrap()[row as usize] as usize);
            LaunchedLane { life: self.rows[&row].life, table: table.collect(), allocated: allocated.collect() }
        };
        let lanes = plan.rows.iter().map(lane).collect();
        self.launched.push_back(Launched { plan, lanes });
    }

    /// The device runs the oldest launched step. A step that fails leaves nothing in its slots.
    fn run(&mut self, fails: bool) {
        let Some(Launched { plan, lanes }) = self.launched.pop_front() else { return };
        for copy in &plan.page_copies {
            for at in 0..copy.tokens {
                let group = copy.group as usize;
                let slot = self.slots.get(&(group, copy.src, at.into())).copied().unwrap_or(GARBAGE);
                self.slots.insert((group, copy.dst, at.into()), if fails { GARBAGE } else { slot });
            }
        }
        for (at, lane) in lanes.iter().enumerate() {
            let row = plan.rows[at];
            let accept_len = match plan.kind {
                StepKind::Extend => None,
                StepKind::Decode => {
                    let most = self.ledger.shapes()[plan.shapes[at] as usize].max_accept_len();
                    Some(self.rng.random_range(1..=most as usize))
                }
            };
            // Draws also for a row that is gone, which writes on without meaning.
            let drawn: Vec<i32> = (0..accept_len.unwrap_or(0)).map(|_| self.rng.random_range(0..3)).collect();
            let start = if accept_len.is_some() { self.lens[&lane.life] } else { plan.lo[at] as usize };
            let end = accept_len.map_or(plan.new_len[at] as usize, |num| start + num);
            for (group, table) in lane.table.iter().enumerate() {
                let size = self.ledger.group_spec(group).unwrap().page_size as usize;
                let most = if accept_len.is_some() { lane.allocated[group] } else { end };
                for position in start..most {
                    self.slots.insert((group, table[position / size], (position % size) as i64), GARBAGE);
                }
            }
            self.lens.insert(lane.life, end);
            if let Some(known) = self.rows.get_mut(&row).filter(|known| known.life == lane.life && !fails) {
                if accept_len.is_some() {
                    known.tokens.truncate(start);
                    known.tokens.extend(&drawn);
                }
                for position in start..end {
                    let slot = (hash_of(known.salt, &known.tokens[..=position]), plan.writes_draft);
                    for (group, table) in lane.table.iter().enumerate() {
                        let size = self.ledger.group_spec(group).unwrap().page_size as usize;
                        self.slots.insert((group, table[position / size], (position % size) as i64), slot);
                    }
                }
                (known.written, known.is_checked) = (end, true);
            }
            self.plans.get_mut(&plan.step).unwrap().1.extend(accept_len.map(|num| num as i32));
        }
        if fails {
            self.ledger.abandon(plan.step).unwrap();
            let ledger = &self.ledger;
            self.rows.retain(|&row, _| ledger.is_live(Row(row)));
        }
    }

    /// The device runs everything up to the step.
    fn run_up_to(&mut self, step: u64) {
        while self.launched.front().is_some_and(|launched| launched.plan.step <= step) {
            self.run(false);
        }
    }

    fn resolve(&mut self) {
        let oldest =
            self.ledger.steps().find(|(_, kind, state)| *kind == StepKind::Decode && state.name() == "launched");
        if let Some((step, ..)) = oldest {
            self.run_up_to(step);
            self.ledger.resolve(step, &self.plans[&step].1).unwrap();
        }
    }

    fn complete(&mut self) {
        let done = self.ledger.completed();
        let waits = |&(step, _, state): &(u64, StepKind, StepState)| {
            step > done && matches!(state.name(), "launched" | "resolved")
        };
        let oldest = self.ledger.steps().find(waits);
        if let Some((step, ..)) = oldest {
            self.run_up_to(step);
            self.ledger.complete(step).unwrap();
        }
    }

    fn cancel(&mut self) {
        let newest = self.ledger.steps().filter(|(.., state)| matches!(state.name(), "prepared" | "stale")).last();
        if let Some((step, ..)) = newest {
            self.ledger.cancel(step).unwrap();
        }
    }

    fn index(&mut self) {
        let Some(row) = self.some_row() else { return };
        let (known, resolved) = (&self.rows[&row], self.ledger.resolved_len()[row as usize] as usize);
        if resolved == 0 {
            return;
        }
        let (tokens, salt) = (known.tokens[..resolved.min(known.tokens.len())].to_vec(), known.salt);
        let len = if self.rng.random_bool(0.7) { tokens.len() } else { self.rng.random_range(1..=tokens.len()) };
        let before = (self.ledger.state_hash(), self.ledger.digest());
        match self.ledger.index(Row(row), &tokens[..len], SALTS[salt]) {
            Ok(done) => {
                assert!(done as usize <= len);
                let known = known_len(&self.ledger, &tokens[..done as usize], SALTS[salt], false);
                assert!(known == done as usize || self.has_windows(), "{known} of {done} tokens are known");
                self.indexed.push((salt, tokens[..done as usize].to_vec()));
            }
            Err(Error::NotReady(_)) => assert_eq!((self.ledger.state_hash(), self.ledger.digest()), before),
            Err(error) => panic!("{error}"),
        }
    }

    fn shorten(&mut self) {
        let Some(row) = self.some_row() else { return };
        let len = self.rng.random_range(0..=self.rows[&row].written as i32);
        let before = self.ledger.index_size().1;
        let cut = if self.rng.random_bool(0.5) {
            self.ledger.trim(Row(row), len)
        } else {
            self.ledger.end_turn(Row(row), len)
        };
        if self.ledger.index_size().1 < before {
            self.read_index(); // the row may write over tokens that were indexed
        }
        // What is on its way for the row writes on behind the cut. What follows is another text.
        let (keep, more) = (cut.unwrap() as usize, self.rng.random_range(1..6));
        let new: Vec<i32> = (keep..(keep + more).min(58)).map(|_| self.rng.random_range(0..3)).collect();
        let life = self.live(keep);
        let known = self.rows.get_mut(&row).unwrap();
        (known.written, known.life) = (keep, life);
        known.tokens.truncate(keep);
        known.tokens.extend(new);
    }

    /// Takes what the index has for what was indexed, because a cut made it forget.
    fn read_index(&mut self) {
        let mut path = Vec::new();
        self.indexed.clear();
        for entry in self.ledger.index_entries() {
            path.truncate(entry.start);
            path.extend_from_slice(entry.tokens);
            let salt = SALTS.iter().position(|&salt| salt == entry.salt).unwrap();
            self.indexed.push((salt, path.clone()));
        }
    }

    fn end(&mut self) {
        let Some(row) = self.some_row() else { return };
        self.ledger.finish(Row(row)).unwrap();
        self.rows.remove(&row);
    }

    fn fork(&mut self) {
        let Some(row) = self.some_row() else { return };
        if let Ok(child) = self.ledger.fork(Row(row), None) {
            let parent = &self.rows[&row];
            self.seat(child, parent.tokens.clone(), parent.salt, parent.written);
        }
    }

    fn pin(&mut self) {
        let Some(row) = self.some_row() else { return };
        let len = self.rng.random_range(1..60);
        if let Ok(prefix) = self.ledger.pin_prefix(Row(row), len) {
            let (len, known) = (self.ledger.prefix_len(prefix).unwrap() as usize, &self.rows[&row]);
            self.pins.push((prefix, known.tokens[..len].to_vec(), known.salt));
        }
    }

    fn use_pin(&mut self) {
        if self.pins.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.pins.len());
        if self.pins.len() > 2 || self.rng.random_bool(0.4) {
            let (prefix, ..) = self.pins.remove(at);
            self.ledger.release_prefix(prefix).unwrap();
            return;
        }
        let (prefix, tokens, salt) = self.pins[at].clone();
        let len = self.rng.random_range(0..=tokens.len());
        if let Ok(row) = self.ledger.admit_on(prefix, Some(len as i32), None) {
            let mut text = tokens[..len].to_vec();
            text.extend((0..3).map(|_| self.rng.random_range(0..3)));
            self.seat(row, text, salt, len);
        }
    }

    fn step(&mut self) {
        let evictions = self.ledger.index_size().2;
        if self.ledger.steps().any(|(.., state)| state == StepState::Stale) && self.rng.random_bool(0.5) {
            self.cancel();
        }
        match self.rng.random_range(0..49) {
            0..8 => self.admit(),
            8..14 => self.extend(),
            14..17 => self.decode(),
            17..25 => self.launch(),
            25..28 => self.resolve(),
            28..31 => self.complete(),
            31..35 => self.index(),
            35 => self.shorten(),
            36..40 => self.end(),
            40 => self.fork(),
            41 => self.cancel(),
            42..46 => self.run(false),
            46 if self.rng.random_bool(0.2) => self.run(true),
            47 => self.pin(),
            48 => self.use_pin(),
            _ if self.rng.random_bool(0.1) => {
                let salt = self.rng.random_bool(0.5).then_some(SALTS[1]);
                self.ledger.forget(salt).unwrap();
                self.indexed.retain(|(of, _)| salt.is_some() && *of != 1);
            }
            _ => {}
        }
        self.is_complete &= self.ledger.index_size().2 == evictions;
        self.check();
    }

    /// Every invariant of the ledger, the contents of the index, and those of every row that no copy still fills.
    fn check(&self) {
        self.ledger.check().unwrap();
        check_index(&self.ledger, &self.slots);
        for (&row, known) in self.rows.iter().filter(|(_, known)| known.is_checked) {
            let drafted = self.ledger.drafted_len()[row as usize] as usize;
            for at in 0..self.ledger.num_groups() {
                let (size, window) = {
                    let spec = self.ledger.group_spec(at).unwrap();
                    (spec.page_size, spec.window.unwrap_or(1 << 20))
                };
                let table = self.ledger.page_table(at).unwrap().row(Row(row));
                let first =
                    (known.written as i64 - window + 1).max(self.ledger.evicted_len(at).unwrap()[row as usize].into());
                for position in first.max(0) as usize..known.written {
                    let page = table[position / size as usize];
                    let (found, is_drafted) = self.slots[&(at, page, position as i64 % size)];
                    assert_eq!(
                        found,
                        hash_of(known.salt, &known.tokens[..=position]),
                        "row {row} group {at} at {position}"
                    );
                    assert!(is_drafted || position >= drafted, "row {row} group {at}: draft KV at {position}");
                }
            }
        }
    }
}

/// A replay of a recorded world ends in the same state.
#[test]
fn a_recorded_world_replays() {
    for (at, geometry) in GEOMETRIES.iter().enumerate() {
        let path = std::env::temp_dir().join(format!("specpool-world-{at}-{}.log", std::process::id()));
        let mut world = World::new(geometry, 7_000 + at as u64);
        world.ledger = Ledger::recorded(world.ledger.config(), &path, 1 << 30).unwrap();
        let mut hashes = vec![];
        for _ in 0..400 {
            world.step();
            hashes.push((world.ledger.digest(), world.ledger.state_hash()));
        }
        world.ledger.close().unwrap();
        let mut replay = Replay::open(&path).unwrap();
        let mut again = replay.ledger().unwrap();
        let mut calls = 0;
        while let Some(run) = replay.advance(&mut again).unwrap() {
            calls += 1;
            if let Some((_, hash)) = hashes.iter().find(|(digest, _)| *digest == again.digest()) {
                assert_eq!(again.state_hash(), *hash, "geometry {at}, {run}");
            }
        }
        assert!(calls > 100);
        std::fs::remove_file(&path).unwrap();
    }
}

fn runs(default: u64) -> u64 {
    std::env::var("SPECPOOL_RUNS").map_or(default, |runs| runs.parse().unwrap())
}

#[test]
fn a_hit_holds_the_kv_of_its_tokens_and_is_as_long_as_it_can_be() {
    let (mut num_hits, mut num_evictions) = (0, 0);
    for (at, geometry) in GEOMETRIES.iter().enumerate() {
        for seed in 0..runs(12) {
            let mut world = World::new(geometry, seed * 100 + at as u64);
            for step in 0..600 {
                let run = std::panic::AssertUnwindSafe(|| world.step());
                let outcome = std::panic::catch_unwind(run);
                assert!(outcome.is_ok(), "geometry {at}, seed {seed}, step {step}");
            }
            num_hits += world.num_hits;
            num_evictions += world.ledger.index_size().2;
        }
    }
    let num_steps = runs(12) * 600 * GEOMETRIES.len() as u64;
    println!("{num_steps} random calls, {num_hits} hits, {num_evictions} evictions");
    assert!(num_hits > 500 && num_evictions > 200, "{num_hits} hits, {num_evictions} evictions");
}

/// One state of a small ledger, with the contents of its pages.
#[derive(Clone)]
struct Node {
    ledger: Ledger,
    slots: HashMap<(usize, i32, i64), Slot>,
    /// Text and salt of each row.
    rows: BTreeMap<i32, (usize, usize)>,
}

/// What can be done in a state. Rows are numbered from 1.
#[derive(Debug, Clone, Copy)]
enum Do {
    Admit { text: usize, salt: usize, needs_draft: bool },
    Extend { row: i32, by: i32, writes_draft: bool },
    Complete,
    Index { row: i32 },
    Trim { row: i32 },
    Fork { row: i32 },
    Finish { row: i32 },
    Forget,
}

/// Texts with beginnings of 0 to 4 tokens in common.
const TEXTS: [[i32; 5]; 3] = [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 0, 1]];

impl Node {
    fn new(geometry: Geometry, spare: i64) -> Self {
        let ledger_with = |pages: &[i64]| {
            let groups = geometry.iter().zip(pages).enumerate();
            let groups = groups.map(|(at, (&(size, window), &pages))| group(&at.to_string(), size, pages, window));
            let mut config = LedgerConfig::new(groups.collect(), vec![], 2, 6);
            (config.overlap_depth, config.sessions) = (1, true);
            Ledger::new(config)
        };
        let mut pages = vec![1; geometry.len()];
        for at in 0..geometry.len() {
            let mut other = vec![50; geometry.len()];
            let fits = |pages: i64, other: &mut Vec<i64>| {
                other[at] = pages;
                ledger_with(other).is_ok()
            };
            pages[at] = (1..50).find(|&pages| fits(pages, &mut other)).unwrap() + spare;
        }
        Self { ledger: ledger_with(&pages).unwrap(), slots: HashMap::new(), rows: BTreeMap::new() }
    }

    fn choices(&self) -> Vec<Do> {
        let mut all = vec![Do::Complete, Do::Forget];
        for text in 0..TEXTS.len() {
            all.extend([false, true].map(|needs_draft| Do::Admit { text, salt: 0, needs_draft }));
        }
        all.push(Do::Admit { text: 0, salt: 1, needs_draft: false });
        for &row in self.rows.keys() {
            let extends = [(1, true), (2, false), (3, true)];
            all.extend(extends.map(|(by, writes_draft)| Do::Extend { row, by, writes_draft }));
            all.extend([Do::Index { row }, Do::Trim { row }, Do::Fork { row }, Do::Finish { row }]);
        }
        all
    }

    /// Does it, unless the ledger refuses; whether it did.
    fn act(&mut self, what: Do) -> bool {
        let resolved = |node: &Self, row: i32| node.ledger.resolved_len()[row as usize];
        match what {
            Do::Admit { text, salt, needs_draft } => {
                match self.ledger.admit_cached(&TEXTS[text], SALTS[salt], Some(4), needs_draft, None) {
                    Ok(row) => drop(self.rows.insert(row.0, (text, salt))),
                    Err(_) => return false,
                }
            }
            Do::Extend { row, by, writes_draft } => {
                let (from, to) = (resolved(self, row), (resolved(self, row) + by).min(5));
                let Ok(plan) = self.ledger.prepare_extend(&[row], &[to], writes_draft) else { return false };
                self.ledger.launch(plan.step).unwrap();
                for copy in &plan.page_copies {
                    for at in 0..copy.tokens.into() {
                        let group = copy.group as usize;
                        let slot = self.slots[&(group, copy.src, at)];
                        self.slots.insert((group, copy.dst, at), slot);
                    }
                }
                let (text, salt) = self.rows[&row];
                for at in 0..self.ledger.num_groups() {
                    let size = self.ledger.group_spec(at).unwrap().page_size;
                    let table = self.ledger.page_table(at).unwrap().row(Row(row)).to_vec();
                    for position in from..to {
                        let page = table[position as usize / size as usize];
                        let slot = (hash_of(salt, &TEXTS[text][..=position as usize]), writes_draft);
                        self.slots.insert((at, page, i64::from(position) % size), slot);
                    }
                }
            }
            Do::Complete => {
                let done = self.ledger.completed();
                let oldest = self.ledger.steps().map(|(step, ..)| step).find(|&step| step > done);
                let Some(step) = oldest else { return false };
                self.ledger.complete(step).unwrap();
            }
            Do::Index { row } => {
                let (text, salt) = self.rows[&row];
                let len = resolved(self, row) as usize;
                return self.ledger.index(Row(row), &TEXTS[text][..len], SALTS[salt]).is_ok();
            }
            Do::Trim { row } => {
                if resolved(self, row) == 0 {
                    return false;
                }
                self.ledger.trim(Row(row), resolved(self, row) - 1).unwrap();
            }
            Do::Fork { row } => match self.ledger.fork(Row(row), None) {
                Ok(child) => drop(self.rows.insert(child.0, self.rows[&row])),
                Err(_) => return false,
            },
            Do::Finish { row } => {
                self.ledger.finish(Row(row)).unwrap();
                self.rows.remove(&row);
            }
            Do::Forget => self.ledger.forget(None).unwrap(),
        }
        true
    }

    /// Every invariant, and the contents of the index: what a hit would give is what its tokens give.
    fn check(&self) {
        self.ledger.check().unwrap();
        check_index(&self.ledger, &self.slots);
    }

    fn hash(&self) -> u64 {
        let (mut hasher, mut names) = (DefaultHasher::new(), PageNames::default());
        self.ledger.write_normal_form(&mut names, &mut |word| word.hash(&mut hasher));
        self.ledger.write_normal_pages(&names, &mut |word| word.hash(&mut hasher));
        self.rows.hash(&mut hasher);
        for at in 0..self.ledger.num_groups() {
            let size = self.ledger.group_spec(at).unwrap().page_size;
            let mut named: Vec<_> = names.named(at).collect();
            named.sort_unstable_by_key(|&(_, name)| name);
            for (page, _) in named {
                (0..size).for_each(|offset| self.slots.get(&(at, page, offset)).hash(&mut hasher));
            }
        }
        hasher.finish()
    }
}

/// Page sizes and windows of the ledgers that are enumerated.
const SMALL: [Geometry; 6] =
    [&[(1, None)], &[(2, None)], &[(4, None)], &[(2, None), (3, None)], &[(2, None), (1, Some(2))], &[(2, Some(3))]];

/// Every state of small ledgers that few calls lead to, up to a number of states.
#[test]
fn every_state_of_small_ledgers_is_sound() {
    let most: usize = std::env::var("SPECPOOL_STATES").map_or(3_000, |states| states.parse().unwrap());
    let (mut num_states, mut num_moves) = (0, 0);
    for (geometry, spare) in SMALL.iter().flat_map(|geometry| [(geometry, 0), (geometry, 2)]) {
        let first = Node::new(geometry, spare);
        let mut seen = HashSet::from([first.hash()]);
        let mut queue = VecDeque::from([first]);
        while let Some(node) = queue.pop_front().filter(|_| seen.len() < most) {
            for what in node.choices() {
                let mut next = node.clone();
                if !next.act(what) {
                    continue;
                }
                num_moves += 1;
                if seen.insert(next.hash()) {
                    next.check();
                    queue.push_back(next);
                }
            }
        }
        num_states += seen.len();
    }
    println!("{num_states} states of ledgers with an index, {num_moves} calls");
    assert!(num_states > 10 * most && num_moves > num_states, "{num_states} states, {num_moves} moves");
}
