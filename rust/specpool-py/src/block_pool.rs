//! `BlockPool` for Python.

#![allow(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]

use std::path::{Path, PathBuf};

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PySlice, PyTuple};
use specpool_core::{BlockPoolConfig, Error as CoreError, Result as CoreResult};

use crate::arrays::{ConfigInt, Salt, ShapeInt, at_least, copied, int_array, int32, ints, name, step, widened};
use crate::errors::{guarded, shape_error, to_py};
use crate::recording::built;

#[doc = doc!("BlockPool")]
#[pyclass(module = "specpool._core")]
pub struct BlockPool(specpool_core::BlockPool, bool);

type Ints<'py> = Bound<'py, PyArray1<i32>>;
/// state, holders, tag, fence, last verb of one block.
type Line = (String, u32, Option<String>, u64, &'static str);

impl BlockPool {
    /// Runs a verb, with an end to panics.
    fn change<T>(&mut self, verb: impl FnOnce(&mut specpool_core::BlockPool) -> CoreResult<T>) -> PyResult<T> {
        guarded(&mut self.0, &mut self.1, "the pool cannot be used", verb)
    }

    fn size(&self) -> usize {
        self.0.config().block_size as usize
    }

    /// Checks that the list has an object for each block.
    fn check_objects(&self, list: &Bound<'_, PyList>) -> PyResult<()> {
        let config = self.0.config();
        let (len, need) = (list.len(), config.first_id + config.num_blocks);
        if len as i64 >= need {
            return Ok(());
        }
        Err(shape_error(format!("of must have an object for each block up to {}, got {len}", need - 1)))
    }
}

#[pymethods]
impl BlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, first_id=ConfigInt::of(0), caching=true, fencing=false, digest=false,
        record=None, record_limit=ConfigInt::of(1 << 30)),
        text_signature = "(num_blocks, block_size, *, first_id=0, caching=True, fencing=False, digest=False, \
        record=None, record_limit=1073741824)")]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "a configuration, all by keyword")]
    fn new(
        num_blocks: ConfigInt,
        block_size: ConfigInt,
        first_id: ConfigInt,
        caching: bool,
        fencing: bool,
        digest: bool,
        record: Option<PathBuf>,
        record_limit: ConfigInt,
    ) -> PyResult<Self> {
        let config = BlockPoolConfig {
            first_id: first_id.get("first_id")?,
            caching,
            fencing,
            digest,
            ..BlockPoolConfig::new(num_blocks.get("num_blocks")?, block_size.get("block_size")?)
        };
        let build = |log: Option<(&Path, u64)>| match log {
            None => specpool_core::BlockPool::new(config),
            Some((path, limit)) => specpool_core::BlockPool::recorded(config, path, limit),
        };
        built(record, record_limit, build).map(|pool| Self(pool, false))
    }

    #[doc = doc!("BlockPool.replay")]
    #[staticmethod]
    #[pyo3(signature = (path, *, most=None, show=None))]
    fn replay(
        path: PathBuf,
        most: Option<ShapeInt>,
        show: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Self, u64, Option<&'static str>)> {
        let most = most.map_or(Ok(u64::MAX), |most| at_least("most", most, 0).map(|most| most as u64))?;
        let mut raised = None;
        let replayed = specpool_core::BlockPool::replay_to(&path, most, |call| {
            let Some(show) = show else { return Ok(()) };
            show.call1((call.index, call.to_string(), call.tag)).map(drop).map_err(|error| {
                raised = Some(error);
                CoreError::Order("show raised an exception".into())
            })
        });
        if let Some(error) = raised {
            return Err(error);
        }
        let (pool, num_calls, end) = replayed.map_err(to_py)?;
        Ok((Self(pool, false), num_calls, end.map(specpool_core::LogEnd::name)))
    }

    #[doc = doc!("BlockPool.digest")]
    #[getter]
    fn digest(&self) -> Option<u64> {
        self.0.digest()
    }

    #[doc = doc!("BlockPool.close")]
    fn close(&mut self) -> PyResult<()> {
        self.0.close().map_err(to_py)
    }

    #[doc = doc!("BlockPool.sync")]
    fn sync(&mut self) -> PyResult<()> {
        self.0.sync().map_err(to_py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&mut self, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close()
    }

    #[doc = doc!("BlockPool.num_blocks")]
    #[getter]
    fn num_blocks(&self) -> i64 {
        self.0.config().num_blocks
    }

    #[doc = doc!("BlockPool.block_size")]
    #[getter]
    fn block_size(&self) -> i64 {
        self.0.config().block_size
    }

    #[doc = doc!("BlockPool.first_id")]
    #[getter]
    fn first_id(&self) -> i64 {
        self.0.config().first_id
    }

    #[doc = doc!("BlockPool.caching")]
    #[getter]
    fn caching(&self) -> bool {
        self.0.config().caching
    }

    #[doc = doc!("BlockPool.fencing")]
    #[getter]
    fn fencing(&self) -> bool {
        self.0.config().fencing
    }

    #[doc = doc!("BlockPool.num_free")]
    #[getter]
    fn num_free(&self) -> usize {
        self.0.num_free()
    }

    #[doc = doc!("BlockPool.num_cached")]
    #[getter]
    fn num_cached(&self) -> usize {
        self.0.num_cached()
    }

    #[doc = doc!("BlockPool.available")]
    fn available(&self) -> usize {
        self.0.num_free() + self.0.num_cached()
    }

    #[doc = doc!("BlockPool.num_fenced")]
    #[getter]
    fn num_fenced(&self) -> usize {
        self.0.num_fenced()
    }

    #[doc = doc!("BlockPool.index_size")]
    #[getter]
    fn index_size(&self) -> (usize, u64) {
        self.0.index_size()
    }

    #[doc = doc!("BlockPool.index_bytes")]
    fn index_bytes(&self) -> usize {
        self.0.index_bytes()
    }

    #[doc = doc!("BlockPool.fits")]
    #[pyo3(signature = (count, hold=None))]
    fn fits(&mut self, count: ShapeInt, hold: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let (count, hold) = (at_least("count", count, 0)?, blocks("hold", hold)?);
        self.0.fits(count, &hold).map_err(to_py)
    }

    #[doc = doc!("BlockPool.take")]
    #[pyo3(signature = (count, hold=None, tag=None, of=None, *, int64=false))]
    fn take<'py>(
        &mut self,
        py: Python<'py>,
        count: ShapeInt,
        hold: Option<&Bound<'_, PyAny>>,
        tag: Option<&Bound<'_, PyAny>>,
        of: Option<&Bound<'py, PyList>>,
        int64: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (count, hold, tag) = (at_least("count", count, 0)?, blocks("hold", hold)?, tag.map(name).transpose()?);
        of.map_or(Ok(()), |list| self.check_objects(list))?;
        let taken = self.change(|pool| pool.take(count, &hold, tag).map_err(|error| error.by(tag)))?;
        Ok(match of {
            Some(list) => {
                let objects: PyResult<Vec<_>> = taken.iter().map(|&block| list.get_item(block as usize)).collect();
                PyList::new(py, objects?)?.into_any()
            }
            None if int64 => widened(py, &taken)?.into_any(),
            None => copied(py, &taken)?.into_any(),
        })
    }

    #[doc = doc!("BlockPool.hold")]
    fn hold(&mut self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        one_or_more("hold", blocks, |blocks| self.change(|pool| pool.take(0, blocks, None).map(drop)))
    }

    #[doc = doc!("BlockPool.preview")]
    #[pyo3(signature = (count=None))]
    fn preview<'py>(&self, py: Python<'py>, count: Option<ShapeInt>) -> PyResult<Ints<'py>> {
        let count = count.map(|count| at_least("count", count, 0)).transpose()?;
        copied(py, &self.0.preview(count.unwrap_or(usize::MAX)).map_err(to_py)?)
    }

    #[doc = doc!("BlockPool.drop")]
    #[pyo3(signature = (blocks, after=None, *, tag=None))]
    fn drop(
        &mut self,
        blocks: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
        tag: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (blocks, after, tag) = (ints("blocks", blocks)?, after.map(step).transpose()?, tag.map(name).transpose()?);
        self.change(|pool| pool.drop_by(&blocks, after, tag))
    }

    #[doc = doc!("BlockPool.match")]
    #[pyo3(signature = (tokens, salt=Salt::default(), *, limit=None), text_signature = "($self, tokens, salt=b'', *, limit=None)")]
    fn r#match<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'_, PyAny>,
        salt: Salt,
        limit: Option<ShapeInt>,
    ) -> PyResult<Ints<'py>> {
        let tokens = ints("tokens", tokens)?;
        let limit = limit.map(|limit| at_least("limit", limit, 0)).transpose()?;
        copied(py, &self.0.match_prefix(&tokens, &salt.0, limit).map_err(to_py)?)
    }

    #[doc = doc!("BlockPool.put")]
    #[pyo3(signature = (tokens, blocks, start=ShapeInt::of(0), salt=Salt::default()),
        text_signature = "($self, tokens, blocks, start=0, salt=b'')")]
    fn put<'py>(
        &mut self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        start: ShapeInt,
        salt: Salt,
    ) -> PyResult<Ints<'py>> {
        let start = at_least("start", start, 0)?;
        // If the index knows the block two before the new ones, what lies before it needs no look.
        if start >= 2
            && blocks.len().unwrap_or(0) >= start // and so the product is no overflow
            && tokens.len().unwrap_or(0) >= start * self.size()
            && let Ok(anchor) = blocks.get_item(start - 2)?.extract::<i32>()
            && self.0.is_indexed(anchor).unwrap_or(false)
        {
            let (tokens, blocks) = (behind(tokens, (start - 1) * self.size())?, behind(blocks, start - 1)?);
            let (tokens, blocks) = (ints("tokens", &tokens)?, ints("blocks", &blocks)?);
            return copied(py, &self.change(|pool| pool.put_behind(Some(anchor), &tokens, &blocks, 1, &salt.0))?);
        }
        let (tokens, blocks) = (ints("tokens", tokens)?, ints("blocks", blocks)?);
        copied(py, &self.change(|pool| pool.put(&tokens, &blocks, start, &salt.0))?)
    }

    #[doc = doc!("BlockPool.keep")]
    fn keep(&mut self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        one_or_more("blocks", blocks, |blocks| self.change(|pool| pool.keep(blocks)))
    }

    #[doc = doc!("BlockPool.unkeep")]
    fn unkeep(&mut self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = ints("blocks", blocks)?;
        self.change(|pool| pool.unkeep(&blocks))
    }

    #[doc = doc!("BlockPool.forget")]
    #[pyo3(signature = (salt=None))]
    fn forget(&mut self, salt: Option<Salt>) -> PyResult<()> {
        self.change(|pool| pool.forget(salt.as_ref().map(|salt| &salt.0[..])))
    }

    #[doc = doc!("BlockPool.complete")]
    fn complete(&mut self, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self::step(step)?;
        self.change(|pool| pool.complete(step))
    }

    #[doc = doc!("BlockPool.refs")]
    fn refs(&self, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.0.refs(int32("block", block)?).map_err(to_py)
    }

    #[doc = doc!("BlockPool.record_of")]
    fn record_of(&self, block: &Bound<'_, PyAny>) -> PyResult<Line> {
        let line = self.0.record_of(int32("block", block)?).map_err(to_py)?;
        Ok((line.state.to_string(), line.refs, line.tag.map(ToOwned::to_owned), line.fence, line.last_verb.name()))
    }

    #[doc = doc!("BlockPool.taken")]
    fn taken<'py>(&self, py: Python<'py>) -> PyResult<Ints<'py>> {
        copied(py, &self.0.taken().map_err(to_py)?)
    }

    #[doc = doc!("BlockPool.state_hash")]
    fn state_hash(&self) -> u64 {
        self.0.state_hash()
    }

    #[doc = doc!("BlockPool.audit")]
    fn audit(&self) -> PyResult<Vec<String>> {
        self.0.audit().map_err(to_py)
    }

    #[doc = doc!("BlockPool.check")]
    fn check(&self) -> PyResult<()> {
        self.0.check().map_err(to_py)
    }

    fn __repr__(&self) -> String {
        let config = self.0.config();
        format!(
            "<BlockPool of {} blocks of {} tokens: {} free, {} cached, {} fenced>",
            config.num_blocks,
            config.block_size,
            self.0.num_free(),
            self.0.num_cached(),
            self.0.num_fenced()
        )
    }
}

/// `values[from:]`.
fn behind<'py>(values: &Bound<'py, PyAny>, from: usize) -> PyResult<Bound<'py, PyAny>> {
    match values.cast_exact::<PyList>() {
        Ok(list) => Ok(list.get_slice(from, list.len()).into_any()),
        Err(_) => values.get_item(PySlice::new(values.py(), from as isize, isize::MAX, 1)),
    }
}

/// Calls with the one block, or with those of an array or a list: a single one is the usual case in some calls.
fn one_or_more<R>(name: &str, value: &Bound<'_, PyAny>, call: impl FnOnce(&[i32]) -> PyResult<R>) -> PyResult<R> {
    if value.is_exact_instance_of::<PyInt>() { call(&[int32(name, value)?]) } else { call(&ints(name, value)?) }
}

/// The blocks of an optional argument.
fn blocks(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<i32>> {
    value.map_or(Ok(Vec::new()), |value| int_array(name, value))
}
