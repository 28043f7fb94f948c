//! The prefix cache by example: what is kept, what goes first, and what is refused.

use crate::kit::extend;
use specpool_core::{Error, Group, Layout, Ledger, LedgerConfig, Page, PageNames, PageState, Replay, Row, Shape};

fn group(page_size: i64, num_pages: i64, window: Option<i64>) -> Group {
    let name = format!("{page_size} {}", window.unwrap_or(0));
    Group { name, page_size, num_pages, hosts_drafts: true, layout: Layout::Dense, window, sink: 0 }
}

fn config(groups: Vec<Group>) -> LedgerConfig {
    let mut config = LedgerConfig::new(groups, vec![Shape::eagle(2, 1, 3).unwrap()], 4, 40);
    (config.overlap_depth, config.sessions) = (1, true);
    config
}

fn ledger(groups: Vec<Group>) -> Ledger {
    Ledger::new(config(groups)).unwrap()
}

fn tokens(first: i32, len: i32) -> Vec<i32> {
    (first..first + len).collect()
}

/// A row that computes the tokens and indexes them.
fn computed(ledger: &mut Ledger, text: &[i32], salt: &[u8]) -> Row {
    let row = ledger.admit(None).unwrap();
    extend(ledger, row, text.len() as i32, true);
    assert_eq!(ledger.index(row, text, salt), Ok(text.len() as i32));
    row
}

fn kept(ledger: &mut Ledger, text: &[i32], salt: &[u8]) {
    let row = computed(ledger, text, salt);
    ledger.finish(row).unwrap();
    ledger.check().unwrap();
}

fn hit(ledger: &Ledger, text: &[i32], salt: &[u8]) -> i32 {
    ledger.match_prefix(text, salt, Some(text.len() as i32), false).unwrap().len
}

#[test]
fn what_was_used_least_recently_goes_first_and_the_end_of_a_text_before_its_beginning() {
    let mut ledger = ledger(vec![group(4, 15, None)]);
    for first in [100, 200, 300] {
        kept(&mut ledger, &tokens(first, 16), b"");
    }
    assert_eq!((ledger.free_pages(0), ledger.cached_pages(0)), (Ok(3), Ok(12)));
    // The oldest text is used again.
    let row = ledger.admit_cached(&tokens(100, 16), b"", Some(16), false, None).unwrap();
    ledger.finish(row).unwrap();
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 20, true);
    let hits = [100, 200, 300].map(|first| hit(&ledger, &tokens(first, 16), b""));
    assert_eq!(hits, [16, 8, 16]); // two pages of five were not free
    assert_eq!(ledger.index_size().2, 2);
    extend(&mut ledger, row, 36, true);
    let hits = [100, 200, 300].map(|first| hit(&ledger, &tokens(first, 16), b""));
    assert_eq!(hits, [16, 0, 8]);
    ledger.check().unwrap();
}

#[test]
fn a_text_that_is_computed_again_is_used_again() {
    let mut ledger = ledger(vec![group(4, 15, None)]);
    for first in [100, 200, 100] {
        kept(&mut ledger, &tokens(first, 14), b"");
    }
    assert_eq!((ledger.free_pages(0), ledger.cached_pages(0)), (Ok(7), Ok(8)), "a text is kept once");
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 40, true);
    assert_eq!([100, 200].map(|first| hit(&ledger, &tokens(first, 14), b"")), [14, 4]);
}

#[test]
fn shared_pages_are_those_of_rows_that_the_index_holds_too() {
    let mut ledger = ledger(vec![group(4, 15, None)]);
    let row = computed(&mut ledger, &tokens(100, 10), b"");
    let other = ledger.admit_cached(&tokens(100, 10), b"", None, false, None).unwrap();
    extend(&mut ledger, other, 16, true);
    assert_eq!((ledger.shared_pages(0), ledger.cached_pages(0)), (Ok(3), Ok(0)));
    ledger.finish(row).unwrap();
    assert_eq!((ledger.shared_pages(0), ledger.cached_pages(0)), (Ok(2), Ok(1)));
    ledger.finish(other).unwrap();
    assert_eq!((ledger.shared_pages(0), ledger.cached_pages(0)), (Ok(0), Ok(3)));
}

