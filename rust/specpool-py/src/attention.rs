//! Attention over pages for Python: the new tokens are written, then the queries attend.
#![allow(clippy::too_many_arguments, reason = "one parameter per argument of the Python function")]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;
use specpool_core::forward::attention::{Lane, Layer, Scratch, attend, store};

use crate::arrays::{Input, Output, ShapeInt, at_least, expect_dims};
use crate::errors::{shape_error, to_py};

/// Reads below which other Python threads wait rather than take turns with this one.
const BRIEF_BYTES: usize = 256 << 10;
/// Reads that are worth a thread of their own.
const THREAD_BYTES: usize = 2 << 20;

/// Writes new keys and values, then attends to what the pages hold.
#[pyfunction]
#[pyo3(signature = (
    keys, values, new_keys, new_values, write_slots, q, out, pages, kv_lens, q_lens, *, page_size, scaling, bias=None,
    window=None, softcap=None, sinks=None, num_threads=ShapeInt(1)
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
    let (mut keys, mut values) = (Output::<f32, 3>::new("keys", keys)?, Output::<f32, 3>::new("values", values)?);
    let new_keys = Input::<f32, 3>::new("new_keys", new_keys)?;
    let new_values = Input::<f32, 3>::new("new_values", new_values)?;
    let write_slots = Input::<i64, 1>::new("write_slots", write_slots)?;
    let (q, mut out) = (Input::<f32, 3>::new("q", q)?, Output::<f32, 3>::new("out", out)?);
    let pages = Input::<i32, 2>::new("pages", pages)?;
    let (kv_lens, q_lens) = (Input::<i32, 1>::new("kv_lens", kv_lens)?, Input::<i32, 1>::new("q_lens", q_lens)?);
    let bias = Input::<f32, 3>::optional("bias", bias)?;
    let sinks = Input::<f32, 1>::optional("sinks", sinks)?;
    let ([num_slots, kv_heads, k_dim], [_, _, v_dim]) = (keys.dims, values.dims);
    let ([num_tokens, heads, _], [num_written], [num_lanes, _]) = (q.dims, write_slots.dims, pages.dims);
    expect_dims("values", values.dims, [num_slots, kv_heads, v_dim])?;
    expect_dims("new_keys", new_keys.dims, [num_written, kv_heads, k_dim])?;
    expect_dims("new_values", new_values.dims, [num_written, kv_heads, v_dim])?;
    expect_dims("q", q.dims, [num_tokens, heads, k_dim])?;
    expect_dims("out", out.dims, [num_tokens, heads, v_dim])?;
    expect_dims("kv_lens", kv_lens.dims, [num_lanes])?;
    expect_dims("q_lens", q_lens.dims, [num_lanes])?;
    let most = q_lens.slice().iter().copied().max().unwrap_or(0).max(0) as usize;
    if let Some(bias) = &bias {
        expect_dims("bias", bias.dims, [num_lanes, most, bias.dims[2]])?;
    }
    if let Some(slot) = write_slots.slice().iter().find(|&&slot| !(0..num_slots as i64).contains(&slot)) {
        return Err(shape_error(format!("write_slots must be in [0, {num_slots}), got {slot}")));
    }
    let page_size = at_least("page_size", page_size, 1)?;
    let window = window.map(|window| at_least("window", window, 1)).transpose()?;
    let num_threads = at_least("num_threads", num_threads, 1)?;
    let sinks = sinks.as_ref().map(Input::slice);
    let lanes = lanes_of(
        q.slice(),
        heads * k_dim,
        &pages,
        kv_lens.slice(),
        q_lens.slice(),
        bias.as_ref().map(|bias| (bias.slice(), most, bias.dims[2])),
    )?;
    let (keys, values, out) = (keys.slice(), values.slice(), out.slice());
    let sizes =
        Layer { keys: &[], values: &[], page_size, kv_heads, heads, k_dim, v_dim, scaling, softcap, sinks, window };
    let before = Layer { keys, values, ..sizes };
    before.check().map_err(to_py)?;
    for (number, lane) in lanes.iter().enumerate() {
        before.check_lane(number, lane).map_err(to_py)?;
    }
    let read_bytes = lanes.iter().map(|lane| before.read_bytes(lane)).sum::<usize>();
    write(keys, new_keys.slice(), write_slots.slice(), kv_heads * k_dim);
    write(values, new_values.slice(), write_slots.slice(), kv_heads * v_dim);
    let layer = Layer { keys, values, ..sizes };
    let num_threads = num_threads.min(read_bytes / THREAD_BYTES + 1);
    if read_bytes < BRIEF_BYTES {
        run(&layer, &lanes, out);
    } else {
        // The arrays stay borrowed, and nobody else works on these pages.
        py.detach(
            || if num_threads == 1 { run(&layer, &lanes, out) } else { spread(&layer, &lanes, out, num_threads) },
        );
    }
    Ok(())
}

