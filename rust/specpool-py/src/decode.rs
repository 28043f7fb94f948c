//! One operation from a few random bytes: the decoder of the Rust tests (`specpool_ops::decode`), by the names that
//! the verbs have in Python.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use specpool_core::Verb;
use specpool_ops::decode::decode;
use specpool_ops::op::Op;
use specpool_ops::scene::Scene;

use crate::ledger::Ledger;

#[doc = doc!("decode_op")]
#[pyfunction]
#[pyo3(signature = (ledger, code, *, has_index=false, has_loans=false, has_moves=false))]
pub fn decode_op<'py>(
    py: Python<'py>,
    ledger: &Ledger,
    code: &[u8],
    has_index: bool,
    has_loans: bool,
    has_moves: bool,
) -> PyResult<(&'static str, Bound<'py, PyDict>)> {
    let arguments = PyDict::new(py);
    let mut scene = Scene { has_index, has_loans, has_moves, ..Scene::default() };
    scene.read(&ledger.0);
    let verb = match decode(code, &scene) {
        Op::Admit => Verb::Admit,
        Op::AdmitOn { prefix, len } => {
            arguments.set_item("prefix", prefix)?;
            arguments.set_item("length", len)?;
            Verb::Admit
        }
        Op::Fork { row } => of_row(&arguments, Verb::Fork, row)?,
        Op::PinPrefix { row, len } => cut(&arguments, Verb::PinPrefix, row, len)?,
        Op::ReleasePrefix { prefix } => {
            arguments.set_item("prefix", prefix)?;
            Verb::ReleasePrefix
        }
        Op::PrepareExtend { rows, new_lens, writes_draft } => {
            arguments.set_item("rows", rows)?;
            arguments.set_item("new_lens", new_lens)?;
            arguments.set_item("writes_draft", writes_draft)?;
            Verb::PrepareExtend
        }
        Op::PrepareDecode { rows, shapes, writes_draft } => {
            arguments.set_item("rows", rows)?;
            arguments.set_item("shapes", shapes)?;
            arguments.set_item("writes_draft", writes_draft)?;
            Verb::PrepareDecode
        }
        Op::Launch { step } => of_step(&arguments, Verb::Launch, step)?,
        Op::Resolve { step, accept_lens } => {
            arguments.set_item("accept_lens", accept_lens)?;
            of_step(&arguments, Verb::Resolve, step)?
        }
        Op::Complete { step } => of_step(&arguments, Verb::Complete, step)?,
        Op::Cancel { step } => of_step(&arguments, Verb::Cancel, step)?,
        Op::Abandon { step } => of_step(&arguments, Verb::Abandon, step)?,
        Op::Trim { row, len } => cut(&arguments, Verb::Trim, row, len)?,
        Op::EndTurn { row, len } => cut(&arguments, Verb::EndTurn, row, len)?,
        Op::Retract { row } => of_row(&arguments, Verb::Retract, row)?,
        Op::Finish { row } => of_row(&arguments, Verb::Finish, row)?,
        Op::Abort { row } => of_row(&arguments, Verb::Abort, row)?,
        Op::TakeDelta { step } => of_step(&arguments, Verb::TakeDelta, step)?,
        Op::AckDelta { step } => of_step(&arguments, Verb::AckDelta, step)?,
        Op::Index { row, tokens, salt } => {
            arguments.set_item("tokens", tokens)?;
            arguments.set_item("salt", PyBytes::new(py, &salt))?;
            of_row(&arguments, Verb::Index, row)?
        }
        Op::AdmitCached { tokens, salt, limit, needs_draft } => {
            arguments.set_item("tokens", tokens)?;
            arguments.set_item("salt", PyBytes::new(py, &salt))?;
            arguments.set_item("limit", limit)?;
            arguments.set_item("needs_draft", needs_draft)?;
            return Ok(("admit_cached", arguments));
        }
        Op::Lend { row, start, end } => {
            arguments.set_item("start", start)?;
            arguments.set_item("end", end)?;
            of_row(&arguments, Verb::Lend, row)?
        }
        Op::Rebind { row, start, end, pages } => {
            arguments.set_item("start", start)?;
            arguments.set_item("end", end)?;
            arguments.set_item("pages", pages)?;
            of_row(&arguments, Verb::Rebind, row)?
        }
        Op::AdmitLent { pages, len } => {
            arguments.set_item("pages", pages)?;
            arguments.set_item("length", len)?;
            return Ok(("admit_lent", arguments));
        }
        Op::ReleaseLent { group, pages } => {
            arguments.set_item("group", group)?;
            arguments.set_item("pages", pages)?;
            Verb::ReleaseLent
        }
        Op::Export { row } => of_row(&arguments, Verb::Export, row)?,
        Op::ImportRow { len, drafted } => {
            arguments.set_item("length", len)?;
            arguments.set_item("drafted_len", drafted)?;
            Verb::ImportRow
        }
        Op::Forget { salt } => {
            arguments.set_item("salt", salt.map(|salt| PyBytes::new(py, &salt)))?;
            Verb::Forget
        }
    };
    Ok((verb.name(), arguments))
}

fn of_row(arguments: &Bound<'_, PyDict>, verb: Verb, row: i32) -> PyResult<Verb> {
    arguments.set_item("row", row)?;
    Ok(verb)
}

fn cut(arguments: &Bound<'_, PyDict>, verb: Verb, row: i32, len: i32) -> PyResult<Verb> {
    arguments.set_item("length", len)?;
    of_row(arguments, verb, row)
}

fn of_step(arguments: &Bound<'_, PyDict>, verb: Verb, step: u64) -> PyResult<Verb> {
    arguments.set_item("step", step)?;
    Ok(verb)
}
