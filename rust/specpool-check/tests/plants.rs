//! The proof finds faults: every fault planted in the device, its driver or the model breaks a law, within 20,000 states.

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
        Plant::LateState => "states moves alone 0/1/1 D=0 +0 flush=1 eager=false",
        Plant::FoldOneMore | Plant::ReadRecycled | Plant::RingShort | Plant::SkipCompaction | Plant::FreeAtOnce => {
            "states rounds 1/1/2 D=0 +0 flush=1 eager=false"
        }
        Plant::FoldToRoot => "states rounds 0/1/1 D=1 +0 flush=1 eager=false",
        Plant::FoldBack => "states rounds 0/1/1 D=1 +0 flush=1 eager=true",
        Plant::SkipUndo | Plant::CutAnywhere => "states failures 0/1/1 D=0 +0 flush=1 eager=false",
        Plant::KeepCheckpoint | Plant::WriteShared => "states turns 0/1/1 D=0 +0 flush=1 eager=false",
        Plant::KeepCancelledMark => "states kept cancels 0/1/1 D=0 rows=1 +0 flush=1 eager=false pages=+0",
        Plant::KeepCutMark => "states kept trims 0/1/1 D=0 rows=1 +0 flush=1 eager=false pages=+0",
        Plant::KeepSpoiled => "states kept failures 0/1/1 D=0 rows=1 +0 flush=1 eager=false pages=+0",
        Plant::ServeOtherText | Plant::OutliveKv | Plant::NeverSteal => {
            "states kept plain 0/1/1 D=0 rows=1 +0 flush=1 eager=false pages=+0"
        }
        Plant::EvictNewest => "states kept plain 0/1/1 D=0 rows=1 +1 flush=1 eager=false pages=+3",
        Plant::ServeWaiting => "states kept plain 0/1/1 D=0 rows=2 +1 flush=1 eager=false pages=+3",
        Plant::SkipAbandon => "sharing P=[2] L=2 prefixes+failures fencing=true",
    };
    cases::all().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name:?}"))
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

#[test]
fn neither_a_checkpoint_nor_a_soft_mark_nor_an_export_nor_another_row_loses_its_state_to_a_write() {
    for (name, why) in [
        ("states turns 0/1/1 D=0 +0 flush=1 eager=false", "which row 1 or its checkpoint has"),
        ("states forks 0/1/1 D=0 +1 flush=1 eager=false", "which row 2 or its checkpoint has"),
        ("states kept plain 0/1/1 D=0 rows=1 +1 flush=1 eager=false pages=+0", "which a soft mark of row 1 keeps"),
        ("states moves alone 0/1/1 D=0 +1 flush=1 eager=false", "which an export holds"),
    ] {
        let case = cases::all().into_iter().find(|case| case.name == name).unwrap();
        let broken = explore(&case, Some(Plant::WriteShared), 20_000).unwrap_err();
        assert!(broken.fault.contains(why), "{name}: {}", broken.fault);
    }
}

/// No ring is longer than it must be: with one record less, a record is overwritten before it is read.
#[test]
fn a_shorter_ring_is_noticed_for_every_depth_shape_and_flush() {
    let is_small = |case: &Case| case.name.starts_with("states rounds") && case.config.states[0].num_slots == 1;
    let mut num_rings = 0;
    for case in cases::all().into_iter().filter(is_small) {
        let states = &case.config.states[0];
        // Every round folds its root, so none leaves tokens to a later fold, whatever `flush` is.
        let folds_all = states.eager && case.config.overlap_depth == 0 && case.config.shapes.is_empty();
        if folds_all && states.flush > 1 {
            continue;
        }
        let broken = explore(&case, Some(Plant::RingShort), 50_000).expect_err(&case.name);
        assert!(broken.fault.contains("reads the record of position"), "{}: {}", case.name, broken.fault);
        num_rings += 1;
    }
    assert_eq!(num_rings, 15);
}
