//! State groups for C: the slots for the recurrent states of a hybrid model.

use std::ffi::c_char;

use specpool_core::{Page, Row};

use crate::handle::guard;
use crate::ledger::{LEDGERS, Ledger, check_row};
use crate::slice::put;
use crate::status::Status;

/// A state group: one slot a row for the states of all recurrent layers. A ledger has one at most.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StateGroupConfig {
    /// The name in errors.
    pub name: *const c_char,
    /// State slots, besides slot 0: at least 1, with sessions 2.
    pub num_slots: i64,
    /// A round folds if at least this many resolved tokens are not in the slot, at least 1. A greater number saves writes
    /// of states, and makes the ring longer.
    pub flush: i64,
    /// Whether a round of one node with nothing in flight folds its root too.
    pub eager: bool,
}

/// The state of a state group: free + cached + fenced + held = num_slots.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StateGroupInfo {
    /// State slots in all.
    pub num_slots: usize,
    /// Slots that hold nothing.
    pub num_free: usize,
    /// Slots that only soft marks and the prefix index keep.
    pub num_cached: usize,
    /// Slots given back that a launched step may still touch.
    pub num_fenced: usize,
    /// Slots whose every holder is idle.
    pub num_reclaimable: usize,
    /// R: records that the device's ring of one row must hold. Position p lies at p % R.
    pub ring_len: i64,
}

/// The states of a row. Slot 0 is a state of no tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RowStateInfo {
    /// The row's slot.
    pub slot: i32,
    /// c: tokens that it contains.
    pub len: i32,
    /// The slot that specpool_ledger_end_turn keeps for the row.
    pub kept_slot: i32,
    /// Tokens that this contains.
    pub kept_len: i32,
    /// Soft marks that wait for specpool_ledger_index.
    pub num_soft_marks: usize,
}

/// The state of a state group. O(1).
///
/// # Safety
/// `info` points to the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_state_group(
    ledger: Ledger,
    group: usize,
    info: *mut StateGroupInfo,
) -> Status {
    guard(|| unsafe {
        // SAFETY: the caller's promise; so in every call below.
        let state = LEDGERS.with(ledger.id, |ledger| {
            let num_free = ledger.free_state_slots(group)?;
            Ok(StateGroupInfo {
                num_slots: ledger.state_groups().get(group).map_or(0, |spec| spec.num_slots as usize),
                num_free,
                num_cached: ledger.cached_state_slots(group)?,
                num_fenced: ledger.fenced_state_slots(group)?,
                num_reclaimable: ledger.reclaimable_state_slots(group)?,
                ring_len: ledger.state_ring_len(group)?,
            })
        })?;
        put("info", state, info)
    })
}

/// The states of a row in a state group. O(soft marks).
///
/// # Safety
/// `info` points to the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_row_state(
    ledger: Ledger,
    group: usize,
    row: i32,
    info: *mut RowStateInfo,
) -> Status {
    guard(|| unsafe {
        let state = LEDGERS.with(ledger.id, |ledger| {
            check_row(ledger, row)?;
            let (kept_slot, kept_len) = ledger.kept_state(group, Row(row))?.unwrap_or((Page::SINK, 0));
            Ok(RowStateInfo {
                slot: ledger.state_slot(group)?[row as usize],
                len: ledger.state_len(group)?[row as usize],
                kept_slot: kept_slot.0,
                kept_len,
                num_soft_marks: ledger.soft_marks(group, Row(row))?.count(),
            })
        })?;
        put("info", state, info)
    })
}
