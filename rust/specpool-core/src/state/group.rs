//! A group: a page pool, the page table that it fills, and the rules by which a row grows, slides and shrinks in it
//! (docs/contract.md, Geometry and groups; Window groups).
//!
//! The columns of one row, in pages, half-open:
//!
//! ```text
//!   [0, e/P) evicted: 0 in the table; of these a session's checkpoint may keep some, outside the table
//!   [e/P, p/P) shared, read-only | [p/P, a/P) the row's own | [a/P, ..) 0
//! ```
//!
//! The columns of a sink, `[0, ceil(sink/P))`, are never evicted.

use crate::check::in_range;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::{Page, Row, ceil_align, ceil_div};
use crate::layout::Layout;
use crate::memory::{self, filled, room, zeroed};
use crate::shape::{Shape, runs};
use crate::state::delta::Delta;
use crate::state::page_pool::{PagePool, PageRecord};
use crate::state::page_table::PageTable;
use crate::state::sizing::{self, Geometry, Policy, Reserve};
use crate::verb::Verb;

/// The configuration of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// The name of the group in errors and audits.
    pub name: String,
    /// P: slots of a page.
    pub page_size: i64,
    /// Number of pages.
    pub num_pages: i64,
    /// Whether the draft model's branches lie in its rows.
    pub hosts_drafts: bool,
    /// Where the branches lie.
    pub layout: Layout,
    /// w: a query sees only the last `w` positions, its own included (sliding-window layers); `None`: it sees all of
    /// them.
    pub window: Option<i64>,
    /// Beside its window, a query sees the first `sink` positions (attention sinks). Only a group with a window has
    /// them; 0: none.
    pub sink: i64,
}

impl Group {
    /// Checks what can be checked of a group alone; a ledger checks more.
    ///
    /// # Errors
    /// [`Error::Config`] that names the group, the value and what is allowed.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::Config(format!("group {}: {message}", self.name)));
        if self.name.is_empty() {
            return Err(Error::Config("a group needs a name".into()));
        }
        if let Err(error) = self.geometry() {
            return refuse(error.to_string());
        }
        if self.num_pages < 1 {
            return refuse(format!("num_pages must be at least 1, got {}", self.num_pages));
        }
        if let Some(window) = self.window
            && let Err(error) = in_range("window", window, 1, i32::MAX.into())
        {
            return refuse(error.to_string());
        }
        if let Err(error) = in_range("sink", self.sink, 0, i32::MAX.into()) {
            return refuse(error.to_string());
        }
        if self.sink > 0 && self.window.is_none() {
            return refuse(format!("sink {} needs a window: without one a query sees all positions", self.sink));
        }
        let (limit, slots) = (1_i128 << 31, (i128::from(self.num_pages) + 1) * i128::from(self.page_size));
        if slots > limit {
            return refuse(format!(
                "(num_pages {} + 1) * page_size {} is {slots}, must not pass 2^31 = {limit}",
                self.num_pages, self.page_size
            ));
        }
        Ok(())
    }

    fn geometry(&self) -> Result<Geometry> {
        Geometry::new(self.page_size, self.hosts_drafts, self.layout)
    }
}

/// What all groups of a ledger have in common.
pub(crate) struct Sizes<'a> {
    pub(crate) shapes: &'a [Shape],
    pub(crate) num_rows: i64,
    pub(crate) max_context_len: i64,
    pub(crate) max_batch: i64,
    pub(crate) overlap_depth: i64,
    pub(crate) policy: Policy,
    pub(crate) max_chunk: i64,
    pub(crate) sessions: bool,
}

/// A page that a session's checkpoint keeps outside the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) column: u32,
    pub(crate) page: Page,
}

/// How long what a row gives back may still be touched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fence {
    /// The row's last launched step; 0 if pages are not fenced.
    pub(crate) step: u64,
    /// The last step up to which every step has finished on the device.
    pub(crate) completed: u64,
}

