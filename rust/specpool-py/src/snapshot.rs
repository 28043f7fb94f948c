//! `Snapshot` for Python.

use pyo3::prelude::*;

#[doc = doc!("Snapshot")]
#[pyclass(frozen, module = "specpool._core")]
pub struct Snapshot(pub specpool_core::Snapshot);

#[pymethods]
impl Snapshot {
    #[doc = doc!("Snapshot.number")]
    #[getter]
    fn number(&self) -> u64 {
        self.0.number()
    }
}
