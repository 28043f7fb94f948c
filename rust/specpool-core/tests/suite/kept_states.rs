//! Soft marks and the states of the prefix index, over random operations beside the plain model. The model is told what
//! the ledger gives up, and checks that it was cached and no more than was lacking. It knows an index with pages of one
//! token; with other page sizes, soft marks come alone.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::decode::{OP_BYTES, decode};
use crate::model::Model;
use crate::model::ask::{ask, outcome};
use crate::model::same::same;
use crate::model::states::same_folds;
use crate::pools::least_pages;
use crate::scene::Scene;
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use specpool_core::{Call, Given, Group, Layout, Ledger, LedgerConfig, Shape, Snapshots, StateGroup};

fn config(rng: &mut TestRng) -> LedgerConfig {
    let page_size = [1, 1, 1, 3][rng.random_range(0..4)];
    let window = (page_size > 1 && rng.random_bool(0.5)).then(|| rng.random_range(1..8));
    let layout = Layout::Dense;
    let kv = Group { name: "kv".into(), page_size, num_pages: 1 << 20, hosts_drafts: true, layout, window, sink: 0 };
    let shapes = vec![Shape::NONE, Shape::eagle(2, 1, 3).unwrap()];
    let mut config = LedgerConfig::new(vec![kv], shapes, rng.random_range(1..4), 14);
    config.overlap_depth = rng.random_range(0..3);
    (config.sessions, config.page_fencing, config.digest) = (rng.random_bool(0.5), rng.random_bool(0.8), true);
    let num_slots = 1 + i64::from(config.sessions) + rng.random_range(0..5);
    let (flush, eager) = (rng.random_range(1..4), rng.random_bool(0.5));
    config.states = vec![StateGroup { name: "states".into(), num_slots, flush, eager }];
    config.groups[0].num_pages = least_pages(&config, 0) + rng.random_range(0..30);
    config
}

/// The model's index has one salt, and no rule of its own for draft KV.
fn for_the_model(op: Call<'static>) -> Call<'static> {
    let one_salt = |salt: Cow<'static, [u8]>| if salt.len() > 256 { salt } else { Cow::default() };
    match op {
        Call::Index { row, tokens, salt } => Call::Index { row, tokens, salt: one_salt(salt) },
        Call::AdmitCached { tokens, salt, limit, .. } => {
            Call::AdmitCached { tokens, salt: one_salt(salt), limit, needs_draft: false }
        }
        op => op,
    }
}

/// What a run must have met, or it proves little.
#[derive(Debug, Default)]
struct Met {
    marks: usize,
    hits: usize,
    evictions: u64,
    indexed: usize,
    exports: usize,
    imports: usize,
}

fn run(seed: u64, met: &mut Met) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = config(&mut rng);
    let (mut ledger, mut model) = (Ledger::new(config.clone()).unwrap(), Model::new(&config));
    let mut pages = vec![BTreeMap::new(); 2];
    let has_index = config.groups[0].page_size == 1;
    let mut scene = Scene { has_index, keeps_states: true, has_moves: true, ..Scene::default() };
    for at in 0..250 {
        scene.read(&ledger);
        let bytes: [u8; OP_BYTES] = rng.random();
        let op = for_the_model(decode(&bytes, &scene));
        let (hash, evictions) = (ledger.state_hash(), ledger.index_size().2);
        let expected = ask(&mut model, &op);
        let answer = op.run(&mut ledger, None, &mut Snapshots::default());
        let place = format!("seed {seed}, operation {at}: {op:?}\n{config:?}");
        assert_eq!(outcome(&answer), expected, "{place}: {answer:?}");
        let Ok(given) = answer else {
            assert_eq!(ledger.state_hash(), hash, "refused: {place}");
            continue;
        };
        assert_eq!(model.observe(&ledger), Ok(()), "{place}");
        if let Given::Plan(plan) = &given {
            assert_eq!(same_folds(plan, model.steps.last().unwrap()), Ok(()), "{place}");
            if config.groups[0].window.is_none() && ledger.index_size().2 == evictions {
                let mut undone = ledger.clone();
                undone.cancel(plan.step).unwrap();
                assert_eq!(undone.state_hash(), hash, "cancelled: {place}");
            }
        }
        assert_eq!(same(&ledger, &model, &mut pages), Ok(()), "{place}");
        assert_eq!(ledger.check(), Ok(()), "{place}");
        met.marks = met.marks.max((1..model.rows.len()).map(|row| model.marks_of(row).count()).sum());
        if let (Call::AdmitCached { .. }, Given::Row(row)) = (&op, &given) {
            met.hits += usize::from(ledger.resolved_len()[row.at()] > 0);
        }
        met.exports += usize::from(matches!(op, Call::Export { .. }));
        met.imports += usize::from(matches!(op, Call::ImportRow { .. }));
        met.indexed = met.indexed.max(ledger.index_states(0).unwrap().count());
    }
    met.evictions += ledger.index_size().2;
}

#[test]
fn kept_states_agree_with_the_model() {
    let runs: u64 = std::env::var("SPECPOOL_RUNS").map_or(24, |runs| runs.parse().unwrap());
    let mut met = Met::default();
    (0..runs).for_each(|seed| run(seed, &mut met));
    assert!(met.marks > 1 && met.hits > 2 && met.evictions > 20 && met.indexed > 2, "{met:?}");
    assert!(met.exports > 20 && met.imports > 20, "{met:?}");
}
