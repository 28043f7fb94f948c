//! What a ledger may be built from: each limit from both sides, and the numbers in each refusal.

use specpool_core::{Error, Group, Layout, Ledger, LedgerConfig, Policy, Shape};

const MOST: i64 = i32::MAX as i64;

fn group(page_size: i64, num_pages: i64, window: Option<i64>) -> Group {
    Group { name: "kv".into(), page_size, num_pages, hosts_drafts: false, layout: Layout::Dense, window, sink: 0 }
}

/// One group, a chain of 4 nodes that accepts up to 4, overlap 1, rows of 100 tokens: 108 slots wide.
fn config(group: Group) -> LedgerConfig {
    let shapes = vec![Shape::eagle(3, 1, 4).unwrap()];
    LedgerConfig { overlap_depth: 1, ..LedgerConfig::new(vec![group], shapes, 2, 100) }
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, parts: &[&str]) {
    let Err(Error::Config(message)) = result.map(drop) else { panic!("not refused for its configuration") };
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} are not all in {message:?}");
}

/// The pool must have `least` pages, no fewer, and the refusal says what they are for.
#[track_caller]
fn needs(config: &LedgerConfig, least: i64, why: &str) {
    let with = |num_pages: i64| {
        let mut config = config.clone();
        config.groups[0].num_pages = num_pages;
        Ledger::new(config)
    };
    refused(with(least - 1), &["group kv", &format!("at least {least}, {why}, got {}", least - 1)]);
    assert!(with(least).is_ok());
}

#[test]
fn a_group_alone() {
    assert!(group(1, 1, None).check().is_ok());
    refused(group(1, 0, None).check(), &["group kv", "num_pages", "at least 1", "got 0"]);
    refused(group(1, -1, None).check(), &["got -1"]);
    refused(group(0, 1, None).check(), &["group kv", "page_size", "got 0"]);
    refused(Group { name: String::new(), ..group(1, 1, None) }.check(), &["needs a name"]);
    for window in [1, MOST] {
        assert!(group(1, 1, Some(window)).check().is_ok());
    }
    for window in [0, MOST + 1] {
        refused(group(1, 1, Some(window)).check(), &["window", &format!("got {window}")]);
    }
    // int32 ids can name at most 2^31 slots, including the sink page.
    for page_size in [1, 2, 64] {
        let most = (1 << 31) / page_size - 1;
        assert!(group(page_size, most, None).check().is_ok());
        let slots = ((1_i64 << 31) + page_size).to_string();
        refused(group(page_size, most + 1, None).check(), &[&(most + 1).to_string(), &slots, "2147483648"]);
    }
    refused(group(1 << 20, 1 << 62, None).check(), &["2^31"]);
}

#[test]
fn the_numbers_of_a_ledger() {
    type Setting = fn(&mut LedgerConfig, i64);
    let settings: [(&str, Setting, i64, i64); 5] = [
        ("num_rows", |config, value| config.num_rows = value, 1, 1 << 24),
        ("max_context_len", |config, value| config.max_context_len = value, 2, MOST),
        ("max_batch", |config, value| config.max_batch = Some(value), 1, 2),
        ("overlap_depth", |config, value| config.overlap_depth = value, 0, MOST - 1),
        ("max_chunk", |config, value| config.max_chunk = Some(value), 1, MOST),
    ];
    for (name, set, least, most) in settings {
        let with = |value| {
            let mut config = config(group(4, 27, None));
            set(&mut config, value);
            config
        };
        for value in [least - 1, most + 1, i64::MIN, i64::MAX] {
            refused(Ledger::new(with(value)), &[name, &format!("[{least}, {most}], got {value}")]);
        }
    }
    refused(Ledger::new(LedgerConfig { groups: vec![], ..config(group(4, 27, None)) }), &["at least one group"]);
    let twice = vec![group(4, 27, None), group(2, 60, None)];
    refused(Ledger::new(LedgerConfig { groups: twice, ..config(group(4, 27, None)) }), &["two groups", "kv"]);
    let shape = Shape { num_steps: 1, topk: 0, num_draft_tokens: 2 };
    let error = Ledger::new(LedgerConfig { shapes: vec![shape], ..config(group(4, 27, None)) }).unwrap_err();
    assert!(error.to_string().contains("topk"), "{error}");
}

