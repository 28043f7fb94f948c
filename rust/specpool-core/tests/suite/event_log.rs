//! Laws of the event log's bytes: reading returns what was written, and no bytes crash the reader.

use std::collections::BTreeSet;

use crate::kit::place;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use specpool_core::digest::Digest;
use specpool_core::log::call::Call;
use specpool_core::log::event_log::EventLog;
use specpool_core::replay::log_reader::{LogEnd, LogReader, Record};
use specpool_core::{Error, Group, Layout, LedgerConfig, Policy, Shape};

const MAX_LANES: usize = 40;

fn config() -> LedgerConfig {
    let group = |name: &str, page_size, layout| Group {
        name: name.into(),
        page_size,
        num_pages: 300,
        hosts_drafts: layout == Layout::Holey,
        layout,
        window: (page_size == 4).then_some(9),
        sink: 0,
    };
    let groups = vec![group("target", 16, Layout::Dense), group("draft äöü", 4, Layout::Holey)];
    let mut config = LedgerConfig::new(groups, vec![Shape::eagle(5, 8, 64).unwrap()], MAX_LANES as i64, 100);
    config.overlap_depth = 1;
    config.policy = Policy::DoubleBuffer;
    config.max_batch = Some(MAX_LANES as i64);
    config.row_width = Some(vec![4_000, 5_000]);
    config.max_chunk = Some(1_000);
    (config.draft_kv, config.sessions, config.page_fencing) = (false, true, false);
    config.digest = true;
    config
}

struct Written {
    bytes: Vec<u8>,
    /// The offset of each record.
    offsets: Vec<u64>,
}

fn has_tag(call: &Call<'_>) -> bool {
    matches!(call.method(), "admit" | "admit_cached" | "admit_lent" | "fork" | "import_row")
}

fn aside(call: &Call<'_>, tag: Option<&str>) -> Vec<u8> {
    match (call, tag) {
        (Call::Snapshot {} | Call::Restore {}, _) => vec![0x85, 0x01],
        (call, Some(tag)) if has_tag(call) => {
            assert!(tag.len() < 0x80);
            [&[tag.len() as u8], tag.as_bytes()].concat()
        }
        _ => Vec::new(),
    }
}

fn digest_of(call: &[u8], mut before: Digest) -> Digest {
    before.bytes(call);
    before
}

fn write(test: &str, calls: &[(Call<'_>, Option<&str>)], limit: u64, close: bool) -> Written {
    let path = place(test);
    let mut log = EventLog::create(&path, &config(), limit).unwrap();
    let (mut digest, mut bytes, mut offsets) = (Digest::new(), Vec::new(), Vec::new());
    for (call, tag) in calls {
        bytes.clear();
        call.encode(&mut bytes);
        let after = digest_of(&bytes, digest);
        offsets.push(log.num_bytes());
        log.make_room().unwrap();
        log.push(&bytes, &aside(call, *tag), digest, after);
        digest = after;
    }
    if close {
        log.finish(digest).unwrap();
    }
    drop(log);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Written { bytes, offsets }
}

/// All records, and how the log ended.
fn read(bytes: &[u8]) -> (Vec<Record>, Result<LogEnd, String>) {
    let mut records = Vec::new();
    let mut reader = match LogReader::from_bytes(bytes.to_vec()) {
        Ok(reader) => reader,
        Err(error) => return (records, Err(error.to_string())),
    };
    loop {
        match reader.next_record() {
            Ok(Some(record)) => records.push(record),
            Ok(None) => {
                let end = reader.end().unwrap();
                assert_eq!((reader.next_record(), reader.end()), (Ok(None), Some(end)), "the end stays");
                return (records, Ok(end));
            }
            Err(error) => return (records, Err(error.to_string())),
        }
    }
}

fn ints() -> impl Strategy<Value = Vec<i32>> {
    prop_oneof![
        prop::collection::vec(any::<i32>(), 0..MAX_LANES),
        prop::collection::vec(0..256, 0..MAX_LANES),
        prop::collection::vec(0..65_536, 0..MAX_LANES),
        (any::<i32>(), 0..MAX_LANES).prop_map(|(value, len)| vec![value; len]),
        (-50..50_000, 0..MAX_LANES as i32).prop_map(|(from, len)| (from..from + len).collect()),
    ]
}

fn salt() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..257)
}

