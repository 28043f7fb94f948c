//! One group's page table: which page holds which part of which row.
//!
//! `int32 [num_rows + 1, pages_per_row]`, allocated once and never moved, so that a view of it stays valid. Cells at
//! or beyond a row's `allocated_len / P` are 0. Row 0 is all 0.

use crate::check::in_range;
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::memory::zeroed;

/// Cells that a table may have: a cell's index is a `u32` in the delta.
const MAX_CELLS: i64 = (1 << 31) - 1;

/// The table of one group.
#[derive(Debug, Clone)]
pub struct PageTable {
    cells: Vec<i32>,
    pages_per_row: usize,
    /// Cells that hold a page.
    num_held: usize,
}

impl PageTable {
    /// An empty table (all cells 0).
    ///
    /// # Errors
    /// [`Error::Config`] when there is no row or column, 2^31 cells or more, or memory is short.
    pub fn new(num_rows: i64, pages_per_row: i64) -> Result<Self> {
        in_range("num_rows", num_rows, 1, MAX_CELLS)?;
        in_range("pages_per_row", pages_per_row, 1, MAX_CELLS)?;
        let cells = (num_rows + 1).checked_mul(pages_per_row).filter(|&cells| cells <= MAX_CELLS).ok_or_else(|| {
            Error::Config(format!(
                "a page table of {num_rows} + 1 rows of {pages_per_row} pages has more than {MAX_CELLS} cells"
            ))
        })?;
        Ok(Self { cells: zeroed(cells as usize, "a page table")?, pages_per_row: pages_per_row as usize, num_held: 0 })
    }

    /// All cells, row by row.
    #[must_use]
    pub fn cells(&self) -> &[i32] {
        &self.cells
    }

    /// Columns of the table.
    #[must_use]
    pub fn pages_per_row(&self) -> usize {
        self.pages_per_row
    }

    /// Index in [`cells`](Self::cells) of a row's column.
    #[must_use]
    pub fn cell(&self, row: Row, column: usize) -> usize {
        row.at() * self.pages_per_row + column
    }

    /// The pages of one row, column by column.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn row(&self, row: Row) -> &[i32] {
        &self.cells[row.at() * self.pages_per_row..][..self.pages_per_row]
    }

    pub(crate) fn set(&mut self, cell: usize, page: Page) {
        let before = std::mem::replace(&mut self.cells[cell], page.0);
        self.num_held = self.num_held + usize::from(page != Page::SINK) - usize::from(before != 0);
    }

    /// Cells that hold a page.
    pub(crate) fn num_held(&self) -> usize {
        self.num_held
    }

    /// A copy that takes, of each row, only the columns below `columns(row)`. All cells behind them are 0 in both.
    pub(crate) fn try_clone(&self, columns: impl Fn(Row) -> usize) -> Result<Self> {
        let mut cells = zeroed(self.cells.len(), "a page table")?;
        for at in 1..self.cells.len() / self.pages_per_row {
            let (from, row) = (at * self.pages_per_row, Row(at as i32));
            let to = from + columns(row).min(self.pages_per_row);
            cells[from..to].copy_from_slice(&self.cells[from..to]);
        }
        Ok(Self { cells, ..*self })
    }
}
