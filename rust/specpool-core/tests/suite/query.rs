//! Every query of a ledger, on one busy ledger whose numbers are computed by hand.

use specpool_core::{
    Error, Group, Layout, Ledger, LedgerConfig, Page, PageState, Policy, Row, Shape, StepKind, StepState, Verb,
};

const TARGET: usize = 0;
const WINDOW: usize = 1;

fn group(name: &str, page_size: i64, num_pages: i64, window: Option<i64>) -> Group {
    Group { name: name.into(), page_size, num_pages, hosts_drafts: false, layout: Layout::Dense, window, sink: 0 }
}

fn config() -> LedgerConfig {
    let groups = vec![group("target", 4, 20, None), group("window", 2, 15, Some(3))];
    LedgerConfig {
        overlap_depth: 1,
        max_batch: Some(3),
        max_chunk: Some(12),
        sessions: true,
        digest: true,
        ..LedgerConfig::new(groups, vec![Shape::eagle(2, 1, 3).unwrap()], 4, 40)
    }
}

/// Row 1 has 10 tokens, pages 1 to 3 of the target, and a prefix of 8. Row 2 shares its first page and waits for the
/// copy of two tokens. A round of row 1 is prepared.
fn busy() -> Ledger {
    let mut ledger = Ledger::new(config()).unwrap();
    let row = ledger.admit(Some("one")).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    let prefix = ledger.pin_prefix(row, 9).unwrap();
    ledger.admit_on(prefix, Some(6), None).unwrap();
    ledger.prepare_decode(&[row.0], &[1], true).unwrap();
    ledger
}

/// Without the chunk of an extend, a row needs `pages_needed` for its next round, in one group and behind a window.
#[test]
fn pages_ahead_of_rows_that_grow() {
    let ledger = Ledger::new(config()).unwrap();
    let lens: Vec<i32> = (0..40).collect();
    for (growth, shape) in [(0, 0), (0, 1), (5, 0), (5, 1), (i32::MAX, 1)] {
        let pages = ledger.pages_ahead(&lens, &[shape; 40], growth).unwrap();
        for &len in &lens {
            let hi = len.saturating_add(growth).min(39);
            let whole = ledger.pages_needed(len, hi, shape).unwrap()[TARGET];
            let behind = ledger.pages_needed(0, hi, shape).unwrap()[WINDOW];
            assert_eq!(pages[2 * len as usize..][..2], [whole, behind], "{len} + {growth}, shape {shape}");
        }
    }
    let says = |lens: &[i32], shapes: &[i32], growth| ledger.pages_ahead(lens, shapes, growth).unwrap_err().to_string();
    assert_eq!(says(&[1, 2], &[0], 0), "2 lengths, 1 shapes");
    assert_eq!(says(&[1], &[0], -1), "growth must be at least 0, got -1");
    assert_eq!(says(&[1, 40], &[0, 0], 0), "length 40 is not in 0..40");
    assert_eq!(says(&[-1], &[0], 0), "length -1 is not in 0..40");
    assert_eq!(says(&[1], &[2], 0), "shape 2 is not in 0..2");
}