fn call() -> impl Strategy<Value = Call<'static>> {
    let (row, len, step) = (any::<i32>, any::<i32>, any::<u64>);
    prop_oneof![
        Just(Call::Admit {}),
        (step(), len()).prop_map(|(prefix, length)| Call::AdmitOn { prefix, length: Some(length) }),
        row().prop_map(|row| Call::Fork { row }),
        (row(), len()).prop_map(|(row, length)| Call::PinPrefix { row, length }),
        step().prop_map(|prefix| Call::ReleasePrefix { prefix }),
        (ints(), ints(), any::<bool>()).prop_map(|(rows, new_lens, writes_draft)| Call::PrepareExtend {
            rows: rows.into(),
            new_lens: new_lens.into(),
            writes_draft
        }),
        (ints(), ints(), ints(), any::<bool>()).prop_map(|(rows, new_lens, keep, writes_draft)| {
            let (rows, new_lens) = (rows.into(), new_lens.into());
            Call::PrepareExtendKeeping { rows, new_lens, keep: keep.into(), writes_draft }
        }),
        (ints(), ints(), any::<bool>()).prop_map(|(rows, shapes, writes_draft)| Call::PrepareDecode {
            rows: rows.into(),
            shapes: shapes.into(),
            writes_draft
        }),
        step().prop_map(|step| Call::Launch { step }),
        (step(), ints()).prop_map(|(step, lens)| Call::Resolve { step, accept_lens: lens.into() }),
        step().prop_map(|step| Call::Complete { step }),
        step().prop_map(|step| Call::Cancel { step }),
        step().prop_map(|step| Call::Abandon { step }),
        (row(), len()).prop_map(|(row, length)| Call::Trim { row, length }),
        (row(), len()).prop_map(|(row, length)| Call::EndTurn { row, length }),
        row().prop_map(|row| Call::Retract { row }),
        row().prop_map(|row| Call::Finish { row }),
        row().prop_map(|row| Call::Abort { row }),
        Just(Call::Snapshot {}),
        Just(Call::Restore {}),
        (row(), ints(), salt()).prop_map(|(row, tokens, salt)| Call::Index {
            row,
            tokens: tokens.into(),
            salt: salt.into()
        }),
        (ints(), salt(), any::<bool>()).prop_map(|(tokens, salt, needs_draft)| Call::AdmitCached {
            limit: Some(tokens.len() as i32),
            tokens: tokens.into(),
            salt: salt.into(),
            needs_draft
        }),
        (row(), len(), len()).prop_map(|(row, start, end)| Call::Lend { row, start, end }),
        (row(), len(), len(), ints()).prop_map(|(row, start, end, pages)| Call::Rebind {
            row,
            start,
            end,
            pages: pages.into()
        }),
        (len(), ints()).prop_map(|(length, pages)| Call::AdmitLent { length, pages: pages.into() }),
        (0_i32..4, ints()).prop_map(|(group, pages)| Call::ReleaseLent { group, pages: pages.into() }),
        row().prop_map(|row| Call::Export { row }),
        (len(), len()).prop_map(|(length, drafted_len)| Call::ImportRow { length, drafted_len }),
        salt().prop_map(|salt| Call::Forget { salt: salt.into() }),
        Just(Call::ForgetAll {}),
    ]
}

/// A new verb needs its line above.
#[test]
fn every_kind_of_call_is_drawn() {
    let mut runner = TestRunner::deterministic();
    let mut kinds = BTreeSet::new();
    for _ in 0..3000 {
        let mut bytes = Vec::new();
        call().new_tree(&mut runner).unwrap().current().encode(&mut bytes);
        kinds.insert(bytes[0]);
    }
    assert_eq!(kinds, Call::KINDS.iter().copied().collect());
}