/// A group in use in a ledger.
#[derive(Debug, Clone)]
pub(crate) struct GroupState {
    pub(crate) spec: Group,
    pub(crate) page_size: i64,
    /// w; in a full group a number longer than any row.
    window: i64,
    /// Columns of the sink, which no row gives up.
    sinks: usize,
    /// Slots of a row, a multiple of `page_size`.
    pub(crate) row_width: i64,
    /// The reserve of each shape.
    pub(crate) reserves: Vec<Reserve>,
    pub(crate) pool: PagePool,
    pub(crate) table: PageTable,
    pub(crate) delta: Delta,
    /// `int32 [num_rows + 1]`: a, slots that each row holds, a multiple of `page_size`.
    pub(crate) allocated: Vec<i32>,
    /// `int32 [num_rows + 1]`: p, slots of shared pages, a multiple of `page_size`.
    pub(crate) protected: Vec<i32>,
    /// `int32 [num_rows + 1]`: e, slots below the window that were given back, a multiple of `page_size`.
    pub(crate) evicted: Vec<i32>,
    /// `[num_rows + 1]`, or empty in a full group: the pages of each checkpoint below e, ascending.
    pub(crate) kept: Vec<Vec<Kept>>,
    /// Number of pages in `kept`, of all rows.
    num_kept: usize,
}

/// Columns of a row, ascending: those of the sink, then those from e on.
pub(crate) type Columns = std::iter::Chain<std::ops::Range<usize>, std::ops::Range<usize>>;

type Held = std::result::Result<(), PageRecord>;

impl GroupState {
    pub(crate) fn new(spec: Group, sizes: &Sizes<'_>, row_width: Option<i64>) -> Result<Self> {
        let name = spec.name.clone();
        let refuse = |message: String| Error::Config(format!("group {name}: {message}"));
        spec.check()?;
        if let Some(window) = spec.window.filter(|&window| window > sizes.max_context_len) {
            return Err(refuse(format!(
                "window {window} must be at most max_context_len {}: a longer one hides nothing, leave it out",
                sizes.max_context_len
            )));
        }
        if let Some(window) = spec.window.filter(|window| spec.sink > sizes.max_context_len - window) {
            return Err(refuse(format!(
                "sink {} + window {window} must be at most max_context_len {}: longer ones hide nothing, leave them out",
                spec.sink, sizes.max_context_len
            )));
        }
        let geometry = spec.geometry()?;
        let page_size = spec.page_size;
        let least =
            sizing::row_width(geometry, sizes.shapes, sizes.max_context_len, sizes.overlap_depth, sizes.policy)?;
        let row_width = row_width.unwrap_or(least);
        if row_width < least || row_width % page_size != 0 {
            return Err(refuse(format!(
                "row_width must be at least {least} and a multiple of page_size {page_size}, got {row_width}"
            )));
        }
        if row_width > i32::MAX.into() {
            return Err(refuse(format!("row_width must be below 2^31, got {row_width}")));
        }
        let pages_per_row = row_width / page_size;
        let reserves = Reserve::for_shapes(geometry, sizes.shapes, sizes.policy, sizes.overlap_depth)?;
        let num_pages = spec.num_pages;
        let (needed, why) = least_pages(&spec, sizes, &reserves, row_width);
        if num_pages < needed {
            return Err(refuse(format!(
                "num_pages must be at least {needed}, {why}, got {num_pages}: raise it, or lower max_context_len"
            )));
        }
        let limit = 1_i128 << 31;
        let topk = sizes.shapes.iter().map(|shape| shape.topk).max().unwrap_or(1);
        let reads = i128::from(sizes.max_batch) * i128::from(topk) * i128::from(row_width);
        if reads >= limit {
            return Err(refuse(format!(
                "max_batch {} * topk {topk} * row_width {row_width} is {reads}, must be below 2^31 = {limit}",
                sizes.max_batch
            )));
        }
        let table = PageTable::new(sizes.num_rows, pages_per_row)?;
        let len = sizes.num_rows as usize + 1;
        Ok(Self {
            page_size,
            window: spec.window.unwrap_or(1 << 40),
            sinks: ceil_div(spec.sink, page_size) as usize,
            row_width,
            reserves,
            pool: PagePool::new(num_pages)?,
            delta: Delta::new(table.cells().len())?,
            table,
            allocated: zeroed(len, "allocated lengths")?,
            protected: zeroed(len, "protected lengths")?,
            evicted: zeroed(len, "evicted lengths")?,
            kept: if spec.window.is_some() { filled(Vec::new(), len, "checkpoints")? } else { Vec::new() },
            num_kept: 0,
            spec,
        })
    }

    /// Slots below this are outside every window of the queries at `len` and later, in whole pages; 0 in a full group.
    pub(crate) fn evict_to(&self, len: i32) -> i64 {
        let below = i64::from(len) - self.window + 1;
        if below <= 0 { 0 } else { below / self.page_size * self.page_size }
    }

