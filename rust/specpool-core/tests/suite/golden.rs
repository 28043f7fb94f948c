//! Law: the bytes and digests of an event log never change within its format version. The logs in `golden` were
//! recorded before the verbs became one table. A script calls every verb with every kind of argument in
//! `every_call.log`; `random.log` has 900 random operations on windows, sinks and a double buffer, `states.log` as many on
//! a window, recurrent states and a prefix index; `block_pool.log` calls every verb of a pool. No program writes these
//! files again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::kit::place;
use specpool_core::{BlockPool, Call, Ledger, LogEnd, LogReader, Replay};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A number of one byte at a time, low bits first, and where the next thing begins.
fn varint(bytes: &[u8], mut at: usize) -> (usize, usize) {
    let (mut value, mut shift) = (0, 0);
    loop {
        value |= usize::from(bytes[at] & 0x7f) << shift;
        (shift, at) = (shift + 7, at + 1);
        if bytes[at - 1] < 0x80 {
            return (value, at);
        }
    }
}

/// The records behind the head. The head names the version of specpool that wrote it.
fn records(bytes: &[u8]) -> &[u8] {
    let (_, at) = varint(bytes, 8);
    let (len, at) = varint(bytes, at);
    &bytes[at + len + 4..]
}

/// Runs the log on a recorded ledger. Returns that ledger's log, its digest, and a line for each event.
fn run_again(name: &str) -> (Vec<u8>, u64, String) {
    let path = place(name);
    let mut replay = Replay::open(&golden(name)).unwrap();
    let mut ledger = Ledger::recorded(replay.config().clone(), &path, 1 << 20).unwrap();
    let mut lines = String::new();
    while let Some(run) = replay.advance(&mut ledger).unwrap() {
        let (record, step, rows) = (&run.record, run.step(), run.rows());
        writeln!(lines, "{:3} {run}; step {step:?}, rows {rows:?}, tag {:?}", record.index, record.tag).unwrap();
    }
    assert_eq!(replay.end(), Some(LogEnd::Closed));
    ledger.check().unwrap();
    ledger.close().unwrap();
    let written = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    (written, ledger.digest().unwrap(), lines)
}

#[test]
fn every_call_runs_to_its_digest_and_is_written_with_the_same_bytes() {
    let (written, digest, lines) = run_again("every_call.log");
    assert_eq!(digest, 0xf723_5f6a_9378_0b29);
    let log = std::fs::read(golden("every_call.log")).unwrap();
    assert_eq!(records(&written), records(&log));
    assert_eq!(lines, std::fs::read_to_string(golden("every_call.txt")).unwrap());
}

#[test]
fn random_operations_run_to_their_digest_and_are_written_with_the_same_bytes() {
    let (written, digest, _) = run_again("random.log");
    assert_eq!(digest, 0xbd15_ad14_8c3e_1f99);
    assert_eq!(records(&written), records(&std::fs::read(golden("random.log")).unwrap()));
}

#[test]
fn recurrent_states_run_to_their_digest_and_are_written_with_the_same_bytes() {
    let (written, digest, lines) = run_again("states.log");
    assert_eq!(digest, 0xc8de_6e8f_7316_b898);
    let log = std::fs::read(golden("states.log")).unwrap();
    assert_eq!(records(&written), records(&log));
    assert!(lines.contains("keep=") && lines.contains("index("), "the log keeps states and indexes them");
    let mut reader = LogReader::from_bytes(log.clone()).unwrap();
    let mut kinds = BTreeSet::new();
    while let Some(record) = reader.next_record().unwrap() {
        kinds.insert(log[varint(&log, record.offset as usize).1]);
    }
    assert!(kinds.is_superset(&BTreeSet::from([33, 34])), "{kinds:?}");
}

/// Reads the calls and encodes them by themselves, without a ledger. The log has the first kinds of the table; a verb
/// that came later has later kinds.
#[test]
fn every_kind_of_call_is_read_and_encoded_to_the_same_bytes() {
    let log = std::fs::read(golden("every_call.log")).unwrap();
    let mut reader = LogReader::from_bytes(log.clone()).unwrap();
    let mut kinds = BTreeSet::new();
    while let Some(record) = reader.next_record().unwrap() {
        let (_, at) = varint(&log, record.offset as usize);
        let mut bytes = Vec::new();
        record.call.encode(&mut bytes);
        assert_eq!(bytes, log[at..at + bytes.len()], "{}", record.call);
        kinds.insert(bytes[0]);
    }
    assert!(kinds.len() == 32 && kinds.iter().eq(&Call::KINDS[..32]), "{kinds:?}");
}

#[test]
fn the_log_of_a_block_pool_runs_to_its_digest() {
    let mut lines = String::new();
    let (pool, num_calls, end) = BlockPool::replay_to(&golden("block_pool.log"), u64::MAX, |call| {
        writeln!(lines, "{} {call} {:?}", call.index, call.tag).unwrap();
        Ok(())
    })
    .unwrap();
    assert_eq!((num_calls, end), (13, Some(LogEnd::Closed)));
    assert_eq!(pool.digest(), Some(0x10eb_6432_6c86_d835));
    assert_eq!(lines, std::fs::read_to_string(golden("block_pool.txt")).unwrap());
}
