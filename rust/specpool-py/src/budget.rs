//! The budget of a round for Python: acceptance of rows, and the choice of their shapes.
#![allow(clippy::too_many_arguments, reason = "one parameter per argument of the Python function")]

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use specpool_core::budget::acceptance::{self, Families};
use specpool_core::budget::choose::{Costs, Rows, choose};

use crate::arrays::{Input, Output, array, expect_apart, expect_dims, vector};
use crate::errors::{shape_error, to_py};

fn families<'a>(
    family: &'a Input<'_, i32, 1>,
    num_steps: &'a Input<'_, i32, 1>,
    dims: [usize; 3],
) -> PyResult<Families<'a>> {
    let [_, num_families, depth] = dims;
    if num_families == 0 || depth == 0 {
        return Err(shape_error(format!("counts must have a family and a depth, got shape {dims:?}")));
    }
    Ok(Families { family: family.slice(), num_steps: num_steps.slice(), num_families, depth })
}

#[doc = doc!("count_acceptance")]
#[pyfunction]
#[pyo3(signature = (hits, tries, family, num_steps, rows, shapes, accept_len, *, prior = None))]
pub fn count_acceptance<'py>(
    py: Python<'py>,
    hits: &Bound<'py, PyAny>,
    tries: &Bound<'py, PyAny>,
    family: &Bound<'py, PyAny>,
    num_steps: &Bound<'py, PyAny>,
    rows: &Bound<'py, PyAny>,
    shapes: &Bound<'py, PyAny>,
    accept_len: &Bound<'py, PyAny>,
    prior: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let mut hits = Output::<f32, 3>::new("hits", hits)?;
    let mut tries = Output::<f32, 3>::new("tries", tries)?;
    expect_dims("tries", tries.dims, hits.dims)?;
    expect_apart([("hits", hits.span()), ("tries", tries.span())], [])?;
    let family = Input::<i32, 1>::new("family", family)?;
    let num_steps = Input::<i32, 1>::new("num_steps", num_steps)?;
    let rows = Input::<i32, 1>::new("rows", rows)?;
    let shapes = Input::<i32, 1>::new("shapes", shapes)?;
    let accept_len = Input::<i32, 1>::new("accept_len", accept_len)?;
    let prior = Input::<f64, 2>::optional("prior", prior)?;
    if let Some(prior) = &prior {
        expect_dims("prior", prior.dims, [hits.dims[1], hits.dims[2]])?;
    }
    let families = families(&family, &num_steps, hits.dims)?;
    let cells = families.num_families * families.depth;
    let totals = acceptance::count_round(
        &families,
        hits.slice(),
        tries.slice(),
        prior.as_ref().map(Input::slice),
        rows.slice(),
        shapes.slice(),
        accept_len.slice(),
    )
    .map_err(to_py)?;
    array(py, totals, [cells, 2])
}

#[doc = doc!("expected_tokens")]
#[pyfunction]
#[pyo3(signature = (hits, tries, prior, family, num_steps, rows, *, deviations = 0.0))]
pub fn expected_tokens<'py>(
    py: Python<'py>,
    hits: &Bound<'py, PyAny>,
    tries: &Bound<'py, PyAny>,
    prior: &Bound<'py, PyAny>,
    family: &Bound<'py, PyAny>,
    num_steps: &Bound<'py, PyAny>,
    rows: &Bound<'py, PyAny>,
    deviations: f64,
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let hits = Input::<f32, 3>::new("hits", hits)?;
    let tries = Input::<f32, 3>::new("tries", tries)?;
    expect_dims("tries", tries.dims, hits.dims)?;
    let prior = Input::<f64, 2>::new("prior", prior)?;
    expect_dims("prior", prior.dims, [hits.dims[1], hits.dims[2]])?;
    let family = Input::<i32, 1>::new("family", family)?;
    let num_steps = Input::<i32, 1>::new("num_steps", num_steps)?;
    let rows = Input::<i32, 1>::new("rows", rows)?;
    let families = families(&family, &num_steps, hits.dims)?;
    let (batch, shapes) = (rows.dims[0], family.dims[0]);
    let (hits, tries) = (hits.slice(), tries.slice());
    let tokens =
        acceptance::expected_tokens(&families, hits, tries, prior.slice(), rows.slice(), deviations).map_err(to_py)?;
    array(py, tokens, [batch, shapes])
}

/// What `choose_shapes` returns, as its stub says.
type Chosen<'py> = (Bound<'py, PyArray1<i32>>, f64, f64, usize);

#[doc = doc!("choose_shapes")]
#[pyfunction]
#[pyo3(signature = (shapes, tokens, *, worth, gives, due, base, charge, lane, mixed = 0.0, hoped = None, pages = None, free = None))]
pub fn choose_shapes<'py>(
    py: Python<'py>,
    shapes: &Bound<'py, PyAny>,
    tokens: &Bound<'py, PyAny>,
    worth: &Bound<'py, PyAny>,
    gives: &Bound<'py, PyAny>,
    due: &Bound<'py, PyAny>,
    base: f64,
    charge: &Bound<'py, PyAny>,
    lane: &Bound<'py, PyAny>,
    mixed: f64,
    hoped: Option<&Bound<'py, PyAny>>,
    pages: Option<&Bound<'py, PyAny>>,
    free: Option<&Bound<'py, PyAny>>,
) -> PyResult<Chosen<'py>> {
    let shapes = Input::<i32, 2>::new("shapes", shapes)?;
    let tokens = Input::<f64, 2>::new("tokens", tokens)?;
    let worth = Input::<f64, 1>::new("worth", worth)?;
    let gives = Input::<f64, 1>::new("gives", gives)?;
    let due = Input::<f64, 2>::new("due", due)?;
    let charge = Input::<f64, 1>::new("charge", charge)?;
    let lane = Input::<f64, 1>::new("lane", lane)?;
    let [batch, num_candidates] = shapes.dims;
    let hoped = Input::<f64, 2>::optional("hoped", hoped)?;
    if let Some(hoped) = &hoped {
        expect_dims("hoped", hoped.dims, tokens.dims)?;
    }
    expect_dims("worth", worth.dims, [batch])?;
    expect_dims("gives", gives.dims, [batch])?;
    expect_dims("tokens", tokens.dims, [batch, lane.dims[0]])?;
    expect_dims("due", due.dims, [batch, 2])?;
    let pages = Input::<i32, 3>::optional("pages", pages)?;
    let free = Input::<i64, 1>::optional("free", free)?;
    let (pages, free): (&[i32], &[i64]) = match (&pages, &free) {
        (None, None) => (&[], &[]),
        (Some(pages), Some(free)) => {
            expect_dims("pages", pages.dims, [batch, num_candidates, free.dims[0]])?;
            (pages.slice(), free.slice())
        }
        _ => return Err(shape_error("pages and free must be given together".to_owned())),
    };
    let rows = Rows {
        num_candidates,
        shapes: shapes.slice(),
        tokens: tokens.slice(),
        hoped: hoped.as_ref().map_or(&[], Input::slice),
        worth: worth.slice(),
        gives: gives.slice(),
        due: due.slice(),
        pages,
        free,
    };
    let costs = Costs { base, mixed, charge: charge.slice(), lane: lane.slice() };
    let choice = choose(&rows, &costs).map_err(to_py)?;
    Ok((vector(py, choice.picks), choice.rate, choice.seconds, choice.num_missed))
}
