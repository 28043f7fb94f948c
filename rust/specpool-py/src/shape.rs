//! `Shape` for Python.

use pyo3::prelude::*;

use crate::errors::{config_error, to_py};

/// What one round of one row may do.
#[pyclass(frozen, eq, hash, from_py_object, module = "specpool._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape(pub specpool_core::Shape);

fn field(name: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value).map_err(|_| config_error(format!("{name} must be in [0, 1048576], got {value}")))
}

#[pymethods]
impl Shape {
    #[new]
    fn new(num_steps: i64, topk: i64, num_draft_tokens: i64) -> PyResult<Self> {
        let (s, k, n) =
            (field("num_steps", num_steps)?, field("topk", topk)?, field("num_draft_tokens", num_draft_tokens)?);
        specpool_core::Shape::new(s, k, n).map(Self).map_err(to_py)
    }

    #[staticmethod]
    fn eagle(num_steps: i64, topk: i64, num_draft_tokens: i64) -> PyResult<Self> {
        let (s, k, n) =
            (field("num_steps", num_steps)?, field("topk", topk)?, field("num_draft_tokens", num_draft_tokens)?);
        specpool_core::Shape::eagle(s, k, n).map(Self).map_err(to_py)
    }

    #[staticmethod]
    fn none() -> Self {
        Self(specpool_core::Shape::NONE)
    }

    #[getter]
    fn num_steps(&self) -> u32 {
        self.0.num_steps
    }

    #[getter]
    fn topk(&self) -> u32 {
        self.0.topk
    }

    #[getter]
    fn num_draft_tokens(&self) -> u32 {
        self.0.num_draft_tokens
    }

    #[getter]
    fn max_accept_len(&self) -> u32 {
        self.0.max_accept_len()
    }

    fn __repr__(&self) -> String {
        format!(
            "Shape(num_steps={}, topk={}, num_draft_tokens={})",
            self.0.num_steps, self.0.topk, self.0.num_draft_tokens
        )
    }
}
