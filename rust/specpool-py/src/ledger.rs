//! `Ledger` and `Snapshot` for Python.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use specpool_core::LedgerConfig;

use crate::arrays::{ConfigInt, group, int_array, int32, page, prefix, row, step, vector, view, view_2d};
use crate::errors::{config_error, shape_error, to_py};
use crate::group::Group;
use crate::plan::Plan;
use crate::shape::Shape;
use crate::sizing::{policy, policy_name};

/// The state of a ledger at a moment when nothing was in flight.
#[pyclass(frozen, module = "specpool._core")]
pub struct Snapshot(specpool_core::Snapshot);

#[pymethods]
impl Snapshot {
    #[getter]
    fn number(&self) -> u64 {
        self.0.number()
    }
}

/// One broken rule that an audit found.
#[pyclass(frozen, module = "specpool._core")]
pub struct Finding(specpool_core::Finding);

#[pymethods]
impl Finding {
    #[getter]
    fn group(&self) -> Option<usize> {
        self.0.group
    }

    #[getter]
    fn page(&self) -> Option<i32> {
        self.0.page.map(|page| page.0)
    }

    #[getter]
    fn row(&self) -> Option<i32> {
        self.0.row.map(|row| row.0)
    }

    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    fn __repr__(&self) -> String {
        format!("Finding({:?})", self.0.text)
    }
}

/// Where `SPECPOOL_RECORD` has a ledger recorded: `%p` is the process; the second ledger of a process and those after it
/// put their number behind the name, so that none writes over another.
fn path_of_environment() -> Option<PathBuf> {
    let name = std::env::var("SPECPOOL_RECORD").ok().filter(|name| !name.is_empty())?;
    let name = name.replace("%p", &std::process::id().to_string());
    match LEDGERS_OF_ENVIRONMENT.load(Ordering::Relaxed) {
        0 => Some(name.into()),
        before => Some(format!("{name}.{}", before + 1).into()),
    }
}

/// Ledgers of this process that are recorded because the environment says so.
static LEDGERS_OF_ENVIRONMENT: AtomicU64 = AtomicU64::new(0);

#[pyclass(module = "specpool._core")]
pub struct Ledger(pub specpool_core::Ledger);

type Ints<'py> = Bound<'py, PyArray1<i32>>;
/// rows, columns, pages of one group.
type DeltaArrays<'py> = (Ints<'py>, Ints<'py>, Ints<'py>);
/// states, owners, holders of one group.
type Ownership<'py> = (Bound<'py, PyArray1<u8>>, Ints<'py>, Ints<'py>);

