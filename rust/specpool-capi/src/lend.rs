//! Pages for a prefix cache of the caller's own, for C.

use std::ffi::c_char;

use specpool_core::Row;

use crate::handle::guard;
use crate::ledger::{LEDGERS, Ledger};
use crate::slice::{has_room, put, read, text, write};
use crate::status::Status;

/// Makes a prefix cache outside the ledger a holder of the row's pages of the tokens start..end, in every group.
/// specpool_ledger_row_pages says which they are. They are read-only from now on, and outlive the row until
/// specpool_ledger_release_lent. Both bounds are multiples of every group's page size. O(pages).
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_lend(ledger: Ledger, row: i32, start: i32, end: i32) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.lend(Row(row), start, end)?)))
}

/// Puts lent pages in place of the row's own pages of the tokens start..end, which hold the same: the row becomes a
/// holder of them and gives its own back. One page for each column, group after group; 0 where a window has passed.
/// O(pages of the row).
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_rebind(
    ledger: Ledger,
    row: i32,
    start: i32,
    end: i32,
    pages: *const i32,
    num_pages: usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller's promise; so in every call below.
        let pages = unsafe { read("pages", pages, num_pages)? };
        LEDGERS.with(ledger.id, |ledger| Ok(ledger.rebind(Row(row), start, end, pages)?))
    })
}

/// Takes a free row on `len` tokens whose KV is in lent pages, and shares them. One page for each column, group after
/// group; 0 for those below the group's window. O(pages).
///
/// # Safety
/// The array has the length that is said; `tag` is a text or NULL, `row` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_admit_lent(
    ledger: Ledger,
    pages: *const i32,
    num_pages: usize,
    len: i32,
    tag: *const c_char,
    row: *mut i32,
) -> Status {
    guard(|| unsafe {
        has_room("row", row, 1, 1)?;
        let (pages, tag) = (read("pages", pages, num_pages)?, text("tag", tag)?);
        put("row", LEDGERS.with(ledger.id, |ledger| Ok(ledger.admit_lent(pages, len, tag)?))?.0, row)
    })
}

/// Notes that the cache outside holds these pages of the group no longer. Rows that share them keep them. All or none.
/// O(pages).
///
/// # Safety
/// The array has the length that is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_release_lent(
    ledger: Ledger,
    group: usize,
    pages: *const i32,
    num_pages: usize,
) -> Status {
    guard(|| {
        let pages = unsafe { read("pages", pages, num_pages)? };
        LEDGERS.with(ledger.id, |ledger| Ok(ledger.release_lent(group, pages)?))
    })
}

/// Writes the pages of the group that are lent, ascending, and their number. O(pages).
///
/// # Safety
/// `pages` has room for `capacity` entries; `count` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_lent_pages(
    ledger: Ledger,
    group: usize,
    pages: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> Status {
    guard(|| unsafe {
        let lent = LEDGERS.with(ledger.id, |ledger| Ok(ledger.lent_pages(group)?))?;
        put("count", lent.len(), count)?;
        write("pages", &lent, pages, capacity)
    })
}