fn some_calls() -> Vec<(Call<'static>, Option<&'static str>)> {
    vec![
        (Call::Admit {}, Some("request-1")),
        (Call::AdmitOn { prefix: 3, length: Some(70_000) }, None),
        (Call::PrepareExtend { rows: vec![1, 2].into(), new_lens: vec![300, 70_000].into(), writes_draft: true }, None),
        (Call::Snapshot {}, None),
        (Call::PrepareDecode { rows: vec![3, 1, 2].into(), shapes: vec![1, 1, 1].into(), writes_draft: false }, None),
        (Call::Resolve { step: 300, accept_lens: vec![1, 4, 0].into() }, None),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(calls in prop::collection::vec((call(), prop::option::of("[a-zé]{0,20}")), 0..30)) {
        let calls: Vec<_> = calls.iter().map(|(call, tag)| (call.clone(), tag.as_deref())).collect();
        let written = write("roundtrip", &calls, 1 << 20, true);
        let (records, end) = read(&written.bytes);
        prop_assert_eq!(end, Ok(LogEnd::Closed));
        prop_assert_eq!(records.len(), calls.len());
        let mut digest = Digest::new();
        for (at, (record, (call, tag))) in records.iter().zip(&calls).enumerate() {
            prop_assert_eq!(&record.call, call);
            let tag = tag.filter(|_| has_tag(call));
            prop_assert_eq!(record.tag.as_deref(), tag);
            prop_assert_eq!(record.snapshot, if matches!(call, Call::Snapshot {} | Call::Restore {}) { 133 } else { 0 });
            prop_assert_eq!((record.index, record.offset), (at as u64 + 1, written.offsets[at]));
            let mut bytes = Vec::new();
            call.encode(&mut bytes);
            digest = digest_of(&bytes, digest);
            prop_assert_eq!(record.digest, digest.value());
        }
    }

    /// No checksum guards these bytes. Any refusal is allowed; a panic or a huge array is not.
    #[test]
    fn decoding_never_panics(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        kind in prop::sample::select(Call::KINDS),
    ) {
        let _ = Call::decode(&bytes, MAX_LANES, MAX_LANES, MAX_LANES);
        let bytes = [&[kind], &bytes[..]].concat();
        if let Ok((call, len)) = Call::decode(&bytes, MAX_LANES, MAX_LANES, MAX_LANES) {
            prop_assert!(len <= bytes.len());
            prop_assert!(call.rows().len() <= MAX_LANES);
        }
    }
}

#[test]
fn the_head_holds_the_whole_configuration() {
    let written = write("head", &[], 1 << 20, true);
    let reader = LogReader::from_bytes(written.bytes).unwrap();
    assert_eq!(reader.config(), &config());
    assert_eq!(reader.made_by(), env!("CARGO_PKG_VERSION"));
}

/// Cuts the log anywhere: every whole record is read. Then an error says where the broken one begins, or the log just
/// ends.
#[test]
fn a_truncated_log_is_read_up_to_the_cut() {
    let calls = some_calls();
    let written = write("truncated", &calls, 1 << 20, true);
    let whole = written.bytes.len();
    let edges: Vec<usize> = written.offsets.iter().map(|&offset| offset as usize).chain([whole - 14, whole]).collect();
    for cut in 0..=whole {
        let (records, end) = read(&written.bytes[..cut]);
        let begun = edges.iter().filter(|&&edge| edge <= cut).count();
        assert_eq!(records.len(), begun.saturating_sub(1).min(calls.len()), "cut at {cut}");
        match end {
            Ok(LogEnd::Closed) => assert_eq!(cut, whole),
            Ok(LogEnd::Open) => assert!(edges.contains(&cut) && cut < whole, "cut at {cut}"),
            Ok(LogEnd::Limit) => panic!("cut at {cut} is no limit"),
            Err(error) => {
                assert!(!edges.contains(&cut), "cut at {cut}: {error}");
                let at = edges.iter().rev().find(|&&edge| edge < cut).copied().unwrap_or(0);
                assert!(error.contains(&format!("at byte {at}: it is truncated")), "cut at {cut}: {error}");
            }
        }
    }
}

/// Changes one byte anywhere: the error has an offset at or before it, and every record before that is read.
#[test]
fn a_damaged_log_is_refused_where_it_is_damaged() {
    let written = write("damaged", &some_calls(), 1 << 20, true);
    let last = written.bytes.len() - 14;
    let edges: Vec<usize> = written.offsets.iter().map(|&offset| offset as usize).chain([last]).collect();
    for at in 0..written.bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut bytes = written.bytes.clone();
            bytes[at] ^= flip;
            let (records, end) = read(&bytes);
            let error = end.expect_err("damage must be found");
            let before = edges.iter().filter(|&&edge| edge <= at).count();
            let broken = if before == 0 { 0 } else { edges[before - 1] };
            assert_eq!(records.len(), before.saturating_sub(1), "byte {at} ^ {flip}: {error}");
            assert!(error.contains(&format!("at byte {broken}: ")), "byte {at} ^ {flip}: {error}");
        }
    }
}

