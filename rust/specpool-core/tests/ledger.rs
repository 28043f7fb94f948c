//! The ledger against a plain model, over random operations: the same outcome, the same lengths, a clean audit after
//! each one, and a refused call changes nothing.

mod model;

use model::{Model, Outcome};
use proptest::prelude::*;
use specpool_core::sizing::{self, Geometry};
use specpool_core::{Error, Group, Layout, Ledger, LedgerConfig, Policy, Row, Shape};

#[derive(Debug, Clone)]
enum Op {
    Admit,
    Extend {
        rows: Pick,
        add: Vec<i32>,
        writes_draft: bool,
    },
    Decode {
        rows: Pick,
        shapes: Vec<usize>,
        writes_draft: bool,
    },
    Launch {
        step: usize,
    },
    Resolve {
        step: usize,
        accepts: Vec<i32>,
    },
    Complete {
        step: usize,
    },
    /// Any number at all: also one long over, one cancelled, one yet to come.
    CompleteAny {
        step: u64,
    },
    Cancel {
        step: usize,
    },
    Trim {
        row: usize,
        len: i32,
    },
    GiveBack {
        row: usize,
        how: u8,
    },
}

/// Rows of a batch: those of a mask that can most likely take part, or any numbers at all.
#[derive(Debug, Clone)]
enum Pick {
    Able(Vec<bool>),
    Any(Vec<usize>),
}

impl Pick {
    fn rows(&self, able: impl Fn(usize) -> bool) -> Vec<usize> {
        match self {
            Self::Able(mask) => (1..=ROWS).filter(|&row| mask[row - 1] && able(row)).collect(),
            Self::Any(rows) => rows.clone(),
        }
    }
}

const ROWS: usize = 4;
const CONTEXT: i32 = 30;

fn some_rows() -> impl Strategy<Value = Pick> {
    prop_oneof![
        12 => prop::collection::vec(prop::bool::weighted(0.7), ROWS).prop_map(Pick::Able),
        1 => prop::collection::vec(0..=ROWS + 1, 0..4).prop_map(Pick::Any),
    ]
}

fn any_op() -> impl Strategy<Value = Op> {
    // Steps are named by their place among those that can take the verb, mostly 0, the one whose turn it is.
    let step = || prop_oneof![8 => Just(0_usize), 1 => 0..6_usize];
    let accepts = || prop_oneof![20 => Just(1), 10 => Just(2), 1 => 0..6_i32];
    prop_oneof![
        2 => Just(Op::Admit),
        4 => (some_rows(), prop::collection::vec(prop_oneof![20 => 1..9_i32, 1 => -1..40_i32], 5), prop::bool::weighted(0.9))
            .prop_map(|(rows, add, writes_draft)| Op::Extend { rows, add, writes_draft }),
        8 => (some_rows(), prop::collection::vec(0..4_usize, 5), prop::bool::weighted(0.9))
            .prop_map(|(rows, shapes, writes_draft)| Op::Decode { rows, shapes, writes_draft }),
        10 => step().prop_map(|step| Op::Launch { step }),
        8 => (step(), prop::collection::vec(accepts(), 5)).prop_map(|(step, accepts)| Op::Resolve { step, accepts }),
        3 => step().prop_map(|step| Op::Complete { step }),
        1 => (0..50_u64).prop_map(|step| Op::CompleteAny { step }),
        2 => step().prop_map(|step| Op::Cancel { step }),
        1 => (0..=ROWS + 1, -1..CONTEXT).prop_map(|(row, len)| Op::Trim { row, len }),
        1 => (0..=ROWS + 1, 0..3_u8).prop_map(|(row, how)| Op::GiveBack { row, how }),
    ]
}

/// Three rows with a launched prefill, so that most operations have something to work on.
fn warm_up() -> Vec<Op> {
    let rows = Pick::Able(vec![true; ROWS]);
    let extend = Op::Extend { rows, add: vec![3, 8, 4, 5], writes_draft: true };
    vec![Op::Admit, Op::Admit, Op::Admit, extend, Op::Launch { step: 0 }]
}

fn kind(error: &Error) -> &'static str {
    match error {
        Error::OutOfPages { .. } => "OutOfPages",
        Error::OutOfRows { .. } => "OutOfRows",
        Error::ContextEnd { .. } => "ContextEnd",
        Error::StalePlan { .. } => "StalePlan",
        Error::Order(_) => "Order",
        Error::NotReady(_) => "NotReady",
        Error::DraftLag { .. } => "DraftLag",
        Error::Shape(_) => "Shape",
        _ => "never",
    }
}

fn ints(values: &[usize]) -> Vec<i32> {
    values.iter().map(|&value| value as i32).collect()
}

