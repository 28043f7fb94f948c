//! Draft tree, verify and sampling for Python.
#![allow(clippy::too_many_arguments, reason = "one parameter per argument of the Python function")]

use numpy::{PyArray1, PyArray2, PyArray3};
use pyo3::prelude::*;
use specpool_core::memory;
use specpool_core::tree::build::{Candidates, Tree};
use specpool_core::tree::check::{self, Proposed};
use specpool_core::tree::sample::{self, SampleParams};
use specpool_core::tree::{build, verify};

use crate::arrays::{Input, Output, ShapeInt, Span, array, count, expect_apart, expect_dims, vector};
use crate::errors::{shape_error, to_py};

type Array1<'py, T> = Bound<'py, PyArray1<T>>;
type Array2<'py, T> = Bound<'py, PyArray2<T>>;
type Array3<'py, T> = Bound<'py, PyArray3<T>>;
type Trees<'py> = (Array2<'py, i32>, Array3<'py, bool>, Array2<'py, i32>, Array2<'py, i32>, Array2<'py, i32>);

/// The candidate buffers of a round. Their widths give the number of steps.
struct Buffers<'py> {
    scores: Output<'py, f32, 2>,
    tokens: Output<'py, i64, 2>,
    parents: Output<'py, i64, 2>,
}

impl<'py> Buffers<'py> {
    fn new(scores: &Bound<'py, PyAny>, tokens: &Bound<'py, PyAny>, parents: &Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(Self {
            scores: Output::new("candidate_scores", scores)?,
            tokens: Output::new("candidate_tokens", tokens)?,
            parents: Output::new("candidate_parents", parents)?,
        })
    }

    /// Refuses buffers that share memory with each other or with the arrays in `read`.
    fn expect_apart<const R: usize>(&self, read: [(&'static str, Span); R]) -> PyResult<()> {
        let written = [
            ("candidate_scores", self.scores.span()),
            ("candidate_tokens", self.tokens.span()),
            ("candidate_parents", self.parents.span()),
        ];
        expect_apart(written, read)
    }

    fn candidates(&mut self, topk: usize) -> PyResult<Candidates<'_>> {
        let [batch, width] = self.parents.dims;
        let num_steps = width.saturating_sub(1).checked_div(topk).unwrap_or(0);
        let total = build::num_candidates(num_steps, topk);
        expect_dims("candidate_parents", self.parents.dims, [batch, num_steps * topk + 1])?;
        expect_dims("candidate_scores", self.scores.dims, [batch, total])?;
        expect_dims("candidate_tokens", self.tokens.dims, [batch, total])?;
        let (scores, tokens, parents) = (self.scores.slice(), self.tokens.slice(), self.parents.slice());
        Candidates::new(batch, num_steps, topk, scores, tokens, parents).map_err(to_py)
    }
}

#[doc = doc!("select_topk")]
#[pyfunction]
pub fn select_topk<'py>(
    py: Python<'py>,
    step: ShapeInt,
    topk_p: &Bound<'py, PyAny>,
    topk_index: &Bound<'py, PyAny>,
    scores: Option<&Bound<'py, PyAny>>,
    candidate_scores: &Bound<'py, PyAny>,
    candidate_tokens: &Bound<'py, PyAny>,
    candidate_parents: &Bound<'py, PyAny>,
) -> PyResult<(Array1<'py, i64>, Array2<'py, i32>, Array2<'py, f32>)> {
    let step = count("step", step, 0)?;
    let topk_p = Input::<f32, 2>::new("topk_p", topk_p)?;
    let topk_index = Input::<i64, 2>::new("topk_index", topk_index)?;
    let scores = Input::<f32, 2>::optional("scores", scores)?;
    let mut buffers = Buffers::new(candidate_scores, candidate_tokens, candidate_parents)?;
    let (batch, k) = (buffers.parents.dims[0], topk_p.dims[1]);
    expect_dims("topk_p", topk_p.dims, [if step == 0 { batch } else { batch * k }, k])?;
    expect_dims("topk_index", topk_index.dims, topk_p.dims)?;
    match &scores {
        None if step > 0 => return Err(shape_error(format!("scores must not be None at step {step}"))),
        Some(scores) if step > 0 => expect_dims("scores", scores.dims, [batch, k])?,
        _ => {}
    }
    buffers.expect_apart([("topk_p", topk_p.span()), ("topk_index", topk_index.span())])?;
    if let Some(scores) = &scores {
        buffers.expect_apart([("scores", scores.span())])?;
    }
    let before = if step == 0 { &[] } else { scores.as_ref().map_or(&[][..], Input::slice) };
    let selection = buffers.candidates(k)?.select(step, topk_p.slice(), topk_index.slice(), before).map_err(to_py)?;
    Ok((
        vector(py, selection.input_ids),
        array(py, selection.branch_parents, [batch, k])?,
        array(py, selection.scores, [batch, k])?,
    ))
}

