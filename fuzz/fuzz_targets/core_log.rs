//! Reads and replays the bytes of an event log. As in `event_log.py`, the first byte says whether checksums are
//! corrected.
#![no_main]

use libfuzzer_sys::fuzz_target;
use specpool_core::Replay;

const MAGIC_LEN: usize = 8;
const START: u64 = 0x7370_6563_706f_6f6c;
const MOST_EVENTS: usize = 400;
const MOST_ROWS: i64 = 1 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((&first, log)) = data.split_first() else { return };
    let mut log = log.to_vec();
    if first % 2 == 1 {
        put_checksums(&mut log);
    }
    let path = std::env::temp_dir().join(format!("specpool-core-log-{}", std::process::id()));
    std::fs::write(&path, &log).expect("room for a log");
    let _refused = play(&path);
    let _gone = std::fs::remove_file(&path);
});

fn play(path: &std::path::Path) -> specpool_core::Result<()> {
    let mut replay = Replay::open(path)?;
    let mut ledger = replay.ledger()?;
    for _ in 0..MOST_EVENTS {
        if replay.advance(&mut ledger)?.is_none() {
            break;
        }
    }
    // An audit visits every cell, which no reader of a log does: a few bytes can state billions of cells.
    if replay.config().num_rows > MOST_ROWS {
        return Ok(());
    }
    ledger.check()
}

fn word(state: u64, value: u64) -> u64 {
    let mixed = (state ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32)
}

fn over(mut state: u64, data: &[u8]) -> u64 {
    let (whole, rest) = data.as_chunks::<8>();
    for chunk in whole {
        state = word(state, u64::from_le_bytes(*chunk));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    word(word(state, u64::from_le_bytes(last)), data.len() as u64)
}

/// A varint at `at`, and where the next thing begins.
fn number(data: &[u8], mut at: usize) -> (u64, usize) {
    let (mut value, mut shift) = (0, 0);
    while let (Some(&byte), true) = (data.get(at), shift < 63) {
        value |= u64::from(byte & 0x7f) << shift;
        (shift, at) = (shift + 7, at + 1);
        if byte < 0x80 {
            break;
        }
    }
    (value, at)
}

fn put_checksums(log: &mut [u8]) {
    let (version, at) = number(log, MAGIC_LEN);
    let (length, at) = number(log, at);
    let Some(end) = usize::try_from(length).ok().and_then(|length| at.checked_add(length)) else { return };
    if end.saturating_add(4) > log.len() {
        return;
    }
    let state = over(word(START, version), &log[at..end]);
    log[end..end + 4].copy_from_slice(&(state as u32).to_le_bytes());
    let (mut at, mut digest) = (end + 4, START);
    loop {
        let (length, start) = number(log, at);
        let Some(end) = usize::try_from(length).ok().and_then(|length| start.checked_add(length)) else { return };
        if start == at || end.saturating_add(12) > log.len() {
            return;
        }
        let after = u64::from_le_bytes(log[end..end + 8].try_into().expect("8 bytes"));
        let state = word(word(over(START, &log[start..end]), digest), after);
        log[end + 8..end + 12].copy_from_slice(&(state as u32).to_le_bytes());
        (at, digest) = (end + 12, after);
    }
}
