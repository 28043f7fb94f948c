//! Every page is in one state, and only its owner can give it back.

use specpool_core::{Error, Page, PagePool, PageState, PageTable, Row, Verb};

const A: Row = Row(1);
const B: Row = Row(2);

fn take(pool: &mut PagePool, row: Row) -> Page {
    pool.take(row, 7, Verb::PrepareExtend).expect("a free page")
}

#[test]
fn pages_count_from_one_and_end() {
    let mut pool = PagePool::new(2).unwrap();
    assert_eq!((take(&mut pool, A), take(&mut pool, A)), (Page(1), Page(2)));
    assert_eq!(pool.take(A, 7, Verb::PrepareExtend), None);
    assert_eq!((pool.num_free(), pool.num_fenced()), (0, 0));
}

#[test]
fn double_free_and_foreign_free_are_refused_with_the_page_and_its_owner() {
    let mut pool = PagePool::new(2).unwrap();
    let page = take(&mut pool, A);
    let foreign = pool.release(page, B, 0, 0, Verb::Finish).unwrap_err();
    assert_eq!((foreign.page, foreign.state, foreign.owner, foreign.birth_step), (page, PageState::Owned, A, 7));
    assert_eq!(pool.release(page, A, 0, 0, Verb::Finish), Ok(()));
    let twice = pool.release(page, A, 0, 0, Verb::Abort).unwrap_err();
    assert_eq!((twice.state, twice.owner, twice.last_verb), (PageState::Free, A, Verb::Finish));
    assert_eq!(pool.num_free(), 2);
}

#[test]
fn a_page_that_never_was_cannot_be_freed() {
    let mut pool = PagePool::new(2).unwrap();
    for page in [Page::SINK, Page(3), Page(-1), Page(2)] {
        assert_eq!(pool.release(page, A, 0, 0, Verb::Finish).unwrap_err().state, PageState::Free);
    }
    assert!(pool.record(Page::SINK).is_none() && pool.record(Page(3)).is_none());
}

#[test]
fn a_fenced_page_comes_back_with_its_step_and_not_before() {
    let mut pool = PagePool::new(1).unwrap();
    let page = take(&mut pool, A);
    assert_eq!(pool.release(page, A, 9, 7, Verb::Trim), Ok(()));
    assert_eq!(pool.release(page, A, 9, 7, Verb::Trim).unwrap_err().state, PageState::Fenced);
    pool.complete(8);
    assert_eq!((pool.take(B, 10, Verb::PrepareDecode), pool.num_fenced()), (None, 1));
    pool.complete(9);
    assert_eq!((pool.take(B, 10, Verb::PrepareDecode), pool.num_fenced()), (Some(page), 0));
}

#[test]
fn a_huge_pool_costs_nothing_before_it_is_used() {
    let mut pool = PagePool::new((1 << 31) - 2).unwrap();
    assert_eq!(take(&mut pool, A), Page(1));
    assert_eq!(pool.num_free(), (1 << 31) - 3);
}

#[test]
fn a_pool_or_table_of_impossible_size_is_refused() {
    for size in [i64::MIN, -1, 0, 1 << 31, i64::MAX] {
        assert!(matches!(PagePool::new(size), Err(Error::Config(_))), "{size}");
        for (num_rows, pages_per_row) in [(size, 1), (1, size), (size, size)] {
            assert!(
                matches!(PageTable::new(num_rows, pages_per_row), Err(Error::Config(_))),
                "{num_rows} {pages_per_row}"
            );
        }
    }
}

#[test]
fn a_shared_page_goes_with_its_last_holder_and_stays_until_the_latest_fence_of_all() {
    let mut pool = PagePool::new(1).unwrap();
    let page = take(&mut pool, A);
    assert_eq!(pool.share(page, Verb::Fork), Ok(()));
    assert_eq!(pool.record(page).map(|record| (record.state, record.holders)), Some((PageState::Shared, 2)));
    assert_eq!(pool.release(page, A, 9, 3, Verb::Finish), Ok(()));
    assert_eq!((pool.num_free(), pool.num_fenced()), (0, 0));
    assert_eq!(pool.record(page).unwrap().state, PageState::Shared, "read-only under its last holder too");
    assert_eq!(pool.release(page, B, 5, 3, Verb::Finish), Ok(()));
    pool.complete(8);
    assert_eq!((pool.num_free(), pool.num_fenced()), (0, 1), "the first holder's step 9 may still read it");
    pool.complete(9);
    assert_eq!((pool.num_free(), pool.num_fenced()), (1, 0));
    assert_eq!(pool.share(page, Verb::Fork).unwrap_err().state, PageState::Free);
    assert_eq!(pool.release_shared(page, 9, Verb::ReleasePrefix).unwrap_err().state, PageState::Free);
}

#[test]
fn a_page_taken_again_has_no_fence_of_its_earlier_life() {
    let mut pool = PagePool::new(1).unwrap();
    let page = take(&mut pool, A);
    assert_eq!(pool.release(page, A, 9, 3, Verb::Trim), Ok(()));
    pool.complete(9);
    assert_eq!(pool.take(B, 10, Verb::PrepareDecode), Some(page));
    assert_eq!(pool.record(page).unwrap().fence, 0);
    // Only the same numbers again: completed is behind the old fence, as after a cancel in another order.
    assert_eq!(pool.release(page, B, 0, 8, Verb::Cancel), Ok(()));
    assert_eq!((pool.num_free(), pool.num_fenced()), (1, 0));
}

#[test]
fn the_map_says_who_touched_a_page_last_in_the_ledgers_words() {
    assert_eq!(Verb::None.name(), "none");
    for verb in Verb::LOGGED.iter().chain(Verb::UNLOGGED) {
        let underscored = |letter: char| letter.is_uppercase().then_some('_').into_iter().chain(letter.to_lowercase());
        let words: String = format!("{verb:?}").chars().flat_map(underscored).collect();
        // Calls of one verb begin with its name: `AdmitCached` is of `admit`.
        let (name, call) = (verb.name(), &words[1..]);
        assert!(call == name || call.starts_with(&format!("{name}_")), "{call} is of {name}");
        assert_eq!(verb.to_string(), name);
    }
    let states = [PageState::Free, PageState::Owned, PageState::Shared, PageState::Fenced];
    assert_eq!(states.map(|state| state.to_string()), ["free", "owned", "shared", "fenced"]);
}

/// 40 bytes of ownership map and a place in a list; the map has a line for page 0 and each page handed out so far.
#[test]
fn memory_is_stated_and_grows_with_the_pages_handed_out() {
    let mut pool = PagePool::new(5).unwrap();
    assert_eq!((PagePool::bytes_per_page(), pool.num_mapped(), pool.num_pages()), (56, 1, 5));
    take(&mut pool, A);
    take(&mut pool, A);
    assert_eq!(pool.num_mapped(), 3);
}
