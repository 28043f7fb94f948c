//! The smallest pools: those on which requests meet each other.

use specpool_core::{Ledger, LedgerConfig};

/// Most pages that are tried.
const MOST: i64 = 1 << 16;

/// The least pages of a group with which a ledger accepts the configuration, found by asking it.
#[must_use]
pub fn least_pages(config: &LedgerConfig, group: usize) -> i64 {
    let accepts = |num_pages: i64| {
        let mut config = config.clone();
        config.groups[group].num_pages = num_pages;
        Ledger::new(config).is_ok()
    };
    (1..MOST).find(|&num_pages| accepts(num_pages)).unwrap_or(MOST)
}
