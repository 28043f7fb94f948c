//! State groups: what is refused, and what a snapshot, the hash and the digest see. `ledger.rs` compares the rest with
//! the model.

use specpool_core::{Error, Group, Layout, Ledger, LedgerConfig, Row, Shape, StateGroup};

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

/// Tokens of each state of the index, entry by entry.
fn indexed_lens(ledger: &Ledger) -> Vec<i32> {
    ledger.index_states(0).unwrap().map(|(_, _, len)| len).collect()
}

#[test]
fn a_group_out_of_range_is_refused() {
    for (num_slots, flush) in [(0, 1), (1, 0)] {
        assert!(matches!(Ledger::new(config(num_slots, flush)), Err(Error::Config(_))));
    }
}

/// R = (D + 1) A + N + flush - 1, with the greatest A and N of all shapes.
#[test]
fn a_ring_has_the_records_that_a_row_may_need() {
    let shape = |steps, topk, nodes| Shape::new(steps, topk, nodes).unwrap();
    let group = |flush| StateGroup { name: "states".into(), num_slots: 2, flush, eager: false };
    assert_eq!(group(1).ring_len(&[], 0).unwrap(), 2);
    assert_eq!(group(1).ring_len(&[shape(3, 1, 4)], 1).unwrap(), 12);
    assert_eq!(group(3).ring_len(&[shape(4, 1, 5), shape(2, 4, 9)], 2).unwrap(), 26);
    assert!(matches!(group(1).ring_len(&[], -1), Err(Error::Config(_))));
    assert_eq!(Ledger::new(config(2, 3)).unwrap().state_ring_len(0).unwrap(), 4);
}

#[test]
fn a_verb_that_does_not_move_states_is_refused() {
    let mut ledger = Ledger::new(config(2, 1)).unwrap();
    let row = prefilled(&mut ledger);
    assert!(matches!(ledger.pin_prefix(row, 4), Err(Error::Config(_))));
}

