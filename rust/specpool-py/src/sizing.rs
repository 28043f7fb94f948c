//! The sizing functions for raw numbers, and the names of layouts and policies.

use pyo3::prelude::*;
use specpool_core::state::sizing;
use specpool_core::{Geometry, Layout, Policy, Reserve};

use crate::arrays::ConfigInt;
use crate::errors::{config_error, to_py};
use crate::shape::{Shape, shape};

/// The layout of that name. `refuse` makes the error for an unknown name.
pub fn layout(name: &str, refuse: fn(String) -> PyErr) -> PyResult<Layout> {
    match name {
        "dense" => Ok(Layout::Dense),
        "holey" => Ok(Layout::Holey),
        _ => Err(refuse(format!("layout must be 'dense' or 'holey', got '{name}'"))),
    }
}

pub fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::Dense => "dense",
        Layout::Holey => "holey",
    }
}

pub fn policy(name: &str) -> PyResult<Policy> {
    match name {
        "exact" => Ok(Policy::Exact),
        "double_buffer" => Ok(Policy::DoubleBuffer),
        _ => Err(config_error(format!("policy must be 'exact' or 'double_buffer', got '{name}'"))),
    }
}

pub fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Exact => "exact",
        Policy::DoubleBuffer => "double_buffer",
    }
}

fn geometry(page_size: i64, hosts_drafts: bool, layout_name: &str) -> PyResult<Geometry> {
    Geometry::new(page_size, hosts_drafts, layout(layout_name, config_error)?).map_err(to_py)
}

#[doc = doc!("sizing_alloc_len_per_decode")]
#[pyfunction]
#[pyo3(signature = (*, page_size, num_steps, topk, num_draft_tokens, hosts_drafts=true, layout="holey"))]
pub fn sizing_alloc_len_per_decode(
    page_size: ConfigInt,
    num_steps: ConfigInt,
    topk: ConfigInt,
    num_draft_tokens: ConfigInt,
    hosts_drafts: bool,
    layout: &str,
) -> PyResult<i64> {
    let shape = shape(num_steps, topk, num_draft_tokens)?;
    Ok(geometry(page_size.get("page_size")?, hosts_drafts, layout)?.alloc_len_per_decode(shape))
}

#[doc = doc!("sizing_row_headroom")]
#[pyfunction]
#[pyo3(signature = (*, page_size, num_steps, topk, num_draft_tokens))]
pub fn sizing_row_headroom(
    page_size: ConfigInt,
    num_steps: ConfigInt,
    topk: ConfigInt,
    num_draft_tokens: ConfigInt,
) -> PyResult<i64> {
    sizing::row_headroom(page_size.get("page_size")?, shape(num_steps, topk, num_draft_tokens)?).map_err(to_py)
}

#[doc = doc!("sizing_need_exact")]
#[pyfunction]
#[pyo3(signature = (*, lo, hi, page_size, num_steps, topk, num_draft_tokens, hosts_drafts=true, layout="holey"))]
#[allow(clippy::too_many_arguments, reason = "raw numbers, all by keyword")]
pub fn sizing_need_exact(
    lo: ConfigInt,
    hi: ConfigInt,
    page_size: ConfigInt,
    num_steps: ConfigInt,
    topk: ConfigInt,
    num_draft_tokens: ConfigInt,
    hosts_drafts: bool,
    layout: &str,
) -> PyResult<i64> {
    let shape = shape(num_steps, topk, num_draft_tokens)?;
    let reserve = Reserve::exact(geometry(page_size.get("page_size")?, hosts_drafts, layout)?, shape);
    sizing::need(&reserve, lo.get("lo")?, hi.get("hi")?).map_err(to_py)
}

#[doc = doc!("sizing_need_double_buffer")]
#[pyfunction]
#[pyo3(signature = (*, lo, alloc_len, overlap_depth))]
pub fn sizing_need_double_buffer(lo: ConfigInt, alloc_len: ConfigInt, overlap_depth: ConfigInt) -> PyResult<i64> {
    let reserve =
        Reserve::double_buffer(1, alloc_len.get("alloc_len")?, overlap_depth.get("overlap_depth")?).map_err(to_py)?;
    let lo = lo.get("lo")?;
    sizing::need(&reserve, lo, lo).map_err(to_py)
}

