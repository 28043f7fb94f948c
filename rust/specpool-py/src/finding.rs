//! `Finding` for Python.

use pyo3::prelude::*;

#[doc = doc!("Finding")]
#[pyclass(frozen, module = "specpool._core")]
pub struct Finding(pub specpool_core::Finding);

#[pymethods]
impl Finding {
    #[doc = doc!("Finding.group")]
    #[getter]
    fn group(&self) -> Option<usize> {
        self.0.group
    }

    #[doc = doc!("Finding.page")]
    #[getter]
    fn page(&self) -> Option<i32> {
        self.0.page.map(|page| page.0)
    }

    #[doc = doc!("Finding.row")]
    #[getter]
    fn row(&self) -> Option<i32> {
        self.0.row.map(|row| row.0)
    }

    #[doc = doc!("Finding.text")]
    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    fn __repr__(&self) -> String {
        format!("Finding({:?})", self.0.text)
    }
}
