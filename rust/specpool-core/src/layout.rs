//! Where the drafts of a round lie in their row (docs/contract.md, Layouts). The reserve (`sizing`) and the cells
//! (`draft_cells`) both use this file, so a draft is never written where nothing was reserved.
//!
//! ```text
//! holey, last = root % P:  [.. prefix | tail, branch 0 drafts ..| hole = tail copy, branch 1 drafts ..| ...
//!                                     ^ base                    ^ base + stride
//! dense:                   [.. prefix     | branch 0 drafts | branch 1 drafts | ...
//!                                         ^ root            ^ root + stride
//! ```

use crate::ids::ceil_align;

/// Where the drafts of a round lie in their row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One branch after another, without gaps: for readers of single tokens.
    Dense,
    /// Each branch on pages of its own, for readers of whole pages. If `P == 1` or `K == 1` it equals the dense
    /// layout.
    Holey,
}

/// The branches of one round, at any root. The numbers come from a checked shape and page size, so nothing overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Branches {
    /// S.
    pub(crate) num_steps: i64,
    /// K.
    pub(crate) topk: i64,
    /// P.
    pub(crate) page_size: i64,
    /// Whether each branch has pages of its own.
    pub(crate) is_holey: bool,
}

impl Branches {
    pub(crate) fn new(layout: Layout, page_size: i64, num_steps: i64, topk: i64) -> Self {
        Self { num_steps, topk, page_size, is_holey: layout == Layout::Holey && page_size > 1 && topk > 1 }
    }

    /// Positions from one branch to the next, if `last` tokens of the prefix lie in its partial tail page.
    pub(crate) fn stride(&self, last: i64) -> i64 {
        if self.is_holey { ceil_align(last + self.num_steps, self.page_size) } else { self.num_steps }
    }

    /// The largest stride of any root.
    pub(crate) fn widest_stride(&self) -> i64 {
        self.stride(self.page_size - 1)
    }

    /// One past the last position of the branches.
    pub(crate) fn end(&self, root: i64) -> i64 {
        let last = root % self.page_size;
        let start = if self.is_holey { root - last } else { root };
        start + self.topk * self.stride(last)
    }
}