    /// Columns that a row of `len` tokens must hold to go on from there, besides the sink: its window, and the page of
    /// its last token if that page is partly filled.
    pub(crate) fn window_columns(&self, len: i32) -> std::ops::Range<usize> {
        self.columns(self.evict_to(len), ceil_align(len.into(), self.page_size))
    }

    /// All columns that a row of `len` tokens must hold to go on from there.
    pub(crate) fn needed_columns(&self, len: i32) -> Columns {
        let window = self.window_columns(len);
        self.columns_in(window.start, 0..window.end)
    }

    /// The columns of a range that are held if all below `evicted` left, except the sink.
    pub(crate) fn columns_in(&self, evicted: usize, columns: std::ops::Range<usize>) -> Columns {
        let std::ops::Range { start, end } = columns;
        (start..self.sinks.min(evicted).min(end)).chain(evicted.max(start)..end)
    }

    /// Whether a holder of every column but those of `[sink, evicted)` lacks a part of the window below `len`.
    pub(crate) fn lacks_window(&self, evicted: i64, len: i32) -> bool {
        let window = self.window_columns(len);
        window.start.max(self.sinks) < window.end.min((evicted / self.page_size) as usize)
    }

    /// Slots of the sink, whole pages.
    pub(crate) fn sink_len(&self) -> i64 {
        self.sinks as i64 * self.page_size
    }

    /// Columns of the slots `[from, to)`, multiples of P.
    pub(crate) fn columns(&self, from: i64, to: i64) -> std::ops::Range<usize> {
        let page_size = self.page_size as u32; // half the time of a division with 64 bits
        (from as u32 / page_size) as usize..(to as u32 / page_size) as usize
    }

    /// `e / P` and `a / P` of the row.
    pub(crate) fn bounds(&self, row: Row) -> std::ops::Range<usize> {
        self.columns(self.evicted[row.at()].into(), self.allocated[row.at()].into())
    }

    /// Columns of the row that are in the table.
    pub(crate) fn held_columns(&self, row: Row) -> Columns {
        let bounds = self.bounds(row);
        self.columns_in(bounds.start, 0..bounds.end)
    }

    /// Whether the column of the row is in the table.
    pub(crate) fn is_held(&self, row: Row, column: usize) -> bool {
        let bounds = self.bounds(row);
        column < bounds.end && (column >= bounds.start || column < self.sinks)
    }

    /// Columns of the tokens `[start, end)` that are in the table; the bounds are page edges below `allocated_len`.
    pub(crate) fn held_range(&self, row: Row, start: i32, end: i32) -> Columns {
        self.columns_in(self.bounds(row).start, self.columns(start.into(), end.into()))
    }

    pub(crate) fn kept(&self, row: Row) -> &[Kept] {
        self.kept.get(row.at()).map_or(&[], Vec::as_slice)
    }

    /// The page of a column, in the table or kept by the row's checkpoint.
    fn page_of(&self, row: Row, column: usize) -> Option<Page> {
        if self.is_held(row, column) {
            return Some(Page(self.table.row(row)[column]));
        }
        let kept = self.kept(row);
        kept.binary_search_by_key(&column, |kept| kept.column as usize).ok().map(|at| kept[at].page)
    }

    /// A page of the row outside these columns of the table for which the test holds, and its column.
    pub(crate) fn elsewhere(
        &self,
        row: Row,
        columns: &std::ops::Range<usize>,
        fits: impl Fn(Page) -> bool,
    ) -> Option<(usize, Page)> {
        let others = self.held_columns(row).filter(|column| !columns.contains(column));
        let held = others.map(|column| (column, Page(self.table.row(row)[column])));
        let kept = self.kept(row).iter().map(|kept| (kept.column as usize, kept.page));
        held.chain(kept).find(|&(_, page)| fits(page))
    }

    /// Whether the row holds the page at that column.
    pub(crate) fn holds(&self, row: Row, column: usize, page: Page) -> bool {
        self.page_of(row, column) == Some(page)
    }

    /// Counts every page of the row as held by an idle row, or no longer so. A checkpoint's pages lie outside the table
    /// if a prepare evicted them and was cancelled, because a cancel makes the row idle again.
    pub(crate) fn set_idle(&mut self, row: Row, is_idle: bool) {
        let count = if is_idle { PagePool::rest } else { PagePool::wake };
        for column in self.held_columns(row) {
            self.table.row(row).get(column).iter().for_each(|&&page| count(&mut self.pool, Page(page)));
        }
        for checkpointed in self.kept.get(row.at()).into_iter().flatten() {
            count(&mut self.pool, checkpointed.page);
        }
    }

