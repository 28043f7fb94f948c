//! Attention of a few queries per lane over pages, on a CPU. It reads keys and values in place.
//!
//! A lane's columns are read block by block, each block once for all queries of the lane. The softmax is corrected as
//! it goes on (Milakov and Gimelshein, arXiv:1805.02867). Columns beyond a lane's own length are never read.
#![allow(clippy::inline_always, reason = "only what is inlined is compiled for the instructions chosen")]

use std::ops::Range;

use pulp::{Arch, Scalar, Simd, WithSimd};

use crate::check::same_len;
use crate::error::{Error, Result};
use crate::memory;

/// Columns that are scored before their values are added up: a block this small is still in the nearest cache then.
const BLOCK: usize = 32;

/// One layer's keys and values, and how its scores are computed.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'a> {
    /// `[num_slots, kv_heads, k_dim]`
    pub keys: &'a [f32],
    /// `[num_slots, kv_heads, v_dim]`
    pub values: &'a [f32],
    /// Slots of a page.
    pub page_size: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Numbers per key.
    pub k_dim: usize,
    /// Numbers per value.
    pub v_dim: usize,
    /// Factor of the scores.
    pub scaling: f32,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// `[heads]`: extra scores that take part in the softmax only.
    pub sinks: Option<&'a [f32]>,
    /// The most columns that a causal query sees, its own included.
    pub window: Option<usize>,
}

/// One lane's queries and the columns that they see.
#[derive(Debug, Clone, Copy)]
pub struct Lane<'a> {
    /// The page of each run of `page_size` columns.
    pub pages: &'a [i32],
    /// No query sees this column or a later one.
    pub kv_len: usize,
    /// Number of queries.
    pub q_len: usize,
    /// `[q_len, heads, k_dim]`
    pub q: &'a [f32],
    /// `[q_len, num_columns]`, added to the scores; `None` = query i sees all columns up to `kv_len - q_len + i`.
    pub bias: Option<&'a [f32]>,
    /// `num_columns` of `bias`.
    pub num_columns: usize,
}

impl Layer<'_> {
    /// Refuses sizes that do not fit together, and a softcap of 0 or below.
    ///
    /// # Errors
    /// [`Error::Shape`] names the first size that does not fit.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("page_size", self.page_size),
            ("kv_heads", self.kv_heads),
            ("heads", self.heads),
            ("k_dim", self.k_dim),
            ("v_dim", self.v_dim),
        ] {
            if value == 0 {
                return Err(Error::Shape(format!("{name} must be 1 or more, got 0")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::Shape(format!("{} heads must be a multiple of {} KV heads", self.heads, self.kv_heads)));
        }
        let num_slots = self.num_slots();
        same_len("keys", self.keys.len(), num_slots * self.kv_heads * self.k_dim)?;
        same_len("values", self.values.len(), num_slots * self.kv_heads * self.v_dim)?;
        if let Some(softcap) = self.softcap.filter(|softcap| softcap.is_nan() || *softcap <= 0.0) {
            return Err(Error::Shape(format!("softcap must be above 0, got {softcap}")));
        }
        self.sinks.map_or(Ok(()), |sinks| same_len("sinks", sinks.len(), self.heads))
    }

    /// Refuses a lane if not all of its columns lie in the buffers. It reads no key or value before that.
    ///
    /// # Errors
    /// [`Error::Shape`] with the numbers.
    pub fn check_lane(&self, number: usize, lane: &Lane) -> Result<()> {
        let Lane { pages, kv_len, q_len, .. } = *lane;
        let max_len = pages.len().saturating_mul(self.page_size);
        let min_len = if lane.bias.is_some() { 1 } else { q_len };
        if kv_len > max_len || (kv_len < min_len && q_len > 0) {
            return Err(Error::Shape(format!("kv_lens[{number}] must be in [{min_len}, {max_len}], got {kv_len}")));
        }
        let num_pages = self.num_slots() / self.page_size;
        for (column, &page) in pages[..kv_len.div_ceil(self.page_size)].iter().enumerate() {
            if usize::try_from(page).map_or(true, |page| page >= num_pages) {
                return Err(Error::Shape(format!("pages[{number}, {column}] must be in [0, {num_pages}), got {page}")));
            }
        }
        same_len("q", lane.q.len(), q_len * self.heads * self.k_dim)?;
        if lane.bias.is_some_and(|bias| bias.len() != q_len * lane.num_columns || kv_len > lane.num_columns) {
            return Err(Error::Shape(format!("bias of lane {number} must be [{q_len}, {kv_len} or more]")));
        }
        Ok(())
    }

    fn num_slots(&self) -> usize {
        self.keys.len() / (self.kv_heads * self.k_dim)
    }

    /// Bytes of keys and values that attending for a lane reads.
    #[must_use]
    pub fn read_bytes(&self, lane: &Lane) -> usize {
        4 * lane.kv_len * self.kv_heads * (self.k_dim + self.v_dim)
    }
}