#[test]
fn row_widths() {
    let with = |widths: &[i64]| {
        Ledger::new(LedgerConfig { row_width: Some(widths.to_vec()), ..config(group(4, 1 << 10, None)) })
    };
    assert_eq!(with(&[108]).unwrap().row_width(0), Ok(108));
    assert_eq!(with(&[112]).unwrap().row_width(0), Ok(112));
    for width in [104, 107, 109, -4] {
        refused(with(&[width]), &["at least 108", "page_size 4", &format!("got {width}")]);
    }
    refused(with(&[1 << 31]), &["below 2^31", "2147483648"]);
    refused(with(&[108, 108]), &["2 entries for 1 groups"]);
    refused(with(&[]), &["0 entries for 1 groups"]);
    // The widest possible row is refused only for its pages.
    let widest = LedgerConfig { row_width: Some(vec![MOST]), ..config(group(1, 1, None)) };
    refused(Ledger::new(widest), &["num_pages must be at least 2147483647"]);
}

#[test]
fn pages_without_which_one_row_runs_dry() {
    needs(&config(group(4, 0, None)), 27, "the pages of one row of 108 slots");
    let window = |window, max_chunk, sessions| {
        let group = group(4, 0, Some(window));
        LedgerConfig { max_chunk: Some(max_chunk), sessions, ..config(group) }
    };
    // ceil((w - 1 + ahead) / P) + 1 pages, and ceil((w - 1) / P) + 1 more for a checkpoint.
    needs(&window(10, 11, false), 6, "a window of 10 with 11 slots ahead");
    needs(&window(9, 12, false), 6, "a window of 9 with 12 slots ahead");
    needs(&window(9, 13, false), 7, "a window of 9 with 13 slots ahead");
    needs(&window(9, 12, true), 9, "a window of 9 with 12 slots ahead and the 3 pages of a checkpoint");
    needs(&window(10, 11, true), 10, "a window of 10 with 11 slots ahead and the 4 pages of a checkpoint");
    needs(&window(1, 1, true), 4, "a window of 1 with 8 slots ahead and the 1 pages of a checkpoint");
    // A round in flight accepts at most 4, the next one verifies 4.
    needs(&window(9, 3, false), 5, "a window of 9 with 8 slots ahead");
    needs(&window(10, 3, false), 6, "a window of 10 with 8 slots ahead");
    // Upstream's policy claims two windows of 4 from the root behind a round in flight.
    let upstream = LedgerConfig { policy: Policy::DoubleBuffer, ..window(9, 3, false) };
    needs(&upstream, 6, "a window of 9 with 9 slots ahead");
    // Each of two branches has a page for the tail and one for the rest of its drafts.
    let branches = Group { hosts_drafts: true, layout: Layout::Holey, ..group(4, 0, Some(9)) };
    let tree = vec![Shape::eagle(3, 2, 4).unwrap()];
    let holey = LedgerConfig { groups: vec![branches], shapes: tree, ..window(9, 3, false) };
    needs(&holey, 8, "a window of 9 with 20 slots ahead");
    // Never more pages than a row has columns.
    needs(&window(9, 95, false), 27, "the pages of one row of 108 slots");
    needs(&window(9, 92, false), 26, "a window of 9 with 92 slots ahead");
    needs(&window(9, 1000, true), 27, "the pages of one row of 108 slots");
}

/// A window that hides nothing belongs in a full group; sizing pages for it would be a mistake.
#[test]
fn a_window_larger_than_the_context() {
    let with = |window| Ledger::new(config(group(4, 1 << 10, Some(window))));
    assert!(with(100).is_ok());
    refused(with(101), &["group kv", "window 101", "max_context_len 100"]);
}

/// One past the last index of the draft reads must fit into an int32.
#[test]
fn draft_reads() {
    let with = |max_batch, topk, width| {
        let shapes = vec![Shape { num_steps: 1, topk, num_draft_tokens: 2 }];
        let rows = LedgerConfig::new(vec![group(1 << 12, 1 << 10, None)], shapes, 1 << 10, 100);
        Ledger::new(LedgerConfig { max_batch: Some(max_batch), row_width: Some(vec![width]), ..rows })
    };
    assert!(with((1 << 10) - 1, 1, 1 << 21).is_ok());
    refused(with(1 << 10, 1, 1 << 21), &["max_batch 1024 * topk 1 * row_width 2097152 is 2147483648", "below 2^31"]);
    assert!(with((1 << 9) - 1, 4, 1 << 20).is_ok());
    refused(with(1 << 9, 4, 1 << 20), &["max_batch 512 * topk 4 * row_width 1048576 is 2147483648"]);
}
