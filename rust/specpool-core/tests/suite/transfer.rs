//! Laws of rows that move: what an export keeps, what an import takes, and the numbers of their refusals.
//! `specpool-check` runs both over every interleaving of small ledgers.

use crate::kit::{extend, group};
use specpool_core::{Error, Group, KvEvent, Ledger, LedgerConfig, Page, PageState, Row, Shape, StateGroup};

fn ledger(groups: Vec<Group>) -> Ledger {
    let chain = Shape::eagle(1, 1, 2).unwrap();
    let config = LedgerConfig::new(groups, vec![chain], 3, 24);
    Ledger::new(LedgerConfig { overlap_depth: 1, digest: true, sessions: true, ..config }).unwrap()
}

fn one() -> Ledger {
    ledger(vec![group("kv", 4, None)])
}

fn filled(ledger: &mut Ledger, len: i32) -> Row {
    let row = ledger.admit(None).unwrap();
    extend(ledger, row, len, true);
    row
}

/// Makes a call that is refused: nothing has changed, and the error has the text.
fn refused<T>(ledger: &mut Ledger, call: impl FnOnce(&mut Ledger) -> Result<T, Error>, text: &str) {
    let before = (ledger.state_hash(), ledger.digest());
    let error = call(ledger).err().expect("it should be refused");
    assert!(error.to_string().contains(text), "{error}");
    assert_eq!((ledger.state_hash(), ledger.digest()), before);
    ledger.check().unwrap();
}

#[test]
fn an_export_keeps_the_tokens_and_gives_the_row_back() {
    let mut ledger = one();
    let row = filled(&mut ledger, 10);
    extend(&mut ledger, row, 11, false);
    let cells = ledger.page_table(0).unwrap().row(row)[..3].to_vec();
    let epoch = ledger.epoch()[row.at()];
    let export = ledger.export(row).unwrap();
    assert!(!ledger.is_live(row) && ledger.epoch()[row.at()] > epoch);
    assert_eq!((ledger.prefix_len(export), ledger.prefix_drafted_len(export)), (Ok(11), Ok(10)));
    let run = ledger.prefix_pages(export, 0).unwrap();
    assert_eq!((run.first_column, run.pages), (0, &cells.iter().map(|&page| Page(page)).collect::<Vec<_>>()[..]));
    assert_eq!((ledger.free_pages(0), ledger.num_free_rows()), (Ok(21), 3));
    let record = ledger.page_record(0, Page(cells[2])).unwrap();
    assert_eq!((record.state, record.last_verb.name()), (PageState::Shared, "export"));
    ledger.check().unwrap();

    // It did not arrive: the row goes on where it was, on a copy of its tail.
    let back = ledger.admit_on(export, None, Some("back")).unwrap();
    ledger.release_prefix(export).unwrap();
    let plan = ledger.prepare_extend(&[back.0], &[12], true).unwrap();
    assert_eq!((plan.start[0], plan.page_copies[0].src, plan.page_copies[0].tokens), (11, cells[2], 3));
    ledger.launch(plan.step).unwrap();
    ledger.complete(plan.step).unwrap();
    ledger.finish(back).unwrap();
    assert_eq!(ledger.free_pages(0), Ok(24));
    ledger.check().unwrap();
}

#[test]
fn an_export_is_refused_while_anything_moves() {
    let mut ledger = one();
    refused(&mut ledger, |ledger| ledger.export(Row(1)), "row 1 is not admitted");
    let empty = ledger.admit(Some("empty")).unwrap();
    refused(&mut ledger, |ledger| ledger.export(empty), "it has no tokens");
    let row = filled(&mut ledger, 5);
    let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    refused(&mut ledger, |ledger| ledger.export(row), "1 rounds or an extend of it are in flight");
    ledger.launch(step).unwrap();
    ledger.resolve(step, &[2]).unwrap();
    refused(&mut ledger, |ledger| ledger.export(row), "is not complete");
    ledger.complete(step).unwrap();
    let twin = ledger.fork(row, None).unwrap();
    refused(&mut ledger, |ledger| ledger.export(twin), "is not finished");
    ledger.export(row).unwrap(); // its tail is read by a copy that waits, which holds the page too
    ledger.check().unwrap();
    for call in [Ledger::prefix_len, Ledger::prefix_drafted_len] {
        assert!(call(&ledger, 9).unwrap_err().to_string().contains("there is no prefix 9"));
    }
    assert!(ledger.prefix_pages(1, 1).unwrap_err().to_string().contains("group 1"));
    assert!(ledger.prefix_pages(9, 0).unwrap_err().to_string().contains("there is no prefix 9"));
}

