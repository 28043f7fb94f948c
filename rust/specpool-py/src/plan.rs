//! `Plan` for Python: read-only views into one plan. A view keeps its plan alive.

use std::sync::Arc;

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use specpool_core::{StateFolds, memory};

use crate::arrays::{array, view, view_2d};
use crate::errors::to_py;

#[doc = doc!("Plan")]
#[pyclass(frozen, module = "specpool._core")]
pub struct Plan(pub Arc<specpool_core::Plan>);

type Ints<'py> = Bound<'py, PyArray1<i32>>;

#[pymethods]
impl Plan {
    #[doc = doc!("Plan.step")]
    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    #[doc = doc!("Plan.kind")]
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.name()
    }

    #[doc = doc!("Plan.writes_draft")]
    #[getter]
    fn writes_draft(&self) -> bool {
        self.0.writes_draft
    }

    #[doc = doc!("Plan.rows")]
    #[getter]
    fn rows<'py>(slf: &Bound<'py, Self>) -> Ints<'py> {
        view(&slf.get().0.rows, slf.as_any())
    }

    #[doc = doc!("Plan.shapes")]
    #[getter]
    fn shapes<'py>(slf: &Bound<'py, Self>) -> Ints<'py> {
        view(&slf.get().0.shapes, slf.as_any())
    }

    #[doc = doc!("Plan.epochs")]
    #[getter]
    fn epochs<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<u64>> {
        view(&slf.get().0.epochs, slf.as_any())
    }

    #[doc = doc!("Plan.lo")]
    #[getter]
    fn lo<'py>(slf: &Bound<'py, Self>) -> Ints<'py> {
        view(&slf.get().0.lo, slf.as_any())
    }

    #[doc = doc!("Plan.hi")]
    #[getter]
    fn hi<'py>(slf: &Bound<'py, Self>) -> Ints<'py> {
        view(&slf.get().0.hi, slf.as_any())
    }

    #[doc = doc!("Plan.start")]
    #[getter]
    fn start<'py>(slf: &Bound<'py, Self>) -> Ints<'py> {
        view(&slf.get().0.start, slf.as_any())
    }

    #[doc = doc!("Plan.new_len")]
    #[getter]
    fn new_len<'py>(slf: &Bound<'py, Self>) -> Ints<'py> {
        view(&slf.get().0.new_len, slf.as_any())
    }

    #[doc = doc!("Plan.allocated_before")]
    #[getter]
    fn allocated_before<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        view_2d(&slf.get().0.allocated_before, slf.get().0.num_lanes(), slf.as_any())
    }

    #[doc = doc!("Plan.allocated_after")]
    #[getter]
    fn allocated_after<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        view_2d(&slf.get().0.allocated_after, slf.get().0.num_lanes(), slf.as_any())
    }

    #[doc = doc!("Plan.state_src")]
    #[getter]
    fn state_src<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        folds(slf, |folds| &folds.src)
    }

    #[doc = doc!("Plan.state_dst")]
    #[getter]
    fn state_dst<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        folds(slf, |folds| &folds.dst)
    }

    #[doc = doc!("Plan.state_from")]
    #[getter]
    fn state_from<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        folds(slf, |folds| &folds.from)
    }

    #[doc = doc!("Plan.state_to")]
    #[getter]
    fn state_to<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        folds(slf, |folds| &folds.to)
    }

    #[doc = doc!("Plan.page_copies")]
    #[getter]
    fn page_copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let copies = &self.0.page_copies;
        let cells = copies.iter().flat_map(|copy| [copy.group, copy.src, copy.dst, copy.tokens]);
        let cells = memory::gathered(cells, "page copies").map_err(to_py)?;
        array(py, cells, [copies.len(), 4])
    }

    fn __len__(&self) -> usize {
        self.0.num_lanes()
    }

    fn __repr__(&self) -> String {
        format!("Plan(step={}, kind='{}', {} lanes)", self.0.step, self.0.kind.name(), self.0.num_lanes())
    }
}

/// `[num_states, b]`, a view of the plan.
fn folds<'py>(
    plan: &Bound<'py, Plan>,
    of_lanes: impl FnOnce(&StateFolds) -> &[i32],
) -> PyResult<Bound<'py, PyArray2<i32>>> {
    let lanes = plan.get().0.states.as_deref().map_or(&[][..], of_lanes);
    view_2d(lanes, plan.get().0.num_lanes(), plan.as_any())
}