/// Does `op` in both; the outcomes of ledger and model.
fn apply(ledger: &mut Ledger, model: &mut Model, op: &Op) -> (Outcome, Outcome) {
    let known = |launched: Option<bool>, age: usize, model: &Model| {
        let steps: Vec<u64> =
            model.steps.iter().filter(|s| launched.is_none_or(|want| s.launched == want)).map(|s| s.step).collect();
        steps.get(age).copied().unwrap_or(model.next_step + age as u64)
    };
    let say = |result: Result<(), Error>| result.map(|()| 0).map_err(|error| kind(&error));
    match op {
        Op::Admit => match ledger.admit(Some("request")) {
            Ok(row) => {
                model.admitted(row.at());
                (Ok(0), Ok(0))
            }
            Err(error) => (Err(kind(&error)), if model.free_rows() == 0 { Err("OutOfRows") } else { Ok(0) }),
        },
        Op::Extend { rows, add, writes_draft } => {
            let rows = &rows.rows(|row| model.rows[row].live && model.rows[row].rounds.is_empty());
            let base = |&row: &usize| model.rows.get(row).map_or(0, |row| row.resolved);
            let lens: Vec<i32> = rows.iter().zip(add).map(|(row, add)| base(row) + add).collect();
            let plan = ledger.prepare_extend(&ints(rows), &lens, *writes_draft);
            let found = plan.map(|plan| plan.step as i64).map_err(|error| kind(&error));
            (found, model.prepare_extend(rows, &lens, *writes_draft))
        }
        Op::Decode { rows, shapes, writes_draft } => {
            let rows = &rows.rows(|row| model.rows[row].has_root && model.rows[row].rounds.len() <= model.depth);
            let shapes = &shapes[..rows.len()];
            let before: Vec<usize> = (0..2).map(|group| ledger.free_pages(group).unwrap()).collect();
            let estimate = ledger.tokens_required(&ints(rows), &ints(shapes));
            let plan = ledger.prepare_decode(&ints(rows), &ints(shapes), *writes_draft);
            if plan.is_ok() {
                let estimate = estimate.unwrap();
                assert_eq!(estimate, model.tokens_required(rows, shapes));
                for (group, before) in before.into_iter().enumerate() {
                    let taken = before - ledger.free_pages(group).unwrap();
                    assert_eq!(estimate[group], taken as i64 * model.groups[group].page_size, "the estimate is exact");
                }
            }
            let found = plan.map(|plan| plan.step as i64).map_err(|error| kind(&error));
            (found, model.prepare_decode(rows, shapes, *writes_draft))
        }
        Op::Launch { step } => {
            let step = known(Some(false), *step, model);
            (say(ledger.launch(step)), model.launch(step))
        }
        Op::Resolve { step, accepts } => {
            let waiting: Vec<&model::ModelStep> = model.steps.iter().filter(|s| s.launched && !s.resolved).collect();
            let step = waiting.get(*step).map_or(known(None, *step, model), |s| s.step);
            let lanes = model.steps.iter().find(|s| s.step == step).map_or(0, |s| s.lanes.len());
            (say(ledger.resolve(step, &accepts[..lanes])), model.resolve(step, &accepts[..lanes]))
        }
        Op::Complete { step } => {
            let pending: Vec<u64> = model.steps.iter().map(|s| s.step).filter(|&s| s > model.completed).collect();
            let step = pending.get(*step).copied().unwrap_or(*step as u64);
            (say(ledger.complete(step)), model.complete(step))
        }
        Op::CompleteAny { step } => (say(ledger.complete(*step)), model.complete(*step)),
        Op::Cancel { step } => {
            let newest: Vec<u64> = model.steps.iter().rev().map(|s| s.step).collect();
            let step = newest.get(*step).copied().unwrap_or(*step as u64);
            (say(ledger.cancel(step)), model.cancel(step))
        }
        Op::Trim { row, len } => {
            let found = ledger.trim(Row(*row as i32), *len).map(i64::from).map_err(|error| kind(&error));
            (found, model.trim(*row, *len))
        }
        Op::GiveBack { row, how } => {
            let id = Row(*row as i32);
            let found = match how {
                0 => ledger.retract(id),
                1 => ledger.finish(id),
                _ => ledger.abort(id),
            };
            (say(found), model.give_back(*row))
        }
    }
}

fn same(ledger: &Ledger, model: &Model) -> Result<(), TestCaseError> {
    for (at, row) in model.rows.iter().enumerate() {
        prop_assert_eq!(ledger.resolved_len()[at], row.resolved);
        prop_assert_eq!(ledger.in_flight()[at], row.rounds.len() as i32);
        prop_assert_eq!(ledger.drafted_len()[at], row.drafted);
        prop_assert_eq!(ledger.epoch()[at], row.epoch);
        for (group, spec) in model.groups.iter().enumerate() {
            let allocated = i64::from(ledger.allocated_len(group).unwrap()[at]);
            prop_assert_eq!(allocated, row.pages[group] * spec.page_size);
        }
    }
    for group in 0..model.groups.len() {
        prop_assert_eq!(ledger.free_pages(group).unwrap() as i64, model.free_pages(group));
        prop_assert_eq!(ledger.fenced_pages(group).unwrap() as i64, model.fenced_pages(group));
    }
    prop_assert_eq!(ledger.num_free_rows(), model.free_rows());
    Ok(())
}

