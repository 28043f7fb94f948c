//! The configuration of a ledger.

use crate::shape::Shape;
use crate::state::group::Group;
use crate::state::sizing::Policy;
use crate::state::state_group::StateGroup;

/// Rows that a ledger may have: far more than any server runs, few enough to fit in memory.
pub(crate) const MAX_ROWS: i64 = 1 << 24;

/// The configuration of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerConfig {
    /// At least one; names are unique.
    pub groups: Vec<Group>,
    /// All shapes that may ever run. Shape 0 is put first if it is not there.
    pub shapes: Vec<Shape>,
    /// Rows, besides row 0.
    pub num_rows: i64,
    /// L: tokens of the longest sequence, at least 2.
    pub max_context_len: i64,
    /// Most rows in one step; `None` means all.
    pub max_batch: Option<i64>,
    /// D: rounds that may be prepared before the previous one is resolved.
    pub overlap_depth: i64,
    /// How much is reserved for a round.
    pub policy: Policy,
    /// Slots of a row, per group; `None` takes the least number that suffices.
    pub row_width: Option<Vec<i64>>,
    /// Whether drafting depends on draft KV (`drafted_len`).
    pub draft_kv: bool,
    /// Most tokens of one extend; `None` sets no limit. Window groups need pages for a window and a chunk.
    pub max_chunk: Option<i64>,
    /// Whether `end_turn` is used. Window groups then need pages for a checkpoint too.
    pub sessions: bool,
    /// Whether freed pages wait for the launched steps that may touch them. An engine whose forwards and copies all
    /// run on one stream can turn this off. Rows wait in any case.
    pub page_fencing: bool,
    /// Whether the running digest is kept.
    pub digest: bool,
    /// The slots for recurrent state; none if every layer has KV. One group holds the states of all recurrent layers.
    pub states: Vec<StateGroup>,
}

impl LedgerConfig {
    /// A configuration of a synchronous ledger with the exact policy.
    #[must_use]
    pub fn new(groups: Vec<Group>, shapes: Vec<Shape>, num_rows: i64, max_context_len: i64) -> Self {
        Self {
            groups,
            shapes,
            num_rows,
            max_context_len,
            max_batch: None,
            overlap_depth: 0,
            policy: Policy::Exact,
            row_width: None,
            draft_kv: true,
            max_chunk: None,
            sessions: false,
            page_fencing: true,
            digest: false,
            states: Vec::new(),
        }
    }
}