#[doc = doc!("organize")]
#[pyfunction]
#[pyo3(signature = (candidate_scores, candidate_tokens, candidate_parents, *, topk, num_draft_tokens))]
pub fn organize<'py>(
    py: Python<'py>,
    candidate_scores: &Bound<'py, PyAny>,
    candidate_tokens: &Bound<'py, PyAny>,
    candidate_parents: &Bound<'py, PyAny>,
    topk: ShapeInt,
    num_draft_tokens: ShapeInt,
) -> PyResult<(Array2<'py, i64>, Array2<'py, i64>, Array2<'py, i64>)> {
    let (k, n) = (count("topk", topk, 1)?, count("num_draft_tokens", num_draft_tokens, 1)?);
    let mut buffers = Buffers::new(candidate_scores, candidate_tokens, candidate_parents)?;
    buffers.expect_apart([])?;
    let [batch, width] = buffers.parents.dims;
    let organized = buffers.candidates(k)?.organize(n).map_err(to_py)?;
    let list_width = build::parent_list_width((width - 1) / k, k);
    Ok((
        array(py, organized.parent_list, [batch, list_width])?,
        array(py, organized.top_scores_index, [batch, n - 1])?,
        array(py, organized.draft_tokens, [batch, n - 1])?,
    ))
}

fn trees(py: Python<'_>, tree: Tree, batch: usize, n: usize) -> PyResult<Trees<'_>> {
    Ok((
        array(py, tree.depths, [batch, n])?,
        array(py, tree.mask, [batch, n, n])?,
        array(py, tree.first_child, [batch, n])?,
        array(py, tree.next_sibling, [batch, n])?,
        array(py, tree.parents, [batch, n])?,
    ))
}

#[doc = doc!("build_tree")]
#[pyfunction]
#[pyo3(signature = (parent_list, top_scores_index, *, topk))]
pub fn build_tree<'py>(
    py: Python<'py>,
    parent_list: &Bound<'py, PyAny>,
    top_scores_index: &Bound<'py, PyAny>,
    topk: ShapeInt,
) -> PyResult<Trees<'py>> {
    let topk = count("topk", topk, 1)?;
    let parent_list = Input::<i64, 2>::new("parent_list", parent_list)?;
    let chosen = Input::<i64, 2>::new("top_scores_index", top_scores_index)?;
    let [batch, chosen_len] = chosen.dims;
    expect_dims("parent_list", parent_list.dims, [batch, parent_list.dims[1]])?;
    let tree = build::build_tree(parent_list.slice(), chosen.slice(), batch, topk).map_err(to_py)?;
    trees(py, tree, batch, chosen_len + 1)
}

#[doc = doc!("tree_from_parents")]
#[pyfunction]
pub fn tree_from_parents<'py>(py: Python<'py>, parents: &Bound<'py, PyAny>) -> PyResult<Trees<'py>> {
    let parents = Input::<i32, 2>::new("parents", parents)?;
    let [batch, n] = parents.dims;
    if n == 0 {
        return Err(shape_error(format!("parents must have 1 column or more, got shape [{batch}, 0]")));
    }
    trees(py, Tree::from_parents(parents.slice(), n).map_err(to_py)?, batch, n)
}

