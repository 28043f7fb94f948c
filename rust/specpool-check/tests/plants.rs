//! The proof finds faults: every fault planted in the device or its driver breaks a law, within the quick slice.

use specpool_check::cases;
use specpool_check::device::Plant;
use specpool_check::explore::{Case, explore};

/// The case that finds the plant soonest.
fn finder(plant: Plant) -> Case {
    let name = match plant {
        Plant::CompleteEarly | Plant::LaunchStale | Plant::DropDelta | Plant::ResolveMore => {
            "rounds P=1 1/1/2 D=0 Dense shared L=5"
        }
        Plant::SkipCopies | Plant::LateCopies => "sharing P=[2] L=2 forks fencing=true",
        Plant::LowHi | Plant::NextA | Plant::WiderWindow => "window P=2 w=1 D=1 beside=false sessions=false",
        Plant::KeepLength => "deltas P=2",
        Plant::AcceptMore => "sharing P=[2] L=2 prefixes fencing=true",
        Plant::NoClamp => "failures behind a prefix P=2",
        Plant::OneMoreDraft => "rounds P=3 2/2/3+1/1/2 D=0 Holey shared L=7",
        Plant::HalfImport => "moving P=[1] L=2 w=None trims=false failures=false fencing=true",
        Plant::SkipAbandon => "sharing P=[2] L=2 prefixes+failures fencing=true",
    };
    cases::all()
        .into_iter()
        .find(|case| case.is_quick && case.name == name)
        .unwrap_or_else(|| panic!("no case {name:?}"))
}

#[test]
fn every_planted_fault_is_found() {
    for (plant, name, _) in Plant::ALL {
        let case = finder(plant);
        let broken = explore(&case, Some(plant), 20_000).expect_err(name);
        assert!(!broken.fault.contains("more than"), "{name}: {}", broken.fault);
        assert!(!broken.trace.is_empty(), "{name} has no trace");
    }
}

/// Without a plant the same cases are clean, so the proof finds the plant and nothing else.
#[test]
fn a_case_without_a_plant_is_clean() {
    for name in ["failures behind a prefix P=2", "rounds P=3 2/2/3+1/1/2 D=0 Holey shared L=7", "deltas P=2"] {
        let case = cases::all().into_iter().find(|case| case.name == name).unwrap();
        let report = explore(&case, None, 20_000).unwrap();
        assert!(report.states > 1_000 && !report.is_cut, "{name}: {} states", report.states);
    }
}
