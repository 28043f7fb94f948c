//! Attention over pages for Python: writes the new tokens, then lets the queries attend.
#![allow(clippy::too_many_arguments, reason = "one parameter per argument of the Python function")]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use pyo3::prelude::*;
use specpool_core::forward::attention::{Lane, Layer, Scratch, attend, store};
use specpool_core::{Result, memory};

use crate::arrays::{Input, Output, ShapeInt, at_least, expect_apart, expect_dims};
use crate::errors::{shape_error, to_py};

/// With fewer reads than this, a call keeps the interpreter's lock, so other Python threads wait.
const BRIEF_BYTES: usize = 256 << 10;
/// Reads that justify a thread of their own.
const THREAD_BYTES: usize = 2 << 20;
/// The most threads of a call.
const MOST_THREADS: usize = 256;
/// What a thread takes at its start: a stack of 2 MiB, and blocks that nobody can refuse it without an abort.
const START_BYTES: usize = 4 << 20;
/// A block above this size comes from the system and goes back to it at once; `malloc` may keep smaller ones.
const LARGE_BYTES: usize = 32 << 20;

#[doc = doc!("attend_pages")]
#[pyfunction]
#[pyo3(signature = (
    keys, values, new_keys, new_values, write_slots, q, out, pages, kv_lens, q_lens, *, page_size, scaling, bias=None,
    window=None, softcap=None, sinks=None, num_threads=ShapeInt::of(1)
))]
pub fn attend_pages<'py>(
    py: Python<'py>,
    keys: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
    new_keys: &Bound<'py, PyAny>,
    new_values: &Bound<'py, PyAny>,
    write_slots: &Bound<'py, PyAny>,
    q: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
    pages: &Bound<'py, PyAny>,
    kv_lens: &Bound<'py, PyAny>,
    q_lens: &Bound<'py, PyAny>,
    page_size: ShapeInt,
    scaling: f32,
    bias: Option<&Bound<'py, PyAny>>,
    window: Option<ShapeInt>,
    softcap: Option<f32>,
    sinks: Option<&Bound<'py, PyAny>>,
    num_threads: ShapeInt,
) -> PyResult<()> {
    let mut arrays = Arrays {
        keys: Output::new("keys", keys)?,
        values: Output::new("values", values)?,
        out: Output::new("out", out)?,
        new_keys: Input::new("new_keys", new_keys)?,
        new_values: Input::new("new_values", new_values)?,
        write_slots: Input::new("write_slots", write_slots)?,
        q: Input::new("q", q)?,
        pages: Input::new("pages", pages)?,
        kv_lens: Input::new("kv_lens", kv_lens)?,
        q_lens: Input::new("q_lens", q_lens)?,
        bias: Input::optional("bias", bias)?,
        sinks: Input::optional("sinks", sinks)?,
    };
    let options = Options {
        page_size: at_least("page_size", page_size, 1)?,
        scaling,
        softcap,
        window: window.map(|window| at_least("window", window, 1)).transpose()?,
        num_threads: at_least("num_threads", num_threads, 1)?,
    };
    arrays.expect_apart()?;
    arrays.expect_fitting()?;
    arrays.attend(py, &options)
}

struct Options {
    page_size: usize,
    scaling: f32,
    softcap: Option<f32>,
    window: Option<usize>,
    num_threads: usize,
}

struct Arrays<'py> {
    keys: Output<'py, f32, 3>,
    values: Output<'py, f32, 3>,
    out: Output<'py, f32, 3>,
    new_keys: Input<'py, f32, 3>,
    new_values: Input<'py, f32, 3>,
    write_slots: Input<'py, i64, 1>,
    q: Input<'py, f32, 3>,
    pages: Input<'py, i32, 2>,
    kv_lens: Input<'py, i32, 1>,
    q_lens: Input<'py, i32, 1>,
    bias: Option<Input<'py, f32, 3>>,
    sinks: Option<Input<'py, f32, 1>>,
}

