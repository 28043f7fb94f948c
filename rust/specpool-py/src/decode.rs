//! One operation from a few random bytes: the decoder of the Rust tests (`specpool_check::decode`), by the names that
//! the verbs have in Python.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use specpool_check::decode::decode;
use specpool_check::op::Op;
use specpool_check::scene::Scene;

use crate::ledger::Ledger;

#[pyfunction]
pub fn decode_op<'py>(py: Python<'py>, ledger: &Ledger, code: &[u8]) -> PyResult<(&'static str, Bound<'py, PyDict>)> {
    let arguments = PyDict::new(py);
    let verb = match decode(code, &Scene::of(&ledger.0)) {
        Op::Admit => "admit",
        Op::AdmitOn { prefix, len } => {
            arguments.set_item("prefix", prefix)?;
            arguments.set_item("length", len)?;
            "admit"
        }
        Op::Fork { row } => of_row(&arguments, "fork", row)?,
        Op::PinPrefix { row, len } => cut(&arguments, "pin_prefix", row, len)?,
        Op::ReleasePrefix { prefix } => {
            arguments.set_item("prefix", prefix)?;
            "release_prefix"
        }
        Op::PrepareExtend { rows, new_lens, writes_draft } => {
            arguments.set_item("rows", rows)?;
            arguments.set_item("new_lens", new_lens)?;
            arguments.set_item("writes_draft", writes_draft)?;
            "prepare_extend"
        }
        Op::PrepareDecode { rows, shapes, writes_draft } => {
            arguments.set_item("rows", rows)?;
            arguments.set_item("shapes", shapes)?;
            arguments.set_item("writes_draft", writes_draft)?;
            "prepare_decode"
        }
        Op::Launch { step } => of_step(&arguments, "launch", step)?,
        Op::Resolve { step, accept_lens } => {
            arguments.set_item("accept_lens", accept_lens)?;
            of_step(&arguments, "resolve", step)?
        }
        Op::Complete { step } => of_step(&arguments, "complete", step)?,
        Op::Cancel { step } => of_step(&arguments, "cancel", step)?,
        Op::Abandon { step } => of_step(&arguments, "abandon", step)?,
        Op::Trim { row, len } => cut(&arguments, "trim", row, len)?,
        Op::EndTurn { row, len } => cut(&arguments, "end_turn", row, len)?,
        Op::Retract { row } => of_row(&arguments, "retract", row)?,
        Op::Finish { row } => of_row(&arguments, "finish", row)?,
        Op::Abort { row } => of_row(&arguments, "abort", row)?,
        Op::TakeDelta { step } => of_step(&arguments, "take_delta", step)?,
        Op::AckDelta { step } => of_step(&arguments, "ack_delta", step)?,
    };
    Ok((verb, arguments))
}

fn of_row(arguments: &Bound<'_, PyDict>, verb: &'static str, row: i32) -> PyResult<&'static str> {
    arguments.set_item("row", row)?;
    Ok(verb)
}

fn cut(arguments: &Bound<'_, PyDict>, verb: &'static str, row: i32, len: i32) -> PyResult<&'static str> {
    arguments.set_item("length", len)?;
    of_row(arguments, verb, row)
}

fn of_step(arguments: &Bound<'_, PyDict>, verb: &'static str, step: u64) -> PyResult<&'static str> {
    arguments.set_item("step", step)?;
    Ok(verb)
}