    /// Returns `len` if the row can be cut to that many tokens and go on from there. Otherwise returns a shorter
    /// length, such that no length in between works.
    pub(crate) fn next_cut(&self, row: Row, len: i32) -> i32 {
        let page_size = self.page_size as i32;
        if len < self.protected[row.at()] && len % page_size != 0 && self.indexed_alone(row, len).is_none() {
            return len / page_size * page_size;
        }
        if self.evict_to(len) >= i64::from(self.evicted[row.at()]) {
            return len;
        }
        let is_missing = |&column: &usize| self.page_of(row, column).is_none();
        let Some(missing) = self.window_columns(len).rev().find(is_missing) else { return len };
        if self.window == 1 {
            return missing as i32 * page_size; // A page edge, where the window is empty.
        }
        // A shorter length needs its last page. Below e, only a checkpoint keeps that page, or the sink has it.
        let kept = self.kept(row);
        match kept.partition_point(|kept| (kept.column as usize) < missing) {
            0 => self.sink_len() as i32,
            below => (kept[below - 1].column as i32 + 1) * page_size,
        }
    }

    /// The page of the slot `at`, if besides the row only the prefix index holds it.
    pub(crate) fn indexed_alone(&self, row: Row, at: i32) -> Option<Page> {
        let page = self.page_of(row, (i64::from(at) / self.page_size) as usize)?;
        (self.pool.entry_of(page) > 0 && self.pool.counts_of(page).holders == 2).then_some(page)
    }

    /// Appends to `after` what each lane will have allocated for a round of its shape. `allocated` is what it has now;
    /// its root may lie anywhere in `[lo, hi]`.
    pub(crate) fn reserve(&self, shapes: &[i32], allocated: &[i32], lo: &[i32], hi: &[i32], after: &mut Vec<i32>) {
        for (lanes, shape) in runs(shapes) {
            let reserve = &self.reserves[shape];
            reserve.extend_allocated(&allocated[lanes.clone()], &lo[lanes.clone()], &hi[lanes], after);
        }
    }

    /// Takes the memory for `takes` more pages and `cells` more cells of the table, and for giving all of them back.
    /// No later verb on what rows hold then asks for memory.
    pub(crate) fn make_room(&mut self, takes: usize, cells: usize) -> Result<()> {
        self.pool.make_room(takes)?;
        // Each cell that holds a page, and each page kept outside the table, may become a pending change.
        self.delta.make_room(self.num_held() + cells)
    }

    /// Cells of the table that hold a page, and pages that checkpoints keep.
    pub(crate) fn num_held(&self) -> usize {
        self.table.num_held() + self.num_kept
    }

    /// Takes the memory for the columns that the row's checkpoint keeps when e rises to `to`.
    pub(crate) fn make_room_to_keep(&mut self, row: Row, to: i64, checkpoint: Option<i32>) -> Result<()> {
        let (keep, gone) = (self.checkpoint_columns(checkpoint), self.evicted_columns(row, to));
        let both = keep.end.min(gone.end).saturating_sub(keep.start.max(gone.start));
        if both == 0 { Ok(()) } else { room(&mut self.kept[row.at()], both, "a checkpoint") }
    }

    /// Gives the row pages up to `to` slots. The caller has checked that there are enough free pages.
    pub(crate) fn grow(&mut self, row: Row, to: i64, step: u64, verb: Verb) -> Result<()> {
        for column in self.columns(self.allocated[row.at()].into(), to) {
            let page = self.pool.take(row, step, verb).ok_or_else(|| {
                Error::Corrupt(format!("group {}: the pool ran dry inside a claim that it had granted", self.spec.name))
            })?;
            self.set(row, column, page);
        }
        self.allocated[row.at()] = self.allocated[row.at()].max(to as i32);
        Ok(())
    }

    /// Writes a cell of the table and its delta.
    pub(crate) fn set(&mut self, row: Row, column: usize, page: Page) {
        let cell = self.table.cell(row, column);
        self.table.set(cell, page);
        self.delta.mark(cell);
    }

