//! The soak run finds and shrinks a planted fault, and one seed always gives the same run.

use specpool_check::device::Plant;
use specpool_check::soak::{Episode, run};

fn episode(seed: u64, plant: Option<Plant>) -> Episode {
    Episode { seed, ops: 4_000, has_device: plant.is_some(), has_states: false, plant }
}

#[test]
fn a_planted_fault_is_found_and_shrunk() {
    let failure = (0..).find_map(|seed| run(&episode(seed, Some(Plant::KeepLength))).err()).unwrap();
    assert!(failure.trace.len() <= 30, "{} operations: {:?}", failure.trace.len(), failure.trace);
    assert!(failure.trace.len() <= failure.found_after);
}

#[test]
fn a_seed_decides_everything() {
    let tally = run(&episode(7, None)).unwrap();
    assert_eq!(tally, run(&episode(7, None)).unwrap());
    assert_ne!(tally.refused, run(&episode(8, None)).unwrap().refused);
    // Most operations can succeed, some are bad on purpose.
    assert!(tally.refused * 2 < tally.ops && tally.refused > 0, "{tally:?}");
    assert!(tally.hits > 20 && tally.evictions > 20, "{tally:?}");
}

#[test]
fn the_events_name_verified_kv_and_nothing_else() {
    // In 81, a window passes a row of a failed step, of which the connector copied nothing.
    let episodes =
        (0..15).chain([81]).map(|seed| Episode { seed, ops: 4_000, has_device: true, has_states: false, plant: None });
    let tallies = episodes.map(|episode| run(&episode).map_err(|failure| failure.fault));
    let events: u64 = tallies.map(|tally| tally.unwrap().events).sum();
    assert!(events > 2_500, "{events}");
}

#[test]
fn recurrent_states_obey_their_laws() {
    for has_device in [false, true] {
        let episodes = (0..4).map(|seed| Episode { seed, ops: 4_000, has_device, has_states: true, plant: None });
        let tallies = episodes.map(|episode| run(&episode).map_err(|failure| failure.fault));
        let folds: u64 = tallies.map(|tally| tally.unwrap().folds).sum();
        assert!(folds > 300, "{folds}");
    }
}

#[test]
fn a_state_that_is_written_under_another_holder_is_found() {
    let episode = |seed| Episode { has_states: true, ..episode(seed, Some(Plant::WriteShared)) };
    let failure = (0..).find_map(|seed| run(&episode(seed)).err()).unwrap();
    assert!(failure.fault.contains("slot"), "{}", failure.fault);
}
