//! How many slots a row needs (docs/contract.md, Sizing). Row width, reserve, estimate and the step's real allocation
//! all come from [`Reserve::need`]; nothing else in the project computes a reserve. `extend_allocated` alone repeats two
//! of its forms, for speed, and a test below compares them.
//!
//! Slots of one row, half-open: `[0, lo)` committed for certain, `[lo, hi]` where the device's true root may be,
//! `[.., need)` what one round may write from any of those roots.
//!
//! Every function takes any numbers in its stated range. Outside the range it returns [`Error::Config`]; inside,
//! nothing overflows `i64`.

use crate::check::in_range;
use crate::error::{Error, Result};
use crate::ids::{ceil_align, ceil_div};
use crate::layout::{Branches, Layout};
use crate::shape::Shape;

/// Largest page size: a slot id is an `i32`.
const MAX_PAGE_SIZE: i64 = 1 << 31;
/// Largest length that a sizing function takes.
const MAX_LEN: i64 = 1 << 48;
/// Largest count of rows or of rounds prepared ahead.
const MAX_COUNT: i64 = 1 << 31;

/// How much is reserved for a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// What the round can write from any root in `[lo, hi]`, and no more.
    Exact,
    /// `lo + (D+1) * W`, as in `SGLang`.
    DoubleBuffer,
}

/// What sizing must know about a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    page_size: i64,
    hosts_drafts: bool,
    layout: Layout,
}

impl Geometry {
    /// The geometry of a group with `page_size` slots a page.
    ///
    /// # Errors
    /// [`Error::Config`] unless `1 <= page_size <= 2^31`.
    pub fn new(page_size: i64, hosts_drafts: bool, layout: Layout) -> Result<Self> {
        let page_size = in_range("page_size", page_size, 1, MAX_PAGE_SIZE)?;
        Ok(Self { page_size, hosts_drafts, layout })
    }

    /// The geometry that upstream assumes: drafts in the row, dense if `P == 1` or `K == 1`, else holey.
    ///
    /// # Errors
    /// As [`Geometry::new`].
    pub fn upstream(page_size: i64) -> Result<Self> {
        Self::new(page_size, true, Layout::Holey)
    }

    /// P: slots of a page.
    #[must_use]
    pub fn page_size(&self) -> i64 {
        self.page_size
    }

    fn branches(&self, shape: Shape) -> Branches {
        Branches::new(self.layout, self.page_size, shape.num_steps.into(), shape.topk.into())
    }

    /// W, the window of one round (sgl `get_alloc_len_per_decode`), in slots.
    #[must_use]
    pub fn alloc_len_per_decode(&self, shape: Shape) -> i64 {
        let drafts = if self.hosts_drafts { i64::from(shape.topk) * self.branches(shape).widest_stride() } else { 0 };
        drafts.max(shape.num_draft_tokens.into())
    }

    /// W over all shapes.
    #[must_use]
    pub fn max_alloc_len(&self, shapes: &[Shape]) -> i64 {
        shapes.iter().map(|&shape| self.alloc_len_per_decode(shape)).max().unwrap_or(0)
    }
}

/// One shape's reserve in one group, with its constants computed once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserve {
    page_size: i64,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `need = lo + ahead`.
    DoubleBuffer { ahead: i64 },
    /// `need = hi + window`.
    Flat { window: i64 },
    /// `threshold` is T, `branches` is `K*P*n_max`, `one_less` is `K*P*(n_max-1)` (docs/contract.md, Reserve).
    Holey { threshold: i64, branches: i64, one_less: i64, num_draft_tokens: i64 },
}

impl Reserve {
    /// The `exact` policy: the largest footprint over all roots in `[lo, hi]`.
    #[must_use]
    pub fn exact(geometry: Geometry, shape: Shape) -> Self {
        let page_size = geometry.page_size;
        let (branches, num_draft_tokens) = (geometry.branches(shape), i64::from(shape.num_draft_tokens));
        let form = if !geometry.hosts_drafts || shape.num_steps == 0 {
            Form::Flat { window: num_draft_tokens }
        } else if branches.is_holey {
            let widest = branches.widest_stride(); // P * n_max
            Form::Holey {
                threshold: widest - page_size - branches.num_steps,
                branches: branches.topk * widest,
                one_less: branches.topk * (widest - page_size),
                num_draft_tokens,
            }
        } else {
            Form::Flat { window: branches.end(0).max(num_draft_tokens) }
        };
        Self { page_size, form }
    }

