//! Laws of recording and replay: running a log again gives the same ledger, event by event.

use std::path::PathBuf;

use crate::kit::place;
use proptest::prelude::*;
use specpool_core::{
    Call, Digest, EventLog, Group, Layout, Ledger, LedgerConfig, LogEnd, Replay, Result, Row, Shape, Snapshot,
    StateGroup, Verb,
};

fn config() -> LedgerConfig {
    let full = Group {
        name: "target".into(),
        page_size: 4,
        num_pages: 60,
        hosts_drafts: false,
        layout: Layout::Dense,
        window: None,
        sink: 0,
    };
    let draft = Group {
        name: "draft".into(),
        page_size: 2,
        num_pages: 150,
        hosts_drafts: true,
        layout: Layout::Holey,
        window: None,
        sink: 0,
    };
    let window = Group { name: "window".into(), page_size: 3, num_pages: 60, window: Some(5), ..full.clone() };
    let shapes = vec![Shape::eagle(2, 2, 4).unwrap(), Shape::eagle(1, 1, 2).unwrap()];
    let mut config = LedgerConfig::new(vec![full, draft, window], shapes, 4, 40);
    config.overlap_depth = 1;
    config.sessions = true;
    config.digest = true;
    config
}

/// Makes one call from raw numbers. A refused call is not an event.
fn operate(ledger: &mut Ledger, snapshots: &mut Vec<Snapshot>, op: [u8; 3]) -> Result<()> {
    let [verb, a, b] = op;
    let (row, len) = (Row(i32::from(a % 5)), i32::from(b % 41));
    let steps: Vec<u64> = ledger.steps().map(|(step, _, _)| step).collect();
    let step = steps.get(usize::from(a) % steps.len().max(1)).copied().unwrap_or(0);
    let tag = (b % 2 == 1).then(|| format!("request-{b}"));
    let prefix = ledger.prefixes().nth(usize::from(a) % 3).unwrap_or(0);
    match verb % 30 {
        0 | 1 => drop(ledger.admit(tag.as_deref())?),
        2 => drop(ledger.admit_on(prefix, (b % 3 > 0).then_some(len), tag.as_deref())?),
        3 => drop(ledger.fork(row, tag.as_deref())?),
        4 => drop(ledger.pin_prefix(row, len)?),
        5 => ledger.release_prefix(prefix)?,
        6 | 7 => drop(ledger.prepare_extend(&[row.0], &[len], b % 4 > 0)?),
        8 | 9 => drop(ledger.prepare_decode(&[row.0], &[i32::from(b % 3)], b % 8 > 0)?),
        10 => drop(ledger.prepare_decode(&[row.0, row.0 % 4 + 1], &[1, i32::from(b % 3)], true)?),
        11..=14 => ledger.launch(step)?,
        15 | 16 => {
            let lanes = if b % 3 == 0 { 2 } else { 1 };
            ledger.resolve(step, &vec![i32::from(b % 3) + 1; lanes])?;
        }
        17 => ledger.complete(step)?,
        18 => ledger.cancel(step)?,
        19 => ledger.abandon(step)?,
        20 => drop(ledger.trim(row, len)?),
        21 => drop(ledger.end_turn(row, len)?),
        22 => match b % 3 {
            0 => ledger.retract(row)?,
            1 => ledger.finish(row)?,
            _ => ledger.abort(row)?,
        },
        28 => drop(ledger.export(row)?),
        29 => drop(ledger.import_row(len, i32::from(b % 7).min(len), tag.as_deref())?),
        23 => ledger.lend(row, 0, len / 12 * 12)?,
        24 => {
            let pages: Vec<i32> = (0..3).flat_map(|group| ledger.lent_pages(group).unwrap_or_default()).collect();
            ledger.rebind(row, 0, 12, &pages)?;
        }
        25 => {
            let pages: Vec<i32> = (0..3).flat_map(|group| ledger.lent_pages(group).unwrap_or_default()).collect();
            ledger.admit_lent(&pages, 12, tag.as_deref())?;
        }
        26 => {
            let pages = ledger.lent_pages(usize::from(b % 3))?;
            ledger.release_lent(usize::from(b % 3), &pages)?;
        }
        _ if a % 2 == 0 => snapshots.push(ledger.snapshot()?),
        _ => {
            if let Some(snapshot) = snapshots.get(usize::from(b) % snapshots.len().max(1)) {
                ledger.restore(snapshot)?;
            }
        }
    }
    Ok(())
}

