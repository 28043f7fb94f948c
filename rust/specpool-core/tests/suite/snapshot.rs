//! Snapshots: what a restore brings back, and the counters that never go back.

use crate::kit::extend;
use specpool_core::{Error, Group, KvEvent, Layout, Ledger, LedgerConfig, Row, Shape};

fn ledger() -> Ledger {
    let (name, layout, window) = ("kv".into(), Layout::Dense, None);
    let group = Group { name, page_size: 4, num_pages: 40, hosts_drafts: true, layout, window, sink: 0 };
    Ledger::new(LedgerConfig::new(vec![group], vec![Shape::eagle(3, 1, 4).unwrap()], 3, 60)).unwrap()
}

/// Lengths, pages, prefixes and free rows are as they were; epochs, steps and prefix numbers go on.
#[test]
fn a_restored_state_is_the_old_one_with_younger_counters() {
    let mut ledger = ledger();
    let row = ledger.admit(Some("one")).unwrap();
    extend(&mut ledger, row, 10, true);
    let prefix = ledger.pin_prefix(row, 8).unwrap();
    let (table, lengths) = (ledger.page_table(0).unwrap().cells().to_vec(), ledger.resolved_len().to_vec());
    let snapshot = ledger.snapshot().unwrap();
    assert_eq!((snapshot.number(), ledger.snapshot().unwrap().number()), (1, 2));
    ledger.finish(row).unwrap();
    ledger.release_prefix(prefix).unwrap();
    for _ in 0..2 {
        let other = ledger.admit(None).unwrap();
        extend(&mut ledger, other, 30, true);
    }
    let newer = ledger.pin_prefix(Row(1), 8).unwrap();
    let (epochs, step) = (ledger.epoch().to_vec(), ledger.completed());
    ledger.restore(&snapshot).unwrap();
    ledger.check().unwrap();
    assert_eq!((ledger.page_table(0).unwrap().cells(), ledger.resolved_len()), (&table[..], &lengths[..]));
    assert_eq!((ledger.prefixes().collect::<Vec<_>>(), ledger.num_free_rows()), (vec![prefix], 2));
    assert_eq!((ledger.tag(row), ledger.is_live(Row(2))), (Some("one"), false));
    for (at, (now, then)) in ledger.epoch().iter().zip(&epochs).enumerate().skip(1) {
        assert!(now > then, "row {at}: epoch {now} is not above {then}");
    }
    assert!(ledger.pin_prefix(row, 4).unwrap() > newer);
    assert!(extend(&mut ledger, row, 12, true) > step);
}

/// A ledger that took over another's state does not use that ledger's numbers again.
#[test]
fn numbers_go_on_behind_those_of_the_other_ledger() {
    let (mut busy, mut idle) = (ledger(), ledger());
    let row = busy.admit(None).unwrap();
    for len in 1..6 {
        extend(&mut busy, row, len, true);
    }
    idle.restore(&busy.snapshot().unwrap()).unwrap();
    assert_eq!((idle.completed(), extend(&mut idle, row, 9, true)), (5, 6));
}

#[test]
fn nothing_is_kept_or_restored_while_a_step_is_not_over() {
    let mut ledger = ledger();
    let snapshot = ledger.snapshot().unwrap();
    let row = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[3], true).unwrap().step;
    let state = ledger.state_hash();
    for refused in [ledger.snapshot().map(drop), ledger.restore(&snapshot)] {
        assert!(matches!(&refused, Err(Error::NotReady(text)) if text.contains("step 1 is not over")), "{refused:?}");
    }
    assert_eq!(ledger.state_hash(), state);
    ledger.cancel(step).unwrap();
    ledger.restore(&snapshot).unwrap();
    assert!(!ledger.is_live(row));
}

#[test]
fn a_state_of_another_kind_is_refused() {
    let mut ledger = ledger();
    let other = LedgerConfig { sessions: true, ..ledger.config() };
    let snapshot = Ledger::new(other).unwrap().snapshot().unwrap();
    let error = ledger.restore(&snapshot).unwrap_err().to_string();
    assert!(error.contains("built otherwise"), "{error}");
}

/// A connector must read everything anew: the pages hold what the snapshot's do.
#[test]
fn a_restore_takes_back_every_told_position() {
    let mut ledger = ledger();
    assert!(matches!(ledger.take_kv_events(), Err(Error::Order(_))));
    ledger.watch_kv().unwrap();
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 10, true);
    let snapshot = ledger.snapshot().unwrap();
    extend(&mut ledger, row, 20, true);
    assert_eq!(ledger.take_kv_events().unwrap(), [KvEvent::Commit { row, group: 0, start: 0, end: 20 }]);
    ledger.restore(&snapshot).unwrap();
    let anew = [KvEvent::Rewind { row, len: 0 }, KvEvent::Commit { row, group: 0, start: 0, end: 10 }];
    assert_eq!(ledger.take_kv_events().unwrap(), anew);
    ledger.watch_kv().unwrap();
    assert_eq!(ledger.take_kv_events().unwrap(), anew[1..], "what the rows hold already is told too");
}