    /// The `double_buffer` policy: `overlap_depth + 1` windows of `alloc_len` slots from `lo`.
    ///
    /// # Errors
    /// [`Error::Config`] when a number is out of range, or when the product is.
    pub fn double_buffer(page_size: i64, alloc_len: i64, overlap_depth: i64) -> Result<Self> {
        in_range("page_size", page_size, 1, MAX_PAGE_SIZE)?;
        in_range("alloc_len", alloc_len, 1, i64::MAX)?;
        in_range("overlap_depth", overlap_depth, 0, MAX_COUNT)?;
        let ahead = (overlap_depth + 1).checked_mul(alloc_len).filter(|&ahead| ahead <= 1 << 60).ok_or_else(|| {
            Error::Config(format!("(overlap_depth {overlap_depth} + 1) * alloc_len {alloc_len} is more than 2^60"))
        })?;
        Ok(Self { page_size, form: Form::DoubleBuffer { ahead } })
    }

    /// The reserves of `shapes`, in their order.
    ///
    /// # Errors
    /// As [`Reserve::double_buffer`].
    pub fn for_shapes(geometry: Geometry, shapes: &[Shape], policy: Policy, overlap_depth: i64) -> Result<Vec<Self>> {
        let window = geometry.max_alloc_len(shapes);
        shapes
            .iter()
            .map(|&shape| match policy {
                Policy::Exact => Ok(Self::exact(geometry, shape)),
                Policy::DoubleBuffer => Self::double_buffer(geometry.page_size, window, overlap_depth),
            })
            .collect()
    }

    /// Slots that the row must hold before the round, for a root anywhere in `[lo, hi]`.
    ///
    /// Lengths are below 2^60 (the ledger's are below 2^31; [`need`] checks raw ones).
    ///
    /// # Examples
    /// ```
    /// use specpool_core::state::sizing;
    /// use specpool_core::{Geometry, Layout, Reserve, Shape};
    ///
    /// let tree = Shape::eagle(5, 8, 64)?;
    /// let target = Reserve::exact(Geometry::new(64, false, Layout::Dense)?, tree);
    /// let draft = Reserve::exact(Geometry::new(64, true, Layout::Holey)?, tree);
    /// // A row of 1000 tokens with one round in flight, whose root lies in [1001, 1006].
    /// assert_eq!(sizing::need(&target, 1001, 1006)?, 1006 + 64);
    /// assert_eq!(sizing::need(&draft, 1001, 1006)?, 960 + 8 * 64);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    #[must_use]
    #[inline]
    pub fn need(&self, lo: i64, hi: i64) -> i64 {
        match self.form {
            Form::DoubleBuffer { ahead } => lo + ahead,
            Form::Flat { window } => hi + window,
            Form::Holey { threshold, branches, one_less, num_draft_tokens } => {
                let last = hi % self.page_size;
                let base = hi - last;
                let draft = if last > threshold {
                    base + branches
                } else if lo < base {
                    // The page before `base` has an offset above the threshold: a smaller root there has a larger
                    // footprint.
                    base - self.page_size + branches
                } else {
                    base + one_less
                };
                draft.max(hi + num_draft_tokens)
            }
        }
    }

    /// The most pages that a row can hold while its roots lie in `[lo, hi]`, if each of its rounds is reserved for
    /// from one root.
    #[must_use]
    pub fn pages(&self, lo: i64, hi: i64) -> i64 {
        // `double_buffer` grows with lo, `exact` is the largest footprint of the whole range.
        ceil_div(self.need(lo, hi).max(self.need(hi, hi)), self.page_size)
    }

    /// The most slots beyond `resolved_len` that a round uses, with `rounds` in flight that accept at most `spread`
    /// tokens.
    #[must_use]
    pub(crate) fn most_ahead(&self, rounds: i64, spread: i64) -> i64 {
        match self.form {
            Form::DoubleBuffer { ahead } => rounds + ahead,
            Form::Flat { window } => spread + window,
            Form::Holey { branches, num_draft_tokens, .. } => spread + branches.max(num_draft_tokens),
        }
    }

