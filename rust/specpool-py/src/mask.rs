//! Which cells the queries see, for Python.
#![allow(clippy::too_many_arguments, reason = "one parameter per argument of the Python function")]

use numpy::PyArray3;
use pyo3::prelude::*;
use specpool_core::Result as CoreResult;
use specpool_core::forward::mask::{self, MaskLanes};

use crate::arrays::{Input, ShapeInt, array, at_least, count, expect_dims, per_lane};
use crate::errors::to_py;

type MaskArray<'py, T> = Bound<'py, PyArray3<T>>;

/// Gathers the lanes and calls `visibility` on them, which says what their queries see.
fn of_lanes<'py, T: Copy + numpy::Element>(
    py: Python<'py>,
    starts: &Bound<'py, PyAny>,
    q_lens: &Bound<'py, PyAny>,
    num_columns: ShapeInt,
    own_mask: Option<&Bound<'py, PyAny>>,
    (q_positions, own_positions): (Option<&Bound<'py, PyAny>>, Option<&Bound<'py, PyAny>>),
    num_queries: Option<ShapeInt>,
    (window, sink): (Option<ShapeInt>, ShapeInt),
    visibility: fn(&MaskLanes, usize) -> CoreResult<Vec<T>>,
) -> PyResult<MaskArray<'py, T>> {
    let starts = Input::<i32, 1>::new("starts", starts)?;
    let q_lens = per_lane(&starts, "q_lens", q_lens)?;
    let own_mask = Input::<bool, 3>::optional("own_mask", own_mask)?;
    let q_positions = Input::<i32, 2>::optional("q_positions", q_positions)?;
    let own_positions = Input::<i32, 2>::optional("own_positions", own_positions)?;
    let n = starts.dims[0];
    let longest = q_lens.slice().iter().copied().max().unwrap_or(0).max(0) as usize;
    let queries = match (&own_mask, &q_positions, num_queries) {
        (Some(own_mask), _, _) => own_mask.dims[1],
        (None, Some(positions), _) => positions.dims[1],
        (None, None, Some(queries)) => count("num_queries", queries, 0)?,
        (None, None, None) => longest,
    };
    let own_width = match (&own_mask, &own_positions) {
        (Some(own_mask), _) => own_mask.dims[2],
        (None, Some(positions)) => positions.dims[1],
        (None, None) => 0,
    };
    if let Some(own_mask) = &own_mask {
        expect_dims("own_mask", own_mask.dims, [n, queries, own_width])?;
    }
    if let Some(positions) = &q_positions {
        expect_dims("q_positions", positions.dims, [n, queries])?;
    }
    if let Some(positions) = &own_positions {
        expect_dims("own_positions", positions.dims, [n, own_width])?;
    }
    let columns = at_least("num_columns", num_columns, 1)?;
    let lanes = MaskLanes {
        starts: starts.slice(),
        q_lens: q_lens.slice(),
        num_queries: queries,
        own_mask: own_mask.as_ref().map(Input::slice),
        q_positions: q_positions.as_ref().map(Input::slice),
        own_positions: own_positions.as_ref().map(Input::slice),
        own_width,
        window: window.map(|window| window.get("window")).transpose()?,
        sink: sink.get("sink")?,
    };
    array(py, visibility(&lanes, columns).map_err(to_py)?, [n, queries, columns])
}

/// A function of Python that returns what `mask` has under the same name.
macro_rules! visibility {
    ($name:ident, $doc:tt, $item:ty) => {
        #[doc = doc!($doc)]
        #[pyfunction]
        #[pyo3(signature = (
            starts, q_lens, num_columns, *, own_mask=None, q_positions=None, own_positions=None, num_queries=None,
            window=None, sink=ShapeInt::of(0)
        ), text_signature = "(starts, q_lens, num_columns, *, own_mask=None, q_positions=None, own_positions=None, \
            num_queries=None, window=None, sink=0)")]
        pub fn $name<'py>(
            py: Python<'py>,
            starts: &Bound<'py, PyAny>,
            q_lens: &Bound<'py, PyAny>,
            num_columns: ShapeInt,
            own_mask: Option<&Bound<'py, PyAny>>,
            q_positions: Option<&Bound<'py, PyAny>>,
            own_positions: Option<&Bound<'py, PyAny>>,
            num_queries: Option<ShapeInt>,
            window: Option<ShapeInt>,
            sink: ShapeInt,
        ) -> PyResult<MaskArray<'py, $item>> {
            let positions = (q_positions, own_positions);
            of_lanes(py, starts, q_lens, num_columns, own_mask, positions, num_queries, (window, sink), mask::$name)
        }
    };
}

visibility!(attention_mask, "attention_mask", bool);
visibility!(attention_bias, "attention_bias", f32);
