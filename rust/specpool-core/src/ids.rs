//! Page and row ids, and the rounding of lengths. Slots (`page * page_size + offset`) are computed in `slots`.
//!
//! Ids are `i32`, as in the tables and kernels. Id 0 is the padding sink of its kind. Arrays of ids (a batch's rows, a
//! table's cells) stay plain `i32`, so that `NumPy` can view them without a copy.

/// A page of one group: `1..=num_pages`, 0 is the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(pub i32);

/// A request's line in the page tables: `1..=num_rows`, 0 is padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row(pub i32);

impl Page {
    /// The sink that padded lanes write to.
    pub const SINK: Self = Self(0);

    /// The page's index in an array of `num_pages + 1`.
    #[must_use]
    pub fn at(self) -> usize {
        self.0 as usize
    }
}

impl Row {
    /// The row's index in an array of `num_rows + 1`.
    #[must_use]
    pub fn at(self) -> usize {
        self.0 as usize
    }
}

/// `value` rounded up to a multiple of `unit` (both non-negative, `unit > 0`).
#[must_use]
pub fn ceil_align(value: i64, unit: i64) -> i64 {
    ceil_div(value, unit) * unit
}

/// `value / unit` rounded up (both non-negative, `unit > 0`).
#[must_use]
pub fn ceil_div(value: i64, unit: i64) -> i64 {
    (value + unit - 1) / unit
}
