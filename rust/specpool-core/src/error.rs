//! Every error of the crate, one variant per kind (docs/contract.md, Errors). A refused call changes nothing, and each
//! message states the numbers.

/// The `Result` of the crate's fallible calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A group has too few pages that can be handed out now.
    #[error(
        "out of pages in group {group}: need {need} pages, {free} free, {cached} cached, {fenced} fenced, {reclaimable} reclaimable"
    )]
    OutOfPages {
        /// Name of the group.
        group: String,
        /// Pages that the call needs.
        need: usize,
        /// Pages that can be handed out now.
        free: usize,
        /// Pages that only the prefix index holds; they can be handed out too.
        cached: usize,
        /// Freed pages that a launched step may still touch.
        fenced: usize,
        /// Pages whose every holder is idle.
        reclaimable: usize,
    },
    /// A [`BlockPool`](crate::BlockPool) has too few blocks for the call. Nothing was taken.
    #[error("out of blocks: need {need}, {free} are free, {cached} cached, {fenced} fenced")]
    OutOfBlocks {
        /// Blocks that the call needs.
        need: usize,
        /// Blocks that hold nothing.
        free: usize,
        /// Blocks that nobody holds and whose content is known, those of the call's `hold` not counted.
        cached: usize,
        /// Dropped blocks that a step may still touch.
        fenced: usize,
    },
    /// The machine has too little memory for the call.
    #[error("no memory for {what}: {entries} entries of {entry_bytes} bytes")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// Number of entries.
        entries: usize,
        /// Bytes of one entry.
        entry_bytes: usize,
    },
    /// Every row is taken.
    #[error("out of rows: {num_rows} rows, {fenced} of them fenced, 0 free")]
    OutOfRows {
        /// Rows of the ledger.
        num_rows: usize,
        /// Rows given back that a launched step may still touch.
        fenced: usize,
    },
    /// A claim would pass the end of a row.
    #[error("row {row} overflows in group {group}: need {need} slots, the row is {width} wide")]
    RowOverflow {
        /// Name of the group.
        group: String,
        /// The row.
        row: usize,
        /// Slots needed.
        need: i64,
        /// Slots of the row.
        width: i64,
    },
    /// Rows that have reached the end of the context.
    #[error("rows {rows:?} have reached the context end of {max_context_len} tokens")]
    ContextEnd {
        /// The rows.
        rows: Vec<usize>,
        /// The context length.
        max_context_len: i64,
    },
    /// A page is not in the state that the call needs.
    #[error("page {page} of group {group} is {state}, owner {owner}")]
    PageState {
        /// Name of the group.
        group: String,
        /// The page.
        page: usize,
        /// Its state.
        state: String,
        /// Its owner, with the embedder's tag if there is one.
        owner: String,
    },
    /// A block of a [`BlockPool`](crate::BlockPool) is not in the state that the call needs.
    #[error("{verb} of block {block}: {why}; it is {state}, last tag {tag}, last verb {last_verb}")]
    BlockState {
        /// What was asked for.
        verb: String,
        /// The block.
        block: i32,
        /// Why it was refused.
        why: String,
        /// Its state.
        state: String,
        /// The tag of the take that gave it last.
        tag: String,
        /// The verb that touched it last, and by whom, if that is known.
        last_verb: Box<str>,
    },
    /// A step was prepared with a row that has been released since.
    #[error("step {step} is stale: row {row} was at epoch {planned} when prepared, is at {now}")]
    StalePlan {
        /// The step.
        step: u64,
        /// The row that moved.
        row: usize,
        /// The row's epoch in the plan.
        planned: u64,
        /// The row's epoch now.
        now: u64,
    },
    /// A call came out of order in a step's life.
    #[error("{0}")]
    Order(String),
    /// A row cannot take part yet.
    #[error("{0}")]
    NotReady(String),
    /// The draft KV of a row is behind its target KV.
    #[error(
        "row {row} cannot draft: drafted_len {drafted}, resolved_len {resolved}, {undrafted} rounds in flight write no draft KV"
    )]
    DraftLag {
        /// The row.
        row: usize,
        /// Positions below this have draft KV.
        drafted: i64,
        /// Positions below this have target KV.
        resolved: i64,
        /// Rounds in flight that write no draft KV.
        undrafted: i32,
    },
    /// An argument has a wrong length, value or combination.
    #[error("{0}")]
    Shape(String),
    /// A configuration that cannot work.
    #[error("{0}")]
    Config(String),
    /// An audit found a broken invariant.
    #[error("corrupt state: {0}")]
    Corrupt(String),
    /// An event log cannot be written, read or replayed; the text says where.
    #[error("{0}")]
    Record(String),
}

impl Error {
    /// The same error, with the name of who made the call, if the error is about a block.
    #[must_use]
    pub fn by(self, tag: Option<&str>) -> Self {
        match (self, tag) {
            (Self::BlockState { verb, block, why, state, tag, last_verb }, Some(name)) => {
                Self::BlockState { verb: format!("{verb} by {name:?}"), block, why, state, tag, last_verb }
            }
            (error, _) => error,
        }
    }
}
