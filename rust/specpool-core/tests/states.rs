//! State groups: what is refused, and what a snapshot, the hash and the digest see. `ledger.rs` compares the rest with
//! the model.

use specpool_core::{Error, Group, Layout, Ledger, LedgerConfig, Row, StateGroup};

fn config(num_slots: i64, flush: i64) -> LedgerConfig {
    let layout = Layout::Dense;
    let kv =
        Group { name: "kv".into(), page_size: 4, num_pages: 40, hosts_drafts: true, layout, window: None, sink: 0 };
    let mut config = LedgerConfig::new(vec![kv], vec![], 2, 32);
    config.states = vec![StateGroup { name: "states".into(), num_slots, flush, eager: false }];
    config
}

fn prefilled(ledger: &mut Ledger) -> Row {
    let row = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[6], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    row
}

#[test]
fn a_group_out_of_range_is_refused() {
    for (num_slots, flush) in [(0, 1), (1, 0)] {
        assert!(matches!(Ledger::new(config(num_slots, flush)), Err(Error::Config(_))));
    }
}

#[test]
fn a_verb_that_does_not_move_states_is_refused() {
    let mut ledger = Ledger::new(config(2, 1)).unwrap();
    let row = prefilled(&mut ledger);
    assert!(matches!(ledger.pin_prefix(row, 4), Err(Error::Config(_))));
}

#[test]
fn a_restored_ledger_has_its_states_again() {
    let mut ledger = Ledger::new(config(2, 1)).unwrap();
    let row = prefilled(&mut ledger);
    let (saved, hash) = (ledger.snapshot().unwrap(), ledger.state_hash());
    ledger.finish(row).unwrap();
    assert_ne!(ledger.state_hash(), hash);
    ledger.restore(&saved).unwrap();
    assert_eq!((ledger.state_slot(0).unwrap()[row.at()], ledger.state_len(0).unwrap()[row.at()]), (1, 5));
}

#[test]
fn the_hash_sees_the_states() {
    let hashes = [1, 4].map(|flush| {
        let mut ledger = Ledger::new(config(2, flush)).unwrap();
        let row = prefilled(&mut ledger);
        let step = ledger.prepare_decode(&[row.0], &[0], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.state_hash()
    });
    assert_ne!(hashes[0], hashes[1]);
}

/// A launched step of its parent, which holds the slot no longer, still reads it.
#[test]
fn a_slot_that_waits_for_a_fence_counts_as_fenced() {
    let mut ledger = Ledger::new(config(2, 1)).unwrap();
    let parent = prefilled(&mut ledger);
    let child = ledger.fork(parent, None).unwrap();
    let step = ledger.prepare_extend(&[parent.0], &[8], true).unwrap().step;
    ledger.launch(step).unwrap();
    let extend = |ledger: &mut Ledger| ledger.prepare_extend(&[child.0], &[7], true);
    let shortage = extend(&mut ledger).unwrap_err();
    assert!(matches!(shortage, Error::OutOfPages { need: 1, free: 0, cached: 0, fenced: 1, .. }), "{shortage}");
    ledger.complete(step).unwrap();
    extend(&mut ledger).unwrap();
}
