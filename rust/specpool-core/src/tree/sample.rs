//! The seeded draw: a counter-based uniform and the inverse CDF over token ids.
//!
//! The token at a position depends on the logits, the request's parameters, its seed and the position. It never
//! depends on depth, shape, batch or history. So speculative text equals plain sampling.
//!
//! A CUDA kernel repeats the draw bit for bit, in whatever order it sums. A token's weight is a whole number:
//! `exp((logit - max) / temperature) * 2^34`, rounded to even. The exponential uses plain IEEE f32 steps (no libm, no
//! fused multiply-add). At most [`MAX_VOCAB`] weights add up to `2^53`, so every sum is exact in f64.

use crate::check::same_len;
use crate::error::{Error, Result};
use crate::memory::{room, with_room};

/// Ids per partial sum.
pub const CHUNK: usize = 256;

/// Most columns of the logits, so that sums are exact.
pub const MAX_VOCAB: usize = 1 << 19;

/// The weight of the most likely token, `2^34`.
const ONE: f32 = 17_179_869_184.0;

/// A temperature below `2^-100` counts as 0, so that a GPU that flushes tiny numbers draws the same token.
const MIN_TEMPERATURE: f32 = 7.888_609e-31;

/// The sampling parameters of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    /// 0 (or less than `2^-100`) = argmax (the lowest id on ties).
    pub temperature: f32,
    /// Keep this many of the most likely tokens; on ties keep the lower ids; 0 = all.
    pub top_k: i32,
    /// Then keep the smallest set of most likely tokens whose share of the rest is `>= top_p`; on ties keep the lower
    /// ids; 1 = all.
    pub top_p: f32,
    /// Of these, drop each token that is less likely than this share of the likeliest one; 0 = none, at most 1.
    pub min_p: f32,
    /// The random number, in `[0, 1)`.
    pub u: f64,
}

/// A draw, and how close another outcome was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// The token, or -1 where the logits hold a NaN, +inf, or nothing but -inf.
    pub token: i64,
    /// The smallest change that gives another token: see [`draw`].
    pub margin: f64,
}

/// `u(seed, position)` in `[0, 1)`: the first two words of Philox4x32-10 (Salmon et al., SC 2011) with key `seed`
/// and counter `(position, 0)`, as a 53-bit fraction.
///
/// # Examples
/// ```
/// let u = specpool_core::tree::sample::uniform(7, 0);
/// assert!((0.0..1.0).contains(&u) && u == specpool_core::tree::sample::uniform(7, 0));
/// ```
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
pub fn uniform(seed: u64, position: u64) -> f64 {
    let words = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[1]) << 32 | u64::from(words[0])) >> 11;
    bits as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// Philox4x32 with ten rounds.
#[must_use]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let (x, y) = (u64::from(a) * 0xD251_1F53, u64::from(c) * 0xCD9E_8D57);
        (a, b, c, d) = ((y >> 32) as u32 ^ b ^ k0, y as u32, (x >> 32) as u32 ^ d ^ k1, x as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [a, b, c, d]
}

/// Draws one token per row of `logits` `[n, vocab]`.
///
/// # Errors
/// [`Error::Shape`] when lengths do not fit, or a parameter is out of range, naming its row.
pub fn sample_tokens(logits: &[f32], vocab: usize, params: &[SampleParams]) -> Result<Vec<i64>> {
    check(logits, vocab, params)?;
    let (mut scratch, mut tokens) = (Scratch::of(vocab)?, with_room(params.len(), "tokens")?);
    tokens.extend(logits.chunks_exact(vocab).zip(params).map(|(row, p)| draw(row, p, &mut scratch, false).token));
    Ok(tokens)
}

/// As [`sample_tokens`], but returns how close each draw was to another outcome (see [`draw`]); NaN if the row has no
/// token.
///
/// # Errors
/// As [`sample_tokens`].
pub fn sample_margins(logits: &[f32], vocab: usize, params: &[SampleParams]) -> Result<Vec<f64>> {
    check(logits, vocab, params)?;
    let (mut scratch, mut margins) = (Scratch::of(vocab)?, with_room(params.len(), "margins")?);
    margins.extend(logits.chunks_exact(vocab).zip(params).map(|(row, p)| draw(row, p, &mut scratch, true).margin));
    Ok(margins)
}

