//! The enumeration may treat two worlds as one only if nothing can tell them apart later.

use std::collections::{HashMap, VecDeque};

use specpool_check::cases;
use specpool_check::explore::key;
use specpool_check::world::World;
use specpool_core::PageNames;

/// For every event: whether it was accepted, and which state it led to.
fn futures(world: &World, case: &cases::Case, names: &mut PageNames) -> Vec<(bool, u128)> {
    let events = case.alphabet.events(world);
    let future = |event| {
        let mut next = world.clone();
        let is_done = next.apply(event).unwrap();
        (is_done, key(&next, &case.alphabet, names))
    };
    events.iter().map(future).collect()
}

/// Worlds with one key have the same future: what the normal form leaves out decides nothing. Both worlds are real,
/// reached in two ways, with different pages, steps and epochs.
#[test]
fn worlds_with_one_key_have_one_future() {
    let mut num_pairs = 0;
    // Without page fencing, the contents of a page that was freed too early stay in the key longer than they matter.
    for case in cases::all().into_iter().filter(|case| case.config.page_fencing && case.config.num_rows < 3).step_by(4)
    {
        let mut names = PageNames::default();
        let start = case.world(None).unwrap();
        let mut seen = HashMap::from([(key(&start, &case.alphabet, &mut names), start.clone())]);
        let mut work = VecDeque::from([start]);
        let mut pairs_left = 20;
        while let Some(world) = work.pop_front().filter(|_| pairs_left > 0) {
            for event in case.alphabet.events(&world) {
                let mut next = world.clone();
                if !next.apply(&event).unwrap() {
                    continue;
                }
                let key = key(&next, &case.alphabet, &mut names);
                // Most early pairs are two orders of independent calls; later pairs differ in more.
                let is_late = seen.len() > 200 && seen.len() % 7 == 0;
                match seen.get(&key) {
                    Some(twin) if is_late && pairs_left > 0 => {
                        assert_eq!(
                            futures(twin, &case, &mut names),
                            futures(&next, &case, &mut names),
                            "{}: {event:?}\n{twin:#?}\n{next:#?}",
                            case.name
                        );
                        pairs_left -= 1;
                        num_pairs += 1;
                    }
                    Some(_) => {}
                    None => {
                        seen.insert(key, next.clone());
                        work.push_back(next);
                    }
                }
            }
        }
    }
    assert!(num_pairs > 300, "{num_pairs} pairs");
}
