//! Sinks: a group with a window keeps the pages of a row's first tokens, whatever the window has passed.

use specpool_core::{Error, Group, KvEvent, Layout, Ledger, LedgerConfig, Replay, Row, Shape};

/// Pages of 2 slots, a window of 3 and a sink of 3 tokens, which are two pages.
fn config() -> LedgerConfig {
    let group = Group {
        name: "draft".into(),
        page_size: 2,
        num_pages: 40,
        hosts_drafts: true,
        layout: Layout::Dense,
        window: Some(3),
        sink: 3,
    };
    let mut config = LedgerConfig::new(vec![group], vec![Shape::eagle(1, 1, 2).unwrap()], 3, 60);
    (config.sessions, config.max_chunk) = (true, Some(10));
    config
}

fn ledger() -> Ledger {
    Ledger::new(config()).unwrap()
}

fn extend(ledger: &mut Ledger, row: Row, lens: &[i32]) {
    for &len in lens {
        let step = ledger.prepare_extend(&[row.0], &[len], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
        ledger.check().unwrap();
    }
}

/// A row of 14 tokens, of which the slots 4 to 9 are gone: its window began at 10 - 2 = 8 when it had 10.
fn slid(ledger: &mut Ledger) -> Row {
    let row = ledger.admit(None).unwrap();
    extend(ledger, row, &[10, 12, 14]);
    row
}

/// The columns in which the row holds a page.
fn columns(ledger: &Ledger, row: Row) -> Vec<usize> {
    let cells = ledger.page_table(0).unwrap().row(row);
    (0..cells.len()).filter(|&column| cells[column] != 0).collect()
}

#[test]
fn the_first_pages_stay_and_a_cut_goes_back_to_them() {
    let mut ledger = ledger();
    let row = slid(&mut ledger);
    assert_eq!(columns(&ledger, row), [0, 1, 5, 6]);
    assert_eq!(ledger.evicted_len(0).unwrap()[row.at()], 10);
    assert_eq!(ledger.trim(row, 9).unwrap(), 4, "the window below 9 is gone, the one below 4 is the sink");
    assert_eq!((columns(&ledger, row), ledger.evicted_len(0).unwrap()[row.at()]), (vec![0, 1], 2));
    ledger.check().unwrap();
    extend(&mut ledger, row, &[6, 9]);
    ledger.trim(row, 1).unwrap();
    assert_eq!(columns(&ledger, row), [0]);
    ledger.check().unwrap();
}

#[test]
fn a_row_of_any_length_holds_no_more_than_it_is_promised() {
    let mut ledger = ledger();
    let row = ledger.admit(None).unwrap();
    let most = ledger.pages_needed(40, 50, 1).unwrap()[0] as usize;
    assert_eq!(most, 2 + (3 - 1 + 10_usize).div_ceil(2) + 1);
    let lens: Vec<i32> = (1..=5).map(|chunk| chunk * 10).collect();
    for len in lens {
        extend(&mut ledger, row, &[len]);
        assert!(columns(&ledger, row).len() <= most, "{:?} of {len} tokens", columns(&ledger, row));
    }
}

#[test]
fn a_prefix_an_export_and_an_import_have_the_sink() {
    let mut ledger = ledger();
    let row = slid(&mut ledger);
    let prefix = ledger.pin_prefix(row, 14).unwrap();
    let run = ledger.prefix_pages(prefix, 0).unwrap();
    assert_eq!((run.num_sinks, run.first_column, run.pages.len()), (2, 5, 4));
    assert!(matches!(ledger.admit_on(prefix, Some(9), None), Err(Error::NotReady(_))));
    let other = ledger.admit_on(prefix, Some(13), None).unwrap();
    assert_eq!(columns(&ledger, other), [0, 1, 5, 6]);
    let cells = ledger.page_table(0).unwrap();
    assert_eq!(cells.row(other)[..6], cells.row(row)[..6]);
    let begun = ledger.admit_on(prefix, Some(3), None).unwrap();
    assert_eq!(columns(&ledger, begun), [0, 1], "a length inside the sink is whole too");
    ledger.check().unwrap();
    ledger.finish(begun).unwrap();

    extend(&mut ledger, row, &[15]);
    let export = ledger.export(row).unwrap();
    let run = ledger.prefix_pages(export, 0).unwrap();
    assert_eq!((run.num_sinks, run.first_column, run.pages.len()), (2, 6, 4));
    let taken = ledger.import_row(15, 15, None).unwrap();
    assert_eq!(columns(&ledger, taken), [0, 1, 6, 7]);
    ledger.check().unwrap();
}

#[test]
fn a_hit_needs_the_sink_and_the_window() {
    let mut config = config();
    config.groups[0].num_pages = 12;
    let mut ledger = Ledger::new(config).unwrap();
    let row = slid(&mut ledger);
    let text: Vec<i32> = (1..=14).collect();
    assert_eq!(ledger.index(row, &text, b"").unwrap(), 14);
    let hit = |ledger: &Ledger| ledger.match_prefix(&text, b"", Some(14), true).unwrap().len;
    assert_eq!(hit(&ledger), 14);
    assert_eq!(ledger.match_prefix(&text[..9], b"", Some(9), true).unwrap().len, 4);
    let again = ledger.admit_cached(&text, b"", Some(14), true, None).unwrap();
    assert_eq!(columns(&ledger, again), [0, 1, 6]);
    ledger.finish(again).unwrap();
    ledger.finish(row).unwrap();
    ledger.check().unwrap();
    // Other rows take every page: the index gives up the last pages of the text first, and then its sink.
    let mut hits = vec![hit(&ledger)];
    let others = [(); 3].map(|()| ledger.admit(None).unwrap());
    for len in 1..=8 {
        for row in others {
            if ledger.prepare_extend(&[row.0], &[len], true).map(|plan| ledger.launch(plan.step).unwrap()).is_ok() {
                hits.push(hit(&ledger));
            }
        }
    }
    ledger.check().unwrap();
    hits.dedup();
    assert_eq!(hits, [14, 12, 4, 2, 0]);
}

#[test]
fn a_row_that_adds_to_a_known_text_has_its_own_sink_read_only_too() {
    let mut config = config();
    config.sessions = false; // then the audit knows which pages are read-only
    let mut ledger = Ledger::new(config).unwrap();
    let text: Vec<i32> = (1..=14).collect();
    let first = slid(&mut ledger);
    assert_eq!(ledger.index(first, &text, b"").unwrap(), 14);
    let second = ledger.admit(None).unwrap();
    extend(&mut ledger, second, &[10, 14]);
    assert_eq!(columns(&ledger, second), [0, 1, 4, 5, 6]);
    assert_eq!(ledger.index(second, &text, b"").unwrap(), 14);
    assert_eq!(ledger.protected_len(0).unwrap()[second.at()], 10, "the page of column 4 was missing");
    ledger.check().unwrap();
}

#[test]
fn the_sink_of_an_idle_row_can_be_taken_too() {
    let mut ledger = ledger();
    let row = slid(&mut ledger);
    ledger.end_turn(row, 14).unwrap();
    assert_eq!(ledger.reclaimable_pages(0).unwrap(), 4);
    ledger.check().unwrap();
}

#[test]
fn an_import_counts_the_sink() {
    let mut config = config();
    config.groups[0].num_pages = 12;
    let mut short = Ledger::new(config.clone()).unwrap();
    for len in [10, 8] {
        let row = short.admit(None).unwrap();
        extend(&mut short, row, &[len]);
    }
    let (free, state) = (short.free_pages(0).unwrap(), short.state_hash());
    assert_eq!(free, 3);
    let refused = short.import_row(15, 15, None).unwrap_err();
    assert!(matches!(refused, Error::OutOfPages { need: 4, free: 3, .. }), "{refused}");
    assert_eq!(short.state_hash(), state);

    // Pages of the index give way to the sink as well.
    let mut cached = Ledger::new(config).unwrap();
    let row = slid(&mut cached);
    cached.index(row, &(1..=14).collect::<Vec<i32>>(), b"").unwrap();
    cached.finish(row).unwrap();
    let row = cached.admit(None).unwrap();
    extend(&mut cached, row, &[10]);
    assert_eq!((cached.free_pages(0).unwrap(), cached.cached_pages(0).unwrap()), (3, 4));
    let taken = cached.import_row(15, 15, None).unwrap();
    assert_eq!(columns(&cached, taken), [0, 1, 6, 7]);
    cached.check().unwrap();
}

#[test]
fn the_sink_is_lent_with_the_window_and_a_row_begins_on_both() {
    let mut ledger = ledger();
    let row = slid(&mut ledger);
    let cells = |ledger: &Ledger, row: Row| ledger.page_table(0).unwrap().row(row)[..7].to_vec();
    let pages = cells(&ledger, row);
    ledger.lend(row, 0, 14).unwrap();
    assert_eq!(ledger.lent_pages(0).unwrap().len(), 4);
    ledger.finish(row).unwrap();
    ledger.check().unwrap();

    let refused = |ledger: &mut Ledger, pages: &[i32], len: i32, parts: &str| {
        let error = ledger.admit_lent(pages, len, None).unwrap_err().to_string();
        assert!(error.contains(parts), "{error}");
    };
    refused(&mut ledger, &pages[..5], 10, "the columns [2, 5) are 0, at most those below 4");
    let no_sink = [&[0, 0][..], &pages[2..]].concat();
    refused(&mut ledger, &no_sink, 14, "page 0 in group draft: its pages are 1 to 40");
    let hit = ledger.admit_lent(&pages, 14, None).unwrap();
    assert_eq!((columns(&ledger, hit), cells(&ledger, hit)), (vec![0, 1, 5, 6], pages.clone()));
    assert_eq!(ledger.evicted_len(0).unwrap()[hit.at()], 10);
    let begun = ledger.admit_lent(&pages[..2], 4, None).unwrap();
    assert_eq!(columns(&ledger, begun), [0, 1], "a length inside the sink is whole too");
    ledger.check().unwrap();

    // A row that has computed the same gives its own pages for the lent ones.
    let own = slid(&mut ledger);
    let wrong = [&pages[..2], &[pages[0]], &pages[3..]].concat();
    assert!(
        matches!(ledger.rebind(own, 0, 14, &wrong), Err(Error::Shape(text)) if text.contains("no page at position 4"))
    );
    extend(&mut ledger, begun, &[10, 12, 14]);
    let twice = [&pages[2..5], &[pages[0], pages[6]]].concat();
    let error = ledger.rebind(begun, 4, 14, &twice).unwrap_err().to_string();
    assert!(error.contains(&format!("page {} holds its position 0, and cannot hold another", pages[0])), "{error}");
    let before = ledger.free_pages(0).unwrap();
    ledger.rebind(own, 0, 14, &pages).unwrap();
    assert_eq!((cells(&ledger, own), ledger.free_pages(0).unwrap()), (pages.clone(), before + 4));
    ledger.check().unwrap();
    for row in [hit, begun, own] {
        ledger.finish(row).unwrap();
    }
    ledger.release_lent(0, &ledger.lent_pages(0).unwrap()).unwrap();
    assert_eq!(ledger.free_pages(0).unwrap(), 40);
    ledger.check().unwrap();
}

#[test]
fn a_connector_is_told_that_the_sink_stays() {
    let mut ledger = ledger();
    ledger.watch_kv().unwrap();
    let row = slid(&mut ledger);
    let (group, sink) = (0, 4);
    assert_eq!(
        ledger.take_kv_events().unwrap(),
        [KvEvent::Commit { row, group, start: 0, end: sink }, KvEvent::Commit { row, group, start: 10, end: 14 }]
    );
    extend(&mut ledger, row, &[16]);
    assert_eq!(
        ledger.take_kv_events().unwrap(),
        [KvEvent::Evict { row, group, start: 10, end: 12 }, KvEvent::Commit { row, group, start: 14, end: 16 }]
    );
}

#[test]
fn a_connector_is_told_of_no_sink_that_goes_or_comes_back() {
    let mut ledger = ledger();
    ledger.watch_kv().unwrap();
    let row = ledger.admit(None).unwrap();
    let group = 0;
    extend(&mut ledger, row, &[5]);
    ledger.end_turn(row, 5).unwrap();
    assert_eq!(ledger.take_kv_events().unwrap(), [KvEvent::Commit { row, group, start: 0, end: 5 }]);
    extend(&mut ledger, row, &[14]);
    assert_eq!(ledger.take_kv_events().unwrap(), [KvEvent::Commit { row, group, start: 5, end: 14 }]);
    extend(&mut ledger, row, &[16]);
    assert_eq!(
        ledger.take_kv_events().unwrap(),
        [KvEvent::Evict { row, group, start: 4, end: 12 }, KvEvent::Commit { row, group, start: 14, end: 16 }]
    );
    assert_eq!(ledger.trim(row, 5).unwrap(), 5, "the checkpoint has the page behind the sink");
    assert_eq!(
        ledger.take_kv_events().unwrap(),
        [KvEvent::Rewind { row, len: 5 }, KvEvent::Commit { row, group, start: 4, end: 5 }]
    );
}

#[test]
fn a_log_knows_the_sink() {
    let path = std::env::temp_dir().join(format!("specpool-sinks-{}.log", std::process::id()));
    let mut ledger = Ledger::recorded(config(), &path, 1 << 20).unwrap();
    slid(&mut ledger);
    let digest = ledger.digest();
    ledger.close().unwrap();
    let mut replay = Replay::open(&path).unwrap();
    let mut again = replay.ledger().unwrap();
    while replay.advance(&mut again).unwrap().is_some() {}
    assert_eq!((again.digest(), again.group_spec(0).unwrap().sink), (digest, 3));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn what_cannot_work_is_refused_with_its_numbers() {
    let refused = |group: Group, parts: &str| {
        let error = Ledger::new(LedgerConfig { groups: vec![group], ..config() }).unwrap_err().to_string();
        assert!(error.contains(parts), "{error}");
    };
    let group = config().groups.remove(0);
    refused(Group { sink: -1, ..group.clone() }, "group draft: sink must be in [0, 2147483647], got -1");
    refused(Group { window: None, ..group.clone() }, "group draft: sink 3 needs a window");
    refused(Group { sink: 58, ..group.clone() }, "sink 58 + window 3 must be at most max_context_len 60");
    // A window of 3 behind 10 slots ahead and a checkpoint, and the sink.
    refused(Group { num_pages: 10, ..group.clone() }, "num_pages must be at least 11, a sink of 3 and a window of 3");
    assert!(Ledger::new(LedgerConfig { groups: vec![Group { sink: 57, ..group }], ..config() }).is_ok());
}
