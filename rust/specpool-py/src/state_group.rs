//! `StateGroup` for Python.

use pyo3::prelude::*;

use crate::arrays::ConfigInt;
use crate::errors::to_py;
use crate::shape::Shape;

#[doc = doc!("StateGroup")]
#[pyclass(frozen, eq, hash, from_py_object, module = "specpool._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct StateGroup(pub specpool_core::StateGroup);

#[pymethods]
impl StateGroup {
    #[new]
    #[pyo3(signature = (name, *, num_slots, flush=ConfigInt::of(1), eager=false),
        text_signature = "(name, *, num_slots, flush=1, eager=False)")]
    fn new(name: String, num_slots: ConfigInt, flush: ConfigInt, eager: bool) -> PyResult<Self> {
        let (num_slots, flush) = (num_slots.get("num_slots")?, flush.get("flush")?);
        let spec = specpool_core::StateGroup { name, num_slots, flush, eager };
        spec.check().map_err(to_py)?;
        Ok(Self(spec))
    }

    #[doc = doc!("StateGroup.name")]
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[doc = doc!("StateGroup.num_slots")]
    #[getter]
    fn num_slots(&self) -> i64 {
        self.0.num_slots
    }

    #[doc = doc!("StateGroup.flush")]
    #[getter]
    fn flush(&self) -> i64 {
        self.0.flush
    }

    #[doc = doc!("StateGroup.eager")]
    #[getter]
    fn eager(&self) -> bool {
        self.0.eager
    }

    #[doc = doc!("StateGroup.ring_len")]
    #[pyo3(signature = (shapes, *, overlap_depth=ConfigInt::of(0)), text_signature = "($self, shapes, *, overlap_depth=0)")]
    fn ring_len(&self, shapes: Vec<Shape>, overlap_depth: ConfigInt) -> PyResult<i64> {
        let shapes: Vec<_> = shapes.into_iter().map(|shape| shape.0).collect();
        self.0.ring_len(&shapes, overlap_depth.get("overlap_depth")?).map_err(to_py)
    }

    fn __repr__(&self) -> String {
        let Self(specpool_core::StateGroup { name, num_slots, flush, eager }) = self;
        let eager = if *eager { "True" } else { "False" };
        format!("StateGroup('{name}', num_slots={num_slots}, flush={flush}, eager={eager})")
    }
}
