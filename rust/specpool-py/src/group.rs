//! `Group` for Python.

use pyo3::prelude::*;

use crate::arrays::ConfigInt;
use crate::errors::{config_error, to_py};
use crate::sizing::{layout, layout_name};

#[doc = doc!("Group")]
#[pyclass(frozen, eq, hash, from_py_object, module = "specpool._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Group(pub specpool_core::Group);

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (name, *, page_size, num_pages, hosts_drafts=false, layout="dense", window=None, sink=ConfigInt::of(0)),
        text_signature = "(name, *, page_size, num_pages, hosts_drafts=False, layout='dense', window=None, sink=0)")]
    fn new(
        name: String,
        page_size: ConfigInt,
        num_pages: ConfigInt,
        hosts_drafts: bool,
        layout: &str,
        window: Option<ConfigInt>,
        sink: ConfigInt,
    ) -> PyResult<Self> {
        let layout = self::layout(layout, config_error)?;
        let window = window.map(|number| number.get("window")).transpose()?;
        let (page_size, num_pages) = (page_size.get("page_size")?, num_pages.get("num_pages")?);
        let sink = sink.get("sink")?;
        let spec = specpool_core::Group { name, page_size, num_pages, hosts_drafts, layout, window, sink };
        spec.check().map_err(to_py)?;
        Ok(Self(spec))
    }

    #[doc = doc!("Group.name")]
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[doc = doc!("Group.page_size")]
    #[getter]
    fn page_size(&self) -> i64 {
        self.0.page_size
    }

    #[doc = doc!("Group.num_pages")]
    #[getter]
    fn num_pages(&self) -> i64 {
        self.0.num_pages
    }

    #[doc = doc!("Group.hosts_drafts")]
    #[getter]
    fn hosts_drafts(&self) -> bool {
        self.0.hosts_drafts
    }

    #[doc = doc!("Group.layout")]
    #[getter]
    fn layout(&self) -> &'static str {
        layout_name(self.0.layout)
    }

    #[doc = doc!("Group.window")]
    #[getter]
    fn window(&self) -> Option<i64> {
        self.0.window
    }

    #[doc = doc!("Group.sink")]
    #[getter]
    fn sink(&self) -> i64 {
        self.0.sink
    }

    fn __repr__(&self) -> String {
        let flag = if self.0.hosts_drafts { "True" } else { "False" };
        let window = self.0.window.map_or(String::new(), |window| format!(", window={window}"));
        let sink = if self.0.sink == 0 { String::new() } else { format!(", sink={}", self.0.sink) };
        format!(
            "Group('{}', page_size={}, num_pages={}, hosts_drafts={flag}, layout='{}'{window}{sink})",
            self.0.name,
            self.0.page_size,
            self.0.num_pages,
            self.layout()
        )
    }
}
