//! Moves of KV in host memory for Python.
#![allow(clippy::needless_pass_by_value, reason = "Python hands lists over as vectors")]

use pyo3::prelude::*;
use specpool_core::moves::{SlotLayout, SlotMoves};

use crate::arrays::{Input, Output, expect_dims};
use crate::errors::{shape_error, to_py};

/// A buffer of bytes and where its slots lie.
struct Buffer<'py> {
    bytes: Output<'py, u8, 3>,
    layout: SlotLayout,
}

fn buffers(arrays: Vec<(Bound<'_, PyAny>, Vec<usize>)>) -> PyResult<Vec<Buffer<'_>>> {
    let buffers = arrays.into_iter().map(|(array, widths)| {
        let bytes = Output::new("buffers", &array)?;
        Ok(Buffer { layout: SlotLayout::new(bytes.dims, widths).map_err(to_py)?, bytes })
    });
    buffers.collect()
}

fn slot_moves(buffers: &[Buffer<'_>], src: &[i64], dst: &[i64]) -> PyResult<SlotMoves> {
    let num_slots = buffers.iter().map(|buffer| buffer.layout.num_slots()).min().unwrap_or(0);
    SlotMoves::new(src, dst, num_slots).map_err(to_py)
}

/// Moves slots in every buffer.
#[pyfunction]
pub fn move_slots<'py>(
    buffers: Vec<(Bound<'py, PyAny>, Vec<usize>)>,
    src: &Bound<'py, PyAny>,
    dst: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let (src, dst) = (Input::<i64, 1>::new("src", src)?, Input::<i64, 1>::new("dst", dst)?);
    let mut buffers = self::buffers(buffers)?;
    let moves = slot_moves(&buffers, src.slice(), dst.slice())?;
    buffers.iter_mut().try_for_each(|Buffer { bytes, layout }| moves.apply(layout, bytes.slice()).map_err(to_py))
}

/// Writes values into slots of every buffer.
#[pyfunction]
pub fn scatter_slots<'py>(
    buffers: Vec<(Bound<'py, PyAny>, Vec<usize>)>,
    slots: &Bound<'py, PyAny>,
    values: Vec<Bound<'py, PyAny>>,
) -> PyResult<()> {
    let slots = Input::<i64, 1>::new("slots", slots)?;
    let mut buffers = self::buffers(buffers)?;
    let moves = slot_moves(&buffers, slots.slice(), slots.slice())?;
    let values = values.iter().map(|value| Input::<u8, 3>::new("values", value)).collect::<PyResult<Vec<_>>>()?;
    if values.len() != buffers.len() {
        return Err(shape_error(format!("values must have {} arrays, got {}", buffers.len(), values.len())));
    }
    for (Buffer { bytes: buffer, .. }, value) in buffers.iter().zip(&values) {
        expect_dims("values", value.dims, [buffer.dims[0], slots.dims[0], buffer.dims[2]])?;
    }
    for (Buffer { bytes, layout }, value) in buffers.iter_mut().zip(&values) {
        moves.scatter(layout, bytes.slice(), value.slice()).map_err(to_py)?;
    }
    Ok(())
}