/// What rows hold and share is what their tables and the ownership map say, also below a window.
#[test]
fn held_pages_are_those_of_the_tables() {
    let mut ledger = busy();
    let counts = |ledger: &Ledger, row: i32, group: usize| {
        let cells = ledger.page_table(group).unwrap().row(Row(row));
        let pages = cells.iter().filter(|&&page| page != 0).map(|&page| ledger.page_record(group, Page(page)).unwrap());
        let shared = pages.clone().filter(|record| record.state == PageState::Shared).count();
        (pages.count() as i64, shared as i64)
    };
    let check = |ledger: &Ledger| {
        let (held, shared) = ledger.held_pages(&[2, 1]).unwrap();
        for (lane, row) in [2, 1].into_iter().enumerate() {
            for group in [TARGET, WINDOW] {
                let at = 2 * lane + group;
                assert_eq!((held[at], shared[at]), counts(ledger, row, group), "row {row}, group {group}");
            }
        }
        (held, shared)
    };
    let (held, shared) = check(&ledger);
    assert_eq!((held[0], shared[0], held[2], shared[2]), (2, 1, 4, 2), "row 2 and row 1 of the target");
    ledger.cancel(2).unwrap();
    let step = ledger.prepare_extend(&[1, 2], &[16, 12], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    check(&ledger);
    assert!(ledger.evicted_len(WINDOW).unwrap()[1] > 0);
    assert_eq!(ledger.held_pages(&[]), Ok((vec![], vec![])));
    assert_eq!(ledger.held_pages(&[1, 1]).unwrap_err().to_string(), "row 1 is named twice");
    assert!(ledger.held_pages(&[3]).is_err());
}

#[test]
fn tail_pages() {
    let ledger = Ledger::new(config()).unwrap();
    let tails: Vec<_> = [0, 2, 3, 4].map(|len| ledger.tail_pages(len).unwrap()).into();
    assert_eq!(tails, [[0, 0], [1, 0], [1, 1], [0, 0]]);
    assert_eq!(ledger.tail_pages(-1).unwrap_err().to_string(), "length must be at least 0, got -1");
}

/// Pages that two prefixes share are counted once.
#[test]
fn pinned_pages() {
    let mut ledger = Ledger::new(config()).unwrap();
    let row = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[row.0], &[10], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    assert_eq!(ledger.pinned_pages(TARGET), Ok(0));
    let first = ledger.pin_prefix(row, 9).unwrap();
    let second = ledger.pin_prefix(row, 8).unwrap();
    assert_eq!(ledger.pinned_pages(TARGET), Ok(2));
    for (prefix, left) in [(second, 2), (first, 0)] {
        ledger.release_prefix(prefix).unwrap();
        assert_eq!((ledger.pinned_pages(TARGET), ledger.pinned_pages(WINDOW).is_ok()), (Ok(left), true));
    }
    assert!(ledger.pinned_pages(2).is_err());
}

#[test]
fn what_it_was_built_from() {
    let ledger = busy();
    assert_eq!(ledger.num_groups(), 2);
    assert_eq!(ledger.group_spec(WINDOW).unwrap(), &config().groups[WINDOW]);
    assert_eq!(ledger.shapes(), [Shape::NONE, Shape::eagle(2, 1, 3).unwrap()]);
    assert_eq!((ledger.num_rows(), ledger.max_context_len(), ledger.max_batch()), (4, 40, 3));
    assert_eq!((ledger.overlap_depth(), ledger.policy(), ledger.max_chunk()), (1, Policy::Exact, Some(12)));
    assert!(ledger.draft_kv() && ledger.sessions() && ledger.page_fencing() && !ledger.is_closed());
    // 39 tokens, a round in flight of at most 3, and the next round's 3 nodes: 45 slots.
    assert_eq!((ledger.row_width(TARGET).unwrap(), ledger.row_width(WINDOW).unwrap()), (48, 46));
    assert_eq!(ledger.page_table(TARGET).unwrap().pages_per_row(), 12);

    let other = LedgerConfig { sessions: false, draft_kv: false, page_fencing: false, max_chunk: None, ..config() };
    let policy = Policy::DoubleBuffer;
    let ledger = Ledger::new(LedgerConfig { policy, groups: vec![group("target", 4, 20, None)], ..other }).unwrap();
    assert_eq!((ledger.policy(), ledger.max_chunk()), (Policy::DoubleBuffer, None));
    assert!(!ledger.draft_kv() && !ledger.sessions() && !ledger.page_fencing());
}

#[test]
fn lengths_of_rows() {
    let ledger = busy();
    assert_eq!(ledger.resolved_len(), [0, 10, 6, 0, 0]);
    assert_eq!(ledger.in_flight(), [0, 1, 0, 0, 0]);
    assert_eq!(ledger.drafted_len(), [0, 10, 6, 0, 0]);
    assert_eq!(ledger.epoch(), [0; 5]);
    assert_eq!(ledger.idle(), [false; 5]);
    assert_eq!(ledger.allocated_len(TARGET).unwrap(), [0, 16, 8, 0, 0]);
    assert_eq!(ledger.protected_len(TARGET).unwrap(), [0, 8, 4, 0, 0]);
    assert_eq!(ledger.evicted_len(TARGET).unwrap(), [0; 5]);
    // The prepare of the round gave back the pages below 10 - 3 + 1.
    assert_eq!(ledger.evicted_len(WINDOW).unwrap(), [0, 8, 0, 0, 0]);
    assert_eq!(ledger.allocated_len(WINDOW).unwrap(), [0, 14, 6, 0, 0]);
    assert_eq!(ledger.protected_len(WINDOW).unwrap(), [0, 8, 6, 0, 0]);
    assert!(ledger.is_live(Row(2)) && !ledger.is_live(Row(3)) && !ledger.is_live(Row(0)) && !ledger.is_live(Row(9)));
    assert_eq!((ledger.tag(Row(1)), ledger.tag(Row(2)), ledger.tag(Row(-1))), (Some("one"), None, None));
    assert_eq!((ledger.checkpoint_len(Row(1)), ledger.checkpoint_len(Row(3))), (None, None));
    assert_eq!(ledger.num_free_rows(), 2);
}

#[test]
fn a_row_is_quiet_once_everything_of_it_is_written() {
    let mut ledger = busy();
    let refusal = |ledger: &Ledger, row| ledger.check_quiet(Row(row)).unwrap_err().to_string();
    assert!(refusal(&ledger, 1).contains("1 rounds or an extend of it are in flight"));
    assert!(refusal(&ledger, 2).contains("the copy of page 2 to its page 4 is not finished"));
    assert!(matches!(ledger.check_quiet(Row(3)), Err(Error::Shape(_))));
    ledger.launch(2).unwrap();
    ledger.resolve(2, &[1]).unwrap();
    assert!(refusal(&ledger, 1).contains("its last launched step 2 is not complete, 1 is"));
    ledger.complete(2).unwrap(); // the copy rode on it
    assert_eq!((ledger.check_quiet(Row(1)), ledger.check_quiet(Row(2))), (Ok(()), Ok(())));
    ledger.prepare_extend(&[2], &[8], true).unwrap();
    assert!(refusal(&ledger, 2).contains("an extend of it"));
}

#[test]
fn pages_and_who_holds_them() {
    let ledger = busy();
    assert_eq!(ledger.page_table(TARGET).unwrap().row(Row(1))[..5], [1, 2, 3, 5, 0]);
    assert_eq!(ledger.page_table(TARGET).unwrap().row(Row(2))[..3], [1, 4, 0]);
    assert_eq!((ledger.free_pages(TARGET).unwrap(), ledger.fenced_pages(TARGET).unwrap()), (15, 0));
    let record = ledger.page_record(TARGET, Page(1)).unwrap();
    assert_eq!((record.page, record.state, record.owner, record.holders), (Page(1), PageState::Shared, Row(1), 3));
    assert_eq!((record.birth_step, record.fence, record.last_verb), (1, 0, Verb::AdmitOn));
    let map = ledger.ownership_map(TARGET).unwrap();
    assert_eq!((map.len(), map[1]), (21, record));
    let states: Vec<PageState> = map[..7].iter().map(|record| record.state).collect();
    let (free, owned, shared) = (PageState::Free, PageState::Owned, PageState::Shared);
    assert_eq!(states, [free, shared, shared, owned, owned, owned, free]);
    for page in [0, 21, -1] {
        assert!(matches!(ledger.page_record(TARGET, Page(page)), Err(Error::Shape(_))), "{page}");
    }
    let refused = Err(Error::Shape("group 2 is not in 0..2".into()));
    assert_eq!(
        [ledger.free_pages(2), ledger.fenced_pages(2), ledger.reclaimable_pages(2)],
        [refused.clone(), refused.clone(), refused]
    );
}

#[test]
fn steps_prefixes_and_digests() {
    let mut ledger = busy();
    assert_eq!(ledger.steps().collect::<Vec<_>>(), [(2, StepKind::Decode, StepState::Prepared)]);
    assert_eq!((ledger.completed(), StepKind::Decode.name(), StepKind::Extend.name()), (1, "decode", "extend"));
    assert_eq!((ledger.prefixes().collect::<Vec<_>>(), ledger.prefix_len(1)), (vec![1], Ok(8)));
    assert!(matches!(ledger.prefix_len(2), Err(Error::Shape(_))));
    assert_eq!(ledger.digest(), busy().digest());
    assert_eq!(ledger.state_hash(), busy().state_hash());
    let (digest, state) = (ledger.digest(), ledger.state_hash());
    ledger.launch(2).unwrap();
    assert!(digest.is_some() && ledger.digest() != digest && ledger.state_hash() != state);
    let names = [StepState::Prepared, StepState::Stale, StepState::Launched, StepState::Resolved].map(StepState::name);
    assert_eq!(names, ["prepared", "stale", "launched", "resolved"]);
    let plan = ledger.prepare_decode(&[1], &[0], true).unwrap();
    ledger.abort(Row(1)).unwrap();
    let states: Vec<StepState> = ledger.steps().map(|(_, _, state)| state).collect();
    assert_eq!(states, [StepState::Launched, StepState::Stale]);
    ledger.cancel(plan.step).unwrap();
    ledger.resolve(2, &[1]).unwrap();
    assert_eq!(ledger.steps().map(|(_, _, state)| state).collect::<Vec<_>>(), [StepState::Resolved]);
}

/// Pages count as reclaimable while every holder is an idle row. A prefix or a running row that holds a page keeps it
/// out of the count.
#[test]
fn reclaimable_pages_are_those_that_only_idle_rows_hold() {
    let mut ledger = busy();
    ledger.launch(2).unwrap();
    ledger.resolve(2, &[2]).unwrap();
    ledger.complete(2).unwrap();
    assert_eq!(ledger.end_turn(Row(1), 11).unwrap(), 11);
    assert_eq!((ledger.idle()[1], ledger.checkpoint_len(Row(1))), (true, Some(11)));
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(1), "pages 1 and 2 are the prefix's too");
    ledger.release_prefix(1).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(2), "page 1 is row 2's too");
    assert_eq!(ledger.end_turn(Row(2), 6).unwrap(), 6);
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(4));
    let prefix = ledger.pin_prefix(Row(2), 4).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(3), "page 1 is the prefix's too");
    ledger.release_prefix(prefix).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(4));
    let extend = ledger.prepare_extend(&[2], &[7], true).unwrap().step;
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(2));
    ledger.cancel(extend).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(4), "row 2 is idle again");
    let before = ledger.snapshot().unwrap();
    let twin = ledger.fork(Row(1), None).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(2), "two whole pages of row 1 are its twin's too");
    ledger.abort(twin).unwrap();
    assert_eq!(ledger.trim(Row(1), 10), Ok(10));
    assert_eq!((ledger.idle()[1], ledger.reclaimable_pages(TARGET)), (true, Ok(4)), "of one page a part");
    assert_eq!(ledger.trim(Row(1), 8), Ok(0), "the window below 8 is not held");
    assert_eq!((ledger.idle()[1], ledger.reclaimable_pages(TARGET)), (true, Ok(2)));
    ledger.finish(Row(1)).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(2));
    ledger.restore(&before).unwrap();
    assert_eq!(ledger.reclaimable_pages(TARGET), Ok(4));
    ledger.check().unwrap();
}

