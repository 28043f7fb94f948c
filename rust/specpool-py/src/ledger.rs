//! `Ledger` for Python.

use std::path::{Path, PathBuf};

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use specpool_core::{DeltaEntries, Indexed, KvEvent, LedgerConfig, Result as CoreResult, memory};

use crate::arrays::{
    ConfigInt, List, Salt, array, copied, group, int_array, int32, name, page, per_row, prefix, row, step, vector,
    view, view_2d,
};
use crate::errors::{guarded, shape_error, to_py};
use crate::finding::Finding;
use crate::group::Group;
use crate::plan::Plan;
use crate::recording::built;
use crate::shape::Shape;
use crate::sizing::{policy, policy_name};
use crate::snapshot::Snapshot;
use crate::state_group::StateGroup;

#[doc = doc!("Ledger")]
#[pyclass(module = "specpool._core")]
pub struct Ledger(pub specpool_core::Ledger, bool);

impl From<specpool_core::Ledger> for Ledger {
    fn from(ledger: specpool_core::Ledger) -> Self {
        Self(ledger, false)
    }
}

impl Ledger {
    /// Runs a verb, with an end to panics.
    pub fn change<T>(&mut self, verb: impl FnOnce(&mut specpool_core::Ledger) -> CoreResult<T>) -> PyResult<T> {
        guarded(&mut self.0, &mut self.1, "the ledger can only be closed", verb)
    }
}

type Ints<'py> = Bound<'py, PyArray1<i32>>;
/// rows, columns, pages of one group.
type DeltaArrays<'py> = (Ints<'py>, Ints<'py>, Ints<'py>);
/// states, owners, holders of one group.
type Ownership<'py> = (Bound<'py, PyArray1<u8>>, Ints<'py>, Ints<'py>);
/// held and shared pages of rows, by row and group.
type PagesOfRows<'py> = (Bound<'py, PyArray2<i64>>, Bound<'py, PyArray2<i64>>);
/// salt, start, tokens, drafted, pages per group of one entry of the prefix index.
type IndexEntry<'py> = (Bound<'py, PyBytes>, usize, Ints<'py>, usize, Vec<Ints<'py>>);

