//! Laws of the verbs for a prefix cache outside the ledger, with the numbers of their refusals. `specpool-check` runs
//! them over every interleaving of small ledgers.

use crate::kit::{extend, group};
use specpool_core::{Error, Group, Ledger, LedgerConfig, Page, PageState, Row, Shape};

fn ledger(groups: Vec<Group>) -> Ledger {
    let chain = Shape::eagle(1, 1, 2).unwrap();
    Ledger::new(LedgerConfig { overlap_depth: 1, digest: true, ..LedgerConfig::new(groups, vec![chain], 4, 24) })
        .unwrap()
}

fn one() -> Ledger {
    ledger(vec![group("kv", 4, None)])
}

fn filled(ledger: &mut Ledger, len: i32) -> Row {
    let row = ledger.admit(None).unwrap();
    extend(ledger, row, len, true);
    row
}

fn cells(ledger: &Ledger, row: Row, columns: usize) -> Vec<i32> {
    ledger.page_table(0).unwrap().row(row)[..columns].to_vec()
}

/// Makes a call that is refused: nothing has changed, and the error has the text.
fn refused<T>(ledger: &mut Ledger, call: impl FnOnce(&mut Ledger) -> Result<T, Error>, text: &str) {
    let before = (ledger.state_hash(), ledger.digest(), ledger.lent_pages(0).unwrap());
    let error = call(ledger).err().expect("it should be refused");
    assert!(error.to_string().contains(text), "{error}");
    assert_eq!((ledger.state_hash(), ledger.digest(), ledger.lent_pages(0).unwrap()), before);
    ledger.check().unwrap();
}

#[test]
fn lent_pages_outlive_their_row_and_go_back_once() {
    let mut ledger = one();
    let row = filled(&mut ledger, 10);
    let pages = cells(&ledger, row, 2);
    ledger.lend(row, 0, 8).unwrap();
    assert_eq!((ledger.protected_len(0).unwrap()[row.at()], ledger.lent_pages(0).unwrap()), (8, pages.clone()));
    ledger.finish(row).unwrap();
    assert_eq!((ledger.free_pages(0).unwrap(), ledger.cached_pages(0).unwrap()), (22, 0));
    assert_eq!(ledger.page_record(0, Page(pages[0])).unwrap().state, PageState::Shared);
    ledger.check().unwrap();
    let twice = [pages[0], pages[1], pages[0]];
    refused(
        &mut ledger,
        |ledger| ledger.release_lent(0, &twice),
        &format!("page {} of group kv is named twice", pages[0]),
    );
    refused(
        &mut ledger,
        |ledger| ledger.release_lent(0, &[pages[1], 25]),
        "page 25 in group kv: its pages are 1 to 24",
    );
    refused(&mut ledger, |ledger| ledger.release_lent(0, &[pages[1], 0]), "page 0 in group kv");
    refused(&mut ledger, |ledger| ledger.release_lent(1, &[]), "group");
    ledger.release_lent(0, &pages).unwrap();
    assert_eq!(ledger.free_pages(0).unwrap(), 24);
    refused(&mut ledger, |ledger| ledger.release_lent(0, &pages), "free, not lent");
    // What is taken again is not lent: its holder is a row now.
    let row = filled(&mut ledger, 4);
    let page = cells(&ledger, row, 1);
    refused(&mut ledger, |ledger| ledger.release_lent(0, &page), "owned, not lent");
}

