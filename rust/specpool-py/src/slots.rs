//! Slots, draft cells and moves for Python.
#![allow(clippy::too_many_arguments, reason = "one parameter per argument of the Python function")]

use numpy::{PyArray1, PyArray2, PyArray3};
use pyo3::prelude::*;
use specpool_core::forward::draft_cells::{self, Drafts};
use specpool_core::forward::slots::{self, Moves, TableView};

use crate::arrays::{Input, Output, ShapeInt, array, at_least, count, expect_apart, expect_dims, per_lane, vector};
use crate::errors::{shape_error, to_py};
use crate::sizing::layout;

type Array1<'py, T> = Bound<'py, PyArray1<T>>;
type Array2<'py, T> = Bound<'py, PyArray2<T>>;
type Array3<'py, T> = Bound<'py, PyArray3<T>>;
type MoveArrays<'py> = (Array1<'py, i64>, Array1<'py, i64>);

/// A page table argument and its page size.
struct Table<'py> {
    pages: Input<'py, i32, 2>,
    page_size: i64,
}

impl<'py> Table<'py> {
    fn new(page_table: &Bound<'py, PyAny>, page_size: ShapeInt) -> PyResult<Self> {
        Ok(Self { pages: Input::new("page_table", page_table)?, page_size: page_size.get("page_size")? })
    }

    fn view(&self) -> PyResult<TableView<'_>> {
        TableView::new(self.pages.slice(), self.pages.dims[1], self.page_size).map_err(to_py)
    }
}

/// The numbers of steps and of branches.
fn branches(num_steps: ShapeInt, topk: ShapeInt) -> PyResult<(usize, usize)> {
    Ok((count("num_steps", num_steps, 1)?, count("topk", topk, 1)?))
}

fn drafts((num_steps, topk): (usize, usize), page_size: i64, layout: &str) -> PyResult<Drafts> {
    Drafts::new(num_steps, topk, page_size, self::layout(layout, shape_error)?).map_err(to_py)
}

fn ancestor_array<'py>(
    ancestors: Option<&Bound<'py, PyAny>>,
    lanes: usize,
    topk: usize,
) -> PyResult<Option<Input<'py, i32, 3>>> {
    let ancestors = Input::<i32, 3>::optional("ancestors", ancestors)?;
    if let Some(ancestors) = &ancestors {
        expect_dims("ancestors", ancestors.dims, [lanes, topk, ancestors.dims[2]])?;
    }
    Ok(ancestors)
}

fn move_arrays(py: Python<'_>, moves: Moves) -> MoveArrays<'_> {
    (vector(py, moves.src), vector(py, moves.dst))
}

#[doc = doc!("slots_at")]
#[pyfunction]
pub fn slots_at<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    positions: &Bound<'py, PyAny>,
) -> PyResult<Array1<'py, i64>> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let positions = per_lane(&rows, "positions", positions)?;
    Ok(vector(py, slots::slots_at(&table.view()?, rows.slice(), positions.slice()).map_err(to_py)?))
}

#[doc = doc!("slot_ranges")]
#[pyfunction]
pub fn slot_ranges<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    starts: &Bound<'py, PyAny>,
    lens: &Bound<'py, PyAny>,
) -> PyResult<Array1<'py, i64>> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let (starts, lens) = (per_lane(&rows, "starts", starts)?, per_lane(&rows, "lens", lens)?);
    let slots = slots::slot_ranges(&table.view()?, rows.slice(), starts.slice(), lens.slice()).map_err(to_py)?;
    Ok(vector(py, slots))
}

#[doc = doc!("page_csr")]
#[pyfunction]
pub fn page_csr<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    lens: &Bound<'py, PyAny>,
) -> PyResult<(Array1<'py, i32>, Array1<'py, i32>, Array1<'py, i32>)> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let lens = per_lane(&rows, "lens", lens)?;
    let csr = slots::page_csr(&table.view()?, rows.slice(), lens.slice()).map_err(to_py)?;
    Ok((vector(py, csr.kv_indptr), vector(py, csr.kv_indices), vector(py, csr.kv_last_page_len)))
}

#[doc = doc!("apply_table_delta")]
#[pyfunction]
pub fn apply_table_delta<'py>(
    page_table: &Bound<'py, PyAny>,
    rows: &Bound<'py, PyAny>,
    columns: &Bound<'py, PyAny>,
    pages: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let mut table = Output::<i32, 2>::new("page_table", page_table)?;
    let rows = Input::new("rows", rows)?;
    let (columns, pages) = (per_lane(&rows, "columns", columns)?, per_lane(&rows, "pages", pages)?);
    let width = table.dims[1];
    let read = [("rows", rows.span()), ("columns", columns.span()), ("pages", pages.span())];
    expect_apart([("page_table", table.span())], read)?;
    slots::apply_table_delta(table.slice(), width, rows.slice(), columns.slice(), pages.slice()).map_err(to_py)
}