#[doc = doc!("verify_tree")]
#[pyfunction]
#[pyo3(signature = (tokens, first_child, next_sibling, target_tokens, *, num_steps))]
pub fn verify_tree<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    first_child: &Bound<'py, PyAny>,
    next_sibling: &Bound<'py, PyAny>,
    target_tokens: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
) -> PyResult<(Array2<'py, i32>, Array1<'py, i32>, Array1<'py, i64>)> {
    let num_steps = count("num_steps", num_steps, 0)?;
    let tokens = Input::<i64, 2>::new("tokens", tokens)?;
    let first_child = Input::<i32, 2>::new("first_child", first_child)?;
    let next_sibling = Input::<i32, 2>::new("next_sibling", next_sibling)?;
    let target = Input::<i64, 2>::new("target_tokens", target_tokens)?;
    expect_dims("first_child", first_child.dims, tokens.dims)?;
    expect_dims("next_sibling", next_sibling.dims, tokens.dims)?;
    expect_dims("target_tokens", target.dims, tokens.dims)?;
    let [batch, n] = tokens.dims;
    let verified =
        verify::verify_tree(tokens.slice(), first_child.slice(), next_sibling.slice(), target.slice(), n, num_steps)
            .map_err(to_py)?;
    Ok((
        array(py, verified.accept_index, [batch, num_steps + 1])?,
        vector(py, verified.accept_len),
        vector(py, verified.predict),
    ))
}

#[doc = doc!("find_broken_trees")]
#[pyfunction]
#[pyo3(signature = (tokens, depths, mask, first_child, next_sibling, root_tokens, *, vocab_size))]
pub fn find_broken_trees(
    tokens: &Bound<'_, PyAny>,
    depths: &Bound<'_, PyAny>,
    mask: &Bound<'_, PyAny>,
    first_child: &Bound<'_, PyAny>,
    next_sibling: &Bound<'_, PyAny>,
    root_tokens: &Bound<'_, PyAny>,
    vocab_size: ShapeInt,
) -> PyResult<Vec<(usize, String)>> {
    let vocab_size = count("vocab_size", vocab_size, 1)? as i64;
    let tokens = Input::<i64, 2>::new("tokens", tokens)?;
    let depths = Input::<i32, 2>::new("depths", depths)?;
    let mask = Input::<bool, 3>::new("mask", mask)?;
    let first_child = Input::<i32, 2>::new("first_child", first_child)?;
    let next_sibling = Input::<i32, 2>::new("next_sibling", next_sibling)?;
    let roots = Input::<i64, 1>::new("root_tokens", root_tokens)?;
    let [batch, n] = tokens.dims;
    expect_dims("depths", depths.dims, [batch, n])?;
    expect_dims("mask", mask.dims, [batch, n, n])?;
    expect_dims("first_child", first_child.dims, [batch, n])?;
    expect_dims("next_sibling", next_sibling.dims, [batch, n])?;
    expect_dims("root_tokens", roots.dims, [batch])?;
    let trees = Proposed {
        tokens: tokens.slice(),
        depths: depths.slice(),
        mask: mask.slice(),
        first_child: first_child.slice(),
        next_sibling: next_sibling.slice(),
    };
    let broken = check::find_broken(&trees, roots.slice(), vocab_size).map_err(to_py)?;
    Ok(broken.into_iter().map(|one| (one.lane, one.why)).collect())
}

