//! Moves of KV in host memory for Python.
#![allow(clippy::needless_pass_by_value, reason = "Python hands lists over as vectors")]

use pyo3::prelude::*;
use specpool_core::forward::moves::{self, SlotLayout, SlotMoves};
use specpool_core::forward::pages;
use specpool_core::memory;

use crate::arrays::{Input, List, Output, Span, expect_apart, expect_dims};
use crate::errors::{shape_error, to_py};

/// A buffer of bytes, and where its slots lie.
struct Buffer<'py> {
    bytes: Output<'py, u8, 3>,
    layout: SlotLayout,
}

type BufferList<'py> = List<(Bound<'py, PyAny>, List<usize>)>;

/// The buffers. None of them shares memory with another, or with the arrays in `read`.
fn buffers<'py, const R: usize>(
    arrays: BufferList<'py>,
    read: [(&'static str, Span); R],
) -> PyResult<Vec<Buffer<'py>>> {
    let mut buffers: Vec<Buffer<'_>> = memory::with_room(arrays.0.len(), "buffers").map_err(to_py)?;
    for (array, widths) in arrays.0 {
        let bytes = Output::new("buffers", &array)?;
        let written = ("buffers", bytes.span());
        expect_apart([written], read)?;
        for other in &buffers {
            expect_apart([written], [("buffers", other.bytes.span())])?;
        }
        buffers.push(Buffer { layout: SlotLayout::new(bytes.dims, widths.0).map_err(to_py)?, bytes });
    }
    Ok(buffers)
}

/// The buffers as the core takes them.
fn parts<'a>(buffers: &'a mut [Buffer<'_>]) -> PyResult<Vec<moves::Buffer<'a>>> {
    let parts = buffers.iter_mut().map(|Buffer { bytes, layout }| (&*layout, bytes.slice()));
    memory::collected(parts, "buffers").map_err(to_py)
}

fn slot_moves(buffers: &[Buffer<'_>], src: &[i64], dst: &[i64]) -> PyResult<SlotMoves> {
    let num_slots = buffers.iter().map(|buffer| buffer.layout.num_slots()).min().unwrap_or(0);
    SlotMoves::new(src, dst, num_slots).map_err(to_py)
}

#[doc = doc!("move_slots")]
#[pyfunction]
pub fn move_slots<'py>(buffers: BufferList<'py>, src: &Bound<'py, PyAny>, dst: &Bound<'py, PyAny>) -> PyResult<()> {
    let (src, dst) = (Input::<i64, 1>::new("src", src)?, Input::<i64, 1>::new("dst", dst)?);
    let mut buffers = self::buffers(buffers, [("src", src.span()), ("dst", dst.span())])?;
    let moves = slot_moves(&buffers, src.slice(), dst.slice())?;
    moves.apply(&mut parts(&mut buffers)?).map_err(to_py)
}

#[doc = doc!("scatter_slots")]
#[pyfunction]
pub fn scatter_slots<'py>(
    buffers: BufferList<'py>,
    slots: &Bound<'py, PyAny>,
    values: List<Bound<'py, PyAny>>,
) -> PyResult<()> {
    let slots = Input::<i64, 1>::new("slots", slots)?;
    let mut buffers = self::buffers(buffers, [("slots", slots.span())])?;
    let moves = slot_moves(&buffers, slots.slice(), slots.slice())?;
    let arrays = values.0;
    let mut values: Vec<Input<'_, u8, 3>> = memory::with_room(arrays.len(), "values").map_err(to_py)?;
    for value in &arrays {
        values.push(Input::new("values", value)?);
    }
    if values.len() != buffers.len() {
        return Err(shape_error(format!("values must have {} arrays, got {}", buffers.len(), values.len())));
    }
    for (Buffer { bytes: buffer, .. }, value) in buffers.iter().zip(&values) {
        expect_dims("values", value.dims, [buffer.dims[0], slots.dims[0], buffer.dims[2]])?;
    }
    for Buffer { bytes: buffer, .. } in &buffers {
        for value in &values {
            expect_apart([("buffers", buffer.span())], [("values", value.span())])?;
        }
    }
    let bytes = memory::collected(values.iter().map(Input::slice), "values").map_err(to_py)?;
    moves.scatter(&mut parts(&mut buffers)?, &bytes).map_err(to_py)
}

#[doc = doc!("checksum")]
#[pyfunction]
pub fn checksum(data: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(specpool_core::digest::checksum(Input::<u8, 1>::new("data", data)?.slice()))
}

#[doc = doc!("gather_pages")]
#[pyfunction]
pub fn gather_pages<'py>(
    buffers: List<Bound<'py, PyAny>>,
    pages: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
) -> PyResult<u64> {
    let py = out.py();
    let (pages, mut out) = (Input::<i32, 1>::new("pages", pages)?, Output::<u8, 1>::new("out", out)?);
    expect_apart([("out", out.span())], [("pages", pages.span())])?;
    let mut read: Vec<Input<'_, u8, 2>> = memory::with_room(buffers.0.len(), "buffers").map_err(to_py)?;
    for array in &buffers.0 {
        let buffer = Input::new("buffers", array)?;
        expect_apart([("out", out.span())], [("buffers", buffer.span())])?;
        read.push(buffer);
    }
    let parts = read.iter().map(|buffer| (buffer.slice(), buffer.dims[1]));
    let parts = memory::collected(parts, "buffers").map_err(to_py)?;
    let (pages, out) = (pages.slice(), out.slice());
    py.detach(|| pages::gather_pages(&parts, pages, out)).map_err(to_py)
}

#[doc = doc!("scatter_pages")]
#[pyfunction]
pub fn scatter_pages<'py>(
    buffers: List<Bound<'py, PyAny>>,
    pages: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
) -> PyResult<u64> {
    let py = pages.py();
    let (pages, values) = (Input::<i32, 1>::new("pages", pages)?, Input::<u8, 1>::new("values", values)?);
    let mut written: Vec<Output<'_, u8, 2>> = memory::with_room(buffers.0.len(), "buffers").map_err(to_py)?;
    for array in &buffers.0 {
        let buffer = Output::new("buffers", array)?;
        expect_apart([("buffers", buffer.span())], [("pages", pages.span()), ("values", values.span())])?;
        for other in &written {
            expect_apart([("buffers", buffer.span())], [("buffers", other.span())])?;
        }
        written.push(buffer);
    }
    let parts = written.iter_mut().map(|buffer| (buffer.dims[1], buffer.slice())).map(|(size, bytes)| (bytes, size));
    let mut parts = memory::collected(parts, "buffers").map_err(to_py)?;
    let (pages, values) = (pages.slice(), values.slice());
    py.detach(|| pages::scatter_pages(&mut parts, pages, values)).map_err(to_py)
}