/// `pages_needed` of a window group: what one prepare finds held plus what it claims ahead, however long the row is.
#[test]
fn a_row_never_holds_more_pages_behind_a_window_than_are_needed() {
    let mut ledger = Ledger::new(config()).unwrap();
    let row = ledger.admit(None).unwrap();
    let needed = ledger.pages_needed(12, 30, 1).unwrap();
    // Target: 30 + 3 slots. Window: 2 below and a chunk of 12 ahead, and one page for the offset.
    assert_eq!(needed, [9, 8]);
    let mut most = [0; 2];
    let mut watch = |ledger: &Ledger| {
        for group in [TARGET, WINDOW] {
            let size = config().groups[group].page_size;
            let held = ledger.allocated_len(group).unwrap()[1] - ledger.evicted_len(group).unwrap()[1];
            most[group] = most[group].max(i64::from(held) / size);
        }
    };
    let step = ledger.prepare_extend(&[row.0], &[12], true).unwrap().step;
    watch(&ledger);
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    while ledger.resolved_len()[1] <= 30 {
        let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
        watch(&ledger);
        ledger.launch(step).unwrap();
        ledger.resolve(step, &[1]).unwrap();
        ledger.complete(step).unwrap();
    }
    assert_eq!(most[TARGET], needed[TARGET]);
    assert!(most[WINDOW] <= needed[WINDOW] && most[WINDOW] >= needed[WINDOW] - 2, "{most:?}");
}