#[doc = doc!("draft_write_positions")]
#[pyfunction]
#[pyo3(signature = (roots, *, num_steps, topk, page_size, layout))]
pub fn draft_write_positions<'py>(
    py: Python<'py>,
    roots: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    topk: ShapeInt,
    page_size: ShapeInt,
    layout: &str,
) -> PyResult<Array3<'py, i32>> {
    let roots = Input::<i32, 1>::new("roots", roots)?;
    let (num_steps, topk) = branches(num_steps, topk)?;
    let drafts = drafts((num_steps, topk), page_size.get("page_size")?, layout)?;
    let positions = drafts.write_positions(roots.slice()).map_err(to_py)?;
    array(py, positions, [roots.dims[0], topk, num_steps])
}

#[doc = doc!("draft_write_slots")]
#[pyfunction]
#[pyo3(signature = (page_table, page_size, rows, roots, *, num_steps, topk, layout))]
pub fn draft_write_slots<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    roots: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    topk: ShapeInt,
    layout: &str,
) -> PyResult<Array3<'py, i64>> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let roots = per_lane(&rows, "roots", roots)?;
    let (num_steps, topk) = branches(num_steps, topk)?;
    let drafts = drafts((num_steps, topk), table.page_size, layout)?;
    let slots = drafts.write_slots(&table.view()?, rows.slice(), roots.slice()).map_err(to_py)?;
    array(py, slots, [rows.dims[0], topk, num_steps])
}

#[doc = doc!("advance_ancestors")]
#[pyfunction]
pub fn advance_ancestors<'py>(
    ancestors: &Bound<'py, PyAny>,
    branch_parents: &Bound<'py, PyAny>,
    step: ShapeInt,
) -> PyResult<()> {
    let step = count("step", step, 0)?;
    let mut ancestors = Output::<i32, 3>::new("ancestors", ancestors)?;
    let parents = Input::<i32, 2>::new("branch_parents", branch_parents)?;
    let [lanes, topk, width] = ancestors.dims;
    expect_dims("branch_parents", parents.dims, [lanes, topk])?;
    if step >= width {
        return Err(shape_error(format!("step must be in [0, {width}), the columns of ancestors, got {step}")));
    }
    expect_apart([("ancestors", ancestors.span())], [("branch_parents", parents.span())])?;
    draft_cells::advance_ancestors(ancestors.slice(), parents.slice(), topk, step).map_err(to_py)
}

#[doc = doc!("draft_read_indices")]
#[pyfunction]
#[pyo3(signature = (page_table, page_size, rows, roots, *, num_steps, topk, step, layout, ancestors=None, out=None))]
pub fn draft_read_indices<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    roots: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    topk: ShapeInt,
    step: ShapeInt,
    layout: &str,
    ancestors: Option<&Bound<'py, PyAny>>,
    out: Option<Bound<'py, PyAny>>,
) -> PyResult<(Array1<'py, i32>, Bound<'py, PyAny>)> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let roots = per_lane(&rows, "roots", roots)?;
    let (num_steps, topk) = branches(num_steps, topk)?;
    let (drafts, step) = (drafts((num_steps, topk), table.page_size, layout)?, count("step", step, 0)?);
    let ancestor_lines = ancestor_array(ancestors, rows.dims[0], topk)?;
    let ancestors = ancestor_lines.as_ref().map(Input::slice);
    let reads = drafts.read_indices(&table.view()?, rows.slice(), roots.slice(), step, ancestors).map_err(to_py)?;
    let kv_indices = match out {
        None => vector(py, reads.kv_indices).into_any(),
        Some(out) => {
            let mut buffer = Output::<i32, 1>::new("out", &out)?;
            let read = [("page_table", table.pages.span()), ("rows", rows.span()), ("roots", roots.span())];
            expect_apart([("out", buffer.span())], read)?;
            if let Some(ancestors) = &ancestor_lines {
                expect_apart([("out", buffer.span())], [("ancestors", ancestors.span())])?;
            }
            let need = drafts.read_capacity(roots.slice()).map_err(to_py)?;
            if buffer.dims[0] < need {
                return Err(shape_error(format!(
                    "out must hold K * (sum(roots) + n * S) = {need} slots, it holds {}",
                    buffer.dims[0]
                )));
            }
            buffer.slice()[..reads.kv_indices.len()].copy_from_slice(&reads.kv_indices);
            drop(buffer);
            out
        }
    };
    Ok((vector(py, reads.kv_indptr), kv_indices))
}

#[doc = doc!("draft_visibility")]
#[pyfunction]
#[pyo3(signature = (roots, *, num_steps, topk, step, page_size, layout, ancestors=None))]
pub fn draft_visibility<'py>(
    py: Python<'py>,
    roots: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    topk: ShapeInt,
    step: ShapeInt,
    page_size: ShapeInt,
    layout: &str,
    ancestors: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Array3<'py, bool>, Array2<'py, i32>)> {
    let roots = Input::<i32, 1>::new("roots", roots)?;
    let (num_steps, topk) = branches(num_steps, topk)?;
    let drafts = drafts((num_steps, topk), page_size.get("page_size")?, layout)?;
    let step = count("step", step, 0)?;
    let ancestors = ancestor_array(ancestors, roots.dims[0], topk)?;
    let seen = drafts.visibility(roots.slice(), step, ancestors.as_ref().map(Input::slice)).map_err(to_py)?;
    let (own_mask, own_positions) = seen;
    let (n, width) = (roots.dims[0], own_positions.width);
    Ok((array(py, own_mask.cells, [n, topk, width])?, array(py, own_positions.cells, [n, width])?))
}

