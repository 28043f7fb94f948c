//! A group: a page pool, the page table that it fills, and the rules by which a row grows in it (spec 2).

use crate::delta::Delta;
use crate::error::{Error, Result};
use crate::ids::{Page, Row, zeroed};
use crate::layout::Layout;
use crate::page_pool::{PagePool, PageRecord, Verb};
use crate::page_table::PageTable;
use crate::shape::Shape;
use crate::sizing::{self, Geometry, Policy, Reserve};

/// What a group is to be.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// How errors and audits call it.
    pub name: String,
    /// P: slots of a page.
    pub page_size: i64,
    /// Pages in all.
    pub num_pages: i64,
    /// Whether the draft model's branches live in its rows.
    pub hosts_drafts: bool,
    /// Where they lie.
    pub layout: Layout,
}

impl Group {
    /// Whether a group can be like this at all; a ledger checks more (spec 2).
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

/// What a ledger fixes for all its groups.
pub(crate) struct Sizes<'a> {
    pub(crate) shapes: &'a [Shape],
    pub(crate) num_rows: i64,
    pub(crate) max_context_len: i64,
    pub(crate) max_batch: i64,
    pub(crate) overlap_depth: i64,
    pub(crate) policy: Policy,
}

/// A group at work in a ledger.
#[derive(Debug, Clone)]
pub(crate) struct GroupState {
    pub(crate) spec: Group,
    pub(crate) page_size: i64,
    /// Slots of a row, a multiple of `page_size`.
    pub(crate) row_width: i64,
    /// Per shape.
    pub(crate) reserves: Vec<Reserve>,
    pub(crate) pool: PagePool,
    pub(crate) table: PageTable,
    pub(crate) delta: Delta,
    /// `int32 [num_rows + 1]`: slots that each row holds, a multiple of `page_size`.
    pub(crate) allocated: Vec<i32>,
}

impl GroupState {
    pub(crate) fn new(spec: Group, sizes: &Sizes<'_>, row_width: Option<i64>) -> Result<Self> {
        let name = spec.name.clone();
        let refuse = |message: String| Error::Config(format!("group {name}: {message}"));
        spec.check()?;
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
        let pages_per_row = row_width / page_size;
        let num_pages = spec.num_pages;
        if num_pages < pages_per_row {
            return Err(refuse(format!(
                "num_pages must be at least {pages_per_row}, the pages of one row of {row_width} slots, got {num_pages}"
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
        Ok(Self {
            spec,
            page_size,
            row_width,
            reserves: Reserve::for_shapes(geometry, sizes.shapes, sizes.policy, sizes.overlap_depth)?,
            pool: PagePool::new(num_pages)?,
            delta: Delta::new(table.cells().len())?,
            table,
            allocated: zeroed(sizes.num_rows as usize + 1, "allocated lengths")?,
        })
    }

    fn columns(&self, from: i64, to: i64) -> std::ops::Range<usize> {
        (from / self.page_size) as usize..(to / self.page_size) as usize
    }

    /// Gives the row pages up to `to` slots; the caller has counted the free ones.
    pub(crate) fn grow(&mut self, row: Row, to: i64, step: u64, verb: Verb) -> Result<()> {
        for column in self.columns(self.allocated[row.at()].into(), to) {
            let page = self.pool.take(row, step, verb).ok_or_else(|| {
                Error::Corrupt(format!("group {}: the pool ran dry inside a claim that it had granted", self.spec.name))
            })?;
            let cell = self.table.cell(row, column);
            self.table.set(cell, page);
            self.delta.mark(cell);
        }
        self.allocated[row.at()] = self.allocated[row.at()].max(to as i32);
        Ok(())
    }

    /// Whether the row owns every page from `to` slots on.
    pub(crate) fn check_shrink(&self, row: Row, to: i64) -> std::result::Result<(), PageRecord> {
        self.columns(to, self.allocated[row.at()].into())
            .try_for_each(|column| self.pool.check_owned(Page(self.table.row(row)[column]), row))
    }

    /// Takes the row's pages from `to` slots on, last first, so that an undone claim leaves the pool as it was.
    pub(crate) fn shrink(
        &mut self,
        row: Row,
        to: i64,
        fence: Option<u64>,
        verb: Verb,
    ) -> std::result::Result<(), PageRecord> {
        for column in self.columns(to, self.allocated[row.at()].into()).rev() {
            let cell = self.table.cell(row, column);
            self.pool.release(Page(self.table.cells()[cell]), row, fence, verb)?;
            self.table.set(cell, Page::SINK);
            self.delta.mark(cell);
        }
        self.allocated[row.at()] = self.allocated[row.at()].min(to as i32);
        Ok(())
    }
}