/// The sender's columns are those that the receiver takes, also in a window that lags behind.
#[test]
fn an_export_holds_the_columns_that_an_import_takes() {
    for len in 1..=20 {
        let groups = || vec![group("full", 2, None), group("window", 3, Some(5))];
        let (mut from, mut to) = (ledger(groups()), ledger(groups()));
        let row = from.admit(None).unwrap();
        for end in
            (1..=len).step_by(4).chain([len]).filter(|&end| end > from.resolved_len()[row.at()]).collect::<Vec<_>>()
        {
            if end > from.resolved_len()[row.at()] {
                extend(&mut from, row, end, true);
            }
        }
        from.end_turn(row, len).unwrap();
        let export = from.export(row).unwrap();
        let taken = to.import_row(len, len, None).unwrap();
        for at in 0..2 {
            let run = from.prefix_pages(export, at).unwrap();
            let cells = to.page_table(at).unwrap().row(taken);
            let held: Vec<usize> = (0..cells.len()).filter(|&column| cells[column] != 0).collect();
            assert_eq!(held, (run.first_column..run.first_column + run.pages.len()).collect::<Vec<_>>(), "{len}");
            assert_eq!(to.evicted_len(at).unwrap()[taken.at()] as usize, run.first_column * [2, 3][at]);
        }
        extend(&mut to, taken, len + 1, true);
        to.check().unwrap();
        to.finish(taken).unwrap();
        from.release_prefix(export).unwrap();
        for ledger in [&from, &to] {
            assert_eq!((ledger.free_pages(0), ledger.free_pages(1)), (Ok(24), Ok(24)));
        }
    }
}

#[test]
fn an_import_takes_all_or_nothing() {
    let mut ledger = one();
    refused(&mut ledger, |ledger| ledger.import_row(0, 0, None), "length must be in [1, 24], got 0");
    refused(&mut ledger, |ledger| ledger.import_row(25, 0, None), "length must be in [1, 24], got 25");
    refused(&mut ledger, |ledger| ledger.import_row(9, 10, None), "drafted_len must be in [0, 9], got 10");
    refused(&mut ledger, |ledger| ledger.import_row(9, -1, None), "drafted_len must be in [0, 9], got -1");
    let row = ledger.import_row(9, 4, Some("moved")).unwrap();
    assert_eq!(
        (ledger.resolved_len()[row.at()], ledger.drafted_len()[row.at()], ledger.tag(row)),
        (9, 4, Some("moved"))
    );
    assert_eq!((ledger.allocated_len(0).unwrap()[row.at()], ledger.protected_len(0).unwrap()[row.at()]), (12, 0));
    assert!(!ledger.has_root(row));
    let error = ledger.prepare_decode(&[row.0], &[0], true).unwrap_err();
    assert!(matches!(error, Error::NotReady(_)), "{error}");
    let record = ledger.page_record(0, Page(ledger.page_table(0).unwrap().row(row)[2])).unwrap();
    assert_eq!((record.state, record.owner, record.last_verb.name()), (PageState::Owned, row, "import_row"));

    let rest: Vec<Row> = (0..2).map(|_| ledger.import_row(24, 24, None).unwrap()).collect();
    refused(&mut ledger, |ledger| ledger.import_row(1, 1, None), "rows");
    ledger.finish(row).unwrap();
    let few = ledger.import_row(24, 0, None).unwrap();
    ledger.abort(rest[0]).unwrap();
    let (kept, last) = (ledger.export(rest[1]).unwrap(), ledger.import_row(24, 24, None).unwrap());
    let export = ledger.export(last).unwrap();
    let all = ledger.export(few).unwrap();
    ledger.import_row(24, 24, None).unwrap();
    refused(&mut ledger, |ledger| ledger.import_row(1, 1, None), "need 1 pages, 0 free");
    for prefix in [kept, export, all] {
        ledger.release_prefix(prefix).unwrap();
    }
    assert_eq!(ledger.free_pages(0), Ok(18));
    ledger.check().unwrap();
}

