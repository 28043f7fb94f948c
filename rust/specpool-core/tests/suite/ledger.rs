//! Compares the ledger with a plain model over random operations. Both must refuse the same calls with the same
//! numbers, and have the same lengths and the same shared and fenced pages. The audit must be clean after each
//! operation, and a refused call must change nothing.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::decode::{OP_BYTES, decode};
use crate::model::ask::{ask, outcome};
use crate::model::same::{PageMap, same};
use crate::model::states::same_folds;
use crate::model::{self, Model, Outcome};
use crate::pools::least_pages;
use crate::scene::{Scene, SceneRow, SceneStep};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
use specpool_core::{
    Call, Error, Given, Group, Layout, Ledger, LedgerConfig, Plan, Policy, Row, Shape, Snapshots, StateGroup, StepState,
};

/// The model, its last call and its last answer.
#[derive(Debug, Clone)]
struct Reference {
    config: LedgerConfig,
    model: Model,
    last: Option<(Call<'static>, Outcome)>,
}

/// One operation, undecoded.
#[derive(Clone)]
struct Bytes([u8; OP_BYTES]);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// What the decoder sees of the model. The ledger must look the same.
fn scene_of(config: &LedgerConfig, model: &Model) -> Scene {
    let row = |row: &model::ModelRow| SceneRow {
        live: row.live,
        resolved: row.resolved,
        in_flight: row.rounds.len() as i32,
        has_root: row.has_root,
        protected: 0,
    };
    let step = |step: &model::ModelStep| SceneStep {
        step: step.step,
        is_extend: step.is_extend,
        state: match (step.launched, step.resolved) {
            (false, _) if model.is_stale(step) => StepState::Stale,
            (false, _) => StepState::Prepared,
            (true, false) => StepState::Launched,
            (true, true) => StepState::Resolved,
        },
        is_complete: step.step <= model.completed,
        rows: step.lanes.iter().map(|lane| lane.row as i32).collect(),
        shapes: step.lanes.iter().map(|lane| lane.shape as i32).collect(),
    };
    Scene {
        max_context_len: config.max_context_len as i32,
        overlap_depth: config.overlap_depth as i32,
        max_chunk: config.max_chunk.unwrap_or(config.max_context_len) as i32,
        max_batch: config.max_batch.unwrap_or(config.num_rows) as usize,
        has_index: false,
        // The model runs ahead of the ledger here, and a loan names the ledger's pages: `specpool-check` has them.
        has_loans: false,
        has_moves: true,
        has_sessions: config.sessions || config.groups.iter().all(|group| group.window.is_none()),
        max_accept_lens: model.shapes.iter().map(|&(most, _)| most).collect(),
        rows: model.rows.iter().map(row).collect(),
        steps: model.steps.iter().map(step).collect(),
        prefixes: model.prefixes.iter().map(|(&prefix, state)| (prefix, state.len)).collect(),
        ..Scene::default()
    }
}

const CONTEXT: i64 = 30;

fn any_window() -> impl Strategy<Value = Option<i64>> {
    prop_oneof![2 => Just(None), 1 => (1_i64..12).prop_map(Some)]
}

/// In one ledger of three a state group, with slots from the least on.
fn any_states() -> impl Strategy<Value = Option<(i64, i64, bool)>> {
    prop_oneof![2 => Just(None), 1 => (0_i64..5, 1_i64..5, any::<bool>()).prop_map(Some)]
}

/// One or two groups of any page sizes and kinds, with pools from the smallest allowed on.
fn any_config() -> impl Strategy<Value = LedgerConfig> {
    let group = || (1_i64..6, any_window(), 0_i64..24);
    let flags = (any::<[bool; 6]>(), 0_i64..3, 1_i64..5, prop::option::of(4_i64..20));
    (group(), prop::option::of(group()), any_states(), flags).prop_map(|(first, second, states, flags)| {
        let (flags, depth, num_rows, max_chunk) = flags;
        let [exact, holey, draft_kv, sessions, page_fencing, one_batch] = flags;
        let layout = if holey { Layout::Holey } else { Layout::Dense };
        let of = |name: &str, (page_size, window, _): (i64, Option<i64>, i64), hosts_drafts: bool| {
            let layout = if hosts_drafts { layout } else { Layout::Dense };
            Group { name: name.into(), page_size, num_pages: 1 << 20, hosts_drafts, layout, window, sink: 0 }
        };
        let split = second.map(|second| of("target", second, false));
        let groups: Vec<Group> = split.into_iter().chain([of("draft", first, true)]).collect();
        let slack: Vec<i64> = second.into_iter().chain([first]).map(|(_, _, slack)| slack).collect();
        let shapes = vec![
            Shape::NONE,
            Shape::eagle(2, 1, 3).unwrap(),
            Shape::eagle(2, 2, 4).unwrap(),
            Shape::new(1, 1, 1).unwrap(),
        ];
        let mut config = LedgerConfig::new(groups, shapes, num_rows, CONTEXT);
        config.policy = if exact { Policy::Exact } else { Policy::DoubleBuffer };
        config.overlap_depth = depth;
        (config.draft_kv, config.sessions, config.page_fencing) = (draft_kv, sessions, page_fencing);
        config.max_chunk = max_chunk;
        config.max_batch = (one_batch && num_rows > 1).then_some(num_rows - 1);
        config.digest = true;
        let state_group = |(more, flush, eager): (i64, i64, bool)| {
            let num_slots = 1 + i64::from(sessions) + more;
            StateGroup { name: "states".into(), num_slots, flush, eager }
        };
        config.states = states.map(state_group).into_iter().collect();
        for (group, slack) in slack.into_iter().enumerate() {
            config.groups[group].num_pages = least_pages(&config, group) + slack;
        }
        config
    })
}

impl ReferenceStateMachine for Reference {
    type State = Self;
    type Transition = Bytes;