#[test]
fn the_bytes_of_the_index_are_those_of_its_numbers() {
    let mut config = config(vec![group(64, 1_100, None)]);
    config.max_context_len = 256;
    let mut ledger = Ledger::new(config).unwrap();
    let empty = ledger.index_bytes();
    for first in 0..250 {
        kept(&mut ledger, &tokens(1_000 * first, 256), b"");
    }
    let (num_entries, num_tokens, _) = ledger.index_size();
    assert_eq!((num_entries, num_tokens), (1_000, 64_000));
    // Tokens, a page, a record of 40 to 100 bytes and the list of children; a store has up to twice what it needs.
    let least = 1_000 * (64 * 4 + 4 + 40);
    let bytes = ledger.index_bytes() - empty;
    assert!((least..5 * least / 2).contains(&bytes), "{empty} empty, {bytes} for {least} at least");
    assert!(empty < 100, "{empty}");
}

#[test]
fn a_beginning_that_others_continue_outlives_its_own_page() {
    // A second row computes the beginning itself and continues it, so it holds only the end of the kept text.
    let mut ledger = ledger(vec![group(4, 15, None)]);
    kept(&mut ledger, &tokens(0, 8), b"");
    let other = computed(&mut ledger, &tokens(0, 16), b"");
    let table = ledger.page_table(0).unwrap().row(other).to_vec();
    let entries: Vec<i32> = ledger.index_entries().map(|entry| entry.pages[0][0]).collect();
    assert_eq!(entries[2..], table[2..4]);
    assert!(entries[..2].iter().all(|page| !table.contains(page)));
    ledger.finish(other).unwrap();
    // Its two pages of the beginning are free; the four kept ones are cached.
    assert_eq!((ledger.free_pages(0), ledger.cached_pages(0)), (Ok(11), Ok(4)));
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 36, true);
    let third = ledger.admit(None).unwrap();
    extend(&mut ledger, third, 12, true);
    assert_eq!(hit(&ledger, &tokens(0, 16), b""), 12);
    ledger.check().unwrap();
}

