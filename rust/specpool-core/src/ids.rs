//! Page, row and slot ids with their arithmetic, and the rounding that every length uses.
//!
//! Ids are `i32`, as in the tables and kernels; id 0 is the padding sink of its kind. Arrays of ids (a batch's rows,
//! a table's cells) stay plain `i32`, so that they can be shown to `NumPy` without a copy.

use crate::error::{Error, Result};

/// A page of one group: `1..=num_pages`, 0 is the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(pub i32);

/// A request's line in the page tables: `1..=num_rows`, 0 is padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row(pub i32);

/// One token's place in the KV buffer of a group: `page * page_size + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub i32);

impl Page {
    /// The sink that padded lanes write to.
    pub const SINK: Self = Self(0);

    /// The page's place in an array of `num_pages + 1`.
    #[must_use]
    pub fn at(self) -> usize {
        self.0 as usize
    }

    /// The slot of `position`, when this page holds it.
    #[must_use]
    pub fn slot(self, position: i32, page_size: i32) -> Slot {
        Slot(self.0 * page_size + position % page_size)
    }
}

impl Row {
    /// The row's place in an array of `num_rows + 1`.
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

/// `len` default values, or an error in place of the abort that `vec!` gives when memory is short.
pub(crate) fn zeroed<T: Clone + Default>(len: usize, what: &str) -> Result<Vec<T>> {
    let mut probe = Vec::<T>::new();
    probe
        .try_reserve_exact(len)
        .map_err(|_| Error::Config(format!("no memory for {what}: {len} entries of {} bytes", size_of::<T>())))?;
    drop(probe);
    // Zero pages come from the system untouched, so a large table costs nothing before it is used.
    Ok(vec![T::default(); len])
}