#[pymethods]
impl Ledger {
    #[new]
    #[pyo3(signature = (groups, shapes, *, num_rows, max_context_len, max_batch=None, overlap_depth=ConfigInt::of(0),
        policy="exact", row_width=None, draft_kv=true, max_chunk=None, sessions=false, page_fencing=true, digest=false,
        states=List(Vec::new()), record=None, record_limit=ConfigInt::of(1 << 30)),
        text_signature = "(groups, shapes, *, num_rows, max_context_len, max_batch=None, overlap_depth=0, policy='exact', \
        row_width=None, draft_kv=True, max_chunk=None, sessions=False, page_fencing=True, digest=False, \
        states=(), record=None, record_limit=1073741824)")]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "a configuration, all by keyword")]
    fn new(
        groups: List<Group>,
        shapes: List<Shape>,
        num_rows: ConfigInt,
        max_context_len: ConfigInt,
        max_batch: Option<ConfigInt>,
        overlap_depth: ConfigInt,
        policy: &str,
        row_width: Option<List<ConfigInt>>,
        draft_kv: bool,
        max_chunk: Option<ConfigInt>,
        sessions: bool,
        page_fencing: bool,
        digest: bool,
        states: List<StateGroup>,
        record: Option<PathBuf>,
        record_limit: ConfigInt,
    ) -> PyResult<Self> {
        let config = LedgerConfig {
            groups: groups.0.into_iter().map(|group| group.0).collect(),
            shapes: shapes.0.into_iter().map(|shape| shape.0).collect(),
            num_rows: num_rows.get("num_rows")?,
            max_context_len: max_context_len.get("max_context_len")?,
            max_batch: max_batch.map(|number| number.get("max_batch")).transpose()?,
            overlap_depth: overlap_depth.get("overlap_depth")?,
            policy: self::policy(policy)?,
            row_width: row_width
                .map(|widths| widths.0.into_iter().map(|number| number.get("row_width")).collect())
                .transpose()?,
            draft_kv,
            max_chunk: max_chunk.map(|number| number.get("max_chunk")).transpose()?,
            sessions,
            page_fencing,
            digest,
            states: states.0.into_iter().map(|states| states.0).collect(),
        };
        let build = |log: Option<(&Path, u64)>| match log {
            None => specpool_core::Ledger::new(config),
            Some((path, limit)) => specpool_core::Ledger::recorded(config, path, limit),
        };
        built(record, record_limit, build).map(Self::from)
    }

    #[doc = doc!("Ledger.groups")]
    #[getter]
    fn groups(&self) -> PyResult<Vec<Group>> {
        (0..self.0.num_groups()).map(|at| Ok(Group(self.0.group_spec(at).map_err(to_py)?.clone()))).collect()
    }

    #[doc = doc!("Ledger.shapes")]
    #[getter]
    fn shapes(&self) -> Vec<Shape> {
        self.0.shapes().iter().map(|&shape| Shape(shape)).collect()
    }

    #[doc = doc!("Ledger.num_rows")]
    #[getter]
    fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    #[doc = doc!("Ledger.num_free_rows")]
    #[getter]
    fn num_free_rows(&self) -> usize {
        self.0.num_free_rows()
    }

    #[doc = doc!("Ledger.max_context_len")]
    #[getter]
    fn max_context_len(&self) -> i32 {
        self.0.max_context_len()
    }

    #[doc = doc!("Ledger.max_batch")]
    #[getter]
    fn max_batch(&self) -> usize {
        self.0.max_batch()
    }

    #[doc = doc!("Ledger.overlap_depth")]
    #[getter]
    fn overlap_depth(&self) -> i32 {
        self.0.overlap_depth()
    }

    #[doc = doc!("Ledger.policy")]
    #[getter]
    fn policy(&self) -> &'static str {
        policy_name(self.0.policy())
    }

    #[doc = doc!("Ledger.draft_kv")]
    #[getter]
    fn draft_kv(&self) -> bool {
        self.0.draft_kv()
    }

    #[doc = doc!("Ledger.max_chunk")]
    #[getter]
    fn max_chunk(&self) -> Option<i32> {
        self.0.max_chunk()
    }

    #[doc = doc!("Ledger.sessions")]
    #[getter]
    fn sessions(&self) -> bool {
        self.0.sessions()
    }

    #[doc = doc!("Ledger.page_fencing")]
    #[getter]
    fn page_fencing(&self) -> bool {
        self.0.page_fencing()
    }

    #[doc = doc!("Ledger.closed")]
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    #[doc = doc!("Ledger.digest")]
    #[getter]
    fn digest(&self) -> Option<u64> {
        self.0.digest()
    }

    #[doc = doc!("Ledger.completed")]
    #[getter]
    fn completed(&self) -> u64 {
        self.0.completed()
    }

    #[doc = doc!("Ledger.prefixes")]
    #[getter]
    fn prefixes(&self) -> Vec<u64> {
        self.0.prefixes().collect()
    }

    #[doc = doc!("Ledger.state_hash")]
    fn state_hash(&self) -> u64 {
        self.0.state_hash()
    }

    #[doc = doc!("Ledger.steps")]
    fn steps(&self) -> Vec<(u64, &'static str, &'static str)> {
        self.0.steps().map(|(step, kind, state)| (step, kind.name(), state.name())).collect()
    }

    #[doc = doc!("Ledger.tag")]
    fn tag(&self, row: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        Ok(self.0.tag(self::row(row)?).map(Into::into))
    }

    #[doc = doc!("Ledger.is_live")]
    fn is_live(&self, row: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.0.is_live(self::row(row)?))
    }

    #[doc = doc!("Ledger.check_quiet")]
    fn check_quiet(&self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.check_quiet(self::row(row)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.checkpoint_len")]
    fn checkpoint_len(&self, row: &Bound<'_, PyAny>) -> PyResult<Option<i32>> {
        Ok(self.0.checkpoint_len(self::row(row)?))
    }

    #[doc = doc!("Ledger.prefix_len")]
    fn prefix_len(&self, prefix: &Bound<'_, PyAny>) -> PyResult<i32> {
        self.0.prefix_len(self::prefix(prefix)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.row_width")]
    fn row_width(&self, group: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.0.row_width(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.pages_per_row")]
    fn pages_per_row(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.page_table(self::group(group)?).map_err(to_py)?.pages_per_row())
    }

    #[doc = doc!("Ledger.free_pages")]
    fn free_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.free_pages(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.fenced_pages")]
    fn fenced_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.fenced_pages(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.pinned_pages")]
    fn pinned_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.pinned_pages(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.reclaimable_pages")]
    fn reclaimable_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.reclaimable_pages(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.ownership_map")]
    #[pyo3(signature = (group, *, taken=false))]
    fn ownership_map<'py>(&self, group: &Bound<'py, PyAny>, taken: bool) -> PyResult<Ownership<'py>> {
        let (py, group) = (group.py(), self::group(group)?);
        let records = || self.0.page_records(group, taken).map_err(to_py);
        let what = "an ownership map";
        let states = memory::collected(records()?.map(|record| record.state as u8), what).map_err(to_py)?;
        let owners = memory::collected(records()?.map(|record| record.owner.0), what).map_err(to_py)?;
        let holders = memory::collected(records()?.map(|record| record.holders as i32), what).map_err(to_py)?;
        Ok((vector(py, states), vector(py, owners), vector(py, holders)))
    }

    #[doc = doc!("Ledger.live_rows")]
    fn live_rows<'py>(&self, py: Python<'py>) -> PyResult<Ints<'py>> {
        Ok(vector(py, self.0.live_rows().map_err(to_py)?))
    }

    #[doc = doc!("Ledger.page_record")]
    fn page_record(
        &self,
        group: &Bound<'_, PyAny>,
        page: &Bound<'_, PyAny>,
    ) -> PyResult<(String, i32, u64, &'static str)> {
        let record = self.0.page_record(self::group(group)?, self::page(page)?).map_err(to_py)?;
        Ok((record.state.to_string(), record.owner.0, record.birth_step, record.last_verb.name()))
    }

    #[doc = doc!("Ledger.page_table")]
    fn page_table<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let ledger = slf.try_borrow()?;
        let table = ledger.0.page_table(self::group(group)?).map_err(to_py)?;
        view_2d(table.cells(), table.pages_per_row(), slf.as_any())
    }

    #[doc = doc!("Ledger.full_table")]
    fn full_table<'py>(&self, py: Python<'py>, group: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let table = self.0.page_table(self::group(group)?).map_err(to_py)?;
        let cells = memory::copied(table.cells(), "a page table").map_err(to_py)?;
        array(py, cells, [self.0.num_rows() + 1, table.pages_per_row()])
    }

    #[doc = doc!("Ledger.allocated_len")]
    fn allocated_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let ledger = slf.try_borrow()?;
        Ok(view(ledger.0.allocated_len(self::group(group)?).map_err(to_py)?, slf.as_any()))
    }

    #[doc = doc!("Ledger.protected_len")]
    fn protected_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let ledger = slf.try_borrow()?;
        Ok(view(ledger.0.protected_len(self::group(group)?).map_err(to_py)?, slf.as_any()))
    }

    #[doc = doc!("Ledger.evicted_len")]
    fn evicted_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let ledger = slf.try_borrow()?;
        Ok(view(ledger.0.evicted_len(self::group(group)?).map_err(to_py)?, slf.as_any()))
    }

    #[doc = doc!("Ledger.idle")]
    #[getter]
    fn idle<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<bool>>> {
        Ok(view(slf.try_borrow()?.0.idle(), slf.as_any()))
    }

    #[doc = doc!("Ledger.resolved_len")]
    #[getter]
    fn resolved_len<'py>(slf: &Bound<'py, Self>) -> PyResult<Ints<'py>> {
        Ok(view(slf.try_borrow()?.0.resolved_len(), slf.as_any()))
    }

    #[doc = doc!("Ledger.in_flight")]
    #[getter]
    fn in_flight<'py>(slf: &Bound<'py, Self>) -> PyResult<Ints<'py>> {
        Ok(view(slf.try_borrow()?.0.in_flight(), slf.as_any()))
    }

    #[doc = doc!("Ledger.drafted_len")]
    #[getter]
    fn drafted_len<'py>(slf: &Bound<'py, Self>) -> PyResult<Ints<'py>> {
        Ok(view(slf.try_borrow()?.0.drafted_len(), slf.as_any()))
    }

    #[doc = doc!("Ledger.epoch")]
    #[getter]
    fn epoch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        Ok(view(slf.try_borrow()?.0.epoch(), slf.as_any()))
    }

    #[doc = doc!("Ledger.kv_committed_len")]
    #[getter]
    fn kv_committed_len<'py>(&self, py: Python<'py>) -> PyResult<Ints<'py>> {
        let pairs = self.0.resolved_len().iter().zip(self.0.in_flight());
        let lens = pairs.map(|(&resolved, &in_flight)| resolved.saturating_add(in_flight));
        Ok(vector(py, memory::collected(lens, "lengths").map_err(to_py)?))
    }

    #[doc = doc!("Ledger.states")]
    #[getter]
    fn states(&self) -> Vec<StateGroup> {
        self.0.state_groups().iter().cloned().map(StateGroup).collect()
    }

    #[doc = doc!("Ledger.state_slot")]
    fn state_slot<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let group = self::group(group)?;
        Ok(view(slf.try_borrow()?.0.state_slot(group).map_err(to_py)?, slf.as_any()))
    }

    #[doc = doc!("Ledger.state_len")]
    fn state_len<'py>(slf: &Bound<'py, Self>, group: &Bound<'py, PyAny>) -> PyResult<Ints<'py>> {
        let group = self::group(group)?;
        Ok(view(slf.try_borrow()?.0.state_len(group).map_err(to_py)?, slf.as_any()))
    }

    #[doc = doc!("Ledger.kept_state")]
    fn kept_state(&self, group: &Bound<'_, PyAny>, row: &Bound<'_, PyAny>) -> PyResult<Option<(i32, i32)>> {
        let checkpoint = self.0.kept_state(self::group(group)?, self::row(row)?).map_err(to_py)?;
        Ok(checkpoint.map(|(slot, len)| (slot.0, len)))
    }

    #[doc = doc!("Ledger.free_state_slots")]
    fn free_state_slots(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.free_state_slots(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.fenced_state_slots")]
    fn fenced_state_slots(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.fenced_state_slots(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.cached_state_slots")]
    fn cached_state_slots(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.cached_state_slots(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.soft_marks")]
    fn soft_marks(&self, group: &Bound<'_, PyAny>, row: &Bound<'_, PyAny>) -> PyResult<Vec<(i32, i32)>> {
        let marks = self.0.soft_marks(self::group(group)?, self::row(row)?).map_err(to_py)?;
        Ok(marks.map(|(slot, len)| (slot.0, len)).collect())
    }

    #[doc = doc!("Ledger.index_states")]
    fn index_states(&self, group: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, i32, i32)>> {
        let states = self.0.index_states(self::group(group)?).map_err(to_py)?;
        Ok(states.map(|(entry, slot, len)| (entry, slot.0, len)).collect())
    }

    #[doc = doc!("Ledger.reclaimable_state_slots")]
    fn reclaimable_state_slots(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.reclaimable_state_slots(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.state_ring_len")]
    fn state_ring_len(&self, group: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.0.state_ring_len(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.admit")]
    #[pyo3(signature = (tag=None, *, prefix=None, length=None))]
    fn admit(
        &mut self,
        tag: Option<&Bound<'_, PyAny>>,
        prefix: Option<&Bound<'_, PyAny>>,
        length: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        let tag = tag.map(name).transpose()?;
        let length = length.map(|length| int32("length", length)).transpose()?;
        let row = match prefix.map(self::prefix).transpose()? {
            Some(prefix) => self.change(|ledger| ledger.admit_on(prefix, length, tag))?,
            None if length.is_some_and(|length| length != 0) => {
                return Err(shape_error("admit: a length needs a prefix".into()));
            }
            None => self.change(|ledger| ledger.admit(tag))?,
        };
        Ok(row.0)
    }

    #[doc = doc!("Ledger.fork")]
    #[pyo3(signature = (row, tag=None))]
    fn fork(&mut self, row: &Bound<'_, PyAny>, tag: Option<&Bound<'_, PyAny>>) -> PyResult<i32> {
        let tag = tag.map(name).transpose()?;
        let row = self::row(row)?;
        Ok(self.change(|ledger| ledger.fork(row, tag))?.0)
    }

    #[doc = doc!("Ledger.pin_prefix")]
    fn pin_prefix(&mut self, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<u64> {
        let (row, length) = (self::row(row)?, int32("length", length)?);
        self.change(|ledger| ledger.pin_prefix(row, length))
    }

    #[doc = doc!("Ledger.release_prefix")]
    fn release_prefix(&mut self, prefix: &Bound<'_, PyAny>) -> PyResult<()> {
        let prefix = self::prefix(prefix)?;
        self.change(|ledger| ledger.release_prefix(prefix))
    }

    #[doc = doc!("Ledger.lend")]
    fn lend(&mut self, row: &Bound<'_, PyAny>, start: &Bound<'_, PyAny>, end: &Bound<'_, PyAny>) -> PyResult<()> {
        let (row, start, end) = (self::row(row)?, int32("start", start)?, int32("end", end)?);
        self.change(|ledger| ledger.lend(row, start, end))
    }

    #[doc = doc!("Ledger.rebind")]
    fn rebind(
        &mut self,
        row: &Bound<'_, PyAny>,
        start: &Bound<'_, PyAny>,
        end: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (row, start, end) = (self::row(row)?, int32("start", start)?, int32("end", end)?);
        let pages = int_array("pages", pages)?;
        self.change(|ledger| ledger.rebind(row, start, end, &pages))
    }

    #[doc = doc!("Ledger.admit_lent")]
    #[pyo3(signature = (pages, length, tag=None))]
    fn admit_lent(
        &mut self,
        pages: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
        tag: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        let tag = tag.map(name).transpose()?;
        let (pages, length) = (int_array("pages", pages)?, int32("length", length)?);
        Ok(self.change(|ledger| ledger.admit_lent(&pages, length, tag))?.0)
    }

    #[doc = doc!("Ledger.release_lent")]
    fn release_lent(&mut self, group: &Bound<'_, PyAny>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let (group, pages) = (self::group(group)?, int_array("pages", pages)?);
        self.change(|ledger| ledger.release_lent(group, &pages))
    }

    #[doc = doc!("Ledger.export")]
    fn export(&mut self, row: &Bound<'_, PyAny>) -> PyResult<u64> {
        let row = self::row(row)?;
        self.change(|ledger| ledger.export(row))
    }

    #[doc = doc!("Ledger.import_row")]
    #[pyo3(signature = (length, drafted_len, tag=None))]
    fn import_row(
        &mut self,
        length: &Bound<'_, PyAny>,
        drafted_len: &Bound<'_, PyAny>,
        tag: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        let tag = tag.map(name).transpose()?;
        let (length, drafted_len) = (int32("length", length)?, int32("drafted_len", drafted_len)?);
        Ok(self.change(|ledger| ledger.import_row(length, drafted_len, tag))?.0)
    }

    #[doc = doc!("Ledger.prefix_pages")]
    fn prefix_pages<'py>(
        &self,
        py: Python<'py>,
        prefix: &Bound<'_, PyAny>,
        group: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, Bound<'py, PyArray1<i32>>)> {
        let run = self.0.prefix_pages(self::prefix(prefix)?, self::group(group)?).map_err(to_py)?;
        Ok((run.first_column, PyArray1::from_iter(py, run.pages.iter().map(|page| page.0))))
    }

    #[doc = doc!("Ledger.prefix_state_slot")]
    fn prefix_state_slot(&self, prefix: &Bound<'_, PyAny>) -> PyResult<i32> {
        Ok(self.0.prefix_state_slot(self::prefix(prefix)?).map_err(to_py)?.0)
    }

    #[doc = doc!("Ledger.prefix_drafted_len")]
    fn prefix_drafted_len(&self, prefix: &Bound<'_, PyAny>) -> PyResult<i32> {
        self.0.prefix_drafted_len(self::prefix(prefix)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.lent_pages")]
    fn lent_pages<'py>(&self, py: Python<'py>, group: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        Ok(PyArray1::from_vec(py, self.0.lent_pages(self::group(group)?).map_err(to_py)?))
    }

    #[doc = doc!("Ledger.index")]
    #[pyo3(signature = (row, tokens, salt=Salt::default()), text_signature = "(self, row, tokens, salt=b'')")]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of bytes")]
    fn index(&mut self, row: &Bound<'_, PyAny>, tokens: &Bound<'_, PyAny>, salt: Salt) -> PyResult<i32> {
        let (row, tokens) = (self::row(row)?, int_array("tokens", tokens)?);
        self.change(|ledger| ledger.index(row, &tokens, &salt.0))
    }

    #[doc = doc!("Ledger.match_prefix")]
    #[pyo3(signature = (tokens, salt=Salt::default(), *, limit=None, needs_draft=false),
        text_signature = "(self, tokens, salt=b'', *, limit=None, needs_draft=False)")]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of bytes")]
    fn match_prefix(
        &self,
        tokens: &Bound<'_, PyAny>,
        salt: Salt,
        limit: Option<&Bound<'_, PyAny>>,
        needs_draft: bool,
    ) -> PyResult<(i32, Vec<usize>, Vec<usize>)> {
        let limit = limit.map(|limit| int32("limit", limit)).transpose()?;
        let tokens = int_array("tokens", tokens)?;
        let matched = self.0.match_prefix(&tokens, &salt.0, limit, needs_draft).map_err(to_py)?;
        Ok((matched.len, matched.shared, matched.taken))
    }

    #[doc = doc!("Ledger.known_prefix")]
    #[pyo3(signature = (tokens, salt=Salt::default(), *, limit=None),
        text_signature = "(self, tokens, salt=b'', *, limit=None)")]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of bytes")]
    fn known_prefix(&self, tokens: &Bound<'_, PyAny>, salt: Salt, limit: Option<&Bound<'_, PyAny>>) -> PyResult<i32> {
        let limit = limit.map(|limit| int32("limit", limit)).transpose()?;
        let tokens = int_array("tokens", tokens)?;
        self.0.known_prefix(&tokens, &salt.0, limit).map_err(to_py)
    }

    #[doc = doc!("Ledger.match_state")]
    #[pyo3(signature = (tokens, salt=Salt::default(), *, limit=None),
        text_signature = "(self, tokens, salt=b'', *, limit=None)")]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of bytes")]
    fn match_state(
        &self,
        tokens: &Bound<'_, PyAny>,
        salt: Salt,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(i32, i32)> {
        let limit = limit.map(|limit| int32("limit", limit)).transpose()?;
        let tokens = int_array("tokens", tokens)?;
        let (slot, len) = self.0.match_state(&tokens, &salt.0, limit).map_err(to_py)?;
        Ok((slot.0, len))
    }

    #[doc = doc!("Ledger.admit_cached")]
    #[pyo3(signature = (tokens, salt=Salt::default(), tag=None, *, limit=None, needs_draft=false),
        text_signature = "(self, tokens, salt=b'', tag=None, *, limit=None, needs_draft=False)")]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of bytes")]
    fn admit_cached(
        &mut self,
        tokens: &Bound<'_, PyAny>,
        salt: Salt,
        tag: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
        needs_draft: bool,
    ) -> PyResult<i32> {
        let tag = tag.map(name).transpose()?;
        let limit = limit.map(|limit| int32("limit", limit)).transpose()?;
        let tokens = int_array("tokens", tokens)?;
        Ok(self.change(|ledger| ledger.admit_cached(&tokens, &salt.0, limit, needs_draft, tag))?.0)
    }

    #[doc = doc!("Ledger.forget")]
    #[pyo3(signature = (salt=None))]
    #[allow(clippy::needless_pass_by_value, reason = "what PyO3 makes of bytes")]
    fn forget(&mut self, salt: Option<Salt>) -> PyResult<()> {
        self.change(|ledger| ledger.forget(salt.as_ref().map(|salt| &salt.0[..])))
    }

    #[doc = doc!("Ledger.cached_pages")]
    fn cached_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.cached_pages(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.held_cells")]
    fn held_cells(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.held_cells(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.shared_pages")]
    fn shared_pages(&self, group: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.0.shared_pages(self::group(group)?).map_err(to_py)
    }

    #[doc = doc!("Ledger.index_size")]
    #[getter]
    fn index_size(&self) -> (usize, usize, u64) {
        self.0.index_size()
    }

    #[doc = doc!("Ledger.index_bytes")]
    fn index_bytes(&self) -> usize {
        self.0.index_bytes()
    }

    #[doc = doc!("Ledger.index_entries")]
    fn index_entries<'py>(&self, py: Python<'py>) -> PyResult<Vec<IndexEntry<'py>>> {
        let entry = |entry: Indexed<'_>| -> PyResult<IndexEntry<'py>> {
            let pages = entry.pages.iter().map(|&pages| copied(py, pages)).collect::<PyResult<_>>()?;
            let salt = PyBytes::new(py, entry.salt);
            Ok((salt, entry.start, copied(py, entry.tokens)?, entry.drafted, pages))
        };
        self.0.index_entries().map(entry).collect()
    }

    #[doc = doc!("Ledger.prepare_extend")]
    #[pyo3(signature = (rows, new_lens, *, writes_draft=true, keep=None),
        text_signature = "(self, rows, new_lens, *, writes_draft=True, keep=())")]
    fn prepare_extend(
        &mut self,
        rows: &Bound<'_, PyAny>,
        new_lens: &Bound<'_, PyAny>,
        writes_draft: bool,
        keep: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let (rows, new_lens) = (int_array("rows", rows)?, int_array("new_lens", new_lens)?);
        let keep = keep.map(|keep| int_array("keep", keep)).transpose()?;
        let keep = keep.as_deref().unwrap_or_default();
        self.change(|ledger| ledger.prepare_extend_keeping(&rows, &new_lens, keep, writes_draft)).map(Plan)
    }

    #[doc = doc!("Ledger.tokens_required")]
    fn tokens_required<'py>(
        &self,
        rows: &Bound<'py, PyAny>,
        shapes: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let py = rows.py();
        let rows = int_array("rows", rows)?;
        let shapes = per_row("shapes", shapes, rows.len())?;
        copied(py, &self.0.tokens_required(&rows, &shapes).map_err(to_py)?)
    }

    #[doc = doc!("Ledger.pages_needed")]
    fn pages_needed<'py>(
        &self,
        lo: &Bound<'py, PyAny>,
        hi: &Bound<'py, PyAny>,
        shape: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let py = lo.py();
        let (lo, hi, shape) = (int32("lo", lo)?, int32("hi", hi)?, int32("shape", shape)?);
        copied(py, &self.0.pages_needed(lo, hi, shape).map_err(to_py)?)
    }

    #[doc = doc!("Ledger.pages_ahead")]
    fn pages_ahead<'py>(
        &self,
        lens: &Bound<'py, PyAny>,
        shapes: &Bound<'py, PyAny>,
        growth: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let py = lens.py();
        let (lens, growth) = (int_array("lens", lens)?, int32("growth", growth)?);
        let shapes = per_row("shapes", shapes, lens.len())?;
        let pages = self.0.pages_ahead(&lens, &shapes, growth).map_err(to_py)?;
        array(py, pages, [lens.len(), self.0.num_groups()])
    }

    #[doc = doc!("Ledger.held_pages")]
    fn held_pages<'py>(&self, rows: &Bound<'py, PyAny>) -> PyResult<PagesOfRows<'py>> {
        let py = rows.py();
        let rows = int_array("rows", rows)?;
        let (held, shared) = self.0.held_pages(&rows).map_err(to_py)?;
        let dims = [rows.len(), self.0.num_groups()];
        Ok((array(py, held, dims)?, array(py, shared, dims)?))
    }

    #[doc = doc!("Ledger.tail_pages")]
    fn tail_pages<'py>(&self, length: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        copied(length.py(), &self.0.tail_pages(int32("length", length)?).map_err(to_py)?)
    }

    #[doc = doc!("Ledger.prepare_decode")]
    #[pyo3(signature = (rows, shapes, *, writes_draft=true))]
    fn prepare_decode(
        &mut self,
        rows: &Bound<'_, PyAny>,
        shapes: &Bound<'_, PyAny>,
        writes_draft: bool,
    ) -> PyResult<Plan> {
        let rows = int_array("rows", rows)?;
        let shapes = per_row("shapes", shapes, rows.len())?;
        self.change(|ledger| ledger.prepare_decode(&rows, &shapes, writes_draft)).map(Plan)
    }

    #[doc = doc!("Ledger.launch")]
    fn launch(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self::step(step)?;
        self.change(|ledger| ledger.launch(step))
    }

    #[doc = doc!("Ledger.resolve")]
    fn resolve(&mut self, step: &Bound<'_, PyAny>, accept_lens: &Bound<'_, PyAny>) -> PyResult<()> {
        let (step, accept_lens) = (self::step(step)?, int_array("accept_lens", accept_lens)?);
        self.change(|ledger| ledger.resolve(step, &accept_lens))
    }

    #[doc = doc!("Ledger.complete")]
    fn complete(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self::step(step)?;
        self.change(|ledger| ledger.complete(step))
    }

    #[doc = doc!("Ledger.cancel")]
    fn cancel(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self::step(step)?;
        self.change(|ledger| ledger.cancel(step))
    }

    #[doc = doc!("Ledger.abandon")]
    fn abandon(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self::step(step)?;
        self.change(|ledger| ledger.abandon(step))
    }

    #[doc = doc!("Ledger.end_turn")]
    fn end_turn(&mut self, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<i32> {
        let (row, length) = (self::row(row)?, int32("length", length)?);
        self.change(|ledger| ledger.end_turn(row, length))
    }

    #[doc = doc!("Ledger.trim")]
    fn trim(&mut self, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<i32> {
        let (row, length) = (self::row(row)?, int32("length", length)?);
        self.change(|ledger| ledger.trim(row, length))
    }

    #[doc = doc!("Ledger.retract")]
    fn retract(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = self::row(row)?;
        self.change(|ledger| ledger.retract(row))
    }

    #[doc = doc!("Ledger.finish")]
    fn finish(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = self::row(row)?;
        self.change(|ledger| ledger.finish(row))
    }

    #[doc = doc!("Ledger.abort")]
    fn abort(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = self::row(row)?;
        self.change(|ledger| ledger.abort(row))
    }

    #[doc = doc!("Ledger.take_delta")]
    fn take_delta<'py>(&mut self, py: Python<'py>, step: &Bound<'py, PyAny>) -> PyResult<Vec<DeltaArrays<'py>>> {
        let step = self::step(step)?;
        let entries = self.change(|ledger| ledger.take_delta(step))?;
        let arrays = |delta: &DeltaEntries| {
            Ok((copied(py, &delta.rows)?, copied(py, &delta.columns)?, copied(py, &delta.pages)?))
        };
        entries.iter().map(arrays).collect()
    }

    #[doc = doc!("Ledger.ack_delta")]
    fn ack_delta(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self::step(step)?;
        self.change(|ledger| ledger.ack_delta(step))
    }

    #[doc = doc!("Ledger.watch_kv")]
    fn watch_kv(&mut self) -> PyResult<()> {
        self.change(specpool_core::Ledger::watch_kv)
    }

    #[doc = doc!("Ledger.take_kv_events")]
    fn take_kv_events<'py>(&mut self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let events = self.change(specpool_core::Ledger::take_kv_events)?;
        let tuple = |event: KvEvent| match event {
            KvEvent::Rewind { row, len } => ("rewind", row.0, len).into_pyobject(py),
            KvEvent::Evict { row, group, start, end } => ("evict", row.0, group, start, end).into_pyobject(py),
            KvEvent::Move { row, copy } => {
                ("move", row.0, copy.group, copy.src, copy.dst, copy.tokens).into_pyobject(py)
            }
            KvEvent::Commit { row, group, start, end } => ("commit", row.0, group, start, end).into_pyobject(py),
        };
        events.into_iter().map(tuple).collect()
    }

    #[doc = doc!("Ledger.snapshot")]
    fn snapshot(&mut self) -> PyResult<Snapshot> {
        self.change(specpool_core::Ledger::snapshot).map(Snapshot)
    }

    #[doc = doc!("Ledger.restore")]
    fn restore(&mut self, snapshot: &Snapshot) -> PyResult<()> {
        self.change(|ledger| ledger.restore(&snapshot.0))
    }

    #[doc = doc!("Ledger.close")]
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

    #[doc = doc!("Ledger.audit")]
    fn audit(&self) -> PyResult<Vec<Finding>> {
        Ok(self.0.audit().map_err(to_py)?.into_iter().map(Finding).collect())
    }

    #[doc = doc!("Ledger.check")]
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
