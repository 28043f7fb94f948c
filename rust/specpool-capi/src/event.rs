//! Events for a KV connector, for C.

use std::ffi::c_void;

use specpool_core::{KvEvent, PageCopy, Row};

use crate::handle::guard;
use crate::ledger::{LEDGERS, Ledger};
use crate::status::{Status, bad_argument};
use crate::step::CopyOfPage;

/// What an event says.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Positions start..end of the row hold verified KV, and every step that writes them is complete.
    SpecpoolCommit = 0,
    /// A page copy of verified KV is done: `copy` says from where to where.
    SpecpoolMove = 1,
    /// Positions start..end of the row have left its pages in the group.
    SpecpoolEvict = 2,
    /// What lies at position `start` or behind it in the row is void, in every group; 0: the row was given back.
    SpecpoolRewind = 3,
}

/// A change of verified KV, for a connector that copies it elsewhere.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EventOfKv {
    /// What happened.
    pub kind: EventKind,
    /// The row.
    pub row: i32,
    /// The group's index; -1 for SPECPOOL_REWIND.
    pub group: i32,
    /// The first position; 0 for SPECPOOL_MOVE.
    pub start: i32,
    /// Behind the last position; 0 for SPECPOOL_MOVE, INT32_MAX for SPECPOOL_REWIND.
    pub end: i32,
    /// The pages of SPECPOOL_MOVE.
    pub copy: CopyOfPage,
}

/// Starts to note the events that specpool_ledger_poll_kv_events tells.
#[unsafe(no_mangle)]
pub extern "C" fn specpool_ledger_watch_kv(ledger: Ledger) -> Status {
    guard(|| LEDGERS.with(ledger.id, |ledger| Ok(ledger.watch_kv()?)))
}

/// Calls `on_event` for each change of verified KV since the last call: first what is void, then what was copied, then
/// what is verified. Call it before each launch: then no position that was told is overwritten before its rewind or
/// evict. The ledger is not locked while `on_event` runs, so it may ask for pages. It must not throw or jump out.
///
/// # Safety
/// `on_event` is a function that may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn specpool_ledger_poll_kv_events(
    ledger: Ledger,
    on_event: Option<unsafe extern "C" fn(context: *mut c_void, event: *const EventOfKv)>,
    context: *mut c_void,
) -> Status {
    guard(|| {
        let Some(on_event) = on_event else { return bad_argument("on_event is NULL".into()) };
        for event in LEDGERS.with(ledger.id, |ledger| Ok(ledger.take_kv_events()?))? {
            unsafe { on_event(context, &event_for_c(event)) };
        }
        Ok(())
    })
}

fn event_for_c(event: KvEvent) -> EventOfKv {
    let no_copy = CopyOfPage { group: 0, src: 0, dst: 0, tokens: 0 };
    let ranged = |kind, row: Row, group: usize, start, end| EventOfKv {
        kind,
        row: row.0,
        group: group as i32,
        start,
        end,
        copy: no_copy,
    };
    match event {
        KvEvent::Commit { row, group, start, end } => ranged(EventKind::SpecpoolCommit, row, group, start, end),
        KvEvent::Evict { row, group, start, end } => ranged(EventKind::SpecpoolEvict, row, group, start, end),
        KvEvent::Rewind { row, len } => {
            EventOfKv { group: -1, ..ranged(EventKind::SpecpoolRewind, row, 0, len, i32::MAX) }
        }
        KvEvent::Move { row, copy: PageCopy { group, src, dst, tokens } } => EventOfKv {
            copy: CopyOfPage { group, src, dst, tokens },
            ..ranged(EventKind::SpecpoolMove, row, group as usize, 0, 0)
        },
    }
}