impl Arrays<'_> {
    /// Refuses outputs that share memory.
    fn expect_apart(&self) -> PyResult<()> {
        let written = [("keys", self.keys.span()), ("values", self.values.span()), ("out", self.out.span())];
        let read = [
            ("new_keys", self.new_keys.span()),
            ("new_values", self.new_values.span()),
            ("write_slots", self.write_slots.span()),
            ("q", self.q.span()),
            ("pages", self.pages.span()),
            ("kv_lens", self.kv_lens.span()),
            ("q_lens", self.q_lens.span()),
        ];
        expect_apart(written, read)?;
        for (name, array) in
            [("bias", self.bias.as_ref().map(Input::span)), ("sinks", self.sinks.as_ref().map(Input::span))]
        {
            if let Some(span) = array {
                expect_apart(written, [(name, span)])?;
            }
        }
        Ok(())
    }

    /// Refuses shapes that do not fit together, and invalid slots.
    fn expect_fitting(&self) -> PyResult<()> {
        let ([num_slots, kv_heads, k_dim], [_, _, v_dim]) = (self.keys.dims, self.values.dims);
        let [num_tokens, heads, _] = self.q.dims;
        let ([num_written], [num_lanes, _]) = (self.write_slots.dims, self.pages.dims);
        expect_dims("values", self.values.dims, [num_slots, kv_heads, v_dim])?;
        expect_dims("new_keys", self.new_keys.dims, [num_written, kv_heads, k_dim])?;
        expect_dims("new_values", self.new_values.dims, [num_written, kv_heads, v_dim])?;
        expect_dims("q", self.q.dims, [num_tokens, heads, k_dim])?;
        expect_dims("out", self.out.dims, [num_tokens, heads, v_dim])?;
        expect_dims("kv_lens", self.kv_lens.dims, [num_lanes])?;
        expect_dims("q_lens", self.q_lens.dims, [num_lanes])?;
        if let Some(bias) = &self.bias {
            expect_dims("bias", bias.dims, [num_lanes, self.most_queries(), bias.dims[2]])?;
        }
        if let Some(slot) = self.write_slots.slice().iter().find(|&&slot| !(0..num_slots as i64).contains(&slot)) {
            return Err(shape_error(format!("write_slots must be in [0, {num_slots}), got {slot}")));
        }
        Ok(())
    }

    /// Queries of the lane that has the most.
    fn most_queries(&self) -> usize {
        self.q_lens.slice().iter().copied().max().unwrap_or(0).max(0) as usize
    }

    /// Checks the lanes and takes the memory, then writes and attends.
    fn attend(&mut self, py: Python<'_>, options: &Options) -> PyResult<()> {
        let max_queries = self.most_queries();
        let ([_, kv_heads, k_dim], [_, heads, v_dim]) = (self.keys.dims, self.out.dims);
        let bias = self.bias.as_ref().map(|bias| (bias.slice(), max_queries, bias.dims[2]));
        let lanes =
            lanes_of(self.q.slice(), heads * k_dim, &self.pages, self.kv_lens.slice(), self.q_lens.slice(), bias)?;
        let (keys, values, out) = (self.keys.slice(), self.values.slice(), self.out.slice());
        let Options { page_size, scaling, softcap, window, num_threads } = *options;
        let sinks = self.sinks.as_ref().map(Input::slice);
        let sizes =
            Layer { keys: &[], values: &[], page_size, kv_heads, heads, k_dim, v_dim, scaling, softcap, sinks, window };
        let before = Layer { keys, values, ..sizes };
        before.check().map_err(to_py)?;
        for (number, lane) in lanes.iter().enumerate() {
            before.check_lane(number, lane).map_err(to_py)?;
        }
        let read_bytes = lanes.iter().map(|lane| before.read_bytes(lane)).sum::<usize>();
        let num_threads = num_threads.min(read_bytes / THREAD_BYTES + 1).min(MOST_THREADS);
        let mut work = Work::new(&before, &lanes, num_threads, out.len()).map_err(to_py)?;
        write(keys, self.new_keys.slice(), self.write_slots.slice(), kv_heads * k_dim);
        write(values, self.new_values.slice(), self.write_slots.slice(), kv_heads * v_dim);
        let layer = Layer { keys, values, ..sizes };
        if read_bytes < BRIEF_BYTES {
            return work.run(&layer, &lanes, out).map_err(to_py);
        }
        // The arrays stay borrowed, and no other call works on these pages.
        py.detach(|| work.run(&layer, &lanes, out)).map_err(to_py)
    }
}

/// The lanes, with their queries one lane after the other. `bias` is `[B, Q, columns]`, with Q and columns.
fn lanes_of<'a>(
    q: &'a [f32],
    token: usize,
    pages: &'a Input<'_, i32, 2>,
    kv_lens: &[i32],
    q_lens: &[i32],
    bias: Option<(&'a [f32], usize, usize)>,
) -> PyResult<Vec<Lane<'a>>> {
    let [num_lanes, columns] = pages.dims;
    let mut rest = q;
    let mut lanes = memory::with_room(num_lanes, "lanes").map_err(to_py)?;
    for (number, (&kv_len, &q_len)) in kv_lens.iter().zip(q_lens).enumerate() {
        let (Ok(kv_len), Ok(q_len)) = (usize::try_from(kv_len), usize::try_from(q_len)) else {
            return Err(shape_error(format!("kv_lens and q_lens must be 0 or more, got {kv_len} and {q_len}")));
        };
        let Some((queries, after)) = rest.split_at_checked(q_len.saturating_mul(token)) else {
            return Err(shape_error(format!("q_lens add up to more than the {} tokens of q", q.len() / token.max(1))));
        };
        rest = after;
        lanes.push(Lane {
            pages: &pages.slice()[number * columns..][..columns],
            kv_len,
            q_len,
            q: queries,
            bias: bias.map(|(bias, max_queries, width)| &bias[number * max_queries * width..][..q_len * width]),
            num_columns: bias.map_or(0, |(_, _, width)| width),
        });
    }
    if !rest.is_empty() {
        return Err(shape_error(format!("q_lens add up to less than the {} tokens of q", q.len() / token.max(1))));
    }
    Ok(lanes)
}