/// Working memory of [`attend`], reused from lane to lane, and its result.
#[derive(Debug, Default)]
pub struct Scratch {
    /// `[rows, BLOCK]`, where a row is a query head's query: head by head, its queries in order.
    scores: Vec<f32>,
    /// `[rows]`: the greatest score so far, and the sum of the exponentials relative to it.
    best: Vec<f32>,
    sum: Vec<f32>,
    /// `[rows, v_dim]`
    out: Vec<f32>,
    /// A sum of the numbers that [`fetch`] read; it only keeps the reads from being optimized away.
    fetched: f32,
}

impl Scratch {
    /// Takes the memory for `q_len` queries of that many KV heads. [`attend`] then takes none for these sizes or
    /// smaller ones.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]
    pub fn reserve(&mut self, layer: &Layer, q_len: usize, kv_heads: usize) -> Result<()> {
        let rows = kv_heads * (layer.heads / layer.kv_heads) * q_len;
        let sizes = [
            (&mut self.scores, rows * BLOCK),
            (&mut self.best, rows),
            (&mut self.sum, rows),
            (&mut self.out, rows * layer.v_dim),
        ];
        for (values, len) in sizes {
            let more = len.saturating_sub(values.len());
            memory::room(values, more, "attention")?;
        }
        Ok(())
    }

    /// The result of the latest [`attend`]: `[heads of the range, q_len, v_dim]`.
    #[must_use]
    pub fn out(&self) -> &[f32] {
        &self.out
    }

    /// Copies the latest result of these KV heads into the lane's `[q_len, heads, v_dim]`.
    pub fn store(&self, layer: &Layer, kv_heads: &Range<usize>, out: &mut [f32]) {
        store(&self.out, layer, kv_heads, out);
    }
}

/// Copies a result of [`attend`] into the lane's `[q_len, heads, v_dim]`.
pub fn store(result: &[f32], layer: &Layer, kv_heads: &Range<usize>, out: &mut [f32]) {
    let (groups, dim) = (layer.heads / layer.kv_heads, layer.v_dim);
    let first = kv_heads.start * groups;
    let q_len = out.len() / (layer.heads * dim);
    for (row, value) in result.chunks_exact(dim).enumerate() {
        let (head, query) = (first + row / q_len, row % q_len);
        out[(query * layer.heads + head) * dim..][..dim].copy_from_slice(value);
    }
}

/// Attends for some KV heads of a lane. [`Layer::check`] and [`Layer::check_lane`] must have accepted the lane.
///
/// # Errors
/// [`Error::OutOfMemory`], unless [`Scratch::reserve`] has taken enough memory.
pub fn attend(layer: &Layer, lane: &Lane, kv_heads: Range<usize>, scratch: &mut Scratch) -> Result<()> {
    thread_local!(static ARCH: Arch = Arch::new());
    scratch.reserve(layer, lane.q_len, kv_heads.len())?;
    ARCH.with(|arch| arch.dispatch(Attend { layer, lane, kv_heads, scratch }));
    Ok(())
}