    /// `ceil_align(max(allocated, need), P)`; `allocated` is a multiple of P.
    #[must_use]
    #[inline]
    pub fn next_allocated(&self, allocated: i64, lo: i64, hi: i64) -> i64 {
        self.grown(allocated, self.need(lo, hi))
    }

    #[inline]
    fn grown(&self, allocated: i64, need: i64) -> i64 {
        let missing = need - allocated;
        // One page or none, without a branch. A row needs more only once in its life.
        if missing <= self.page_size {
            allocated + i64::from(missing > 0) * self.page_size
        } else {
            allocated + ceil_align(missing, self.page_size)
        }
    }

    /// [`next_allocated`](Self::next_allocated) of many lanes, appended to `after`. It looks at the form of the
    /// reserve only once, and so repeats two forms of [`need`](Self::need): a plain loop over `need` is slower for
    /// these two. The test `many_lanes_grow_as_one_lane_does` compares them.
    pub(crate) fn extend_allocated(&self, allocated: &[i32], lo: &[i32], hi: &[i32], after: &mut Vec<i32>) {
        let grown = |allocated: &i32, need: i64| self.grown(i64::from(*allocated), need) as i32;
        let with = |root| allocated.iter().zip::<&[i32]>(root);
        match self.form {
            Form::DoubleBuffer { ahead } => after.extend(with(lo).map(|(has, &lo)| grown(has, i64::from(lo) + ahead))),
            Form::Flat { window } => after.extend(with(hi).map(|(has, &hi)| grown(has, i64::from(hi) + window))),
            Form::Holey { .. } => {
                after.extend(with(lo).zip(hi).map(|((has, &lo), &hi)| grown(has, self.need(lo.into(), hi.into()))));
            }
        }
    }
}

/// [`Reserve::need`] for raw lengths.
///
/// # Errors
/// [`Error::Config`] unless `0 <= lo <= hi <= 2^48`.
pub fn need(reserve: &Reserve, lo: i64, hi: i64) -> Result<i64> {
    in_range("hi", hi, 0, MAX_LEN)?;
    in_range("lo", lo, 0, hi)?;
    Ok(reserve.need(lo, hi))
}

/// [`Reserve::pages`] for raw lengths.
///
/// # Errors
/// [`Error::Config`] unless `0 <= lo <= hi <= 2^48`.
pub fn pages_needed(reserve: &Reserve, lo: i64, hi: i64) -> Result<i64> {
    in_range("hi", hi, 0, MAX_LEN)?;
    in_range("lo", lo, 0, hi)?;
    Ok(reserve.pages(lo, hi))
}

/// The most slots beyond `resolved_len` that a claim of a row uses: an extend of at most `max_chunk` tokens, or a
/// round behind `overlap_depth` others.
pub(crate) fn most_ahead(reserves: &[Reserve], shapes: &[Shape], max_chunk: i64, overlap_depth: i64) -> i64 {
    let most_accepted = shapes.iter().map(|shape| i64::from(shape.max_accept_len())).max().unwrap_or(1);
    let spread = overlap_depth.saturating_mul(most_accepted);
    let reserve = reserves.iter().map(|reserve| reserve.most_ahead(overlap_depth, spread)).max().unwrap_or(0);
    max_chunk.max(reserve)
}

/// The most pages of a row that keeps a window and a sink and claims `ahead` slots beyond its `resolved_len`.
pub(crate) fn window_pages(page_size: i64, window: i64, sink: i64, ahead: i64) -> i64 {
    ceil_div(sink, page_size) + ceil_div(window - 1 + ahead, page_size) + 1
}

