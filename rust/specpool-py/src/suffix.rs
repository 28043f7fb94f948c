//! `SuffixIndex` for Python.

use numpy::PyArray1;
use pyo3::prelude::*;
use specpool_core::Result as CoreResult;

use crate::arrays::{ConfigInt, ShapeInt, count, ints, vector};
use crate::errors::{config_error, guarded, to_py};

#[doc = doc!("SuffixIndex")]
#[pyclass(module = "specpool._core")]
pub struct SuffixIndex(specpool_core::SuffixIndex, bool);

type Proposed<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<f32>>, usize);

impl SuffixIndex {
    /// Runs a verb, with an end to panics.
    fn run<T>(&mut self, verb: impl FnOnce(&mut specpool_core::SuffixIndex) -> CoreResult<T>) -> PyResult<T> {
        guarded(&mut self.0, &mut self.1, "the index cannot be used", verb)
    }
}

/// A text's number; a negative one is none.
fn number(text: ConfigInt) -> PyResult<u64> {
    let text = text.get("text")?;
    u64::try_from(text).map_err(|_| config_error(format!("there is no text {text}")))
}

#[pymethods]
impl SuffixIndex {
    #[new]
    #[pyo3(signature = (max_tokens, *, max_context=ConfigInt::of(32)), text_signature = "(max_tokens, *, max_context=32)")]
    #[allow(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn new(max_tokens: ConfigInt, max_context: ConfigInt) -> PyResult<Self> {
        let (max_tokens, max_context) = (max_tokens.get("max_tokens")?, max_context.get("max_context")?);
        specpool_core::SuffixIndex::new(max_tokens, max_context).map(|index| Self(index, false)).map_err(to_py)
    }

    #[doc = doc!("SuffixIndex.begin")]
    fn begin(&mut self) -> PyResult<u64> {
        self.run(|index| Ok(index.begin()))
    }

    #[doc = doc!("SuffixIndex.end")]
    fn end(&mut self, text: ConfigInt) -> PyResult<()> {
        let text = number(text)?;
        self.run(|index| index.end(text))
    }

    #[doc = doc!("SuffixIndex.extend")]
    fn extend(&mut self, text: ConfigInt, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let text = number(text)?;
        let tokens = ints("tokens", tokens)?;
        let ids: Option<Vec<u32>> = tokens.iter().map(|&token| u32::try_from(token).ok()).collect();
        let Some(ids) = ids else {
            let least = tokens.iter().min().copied().unwrap_or(0);
            return Err(config_error(format!("tokens must be 0 or more, got {least}")));
        };
        self.run(|index| index.extend(text, &ids))
    }

    #[doc = doc!("SuffixIndex.best")]
    fn best(&mut self, text: ConfigInt) -> PyResult<(usize, f32)> {
        let text = number(text)?;
        self.run(|index| index.best(text))
    }

    #[doc = doc!("SuffixIndex.propose")]
    #[pyo3(signature = (text, *, num_steps, topk, num_draft_tokens))]
    fn propose<'py>(
        &mut self,
        py: Python<'py>,
        text: ConfigInt,
        num_steps: ShapeInt,
        topk: ShapeInt,
        num_draft_tokens: ShapeInt,
    ) -> PyResult<Proposed<'py>> {
        let text = number(text)?;
        let (steps, topk) = (count("num_steps", num_steps, 0)?, count("topk", topk, 1)?);
        let nodes = count("num_draft_tokens", num_draft_tokens, 1)?;
        let proposal = self.run(|index| index.propose(text, steps, topk, nodes))?;
        let tokens = proposal.tokens.into_iter().map(i64::from).collect();
        let parents = proposal.parents.into_iter().map(u32::cast_signed).collect();
        Ok((vector(py, tokens), vector(py, parents), vector(py, proposal.probabilities), proposal.match_len))
    }

    #[doc = doc!("SuffixIndex.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens()
    }

    #[doc = doc!("SuffixIndex.num_states")]
    #[getter]
    fn num_states(&self) -> usize {
        self.0.num_states()
    }
}