#[doc = doc!("branch_pages")]
#[pyfunction]
#[pyo3(signature = (page_table, page_size, rows, roots, *, num_steps, topk, step))]
pub fn branch_pages<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    roots: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    topk: ShapeInt,
    step: ShapeInt,
) -> PyResult<Array2<'py, i32>> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let roots = per_lane(&rows, "roots", roots)?;
    let (num_steps, topk) = branches(num_steps, topk)?;
    let (drafts, step) = (drafts((num_steps, topk), table.page_size, "holey")?, count("step", step, 0)?);
    let pages = drafts.branch_pages(&table.view()?, rows.slice(), roots.slice(), step).map_err(to_py)?;
    array(py, pages.cells, [rows.dims[0] * topk, pages.width])
}

#[doc = doc!("prefix_tail_moves")]
#[pyfunction]
#[pyo3(signature = (page_table, page_size, rows, roots, *, num_steps, topk))]
pub fn prefix_tail_moves<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    roots: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    topk: ShapeInt,
) -> PyResult<MoveArrays<'py>> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let roots = per_lane(&rows, "roots", roots)?;
    let drafts = drafts(branches(num_steps, topk)?, table.page_size, "holey")?;
    Ok(move_arrays(py, drafts.prefix_tail_moves(&table.view()?, rows.slice(), roots.slice()).map_err(to_py)?))
}

#[doc = doc!("branch_copy_moves")]
#[pyfunction]
#[pyo3(signature = (page_table, page_size, rows, roots, branch_parents, *, num_steps, step, layout="holey"))]
pub fn branch_copy_moves<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    roots: &Bound<'py, PyAny>,
    branch_parents: &Bound<'py, PyAny>,
    num_steps: ShapeInt,
    step: ShapeInt,
    layout: &str,
) -> PyResult<MoveArrays<'py>> {
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let roots = per_lane(&rows, "roots", roots)?;
    let parents = Input::<i32, 2>::new("branch_parents", branch_parents)?;
    let topk = parents.dims[1];
    expect_dims("branch_parents", parents.dims, [rows.dims[0], topk])?;
    let branches = branches(num_steps, ShapeInt::of(topk as i64))?;
    let (drafts, step) = (drafts(branches, table.page_size, layout)?, count("step", step, 0)?);
    let moves = drafts.branch_copy_moves(&table.view()?, rows.slice(), roots.slice(), step, parents.slice());
    Ok(move_arrays(py, moves.map_err(to_py)?))
}

#[doc = doc!("compact_moves")]
#[pyfunction]
#[pyo3(signature = (page_table, page_size, rows, roots, accept_index, *, num_draft_tokens))]
pub fn compact_moves<'py>(
    py: Python<'py>,
    page_table: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    rows: &Bound<'py, PyAny>,
    roots: &Bound<'py, PyAny>,
    accept_index: &Bound<'py, PyAny>,
    num_draft_tokens: ShapeInt,
) -> PyResult<MoveArrays<'py>> {
    let n = count("num_draft_tokens", num_draft_tokens, 1)?;
    let table = Table::new(page_table, page_size)?;
    let rows = Input::new("rows", rows)?;
    let roots = per_lane(&rows, "roots", roots)?;
    let accept = Input::<i32, 2>::new("accept_index", accept_index)?;
    expect_dims("accept_index", accept.dims, [rows.dims[0], accept.dims[1]])?;
    let moves = slots::compact_moves(&table.view()?, rows.slice(), roots.slice(), accept.slice(), n);
    Ok(move_arrays(py, moves.map_err(to_py)?))
}

#[doc = doc!("check_moves")]
#[pyfunction]
pub fn check_moves<'py>(src: &Bound<'py, PyAny>, dst: &Bound<'py, PyAny>, num_slots: ShapeInt) -> PyResult<()> {
    let (src, dst) = (Input::<i64, 1>::new("src", src)?, Input::<i64, 1>::new("dst", dst)?);
    slots::check_moves(src.slice(), dst.slice(), at_least("num_slots", num_slots, 0)?).map_err(to_py)
}

#[doc = doc!("check_slots")]
#[pyfunction]
pub fn check_slots(name: &str, slots: &Bound<'_, PyAny>, num_slots: ShapeInt) -> PyResult<()> {
    let slots = Input::<i64, 1>::new("slots", slots)?;
    slots::check_slots(name, slots.slice(), at_least("num_slots", num_slots, 0)?).map_err(to_py)
}