    fn init_state() -> BoxedStrategy<Self> {
        any_config().prop_map(|config| Self { model: Model::new(&config), config, last: None }).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Self::Transition> {
        any::<[u8; OP_BYTES]>().prop_map(Bytes).boxed()
    }

    fn apply(mut state: Self, bytes: &Bytes) -> Self {
        let op = decode(&bytes.0, &scene_of(&state.config, &state.model));
        let said = ask(&mut state.model, &op);
        state.last = Some((op, said));
        state
    }
}

/// The ledger, and what an embedder would track of it.
#[derive(Debug)]
struct Followed {
    ledger: Ledger,
    pages: PageMap,
    /// Per group: a device's copy of the table, which only acknowledged deltas change.
    device: Vec<Vec<i32>>,
    /// The turn of the newest take that is acknowledged.
    device_turn: u64,
    /// Per step with a delta taken: the table that the device has once it is applied, and the turn of the take.
    taken: BTreeMap<u64, (Vec<Vec<i32>>, u64)>,
    /// Per group and cell: the turn in which it last changed, while the change is not acknowledged.
    pending: BTreeMap<(usize, usize), u64>,
    turn: u64,
    history: Vec<Call<'static>>,
}

fn tables(ledger: &Ledger) -> Vec<Vec<i32>> {
    (0..ledger.num_groups()).map(|group| ledger.page_table(group).unwrap().cells().to_vec()).collect()
}

impl Followed {
    fn new(config: LedgerConfig) -> Self {
        let ledger = Ledger::new(config).unwrap();
        let device = tables(&ledger);
        let pages = vec![BTreeMap::new(); device.len() + 1];
        let (taken, pending) = (BTreeMap::new(), BTreeMap::new());
        Self { ledger, pages, device, device_turn: 0, taken, pending, turn: 0, history: Vec::new() }
    }

    /// Runs one operation, and checks everything that must hold after it.
    fn step(&mut self, model: &Model, op: &Call<'_>, expected: &Outcome, bytes: &Bytes) {
        let scene = Scene { has_moves: true, ..Scene::of(&self.ledger) };
        assert_eq!(decode(&bytes.0, &scene), *op, "the model and the ledger look alike before");
        let (before, hash, digest) = (tables(&self.ledger), self.ledger.state_hash(), self.ledger.digest());
        let evicted = evicted_lens(&self.ledger);
        let estimate = match op {
            Call::PrepareDecode { rows, shapes, .. } => self.ledger.tokens_required(rows, shapes).ok(),
            _ => None,
        };
        let found = op.run(&mut self.ledger, None, &mut Snapshots::default());
        assert_eq!(outcome(&found), *expected, "{op:?}: {found:?}");
        self.turn += 1;
        if let Ok(given) = &found {
            self.follow(op, given, &before);
        } else {
            assert_eq!((hash, digest), (self.ledger.state_hash(), self.ledger.digest()), "{op:?} was refused");
            assert_eq!(before, tables(&self.ledger));
        }
        if let Ok(Given::Plan(plan)) = &found {
            check_plan(self, model, plan, estimate.as_deref());
            check_undo(&self.ledger, plan, hash, &evicted);
        }
        assert_eq!(same(&self.ledger, model, &mut self.pages), Ok(()));
        assert_eq!(self.ledger.check(), Ok(()));
    }

