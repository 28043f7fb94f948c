//! Window groups: what a prepare gives back, what a checkpoint keeps, and how far a cut can go back.

use specpool_core::{Error, Geometry, Group, Layout, Ledger, LedgerConfig, Policy, Row, Shape, state::sizing};

/// One window group with sessions, a chain of two.
fn ledger(page_size: i64, window: i64) -> Ledger {
    with_pages(page_size, window, 40, true)
}

fn with_pages(page_size: i64, window: i64, num_pages: i64, sessions: bool) -> Ledger {
    let group = Group {
        name: "window".into(),
        page_size,
        num_pages,
        hosts_drafts: false,
        layout: Layout::Dense,
        window: Some(window),
        sink: 0,
    };
    let mut config = LedgerConfig::new(vec![group], vec![Shape::eagle(1, 1, 2).unwrap()], 2, 60);
    (config.sessions, config.overlap_depth, config.max_chunk) = (sessions, i64::from(sessions), Some(10));
    Ledger::new(config).unwrap()
}

fn extend(ledger: &mut Ledger, row: Row, len: i32) {
    let step = ledger.prepare_extend(&[row.0], &[len], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    ledger.check().unwrap();
}

fn evicted(ledger: &Ledger, row: Row) -> i32 {
    ledger.evicted_len(0).unwrap()[row.at()]
}

/// Scenario 67 with a decode: eviction uses r before an extend that may still be cancelled.
#[test]
fn a_decode_behind_an_unlaunched_extend_leaves_the_extends_own_window() {
    let mut ledger = ledger(1, 2);
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 4);
    let far = ledger.prepare_extend(&[row.0], &[8], true).unwrap().step;
    assert_eq!(evicted(&ledger, row), 3);
    let round = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    assert_eq!(evicted(&ledger, row), 3, "the extend from 4 still reads position 3");
    ledger.cancel(round).unwrap();
    ledger.cancel(far).unwrap();
    ledger.check().unwrap();
    assert_eq!(ledger.resolved_len()[row.at()], 4);
    extend(&mut ledger, row, 5);
}

/// A cut to a page edge whose window is empty brings nothing back: the checkpoint lies further below.
#[test]
fn nothing_comes_back_from_a_checkpoint_into_an_empty_window() {
    let mut ledger = ledger(2, 1);
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 5);
    assert_eq!(ledger.end_turn(row, 5).unwrap(), 5);
    for len in [9, 13, 15] {
        extend(&mut ledger, row, len);
    }
    assert_eq!(ledger.trim(row, 11).unwrap(), 10);
    ledger.check().unwrap();
    assert_eq!((evicted(&ledger, row), ledger.checkpoint_len(row)), (10, Some(5)));
    assert_eq!(ledger.trim(row, 5).unwrap(), 5, "the checkpoint is still there");
    ledger.check().unwrap();
    assert_eq!(evicted(&ledger, row), 4);
    extend(&mut ledger, row, 6);
    assert_eq!(ledger.trim(row, 3).unwrap(), 2, "below it only a page edge will do");
    ledger.check().unwrap();
    assert_eq!(ledger.checkpoint_len(row), None);
}

/// A window whose pages are gone is never silently wrong (docs/contract.md, Window groups).
#[test]
fn a_cut_goes_back_to_a_length_whose_window_is_held() {
    let mut ledger = ledger(4, 6);
    let row = ledger.admit(None).unwrap();
    for len in [10, 20, 30] {
        extend(&mut ledger, row, len);
    }
    assert_eq!(evicted(&ledger, row), 12);
    assert_eq!(ledger.trim(row, 29).unwrap(), 29);
    assert_eq!(ledger.trim(row, 17).unwrap(), 17, "12 = evict_to(17)");
    assert_eq!(ledger.trim(row, 16).unwrap(), 0);
    ledger.check().unwrap();
    assert_eq!((evicted(&ledger, row), ledger.free_pages(0).unwrap()), (0, 40));
}

