//! Law: no bytes make the reader of event logs panic, or take more memory than they and the lanes of a batch account for.
//!
//! The allocator of this test counts the bytes that this thread holds, and their peak. Most damage ends at a checksum, so
//! records and heads are also made with right checksums and any bytes within.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;
use std::sync::LazyLock;

use proptest::prelude::*;
use specpool_core::{Digest, Group, Layout, Ledger, LedgerConfig, LogReader, Shape};

thread_local! {
    /// Bytes held by this thread, and the most of them since [`peak_of`] began.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(more: usize, less: usize) {
    let (held, peak) = HELD.get();
    let held = held + more as isize - less as isize;
    HELD.set((held, peak.max(held)));
}

struct Counting;

// SAFETY: the system's allocator; the counts need no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        count(block.size(), 0);
        unsafe { System.alloc(block) }
    }

    unsafe fn alloc_zeroed(&self, block: Block) -> *mut u8 {
        count(block.size(), 0);
        unsafe { System.alloc_zeroed(block) }
    }

    unsafe fn realloc(&self, old: *mut u8, block: Block, size: usize) -> *mut u8 {
        count(size, block.size());
        unsafe { System.realloc(old, block, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, block: Block) {
        count(0, block.size());
        unsafe { System.dealloc(old, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes that `call` holds at once, beside what was there before.
fn peak_of<T>(call: impl FnOnce() -> T) -> (T, usize) {
    let (before, _) = HELD.get();
    HELD.set((before, before));
    let result = call();
    (result, (HELD.get().1 - before) as usize)
}

/// Buffers, messages and a snapshot's number: what a reader holds for any log.
const CONSTANT: usize = 64 << 10;
/// Of a byte of a log: a group or a shape takes a few in the file, and a vector that grows has twice its length.
const FACTOR: usize = 64;

/// Reads to the end or the first error; the records that were read.
fn read(bytes: &[u8]) -> usize {
    let ((num_records, num_lanes), peak) = peak_of(|| {
        let Ok(mut reader) = LogReader::from_bytes(bytes.to_vec()) else { return (0, 0) };
        let config = reader.config();
        let num_lanes = config.max_batch.unwrap_or(i64::MAX).min(config.num_rows) as usize;
        let mut num_records = 0;
        while let Ok(Some(_)) = reader.next_record() {
            num_records += 1;
        }
        assert_eq!(format!("{:?}", reader.next_record()), format!("{:?}", reader.next_record()), "an end is an end");
        (num_records, num_lanes)
    });
    // A call has two arrays of a batch at most, of four bytes an entry.
    let most = CONSTANT + FACTOR * bytes.len() + 2 * 4 * num_lanes;
    assert!(peak <= most, "{peak} bytes for {} and {num_lanes} lanes, at most {most} expected", bytes.len());
    num_records
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A head of these bytes: `[magic][version][length][body][checksum]`.
fn head(body: &[u8]) -> Vec<u8> {
    let mut hash = Digest::new();
    hash.word(1);
    hash.bytes(body);
    let mut out = b"\x89SPLOG\r\n\x01".to_vec();
    put_varint(&mut out, body.len() as u64);
    out.extend_from_slice(body);
    out.extend_from_slice(&(hash.value() as u32).to_le_bytes());
    out
}

/// A record of these bytes: `[length][body][digest][checksum]`.
fn put_record(out: &mut Vec<u8>, body: &[u8], before: u64, after: u64) {
    let mut hash = Digest::new();
    hash.bytes(body);
    hash.word(before);
    hash.word(after);
    put_varint(out, body.len() as u64);
    out.extend_from_slice(body);
    out.extend_from_slice(&after.to_le_bytes());
    out.extend_from_slice(&(hash.value() as u32).to_le_bytes());
}

/// A log whose checksums are right, whatever its bodies are.
fn sealed(head_body: &[u8], bodies: &[Vec<u8>]) -> Vec<u8> {
    let (mut out, mut before) = (head(head_body), Digest::new().value());
    for (body, after) in bodies.iter().zip(1..) {
        put_record(&mut out, body, before, after);
        before = after;
    }
    out
}

fn varint(bytes: &[u8]) -> (usize, usize) {
    let len = 1 + bytes.iter().take_while(|byte| *byte & 0x80 != 0).count();
    (bytes[..len].iter().rev().fold(0, |value, byte| value << 7 | usize::from(byte & 0x7f)), len)
}

/// The bodies of a log's head and of its records, the last one that closes it included.
fn bodies(log: &[u8]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let (len, skipped) = varint(&log[9..]);
    let (head, mut rest) = log[9 + skipped..].split_at(len);
    let mut records = Vec::new();
    rest = &rest[4..];
    while !rest.is_empty() {
        let (len, skipped) = varint(rest);
        records.push(rest[skipped..][..len].to_vec());
        rest = &rest[skipped + len + 12..];
    }
    (head.to_vec(), records)
}

/// Logs of a ledger with few rows, and of one with many.
static LOGS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| [real_log(4), real_log(1 << 14)]);

/// The log of a ledger of so many rows that was used a little.
fn real_log(num_rows: i64) -> Vec<u8> {
    let path = std::env::temp_dir().join(format!("specpool-reader-{}-{num_rows}.log", std::process::id()));
    let group = |name: &str, window: Option<i64>| Group {
        name: name.into(),
        page_size: 4,
        num_pages: 64,
        hosts_drafts: window.is_none(),
        layout: Layout::Dense,
        window,
        sink: 0,
    };
    let groups = vec![group("full", None), group("window", Some(5))];
    let mut config = LedgerConfig::new(groups, vec![Shape::eagle(2, 2, 4).unwrap()], num_rows, 40);
    config.sessions = true;
    let mut ledger = Ledger::recorded(config, &path, 1 << 20).unwrap();
    let rows = [ledger.admit(Some("first")).unwrap(), ledger.admit(None).unwrap()].map(|row| row.0);
    let step = ledger.prepare_extend(&rows, &[9, 12], true).unwrap().step;
    ledger.launch(step).unwrap();
    let step = ledger.prepare_decode(&rows, &[1, 0], true).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.resolve(step, &[2, 1]).unwrap();
    ledger.complete(step).unwrap();
    let snapshot = ledger.snapshot().unwrap();
    let fork = ledger.fork(specpool_core::Row(rows[0]), Some("fork")).unwrap();
    ledger.finish(fork).unwrap();
    ledger.restore(&snapshot).unwrap();
    ledger.close().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    bytes
}

/// Where, what, and what is done there: a byte is set, put in or taken out, or the rest is cut off.
type Damage = (prop::sample::Index, u8, u8);

fn damage(bytes: &mut Vec<u8>, damages: &[Damage]) {
    for (place, value, what) in damages {
        if bytes.is_empty() {
            return;
        }
        let at = place.index(bytes.len());
        match what % 8 {
            0 => bytes.insert(at, *value),
            1 => drop(bytes.remove(at)),
            2 => bytes.truncate(at),
            3 => drop(bytes.splice(at..at, [0xff; 9])), // a number without bound
            _ => bytes[at] = *value,
        }
    }
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    prop::collection::vec(any::<Damage>(), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        read(&bytes);
        read(&head(&bytes));
        read(&sealed(&bodies(&LOGS[0]).0, &[bytes]));
    }

    #[test]
    fn a_damaged_log_is_read_or_refused(damages in damages()) {
        let mut bytes = LOGS[0].clone();
        damage(&mut bytes, &damages);
        read(&bytes);
    }

    #[test]
    fn a_damaged_head_with_a_right_checksum_is_read_or_refused(damages in damages()) {
        let (mut head_body, records) = bodies(&LOGS[1]);
        damage(&mut head_body, &damages);
        read(&sealed(&head_body, &records));
    }

    #[test]
    fn damaged_records_with_right_checksums_are_read_or_refused(
        damaged in prop::collection::vec((any::<prop::sample::Index>(), damages()), 1..4),
        log in 0..2_usize,
    ) {
        let (head_body, mut records) = bodies(&LOGS[log]);
        for (record, damages) in &damaged {
            let at = record.index(records.len());
            damage(&mut records[at], damages);
        }
        read(&sealed(&head_body, &records));
    }
}

/// The test reads what it damages: without damage every record comes back, also with checksums of its own.
#[test]
fn an_undamaged_log_is_read_to_its_end() {
    let bytes = &LOGS[0];
    let (head_body, records) = bodies(bytes);
    assert_eq!(read(bytes), records.len() - 1);
    assert_eq!(read(&sealed(&head_body, &records)), records.len() - 1);
    assert!(records.len() > 10, "{}", records.len());
}

/// Two forms of an array say any number of lanes in a few bytes: no more than a batch of the ledger has.
#[test]
fn an_array_of_more_lanes_than_a_batch_has_takes_no_memory() {
    let (head_body, _) = bodies(&LOGS[0]);
    for form in [0, 1] {
        let mut body = vec![6];
        put_varint(&mut body, 1 << 24);
        body.extend([form, 7]);
        assert_eq!(read(&sealed(&head_body, &[body])), 0);
    }
}
