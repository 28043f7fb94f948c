//! What a ledger did: one variant per state-changing verb, with its arguments and the id that it gave.

use crate::ids::Row;
use crate::state::step::Plan;
use crate::verb::Verb;

/// One successful call that changed the state. The arrays are borrowed: an event lives as long as the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// `admit`: `prefix` is 0 if there is none; `len` is the new row's `resolved_len`.
    Admit {
        /// The prefix, or 0.
        prefix: u64,
        /// `resolved_len` of the new row.
        len: i32,
        /// The row given.
        row: Row,
        /// The embedder's name for the request.
        tag: Option<&'a str>,
    },
    /// `fork`: `row` is the new row.
    Fork {
        /// The row forked.
        parent: Row,
        /// The row given.
        row: Row,
        /// The embedder's name for the request.
        tag: Option<&'a str>,
    },
    /// `pin_prefix`: `prefix` is the id given.
    PinPrefix {
        /// The row.
        row: Row,
        /// The length asked for.
        len: i32,
        /// The id given.
        prefix: u64,
    },
    /// `release_prefix`.
    ReleasePrefix {
        /// The prefix.
        prefix: u64,
    },
    /// `prepare_extend` or `prepare_decode`.
    Prepare {
        /// The plan given.
        plan: &'a Plan,
    },
    /// `launch`.
    Launch {
        /// The step.
        step: u64,
    },
    /// `resolve`; the `accept_lens` of dropped lanes are 0.
    Resolve {
        /// The step.
        step: u64,
        /// Per lane.
        accept_lens: &'a [i32],
    },
    /// `complete`.
    Complete {
        /// The step.
        step: u64,
    },
    /// `cancel`.
    Cancel {
        /// The step.
        step: u64,
    },
    /// `abandon`.
    Abandon {
        /// The step.
        step: u64,
    },
    /// `trim` or `end_turn`.
    Cut {
        /// Which of the two.
        verb: Verb,
        /// The row.
        row: Row,
        /// The length asked for.
        len: i32,
        /// The new `resolved_len`.
        resolved: i32,
    },
    /// `retract`, `finish` or `abort`.
    GiveBack {
        /// Which of the three.
        verb: Verb,
        /// The row.
        row: Row,
    },
    /// `snapshot`: its number, from 1.
    Snapshot {
        /// The snapshot given.
        number: u64,
    },
    /// `restore`.
    Restore {
        /// The snapshot's number.
        number: u64,
    },
    /// `index`.
    Index {
        /// The row.
        row: Row,
        /// The tokens of the row.
        tokens: &'a [i32],
        /// The salt.
        salt: &'a [u8],
        /// How many of the tokens the index knows.
        len: i32,
    },
    /// `admit_cached`: `row` is the row given.
    AdmitCached {
        /// The tokens up to the limit.
        tokens: &'a [i32],
        /// The salt.
        salt: &'a [u8],
        /// Whether the hit ends where draft KV ends.
        needs_draft: bool,
        /// The row given.
        row: Row,
        /// The embedder's name for the request.
        tag: Option<&'a str>,
    },
    /// `lend`.
    Lend {
        /// The row.
        row: Row,
        /// The first token.
        start: i32,
        /// Behind the last token.
        end: i32,
    },
    /// `rebind`.
    Rebind {
        /// The row.
        row: Row,
        /// The first token.
        start: i32,
        /// Behind the last token.
        end: i32,
        /// The pages, group after group.
        pages: &'a [i32],
    },
    /// `admit_lent`: `row` is the row given.
    AdmitLent {
        /// The pages, group after group.
        pages: &'a [i32],
        /// `resolved_len` of the new row.
        len: i32,
        /// The row given.
        row: Row,
        /// The embedder's name for the request.
        tag: Option<&'a str>,
    },
    /// `release_lent`.
    ReleaseLent {
        /// The group's index.
        group: usize,
        /// Its pages.
        pages: &'a [i32],
    },
    /// `export`: `prefix` is the id given.
    Export {
        /// The row, which is given back.
        row: Row,
        /// The id given.
        prefix: u64,
    },
    /// `import_row`: `row` is the row given.
    ImportRow {
        /// `resolved_len` of the new row.
        len: i32,
        /// Its `drafted_len`.
        drafted: i32,
        /// The row given.
        row: Row,
        /// The embedder's name for the request.
        tag: Option<&'a str>,
    },
    /// `forget`.
    Forget {
        /// The salt, or nothing for all.
        salt: Option<&'a [u8]>,
    },
}