#[test]
fn a_claim_that_fits_into_free_and_cached_pages_succeeds_and_no_other_evicts() {
    let mut ledger = ledger(vec![group(4, 12, None)]);
    kept(&mut ledger, &tokens(0, 32), b"");
    let holder = ledger.admit(None).unwrap();
    extend(&mut ledger, holder, 8, true);
    let row = ledger.admit(None).unwrap();
    let before = ledger.state_hash();
    match ledger.prepare_extend(&[row.0, holder.0], &[40, 12], true) {
        Err(Error::OutOfPages { need: 11, free: 2, cached: 8, fenced: 0, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(ledger.state_hash(), before);
    extend(&mut ledger, row, 40, true);
    assert_eq!((ledger.free_pages(0), ledger.cached_pages(0)), (Ok(0), Ok(0)));
    assert_eq!(ledger.index_size(), (0, 0, 8));
    ledger.check().unwrap();
}

#[test]
fn a_hit_ends_at_any_token_and_shares_every_whole_page() {
    for page_size in [1, 3, 16, 64] {
        let mut ledger = ledger(vec![group(page_size, 100, None)]);
        let text = tokens(0, 30);
        kept(&mut ledger, &text, b"");
        for len in 0..=30 {
            let (mut asked, limit) = (tokens(0, len), Some(len));
            asked.push(99);
            let row = ledger.admit_cached(&asked, b"", limit, true, None).unwrap();
            assert_eq!(ledger.resolved_len()[row.at()], len);
            assert_eq!(ledger.drafted_len()[row.at()], len);
            let whole = i64::from(len) / page_size;
            let entries: Vec<i32> = ledger.index_entries().flat_map(|entry| entry.pages[0].to_vec()).collect();
            let table = ledger.page_table(0).unwrap().row(row);
            assert_eq!(table[..whole as usize], entries[..whole as usize]);
            if i64::from(len) % page_size > 0 {
                assert_ne!(table[whole as usize], entries[whole as usize]);
            }
            ledger.finish(row).unwrap();
            ledger.check().unwrap();
        }
    }
}

#[test]
fn a_row_goes_on_in_the_page_that_it_has_indexed_in_part() {
    let mut ledger = ledger(vec![group(16, 30, None)]);
    let text = tokens(0, 30);
    let row = computed(&mut ledger, &text[..5], b"");
    assert_eq!(ledger.protected_len(0).unwrap()[row.at()], 5);
    extend(&mut ledger, row, 12, true);
    assert_eq!(ledger.index(row, &text[..12], b""), Ok(12));
    assert_eq!((ledger.index_size().0, ledger.protected_len(0).unwrap()[row.at()]), (1, 12));
    // A cut below the indexed tokens makes the index forget those behind it, if nobody else reads the page.
    assert_eq!(ledger.trim(row, 12), Ok(12));
    assert_eq!(ledger.trim(row, 7), Ok(7));
    assert_eq!((hit(&ledger, &text, b""), ledger.protected_len(0).unwrap()[row.at()]), (7, 7));
    extend(&mut ledger, row, 20, true);
    assert_eq!(ledger.index(row, &[&text[..7], &tokens(90, 13)].concat(), b""), Ok(20));
    let other = ledger.admit_cached(&text, b"", None, true, None).unwrap();
    assert_eq!(ledger.resolved_len()[other.at()], 7);
    let shared = ledger.admit_cached(&[&text[..7], &tokens(90, 13)].concat(), b"", Some(16), true, None).unwrap();
    assert_eq!(ledger.trim(row, 11), Ok(0)); // another row reads the page
    ledger.finish(shared).unwrap();
    ledger.check().unwrap();
}

#[test]
fn an_entry_without_draft_kv_gives_way_to_one_that_has_it() {
    let mut ledger = ledger(vec![group(4, 40, None)]);
    let text = tokens(0, 12);
    let plain = ledger.admit(None).unwrap();
    extend(&mut ledger, plain, 12, false);
    ledger.index(plain, &text, b"").unwrap();
    assert_eq!(ledger.match_prefix(&text, b"", Some(12), true).unwrap().len, 0);
    assert_eq!(hit(&ledger, &text, b""), 12);
    let drafting = computed(&mut ledger, &text, b"");
    assert_eq!(ledger.match_prefix(&text, b"", Some(12), true).unwrap().len, 12);
    let pages: Vec<i32> = ledger.index_entries().map(|entry| entry.pages[0][0]).collect();
    assert_eq!(pages, ledger.page_table(0).unwrap().row(drafting)[..3]);
    // And not the other way round.
    ledger.index(plain, &text, b"").unwrap();
    assert_eq!(ledger.match_prefix(&text, b"", Some(12), true).unwrap().len, 12);
    ledger.check().unwrap();
}

#[test]
fn salts_never_meet() {
    let mut ledger = ledger(vec![group(4, 40, None)]);
    let text = tokens(0, 12);
    let row = computed(&mut ledger, &text, b"a");
    assert_eq!([hit(&ledger, &text, b""), hit(&ledger, &text, b"a"), hit(&ledger, &text, b"b")], [0, 12, 0]);
    // A page is in the index once: the same row cannot serve another salt too.
    assert_eq!(ledger.index(row, &text, b"b"), Ok(0));
    assert_eq!(hit(&ledger, &text, b"b"), 0);
    kept(&mut ledger, &text, b"b");
    ledger.forget(Some(b"a")).unwrap();
    assert_eq!([hit(&ledger, &text, b"a"), hit(&ledger, &text, b"b")], [0, 12]);
    ledger.forget(None).unwrap();
    ledger.finish(row).unwrap();
    assert_eq!((ledger.free_pages(0), ledger.index_size().0), (Ok(40), 0));
    ledger.check().unwrap();
}

#[test]
fn a_window_that_was_given_up_shortens_the_hit() {
    let mut ledger = ledger(vec![group(4, 40, None), group(4, 12, Some(6))]);
    let text = tokens(0, 24);
    let row = ledger.admit(None).unwrap();
    for end in [8, 16, 24] {
        extend(&mut ledger, row, end, true);
        ledger.index(row, &text[..end as usize], b"").unwrap();
    }
    ledger.finish(row).unwrap();
    assert_eq!(hit(&ledger, &text, b""), 24);
    // The pages at the end of the text were used last, and the first ones go.
    let other = ledger.admit(None).unwrap();
    extend(&mut ledger, other, 40, true);
    assert_eq!(ledger.index_size().2, 4); // pages of the window group alone
    assert_eq!((hit(&ledger, &text, b""), hit(&ledger, &text[..15], b"")), (16, 15)); // the last pages of a row are given back first
    ledger.check().unwrap();
}

#[test]
fn pages_that_a_launched_step_reads_are_not_cached_before_it_is_complete() {
    let mut ledger = ledger(vec![group(4, 40, None)]);
    let text = tokens(0, 12);
    let row = computed(&mut ledger, &text, b"");
    let step = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.finish(row).unwrap();
    assert_eq!((ledger.cached_pages(0), ledger.fenced_pages(0)), (Ok(0), Ok(4)));
    // They serve all the same.
    let again = ledger.admit_cached(&text, b"", Some(12), true, None).unwrap();
    assert_eq!((ledger.resolved_len()[again.at()], ledger.fenced_pages(0)), (12, Ok(1)));
    ledger.finish(again).unwrap();
    ledger.complete(step).unwrap();
    assert_eq!((ledger.cached_pages(0), ledger.free_pages(0)), (Ok(3), Ok(37)));
    let page = Page(ledger.index_entries().next().unwrap().pages[0][0]);
    assert_eq!(ledger.page_record(0, page).unwrap().state, PageState::Cached);
    ledger.check().unwrap();
}

/// If the older of two rounds fails, the younger one starts anywhere in its `[lo, hi]`, which may reach below r by then.
#[test]
fn tokens_that_a_round_behind_a_failed_one_may_write_are_not_indexed() {
    let mut config = config(vec![group(1, 60, None)]);
    config.overlap_depth = 2;
    let mut ledger = Ledger::new(config).unwrap();
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 4, true);
    let steps = [0; 3].map(|_| ledger.prepare_decode(&[row.0], &[1], true).unwrap());
    for plan in &steps {
        ledger.launch(plan.step).unwrap();
    }
    ledger.resolve(steps[0].step, &[3]).unwrap();
    ledger.complete(steps[0].step).unwrap();
    assert_eq!((ledger.resolved_len()[row.at()], steps[2].lo[0]), (7, 6));
    assert!(matches!(ledger.index(row, &tokens(0, 7), b""), Err(Error::NotReady(_))));
    assert!(matches!(ledger.pin_prefix(row, 7), Err(Error::NotReady(_))));
    assert_eq!(ledger.index(row, &tokens(0, 6), b""), Ok(6));
    // With the older one resolved, the younger one starts at r.
    ledger.resolve(steps[1].step, &[1]).unwrap();
    ledger.complete(steps[1].step).unwrap();
    assert_eq!(ledger.index(row, &tokens(0, 8), b""), Ok(8));
}

#[test]
fn tokens_that_a_round_in_flight_may_write_are_not_indexed() {
    let mut ledger = ledger(vec![group(4, 40, None)]);
    let text = tokens(0, 20);
    let row = computed(&mut ledger, &text[..6], b"");
    let first = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(first).unwrap();
    let second = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(second).unwrap();
    assert!(matches!(ledger.index(row, &text[..7], b""), Err(Error::Shape(_))));
    ledger.resolve(first, &[3]).unwrap();
    // Resolved, but the step may still move KV.
    assert!(matches!(ledger.index(row, &text[..9], b""), Err(Error::NotReady(_))));
    ledger.complete(first).unwrap();
    assert_eq!(ledger.index(row, &text[..9], b""), Ok(9)); // the second round writes from 9 on
    assert_eq!(hit(&ledger, &text, b""), 9);
}

#[test]
fn bad_calls_change_nothing() {
    let mut ledger = ledger(vec![group(4, 40, None)]);
    let row = computed(&mut ledger, &tokens(0, 8), b"");
    let before = (ledger.state_hash(), ledger.digest());
    let long = [0; 257];
    let refused = [
        ledger.index(Row(3), &[1], b"").unwrap_err(),
        ledger.index(row, &[], b"").unwrap_err(),
        ledger.index(row, &tokens(0, 9), b"").unwrap_err(),
        ledger.index(row, &[1], &long).unwrap_err(),
        ledger.admit_cached(&[1], b"", Some(2), false, None).unwrap_err(),
        ledger.admit_cached(&[1], b"", Some(-1), false, None).unwrap_err(),
        ledger.admit_cached(&[1], &long, None, false, None).unwrap_err(),
        ledger.match_prefix(&[1], &long, None, false).unwrap_err(),
        ledger.forget(Some(&long)).unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, Error::Shape(_)), "{error}");
    }
    assert_eq!((ledger.state_hash(), ledger.digest()), before);
    assert_eq!(ledger.match_prefix(&[], b"", None, false).unwrap().len, 0);
    assert_eq!(ledger.forget(Some(b"nobody")), Ok(()));
}

