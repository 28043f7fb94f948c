//! `Replay` and `Event` for Python.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::to_py;
use crate::group::Group;
use crate::ledger::Ledger;
use crate::plan::Plan;
use crate::shape::Shape;
use crate::sizing::policy_name;
use crate::state_group::StateGroup;

#[doc = doc!("Event")]
#[pyclass(frozen, module = "specpool._core")]
pub struct Event(specpool_core::replay::run::Run);

#[pymethods]
impl Event {
    #[doc = doc!("Event.index")]
    #[getter]
    fn index(&self) -> u64 {
        self.0.record.index
    }

    #[doc = doc!("Event.offset")]
    #[getter]
    fn offset(&self) -> u64 {
        self.0.record.offset
    }

    #[doc = doc!("Event.verb")]
    #[getter]
    fn verb(&self) -> &'static str {
        self.0.record.call.verb().name()
    }

    #[doc = doc!("Event.step")]
    #[getter]
    fn step(&self) -> Option<u64> {
        self.0.step()
    }

    #[doc = doc!("Event.rows")]
    #[getter]
    fn rows(&self) -> Vec<i32> {
        self.0.rows()
    }

    #[doc = doc!("Event.tag")]
    #[getter]
    fn tag(&self) -> Option<&str> {
        self.0.record.tag.as_deref()
    }

    #[doc = doc!("Event.text")]
    #[getter]
    fn text(&self) -> String {
        self.0.to_string()
    }

    #[doc = doc!("Event.digest")]
    #[getter]
    fn digest(&self) -> u64 {
        self.0.record.digest
    }

    #[doc = doc!("Event.plan")]
    #[getter]
    fn plan(&self) -> Option<Plan> {
        self.0.plan().map(|plan| Plan(Arc::clone(plan)))
    }

    fn __repr__(&self) -> String {
        format!("Event({}, '{}')", self.0.record.index, self.0)
    }
}

#[doc = doc!("Replay")]
#[pyclass(module = "specpool._core")]
pub struct Replay {
    replay: specpool_core::Replay,
    ledger: Py<Ledger>,
}

#[pymethods]
impl Replay {
    #[new]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of a path")]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let replay = specpool_core::Replay::open(&path).map_err(to_py)?;
        let ledger = Py::new(py, Ledger::from(replay.ledger().map_err(to_py)?))?;
        Ok(Self { replay, ledger })
    }

    #[doc = doc!("Replay.ledger")]
    #[getter]
    fn ledger(&self, py: Python<'_>) -> Py<Ledger> {
        self.ledger.clone_ref(py)
    }

    #[doc = doc!("Replay.made_by")]
    #[getter]
    fn made_by(&self) -> &str {
        self.replay.made_by()
    }

    #[doc = doc!("Replay.end")]
    #[getter]
    fn end(&self) -> Option<&'static str> {
        self.replay.end().map(specpool_core::LogEnd::name)
    }

    #[doc = doc!("Replay.config")]
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let config = self.replay.config();
        let dict = PyDict::new(py);
        dict.set_item("groups", config.groups.iter().map(|group| Group(group.clone())).collect::<Vec<_>>())?;
        dict.set_item("shapes", config.shapes.iter().map(|&shape| Shape(shape)).collect::<Vec<_>>())?;
        dict.set_item("num_rows", config.num_rows)?;
        dict.set_item("max_context_len", config.max_context_len)?;
        dict.set_item("max_batch", config.max_batch)?;
        dict.set_item("overlap_depth", config.overlap_depth)?;
        dict.set_item("policy", policy_name(config.policy))?;
        dict.set_item("row_width", &config.row_width)?;
        dict.set_item("draft_kv", config.draft_kv)?;
        dict.set_item("max_chunk", config.max_chunk)?;
        dict.set_item("sessions", config.sessions)?;
        dict.set_item("page_fencing", config.page_fencing)?;
        if !config.states.is_empty() {
            dict.set_item("states", config.states.iter().cloned().map(StateGroup).collect::<Vec<_>>())?;
        }
        Ok(dict)
    }

    #[doc = doc!("Replay.advance")]
    fn advance(&mut self, py: Python<'_>) -> PyResult<Option<Event>> {
        let mut ledger = self.ledger.bind(py).try_borrow_mut()?;
        Ok(ledger.change(|ledger| self.replay.advance(ledger))?.map(Event))
    }
}