fn check(logits: &[f32], vocab: usize, params: &[SampleParams]) -> Result<()> {
    if vocab == 0 || vocab > MAX_VOCAB {
        return Err(Error::Shape(format!("logits must have 1 to {MAX_VOCAB} columns, got {vocab}")));
    }
    same_len("logits", logits.len(), params.len().saturating_mul(vocab))?;
    for (row, p) in params.iter().enumerate() {
        if !(p.temperature >= 0.0 && p.temperature.is_finite()) {
            return Err(Error::Shape(format!("temperature[{row}] must be in [0, inf), got {}", p.temperature)));
        }
        if p.top_k < 0 {
            return Err(Error::Shape(format!("top_k[{row}] must be 0 (all) or more, got {}", p.top_k)));
        }
        if !(p.top_p > 0.0 && p.top_p <= 1.0) {
            return Err(Error::Shape(format!("top_p[{row}] must be in (0, 1], got {}", p.top_p)));
        }
        if !(0.0..=1.0).contains(&p.min_p) {
            return Err(Error::Shape(format!("min_p[{row}] must be in [0, 1], got {}", p.min_p)));
        }
        if !(0.0..1.0).contains(&p.u) {
            return Err(Error::Shape(format!("u[{row}] must be in [0, 1), got {}", p.u)));
        }
    }
    Ok(())
}

/// Buffers that all rows share, each at most one row wide.
#[derive(Debug, Default)]
pub struct Scratch {
    sums: Vec<f64>,  // one per chunk of ids
    order: Vec<u64>, // ids, at first with their logits as sort keys
}

impl Scratch {
    /// Takes the buffers for rows of `vocab` ids; no draw needs more.
    fn of(vocab: usize) -> Result<Self> {
        let mut scratch = Self::default();
        room(&mut scratch.sums, vocab.div_ceil(CHUNK), "sums of weights")?;
        room(&mut scratch.order, vocab, "ids in their order")?;
        Ok(scratch)
    }
}

/// Draws one token by inverse CDF over token ids: the least id whose cumulative weight exceeds `u` times the total.
///
/// The margin is the least of four distances: of `u` to the edges of the token's interval, if another token lies
/// beyond them; of the mass kept by top-p to `top_p`; the gap in `logit / temperature` between the last token kept
/// by top-k or top-p and the next token; and that between min-p's limit and the nearest token. At temperature 0 it is the gap between the two greatest logits (only on
/// request, because it costs a pass). It is infinite if no other token is possible.
pub fn draw(logits: &[f32], params: &SampleParams, scratch: &mut Scratch, with_margin: bool) -> Draw {
    let none = Draw { token: -1, margin: f64::NAN };
    let Some(max) = finite_max(logits) else { return none };
    if params.temperature < MIN_TEMPERATURE {
        let token = logits.iter().position(|&x| x >= max).unwrap_or(0);
        let margin = if with_margin { gap_to_second(logits, token) } else { f64::NAN };
        return Draw { token: token as i64, margin };
    }
    let weigh = Weigh { max, temperature: params.temperature };
    let all_k = params.top_k == 0 || params.top_k as usize >= logits.len();
    if all_k && params.top_p >= 1.0 && params.min_p <= 0.0 {
        return draw_from_all(logits, &weigh, params.u, &mut scratch.sums);
    }
    let cut = keep(logits, &weigh, params, scratch);
    let mut drawn = draw_from(logits, &weigh, params.u, &scratch.order);
    drawn.margin = drawn.margin.min(cut);
    drawn
}