/// Pages that the call itself evicts count as free to it, but only unfenced ones, and a refused call evicts nothing.
#[test]
fn a_claim_may_use_what_it_evicts_itself_once_the_device_is_done_with_it() {
    let mut ledger = with_pages(2, 3, 7, false);
    let (row, other) = (ledger.admit(None).unwrap(), ledger.admit(None).unwrap());
    extend(&mut ledger, other, 8);
    let first = ledger.prepare_extend(&[row.0], &[4], true).unwrap().step;
    ledger.launch(first).unwrap();
    let before = format!("{ledger:?}");
    let refused = ledger.prepare_extend(&[row.0], &[8], true).unwrap_err();
    let numbers = Error::OutOfPages { group: "window".into(), need: 2, free: 1, cached: 0, fenced: 0, reclaimable: 0 };
    assert_eq!(refused, numbers, "step 1 may still read the page below the window");
    assert_eq!(format!("{ledger:?}"), before);
    ledger.complete(first).unwrap();
    extend(&mut ledger, row, 8);
    assert_eq!((evicted(&ledger, row), ledger.free_pages(0).unwrap()), (2, 0));
    let refused = ledger.prepare_extend(&[row.0], &[14], true).unwrap_err();
    let numbers = Error::OutOfPages { group: "window".into(), need: 3, free: 2, cached: 0, fenced: 0, reclaimable: 0 };
    assert_eq!(refused, numbers, "the two that it would evict itself are among the free ones");
    // With sessions a page is kept for the checkpoint instead of being given back.
    assert!(matches!(ledger.end_turn(row, 8), Err(Error::Config(_))));
}

/// A prefix whose window begins far from the row's start: the new row takes the prefix's e, and the pages from there
/// on.
#[test]
fn a_row_on_an_evicted_prefix_has_its_window() {
    let mut ledger = ledger(2, 3);
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 9);
    extend(&mut ledger, row, 13);
    assert_eq!(evicted(&ledger, row), 6, "what is below 9 - 3 + 1 was given back");
    let prefix = ledger.pin_prefix(row, 13).unwrap();
    assert_eq!(ledger.prefix_len(prefix), Ok(12));
    let other = ledger.admit_on(prefix, Some(11), None).unwrap();
    assert_eq!(evicted(&ledger, other), 6);
    let cells = |row| ledger.page_table(0).unwrap().row(row).to_vec();
    assert_eq!(cells(other)[..5], cells(row)[..5]);
    assert_ne!(cells(other)[5], cells(row)[5], "of the last page the first token is copied");
    assert_eq!((cells(other)[2], cells(other)[3] > 0, cells(other)[6]), (0, true, 0));
    ledger.check().unwrap();
    let error = ledger.admit_on(prefix, Some(7), None).unwrap_err().to_string();
    assert!(error.contains("needs the slots from 4 on, held are those from 6 on"), "{error}");
}

/// Far below what the row still holds, only a checkpoint has a window to go back to. `trim` goes to the checkpoint, or
/// to the start.
#[test]
fn a_cut_goes_back_to_what_the_checkpoint_keeps() {
    for (len, expected) in [(17, 10), (12, 10), (10, 10), (9, 9), (8, 8), (7, 0), (5, 0)] {
        let mut ledger = ledger(2, 3);
        let row = ledger.admit(None).unwrap();
        extend(&mut ledger, row, 9);
        assert_eq!(ledger.end_turn(row, 9).unwrap(), 9);
        extend(&mut ledger, row, 19);
        extend(&mut ledger, row, 22);
        assert_eq!(evicted(&ledger, row), 16);
        assert_eq!(ledger.trim(row, len).unwrap(), expected, "trim to {len}");
        ledger.check().unwrap();
    }
}

/// A row does not grow behind a window: it needs what it can ever hold, its D rounds in flight and its chunk.
#[test]
fn needs_behind_a_window() {
    let ledger = ledger(1, 6); // D = 1, rounds of 2 nodes that accept up to 2, chunks of 10
    assert_eq!(ledger.pages_needed(0, 50, 1), Ok(vec![5 + 2 + 2 + 1]));
    assert_eq!(ledger.pages_needed(7, 50, 1), Ok(vec![5 + 7 + 1]));
    assert_eq!(ledger.pages_needed(40, 50, 1), Ok(vec![5 + 10 + 1]));
    assert_eq!(ledger.pages_needed(3, 3, 1), Ok(vec![3 + 2]), "a short row has fewer columns");
    let geometry = Geometry::new(1, false, Layout::Dense).unwrap();
    let chain = [Shape::NONE, Shape::eagle(1, 1, 2).unwrap()];
    for (max_chunk, pages) in [(1, 10), (4, 10), (5, 11), (10, 16)] {
        let most = sizing::most_window_pages(geometry, &chain, (6, 0), max_chunk, 1, Policy::Exact);
        assert_eq!(most, Ok(pages), "a chunk of {max_chunk}");
    }
    for (window, max_chunk, depth) in [(0, 1, 0), (1, 0, 0), (1, 1, -1)] {
        let most = sizing::most_window_pages(geometry, &chain, (window, 0), max_chunk, depth, Policy::Exact);
        assert!(matches!(most, Err(Error::Config(_))), "{most:?}");
    }
}