    /// Whether the row holds every page of these columns of the table.
    pub(crate) fn check_columns(&self, row: Row, mut columns: impl Iterator<Item = usize>) -> Held {
        columns.try_for_each(|column| self.pool.check_held(Page(self.table.row(row)[column]), row))
    }

    /// Whether the row holds every page that a cut to `len` would drop.
    pub(crate) fn check_cut(&self, row: Row, len: i32) -> Held {
        let (bounds, first) = (self.bounds(row), ceil_div(len.into(), self.page_size) as usize);
        self.check_columns(row, self.columns_in(bounds.start, first..bounds.end))?;
        self.kept(row).iter().try_for_each(|kept| self.pool.check_held(kept.page, row))
    }

    /// Whether the row holds every page at or beyond `to` slots, a multiple of P.
    pub(crate) fn check_shrink(&self, row: Row, to: i64) -> Held {
        self.check_columns(row, self.columns(to, self.allocated[row.at()].into()))
    }

    fn drop_column(&mut self, row: Row, column: usize, fence: Fence, verb: Verb) -> Held {
        self.pool.release(Page(self.table.row(row)[column]), row, fence.step, fence.completed, verb)?;
        self.set(row, column, Page::SINK);
        Ok(())
    }

    /// Takes the row's pages from `to` slots on, last first, so that an undone claim leaves the pool as it was.
    pub(crate) fn shrink(&mut self, row: Row, to: i64, fence: Fence, verb: Verb) -> Held {
        let (bounds, first) = (self.bounds(row), (to / self.page_size) as usize);
        for column in self.columns_in(bounds.start, first..bounds.end).rev() {
            self.drop_column(row, column, fence, verb)?;
        }
        self.allocated[row.at()] = self.allocated[row.at()].min(to as i32);
        Ok(())
    }

    /// Columns that leave the table when e rises to `to`.
    pub(crate) fn evicted_columns(&self, row: Row, to: i64) -> std::ops::Range<usize> {
        let from = i64::from(self.evicted[row.at()]).max(self.sink_len());
        self.columns(from, to.max(from))
    }

    /// The columns that the row's checkpoint of `checkpoint` tokens holds, besides the sink.
    pub(crate) fn checkpoint_columns(&self, checkpoint: Option<i32>) -> std::ops::Range<usize> {
        checkpoint.map_or(0..0, |len| self.window_columns(len))
    }

    /// Gives back the pages wholly below the window. Pages that the checkpoint needs stay with the row, outside the
    /// table.
    pub(crate) fn evict(&mut self, row: Row, to: i64, checkpoint: Option<i32>, fence: Fence, verb: Verb) -> Held {
        let keep = self.checkpoint_columns(checkpoint);
        for column in self.evicted_columns(row, to) {
            if keep.contains(&column) {
                let page = Page(self.table.row(row)[column]);
                self.kept[row.at()].push(Kept { column: column as u32, page });
                self.num_kept += 1;
                self.set(row, column, Page::SINK);
            } else {
                self.drop_column(row, column, fence, verb)?;
            }
        }
        self.evicted[row.at()] = self.evicted[row.at()].max(to as i32);
        Ok(())
    }

    /// Cuts the row to `len` tokens, which [`next_cut`](Self::next_cut) allowed. It drops the tail, brings the pages
    /// that the window needs back from the checkpoint, and forgets the checkpoint's pages unless it `stays`.
    pub(crate) fn cut(&mut self, row: Row, len: i32, stays: bool, fence: Fence, verb: Verb) -> Held {
        let at = row.at();
        let end = ceil_align(len.into(), self.page_size);
        let evict_to = self.evict_to(len);
        let is_evicted = evict_to < self.evicted[at].into();
        // An empty window at a page edge needs no page; the pages that the checkpoint keeps may lie far below it.
        let needs_back = is_evicted && !self.window_columns(len).is_empty();
        self.shrink(row, end, fence, verb)?;
        if needs_back {
            let last = (end / self.page_size) as usize;
            let kept = std::mem::take(&mut self.kept[at]);
            self.num_kept -= kept.len();
            let (back, gone) = kept.split_at(kept.partition_point(|kept| (kept.column as usize) < last));
            for kept in gone {
                self.pool.release(kept.page, row, fence.step, fence.completed, verb)?;
            }
            let first = back.first().map_or(evict_to, |kept| i64::from(kept.column) * self.page_size);
            for kept in back {
                self.set(row, kept.column as usize, kept.page);
            }
            self.evicted[at] = first.min(evict_to) as i32;
        } else {
            if !stays {
                self.drop_kept(row, fence, verb)?;
            }
            if is_evicted {
                self.evicted[at] = evict_to as i32;
            }
        }
        self.protected[at] = self.protected[at].min(len);
        // If e had passed the new end, the window there is empty, and so is the row's part of the table.
        self.allocated[at] = end as i32;
        Ok(())
    }