/// Runs the operations on a recorded ledger, and returns digest, state hash and tags after each that succeeded.
fn record(path: &std::path::Path, ops: &[[u8; 3]]) -> Vec<(u64, u64, Vec<Option<String>>)> {
    let mut ledger = Ledger::recorded(config(), path, 1 << 20).unwrap();
    let (mut snapshots, mut states) = (Vec::new(), Vec::new());
    for &op in ops {
        let before = (ledger.digest(), snapshots.len());
        if operate(&mut ledger, &mut snapshots, op).is_ok() && (ledger.digest(), snapshots.len()) != before {
            states.push(state(&ledger));
        } else {
            assert_eq!(ledger.digest(), before.0, "a refused call is no event");
        }
    }
    ledger.check().unwrap();
    ledger.close().unwrap();
    states
}

fn state(ledger: &Ledger) -> (u64, u64, Vec<Option<String>>) {
    let tags = (0..=4).map(|row| ledger.tag(Row(row)).map(Into::into)).collect();
    (ledger.digest().unwrap(), ledger.state_hash(), tags)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn a_replay_gives_the_same_ledger_after_every_event(ops in prop::collection::vec(any::<[u8; 3]>(), 0..400)) {
        let path = place("replay");
        let states = record(&path, &ops);
        let mut replay = Replay::open(&path).unwrap();
        prop_assert_eq!(replay.config(), &Ledger::new(config()).unwrap().config());
        let mut again = replay.ledger().unwrap();
        for (at, expected) in states.iter().enumerate() {
            let run = replay.advance(&mut again).unwrap().unwrap();
            prop_assert_eq!(run.record.index, at as u64 + 1);
            prop_assert_eq!(&state(&again), expected, "event {}: {}", at + 1, run);
        }
        prop_assert!(replay.advance(&mut again).unwrap().is_none());
        prop_assert_eq!(replay.end(), Some(LogEnd::Closed));
        again.check().unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

/// Makes a call of every verb, so that none is forgotten, and compares the log's texts in order.
/// A row is given back, and the ledger goes back to before that.
fn go_back(ledger: &mut Ledger, row: Row) {
    let snapshot = ledger.snapshot().unwrap();
    ledger.retract(row).unwrap();
    ledger.restore(&snapshot).unwrap();
}

/// A row comes from another ledger and leaves again.
fn move_a_row(ledger: &mut Ledger) {
    let moved = ledger.import_row(14, 9, Some("moved")).unwrap();
    let export = ledger.export(moved).unwrap();
    ledger.release_prefix(export).unwrap();
}

#[test]
fn every_verb_is_recorded_and_replayed() {
    let path = place("verbs");
    let mut ledger = Ledger::recorded(config(), &path, 1 << 20).unwrap();
    let run = |ledger: &mut Ledger, step: u64| {
        ledger.launch(step).unwrap();
        ledger.complete(step).unwrap();
    };
    let a = ledger.admit(Some("a")).unwrap();
    let step = ledger.prepare_extend(&[a.0], &[14], true).unwrap().step;
    run(&mut ledger, step);
    let prefix = ledger.pin_prefix(a, 9).unwrap();
    let b = ledger.admit_on(prefix, None, Some("b")).unwrap();
    let c = ledger.fork(a, None).unwrap();
    let step = ledger.prepare_extend(&[b.0, c.0], &[15, 16], true).unwrap().step;
    run(&mut ledger, step);
    let step = ledger.prepare_decode(&[b.0, c.0], &[1, 2], true).unwrap().step;
    ledger.cancel(step).unwrap();
    let step = ledger.prepare_decode(&[b.0, c.0], &[1, 2], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.resolve(step, &[3, 1]).unwrap();
    ledger.complete(step).unwrap();
    let step = ledger.prepare_decode(&[b.0], &[0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.abandon(step).unwrap();
    ledger.complete(step).unwrap();
    ledger.trim(c, 13).unwrap();
    ledger.end_turn(a, 12).unwrap();
    ledger.release_prefix(prefix).unwrap();
    let step = ledger.prepare_extend(&[b.0], &[13], true);
    assert!(step.is_err(), "the abandoned row is gone");
    let d = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[d.0], &[13], true).unwrap().step;
    run(&mut ledger, step);
    ledger.lend(d, 0, 12).unwrap();
    let lent: Vec<i32> = (0..3).flat_map(|group| ledger.lent_pages(group).unwrap()).collect();
    let e = ledger.admit_lent(&lent, 12, Some("e")).unwrap();
    ledger.abort(e).unwrap();
    ledger.abort(d).unwrap();
    let d = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend(&[d.0], &[13], true).unwrap().step;
    run(&mut ledger, step);
    ledger.rebind(d, 0, 12, &lent).unwrap();
    ledger.abort(d).unwrap();
    for group in 0..3 {
        let pages = ledger.lent_pages(group).unwrap();
        ledger.release_lent(group, &pages).unwrap();
    }
    move_a_row(&mut ledger);
    go_back(&mut ledger, c);
    ledger.abort(c).unwrap();
    ledger.finish(a).unwrap();
    ledger.close().unwrap();

    let mut replay = Replay::open(&path).unwrap();
    let mut again = replay.ledger().unwrap();
    assert_eq!(replay.made_by(), env!("CARGO_PKG_VERSION"));
    let (mut verbs, mut shown) = (Vec::new(), Vec::new());
    while let Some(run) = replay.advance(&mut again).unwrap() {
        verbs.push(run.record.call.verb());
        shown.push((run.to_string(), run.step(), run.rows()));
    }
    let has = |text: &str, step, rows: &[i32]| {
        assert!(shown.contains(&(text.into(), step, rows.to_vec())), "{text} is not in {shown:#?}");
    };
    has("admit() -> row 1", None, &[1]);
    has("pin_prefix(1, 9) -> prefix 1", None, &[1]);
    has("fork(1) -> row 3", None, &[1, 3]);
    has("prepare_extend([2, 3], [15, 16]) -> step 2", Some(2), &[2, 3]);
    has("launch(2)", Some(2), &[]);
    has("export(2) -> prefix 2", None, &[2]);
    has("end_turn(1, 12) -> 12", None, &[1]);
    assert_eq!(state(&again), state(&ledger));
    // The prefix index has a log of its own in `prefix_cache.rs`, and states have the one below.
    let of_others = [Verb::Index, Verb::AdmitCached, Verb::Forget, Verb::ForgetAll, Verb::PrepareExtendKeeping];
    for verb in Verb::LOGGED.iter().filter(|verb| !of_others.contains(verb)) {
        assert!(verbs.contains(verb), "{verb:?} is not in {verbs:?}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn kept_states_are_recorded_and_replayed() {
    let path = place("states");
    let mut config = config();
    config.states = vec![StateGroup { name: "ssm".into(), num_slots: 3, flush: 1, eager: false }];
    let mut ledger = Ledger::recorded(config, &path, 1 << 20).unwrap();
    let row = ledger.admit(None).unwrap();
    let step = ledger.prepare_extend_keeping(&[row.0], &[9], &[0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    let text: Vec<i32> = (0..9).collect();
    ledger.index(row, &text, b"").unwrap();
    ledger.finish(row).unwrap();
    let again = ledger.admit_cached(&text, b"", None, false, None).unwrap();
    assert_eq!((ledger.resolved_len()[again.at()], ledger.state_slot(0).unwrap()[again.at()]), (8, 1));
    ledger.close().unwrap();

    let mut replay = Replay::open(&path).unwrap();
    let mut copy = replay.ledger().unwrap();
    let mut shown = Vec::new();
    while let Some(run) = replay.advance(&mut copy).unwrap() {
        shown.push(run.to_string());
    }
    assert_eq!(shown[1], "prepare_extend([1], [9], keep=[0]) -> step 1");
    assert_eq!(state(&copy), state(&ledger));
    std::fs::remove_file(&path).unwrap();
}

/// A log of these calls, whose digests are all `digest`.
fn forge(test: &str, calls: &[Call<'_>], digest: Digest) -> (PathBuf, Vec<u64>) {
    let path = place(test);
    let mut log = EventLog::create(&path, &Ledger::new(config()).unwrap().config(), 1 << 20).unwrap();
    let (mut before, mut offsets) = (Digest::new(), Vec::new());
    for call in calls {
        let mut bytes = Vec::new();
        call.encode(&mut bytes);
        offsets.push(log.num_bytes());
        log.push(&bytes, &[], before, digest);
        before = digest;
    }
    log.finish(digest).unwrap();
    (path, offsets)
}

fn first_error(path: &std::path::Path) -> String {
    let mut replay = Replay::open(path).unwrap();
    let mut ledger = replay.ledger().unwrap();
    let error = loop {
        match replay.advance(&mut ledger) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the log is replayed to its end"),
            Err(error) => break error,
        }
    };
    assert_eq!(replay.advance(&mut ledger).unwrap_err(), error, "nothing goes on behind an error");
    std::fs::remove_file(path).unwrap();
    error.to_string()
}

#[test]
fn a_replay_that_differs_names_the_event_and_its_offset() {
    let (path, offsets) = forge("digest", &[Call::Admit {}], Digest::from_value(5));
    let error = first_error(&path);
    let expected = format!("event 1 (admit) at byte {}: the replay differs: the digest is ", offsets[0]);
    assert!(error.contains(&expected) && error.ends_with("the log has 0000000000000005"), "{error}");

    let (path, offsets) = forge("refused", &[Call::Launch { step: 7 }], Digest::new());
    let error = first_error(&path);
    let expected = format!("event 1 (launch, step 7) at byte {}: the replay differs: it is refused: ", offsets[0]);
    assert!(error.contains(&expected), "{error}");
}

/// A ledger never writes such a log, because it refuses the snapshot.
#[test]
fn a_restore_of_an_unknown_snapshot_is_named() {
    let path = place("foreign-snapshot");
    let mut log = EventLog::create(&path, &Ledger::new(config()).unwrap().config(), 1 << 20).unwrap();
    let mut bytes = Vec::new();
    Call::Restore {}.encode(&mut bytes);
    log.push(&bytes, &[1], Digest::new(), Digest::new());
    drop(log);
    let error = first_error(&path);
    assert!(error.contains("(restore)") && error.contains("snapshot 1 is not of this log"), "{error}");
}

/// A recorded ledger refuses the snapshot of another, because its log could not be replayed. A ledger that is not
/// recorded may take it over from one built alike.
#[test]
fn a_recorded_ledger_refuses_a_snapshot_that_its_log_does_not_tell_of() {
    let path = place("foreign");
    let mut recorded = Ledger::recorded(config(), &path, u64::MAX).unwrap();
    let mut plain = Ledger::new(config()).unwrap();
    let (own, foreign) = (recorded.snapshot().unwrap(), plain.snapshot().unwrap());
    let before = (recorded.digest(), recorded.state_hash());
    let error = recorded.restore(&foreign).unwrap_err().to_string();
    assert!(error.contains("snapshot 1 is of another ledger"), "{error}");
    assert_eq!((recorded.digest(), recorded.state_hash()), before);
    recorded.restore(&own).unwrap();
    plain.restore(&own).unwrap();
    drop(recorded);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_clone_is_not_recorded_and_keeps_its_digest() {
    let path = place("clone");
    let mut ledger = Ledger::recorded(config(), &path, 1 << 20).unwrap();
    ledger.admit(None).unwrap();
    let mut clone = ledger.clone();
    assert_eq!(clone.digest(), ledger.digest());
    clone.admit(Some("of the clone")).unwrap();
    clone.close().unwrap();
    drop(clone);
    ledger.admit(None).unwrap();
    drop(ledger);
    let mut replay = Replay::open(&path).unwrap();
    let mut again = replay.ledger().unwrap();
    let tags: Vec<_> = std::iter::from_fn(|| replay.advance(&mut again).unwrap()).map(|run| run.record.tag).collect();
    assert_eq!((tags, replay.end()), (vec![None, None], Some(LogEnd::Open)));
    std::fs::remove_file(&path).unwrap();
}

/// At its limit the log ends and says so; the ledger goes on.
#[test]
fn a_ledger_goes_on_behind_the_end_of_its_log() {
    let path = place("limit");
    let mut ledger = Ledger::recorded(config(), &path, 400).unwrap();
    for _ in 0..1_000 {
        let row = ledger.admit(Some("request")).unwrap();
        ledger.finish(row).unwrap();
    }
    ledger.close().unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() <= 400);
    let mut replay = Replay::open(&path).unwrap();
    let mut again = replay.ledger().unwrap();
    let events = std::iter::from_fn(|| replay.advance(&mut again).unwrap()).count();
    assert!((2..100).contains(&events), "{events}");
    assert_eq!(replay.end(), Some(LogEnd::Limit));
    std::fs::remove_file(&path).unwrap();
}

/// Ranks compare digests. Tags and snapshots do not enter; calls and their order do.
#[test]
fn the_digest_is_over_calls_and_not_over_tags_and_snapshots() {
    let digest = |operate: &dyn Fn(&mut Ledger)| {
        let mut ledger = Ledger::new(config()).unwrap();
        operate(&mut ledger);
        ledger.digest().unwrap()
    };
    let tagged = digest(&|ledger| drop(ledger.admit(Some("request"))));
    assert_eq!(tagged, digest(&|ledger| drop(ledger.admit(None))));
    assert_eq!(tagged, digest(&|ledger| drop((ledger.snapshot(), ledger.admit(None)))));
    assert_ne!(tagged, digest(&|_| ()));
    let both = digest(&|ledger| drop((ledger.admit(None), ledger.admit(None), ledger.finish(Row(1)))));
    assert_ne!(both, digest(&|ledger| drop((ledger.admit(None), ledger.admit(None), ledger.finish(Row(2))))));
    assert_ne!(both, digest(&|ledger| drop((ledger.admit(None), ledger.admit(None), ledger.abort(Row(1))))));
    let mut silent = config();
    silent.digest = false;
    assert_eq!(Ledger::new(silent).unwrap().digest(), None);
}

/// The accept length given for a dropped lane is neither read nor compared.
#[test]
fn accept_lens_of_dropped_lanes_do_not_enter_the_digest() {
    let digest = |dropped: i32| {
        let mut ledger = Ledger::new(config()).unwrap();
        let rows = [ledger.admit(None).unwrap().0, ledger.admit(None).unwrap().0];
        let step = ledger.prepare_extend(&rows, &[3, 3], true).unwrap().step;
        ledger.launch(step).unwrap();
        let step = ledger.prepare_decode(&rows, &[1, 1], true).unwrap().step;
        ledger.launch(step).unwrap();
        ledger.retract(Row(rows[0])).unwrap();
        ledger.resolve(step, &[dropped, 2]).unwrap();
        ledger.digest().unwrap()
    };
    assert_eq!(digest(1), digest(-77));
}
