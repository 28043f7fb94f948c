//! Maps (row, position) to slots, and builds ranges, CSR views, table deltas and compaction on top of that.
//!
//! A [`TableView`] borrows a page table and checks every access. A wrong row, position or page is an error that names
//! it, and never leads to a foreign slot.

use std::ops::Range;

use crate::check::{fit, not_negative, same_len};
use crate::error::{Error, Result};
use crate::memory::{self, room, with_room};

/// A page table as plain cells.
#[derive(Debug, Clone, Copy)]
pub struct TableView<'a> {
    cells: &'a [i32], // [num_rows + 1, columns], pages
    columns: usize,
    page_size: i64, // slots of a page
}

/// One row of a [`TableView`].
#[derive(Debug, Clone, Copy)]
pub struct RowView<'a> {
    id: i32,
    cells: &'a [i32],
    page_size: i64,
}

/// Slots to move: `dst[i]` takes what `src[i]` held before the first write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moves {
    /// Slots read.
    pub src: Vec<i64>,
    /// Slots written, each at most once.
    pub dst: Vec<i64>,
}

impl Moves {
    /// Room for `more` moves.
    pub(crate) fn make_room(&mut self, more: usize) -> Result<()> {
        room(&mut self.src, more, "moves")?;
        room(&mut self.dst, more, "moves")
    }
}

/// A CSR view of rows for readers of whole pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageCsr {
    /// `[n + 1]`: where each lane's pages begin in `kv_indices`.
    pub kv_indptr: Vec<i32>,
    /// Pages.
    pub kv_indices: Vec<i32>,
    /// `[n]`: used slots of each lane's last page, in `1..=P`; 0 for a lane of length 0.
    pub kv_last_page_len: Vec<i32>,
}

impl<'a> TableView<'a> {
    /// A view of `cells` `[num_rows + 1, columns]`.
    ///
    /// # Errors
    /// [`Error::Shape`] when `page_size` is not in `[1, 2^31)` or the cells are not whole rows.
    pub fn new(cells: &'a [i32], columns: usize, page_size: i64) -> Result<Self> {
        if !(1..1 << 31).contains(&page_size) {
            return Err(Error::Shape(format!("page_size must be in [1, 2^31), got {page_size}")));
        }
        if columns == 0 || !cells.len().is_multiple_of(columns) {
            return Err(Error::Shape(format!(
                "page_table must be [num_rows + 1, pages_per_row >= 1], got {} cells, {columns} columns",
                cells.len()
            )));
        }
        Ok(Self { cells, columns, page_size })
    }

    /// P.
    #[must_use]
    pub fn page_size(&self) -> i64 {
        self.page_size
    }

    /// The row of lane `lane`.
    ///
    /// # Errors
    /// [`Error::Shape`] when the table has no such row.
    pub fn row(&self, lane: usize, row: i32) -> Result<RowView<'a>> {
        let num_rows = self.cells.len() / self.columns;
        if row < 0 || row as usize >= num_rows {
            return Err(Error::Shape(format!("rows[{lane}] must be in [0, {num_rows}), got {row}")));
        }
        let cells = &self.cells[row as usize * self.columns..][..self.columns];
        Ok(RowView { id: row, cells, page_size: self.page_size })
    }
}

impl RowView<'_> {
    /// Whether this is row 0, the row of padded lanes.
    #[must_use]
    pub fn is_padding(&self) -> bool {
        self.id == 0
    }

    /// The page in `column`.
    ///
    /// # Errors
    /// [`Error::Shape`] when the column is outside the row or its slots do not fit into int32.
    pub fn page(&self, column: i64) -> Result<i64> {
        let page = usize::try_from(column).ok().and_then(|column| self.cells.get(column));
        match page {
            Some(&page) if page >= 0 && (i64::from(page) + 1) * self.page_size <= 1 << 31 => Ok(i64::from(page)),
            Some(page) => Err(Error::Shape(format!(
                "page_table[{}, {column}] must be in [0, {}), got {page}",
                self.id,
                (1_i64 << 31) / self.page_size
            ))),
            None => Err(Error::Shape(format!(
                "position {} of row {} is outside the row's {} slots",
                i128::from(column) * i128::from(self.page_size),
                self.id,
                self.cells.len() as i128 * i128::from(self.page_size)
            ))),
        }
    }

    /// The slot of `position`.
    ///
    /// # Errors
    /// [`Error::Shape`] when the position is outside the row.
    pub fn slot(&self, position: i64) -> Result<i64> {
        if position < 0 || position / self.page_size >= self.cells.len() as i64 {
            return Err(Error::Shape(format!(
                "position {position} of row {} is outside the row's {} slots",
                self.id,
                self.cells.len() as i128 * i128::from(self.page_size)
            )));
        }
        Ok(self.page(position / self.page_size)? * self.page_size + position % self.page_size)
    }

    /// The slot of `position`, which must lie in a page that the row holds (and so never in the sink).
    ///
    /// # Errors
    /// [`Error::Shape`] when the position is outside the row, or its cell is 0.
    pub fn mapped_slot(&self, position: i64) -> Result<i64> {
        let slot = self.slot(position)?;
        if slot < self.page_size && !self.is_padding() {
            return Err(Error::Shape(format!(
                "position {position} of row {} has no page: page_table[{}, {}] is 0",
                self.id,
                self.id,
                position / self.page_size
            )));
        }
        Ok(slot)
    }

    /// Calls `run` with the slots of each part of `positions` that lies in one page.
    ///
    /// # Errors
    /// [`Error::Shape`] when a position is outside the row; `run` may have been called for earlier positions.
    pub fn each_run(&self, positions: Range<i64>, mut run: impl FnMut(Range<i64>)) -> Result<()> {
        if positions.is_empty() {
            return Ok(());
        }
        self.slot(positions.start)?;
        self.slot(positions.end - 1)?;
        let mut start = positions.start;
        while start < positions.end {
            let column = start / self.page_size;
            let end = ((column + 1) * self.page_size).min(positions.end);
            let shift = (self.page(column)? - column) * self.page_size;
            run(start + shift..end + shift);
            start = end;
        }
        Ok(())
    }
}

