//! What several files of tests begin with.

use std::path::PathBuf;

use specpool_core::{Group, Layout, Ledger, Row};

/// Prefills a row to `len` tokens, to the end of the step. Returns the step.
pub(crate) fn extend(ledger: &mut Ledger, row: Row, len: i32, writes_draft: bool) -> u64 {
    let step = ledger.prepare_extend(&[row.0], &[len], writes_draft).unwrap().step;
    ledger.launch(step).unwrap();
    ledger.complete(step).unwrap();
    step
}

/// A group of 24 pages, which hosts drafts unless it has a window.
pub(crate) fn group(name: &str, page_size: i64, window: Option<i64>) -> Group {
    Group {
        name: name.into(),
        page_size,
        num_pages: 24,
        hosts_drafts: window.is_none(),
        layout: Layout::Dense,
        window,
        sink: 0,
    }
}

/// A file of its own for each test.
pub(crate) fn place(test: &str) -> PathBuf {
    std::env::temp_dir().join(format!("specpool-{test}-{}.log", std::process::id()))
}