/// The greatest logit, or `None` if the row holds a NaN, +inf, or nothing but -inf.
fn finite_max(logits: &[f32]) -> Option<f32> {
    // Eight lanes, so that the compiler can keep them in registers. A NaN never compares, so it is searched for
    // separately.
    let mut lanes = [f32::NEG_INFINITY; 8];
    let mut nan = [false; 8];
    let rows = logits.chunks_exact(8);
    let tail = rows.remainder();
    for chunk in rows {
        for i in 0..8 {
            nan[i] |= chunk[i].is_nan();
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    let max = lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max);
    let nan = nan.contains(&true) || tail.iter().any(|x| x.is_nan());
    (!nan && max.is_finite()).then_some(max)
}

fn gap_to_second(logits: &[f32], token: usize) -> f64 {
    let others = logits.iter().enumerate().filter(|&(id, _)| id != token);
    let second = others.map(|(_, &x)| x).fold(f32::NEG_INFINITY, f32::max);
    f64::from(logits[token]) - f64::from(second)
}

/// A token's unnormalized probability, a whole number.
struct Weigh {
    max: f32,
    temperature: f32,
}

impl Weigh {
    fn of(&self, logit: f32) -> f64 {
        const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52: adding it rounds to the nearest integer
        f64::from(exp((logit - self.max) / self.temperature) * ONE) + ROUND - ROUND
    }

    fn gap(&self, more: f32, less: f32) -> f64 {
        (f64::from(more) - f64::from(less)) / f64::from(self.temperature)
    }
}

/// `e^x` for `x <= 0`: Cody-Waite reduction and the polynomial of Cephes `expf` (2 ulp); 0 below -87.
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to the nearest integer
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let mantissa = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000));
    if x < -87.0 { 0.0 } else { mantissa * scale }
}

/// Draws in two passes over the row and one over a single chunk.
fn draw_from_all(logits: &[f32], weigh: &Weigh, u: f64, sums: &mut Vec<f64>) -> Draw {
    let total = sum_chunks(logits, weigh, sums);
    let aim = u * total;
    // The aim stays below the total: u is at most 1 - 2^-53, and the total is a whole number of at most 2^53.
    let (mut chunk, mut below) = (0, 0.0);
    while chunk + 1 < sums.len() && below + sums[chunk] <= aim {
        below += sums[chunk];
        chunk += 1;
    }
    let first = chunk * CHUNK;
    let weights = chunk_weights(&logits[first..(first + CHUNK).min(logits.len())], weigh);
    let drawn = walk((first..).zip(weights), below, aim);
    Draw { token: drawn.0 as i64, margin: edge_distance(drawn.1, drawn.2, aim, total) }
}

/// The weight of each run of [`CHUNK`] ids, and of all.
fn sum_chunks(logits: &[f32], weigh: &Weigh, sums: &mut Vec<f64>) -> f64 {
    sums.clear();
    sums.extend(logits.chunks(CHUNK).map(|chunk| chunk_sum(chunk, weigh)));
    sums.iter().sum()
}

/// Weights, computed apart from their sums: the compiler vectorizes each loop only if it stands alone.
fn chunk_weights(chunk: &[f32], weigh: &Weigh) -> [f64; CHUNK] {
    let mut weights = [0.0; CHUNK];
    for (weight, &logit) in weights.iter_mut().zip(chunk) {
        *weight = weigh.of(logit);
    }
    weights
}

fn chunk_sum(chunk: &[f32], weigh: &Weigh) -> f64 {
    let mut parts = [0.0_f64; 4];
    for four in chunk_weights(chunk, weigh).chunks(4).take(chunk.len().div_ceil(4)) {
        for i in 0..4 {
            parts[i] += four[i];
        }
    }
    (parts[0] + parts[1]) + (parts[2] + parts[3])
}

/// The least id whose cumulative weight exceeds `aim`, with its interval.
fn walk(weights: impl Iterator<Item = (usize, f64)>, mut below: f64, aim: f64) -> (usize, f64, f64) {
    let mut drawn = (0, below, below);
    for (id, weight) in weights {
        if weight > 0.0 {
            let above = below + weight;
            drawn = (id, below, above);
            if above > aim {
                break;
            }
            below = above;
        }
    }
    drawn
}

/// The distance of the aim to an inner edge of `[below, above)`, as a share of the total.
fn edge_distance(below: f64, above: f64, aim: f64, total: f64) -> f64 {
    let lower = if below > 0.0 { aim - below } else { f64::INFINITY };
    let upper = if above < total { above - aim } else { f64::INFINITY };
    (lower.min(upper) / total).max(0.0)
}