#[doc = doc!("sizing_next_allocated")]
#[pyfunction]
#[pyo3(signature = (*, allocated, need, page_size))]
pub fn sizing_next_allocated(allocated: ConfigInt, need: ConfigInt, page_size: ConfigInt) -> PyResult<i64> {
    sizing::next_allocated(allocated.get("allocated")?, need.get("need")?, page_size.get("page_size")?).map_err(to_py)
}

#[doc = doc!("sizing_row_width")]
#[pyfunction]
#[pyo3(signature = (shapes, *, page_size, max_context_len, overlap_depth=ConfigInt::of(0), policy="exact",
    hosts_drafts=true, layout="holey"),
    text_signature = "(shapes, *, page_size, max_context_len, overlap_depth=0, policy='exact', hosts_drafts=True, \
    layout='holey')")]
pub fn sizing_row_width(
    shapes: Vec<Shape>,
    page_size: ConfigInt,
    max_context_len: ConfigInt,
    overlap_depth: ConfigInt,
    policy: &str,
    hosts_drafts: bool,
    layout: &str,
) -> PyResult<i64> {
    let shapes: Vec<_> = shapes.into_iter().map(|shape| shape.0).collect();
    let geometry = geometry(page_size.get("page_size")?, hosts_drafts, layout)?;
    sizing::row_width(
        geometry,
        &shapes,
        max_context_len.get("max_context_len")?,
        overlap_depth.get("overlap_depth")?,
        self::policy(policy)?,
    )
    .map_err(to_py)
}

#[doc = doc!("sizing_pages_needed")]
#[pyfunction]
#[pyo3(signature = (shapes, shape, *, lo, hi, page_size, overlap_depth=ConfigInt::of(0), policy="exact",
    hosts_drafts=true, layout="holey"),
    text_signature = "(shapes, shape, *, lo, hi, page_size, overlap_depth=0, policy='exact', hosts_drafts=True, \
    layout='holey')")]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python function")]
pub fn sizing_pages_needed(
    shapes: Vec<Shape>,
    shape: ConfigInt,
    lo: ConfigInt,
    hi: ConfigInt,
    page_size: ConfigInt,
    overlap_depth: ConfigInt,
    policy: &str,
    hosts_drafts: bool,
    layout: &str,
) -> PyResult<i64> {
    let shapes: Vec<_> = shapes.into_iter().map(|shape| shape.0).collect();
    let geometry = geometry(page_size.get("page_size")?, hosts_drafts, layout)?;
    let reserves = Reserve::for_shapes(geometry, &shapes, self::policy(policy)?, overlap_depth.get("overlap_depth")?)
        .map_err(to_py)?;
    let shape = shape.get("shape")?;
    let reserve = usize::try_from(shape)
        .ok()
        .and_then(|at| reserves.get(at))
        .ok_or_else(|| config_error(format!("shape {shape} is not in 0..{}", reserves.len())))?;
    sizing::pages_needed(reserve, lo.get("lo")?, hi.get("hi")?).map_err(to_py)
}

#[doc = doc!("sizing_most_window_pages")]
#[pyfunction]
#[pyo3(signature = (shapes, *, window, max_chunk, page_size, overlap_depth=ConfigInt::of(0), policy="exact",
    hosts_drafts=true, layout="holey", sink=ConfigInt::of(0)),
    text_signature = "(shapes, *, window, max_chunk, page_size, overlap_depth=0, policy='exact', hosts_drafts=True, \
    layout='holey', sink=0)")]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python function")]
pub fn sizing_most_window_pages(
    shapes: Vec<Shape>,
    window: ConfigInt,
    max_chunk: ConfigInt,
    page_size: ConfigInt,
    overlap_depth: ConfigInt,
    policy: &str,
    hosts_drafts: bool,
    layout: &str,
    sink: ConfigInt,
) -> PyResult<i64> {
    let shapes: Vec<_> = shapes.into_iter().map(|shape| shape.0).collect();
    let geometry = geometry(page_size.get("page_size")?, hosts_drafts, layout)?;
    let policy = self::policy(policy)?;
    let (max_chunk, overlap_depth) = (max_chunk.get("max_chunk")?, overlap_depth.get("overlap_depth")?);
    let window_and_sink = (window.get("window")?, sink.get("sink")?);
    sizing::most_window_pages(geometry, &shapes, window_and_sink, max_chunk, overlap_depth, policy).map_err(to_py)
}