/// The slot of each `(rows[i], positions[i])`.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, or a row or position is outside the table.
///
/// # Examples
/// ```
/// use specpool_core::forward::slots::{TableView, slots_at};
///
/// let cells = [0, 0, 5, 9]; // row 0 is padding; row 1 has pages 5 and 9
/// let table = TableView::new(&cells, 2, 4)?;
/// assert_eq!(slots_at(&table, &[1, 1, 1], &[0, 3, 4])?, [20, 23, 36]);
/// # Ok::<(), specpool_core::Error>(())
/// ```
pub fn slots_at(table: &TableView, rows: &[i32], positions: &[i32]) -> Result<Vec<i64>> {
    same_len("positions", positions.len(), rows.len())?;
    let mut slots = with_room(rows.len(), "slots")?;
    for (lane, (&row, &position)) in rows.iter().zip(positions).enumerate() {
        slots.push(table.row(lane, row)?.slot(i64::from(position))?);
    }
    Ok(slots)
}

/// The slots of `[starts[i], starts[i] + lens[i])` of each row, one lane after the other.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, or a row or range is outside the table.
pub fn slot_ranges(table: &TableView, rows: &[i32], starts: &[i32], lens: &[i32]) -> Result<Vec<i64>> {
    same_len("starts", starts.len(), rows.len())?;
    same_len("lens", lens.len(), rows.len())?;
    let range = |lane: usize| -> Result<(RowView<'_>, Range<i64>)> {
        let (start, len) = (not_negative("starts", lane, starts[lane])?, not_negative("lens", lane, lens[lane])?);
        Ok((table.row(lane, rows[lane])?, start..start + len))
    };
    for lane in 0..rows.len() {
        let (row, positions) = range(lane)?;
        row.each_run(positions, |_| ())?;
    }
    let mut slots = with_room(total("lens", lens)?, "slots")?;
    for lane in 0..rows.len() {
        let (row, positions) = range(lane)?;
        row.each_run(positions, |run| slots.extend(run))?;
    }
    Ok(slots)
}

/// The sum of `lens`, refused if an array of that length could not be indexed by int32.
fn total(name: &str, lens: &[i32]) -> Result<usize> {
    let sum: i64 = lens.iter().map(|&len| i64::from(len.max(0))).sum();
    fit(name, &[sum as usize])
}

/// Pages of `[0, lens[i])` of each row as CSR, for prefill and verify.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, or a row or length is outside the table.
pub fn page_csr(table: &TableView, rows: &[i32], lens: &[i32]) -> Result<PageCsr> {
    same_len("lens", lens.len(), rows.len())?;
    let p = table.page_size();
    let mut num_pages = 0;
    for (lane, (&row, &len)) in rows.iter().zip(lens).enumerate() {
        let (row, len) = (table.row(lane, row)?, not_negative("lens", lane, len)?);
        if len > 0 {
            row.slot(len - 1)?;
        }
        num_pages += (len + p - 1) / p;
    }
    let mut csr = PageCsr {
        kv_indptr: with_room(rows.len() + 1, "kv_indptr")?,
        kv_indices: with_room(fit("kv_indices", &[num_pages as usize])?, "kv_indices")?,
        kv_last_page_len: with_room(rows.len(), "kv_last_page_len")?,
    };
    csr.kv_indptr.push(0);
    for (lane, (&row, &len)) in rows.iter().zip(lens).enumerate() {
        let (row, len) = (table.row(lane, row)?, not_negative("lens", lane, len)?);
        for column in 0..(len + p - 1) / p {
            csr.kv_indices.push(row.page(column)? as i32);
        }
        csr.kv_last_page_len.push(if len == 0 { 0 } else { ((len - 1) % p + 1) as i32 });
        csr.kv_indptr.push(csr.kv_indices.len() as i32);
    }
    Ok(csr)
}