/// Texts of one token: as many children of a root.
#[test]
fn an_index_of_thousands_of_one_token_texts() {
    let mut config = config(vec![group(4, 3_000, None)]);
    config.max_context_len = 40;
    let mut ledger = Ledger::new(config).unwrap();
    for token in (0..4_000).map(|at| (at * 7_919) % 4_001) {
        kept_quickly(&mut ledger, token);
    }
    assert_eq!(ledger.index_size().0, 3_000);
    ledger.check().unwrap();
    ledger.forget(None).unwrap();
    assert_eq!((ledger.free_pages(0), ledger.index_size().0), (Ok(3_000), 0));
}

fn kept_quickly(ledger: &mut Ledger, token: i32) {
    let row = ledger.admit(None).unwrap();
    extend(ledger, row, 1, true);
    ledger.index(row, &[token], b"").unwrap();
    ledger.finish(row).unwrap();
}

#[test]
fn a_recorded_run_replays_and_a_snapshot_brings_the_index_back() {
    let path = std::env::temp_dir().join(format!("specpool-prefix-{}.log", std::process::id()));
    let mut ledger = Ledger::recorded(config(vec![group(4, 14, None), group(2, 40, Some(5))]), &path, 1 << 20).unwrap();
    kept(&mut ledger, &tokens(0, 30), b"salt");
    let snapshot = ledger.snapshot().unwrap();
    let row = ledger.admit_cached(&tokens(0, 20), b"salt", None, true, Some("tag")).unwrap();
    extend(&mut ledger, row, 38, true);
    ledger.index(row, &[tokens(0, 19), tokens(70, 19)].concat(), b"salt").unwrap();
    ledger.finish(row).unwrap();
    ledger.forget(Some(b"other")).unwrap();
    let after = ledger.state_hash();
    ledger.restore(&snapshot).unwrap();
    assert_eq!(hit(&ledger, &tokens(0, 30), b"salt"), 30);
    ledger.check().unwrap();
    ledger.forget(None).unwrap();
    ledger.close().unwrap();
    assert_ne!(after, ledger.state_hash());

    let mut replay = Replay::open(&path).unwrap();
    let mut again = replay.ledger().unwrap();
    let mut shown = Vec::new();
    while let Some(run) = replay.advance(&mut again).unwrap() {
        shown.push(run.to_string());
        again.check().unwrap();
    }
    assert_eq!((again.state_hash(), again.digest()), (ledger.state_hash(), ledger.digest()));
    let has = |text: &str| assert!(shown.iter().any(|line| line.contains(text)), "{text}: {shown:?}");
    has("index(1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, .. 30 tokens], salt=b\"salt\") -> 30");
    has(".. 19 tokens], salt=b\"salt\", needs_draft=True) -> row 1");
    has("forget(b\"other\")");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn an_entry_of_many_pages_may_be_shorter_than_their_common_multiple() {
    // No row has 12 tokens, so an entry takes 10: three pages of 4 and two of 6.
    let mut ledger =
        Ledger::new(LedgerConfig { max_context_len: 10, ..config(vec![group(4, 9, None), group(6, 9, None)]) })
            .unwrap();
    let text = tokens(0, 10);
    kept(&mut ledger, &text, b"");
    assert_eq!((ledger.index_size().0, ledger.cached_pages(0), ledger.cached_pages(1)), (1, Ok(3), Ok(2)));
    let pages: Vec<Vec<i32>> =
        ledger.index_entries().next().unwrap().pages.iter().map(|pages| pages.to_vec()).collect();
    let row = ledger.admit_cached(&text, b"", Some(10), false, None).unwrap();
    for (at, pages) in pages.iter().enumerate() {
        let held = ledger.page_table(at).unwrap().row(row);
        assert_eq!(held[..pages.len() - 1], pages[..pages.len() - 1]); // the last one is copied
    }
    ledger.check().unwrap();
}

#[test]
fn a_page_that_is_known_as_another_text_is_not_known_twice() {
    let mut ledger = ledger(vec![group(16, 30, None)]);
    let row = computed(&mut ledger, &tokens(0, 7), b"a");
    kept(&mut ledger, &tokens(0, 5), b"b");
    assert_eq!(ledger.index(row, &tokens(0, 7), b"b"), Ok(0)); // a longer text than the one of 5, on a page of "a"
    assert_eq!([hit(&ledger, &tokens(0, 7), b"a"), hit(&ledger, &tokens(0, 7), b"b")], [7, 5]);
    ledger.check().unwrap();
}

#[test]
fn a_longer_tail_keeps_the_pages_that_its_row_has_given_up_below_a_window() {
    let mut ledger = ledger(vec![group(16, 30, None), group(4, 30, Some(4))]);
    let (row, text) = (ledger.admit(None).unwrap(), tokens(0, 14));
    extend(&mut ledger, row, 6, true);
    ledger.index(row, &text[..6], b"").unwrap();
    let window = |ledger: &Ledger| ledger.index_entries().next().unwrap().pages[1].to_vec();
    let before = window(&ledger);
    assert!(before[0] > 0 && before[1] > 0);
    extend(&mut ledger, row, 14, true);
    extend(&mut ledger, row, 15, true); // the window has left the first two pages
    assert_eq!(ledger.index(row, &text, b""), Ok(14));
    let after = window(&ledger);
    assert_eq!((after[0], after[1]), (before[0], 0)); // the second one lacks the tokens behind the sixth
    assert!(after[2] > 0 && after[3] > 0);
    ledger.check().unwrap();
}

#[test]
fn a_window_that_was_given_up_comes_back_when_the_text_is_computed_again() {
    let mut ledger = ledger(vec![group(4, 40, None), group(4, 12, Some(6))]);
    kept(&mut ledger, &tokens(0, 12), b"");
    let other = ledger.admit(None).unwrap();
    extend(&mut ledger, other, 38, true);
    ledger.finish(other).unwrap();
    assert_eq!(hit(&ledger, &tokens(0, 12), b""), 8);
    kept(&mut ledger, &tokens(0, 12), b"");
    assert_eq!((hit(&ledger, &tokens(0, 12), b""), ledger.index_size().0), (12, 3));
}

#[test]
fn a_row_that_computed_a_known_text_keeps_pages_that_it_may_write() {
    let mut ledger = ledger(vec![group(4, 40, None)]);
    kept(&mut ledger, &tokens(0, 12), b"");
    let row = computed(&mut ledger, &tokens(0, 12), b"");
    assert_eq!(ledger.protected_len(0).unwrap()[row.at()], 0);
    assert_eq!(ledger.trim(row, 5), Ok(5));
    ledger.check().unwrap();
}

#[test]
fn a_hit_that_needs_draft_kv_ends_within_an_entry_and_may_follow_another_text() {
    let mut ledger = ledger(vec![group(4, 60, None)]);
    // Of these 12 tokens the first 6 have draft KV.
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 6, true);
    extend(&mut ledger, row, 12, false);
    ledger.index(row, &tokens(0, 12), b"").unwrap();
    let with_draft =
        |ledger: &Ledger, text: &[i32]| ledger.match_prefix(text, b"", Some(text.len() as i32), true).unwrap().len;
    assert_eq!((hit(&ledger, &tokens(0, 12), b""), with_draft(&ledger, &tokens(0, 12))), (12, 6));
    let hit = ledger.admit_cached(&tokens(0, 12), b"", Some(12), false, None).unwrap();
    assert_eq!(ledger.drafted_len()[hit.at()], 6);
    // Another text parts from it at the eighth token, and has draft KV of all.
    kept(&mut ledger, &[&tokens(0, 7)[..], &[70, 71]].concat(), b"");
    assert_eq!(with_draft(&ledger, &tokens(0, 12)), 7);
    let short = ledger.admit_cached(&tokens(0, 12), b"", Some(12), true, None).unwrap();
    assert_eq!((ledger.resolved_len()[short.at()], ledger.drafted_len()[short.at()]), (7, 7));
    ledger.check().unwrap();
}