/// The most pages of a group with this window and sink that a row of any length holds, whatever rounds of these shapes
/// it runs and however many of them are in flight (docs/contract.md, Geometry and groups).
///
/// # Errors
/// [`Error::Config`] when a number is out of range.
pub fn most_window_pages(
    geometry: Geometry,
    shapes: &[Shape],
    (window, sink): (i64, i64),
    max_chunk: i64,
    overlap_depth: i64,
    policy: Policy,
) -> Result<i64> {
    in_range("window", window, 1, MAX_LEN)?;
    in_range("sink", sink, 0, MAX_LEN)?;
    in_range("max_chunk", max_chunk, 1, MAX_LEN)?;
    in_range("overlap_depth", overlap_depth, 0, MAX_COUNT)?;
    let reserves = Reserve::for_shapes(geometry, shapes, policy, overlap_depth)?;
    Ok(window_pages(geometry.page_size, window, sink, most_ahead(&reserves, shapes, max_chunk, overlap_depth)))
}

/// `ceil_align(max(allocated, need), page_size)`.
///
/// # Errors
/// [`Error::Config`] when a number is out of range.
pub fn next_allocated(allocated: i64, need: i64, page_size: i64) -> Result<i64> {
    in_range("page_size", page_size, 1, MAX_PAGE_SIZE)?;
    in_range("allocated", allocated, 0, MAX_LEN)?;
    in_range("need", need, 0, 1 << 61)?;
    Ok(ceil_align(allocated.max(need), page_size))
}

/// Slots of a row that no round can pass (docs/contract.md, Row width), a multiple of the page size.
///
/// # Errors
/// [`Error::Config`] when `shapes` is empty, `max_context_len < 2`, or a number is out of range.
pub fn row_width(
    geometry: Geometry,
    shapes: &[Shape],
    max_context_len: i64,
    overlap_depth: i64,
    policy: Policy,
) -> Result<i64> {
    in_range("number of shapes", shapes.len() as i64, 1, MAX_COUNT)?;
    in_range("max_context_len", max_context_len, 2, MAX_LEN)?;
    in_range("overlap_depth", overlap_depth, 0, MAX_COUNT)?;
    let most_accepted = shapes.iter().map(|shape| i64::from(shape.max_accept_len())).max().unwrap_or(1);
    let hi = max_context_len - 1 + overlap_depth * most_accepted;
    let lo = if policy == Policy::Exact { 1 } else { max_context_len - 1 + overlap_depth };
    let reserves = Reserve::for_shapes(geometry, shapes, policy, overlap_depth)?;
    let widest = reserves.iter().map(|reserve| reserve.need(lo, hi)).max().unwrap_or(0);
    Ok(ceil_align(widest, geometry.page_size))
}

/// Slots beyond the context that upstream gives a row (sgl `extra_max_context_len`), for comparison by embedders.
///
/// # Errors
/// [`Error::Config`] when `page_size` is out of range.
pub fn row_headroom(page_size: i64, shape: Shape) -> Result<i64> {
    let window = Geometry::upstream(page_size)?.alloc_len_per_decode(shape);
    let least = 4 + i64::from(shape.num_draft_tokens);
    Ok(if page_size == 1 { least } else { least.max(2 * window + page_size - 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_lanes_grow_as_one_lane_does() {
        let shapes = [Shape::eagle(3, 1, 4).unwrap(), Shape::eagle(5, 8, 64).unwrap()];
        let geometries = [(1, false, Layout::Dense), (16, true, Layout::Dense), (4, true, Layout::Holey)];
        for (page_size, hosts_drafts, layout) in geometries {
            let geometry = Geometry::new(page_size, hosts_drafts, layout).unwrap();
            for policy in [Policy::Exact, Policy::DoubleBuffer] {
                for reserve in Reserve::for_shapes(geometry, &shapes, policy, 1).unwrap() {
                    let hi: Vec<i32> = (0..100).collect();
                    let lo: Vec<i32> = hi.iter().map(|&hi| hi - hi % 7).collect();
                    let allocated: Vec<i32> = hi.iter().map(|&hi| (hi % 40) * page_size as i32).collect();
                    let mut after = Vec::new();
                    reserve.extend_allocated(&allocated, &lo, &hi, &mut after);
                    let lanes = allocated.iter().zip(&lo).zip(&hi);
                    let by_lane: Vec<i32> = lanes
                        .map(|((&has, &lo), &hi)| reserve.next_allocated(has.into(), lo.into(), hi.into()) as i32)
                        .collect();
                    assert_eq!(after, by_lane, "{reserve:?}");
                }
            }
        }
    }
}