struct Attend<'a> {
    layer: &'a Layer<'a>,
    lane: &'a Lane<'a>,
    kv_heads: Range<usize>,
    scratch: &'a mut Scratch,
}

impl WithSimd for Attend<'_> {
    type Output = ();

    /// Heads of the usual sizes get specialized code, whose loops over a head have a constant length.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let dims = |dim| Layer { k_dim: dim, v_dim: dim, ..*self.layer };
        match (self.layer.k_dim, self.layer.v_dim) {
            (32, 32) => self.run(simd, &dims(32)),
            (64, 64) => self.run(simd, &dims(64)),
            (128, 128) => self.run(simd, &dims(128)),
            _ => {
                let layer = self.layer;
                self.run(simd, layer);
            }
        }
    }
}

impl Attend<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S, layer: &Layer) {
        let Self { lane, kv_heads, scratch, .. } = self;
        let groups = layer.heads / layer.kv_heads;
        let rows = kv_heads.len() * groups * lane.q_len;
        scratch.scores.resize(rows * BLOCK, 0.0);
        scratch.best.clear();
        scratch.best.resize(rows, f32::NEG_INFINITY);
        scratch.sum.clear();
        scratch.sum.resize(rows, 0.0);
        scratch.out.clear();
        scratch.out.resize(rows * layer.v_dim, 0.0);
        let mut slots = [0; BLOCK];
        let mut first = first_column(layer, lane);
        while first < lane.kv_len {
            let count = BLOCK.min(lane.kv_len - first);
            for (slot, column) in slots[..count].iter_mut().zip(first..) {
                *slot = lane.pages[column / layer.page_size] as usize * layer.page_size + column % layer.page_size;
            }
            let block = Block { slots: &slots[..count], first };
            score(simd, layer, lane, &kv_heads, &block, &mut scratch.scores);
            soften(simd, lane, layer, &block, 0..rows, scratch);
            fetch(layer, &kv_heads, &block, &mut scratch.fetched);
            for (number, head) in kv_heads.clone().enumerate() {
                let rows = number * groups * lane.q_len..(number + 1) * groups * lane.q_len;
                add_values(simd, layer, head, &block, rows, scratch);
            }
            first += count;
        }
        finish(layer, lane, &kv_heads, scratch);
    }
}

/// Columns `[first, first + slots.len())` and their slots.
struct Block<'a> {
    slots: &'a [usize],
    first: usize,
}

/// The first column that any query of the lane sees.
fn first_column(layer: &Layer, lane: &Lane) -> usize {
    match (lane.bias, layer.window) {
        (None, Some(window)) => (lane.kv_len + 1).saturating_sub(lane.q_len + window),
        _ => 0,
    }
}

/// Computes `scores[row, j]`. It reads the keys in the order in which they lie in memory.
#[inline(always)]
fn score<S: Simd>(simd: S, layer: &Layer, lane: &Lane, kv_heads: &Range<usize>, block: &Block, scores: &mut [f32]) {
    let (dim, q_len) = (layer.k_dim, lane.q_len);
    let groups = layer.heads / layer.kv_heads;
    for (j, slot) in block.slots.iter().enumerate() {
        let mut row = 0;
        for head in kv_heads.clone() {
            let key = &layer.keys[(slot * layer.kv_heads + head) * dim..][..dim];
            for group in 0..groups {
                for query in 0..q_len {
                    let q = &lane.q[(query * layer.heads + head * groups + group) * dim..][..dim];
                    scores[row * BLOCK + j] = dot(simd, q, key);
                    row += 1;
                }
            }
        }
    }
}

/// Reads one number of each cache line of the block's values, in order. Many lines are then loaded at the same time;
/// the sums, head after head, would wait for each line.
#[inline(always)]
fn fetch(layer: &Layer, kv_heads: &Range<usize>, block: &Block, fetched: &mut f32) {
    const LINE: usize = 16;
    let token = layer.kv_heads * layer.v_dim;
    for slot in block.slots {
        let values = &layer.values[slot * token..][kv_heads.start * layer.v_dim..kv_heads.end * layer.v_dim];
        for value in values.iter().step_by(LINE) {
            *fetched += value;
        }
    }
}