/// A device's copy of the tables, kept by deltas alone.
fn follow(ledger: &mut Ledger, device: &mut [Vec<i32>], step: u64, acknowledge: bool) {
    let Ok(deltas) = ledger.take_delta(step) else { return };
    for (group, delta) in deltas.iter().enumerate() {
        let columns = ledger.page_table(group).unwrap().pages_per_row();
        for entry in 0..delta.rows.len() {
            let cell = delta.rows[entry] as usize * columns + delta.columns[entry] as usize;
            device[group][cell] = delta.pages[entry];
        }
        assert_eq!(device[group], ledger.page_table(group).unwrap().cells());
    }
    if acknowledge {
        ledger.ack_delta(step).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_agree_with_the_model(
        ops in prop::collection::vec(any_op(), 1..120),
        page_size in 1_i64..6,
        slack in 0_i64..20,
        depth in 0_usize..3,
        exact: bool,
        holey: bool,
    ) {
        let policy = if exact { Policy::Exact } else { Policy::DoubleBuffer };
        let layout = if holey { Layout::Holey } else { Layout::Dense };
        let shapes = vec![
            Shape::NONE,
            Shape::eagle(2, 1, 3).unwrap(),
            Shape::eagle(2, 2, 4).unwrap(),
            Shape::new(1, 1, 1).unwrap(),
        ];
        let draft = Geometry::new(page_size, true, layout).unwrap();
        let width = sizing::row_width(draft, &shapes, CONTEXT.into(), depth as i64, policy).unwrap();
        let draft_pages = width / page_size + slack;
        let groups = vec![
            Group { name: "target".into(), page_size: 4, num_pages: 12 + slack, hosts_drafts: false, layout: Layout::Dense, window: None },
            Group { name: "draft".into(), page_size, num_pages: draft_pages, hosts_drafts: true, layout, window: None },
        ];
        let mut config = LedgerConfig::new(groups.clone(), shapes.clone(), ROWS as i64, CONTEXT.into());
        config.policy = policy;
        config.overlap_depth = depth as i64;
        let mut ledger = Ledger::new(config).unwrap();
        let mut model = Model::new(&groups, &shapes, ROWS, CONTEXT, depth, policy);
        let mut device: Vec<Vec<i32>> =
            (0..2).map(|group| vec![0; ledger.page_table(group).unwrap().cells().len()]).collect();
        for (turn, op) in warm_up().iter().chain(&ops).enumerate() {
            let before = format!("{ledger:?}");
            let (found, expected) = apply(&mut ledger, &mut model, op);
            prop_assert_eq!(found, expected, "{:?}", op);
            if found.is_err() {
                prop_assert_eq!(&before, &format!("{ledger:?}"), "a refused call changed something: {:?}", op);
            }
            same(&ledger, &model)?;
            prop_assert_eq!(ledger.check(), Ok(()), "{:?}", op);
            if matches!(op, Op::Launch { .. }) && found.is_ok() {
                let step = model.steps.iter().filter(|s| s.launched).map(|s| s.step).max().unwrap();
                follow(&mut ledger, &mut device, step, turn % 3 != 0);
            }
        }
        for row in 1..=ROWS {
            ledger.abort(Row(row as i32)).ok();
        }
        if let Some(step) = model.steps.iter().filter(|s| s.launched).map(|s| s.step).max() {
            ledger.complete(step).unwrap();
        }
        for (group, spec) in groups.iter().enumerate() {
            prop_assert_eq!(ledger.free_pages(group).unwrap() as i64, spec.num_pages, "a page leaked");
        }
        prop_assert_eq!(ledger.num_free_rows(), ROWS);
        prop_assert_eq!(ledger.check(), Ok(()));
    }
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

/// `pages_needed` is the most that any root of the range makes a row hold: enough for each, and one takes it all.
#[test]
fn pages_needed_suffices_and_is_reached() {
    const L: i32 = 13;
    for (page_size, policy, depth) in
        (1..=5).flat_map(|p| [(p, Policy::Exact, 0), (p, Policy::DoubleBuffer, 0), (p, Policy::DoubleBuffer, 1)])
    {
        for (hosts_drafts, layout) in [(false, Layout::Dense), (true, Layout::Dense), (true, Layout::Holey)] {
            for (s, k, n) in (0..4).flat_map(|s| (1..4).flat_map(move |k| [1, 2, 5, 9].map(|n| (s, k, n)))) {
                let group = Group { name: "kv".into(), page_size, num_pages: 200, hosts_drafts, layout, window: None };
                // Twice the same shape would be no use: shape 0 is there already.
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
    };
    for (num_steps, topk, num_draft_tokens) in [(u32::MAX, u32::MAX, 4), (2, 0, 4), (2, 1, 0)] {
        let shape = Shape { num_steps, topk, num_draft_tokens };
        let built = Ledger::new(LedgerConfig::new(vec![group.clone()], vec![shape], 1, 8));
        assert!(matches!(built, Err(Error::Config(_))));
    }
}