#[test]
fn normal_forms_differ_in_what_goes_first() {
    let forms = [[100, 200], [200, 100]].map(|order| {
        let mut ledger = ledger(vec![group(4, 15, None)]);
        for first in [100, 200] {
            kept(&mut ledger, &tokens(first, 4), b"");
        }
        for first in order {
            let row = ledger.admit_cached(&tokens(first, 4), b"", Some(4), false, None).unwrap();
            ledger.finish(row).unwrap();
        }
        let (mut names, mut words) = (PageNames::default(), Vec::new());
        ledger.write_normal_form(&mut names, &mut |word| words.push(word));
        ledger.write_normal_pages(&names, &mut |word| words.push(word));
        words
    });
    assert_ne!(forms[0], forms[1]);
}

#[test]
fn of_many_texts_that_part_early_the_hit_follows_the_one_with_most_draft_kv() {
    let target = tokens(1, 8);
    let text = |agree: usize, next: i32| [&target[..agree], &[next; 8][agree..]].concat();
    // How much each agrees with the target, whether it comes before or behind it, and how much of it is drafted.
    let siblings = [(6, 0, 0), (6, 99, 1), (5, 0, 8), (4, 99, 8), (3, 0, 8), (3, 1, 2), (2, 99, 8), (1, 0, 8)];
    for drop in 0..siblings.len() {
        let mut ledger = ledger(vec![group(8, 40, None)]);
        let mut most = 0;
        for &(agree, next, drafted) in siblings.iter().skip(drop) {
            let row = ledger.admit(None).unwrap();
            if drafted > 0 {
                extend(&mut ledger, row, drafted, true);
            }
            if drafted < 8 {
                extend(&mut ledger, row, 8, false);
            }
            assert_eq!(ledger.index(row, &text(agree, next), b""), Ok(8));
            ledger.finish(row).unwrap();
            most = most.max(drafted.min(agree as i32));
        }
        assert_eq!(ledger.match_prefix(&target, b"", Some(8), true).unwrap().len, most, "{drop}");
        assert_eq!(hit(&ledger, &target, b""), siblings[drop].0 as i32);
        ledger.check().unwrap();
    }
}

#[test]
fn pages_kept_for_a_rewind_are_read_only_up_to_the_indexed_tokens() {
    let mut ledger = ledger(vec![group(4, 40, None), group(4, 40, Some(6))]);
    let row = ledger.admit(None).unwrap();
    extend(&mut ledger, row, 10, true);
    ledger.end_turn(row, 10).unwrap();
    let before = ledger.page_table(1).unwrap().row(row)[..3].to_vec();
    extend(&mut ledger, row, 24, true); // the window has left the pages that the checkpoint keeps
    extend(&mut ledger, row, 25, true);
    assert_eq!(ledger.index(row, &tokens(0, 8), b""), Ok(8));
    let states = [1, 2].map(|column| ledger.page_record(1, Page(before[column])).unwrap().state);
    assert_eq!(states, [PageState::Shared, PageState::Owned]);
    ledger.check().unwrap();
}
