//! `Shape` for Python.

use pyo3::prelude::*;

use crate::arrays::ConfigInt;
use crate::errors::{config_error, to_py};

#[doc = doc!("Shape")]
#[pyclass(frozen, eq, hash, from_py_object, module = "specpool._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape(pub specpool_core::Shape);

fn field(name: &str, value: ConfigInt) -> PyResult<u32> {
    let value = value.get(name)?;
    u32::try_from(value).map_err(|_| config_error(format!("{name} must be in [0, 1048576], got {value}")))
}

/// A core shape from raw numbers.
pub fn shape(num_steps: ConfigInt, topk: ConfigInt, num_draft_tokens: ConfigInt) -> PyResult<specpool_core::Shape> {
    let (s, k, n) =
        (field("num_steps", num_steps)?, field("topk", topk)?, field("num_draft_tokens", num_draft_tokens)?);
    specpool_core::Shape::new(s, k, n).map_err(to_py)
}

#[pymethods]
impl Shape {
    #[new]
    fn new(num_steps: ConfigInt, topk: ConfigInt, num_draft_tokens: ConfigInt) -> PyResult<Self> {
        shape(num_steps, topk, num_draft_tokens).map(Self)
    }

    #[doc = doc!("Shape.eagle")]
    #[staticmethod]
    fn eagle(num_steps: ConfigInt, topk: ConfigInt, num_draft_tokens: ConfigInt) -> PyResult<Self> {
        let raw = shape(num_steps, topk, num_draft_tokens)?;
        specpool_core::Shape::eagle(raw.num_steps, raw.topk, raw.num_draft_tokens).map(Self).map_err(to_py)
    }

    #[doc = doc!("Shape.none")]
    #[staticmethod]
    fn none() -> Self {
        Self(specpool_core::Shape::NONE)
    }

    #[doc = doc!("Shape.num_steps")]
    #[getter]
    fn num_steps(&self) -> u32 {
        self.0.num_steps
    }

    #[doc = doc!("Shape.topk")]
    #[getter]
    fn topk(&self) -> u32 {
        self.0.topk
    }

    #[doc = doc!("Shape.num_draft_tokens")]
    #[getter]
    fn num_draft_tokens(&self) -> u32 {
        self.0.num_draft_tokens
    }

    #[doc = doc!("Shape.max_accept_len")]
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
