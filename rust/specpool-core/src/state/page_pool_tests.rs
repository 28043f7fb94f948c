use super::*;

const ROW: Row = Row(1);

/// Of 9 pages: 1 owned, 2 shared by two, 3 fenced behind step 5, 4 behind a copy, 5 and 6 free again.
fn busy() -> PagePool {
    let mut pool = PagePool::new(9).unwrap();
    let pages: Vec<Page> = (0..6).map(|_| pool.take(ROW, 1, Verb::PrepareExtend).unwrap()).collect();
    pool.share(pages[1], Verb::Fork).unwrap();
    pool.hold(pages[3]);
    for (page, fence) in [(2, 5), (3, 0), (5, 4), (4, 0)] {
        pool.release(pages[page], ROW, fence, 4, Verb::Trim).unwrap();
    }
    assert_eq!(pool.broken(4).unwrap(), []);
    assert_eq!([pool.copies_of(pages[3]), pool.copies_of(pages[0])], [1, 0]);
    assert_eq!([pool.holders_if_unfenced(pages[1], 4), pool.holders_if_unfenced(pages[0], 4)], [Some(2), Some(1)]);
    assert_eq!([pool.holders_if_unfenced(pages[2], 4), pool.holders_if_unfenced(pages[3], 4)], [None; 2]);
    assert_eq!(pool.holders_if_unfenced(pages[2], 5), Some(0));
    pool
}

#[test]
fn every_planted_fault_is_reported() {
    type Fault = fn(&mut PagePool);
    let faults: [(&str, Fault); 20] = [
        ("0 pages are held by idle rows only, 1 are counted", |pool| pool.num_reclaimable = 1),
        ("1 pages are held by idle rows only, 0 are counted", |pool| pool.map[1].idle_holders = 1),
        ("3 returned pages are marked free, 2 fenced and 0 cached, the lists hold 2, 2 and 0", |pool| {
            pool.map[1] = Line::default();
        }),
        ("2 returned pages are marked free, 1 fenced and 0 cached, the lists hold 2, 2 and 0", |pool| {
            pool.map[3].state = PageState::Owned;
        }),
        ("page 5 is listed twice", |pool| pool.returned[0] = Page(5)),
        ("page 3 is listed twice", |pool| pool.fenced[1] = Page(3)),
        ("page 1 is listed free, marked owned", |pool| pool.returned[0] = Page(1)),
        ("page 2 is listed fenced, marked shared", |pool| pool.fenced[0] = Page(2)),
        ("page 1 is owned with 0 holders", |pool| pool.map[1].holders = 0),
        ("page 1 is owned with 2 holders", |pool| pool.map[1].holders = 2),
        ("page 2 is shared with 0 holders", |pool| pool.map[2].holders = 0),
        ("page 5 is free with 1 holders", |pool| pool.map[5].holders = 1),
        ("page 3 is fenced behind step 4, complete is 4", |pool| pool.map[3].fence = 4),
        ("page 5 is free, but step 5 and 0 copies may touch it", |pool| pool.map[5].fence = 5),
        ("page 6 is free, but step 4 and 1 copies may touch it", |pool| pool.map[6].copies = 1),
        ("1 pages are shared, 2 are counted", |pool| pool.num_shared = 2),
        ("page 1 is owned with 2 holders, one of them the prefix index", |pool| {
            (pool.map[1].holders, pool.map[1].entry) = (2, 9);
        }),
        ("page 5 is free with 1 holders, one of them the prefix index", |pool| {
            (pool.map[5].holders, pool.map[5].entry) = (1, 9);
        }),
        ("page 1 is cached, but step 5 and 0 copies may touch it", |pool| {
            (pool.map[1].state, pool.map[1].entry, pool.map[1].fence) = (PageState::Cached, 9, 5);
        }),
        ("page 1 is cached with 2 holders, one of them the prefix index", |pool| {
            (pool.map[1].state, pool.map[1].entry, pool.map[1].holders) = (PageState::Cached, 9, 2);
        }),
    ];
    for (expected, plant) in faults {
        let mut pool = busy();
        plant(&mut pool);
        let report = pool.broken(4).unwrap();
        assert!(report.iter().any(|(_, line)| line == expected), "{expected:?} is not in {report:?}");
    }
}

fn hash(pool: &PagePool) -> u64 {
    let mut digest = Digest::new();
    pool.hash(&mut digest);
    digest.value()
}

#[test]
fn the_hash_sees_every_number_that_counts() {
    type Change = fn(&mut PagePool);
    let changes: [Change; 9] = [
        |pool| pool.map[1].state = PageState::Shared,
        |pool| pool.map[1].owner = 2,
        |pool| pool.map[2].holders = 3,
        |pool| pool.map[3].fence = 6,
        |pool| pool.map[4].copies = 2,
        |pool| pool.fenced.swap(0, 1),
        |pool| pool.returned.swap(0, 1),
        |pool| pool.map.swap(1, 2),
        |pool| assert!(pool.take(ROW, 1, Verb::PrepareExtend).is_some()),
    ];
    let mut seen = vec![hash(&busy())];
    for change in changes {
        let mut pool = busy();
        change(&mut pool);
        let hash = hash(&pool);
        assert!(!seen.contains(&hash), "change {} leaves no trace", seen.len());
        seen.push(hash);
    }
    // By which verb a page was touched last decides nothing. When it was taken counts without page fencing only, for
    // a copy into it that is not finished (`check_no_copy_into`): that much the hash does not see.
    let mut pool = busy();
    (pool.map[1].birth_step, pool.map[1].last_verb) = (7, Verb::Launch);
    assert_eq!(hash(&pool), seen[0]);
}

#[test]
fn free_pages_are_handed_out_in_their_turn() {
    let mut pool = busy();
    let free = pool.records(9).filter(|record| record.page.0 > 0 && record.state == PageState::Free);
    let mut expected: Vec<(usize, Page)> = free.map(|record| (pool.turn_of(record.page), record.page)).collect();
    expected.sort_unstable();
    let taken: Vec<(usize, Page)> = std::iter::from_fn(|| pool.take(ROW, 1, Verb::PrepareExtend)).enumerate().collect();
    assert_eq!(expected, taken);
    assert_eq!(taken.len(), 5);
}

/// Pages that were handed out and came back in order are as if never touched, however many.
#[test]
fn the_hash_takes_pages_given_back_in_order_for_fresh_ones() {
    let fresh = PagePool::new(9).unwrap();
    let mut pool = fresh.clone();
    let pages: Vec<Page> = (0..3).map(|_| pool.take(ROW, 1, Verb::PrepareExtend).unwrap()).collect();
    for &page in pages.iter().rev() {
        assert_ne!(hash(&pool), hash(&fresh));
        pool.release(page, ROW, 0, 0, Verb::Cancel).unwrap();
    }
    assert_eq!(hash(&pool), hash(&fresh));
}