#[doc = doc!("uniform")]
#[pyfunction]
pub fn uniform<'py>(
    py: Python<'py>,
    seeds: &Bound<'py, PyAny>,
    positions: &Bound<'py, PyAny>,
) -> PyResult<Array1<'py, f64>> {
    let seeds = Input::<u64, 1>::new("seeds", seeds)?;
    let positions = Input::<i64, 1>::new("positions", positions)?;
    expect_dims("positions", positions.dims, seeds.dims)?;
    let mut draws = memory::with_room(seeds.dims[0], "draws").map_err(to_py)?;
    for (lane, (&seed, &position)) in seeds.slice().iter().zip(positions.slice()).enumerate() {
        let position = u64::try_from(position)
            .map_err(|_| shape_error(format!("positions[{lane}] must be 0 or more, got {position}")))?;
        draws.push(sample::uniform(seed, position));
    }
    Ok(vector(py, draws))
}

/// The rows of logits to sample from, with their parameters.
struct Rows<'py> {
    logits: Input<'py, f32, 2>,
    params: Vec<SampleParams>,
}

impl<'py> Rows<'py> {
    fn new(
        logits: &Bound<'py, PyAny>,
        temperature: &Bound<'py, PyAny>,
        top_k: &Bound<'py, PyAny>,
        top_p: &Bound<'py, PyAny>,
        u: &Bound<'py, PyAny>,
        min_p: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let logits = Input::<f32, 2>::new("logits", logits)?;
        let temperature = Input::<f32, 1>::new("temperature", temperature)?;
        let top_k = Input::<i32, 1>::new("top_k", top_k)?;
        let top_p = Input::<f32, 1>::new("top_p", top_p)?;
        let u = Input::<f64, 1>::new("u", u)?;
        let min_p = Input::<f32, 1>::optional("min_p", min_p)?;
        let n = logits.dims[0];
        expect_dims("temperature", temperature.dims, [n])?;
        expect_dims("top_k", top_k.dims, [n])?;
        expect_dims("top_p", top_p.dims, [n])?;
        expect_dims("u", u.dims, [n])?;
        let (temperature, top_k, top_p, u) = (temperature.slice(), top_k.slice(), top_p.slice(), u.slice());
        if let Some(min_p) = &min_p {
            expect_dims("min_p", min_p.dims, [n])?;
        }
        let least = |i: usize| min_p.as_ref().map_or(0.0, |each| each.slice()[i]);
        let row = |i| SampleParams {
            temperature: temperature[i],
            top_k: top_k[i],
            top_p: top_p[i],
            min_p: least(i),
            u: u[i],
        };
        Ok(Self { params: memory::collected((0..n).map(row), "parameters").map_err(to_py)?, logits })
    }
}

#[doc = doc!("sample_tokens")]
#[pyfunction]
#[pyo3(signature = (logits, temperature, top_k, top_p, u, *, min_p = None))]
pub fn sample_tokens<'py>(
    py: Python<'py>,
    logits: &Bound<'py, PyAny>,
    temperature: &Bound<'py, PyAny>,
    top_k: &Bound<'py, PyAny>,
    top_p: &Bound<'py, PyAny>,
    u: &Bound<'py, PyAny>,
    min_p: Option<&Bound<'py, PyAny>>,
) -> PyResult<Array1<'py, i64>> {
    let rows = Rows::new(logits, temperature, top_k, top_p, u, min_p)?;
    Ok(vector(py, sample::sample_tokens(rows.logits.slice(), rows.logits.dims[1], &rows.params).map_err(to_py)?))
}

#[doc = doc!("sample_margins")]
#[pyfunction]
#[pyo3(signature = (logits, temperature, top_k, top_p, u, *, min_p = None))]
pub fn sample_margins<'py>(
    py: Python<'py>,
    logits: &Bound<'py, PyAny>,
    temperature: &Bound<'py, PyAny>,
    top_k: &Bound<'py, PyAny>,
    top_p: &Bound<'py, PyAny>,
    u: &Bound<'py, PyAny>,
    min_p: Option<&Bound<'py, PyAny>>,
) -> PyResult<Array1<'py, f64>> {
    let rows = Rows::new(logits, temperature, top_k, top_p, u, min_p)?;
    Ok(vector(py, sample::sample_margins(rows.logits.slice(), rows.logits.dims[1], &rows.params).map_err(to_py)?))
}