#[test]
fn lanes_to_keep_are_lanes_of_the_plan_each_once() {
    let mut ledger = Ledger::new(config(2, 1)).unwrap();
    let rows = [0; 2].map(|_| ledger.admit(None).unwrap().0);
    for keep in [&[2][..], &[-1], &[1, 0], &[0, 0]] {
        let refused = ledger.prepare_extend_keeping(&rows, &[3, 3], keep, true);
        assert!(matches!(refused, Err(Error::Shape(_))), "{keep:?}");
    }
    ledger.prepare_extend_keeping(&rows, &[3, 3], &[0, 1], true).unwrap();
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
fn a_restored_ledger_keeps_the_same_states() {
    let mut ledger = Ledger::new(config(3, 1)).unwrap();
    let row = prefilled(&mut ledger);
    ledger.index(row, &[7; 6], b"").unwrap();
    let step = ledger.prepare_extend_keeping(&[row.0], &[9], &[0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    let kept = |ledger: &Ledger| {
        let indexed: Vec<_> = ledger.index_states(0).unwrap().collect();
        (indexed, ledger.soft_marks(0, row).unwrap().collect::<Vec<_>>())
    };
    let (saved, before) = (ledger.snapshot().unwrap(), kept(&ledger));
    assert_eq!((before.0.len(), before.1.len()), (1, 1));
    ledger.forget(None).unwrap();
    ledger.trim(row, 4).unwrap();
    assert_ne!(kept(&ledger), before);
    ledger.restore(&saved).unwrap();
    assert_eq!(kept(&ledger), before);
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

/// A launched step of its parent, which holds the slot no longer, still reads it. A soft mark on it would give way.
#[test]
fn a_slot_that_waits_for_a_fence_counts_as_fenced() {
    for keep in [&[][..], &[0]] {
        let mut ledger = Ledger::new(config(2, 1)).unwrap();
        let parent = ledger.admit(None).unwrap();
        let step = ledger.prepare_extend_keeping(&[parent.0], &[6], keep, true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
        let child = ledger.fork(parent, None).unwrap();
        let step = ledger.prepare_extend(&[parent.0], &[8], true).unwrap().step;
        ledger.launch(step).unwrap();
        let extend = |ledger: &mut Ledger| ledger.prepare_extend(&[child.0], &[7], true);
        let shortage = extend(&mut ledger).unwrap_err();
        assert!(matches!(shortage, Error::OutOfPages { need: 1, free: 0, cached: 0, fenced: 1, .. }), "{shortage}");
        ledger.complete(step).unwrap();
        extend(&mut ledger).unwrap();
    }
}

/// Both states are in one entry of the index.
#[test]
fn a_hit_takes_no_state_of_tokens_beyond_those_that_agree() {
    let mut config = config(4, 1);
    config.max_context_len = 128;
    let mut ledger = Ledger::new(config).unwrap();
    let row = ledger.admit(None).unwrap();
    for len in [70, 72] {
        let step = ledger.prepare_extend_keeping(&[row.0], &[len], &[0], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
    }
    ledger.index(row, &[7; 72], b"").unwrap();
    let branch = [[7; 70], [8; 70]].concat();
    assert_eq!(ledger.match_prefix(&branch, b"", None, false).unwrap().len, 69);
    assert_eq!(ledger.known_prefix(&branch, b"", None).unwrap(), 70);
}

#[test]
fn a_failed_step_takes_what_it_wrote_out_of_the_index() {
    let mut ledger = Ledger::new(config(4, 1)).unwrap();
    let row = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend_keeping(&[row.0], &[6], &[0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    let step = ledger.prepare_decode(&[row.0], &[0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.index(row, &[7; 6], b"").unwrap();
    assert_eq!(indexed_lens(&ledger), [6, 5]);
    ledger.abandon(step).unwrap();
    assert_eq!(indexed_lens(&ledger), [5]);
}

/// A row writes over the end of its indexed text, whose beginning is also that of another.
#[test]
fn the_states_of_a_common_beginning_stay_with_the_text_that_stays() {
    let mut ledger = Ledger::new(LedgerConfig { sessions: true, ..config(6, 1) }).unwrap();
    let extend = |ledger: &mut Ledger, row: Row, len| {
        let step = ledger.prepare_extend_keeping(&[row.0], &[len], &[0], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
    };
    let [row, other] = [0; 2].map(|_| ledger.admit(None).unwrap());
    let [text, stays] = [8, 9].map(|last| [[7; 6].as_slice(), &[last; 4]].concat());
    extend(&mut ledger, row, 7);
    ledger.end_turn(row, 7).unwrap();
    extend(&mut ledger, row, 9);
    ledger.index(row, &text[..9], b"").unwrap();
    extend(&mut ledger, other, 10);
    ledger.index(other, &stays, b"").unwrap();
    assert_eq!(indexed_lens(&ledger), [8, 6, 9]);
    assert_eq!(ledger.trim(row, 6).unwrap(), 6);
    assert_eq!(indexed_lens(&ledger), [6, 9]);
    assert_eq!(ledger.match_prefix(&stays[..9], b"", None, false).unwrap().len, 6);
    assert_eq!(ledger.check(), Ok(()));
}

/// Both marks are on one slot, which the fork shares.
#[test]
fn index_ends_the_marks_of_its_row_alone() {
    let mut ledger = Ledger::new(config(3, 1)).unwrap();
    let extend = |ledger: &mut Ledger, row: Row, len| {
        let step = ledger.prepare_extend_keeping(&[row.0], &[len], &[0], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
    };
    let marks = |ledger: &Ledger, row| ledger.soft_marks(0, row).unwrap().collect::<Vec<_>>();
    let parent = ledger.admit(None).unwrap();
    extend(&mut ledger, parent, 6);
    let child = ledger.fork(parent, None).unwrap();
    extend(&mut ledger, child, 6);
    let held = marks(&ledger, parent);
    assert_eq!((held.len(), &marks(&ledger, child)), (1, &held));
    ledger.index(child, &[7; 6], b"").unwrap();
    assert_eq!((marks(&ledger, parent), marks(&ledger, child).len()), (held, 0));
}
