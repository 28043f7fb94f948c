//! The pending changes of one page table, for a copy of it on a device.
//!
//! There is at most one entry per cell. An entry's value is the table's value at the time of the take. Every change
//! gives its entry a new version. An acknowledgement removes only entries whose version is not newer than its take, so
//! a cell that went 17 -> 0 -> 17 in between stays pending.

use crate::error::Result;
use crate::ids::{Page, Row};
use crate::memory::{collected, room, zeroed};
use crate::state::page_table::PageTable;

/// One take of a delta: parallel arrays, one entry per changed cell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeltaEntries {
    /// `int32 [n]`: the row of each entry.
    pub rows: Vec<i32>,
    /// `int32 [n]`: the column of each entry.
    pub columns: Vec<i32>,
    /// `int32 [n]`: the page now in that cell, 0 for none.
    pub pages: Vec<i32>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    cell: u32,
    version: u64,
}

/// The changes of a table that are not acknowledged yet.
#[derive(Debug, Clone)]
pub(crate) struct Delta {
    /// Per cell: the number of its entry, from 1 on; 0 if nothing is pending.
    entry_numbers: Vec<u32>,
    entries: Vec<Entry>,
    /// Counts changes and never goes back.
    version: u64,
    /// (step, version at its latest take), oldest step first.
    takes: Vec<(u64, u64)>,
}

impl Delta {
    pub(crate) fn new(num_cells: usize) -> Result<Self> {
        Ok(Self {
            entry_numbers: zeroed(num_cells, "a table delta")?,
            entries: Vec::new(),
            version: 0,
            takes: Vec::new(),
        })
    }

    /// Takes the memory for the marks of `more` cells that are not pending.
    pub(crate) fn make_room(&mut self, more: usize) -> Result<()> {
        room(&mut self.entries, more, "a table delta")
    }

    /// Notes that the cell has just changed. [`make_room`](Self::make_room) must have taken the memory.
    pub(crate) fn mark(&mut self, cell: usize) {
        self.version += 1;
        let entry = Entry { cell: cell as u32, version: self.version };
        match self.entry_numbers[cell] {
            0 => {
                self.entries.push(entry);
                self.entry_numbers[cell] = self.entries.len() as u32;
            }
            number => self.entries[number as usize - 1] = entry,
        }
    }

    /// All pending entries with the table's values. If they are really taken, call [`taken`](Self::taken).
    pub(crate) fn entries(&mut self, table: &PageTable) -> Result<DeltaEntries> {
        room(&mut self.takes, 1, "takes of a table delta")?;
        let columns = table.pages_per_row() as u32; // half the time of a division with 64 bits
        let what = "a table delta";
        let rows: Vec<i32> = collected(self.entries.iter().map(|entry| (entry.cell / columns) as i32), what)?;
        let column = |(entry, &row): (&Entry, &i32)| (entry.cell - row as u32 * columns) as i32;
        Ok(DeltaEntries {
            columns: collected(self.entries.iter().zip(&rows).map(column), what)?,
            pages: collected(self.entries.iter().map(|entry| table.cells()[entry.cell as usize]), what)?,
            rows,
        })
    }

    /// Notes that the pending entries were taken for `step`.
    pub(crate) fn taken(&mut self, step: u64) {
        // Usually the take is for the newest step, and the first one for it.
        let index = self.takes.partition_point(|&(taken, _)| taken < step);
        match self.takes.get_mut(index).filter(|(taken, _)| *taken == step) {
            Some((_, version)) => *version = self.version,
            None => self.takes.insert(index, (step, self.version)),
        }
    }

    /// The delta of a saved state, which has no entries.
    pub(crate) fn none() -> Self {
        Self { entry_numbers: Vec::new(), entries: Vec::new(), version: 0, takes: Vec::new() }
    }

    pub(crate) fn has_take(&self, step: u64) -> bool {
        self.takes.binary_search_by_key(&step, |&(taken, _)| taken).is_ok()
    }

    /// Removes the entries that have not changed since the take of `step`. This covers takes of older steps.
    pub(crate) fn acknowledge(&mut self, step: u64) {
        let Some(&(_, version)) = self.takes.iter().find(|&&(taken, _)| taken == step) else { return };
        self.takes.retain(|&(taken, _)| taken > step);
        let Self { entry_numbers, entries, .. } = self;
        let mut num_kept = 0;
        entries.retain(|entry| {
            let keep = entry.version > version;
            num_kept += u32::from(keep);
            entry_numbers[entry.cell as usize] = if keep { num_kept } else { 0 };
            keep
        });
    }

    /// Hands every entry to `visit` and removes it. This covers the takes of `step` and of older steps.
    pub(crate) fn drain(&mut self, step: u64, table: &PageTable, mut visit: impl FnMut(Row, usize, Page)) {
        self.takes.retain(|&(taken, _)| taken > step);
        let columns = table.pages_per_row() as u32; // half the time of a division with 64 bits
        for Entry { cell, .. } in self.entries.drain(..) {
            self.entry_numbers[cell as usize] = 0;
            let row = cell / columns;
            visit(Row(row as i32), (cell - row * columns) as usize, Page(table.cells()[cell as usize]));
        }
    }

    /// The cells that have an entry, in no order.
    pub(crate) fn pending(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().map(|entry| entry.cell)
    }

    /// Cells whose bookkeeping contradicts the entries (for the audit).
    pub(crate) fn broken(&self) -> Option<String> {
        let pending = self.entry_numbers.iter().filter(|&&number| number != 0).count();
        if pending != self.entries.len() {
            return Some(format!("{pending} cells are marked pending, {} entries", self.entries.len()));
        }
        self.entries.iter().enumerate().find_map(|(at, entry)| {
            (self.entry_numbers[entry.cell as usize] as usize != at + 1)
                .then(|| format!("delta entry {at} and the mark of cell {} disagree", entry.cell))
        })
    }
}

/// Plants faults that no public call can cause, and checks that they are found.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_planted_fault_is_reported() {
        type Fault = fn(&mut Delta);
        let faults: [(&str, Fault); 4] = [
            ("1 cells are marked pending, 2 entries", |delta| delta.entry_numbers[3] = 0),
            ("3 cells are marked pending, 2 entries", |delta| delta.entry_numbers[4] = 1),
            ("delta entry 0 and the mark of cell 5 disagree", |delta| delta.entries.swap(0, 1)),
            ("delta entry 1 and the mark of cell 5 disagree", |delta| delta.entry_numbers[5] = 1),
        ];
        for (expected, plant) in faults {
            let mut delta = Delta::new(6).unwrap();
            delta.mark(3);
            delta.mark(5);
            assert_eq!(delta.pending().collect::<Vec<_>>(), [3, 5]);
            assert_eq!(delta.broken(), None);
            plant(&mut delta);
            assert_eq!(delta.broken().as_deref(), Some(expected));
        }
    }
}