#[test]
fn a_row_on_lent_pages_starts_where_they_end() {
    let mut ledger = one();
    let row = filled(&mut ledger, 9);
    ledger.lend(row, 0, 8).unwrap();
    let pages = cells(&ledger, row, 2);
    for (len, text) in [(0, "multiple of 4 up to 24, got 0"), (6, "got 6"), (28, "got 28"), (-4, "got -4")] {
        refused(&mut ledger, |ledger| ledger.admit_lent(&pages, len, None), text);
    }
    refused(&mut ledger, |ledger| ledger.admit_lent(&pages, 4, None), "4 tokens are 1 pages of all groups, got 2");
    refused(
        &mut ledger,
        |ledger| ledger.admit_lent(&[0, pages[1]], 8, None),
        "the columns [0, 1) are 0, at most those below 0",
    );
    refused(&mut ledger, |ledger| ledger.admit_lent(&[pages[0], 0], 8, None), "page 0 in group kv");
    let hit = ledger.admit_lent(&pages, 8, Some("hit")).unwrap();
    assert_eq!((ledger.resolved_len()[hit.at()], ledger.drafted_len()[hit.at()]), (8, 8));
    assert_eq!(cells(&ledger, hit, 2), pages);
    assert!(!ledger.has_root(hit));
    // The tree gives the pages up while a step of the row is in flight: they wait for the row, then for the step.
    let step = ledger.prepare_extend(&[hit.0], &[10], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.release_lent(0, &pages).unwrap();
    ledger.finish(row).unwrap();
    ledger.finish(hit).unwrap();
    assert_eq!((ledger.free_pages(0).unwrap(), ledger.fenced_pages(0).unwrap()), (21, 3));
    ledger.complete(step).unwrap();
    assert_eq!(ledger.free_pages(0).unwrap(), 24);
}

#[test]
fn a_rebind_gives_the_duplicates_back_behind_the_fence() {
    let mut ledger = one();
    let (first, second) = (filled(&mut ledger, 10), filled(&mut ledger, 10));
    ledger.lend(first, 0, 8).unwrap();
    let (pages, own) = (cells(&ledger, first, 2), cells(&ledger, second, 2));
    let round = ledger.prepare_decode(&[second.0], &[1], true).unwrap().step;
    ledger.launch(round).unwrap();
    let turned = [pages[1], pages[0]];
    let short = &pages[..1];
    refused(&mut ledger, |ledger| ledger.rebind(second, 0, 8, short), "8 tokens are 2 pages of all groups, got 1");
    refused(&mut ledger, |ledger| ledger.rebind(second, 0, 8, &[pages[0], pages[0]]), "named twice");
    refused(&mut ledger, |ledger| ledger.rebind(second, 0, 8, &own), "owned, not lent");
    refused(
        &mut ledger,
        |ledger| ledger.rebind(first, 0, 4, &turned[..1]),
        "holds its position 4, and cannot hold another",
    );
    ledger.rebind(second, 0, 8, &pages).unwrap();
    assert_eq!((cells(&ledger, second, 2), ledger.protected_len(0).unwrap()[second.at()]), (pages.clone(), 8));
    // The round in flight may read the row's own pages.
    assert_eq!(ledger.fenced_pages(0).unwrap(), 2);
    assert_eq!(ledger.page_record(0, Page(own[0])).unwrap().fence, round);
    ledger.check().unwrap();
    ledger.resolve(round, &[2]).unwrap();
    ledger.complete(round).unwrap();
    assert_eq!(ledger.fenced_pages(0).unwrap(), 0);
    assert_eq!(ledger.resolved_len()[second.at()], 12);
    // The cells are pending, so the device learns of them before the row's next forward.
    let next = ledger.prepare_decode(&[second.0], &[1], true).unwrap().step;
    ledger.launch(next).unwrap();
    let delta = ledger.take_delta(next).unwrap().swap_remove(0);
    let entries = delta.rows.iter().zip(&delta.columns).zip(&delta.pages);
    assert!(entries.into_iter().any(|((&row, &column), &page)| (row, column, page) == (second.0, 0, pages[0])));
}

/// The longest text has 24 tokens.
#[test]
fn a_page_longer_than_any_text_has_no_edge_in_it() {
    for (groups, edge) in
        [(vec![group("kv", 64, None)], 64), (vec![group("kv", 6, None), group("window", 16, Some(16))], 48)]
    {
        let mut ledger = ledger(groups);
        let row = filled(&mut ledger, 24);
        let text = format!("must be a range in [0, 24) with multiples of {edge}");
        refused(&mut ledger, |ledger| ledger.lend(row, 0, 24), &text);
        refused(&mut ledger, |ledger| ledger.rebind(row, 0, 24, &[]), &text);
        let text = format!("length must be a multiple of {edge} up to 24, got 24");
        refused(&mut ledger, |ledger| ledger.admit_lent(&[1], 24, None), &text);
    }
}

#[test]
fn only_what_is_final_is_lent_and_without_a_gap() {
    let mut ledger = one();
    let row = filled(&mut ledger, 14);
    for (start, end) in [(0, 6), (2, 8), (0, 0), (8, 4), (-4, 4), (0, 16), (0, i32::MAX), (i32::MIN, 4)] {
        refused(&mut ledger, |ledger| ledger.lend(row, start, end), "must be a range in [0, 14) with multiples of 4");
    }
    refused(&mut ledger, |ledger| ledger.lend(row, 4, 8), "[4, 8) leaves a gap behind protected_len 0");
    refused(&mut ledger, |ledger| ledger.lend(Row(4), 0, 4), "row 4");
    ledger.lend(row, 0, 4).unwrap();
    let lent = cells(&ledger, row, 1)[0];
    let text = format!("page {lent} of group kv is shared, lent already");
    refused(&mut ledger, |ledger| ledger.lend(row, 0, 8), &text);
    // A round writes from r on, also one that is prepared before the last one is resolved.
    let first = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(first).unwrap();
    let second = ledger.prepare_decode(&[row.0], &[1], true).unwrap().step;
    ledger.launch(second).unwrap();
    refused(&mut ledger, |ledger| ledger.lend(row, 4, 16), "[0, 14)");
    ledger.resolve(first, &[2]).unwrap();
    refused(&mut ledger, |ledger| ledger.lend(row, 4, 16), &format!("step {first} writes from position 14 on"));
    ledger.complete(first).unwrap();
    ledger.lend(row, 4, 16).unwrap();
    ledger.check().unwrap();
    // A copy into the row's tail is not finished.
    ledger.resolve(second, &[1]).unwrap();
    ledger.complete(second).unwrap();
    let twin = ledger.fork(row, None).unwrap();
    refused(&mut ledger, |ledger| ledger.lend(twin, 0, 4), "is not finished");
}

#[test]
fn draft_kv_is_noted_when_a_page_is_lent() {
    let mut ledger = one();
    let row = filled(&mut ledger, 6);
    extend(&mut ledger, row, 12, false); // draft KV ends at 6, inside the second page
    ledger.lend(row, 0, 12).unwrap();
    let pages = cells(&ledger, row, 3);
    let hit = ledger.admit_lent(&pages, 12, None).unwrap();
    assert_eq!(ledger.drafted_len()[hit.at()], 4);
    let other = filled(&mut ledger, 12);
    let text = format!("page {} was lent without draft KV, the row has it up to 12", pages[1]);
    refused(&mut ledger, |ledger| ledger.rebind(other, 0, 12, &pages), &text);
    ledger.rebind(other, 0, 4, &pages[..1]).unwrap();
    assert_eq!(ledger.drafted_len()[other.at()], 12);
}

#[test]
fn a_page_whose_last_slot_is_the_last_with_draft_kv_is_lent_with_it() {
    let mut ledger = one();
    let row = filled(&mut ledger, 8);
    extend(&mut ledger, row, 12, false);
    ledger.lend(row, 0, 12).unwrap();
    let pages = cells(&ledger, row, 3);
    let hit = ledger.admit_lent(&pages, 12, None).unwrap();
    assert_eq!(ledger.drafted_len()[hit.at()], 8);
}

#[test]
fn a_rebind_may_begin_behind_what_the_row_shares_already() {
    let mut ledger = one();
    let (first, second) = (filled(&mut ledger, 14), filled(&mut ledger, 14));
    ledger.lend(first, 0, 12).unwrap();
    let (pages, own) = (cells(&ledger, first, 3), cells(&ledger, second, 3));
    ledger.rebind(second, 0, 4, &pages[..1]).unwrap();
    ledger.rebind(second, 4, 12, &pages[1..]).unwrap();
    assert_eq!(cells(&ledger, second, 3), pages);
    assert_eq!(ledger.free_pages(0).unwrap(), 24 - 5); // three lent ones, and the last one of each row
    assert_eq!(ledger.page_record(0, Page(own[2])).unwrap().state, PageState::Free);
    ledger.check().unwrap();
}

#[test]
fn a_rebind_waits_for_the_step_that_writes_the_range_and_for_copies() {
    let mut ledger = one();
    let (first, second) = (filled(&mut ledger, 14), filled(&mut ledger, 10));
    ledger.lend(first, 0, 12).unwrap();
    let pages = cells(&ledger, first, 3);
    let round = ledger.prepare_decode(&[second.0], &[1], true).unwrap().step;
    ledger.launch(round).unwrap();
    ledger.resolve(round, &[2]).unwrap();
    let text = format!("step {round} writes from position 10 on and is not complete, the range ends at 12");
    refused(&mut ledger, |ledger| ledger.rebind(second, 0, 12, &pages), &text);
    ledger.rebind(second, 0, 8, &pages[..2]).unwrap();
    ledger.complete(round).unwrap();
    ledger.rebind(second, 8, 12, &pages[2..]).unwrap();
    extend(&mut ledger, second, 14, true);
    let twin = ledger.fork(second, None).unwrap();
    refused(&mut ledger, |ledger| ledger.rebind(twin, 0, 4, &pages[..1]), "is not finished");
}

#[test]
fn each_verb_of_lending_is_part_of_the_digest() {
    let mut ledger = one();
    let (first, second) = (filled(&mut ledger, 9), filled(&mut ledger, 9));
    let mut digests = vec![ledger.digest()];
    ledger.lend(first, 0, 8).unwrap();
    digests.push(ledger.digest());
    let pages = cells(&ledger, first, 2);
    ledger.rebind(second, 0, 8, &pages).unwrap();
    digests.push(ledger.digest());
    ledger.admit_lent(&pages, 8, None).unwrap();
    digests.push(ledger.digest());
    ledger.release_lent(0, &pages).unwrap();
    digests.push(ledger.digest());
    assert!(digests.windows(2).all(|pair| pair[0] != pair[1]), "{digests:?}");
}

#[test]
fn a_row_may_begin_on_one_token_and_on_the_longest_text() {
    for (page_size, len) in [(1, 1), (4, 24)] {
        let mut ledger = ledger(vec![Group { num_pages: 64, ..group("kv", page_size, None) }]);
        let row = filled(&mut ledger, len);
        ledger.lend(row, 0, len).unwrap();
        let pages = cells(&ledger, row, len as usize / page_size as usize);
        let hit = ledger.admit_lent(&pages, len, None).unwrap();
        assert_eq!(ledger.resolved_len()[hit.at()], len);
    }
}

#[test]
fn a_closed_ledger_lends_nothing() {
    let mut ledger = one();
    let row = filled(&mut ledger, 8);
    ledger.lend(row, 0, 4).unwrap();
    let pages = cells(&ledger, row, 1);
    ledger.close().unwrap();
    refused(&mut ledger, |ledger| ledger.lend(row, 4, 8), "closed");
    refused(&mut ledger, |ledger| ledger.rebind(row, 0, 4, &pages), "closed");
    refused(&mut ledger, |ledger| ledger.admit_lent(&pages, 4, None), "closed");
    refused(&mut ledger, |ledger| ledger.release_lent(0, &pages), "closed");
}

#[test]
fn a_window_that_has_passed_lends_nothing() {
    let mut ledger = ledger(vec![group("full", 4, None), group("window", 2, Some(4))]);
    let row = filled(&mut ledger, 12);
    extend(&mut ledger, row, 14, true);
    let evicted = ledger.evicted_len(1).unwrap()[row.at()];
    assert_eq!(evicted, 8);
    ledger.lend(row, 0, 12).unwrap();
    assert_eq!((ledger.lent_pages(0).unwrap().len(), ledger.lent_pages(1).unwrap().len()), (3, 2));
    let window = ledger.page_table(1).unwrap().row(row)[..6].to_vec();
    let all = [cells(&ledger, row, 3), window].concat();
    let hit = ledger.admit_lent(&all, 12, None).unwrap();
    assert_eq!((ledger.evicted_len(1).unwrap()[hit.at()], ledger.resolved_len()[hit.at()]), (8, 12));
    let same = filled(&mut ledger, 12);
    refused(&mut ledger, |ledger| ledger.rebind(same, 0, 12, &all), "page 0 in group window");
    extend(&mut ledger, same, 14, true);
    let mut wrong = all.clone();
    wrong[3] = all[7];
    refused(&mut ledger, |ledger| ledger.rebind(same, 0, 12, &wrong), "it holds no page at position 0, got page");
    ledger.rebind(same, 0, 12, &all).unwrap();
    ledger.check().unwrap();
}

#[test]
fn an_idle_row_stays_idle_and_its_lent_pages_do_not_count_as_reclaimable() {
    let mut ledger = one();
    let (first, second) = (filled(&mut ledger, 9), filled(&mut ledger, 9));
    ledger.end_turn(second, 9).unwrap();
    assert_eq!(ledger.reclaimable_pages(0).unwrap(), 3);
    ledger.lend(first, 0, 8).unwrap();
    let pages = cells(&ledger, first, 2);
    ledger.rebind(second, 0, 8, &pages).unwrap();
    assert_eq!((ledger.reclaimable_pages(0).unwrap(), ledger.idle()[second.at()]), (1, true));
    ledger.finish(first).unwrap();
    ledger.release_lent(0, &pages).unwrap();
    assert_eq!(ledger.reclaimable_pages(0).unwrap(), 3);
    ledger.check().unwrap();
}

#[test]
fn a_snapshot_has_what_was_lent() {
    let mut ledger = one();
    let row = filled(&mut ledger, 8);
    ledger.lend(row, 0, 8).unwrap();
    let (pages, snapshot) = (cells(&ledger, row, 2), ledger.snapshot().unwrap());
    let (hash, lent) = (ledger.state_hash(), ledger.lent_pages(0).unwrap());
    ledger.release_lent(0, &pages[1..]).unwrap();
    assert_ne!(ledger.state_hash(), hash);
    ledger.restore(&snapshot).unwrap();
    assert_eq!(ledger.lent_pages(0).unwrap(), lent);
    ledger.release_lent(0, &pages).unwrap();
}

/// A cache outside may name the pages of an indexed text in another order. The row's tokens are others then, whatever
/// the caller says, and the index keeps its pages where they are.
#[test]
fn pages_of_an_entry_in_another_order_are_not_its_pages() {
    let mut ledger = ledger(vec![group("kv", 4, None), group("small", 2, None)]);
    let row = filled(&mut ledger, 4);
    let small = ledger.page_table(1).unwrap().row(row)[..2].to_vec();
    let mut pages = [cells(&ledger, row, 1), small].concat();
    assert_eq!(ledger.index(row, &[5, 6, 7], b"").unwrap(), 3, "a tail, which may grow");
    ledger.lend(row, 0, 4).unwrap();
    ledger.finish(row).unwrap();
    pages.swap(1, 2);
    let other = ledger.admit_lent(&pages, 4, None).unwrap();
    assert_eq!(ledger.index(other, &[5, 6, 7, 8], b"").unwrap(), 0);
    ledger.check().unwrap();
    ledger.finish(other).unwrap();
    pages.swap(1, 2);
    let same = ledger.admit_lent(&pages, 4, None).unwrap();
    assert_eq!(ledger.index(same, &[5, 6, 7, 8], b"").unwrap(), 4);
    ledger.check().unwrap();
}

/// Such a row may be cut within a page that only it and the index hold: the entry forgets what may be written over.
#[test]
fn a_cut_within_a_page_that_stands_elsewhere_in_its_entry_shortens_the_entry() {
    for (order, cut) in [([1, 0], 1), ([1, 0], 3), ([0, 1], 1), ([0, 1], 3)] {
        let mut ledger = ledger(vec![group("small", 2, None), group("kv", 4, None)]);
        let row = filled(&mut ledger, 4);
        let (small, kv) = (cells(&ledger, row, 2), ledger.page_table(1).unwrap().row(row)[..1].to_vec());
        assert_eq!(ledger.index(row, &[5, 6, 7, 8], b"").unwrap(), 4);
        ledger.lend(row, 0, 4).unwrap();
        ledger.finish(row).unwrap();
        let other = ledger.admit_lent(&[small[order[0]], small[order[1]], kv[0]], 4, None).unwrap();
        ledger.release_lent(0, &small).unwrap();
        ledger.release_lent(1, &kv).unwrap();
        ledger.trim(other, cut).unwrap();
        ledger.check().unwrap();
        let known = ledger.match_prefix(&[5, 6, 7, 8, 9], b"", None, true).unwrap().len;
        assert!(known <= cut, "{known} tokens are known after a cut to {cut} of pages {order:?}");
    }
}