#[test]
fn bytes_behind_the_end_are_refused_where_they_begin() {
    let mut bytes = write("behind", &some_calls(), 1 << 20, true).bytes;
    let len = bytes.len();
    bytes.extend([1, 2, 3]);
    let (records, end) = read(&bytes);
    assert_eq!(records.len(), some_calls().len());
    assert!(end.unwrap_err().contains(&format!("at byte {len}: bytes follow its end")));
}

#[test]
fn errors_name_the_file_and_ends_have_names() {
    let path = place("named");
    std::fs::write(&path, b"no log at all").unwrap();
    let error = LogReader::open(&path).err().unwrap().to_string();
    assert!(error.starts_with(&format!("event log {}, its head at byte 0: ", path.display())), "{error}");
    std::fs::remove_file(&path).unwrap();
    let bytes = write("named", &[], 1 << 20, true).bytes;
    assert_eq!(LogReader::from_bytes(bytes).unwrap().name(), "in memory");
    assert_eq!([LogEnd::Closed, LogEnd::Limit, LogEnd::Open].map(LogEnd::name), ["closed", "limit", "open"]);
}

/// Whole records in wrong places: one left out, two exchanged, one repeated.
#[test]
fn records_out_of_place_are_refused() {
    let written = write("moved", &some_calls(), 1 << 20, true);
    let edge = |at: usize| written.offsets[at] as usize;
    let (first, second) = (&written.bytes[edge(0)..edge(1)], &written.bytes[edge(1)..edge(2)]);
    let (head, tail) = (&written.bytes[..edge(0)], &written.bytes[edge(2)..]);
    let moved: [&[&[u8]]; 3] =
        [&[head, second, tail], &[head, second, first, tail], &[head, first, first, second, tail]];
    for parts in moved {
        let (_, end) = read(&parts.concat());
        assert!(end.unwrap_err().contains("is damaged: the checksum differs"));
    }
}

#[test]
fn what_is_no_log_or_a_newer_one_is_refused() {
    let written = write("foreign", &[], 1 << 20, true);
    let (_, end) = read(b"{\"machine\": {}}\n");
    assert!(end.unwrap_err().contains("no event log"));
    let (_, end) = read(b"");
    assert!(end.unwrap_err().contains("at byte 0: it is truncated: 8 more bytes are needed, 0 are left"));
    let mut newer = written.bytes;
    newer[8] = 9;
    let (_, end) = read(&newer);
    assert!(end.unwrap_err().contains("format version 9, this specpool reads 1"));
    let error = LogReader::open(&place("absent")).err().unwrap();
    assert!(matches!(&error, Error::Record(text) if text.contains("specpool-absent")), "{error}");
}