/// The lanes, whose queries stand one after the other; `bias` is `[B, Q, columns]` with Q and columns.
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
    let mut lanes = Vec::new();
    lanes.try_reserve_exact(num_lanes).map_err(|error| shape_error(format!("{num_lanes} lanes: {error}")))?;
    for (number, (&kv_len, &q_len)) in kv_lens.iter().zip(q_lens).enumerate() {
        let (Ok(kv_len), Ok(q_len)) = (usize::try_from(kv_len), usize::try_from(q_len)) else {
            return Err(shape_error(format!("kv_lens and q_lens must be 0 or more, got {kv_len} and {q_len}")));
        };
        let Some((mine, after)) = rest.split_at_checked(q_len.saturating_mul(token)) else {
            return Err(shape_error(format!("q_lens add up to more than the {} tokens of q", q.len() / token.max(1))));
        };
        rest = after;
        lanes.push(Lane {
            pages: &pages.slice()[number * columns..][..columns],
            kv_len,
            q_len,
            q: mine,
            bias: bias.map(|(bias, most, width)| &bias[number * most * width..][..q_len * width]),
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

fn run(layer: &Layer, lanes: &[Lane], out: &mut [f32]) {
    let (mut scratch, mut rest) = (Scratch::default(), out);
    for lane in lanes {
        let (mine, after) = rest.split_at_mut(lane.q_len * layer.heads * layer.v_dim);
        rest = after;
        attend(layer, lane, 0..layer.kv_heads, &mut scratch);
        scratch.store(layer, &(0..layer.kv_heads), mine);
    }
}

/// As [`run`], by threads of its own: each takes a lane, or some heads of one, until none is left.
fn spread(layer: &Layer, lanes: &[Lane], out: &mut [f32], num_threads: usize) {
    let parts = num_threads.div_ceil(lanes.len()).min(layer.kv_heads);
    let heads = layer.kv_heads.div_ceil(parts);
    let tasks: Vec<(usize, Range<usize>)> = (0..lanes.len())
        .flat_map(|lane| {
            (0..layer.kv_heads).step_by(heads).map(move |first| (lane, first..layer.kv_heads.min(first + heads)))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut scratch, mut done) = (Scratch::default(), Vec::new());
        while let Some((lane, heads)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            attend(layer, &lanes[*lane], heads.clone(), &mut scratch);
            done.push((*lane, heads.clone(), scratch.out().to_vec()));
        }
        done
    };
    let done = std::thread::scope(|scope| {
        let others: Vec<_> = (1..num_threads).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    let mut firsts = Vec::new();
    let mut first = 0;
    for lane in lanes {
        firsts.push(first);
        first += lane.q_len * layer.heads * layer.v_dim;
    }
    firsts.push(first);
    for (lane, heads, result) in done {
        store(&result, layer, &heads, &mut out[firsts[lane]..firsts[lane + 1]]);
    }
}