#[inline(always)]
fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let (a_head, a_tail) = S::as_simd_f32s(a);
    let (b_head, b_tail) = S::as_simd_f32s(b);
    let zero = simd.splat_f32s(0.0);
    let (mut even, mut odd) = (zero, zero);
    let (a_pairs, a_last) = a_head.as_chunks::<2>();
    let (b_pairs, b_last) = b_head.as_chunks::<2>();
    for (x, y) in a_pairs.iter().zip(b_pairs) {
        even = simd.mul_add_e_f32s(x[0], y[0], even);
        odd = simd.mul_add_e_f32s(x[1], y[1], odd);
    }
    for (x, y) in a_last.iter().zip(b_last) {
        even = simd.mul_add_e_f32s(*x, *y, even);
    }
    let mut sum = simd.reduce_sum_f32s(simd.add_f32s(even, odd));
    for (x, y) in a_tail.iter().zip(b_tail) {
        sum += x * y;
    }
    sum
}

/// Turns the scores into weights, and rescales the sums of earlier blocks.
#[inline(always)]
fn soften<S: Simd>(simd: S, lane: &Lane, layer: &Layer, block: &Block, rows: Range<usize>, scratch: &mut Scratch) {
    let count = block.slots.len();
    for row in rows {
        let scores = &mut scratch.scores[row * BLOCK..][..BLOCK];
        for score in &mut *scores {
            *score *= layer.scaling;
        }
        if let Some(softcap) = layer.softcap {
            for score in &mut scores[..count] {
                *score = (*score / softcap).tanh() * softcap;
            }
        }
        hide(lane, layer, block, row % lane.q_len, scores);
        scores[count..].fill(f32::NEG_INFINITY);
        let mut greatest = [scratch.best[row]; 8];
        for part in scores.as_chunks::<8>().0 {
            for (best, score) in greatest.iter_mut().zip(part) {
                *best = if *score > *best { *score } else { *best };
            }
        }
        let best = greatest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Either nothing is seen so far, or a score is NaN, which must reach the result.
        let base = if best == f32::NEG_INFINITY { 0.0 } else { best };
        let (bases, mut sums) = (simd.splat_f32s(base), simd.splat_f32s(0.0));
        for part in S::as_mut_simd_f32s(scores).0 {
            *part = exp(simd, simd.sub_f32s(*part, bases));
            sums = simd.add_f32s(sums, *part);
        }
        let correction = exp_of(scratch.best[row] - base);
        scratch.sum[row] = scratch.sum[row] * correction + simd.reduce_sum_f32s(sums);
        scratch.best[row] = best;
        if correction < 1.0 {
            for value in &mut scratch.out[row * layer.v_dim..][..layer.v_dim] {
                *value *= correction;
            }
        }
    }
}

/// Adds the bias to the scores of one query, or hides the columns that the query must not see.
#[inline(always)]
fn hide(lane: &Lane, layer: &Layer, block: &Block, query: usize, scores: &mut [f32]) {
    let count = block.slots.len();
    if let Some(bias) = lane.bias {
        let bias = &bias[query * lane.num_columns + block.first..][..count];
        for (score, bias) in scores.iter_mut().zip(bias) {
            *score += bias;
        }
        return;
    }
    let end = lane.kv_len + 1 + query - lane.q_len;
    let start = layer.window.map_or(0, |window| end.saturating_sub(window));
    let seen = start.saturating_sub(block.first).min(count)..end.saturating_sub(block.first).min(count);
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
}

