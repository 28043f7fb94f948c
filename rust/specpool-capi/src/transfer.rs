//! Rows that move to another ledger, for C.

use std::ffi::c_char;

use specpool_core::Row;

use crate::handle::guard;
use crate::ledger::{LEDGERS, Ledger};
use crate::slice::{has_room, put, text, write};
use crate::status::Status;

/// What a prefix or an export has in one group.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PrefixInfo {
    /// Its tokens.
    pub len: i32,
    /// Draft KV is valid below this position.
    pub drafted_len: i32,
    /// Column of its first page behind the sink. What lies between the sink and it is below the window.
    pub first_column: usize,
    /// Its pages in the group, one for each column: first those of the sink, then those from first_column on.
    pub num_pages: usize,
    /// Its first pages that are of the group's sink: their columns are 0, 1, and so on. 0 without a sink, and if the window
    /// reaches back to the sink.
    pub num_sinks: usize,
    /// The state slot that contains the tokens of an export; 0 without a state group.
    pub state_slot: i32,
}

/// Gives the row back, and keeps the pages of all its tokens as a prefix, also a partly filled last one. They are
/// read-only until specpool_ledger_release_prefix: read them and send them. specpool_ledger_admit_on makes a row of them
/// again. Nothing of the row may be in flight. With a state group the prefix has the tokens that the row's state contains,
/// and its slot. O(pages).
///
/// # Safety
/// `prefix` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_export(ledger: Ledger, row: i32, prefix: *mut u64) -> Status {
    guard(|| unsafe {
        has_room("prefix", prefix, 1, 1)?;
        put("prefix", LEDGERS.with(ledger.id, |ledger| Ok(ledger.export(Row(row))?))?, prefix)
    })
}

/// Takes a free row of `len` tokens on pages of its own, for KV that comes from elsewhere; draft KV is valid below
/// `drafted_len`. Write the pages, which specpool_ledger_row_pages names, before the next launch and behind every
/// launched forward. With a state group, write the row's slot too, which specpool_ledger_row_state names. If the KV does
/// not arrive, specpool_ledger_abort takes the row back. O(pages).
///
/// # Safety
/// `tag` is a text or NULL, `row` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_import_row(
    ledger: Ledger,
    len: i32,
    drafted_len: i32,
    tag: *const c_char,
    row: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("row", row, 1, 1)?;
        let tag = text("tag", tag)?;
        put("row", LEDGERS.with(ledger.id, |ledger| Ok(ledger.import_row(len, drafted_len, tag)?))?.0, row)
    })
}

/// Writes what a prefix or an export has in the group, and its pages there. With a capacity of 0 and NULL, only the
/// former. O(pages).
///
/// # Safety
/// `pages` has room for `capacity` entries; `info` points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_prefix_pages(
    ledger: Ledger,
    prefix: u64,
    group: usize,
    pages: *mut i32,
    capacity: usize,
    info: *mut PrefixInfo,
) -> Status {
    guard(|| unsafe {
        has_room("info", info, 1, 1)?;
        LEDGERS.with(ledger.id, |ledger| {
            let run = ledger.prefix_pages(prefix, group)?;
            let (len, drafted_len) = (ledger.prefix_len(prefix)?, ledger.prefix_drafted_len(prefix)?);
            let (first_column, num_pages, num_sinks) = (run.first_column, run.pages.len(), run.num_sinks);
            let state_slot = ledger.prefix_state_slot(prefix)?.0;
            if capacity > 0 || !pages.is_null() {
                has_room("pages", pages, capacity, num_pages)?;
                for (at, page) in run.pages.iter().enumerate() {
                    write("pages", &[page.0], pages.add(at), 1)?;
                }
            }
            put("info", PrefixInfo { len, drafted_len, first_column, num_pages, num_sinks, state_slot }, info)
        })
    })
}
