//! One operation from a few random bytes: the decoder of the Rust tests (`specpool_ops::decode`), by the names that
//! the verbs have in Python.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use specpool_core::Argument;
use specpool_ops::decode::decode;
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
    let call = decode(code, &scene);
    let mut outcome = Ok(());
    call.visit_arguments(|name, argument| {
        let set = match argument {
            Argument::Row(&number) | Argument::Int(number) => arguments.set_item(name, number),
            Argument::Step(id) | Argument::Prefix(id) => arguments.set_item(name, id),
            Argument::MaybeInt(number) => arguments.set_item(name, number),
            Argument::Rows(values) | Argument::Ints(values, _) => arguments.set_item(name, values),
            Argument::Salt(salt) | Argument::MaybeSalt(salt) => arguments.set_item(name, PyBytes::new(py, salt)),
            Argument::Flag(value, ..) => arguments.set_item(name, value),
        };
        if outcome.is_ok() {
            outcome = set;
        }
    });
    outcome.map(|()| (call.method(), arguments))
}