/// At its limit the log says so and takes no more. The file is never longer than the limit.
#[test]
fn a_log_is_bounded() {
    let call = (Call::Resolve { step: 1, accept_lens: vec![1; 30].into() }, None);
    let calls = vec![call; 100];
    for limit in 200..260 {
        let written = write("bounded", &calls, limit, true);
        assert!(written.bytes.len() as u64 <= limit);
        let (records, end) = read(&written.bytes);
        assert_eq!(end, Ok(LogEnd::Limit));
        assert!(!records.is_empty() && records.len() < 100);
    }

    // The limit is exact: a log that just fits is closed as usual, and one byte less is not enough.
    let whole = write("bounded", &calls[..5], 1 << 20, true).bytes.len() as u64;
    assert_eq!(read(&write("bounded", &calls[..5], whole, true).bytes).1, Ok(LogEnd::Closed));
    let short = read(&write("bounded", &calls[..5], whole - 1, true).bytes);
    assert_eq!((short.0.len(), short.1), (4, Ok(LogEnd::Limit)));
    let least = write("bounded", &[], 1 << 20, true).bytes.len() as u64;
    assert_eq!(read(&write("bounded", &calls[..1], least, true).bytes), (vec![], Ok(LogEnd::Limit)));
    let error = EventLog::create(&place("small"), &config(), least - 1).unwrap_err().to_string();
    assert!(error.contains(&format!("at least {least} bytes")) && error.contains(&format!("got {}", least - 1)));
}

/// The file gets the pushed records as soon as enough have gathered, and the rest when the log is dropped.
#[test]
fn what_gathers_is_written_before_it_is_much() {
    let path = place("flush");
    let mut log = EventLog::create(&path, &config(), 1 << 30).unwrap();
    let mut bytes = Vec::new();
    Call::Resolve { step: 1, accept_lens: (0..40).map(|at| at * 7_919).collect::<Vec<_>>().into() }.encode(&mut bytes);
    let digest = Digest::new();
    let mut most_in_memory = 0;
    for _ in 0..2_000 {
        log.make_room().unwrap();
        log.push(&bytes, &[], digest, digest);
        most_in_memory = most_in_memory.max(log.num_bytes() - std::fs::metadata(&path).unwrap().len());
    }
    assert!((1 << 16..1 << 17).contains(&most_in_memory), "{most_in_memory} bytes in memory");
    let len = log.num_bytes();
    drop(log);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(bytes.len() as u64, len);
    let (records, end) = read(&bytes);
    assert_eq!((records.len(), end), (2_000, Ok(LogEnd::Open)));
}

/// `/dev/full` refuses every write: creating a log there fails at once.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_refuses_a_new_log() {
    let error = EventLog::create(std::path::Path::new("/dev/full"), &config(), 1 << 20).unwrap_err();
    assert!(
        matches!(&error, Error::Record(text) if text.contains("/dev/full") && text.contains("0 bytes are written"))
    );
    let error = EventLog::create(&place("no-folder").join("log"), &config(), 1 << 20).unwrap_err();
    assert!(matches!(&error, Error::Record(text) if text.contains("specpool-no-folder")), "{error}");
}