fn write(buffer: &mut [f32], new: &[f32], slots: &[i64], width: usize) {
    for (value, &slot) in new.chunks_exact(width).zip(slots) {
        buffer[slot as usize * width..][..width].copy_from_slice(value);
    }
}

/// Some KV heads of a lane, and the place of their result: `[heads of the range, q_len, v_dim]`.
struct Task<'a> {
    lane: usize,
    kv_heads: Range<usize>,
    result: &'a mut [f32],
}

/// All memory that a call needs. It is taken before anything is written.
struct Work {
    /// One scratch for each thread.
    scratches: Vec<Scratch>,
    /// KV heads of a task: all of them, if one thread does everything.
    heads: usize,
    /// The results of all tasks, if threads share them.
    results: Vec<f32>,
}

impl Work {
    fn new(layer: &Layer, lanes: &[Lane], num_threads: usize, out_len: usize) -> Result<Self> {
        let longest = lanes.iter().map(|lane| lane.q_len).max().unwrap_or(0);
        let num_threads = if has_room_for(num_threads) { num_threads } else { 1 };
        let parts = num_threads.div_ceil(lanes.len().max(1)).min(layer.kv_heads);
        let heads = layer.kv_heads.div_ceil(parts);
        let num_threads = num_threads.min(lanes.len() * layer.kv_heads.div_ceil(heads)).max(1);
        let mut scratches = memory::with_room(num_threads, "attention")?;
        for _ in 0..num_threads {
            let mut scratch = Scratch::default();
            scratch.reserve(layer, longest, heads)?;
            scratches.push(scratch);
        }
        let results = memory::zeroed(if num_threads > 1 { out_len } else { 0 }, "attention")?;
        Ok(Self { scratches, heads, results })
    }

    fn run(&mut self, layer: &Layer, lanes: &[Lane], out: &mut [f32]) -> Result<()> {
        if let [scratch] = &mut self.scratches[..] {
            return run_alone(layer, lanes, out, scratch);
        }
        self.spread(layer, lanes)?;
        let mut done = &self.results[..];
        let mut rest = out;
        for lane in lanes {
            let (lane_out, after) = rest.split_at_mut(lane.q_len * layer.heads * layer.v_dim);
            rest = after;
            for kv_heads in parts(layer, self.heads) {
                let (result, others) = done.split_at(result_len(layer, lane, &kv_heads));
                done = others;
                store(result, layer, &kv_heads, lane_out);
            }
        }
        Ok(())
    }

    /// Fills `results` with threads: each thread takes tasks until none is left. Threads that cannot be started are
    /// not needed.
    fn spread(&mut self, layer: &Layer, lanes: &[Lane]) -> Result<()> {
        let heads = self.heads;
        let mut rest = &mut self.results[..];
        let tasks = lanes
            .iter()
            .enumerate()
            .flat_map(|(lane, lane_view)| parts(layer, heads).map(move |part| (lane, lane_view, part)));
        let tasks = Mutex::new(tasks.map(|(lane, lane_view, kv_heads)| {
            let (result, others) = std::mem::take(&mut rest).split_at_mut(result_len(layer, lane_view, &kv_heads));
            rest = others;
            Task { lane, kv_heads, result }
        }));
        let next = || tasks.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = |scratch: &mut Scratch| -> Result<()> {
            while let Some(Task { lane, kv_heads, result }) = next() {
                attend(layer, &lanes[lane], kv_heads, scratch)?;
                result.copy_from_slice(scratch.out());
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let [first, others @ ..] = &mut self.scratches[..] else { return Ok(()) };
            for scratch in others {
                if Builder::new().spawn_scoped(scope, || work(scratch)).is_err() {
                    break;
                }
            }
            work(first)
        })
    }
}

/// Whether this many threads can start. If memory is short, a thread ends the process at its start.
fn has_room_for(num_threads: usize) -> bool {
    num_threads == 1 || memory::with_room::<u8>(LARGE_BYTES + num_threads * START_BYTES, "threads").is_ok()
}

/// The KV heads, in runs of `heads` or fewer.
fn parts(layer: &Layer, heads: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let all = layer.kv_heads;
    (0..all).step_by(heads).map(move |first| first..all.min(first + heads))
}

/// Numbers that attention gives for these KV heads of a lane.
fn result_len(layer: &Layer, lane: &Lane, kv_heads: &Range<usize>) -> usize {
    kv_heads.len() * (layer.heads / layer.kv_heads) * lane.q_len * layer.v_dim
}

fn run_alone(layer: &Layer, lanes: &[Lane], out: &mut [f32], scratch: &mut Scratch) -> Result<()> {
    let mut rest = out;
    for lane in lanes {
        let (lane_out, after) = rest.split_at_mut(lane.q_len * layer.heads * layer.v_dim);
        rest = after;
        attend(layer, lane, 0..layer.kv_heads, scratch)?;
        scratch.store(layer, &(0..layer.kv_heads), lane_out);
    }
    Ok(())
}