/// A sort key: more likely tokens first, ties by id. Its low half is the id.
fn likelier_first(logit: f32, id: usize) -> u64 {
    let bits = (logit + 0.0).to_bits(); // -0 becomes 0, which it equals
    let descending = if bits >> 31 == 1 { bits } else { !bits ^ (1 << 31) };
    u64::from(descending) << 32 | id as u64
}

fn id_of(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
}

/// Leaves the ids that top-k, then top-p and then min-p keep in `scratch.order`, ascending; returns how close the cut was.
fn keep(logits: &[f32], weigh: &Weigh, params: &SampleParams, scratch: &mut Scratch) -> f64 {
    let weight = |id: u64| weigh.of(logits[id_of(id)]);
    let order = &mut scratch.order;
    order.clear();
    order.extend(logits.iter().enumerate().map(|(id, &logit)| likelier_first(logit, id)));
    let mut margin = f64::INFINITY;
    let k = params.top_k as usize;
    if k > 0 && k < order.len() {
        let (head, next, _) = order.select_nth_unstable(k);
        let last = head.iter().max().map_or(0, |&key| id_of(key));
        margin = weigh.gap(logits[last], logits[id_of(*next)]);
        order.truncate(k);
        order.sort_unstable();
    }
    if params.top_p < 1.0 {
        let cut = order.len() < logits.len();
        let total =
            if cut { order.iter().map(|&key| weight(key)).sum() } else { sum_chunks(logits, weigh, &mut scratch.sums) };
        let need = f64::from(params.top_p) * total;
        // Sort only the part of the head that the mass needs.
        let (mut sorted, mut num_kept, mut mass) = (if cut { order.len() } else { 0 }, 0, 0.0);
        while num_kept < order.len() && mass < need {
            if num_kept == sorted {
                let head = (sorted * 4).max(256).min(order.len());
                if head < order.len() {
                    order[sorted..].select_nth_unstable(head - sorted);
                }
                order[sorted..head].sort_unstable();
                sorted = head;
            }
            mass += weight(order[num_kept]);
            num_kept += 1;
        }
        let last = order[num_kept - 1];
        margin = margin.min((mass - need) / total).min((need - (mass - weight(last))) / total);
        if let Some(&next) = order[num_kept..].iter().min() {
            margin = margin.min(weigh.gap(logits[id_of(last)], logits[id_of(next)]));
        }
        order.truncate(num_kept);
    }
    if params.min_p > 0.0 {
        margin = drop_unlikely(logits, weigh, params.min_p, order, margin);
    }
    for key in order.iter_mut() {
        *key = id_of(*key) as u64;
    }
    order.sort_unstable();
    margin
}

/// Drops the tokens below min-p's limit; returns `margin`, or the gap between that limit and the nearest token.
///
/// The likeliest token weighs [`ONE`], so the limit is exact on any device. It is always kept.
fn drop_unlikely(logits: &[f32], weigh: &Weigh, min_p: f32, order: &mut Vec<u64>, margin: f64) -> f64 {
    let limit = f64::from(min_p) * f64::from(ONE);
    let nearest = order.iter().fold(margin, |least, &key| {
        let gap = (weigh.gap(logits[id_of(key)], weigh.max) - f64::from(min_p).ln()).abs();
        least.min(gap)
    });
    order.retain(|&key| weigh.of(logits[id_of(key)]) >= limit);
    nearest
}

/// Inverse CDF over the kept ids, which ascend.
fn draw_from(logits: &[f32], weigh: &Weigh, u: f64, ids: &[u64]) -> Draw {
    let weights = || ids.iter().map(|&id| (id as usize, weigh.of(logits[id as usize])));
    let total: f64 = weights().map(|(_, weight)| weight).sum();
    let aim = u * total;
    let (token, below, above) = walk(weights(), 0.0, aim);
    Draw { token: token as i64, margin: edge_distance(below, above, aim, total) }
}