/// What a reader of a log gets of each call: its text, the rows and the step that it names.
#[test]
fn a_call_is_shown_as_it_would_be_written() {
    let lanes: Vec<i32> = (1..=17).collect();
    let shown: [(Call<'_>, &str, &[i32], Option<u64>); 21] = [
        (Call::Admit {}, "admit()", &[], None),
        (Call::AdmitOn { prefix: 3, length: Some(7) }, "admit(prefix=3, length=7)", &[], None),
        (Call::ReleasePrefix { prefix: 3 }, "release_prefix(3)", &[], None),
        (
            Call::PrepareExtend { rows: vec![4, 2].into(), new_lens: vec![9, 8].into(), writes_draft: false },
            "prepare_extend([4, 2], [9, 8], writes_draft=False)",
            &[4, 2],
            None,
        ),
        (
            Call::PrepareDecode { rows: lanes[..16].into(), shapes: vec![1; 17].into(), writes_draft: true },
            "prepare_decode([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], \
             [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, .. 17 lanes])",
            &lanes[..16],
            None,
        ),
        (Call::Launch { step: 6 }, "launch(6)", &[], Some(6)),
        (Call::Resolve { step: 6, accept_lens: vec![2].into() }, "resolve(6, [2])", &[], Some(6)),
        (Call::Abandon { step: 6 }, "abandon(6)", &[], Some(6)),
        (Call::EndTurn { row: 5, length: 40 }, "end_turn(5, 40)", &[5], None),
        (Call::Fork { row: 5 }, "fork(5)", &[5], None),
        (Call::Abort { row: 5 }, "abort(5)", &[5], None),
        (Call::Restore {}, "restore()", &[], None),
        (
            Call::Index { row: 5, tokens: vec![7, 8].into(), salt: b"a\n".into() },
            "index(5, [7, 8], salt=b\"a\\n\")",
            &[5],
            None,
        ),
        (Call::Forget { salt: b"".into() }, "forget(b\"\")", &[], None),
        (Call::ForgetAll {}, "forget()", &[], None),
        (Call::Lend { row: 5, start: 4, end: 8 }, "lend(5, 4, 8)", &[5], None),
        (Call::Rebind { row: 5, start: 4, end: 8, pages: vec![7].into() }, "rebind(5, 4, 8, [7])", &[5], None),
        (Call::AdmitLent { length: 8, pages: vec![7, 9].into() }, "admit_lent([7, 9], 8)", &[], None),
        (Call::ReleaseLent { group: 0, pages: vec![7].into() }, "release_lent(0, [7])", &[], None),
        (Call::Export { row: 5 }, "export(5)", &[5], None),
        (Call::ImportRow { length: 8, drafted_len: 4 }, "import_row(8, 4)", &[], None),
    ];
    for (call, text, rows, step) in shown {
        assert_eq!((call.to_string().as_str(), call.rows(), call.step()), (text, rows, step));
        assert!(text.starts_with(call.verb().name()));
    }
}

/// Two ledgers on one file would each destroy the other's log.
#[test]
fn a_log_has_one_writer() {
    let path = place("two");
    let first = EventLog::create(&path, &config(), u64::MAX).unwrap();
    let written = std::fs::read(&path).unwrap();
    let error = EventLog::create(&path, &config(), u64::MAX).unwrap_err().to_string();
    assert!(error.contains("another ledger is writing it") && error.contains("two"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), written);
    drop(first);
    let mut second = EventLog::create(&path, &config(), u64::MAX).unwrap();
    second.finish(Digest::new()).unwrap();
    let third = EventLog::create(&path, &config(), u64::MAX).unwrap();
    drop((second, third));
    std::fs::remove_file(&path).unwrap();
}

/// A few bytes that stand for many numbers: no array is longer than a batch can be.
#[test]
fn a_small_log_takes_no_great_memory() {
    let log = |num_rows, max_batch, lanes| {
        let config = LedgerConfig { num_rows, max_batch, ..config() };
        let path = place("crafted");
        let mut log = EventLog::create(&path, &config, u64::MAX).unwrap();
        let mut bytes = Vec::new();
        let rows = vec![1; lanes];
        let call = Call::Resolve { step: 1, accept_lens: rows.into() };
        call.encode(&mut bytes);
        let after = digest_of(&bytes, Digest::new());
        log.push(&bytes, &[], Digest::new(), after);
        drop(log);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        read(&bytes).1
    };
    assert!(log(4, Some(3), 3).is_ok());
    let error = log(1 << 20, Some(3), 4).unwrap_err();
    assert!(error.contains("an array of 4 entries, at most 3 fit"), "{error}");
    let error = log(4, None, 5).unwrap_err();
    assert!(error.contains("an array of 5 entries, at most 4 fit"), "{error}");
    for num_rows in [0, (1 << 24) + 1, i64::MAX] {
        let error = log(num_rows, None, 1).unwrap_err();
        assert!(error.contains("num_rows must be in [1, 16777216]"), "{error}");
    }
}