/// What the prefix index keeps gives way to a row that arrives.
#[test]
fn an_import_takes_cached_pages() {
    let mut ledger = one();
    let tokens: Vec<i32> = (0..24).collect();
    for salt in [b"a", b"b", b"c", b"d"] {
        let row = filled(&mut ledger, 24);
        ledger.index(row, &tokens, salt).unwrap();
        ledger.finish(row).unwrap();
    }
    assert_eq!((ledger.free_pages(0), ledger.cached_pages(0)), (Ok(0), Ok(24)));
    let row = ledger.import_row(10, 10, None).unwrap();
    assert_eq!((ledger.free_pages(0), ledger.cached_pages(0)), (Ok(0), Ok(21)));
    ledger.check().unwrap();
    // And a later request hits what has arrived.
    ledger.index(row, &tokens[..10], b"moved").unwrap();
    let hit = ledger.admit_cached(&tokens, b"moved", None, true, None).unwrap();
    assert_eq!(ledger.resolved_len()[hit.at()], 10);
    ledger.check().unwrap();
}

#[test]
fn a_connector_hears_of_both() {
    let mut ledger = one();
    ledger.watch_kv().unwrap();
    let row = ledger.import_row(9, 9, None).unwrap();
    assert_eq!(ledger.take_kv_events(), Ok(vec![KvEvent::Commit { row, group: 0, start: 0, end: 9 }]));
    ledger.export(row).unwrap();
    assert_eq!(ledger.take_kv_events(), Ok(vec![KvEvent::Rewind { row, len: 0 }]));
}

/// An idle row is exported too, and its pages are reclaimable no longer.
#[test]
fn a_session_between_turns_can_leave() {
    let mut ledger = one();
    let row = filled(&mut ledger, 10);
    ledger.end_turn(row, 10).unwrap();
    assert_eq!(ledger.reclaimable_pages(0), Ok(3));
    ledger.export(row).unwrap();
    assert_eq!((ledger.reclaimable_pages(0), ledger.pinned_pages(0)), (Ok(0), Ok(3)));
    ledger.check().unwrap();
}

/// One row of a model with recurrent layers, on pages of four tokens.
fn recurrent(num_slots: i64, flush: i64, window: Option<i64>) -> Ledger {
    let config = LedgerConfig::new(vec![group("kv", 4, window)], vec![], 3, 24);
    let states = vec![StateGroup { name: "ssm".into(), num_slots, flush, eager: false }];
    Ledger::new(LedgerConfig { digest: true, states, ..config }).unwrap()
}

