//! One call of a state-changing verb, as a value. The decoder makes it, the enumeration lists it, and a trace prints
//! it.

use std::sync::Arc;

use specpool_core::{DeltaEntries, Ledger, Plan, Result, Row};

/// A verb and its arguments. Rows, steps and prefixes are the ledger's own ids.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the ledger's verbs and arguments")]
pub enum Op {
    Admit,
    AdmitOn {
        prefix: u64,
        len: Option<i32>,
    },
    Fork {
        row: i32,
    },
    PinPrefix {
        row: i32,
        len: i32,
    },
    ReleasePrefix {
        prefix: u64,
    },
    PrepareExtend {
        rows: Vec<i32>,
        new_lens: Vec<i32>,
        writes_draft: bool,
    },
    PrepareDecode {
        rows: Vec<i32>,
        shapes: Vec<i32>,
        writes_draft: bool,
    },
    Launch {
        step: u64,
    },
    Resolve {
        step: u64,
        accept_lens: Vec<i32>,
    },
    Complete {
        step: u64,
    },
    Cancel {
        step: u64,
    },
    Abandon {
        step: u64,
    },
    Trim {
        row: i32,
        len: i32,
    },
    EndTurn {
        row: i32,
        len: i32,
    },
    Retract {
        row: i32,
    },
    Finish {
        row: i32,
    },
    Abort {
        row: i32,
    },
    TakeDelta {
        step: u64,
    },
    AckDelta {
        step: u64,
    },
    Index {
        row: i32,
        tokens: Vec<i32>,
        salt: Vec<u8>,
    },
    AdmitCached {
        tokens: Vec<i32>,
        salt: Vec<u8>,
        limit: Option<i32>,
        needs_draft: bool,
    },
    Forget {
        salt: Option<Vec<u8>>,
    },
    Lend {
        row: i32,
        start: i32,
        end: i32,
    },
    /// Pages group after group, as in the next one.
    Rebind {
        row: i32,
        start: i32,
        end: i32,
        pages: Vec<i32>,
    },
    AdmitLent {
        pages: Vec<i32>,
        len: i32,
    },
    ReleaseLent {
        group: usize,
        pages: Vec<i32>,
    },
    Export {
        row: i32,
    },
    ImportRow {
        len: i32,
        drafted: i32,
    },
}

/// What a verb gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// Nothing.
    Done,
    /// A new row.
    Row(Row),
    /// A new prefix.
    Prefix(u64),
    /// A new `resolved_len`, or tokens that the index knows.
    Len(i32),
    /// A plan.
    Plan(Arc<Plan>),
    /// Table changes, per group.
    Delta(Vec<DeltaEntries>),
}

/// Calls the verb.
///
/// # Errors
/// The verb's own refusal, which changes nothing.
pub fn apply(ledger: &mut Ledger, op: &Op) -> Result<Given> {
    let done = |()| Given::Done;
    match op {
        Op::Admit => ledger.admit(None).map(Given::Row),
        Op::AdmitOn { prefix, len } => ledger.admit_on(*prefix, *len, None).map(Given::Row),
        Op::Fork { row } => ledger.fork(Row(*row), None).map(Given::Row),
        Op::PinPrefix { row, len } => ledger.pin_prefix(Row(*row), *len).map(Given::Prefix),
        Op::ReleasePrefix { prefix } => ledger.release_prefix(*prefix).map(done),
        Op::PrepareExtend { rows, new_lens, writes_draft } => {
            ledger.prepare_extend(rows, new_lens, *writes_draft).map(Given::Plan)
        }
        Op::PrepareDecode { rows, shapes, writes_draft } => {
            ledger.prepare_decode(rows, shapes, *writes_draft).map(Given::Plan)
        }
        Op::Launch { step } => ledger.launch(*step).map(done),
        Op::Resolve { step, accept_lens } => ledger.resolve(*step, accept_lens).map(done),
        Op::Complete { step } => ledger.complete(*step).map(done),
        Op::Cancel { step } => ledger.cancel(*step).map(done),
        Op::Abandon { step } => ledger.abandon(*step).map(done),
        Op::Trim { row, len } => ledger.trim(Row(*row), *len).map(Given::Len),
        Op::EndTurn { row, len } => ledger.end_turn(Row(*row), *len).map(Given::Len),
        Op::Retract { row } => ledger.retract(Row(*row)).map(done),
        Op::Finish { row } => ledger.finish(Row(*row)).map(done),
        Op::Abort { row } => ledger.abort(Row(*row)).map(done),
        Op::TakeDelta { step } => ledger.take_delta(*step).map(Given::Delta),
        Op::AckDelta { step } => ledger.ack_delta(*step).map(done),
        Op::Index { row, tokens, salt } => ledger.index(Row(*row), tokens, salt).map(Given::Len),
        Op::AdmitCached { tokens, salt, limit, needs_draft } => {
            ledger.admit_cached(tokens, salt, *limit, *needs_draft, None).map(Given::Row)
        }
        Op::Forget { salt } => ledger.forget(salt.as_deref()).map(done),
        Op::Lend { row, start, end } => ledger.lend(Row(*row), *start, *end).map(done),
        Op::Rebind { row, start, end, pages } => ledger.rebind(Row(*row), *start, *end, pages).map(done),
        Op::AdmitLent { pages, len } => ledger.admit_lent(pages, *len, None).map(Given::Row),
        Op::ReleaseLent { group, pages } => ledger.release_lent(*group, pages).map(done),
        Op::Export { row } => ledger.export(Row(*row)).map(Given::Prefix),
        Op::ImportRow { len, drafted } => ledger.import_row(*len, *drafted, None).map(Given::Row),
    }
}
