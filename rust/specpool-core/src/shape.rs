//! What one round of one row may do: `(num_steps, topk, num_draft_tokens)`.

use std::ops::Range;

use crate::check::in_range;
use crate::error::{Error, Result};

/// The draft shape of one row's round.
///
/// `num_draft_tokens` counts the nodes that are verified **including the root**.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// S: draft depth.
    pub num_steps: u32,
    /// K: branches.
    pub topk: u32,
    /// N: nodes verified, including the root.
    pub num_draft_tokens: u32,
}

/// Largest S, K or N. It keeps every product of the sizing formulas (docs/contract.md, Sizing) inside `i64`.
const MAX_FIELD: i64 = 1 << 20;

impl Shape {
    /// Shape 0: no drafting, one token per round.
    pub const NONE: Self = Self { num_steps: 0, topk: 1, num_draft_tokens: 1 };

    /// Any shape with `S >= 0`, `K >= 1`, `N >= 1`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field and its value.
    ///
    /// # Examples
    /// ```
    /// use specpool_core::Shape;
    /// assert_eq!(Shape::new(2, 2, 2).unwrap().max_accept_len(), 2);
    /// assert!(Shape::new(1, 0, 2).is_err());
    /// ```
    pub fn new(num_steps: u32, topk: u32, num_draft_tokens: u32) -> Result<Self> {
        in_range("num_steps", num_steps.into(), 0, MAX_FIELD)?;
        in_range("topk", topk.into(), 1, MAX_FIELD)?;
        in_range("num_draft_tokens", num_draft_tokens.into(), 1, MAX_FIELD)?;
        Ok(Self { num_steps, topk, num_draft_tokens })
    }

    /// A shape that an EAGLE drafter can build.
    ///
    /// # Errors
    /// [`Error::Config`] when `S < 1`, `N < 2`, `N > 1 + K + (S-1)*K*K`, or a chain (`K == 1`) has `N != S + 1`.
    pub fn eagle(num_steps: u32, topk: u32, num_draft_tokens: u32) -> Result<Self> {
        let shape = Self::new(num_steps, topk, num_draft_tokens)?;
        let (s, k, n) = (u64::from(num_steps), u64::from(topk), u64::from(num_draft_tokens));
        if s < 1 {
            return Err(Error::Config(format!("an EAGLE shape needs num_steps >= 1, got {s}")));
        }
        let max_nodes = 1 + k + (s - 1) * k * k;
        if n < 2 || n > max_nodes {
            return Err(Error::Config(format!(
                "num_draft_tokens must be in [2, {max_nodes}] for num_steps {s}, topk {k} (1 + K + (S-1)*K*K), got {n}"
            )));
        }
        if k == 1 && n != s + 1 {
            return Err(Error::Config(format!(
                "a chain (topk 1) of num_steps {s} verifies num_draft_tokens {}, got {n}",
                s + 1
            )));
        }
        Ok(shape)
    }

    /// `A = min(S + 1, N)`: the largest `accept_len`, the bonus token included.
    #[must_use]
    #[inline]
    pub fn max_accept_len(&self) -> u32 {
        (self.num_steps + 1).min(self.num_draft_tokens)
    }

    /// Whether a round of this shape drafts anything. It does not if it verifies only the root and takes no draft
    /// step.
    #[must_use]
    pub fn drafts(&self) -> bool {
        self.num_steps > 0 || self.num_draft_tokens > 1
    }
}

/// Splits the lanes of a batch into runs of one shape, each with the shape's index. Most batches are one run. So
/// values that depend on the shape are computed once per run, and the loop over the lanes stays short.
pub(crate) fn runs(shapes: &[i32]) -> impl Iterator<Item = (Range<usize>, usize)> {
    /// Lanes compared at once.
    const BLOCK: usize = 16;
    let mut next = 0;
    std::iter::from_fn(move || {
        let rest = &shapes[next..];
        let &shape = rest.first()?;
        let is_whole = |block: &&[i32]| block.iter().filter(|&&other| other == shape).count() == BLOCK;
        let blocks = rest.chunks_exact(BLOCK).take_while(is_whole).count() * BLOCK;
        let lanes = next..next + blocks + rest[blocks..].iter().take_while(|&&other| other == shape).count();
        next = lanes.end;
        Some((lanes, shape as usize))
    })
}