    /// Checks the deltas: at most one entry per cell, and exactly the cells that changed since the last acknowledged
    /// take.
    fn follow(&mut self, op: &Call<'_>, given: &Given, before: &[Vec<i32>]) {
        let now = tables(&self.ledger);
        for (group, (before, now)) in before.iter().zip(&now).enumerate() {
            for cell in (0..now.len()).filter(|&cell| now[cell] != before[cell]) {
                self.pending.insert((group, cell), self.turn);
            }
        }
        match (op, given) {
            (Call::TakeDelta { step }, Given::Delta(delta)) => {
                let mut device = self.device.clone();
                let mut changed = Vec::new();
                for (group, entries) in delta.iter().enumerate() {
                    let columns = self.ledger.page_table(group).unwrap().pages_per_row();
                    for at in 0..entries.rows.len() {
                        let cell = entries.rows[at] as usize * columns + entries.columns[at] as usize;
                        device[group][cell] = entries.pages[at];
                        changed.push((group, cell));
                    }
                }
                changed.sort_unstable();
                assert!(changed.iter().eq(self.pending.keys()), "{changed:?} {:?}", self.pending);
                assert_eq!(device, now, "the delta brings the copy up to date");
                self.taken.insert(*step, (device, self.turn));
            }
            (Call::AckDelta { step }, _) => {
                let (device, turn) = self.taken[step].clone();
                if turn > self.device_turn {
                    (self.device, self.device_turn) = (device, turn);
                }
                self.pending.retain(|_, changed| *changed > turn);
                self.taken = self.taken.split_off(&(step + 1));
            }
            _ => {}
        }
    }
}

impl StateMachineTest for Followed {
    type SystemUnderTest = Self;
    type Reference = Reference;

    fn init_test(reference: &Reference) -> Self {
        Self::new(reference.config.clone())
    }

    fn apply(mut sut: Self, reference: &Reference, bytes: Bytes) -> Self {
        let (op, expected) = reference.last.clone().unwrap();
        sut.history.push(op.clone());
        let step = AssertUnwindSafe(|| sut.step(&reference.model, &op, &expected, &bytes));
        if let Err(fault) = catch_unwind(step) {
            let fault = fault.downcast_ref::<String>().map_or("a panic", String::as_str);
            panic!("{fault}\n{:#?}\nthe last of {:#?}", reference.config, sut.history);
        }
        sut
    }

    /// Checks that nothing leaks: with every request, prefix and step gone, the pools are full.
    fn teardown(mut sut: Self, reference: Reference) {
        let ledger = &mut sut.ledger;
        for row in 1..=ledger.num_rows() {
            ledger.abort(Row(row as i32)).ok();
        }
        for prefix in ledger.prefixes().collect::<Vec<_>>() {
            ledger.release_prefix(prefix).unwrap();
        }
        for step in reference.model.steps.iter().rev().filter(|step| !step.launched) {
            ledger.cancel(step.step).unwrap();
        }
        if let Some(step) = reference.model.steps.iter().rev().find(|step| step.launched) {
            ledger.complete(step.step).unwrap();
        }
        for (group, spec) in reference.config.groups.iter().enumerate() {
            assert_eq!(ledger.free_pages(group).unwrap() as i64, spec.num_pages, "a page leaked");
        }
        for (group, spec) in reference.config.states.iter().enumerate() {
            assert_eq!(ledger.free_state_slots(group).unwrap() as i64, spec.num_slots, "a state slot leaked");
        }
        assert_eq!(ledger.num_free_rows(), ledger.num_rows());
        assert_eq!(ledger.check(), Ok(()));
    }
}

/// Checks that the plan equals the model's, and took what the estimate said.
fn check_plan(followed: &Followed, model: &Model, plan: &Plan, estimate: Option<&[i64]>) {
    let step = model.steps.last().unwrap();
    let lanes = || step.lanes.iter();
    assert!(lanes().map(|lane| lane.row as i32).eq(plan.rows.iter().copied()));
    assert!(lanes().map(|lane| lane.shape as i32).eq(plan.shapes.iter().copied()));
    assert!(lanes().map(|lane| lane.epoch).eq(plan.epochs.iter().copied()));
    assert!(lanes().map(|lane| (lane.lo, lane.hi)).eq(plan.lo.iter().copied().zip(plan.hi.iter().copied())));
    assert!(lanes().map(|lane| lane.start).eq(plan.start.iter().copied()));
    let new_len = |lane: &model::Lane| model.rows[lane.row].resolved;
    assert!(lanes().map(new_len).eq(plan.new_len.iter().copied()));
    let (before, after) =
        (plan.allocated_before.chunks(plan.num_lanes()), plan.allocated_after.chunks(plan.num_lanes()));
    for (group, (before, after)) in before.zip(after).enumerate() {
        let held = |lane: &model::Lane| model.rows[lane.row].groups[group].allocated;
        assert!(lanes().map(|lane| lane.allocated[group]).eq(before.iter().map(|&slots| slots.into())));
        assert!(lanes().map(held).eq(after.iter().map(|&slots| slots.into())));
        if let Some(estimate) = estimate {
            let taken: i64 = before.iter().zip(after).map(|(&before, &after)| i64::from(after - before)).sum();
            assert_eq!(estimate[group], taken, "the estimate is exact");
        }
    }
    assert_eq!(same_folds(plan, step), Ok(()));
    assert_eq!(plan.page_copies.len(), step.copies.len());
    for (copy, expected) in plan.page_copies.iter().zip(&step.copies) {
        assert_eq!((copy.group as usize, i64::from(copy.tokens)), (expected.group, expected.tokens));
        for (found, page) in [(copy.src, expected.src), (copy.dst, expected.dst)] {
            assert!(followed.pages[expected.group].get(&page).is_none_or(|&name| name == found));
        }
    }
}

/// Checks that a cancel restores the state bit for bit, if the prepare evicted nothing.
fn check_undo(ledger: &Ledger, plan: &Plan, hash: u64, evicted: &[Vec<i32>]) {
    if evicted == evicted_lens(ledger) {
        let mut undone = ledger.clone();
        undone.cancel(plan.step).unwrap();
        assert_eq!(undone.state_hash(), hash, "cancel of step {}", plan.step);
    }
}

fn evicted_lens(ledger: &Ledger) -> Vec<Vec<i32>> {
    (0..ledger.num_groups()).map(|group| ledger.evicted_len(group).unwrap().to_vec()).collect()
}

proptest_state_machine::prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_agree_with_the_model(sequential 1..200 => Followed);
}

/// Pages that a row of `root` tokens, with no round in flight, holds once a round of shape 1 is prepared.
fn pages_held(ledger: &mut Ledger, root: i32) -> i64 {
    let row = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[root], true).unwrap().step;
    ledger.launch(step).unwrap();
    let plan = ledger.prepare_decode(&[row.0], &[1], true).unwrap();
    ledger.cancel(plan.step).unwrap();
    ledger.finish(row).unwrap();
    ledger.complete(step).unwrap();
    i64::from(plan.allocated_after[0]) / ledger.group_spec(0).unwrap().page_size
}