    /// Gives back the pages that the checkpoint keeps outside the table.
    pub(crate) fn drop_kept(&mut self, row: Row, fence: Fence, verb: Verb) -> Held {
        if let Some(kept) = self.kept.get_mut(row.at()) {
            self.num_kept -= kept.len();
            for kept in std::mem::take(kept) {
                self.pool.release(kept.page, row, fence.step, fence.completed, verb)?;
            }
        }
        Ok(())
    }

    /// Gives back all pages of the row.
    pub(crate) fn clear(&mut self, row: Row, fence: Fence, verb: Verb) -> Held {
        self.drop_kept(row, fence, verb)?;
        self.shrink(row, 0, fence, verb)?;
        self.protected[row.at()] = 0;
        self.evicted[row.at()] = 0;
        Ok(())
    }

    /// A copy for a snapshot. It has no delta, and cells that hold nothing are not touched.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let what = "lengths of a group";
        let columns = |row: Row| self.bounds(row).end;
        Ok(Self {
            spec: self.spec.clone(),
            reserves: memory::copied(&self.reserves, "the reserves of a group")?,
            pool: self.pool.try_clone()?,
            table: self.table.try_clone(columns)?,
            delta: Delta::none(),
            allocated: memory::copied(&self.allocated, what)?,
            protected: memory::copied(&self.protected, what)?,
            evicted: memory::copied(&self.evicted, what)?,
            kept: self.try_clone_kept()?,
            ..*self
        })
    }

    /// A copy of the pages that checkpoints keep.
    pub(crate) fn try_clone_kept(&self) -> Result<Vec<Vec<Kept>>> {
        let mut kept = filled(Vec::new(), self.kept.len(), "checkpoints")?;
        for (copy, kept) in kept.iter_mut().zip(&self.kept) {
            *copy = memory::copied(kept, "a checkpoint")?;
        }
        Ok(kept)
    }

    /// Takes over the pages that another state's checkpoints keep.
    pub(crate) fn set_kept(&mut self, kept: Vec<Vec<Kept>>) {
        self.num_kept = kept.iter().map(Vec::len).sum();
        self.kept = kept;
    }

    /// Adds every number of the rows and of the pool that decides what the group will do.
    pub(crate) fn hash(&self, digest: &mut Digest) {
        for lengths in [&self.allocated, &self.protected, &self.evicted] {
            digest.ints(lengths);
        }
        for at in 1..self.allocated.len() {
            let row = Row(at as i32);
            // Lengths that were written behind the ledger's back are reported by the audit and must not panic here.
            let held = self.held_columns(row).filter_map(|column| self.table.row(row).get(column));
            digest.numbers(held.copied());
            for kept in self.kept(row) {
                digest.ints(&[i64::from(kept.column), i64::from(kept.page.0)]);
            }
        }
        self.pool.hash(digest);
    }
}

/// The least number of pages with which one row alone cannot run dry, and what they are for.
fn least_pages(spec: &Group, sizes: &Sizes<'_>, reserves: &[Reserve], row_width: i64) -> (i64, String) {
    let page_size = spec.page_size;
    let row = (row_width / page_size, format!("the pages of one row of {row_width} slots"));
    let Some(window) = spec.window else { return row };
    let ahead = sizing::most_ahead(reserves, sizes.shapes, sizes.max_chunk, sizes.overlap_depth);
    let checkpoint = if sizes.sessions { ceil_div(window - 1, page_size) + 1 } else { 0 };
    let pages = sizing::window_pages(page_size, window, spec.sink, ahead) + checkpoint;
    if pages >= row.0 {
        return row; // Every page of a row has its own column.
    }
    let kept = if sizes.sessions { format!(" and the {checkpoint} pages of a checkpoint") } else { String::new() };
    let sink = if spec.sink > 0 { format!("a sink of {} and ", spec.sink) } else { String::new() };
    (pages, format!("{sink}a window of {window} with {ahead} slots ahead{kept}"))
}
