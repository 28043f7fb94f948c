//! Makes one call on the model, and translates the ledger's answer into the model's words.
//!
//! `rust/specpool-core/tests/suite/main.rs` compiles the model into itself by `#[path]`: it is a second user, which no
//! `Cargo.toml` shows.

use specpool_core::{Call, Error, Given};

use super::{Model, Outcome, Refusal};

/// Makes the ledger's call on the model.
pub(crate) fn ask(model: &mut Model, op: &Call<'_>) -> Outcome {
    match op {
        Call::Admit {} => model.admit(),
        Call::AdmitOn { prefix, length } => model.admit_on(*prefix, *length),
        Call::Fork { row } => model.fork(*row),
        Call::PinPrefix { row, length } => model.pin_prefix(*row, *length),
        Call::ReleasePrefix { prefix } => model.release_prefix(*prefix),
        Call::PrepareExtend { rows, new_lens, writes_draft } => model.prepare_extend(rows, new_lens, *writes_draft),
        Call::PrepareDecode { rows, shapes, writes_draft } => model.prepare_decode(rows, shapes, *writes_draft),
        Call::Launch { step } => model.launch(*step),
        Call::Resolve { step, accept_lens } => model.resolve(*step, accept_lens),
        Call::Complete { step } => model.complete(*step),
        Call::Cancel { step } => model.cancel(*step),
        Call::Abandon { step } => model.abandon(*step),
        Call::Trim { row, length } => model.trim(*row, *length),
        Call::EndTurn { row, length } => model.end_turn(*row, *length),
        Call::Retract { row } | Call::Finish { row } | Call::Abort { row } => model.give_back(*row),
        Call::TakeDelta { step } => model.take_delta(*step),
        Call::AckDelta { step } => model.ack_delta(*step),
        Call::Lend { .. } => Err(Refusal::Never("the world asks the model, with the names of the pages".into())),
        Call::Rebind { row, start, end, pages } => model.rebind(*row, *start, *end, pages),
        Call::AdmitLent { length, pages } => model.admit_lent(pages, *length),
        Call::ReleaseLent { group, pages } => model.release_lent(*group as usize, pages),
        Call::Export { row } => model.export(*row),
        Call::ImportRow { length, drafted_len } => model.import_row(*length, *drafted_len),
        Call::PrepareExtendKeeping { rows, new_lens, keep, writes_draft } => {
            model.prepare_extend_keeping(rows, new_lens, keep, *writes_draft)
        }
        Call::Index { row, tokens, salt } => model.index(*row, tokens, salt),
        Call::AdmitCached { tokens, salt, limit, needs_draft } => {
            model.admit_cached(tokens, salt, *limit, *needs_draft)
        }
        Call::Forget { salt } => model.forget(Some(salt)),
        Call::ForgetAll {} => model.forget(None),
        // Not in the model: what saves the whole state.
        Call::Snapshot {} | Call::Restore {} => Err(Refusal::Never(format!("the model has no {}", op.method()))),
    }
}

/// The ledger's answer in the model's words.
pub(crate) fn outcome(answer: &Result<Given, Error>) -> Outcome {
    Err(match answer {
        Ok(given) => {
            return Ok(given.id().map_or(0, |id| id as i64));
        }
        Err(Error::OutOfPages { group, need, free, cached, fenced, reclaimable }) => {
            let group = group.clone();
            let [need, free, cached, fenced, reclaimable] = [*need, *free, *cached, *fenced, *reclaimable];
            Refusal::OutOfPages { group, need, free, cached, fenced, reclaimable }
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