/// `pages_needed` is the most that any root of the range makes a row hold: it is enough for each root, and one root
/// takes all.
#[test]
fn pages_needed_suffices_and_is_reached() {
    const L: i32 = 13;
    for (page_size, policy, depth) in
        (1..=5).flat_map(|p| [(p, Policy::Exact, 0), (p, Policy::DoubleBuffer, 0), (p, Policy::DoubleBuffer, 1)])
    {
        for (hosts_drafts, layout) in [(false, Layout::Dense), (true, Layout::Dense), (true, Layout::Holey)] {
            for (s, k, n) in (0..4).flat_map(|s| (1..4).flat_map(move |k| [1, 2, 5, 9].map(|n| (s, k, n)))) {
                let group =
                    Group { name: "kv".into(), page_size, num_pages: 200, hosts_drafts, layout, window: None, sink: 0 };
                // The same shape twice would add nothing: shape 0 is there already.
                let shape = if (s, k, n) == (0, 1, 1) { continue } else { Shape::new(s, k, n).unwrap() };
                let mut config = LedgerConfig::new(vec![group], vec![shape], 1, L.into());
                (config.policy, config.overlap_depth) = (policy, depth);
                let mut ledger = Ledger::new(config).unwrap();
                let held: Vec<i64> = (1..L).map(|root| pages_held(&mut ledger, root)).collect();
                for lo in 1..L {
                    for hi in lo..L {
                        let most = held[lo as usize - 1..hi as usize].iter().max().copied();
                        let found = ledger.pages_needed(lo, hi, 1).unwrap();
                        assert_eq!(Some(found[0]), most, "P={page_size} {policy:?} {layout:?} {shape:?} [{lo}, {hi}]");
                    }
                }
            }
        }
    }
}

#[test]
fn a_shape_written_by_hand_is_checked_too() {
    let group = Group {
        name: "kv".into(),
        page_size: 4,
        num_pages: 9,
        hosts_drafts: true,
        layout: Layout::Holey,
        window: None,
        sink: 0,
    };
    for (num_steps, topk, num_draft_tokens) in [(u32::MAX, u32::MAX, 4), (2, 0, 4), (2, 1, 0)] {
        let shape = Shape { num_steps, topk, num_draft_tokens };
        let built = Ledger::new(LedgerConfig::new(vec![group.clone()], vec![shape], 1, 8));
        assert!(matches!(built, Err(Error::Config(_))));
    }
}