#[pymethods]
impl Ledger {
    #[new]
    #[pyo3(signature = (groups, shapes, *, num_rows, max_context_len, max_batch=None, overlap_depth=ConfigInt(0),
        policy="exact", row_width=None, draft_kv=true, max_chunk=None, sessions=false, page_fencing=true, digest=false,
        record=None, record_limit=ConfigInt(1 << 30)),
        text_signature = "(groups, shapes, *, num_rows, max_context_len, max_batch=None, overlap_depth=0, policy='exact', \
        row_width=None, draft_kv=True, max_chunk=None, sessions=False, page_fencing=True, digest=False, \
        record=None, record_limit=1073741824)")]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "a configuration, all by keyword")]
    fn new(
        groups: Vec<Group>,
        shapes: Vec<Shape>,
        num_rows: ConfigInt,
        max_context_len: ConfigInt,
        max_batch: Option<ConfigInt>,
        overlap_depth: ConfigInt,
        policy: &str,
        row_width: Option<Vec<ConfigInt>>,
        draft_kv: bool,
        max_chunk: Option<ConfigInt>,
        sessions: bool,
        page_fencing: bool,
        digest: bool,
        record: Option<PathBuf>,
        record_limit: ConfigInt,
    ) -> PyResult<Self> {
        let config = LedgerConfig {
            groups: groups.into_iter().map(|group| group.0).collect(),
            shapes: shapes.into_iter().map(|shape| shape.0).collect(),
            num_rows: num_rows.0,
            max_context_len: max_context_len.0,
            max_batch: max_batch.map(|number| number.0),
            overlap_depth: overlap_depth.0,
            policy: self::policy(policy)?,
            row_width: row_width.map(|widths| widths.into_iter().map(|number| number.0).collect()),
            draft_kv,
            max_chunk: max_chunk.map(|number| number.0),
            sessions,
            page_fencing,
            digest,
        };
        let (is_asked_for, path) = (record.is_some(), record.or_else(path_of_environment));
        let Some(path) = path else { return specpool_core::Ledger::new(config).map(Self).map_err(to_py) };
        let limit = u64::try_from(record_limit.0)
            .map_err(|_| config_error(format!("record_limit must be 0 or more, got {}", record_limit.0)))?;
        let ledger = specpool_core::Ledger::recorded(config, &path, limit).map_err(to_py)?;
        if !is_asked_for {
            LEDGERS_OF_ENVIRONMENT.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Self(ledger))
    }

    #[getter]
    fn groups(&self) -> PyResult<Vec<Group>> {
        (0..self.0.num_groups()).map(|at| Ok(Group(self.0.group_spec(at).map_err(to_py)?.clone()))).collect()
    }

    #[getter]
    fn shapes(&self) -> Vec<Shape> {
        self.0.shapes().iter().map(|&shape| Shape(shape)).collect()
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    #[getter]
    fn num_free_rows(&self) -> usize {
        self.0.num_free_rows()
    }

    #[getter]
    fn max_context_len(&self) -> i32 {
        self.0.max_context_len()
    }

    #[getter]
    fn max_batch(&self) -> usize {
        self.0.max_batch()
    }

    #[getter]
    fn overlap_depth(&self) -> i32 {
        self.0.overlap_depth()
    }

    #[getter]
    fn policy(&self) -> &'static str {
        policy_name(self.0.policy())
    }

    #[getter]
    fn draft_kv(&self) -> bool {
        self.0.draft_kv()
    }

    #[getter]
    fn max_chunk(&self) -> Option<i32> {
        self.0.max_chunk()
    }

    #[getter]
    fn sessions(&self) -> bool {
        self.0.sessions()
    }

    #[getter]
    fn page_fencing(&self) -> bool {
        self.0.page_fencing()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    #[getter]
    fn digest(&self) -> Option<u64> {
        self.0.digest()
    }

    #[getter]
    fn completed(&self) -> u64 {
        self.0.completed()
    }

    #[getter]
    fn prefixes(&self) -> Vec<u64> {
        self.0.prefixes().collect()
    }

    fn state_hash(&self) -> u64 {
        self.0.state_hash()
    }

    fn steps(&self) -> Vec<(u64, &'static str, &'static str)> {
        self.0.steps().map(|(step, kind, state)| (step, kind.name(), state.name())).collect()
    }

    fn tag(&self, row: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        Ok(self.0.tag(self::row(row)?).map(Into::into))
    }

    fn is_live(&self, row: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.0.is_live(self::row(row)?))
    }

    fn check_quiet(&self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.check_quiet(self::row(row)?).map_err(to_py)
    }

    fn checkpoint_len(&self, row: &Bound<'_, PyAny>) -> PyResult<Option<i32>> {
        Ok(self.0.checkpoint_len(self::row(row)?))
    }

    fn prefix_len(&self, prefix: &Bound<'_, PyAny>) -> PyResult<i32> {
        self.0.prefix_len(self::prefix(prefix)?).map_err(to_py)
    }

    fn row_width(&self, group: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.0.row_width(self::group(group)?).map_err(to_py)
    }

    fn pages_per_row(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.page_table(self::group(group)?).map_err(to_py)?.pages_per_row())
    }

    fn free_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.free_pages(self::group(group)?).map_err(to_py)
    }

    fn fenced_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.fenced_pages(self::group(group)?).map_err(to_py)
    }

    fn pinned_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.pinned_pages(self::group(group)?).map_err(to_py)
    }

    fn reclaimable_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.reclaimable_pages(self::group(group)?).map_err(to_py)
    }

    fn ownership_map<'py>(&self, group: &Bound<'py, PyAny>) -> PyResult<Ownership<'py>> {
        let py = group.py();
        let records = self.0.ownership_map(self::group(group)?).map_err(to_py)?;
        let states = records.iter().map(|record| record.state as u8).collect();
        let owners = records.iter().map(|record| record.owner.0).collect();
        let holders = records.iter().map(|record| record.holders as i32).collect();
        Ok((vector(py, states), vector(py, owners), vector(py, holders)))
    }

    fn page_record(
        &self,
        group: &Bound<'_, PyAny>,
        page: &Bound<'_, PyAny>,
    ) -> PyResult<(String, i32, u64, &'static str)> {
        let record = self.0.page_record(self::group(group)?, self::page(page)?).map_err(to_py)?;
        Ok((record.state.to_string(), record.owner.0, record.birth_step, record.last_verb.name()))
    }

    fn page_table<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let ledger = slf.try_borrow()?;
        let table = ledger.0.page_table(self::group(group)?).map_err(to_py)?;
        view_2d(table.cells(), table.pages_per_row(), slf.as_any())
    }

    fn full_table<'py>(&self, py: Python<'py>, group: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let table = self.0.page_table(self::group(group)?).map_err(to_py)?;
        let mut cells = Vec::new();
        cells.try_reserve_exact(table.cells().len()).map_err(|error| PyMemoryError::new_err(error.to_string()))?;
        cells.extend_from_slice(table.cells());
        PyArray1::from_vec(py, cells).reshape([self.0.num_rows() + 1, table.pages_per_row()])
    }

    fn allocated_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let ledger = slf.try_borrow()?;
        Ok(view(ledger.0.allocated_len(self::group(group)?).map_err(to_py)?, slf.as_any()))
    }

    fn protected_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let ledger = slf.try_borrow()?;
        Ok(view(ledger.0.protected_len(self::group(group)?).map_err(to_py)?, slf.as_any()))
    }

    fn evicted_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let ledger = slf.try_borrow()?;
        Ok(view(ledger.0.evicted_len(self::group(group)?).map_err(to_py)?, slf.as_any()))
    }

    #[getter]
    fn idle<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<bool>>> {
        Ok(view(slf.try_borrow()?.0.idle(), slf.as_any()))
    }

    #[getter]
    fn resolved_len<'py>(slf: &Bound<'py, Self>) -> PyResult<Ints<'py>> {
        Ok(view(slf.try_borrow()?.0.resolved_len(), slf.as_any()))
    }

    #[getter]
    fn in_flight<'py>(slf: &Bound<'py, Self>) -> PyResult<Ints<'py>> {
        Ok(view(slf.try_borrow()?.0.in_flight(), slf.as_any()))
    }

    #[getter]
    fn drafted_len<'py>(slf: &Bound<'py, Self>) -> PyResult<Ints<'py>> {
        Ok(view(slf.try_borrow()?.0.drafted_len(), slf.as_any()))
    }

    #[getter]
    fn epoch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        Ok(view(slf.try_borrow()?.0.epoch(), slf.as_any()))
    }

    #[getter]
    fn kv_committed_len<'py>(&self, py: Python<'py>) -> Ints<'py> {
        let pairs = self.0.resolved_len().iter().zip(self.0.in_flight());
        PyArray1::from_vec(py, pairs.map(|(&resolved, &in_flight)| resolved.saturating_add(in_flight)).collect())
    }

    #[pyo3(signature = (tag=None, *, prefix=None, length=None))]
    fn admit(
        &mut self,
        tag: Option<&str>,
        prefix: Option<&Bound<'_, PyAny>>,
        length: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        let length = length.map(|length| int32("length", length)).transpose()?;
        let admitted = match prefix {
            Some(prefix) => self.0.admit_on(self::prefix(prefix)?, length, tag),
            None if length.is_some_and(|length| length != 0) => {
                return Err(shape_error("admit: a length needs a prefix".into()));
            }
            None => self.0.admit(tag),
        };
        admitted.map(|row| row.0).map_err(to_py)
    }

    #[pyo3(signature = (row, tag=None))]
    fn fork(&mut self, row: &Bound<'_, PyAny>, tag: Option<&str>) -> PyResult<i32> {
        self.0.fork(self::row(row)?, tag).map(|row| row.0).map_err(to_py)
    }

    fn pin_prefix(&mut self, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.0.pin_prefix(self::row(row)?, int32("length", length)?).map_err(to_py)
    }

    fn release_prefix(&mut self, prefix: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.release_prefix(self::prefix(prefix)?).map_err(to_py)
    }

    #[pyo3(signature = (rows, new_lens, *, writes_draft=true))]
    fn prepare_extend(
        &mut self,
        rows: &Bound<'_, PyAny>,
        new_lens: &Bound<'_, PyAny>,
        writes_draft: bool,
    ) -> PyResult<Plan> {
        let (rows, new_lens) = (int_array("rows", rows)?, int_array("new_lens", new_lens)?);
        self.0.prepare_extend(&rows, &new_lens, writes_draft).map(Plan).map_err(to_py)
    }

    fn tokens_required<'py>(
        &self,
        rows: &Bound<'py, PyAny>,
        shapes: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let py = rows.py();
        let (rows, shapes) = (int_array("rows", rows)?, int_array("shapes", shapes)?);
        Ok(PyArray1::from_slice(py, &self.0.tokens_required(&rows, &shapes).map_err(to_py)?))
    }

    fn pages_needed<'py>(
        &self,
        lo: &Bound<'py, PyAny>,
        hi: &Bound<'py, PyAny>,
        shape: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let py = lo.py();
        let (lo, hi, shape) = (int32("lo", lo)?, int32("hi", hi)?, int32("shape", shape)?);
        Ok(PyArray1::from_vec(py, self.0.pages_needed(lo, hi, shape).map_err(to_py)?))
    }

    #[pyo3(signature = (rows, shapes, *, writes_draft=true))]
    fn prepare_decode(
        &mut self,
        rows: &Bound<'_, PyAny>,
        shapes: &Bound<'_, PyAny>,
        writes_draft: bool,
    ) -> PyResult<Plan> {
        let (rows, shapes) = (int_array("rows", rows)?, int_array("shapes", shapes)?);
        self.0.prepare_decode(&rows, &shapes, writes_draft).map(Plan).map_err(to_py)
    }

    fn launch(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.launch(self::step(step)?).map_err(to_py)
    }

    fn resolve(&mut self, step: &Bound<'_, PyAny>, accept_lens: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.resolve(self::step(step)?, &int_array("accept_lens", accept_lens)?).map_err(to_py)
    }

    fn complete(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.complete(self::step(step)?).map_err(to_py)
    }

    fn cancel(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.cancel(self::step(step)?).map_err(to_py)
    }

    fn abandon(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.abandon(self::step(step)?).map_err(to_py)
    }

    fn end_turn(&mut self, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<i32> {
        self.0.end_turn(self::row(row)?, int32("length", length)?).map_err(to_py)
    }

    fn trim(&mut self, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<i32> {
        self.0.trim(self::row(row)?, int32("length", length)?).map_err(to_py)
    }

    fn retract(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.retract(self::row(row)?).map_err(to_py)
    }

    fn finish(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.finish(self::row(row)?).map_err(to_py)
    }

    fn abort(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.abort(self::row(row)?).map_err(to_py)
    }

    fn take_delta<'py>(&mut self, py: Python<'py>, step: &Bound<'py, PyAny>) -> PyResult<Vec<DeltaArrays<'py>>> {
        let entries = self.0.take_delta(self::step(step)?).map_err(to_py)?;
        let array = |values: Vec<i32>| PyArray1::from_slice(py, &values);
        Ok(entries.into_iter().map(|one| (array(one.rows), array(one.columns), array(one.pages))).collect())
    }

    fn ack_delta(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.ack_delta(self::step(step)?).map_err(to_py)
    }

    fn snapshot(&mut self) -> PyResult<Snapshot> {
        self.0.snapshot().map(Snapshot).map_err(to_py)
    }

    fn restore(&mut self, snapshot: &Snapshot) -> PyResult<()> {
        self.0.restore(&snapshot.0).map_err(to_py)
    }

    fn close(&mut self) -> PyResult<()> {
        self.0.close().map_err(to_py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&mut self, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close()
    }

    fn audit(&self) -> Vec<Finding> {
        self.0.audit().into_iter().map(Finding).collect()
    }

    fn check(&self) -> PyResult<()> {
        self.0.check().map_err(to_py)
    }

    fn __repr__(&self) -> PyResult<String> {
        let mut pages = Vec::new();
        for at in 0..self.0.num_groups() {
            let (spec, free) = (self.0.group_spec(at).map_err(to_py)?, self.0.free_pages(at).map_err(to_py)?);
            pages.push(format!("{}: {free}/{} pages free", spec.name, spec.num_pages));
        }
        let (free, rows) = (self.0.num_free_rows(), self.0.num_rows());
        Ok(format!("Ledger({}, {free}/{rows} rows free)", pages.join(", ")))
    }
}