/// `out[row] += weights[row] @ values` of one KV head.
#[inline(always)]
fn add_values<S: Simd>(simd: S, layer: &Layer, head: usize, block: &Block, rows: Range<usize>, scratch: &mut Scratch) {
    /// Sums that are kept in registers.
    const KEPT: usize = 8;
    let dim = layer.v_dim;
    for row in rows {
        let weights = &scratch.scores[row * BLOCK..][..block.slots.len()];
        let (sums, tail) = S::as_mut_simd_f32s(&mut scratch.out[row * dim..][..dim]);
        let width = dim - tail.len();
        let lanes = S::F32_LANES;
        for (part, sums) in sums.chunks_mut(KEPT).enumerate() {
            let places = part * KEPT * lanes..width.min((part + 1) * KEPT * lanes);
            let mut accumulators = [simd.splat_f32s(0.0); KEPT];
            accumulators[..sums.len()].copy_from_slice(sums);
            for (slot, weight) in block.slots.iter().zip(weights) {
                let value = &layer.values[(slot * layer.kv_heads + head) * dim..][places.clone()];
                let weight = simd.splat_f32s(*weight);
                for (sum, value) in accumulators.iter_mut().zip(S::as_simd_f32s(value).0) {
                    *sum = simd.mul_add_e_f32s(weight, *value, *sum);
                }
            }
            sums.copy_from_slice(&accumulators[..sums.len()]);
        }
        for (column, sum) in (width..dim).zip(tail) {
            for (slot, weight) in block.slots.iter().zip(weights) {
                *sum += weight * layer.values[(slot * layer.kv_heads + head) * dim + column];
            }
        }
    }
}

/// Adds the sinks to the sums, and divides by the sums.
#[inline(always)]
fn finish(layer: &Layer, lane: &Lane, kv_heads: &Range<usize>, scratch: &mut Scratch) {
    let groups = layer.heads / layer.kv_heads;
    for (row, out) in scratch.out.chunks_exact_mut(layer.v_dim).enumerate() {
        let mut factor = 1.0;
        let mut sum = scratch.sum[row];
        if let Some(sinks) = layer.sinks {
            let sink = sinks[kv_heads.start * groups + row / lane.q_len];
            let best = scratch.best[row].max(sink);
            factor = exp_of(scratch.best[row] - best);
            sum = sum * factor + exp_of(sink - best);
        }
        let factor = if sum == 0.0 { 0.0 } else { factor / sum };
        for value in out {
            *value *= factor;
        }
    }
}

/// `e^x` for x <= 0, with a relative error of about 1e-7; 0 if the result is below the least normal number. The
/// polynomial is that of Cephes' `expf`.
#[inline(always)]
fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to whole numbers
    let splat = |number| simd.splat_f32s(number);
    let shifted = simd.add_f32s(simd.mul_f32s(x, splat(std::f32::consts::LOG2_E)), splat(ROUND));
    let whole = simd.sub_f32s(shifted, splat(ROUND));
    let rest = simd.mul_add_e_f32s(whole, splat(-0.693_359_4), x);
    let rest = simd.mul_add_e_f32s(whole, splat(2.121_944_4e-4), rest);
    let mut sum = splat(1.987_569_1e-4);
    for term in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1.0, 1.0] {
        sum = simd.mul_add_e_f32s(sum, rest, splat(term));
    }
    let exponent = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let power = simd.transmute_f32s_u32s(simd.add_u32s(exponent, simd.splat_u32s(127 << 23)));
    let is_tiny = simd.less_than_f32s(x, splat(-87.0));
    simd.select_f32s(is_tiny, splat(0.0), simd.mul_f32s(sum, power))
}

/// `e^x` of one number.
#[inline(always)]
fn exp_of(x: f32) -> f32 {
    exp(Scalar::new(), x)
}

#[cfg(test)]
mod tests {
    use super::exp_of;

    #[test]
    fn exp_is_close_below_zero() {
        for step in 0..8_700_u16 {
            let x = -f32::from(step) * 1e-2;
            let (approximated, right) = (f64::from(exp_of(x)), f64::from(x).exp());
            assert!((approximated / right - 1.0).abs() < 3e-7, "exp({x}) = {approximated}, {right}");
        }
        assert_eq!(exp_of(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp_of(f32::NEG_INFINITY).to_bits(), 0);
        assert!(exp_of(f32::NAN).is_nan());
    }
}
