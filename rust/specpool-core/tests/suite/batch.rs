//! A batch equals its lanes: one call for all of them does what one call for each does.

use proptest::prelude::*;
use specpool_core::{Group, Layout, Ledger, LedgerConfig, Shape};

const NUM_ROWS: usize = 80;

/// Rows of different lengths in two groups, ready for a round of any of four shapes.
fn ledger() -> (Ledger, Vec<i32>) {
    let group = |name: &str, page_size, hosts_drafts| {
        let (num_pages, layout) = (1 << 14, Layout::Holey);
        Group { name: name.into(), page_size, num_pages, hosts_drafts, layout, window: None, sink: 0 }
    };
    let shapes = vec![Shape::eagle(3, 1, 4).unwrap(), Shape::eagle(2, 3, 8).unwrap(), Shape::new(0, 1, 6).unwrap()];
    let groups = vec![group("target", 4, false), group("draft", 3, true)];
    let config = LedgerConfig { overlap_depth: 1, ..LedgerConfig::new(groups, shapes, NUM_ROWS as i64, 200) };
    let mut ledger = Ledger::new(config).unwrap();
    let rows: Vec<i32> = (0..NUM_ROWS).map(|_| ledger.admit(None).unwrap().0).collect();
    let lens: Vec<i32> = (1..=NUM_ROWS as i32).collect();
    let plan = ledger.prepare_extend(&rows, &lens, true).unwrap();
    ledger.launch(plan.step).unwrap();
    (ledger, rows)
}

fn lengths(ledger: &Ledger) -> Vec<Vec<i32>> {
    let allocated = (0..2).map(|group| ledger.allocated_len(group).unwrap());
    allocated.chain([ledger.resolved_len(), ledger.in_flight(), ledger.drafted_len()]).map(<[i32]>::to_vec).collect()
}

/// Shapes of a batch in runs: short runs, and runs that are compared in blocks.
fn shapes() -> impl Strategy<Value = Vec<i32>> {
    let run = (0..4, prop_oneof![1..4_usize, 14..20_usize, 30..36_usize]);
    prop::collection::vec(run, 1..8).prop_map(|runs| {
        let lanes = runs.into_iter().flat_map(|(shape, len)| vec![shape; len]);
        lanes.take(NUM_ROWS).collect()
    })
}

proptest! {
    #[test]
    fn a_batch_of_mixed_shapes_is_its_lanes(shapes in shapes(), order in Just((1..=NUM_ROWS as i32).collect::<Vec<_>>()).prop_shuffle()) {
        let (mut together, _) = ledger();
        let mut apart = together.clone();
        let rows = &order[..shapes.len()];

        let mut required = vec![0; 2];
        for (row, shape) in rows.iter().zip(&shapes) {
            for (sum, slots) in required.iter_mut().zip(apart.tokens_required(&[*row], &[*shape]).unwrap()) {
                *sum += slots;
            }
        }
        prop_assert_eq!(together.tokens_required(rows, &shapes).unwrap(), required);

        let plan = together.prepare_decode(rows, &shapes, true).unwrap();
        let plans: Vec<_> =
            rows.iter().zip(&shapes).map(|(&row, &shape)| apart.prepare_decode(&[row], &[shape], true).unwrap()).collect();
        prop_assert_eq!(lengths(&together), lengths(&apart));
        for (lane, one) in plans.iter().enumerate() {
            prop_assert_eq!((plan.lo[lane], plan.hi[lane], plan.start[lane]), (one.lo[0], one.hi[0], one.start[0]));
        }

        together.launch(plan.step).unwrap();
        for one in &plans {
            apart.launch(one.step).unwrap();
        }
        // The most that each lane's shape allows, and at least 1.
        let most: Vec<i32> =
            shapes.iter().map(|&shape| together.shapes()[shape as usize].max_accept_len() as i32).collect();
        let too_many: Vec<i32> = most.iter().map(|most| most + 1).collect();
        for lane in 0..rows.len() {
            let mut accept_lens = most.clone();
            accept_lens[lane] = too_many[lane];
            prop_assert!(together.resolve(plan.step, &accept_lens).is_err(), "lane {}", lane);
        }
        together.resolve(plan.step, &most).unwrap();
        for (one, &accept_len) in plans.iter().zip(&most) {
            apart.resolve(one.step, &[accept_len]).unwrap();
        }
        prop_assert_eq!(lengths(&together), lengths(&apart));
        together.complete(plan.step).unwrap();
        together.check().unwrap();
    }
}
