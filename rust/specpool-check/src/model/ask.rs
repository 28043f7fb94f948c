//! Makes one call on the model, and translates the ledger's answer into the model's words.

use specpool_core::Error;

use super::{Model, Outcome, Refusal};
use crate::op::{Given, Op};

/// Makes the ledger's call on the model.
pub(crate) fn ask(model: &mut Model, op: &Op) -> Outcome {
    match op {
        Op::Admit => model.admit(),
        Op::AdmitOn { prefix, len } => model.admit_on(*prefix, *len),
        Op::Fork { row } => model.fork(*row),
        Op::PinPrefix { row, len } => model.pin_prefix(*row, *len),
        Op::ReleasePrefix { prefix } => model.release_prefix(*prefix),
        Op::PrepareExtend { rows, new_lens, writes_draft } => model.prepare_extend(rows, new_lens, *writes_draft),
        Op::PrepareDecode { rows, shapes, writes_draft } => model.prepare_decode(rows, shapes, *writes_draft),
        Op::Launch { step } => model.launch(*step),
        Op::Resolve { step, accept_lens } => model.resolve(*step, accept_lens),
        Op::Complete { step } => model.complete(*step),
        Op::Cancel { step } => model.cancel(*step),
        Op::Abandon { step } => model.abandon(*step),
        Op::Trim { row, len } => model.trim(*row, *len),
        Op::EndTurn { row, len } => model.end_turn(*row, *len),
        Op::Retract { row } | Op::Finish { row } | Op::Abort { row } => model.give_back(*row),
        Op::TakeDelta { step } => model.take_delta(*step),
        Op::AckDelta { step } => model.ack_delta(*step),
        Op::Lend { .. } => Err(Refusal::Never("the world asks the model, with the names of the pages".into())),
        Op::Rebind { row, start, end, pages } => model.rebind(*row, *start, *end, pages),
        Op::AdmitLent { pages, len } => model.admit_lent(pages, *len),
        Op::ReleaseLent { group, pages } => model.release_lent(*group, pages),
        Op::Export { row } => model.export(*row),
        Op::ImportRow { len, drafted } => model.import_row(*len, *drafted),
        Op::Index { .. } | Op::AdmitCached { .. } | Op::Forget { .. } => {
            Err(Refusal::Never("the model has no index".into()))
        }
    }
}

/// The ledger's answer in the model's words.
pub(crate) fn outcome(found: &Result<Given, Error>) -> Outcome {
    Err(match found {
        Ok(given) => {
            return Ok(match given {
                Given::Done | Given::Delta(_) => 0,
                Given::Row(row) => row.0.into(),
                Given::Prefix(prefix) => *prefix as i64,
                Given::Len(len) => (*len).into(),
                Given::Plan(plan) => plan.step as i64,
            });
        }
        Err(Error::OutOfPages { group, need, free, fenced, reclaimable, .. }) => {
            let (group, [need, free, fenced, reclaimable]) = (group.clone(), [*need, *free, *fenced, *reclaimable]);
            Refusal::OutOfPages { group, need, free, fenced, reclaimable }
        }
        Err(Error::OutOfRows { fenced, .. }) => Refusal::OutOfRows { fenced: *fenced },
        Err(Error::ContextEnd { rows, .. }) => Refusal::ContextEnd(rows.clone()),
        Err(Error::StalePlan { row, .. }) => Refusal::StalePlan { row: *row },
        Err(Error::Order(_)) => Refusal::Order,
        Err(Error::NotReady(_)) => Refusal::NotReady,
        Err(Error::DraftLag { row, drafted, resolved, undrafted }) => {
            Refusal::DraftLag { row: *row, drafted: *drafted, resolved: *resolved, undrafted: *undrafted }
        }
        Err(Error::Shape(_)) => Refusal::Shape,
        Err(Error::PageState { .. }) => Refusal::PageState,
        Err(Error::Config(_)) => Refusal::Config,
        Err(error) => Refusal::Never(error.to_string()),
    })
}