/// Writes `pages[i]` into cell `(rows[i], columns[i])` of `cells` `[num_rows + 1, width]`, all or none.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, a cell is outside the table, a page is negative, or row 0 would get one.
pub fn apply_table_delta(cells: &mut [i32], width: usize, rows: &[i32], columns: &[i32], pages: &[i32]) -> Result<()> {
    same_len("columns", columns.len(), rows.len())?;
    same_len("pages", pages.len(), rows.len())?;
    let num_rows = cells.len().checked_div(width).unwrap_or(0);
    for (entry, ((&row, &column), &page)) in rows.iter().zip(columns).zip(pages).enumerate() {
        if row < 1 || row as usize >= num_rows {
            return Err(Error::Shape(format!("rows[{entry}] must be in [1, {num_rows}), got {row}")));
        }
        if column < 0 || column as usize >= width {
            return Err(Error::Shape(format!("columns[{entry}] must be in [0, {width}), got {column}")));
        }
        not_negative("pages", entry, page)?;
    }
    for ((&row, &column), &page) in rows.iter().zip(columns).zip(pages) {
        cells[row as usize * width + column as usize] = page;
    }
    Ok(())
}

/// Plans the moves of the accepted nodes' KV from `roots[b] + node` to `roots[b] ..`, in the order of the walk.
///
/// `accept_index` `[n, S + 1]` holds flat node ids `lane * N + node`, padded with -1. Padded lanes (row 0) move
/// nothing. A node that is already in its place is left out.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, a node is not one of its lane's or does not come after the one before, or
/// a position has no page.
pub fn compact_moves(
    table: &TableView,
    rows: &[i32],
    roots: &[i32],
    accept_index: &[i32],
    num_draft_tokens: usize,
) -> Result<Moves> {
    same_len("roots", roots.len(), rows.len())?;
    let width = accept_index.len().checked_div(rows.len()).unwrap_or(0);
    same_len("accept_index", accept_index.len(), rows.len() * width)?;
    fit("node ids", &[rows.len(), num_draft_tokens])?;
    let mut moves = Moves::default();
    for (lane, (&row, &root)) in rows.iter().zip(roots).enumerate() {
        let (row, root) = (table.row(lane, row)?, not_negative("roots", lane, root)?);
        if row.is_padding() {
            continue;
        }
        moves.make_room(width)?;
        let first = (lane * num_draft_tokens) as i64;
        let mut before = -1;
        let mut ended = false;
        for (column, &id) in accept_index[lane * width..][..width].iter().enumerate() {
            if id == -1 {
                ended = true;
                continue;
            }
            let node = i64::from(id) - first;
            if ended || node <= before || node >= num_draft_tokens as i64 || (column == 0 && node != 0) {
                return Err(Error::Shape(format!(
                    "accept_index[{lane}, {column}] must be a node of the lane, in [{first}, {}), that comes after \
                     the one before (the root first, -1 only at the end), got {id}",
                    first + num_draft_tokens as i64
                )));
            }
            before = node;
            if node != column as i64 {
                moves.src.push(row.mapped_slot(root + node)?);
                moves.dst.push(row.mapped_slot(root + column as i64)?);
            }
        }
    }
    Ok(moves)
}

/// Refuses moves that a buffer of `num_slots` slots cannot make: slots outside it, or a slot written twice.
///
/// # Errors
/// [`Error::Shape`] naming the entry.
pub fn check_moves(src: &[i64], dst: &[i64], num_slots: usize) -> Result<()> {
    same_len("dst", dst.len(), src.len())?;
    check_slots("src", src, num_slots)?;
    check_slots("dst", dst, num_slots)?;
    let mut sorted = memory::copied(dst, "the check of moves")?;
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::Shape(format!("dst names slot {} twice", pair[0]))),
        None => Ok(()),
    }
}

/// Refuses slots outside `[0, num_slots)`.
///
/// # Errors
/// [`Error::Shape`] naming the entry.
pub fn check_slots(name: &str, slots: &[i64], num_slots: usize) -> Result<()> {
    match slots.iter().position(|&slot| slot < 0 || slot as u64 >= num_slots as u64) {
        Some(at) => Err(Error::Shape(format!("{name}[{at}] must be in [0, {num_slots}), got {}", slots[at]))),
        None => Ok(()),
    }
}