fn round(ledger: &mut Ledger, row: Row) {
    let step = ledger.prepare_decode(&[row.0], &[0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.resolve(step, &[1]).unwrap();
    ledger.complete(step).unwrap();
}

#[test]
fn an_export_has_the_tokens_of_its_state_and_holds_the_slot() {
    let mut ledger = recurrent(2, 1, None);
    let row = filled(&mut ledger, 10);
    round(&mut ledger, row);
    let (slot, columns) =
        (ledger.state_slot(0).unwrap()[row.at()], ledger.page_table(0).unwrap().row(row)[..3].to_vec());
    let export = ledger.export(row).unwrap();
    assert_eq!((ledger.prefix_len(export), ledger.prefix_state_slot(export)), (Ok(10), Ok(Page(slot))));
    assert_eq!(ledger.prefix_pages(export, 0).unwrap().pages.iter().map(|page| page.0).collect::<Vec<_>>(), columns);
    assert_eq!((ledger.free_state_slots(0), ledger.reclaimable_state_slots(0)), (Ok(1), Ok(0)));
    ledger.check().unwrap();
    let lengths = "length must be 0 or 10, the tokens that its state contains, got 8";
    refused(&mut ledger, |ledger| ledger.admit_on(export, Some(8), None), lengths);
    let none = ledger.admit_on(export, Some(0), None).unwrap();
    assert_eq!(ledger.state_slot(0).unwrap()[none.at()], 0);
    ledger.finish(none).unwrap();

    // It did not arrive. The row that goes on shares the slot, and writes another one.
    let back = ledger.admit_on(export, None, None).unwrap();
    assert_eq!((ledger.state_slot(0).unwrap()[back.at()], ledger.state_len(0).unwrap()[back.at()]), (slot, 10));
    let plan = ledger.prepare_extend(&[back.0], &[12], true).unwrap();
    let folds = plan.states.as_ref().unwrap();
    assert_eq!((folds.src[0], folds.from[0], folds.to[0]), (slot, 10, 11));
    assert_ne!(folds.dst[0], slot);
    ledger.check().unwrap();
    ledger.release_prefix(export).unwrap();
    ledger.retract(back).unwrap();
    ledger.cancel(plan.step).unwrap();
    assert_eq!((ledger.free_state_slots(0), ledger.free_pages(0)), (Ok(2), Ok(24)));
    ledger.check().unwrap();
}

#[test]
fn an_export_needs_a_state_and_the_windows_below_it() {
    let mut ledger = recurrent(2, 1, None);
    let row = filled(&mut ledger, 1);
    refused(&mut ledger, |ledger| ledger.export(row), "its state has 0 of 1 tokens: run a round of it first");
    round(&mut ledger, row);
    let export = ledger.export(row).unwrap();
    assert_eq!(ledger.prefix_len(export), Ok(1));

    let mut ledger = recurrent(2, 8, Some(2));
    let row = filled(&mut ledger, 6);
    (0..5).for_each(|_| round(&mut ledger, row));
    let text = "its state has 5 of 11 tokens, and the window below needs the slots from 4 on, held are those from 8 on";
    refused(&mut ledger, |ledger| ledger.export(row), text);
}

#[test]
fn an_import_takes_a_slot_for_the_state_of_all_its_tokens() {
    let mut ledger = recurrent(1, 1, None);
    let row = ledger.import_row(9, 9, None).unwrap();
    assert_eq!((ledger.state_slot(0).unwrap()[row.at()], ledger.state_len(0).unwrap()[row.at()]), (1, 9));
    ledger.check().unwrap();
    refused(&mut ledger, |ledger| ledger.import_row(1, 1, None), "group ssm: need 1");
    let folds = ledger.prepare_extend(&[row.0], &[11], true).unwrap().states.clone().unwrap();
    assert_eq!((folds.src[0], folds.dst[0], folds.from[0], folds.to[0]), (1, 1, 9, 10));
}

/// Whoever wrote the slot before has nothing to do with the state that arrives: it serves hits at once, and a failure
/// of that step does not take it away.
#[test]
fn a_state_that_arrives_is_of_no_step() {
    let mut ledger = recurrent(1, 1, None);
    ledger = Ledger::new(LedgerConfig { page_fencing: false, ..ledger.config().clone() }).unwrap();
    let tokens: Vec<i32> = (0..9).collect();
    let gone = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[gone.0], &[6], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.finish(gone).unwrap();
    let row = ledger.import_row(8, 8, None).unwrap();
    assert_eq!(ledger.state_slot(0).unwrap()[row.at()], 1);
    assert_eq!(ledger.index(row, &tokens[..8], b""), Ok(8));
    let hit = ledger.admit_cached(&tokens, b"", None, false, None).unwrap();
    assert_eq!(ledger.resolved_len()[hit.at()], 8);
    ledger.abandon(step).unwrap();
    assert_eq!(ledger.index_states(0).unwrap().count(), 1);
    ledger.check().unwrap();
}
