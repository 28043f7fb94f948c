//! Pages for a prefix cache that is not the ledger's own: `lend`, `rebind`, `admit_lent`, `release_lent`.
//!
//! Such a cache (another engine's radix tree) decides itself what it keeps and what it gives up. To the ledger it is
//! one more holder of a page. A lent page is read-only, as every shared page is.

use super::Ledger;
use super::share::{Start, StartLens};
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::log::call::{Call, Given};
use crate::memory::{collected, gathered, with_room};
use crate::state::lent_pages::Unnamed;
use crate::verb::Verb;

/// Why nothing is lent with states.
const NO_STATE: &str = "a cache of pages has no states, and without its state a row cannot go on from KV";

impl Ledger {
    /// Makes a prefix cache outside the ledger a holder of the row's pages of the tokens `[start, end)`, in every
    /// group. They are read-only from now on, and outlive the row until [`Ledger::release_lent`]. The cache finds them
    /// in the row of each page table; where a window has passed, there is none.
    ///
    /// `start` and `end` are multiples of every group's page size. `start` is at most `protected_len`, so that what is
    /// read-only stays the beginning of the row. O(pages).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Config`] (a state group), [`Error::Shape`] (unknown row; a bound that
    /// is no page edge of every group, or past `resolved_len`; an empty range; a gap behind `protected_len`),
    /// [`Error::NotReady`] (a step that is not complete writes these pages; a page copy into the row is not finished),
    /// [`Error::PageState`] (a page that is lent already).
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let pages = ledger.page_table(0)?.row(row)[..2].to_vec(); // what the cache notes for the first 8 tokens
    /// ledger.lend(row, 0, 8)?;
    /// ledger.finish(row)?;
    /// assert_eq!(ledger.free_pages(0)?, 62);
    ///
    /// let hit = ledger.admit_lent(&pages, 8, Some("request-2"))?; // another request begins with these tokens
    /// assert_eq!(ledger.resolved_len()[hit.at()], 8);
    /// ledger.release_lent(0, &pages)?; // the cache gives them up; the row keeps them
    /// ledger.finish(hit)?;
    /// assert_eq!(ledger.free_pages(0)?, 64);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn lend(&mut self, row: Row, start: i32, end: i32) -> Result<()> {
        self.gate()?;
        self.check_stateless(Verb::Lend.name(), NO_STATE)?;
        let row = self.rows.check_live(row.0)?;
        self.check_lendable(Verb::Lend, row, start, end)?;
        for (at, group) in self.groups.iter().enumerate() {
            for column in group.held_range(row, start, end) {
                let page = Page(group.table.row(row)[column]);
                if group.pool.is_lent(page) {
                    return Err(self.lent_error(at, page, "lent already"));
                }
                group.pool.check_held(page, row).map_err(|record| self.page_error(at, record))?;
            }
        }
        let drafted = self.rows.drafted[row.at()];
        for at in 0..self.groups.len() {
            for column in self.groups[at].held_range(row, start, end) {
                let group = &mut self.groups[at];
                let page = Page(group.table.row(row)[column]);
                let is_drafted = (column as i64 + 1) * group.page_size <= drafted.into();
                let lent = group.pool.lend(page, is_drafted, Verb::Lend);
                lent.map_err(|record| self.page_error(at, record))?;
            }
            let protected = &mut self.groups[at].protected[row.at()];
            *protected = end.max(*protected);
        }
        self.note(&Call::Lend { row: row.0, start, end }, &Given::Nothing(()), None);
        Ok(())
    }

    /// Puts lent pages in place of the row's own pages of the tokens `[start, end)`, which hold the same: the row
    /// becomes a holder of them and gives its own back, behind its fence. For a row that has computed what the cache
    /// had already. The caller vouches for the contents.
    ///
    /// `pages` has one page for each column of the range, group after group; 0 where a window has passed. The bounds
    /// are as in [`Ledger::lend`]. O(pages of the row).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Config`] (a state group), [`Error::Shape`] (as `lend`; a wrong number
    /// of pages; a page where the row holds none, or none where it holds one), [`Error::PageState`] (a page that is not
    /// lent), [`Error::Shape`] (one that is named twice; one that the row holds at another position; one without draft
    /// KV that the row has: lend the row's page instead), [`Error::NotReady`] as `lend`, [`Error::OutOfMemory`].
    pub fn rebind(&mut self, row: Row, start: i32, end: i32, pages: &[i32]) -> Result<()> {
        self.gate()?;
        self.check_stateless(Verb::Rebind.name(), NO_STATE)?;
        let row = self.rows.check_live(row.0)?;
        self.check_range(Verb::Rebind, row, start, end)?;
        self.check_num_pages(Verb::Rebind.name(), end - start, pages.len())?;
        let mut rest = pages;
        for at in 0..self.groups.len() {
            let of_group;
            (of_group, rest) = rest.split_at(self.num_columns(at, end - start));
            self.check_rebind(at, row, start, end, of_group)?;
        }
        self.check_lendable(Verb::Rebind, row, start, end)?;
        for (at, group) in self.groups.iter().enumerate() {
            let columns = group.held_range(row, start, end);
            group.check_columns(row, columns).map_err(|record| self.page_error(at, record))?;
        }
        self.recorder.make_room(pages.len(), None)?;
        for group in &mut self.groups {
            group.make_room(0, 0)?;
        }

        // Nothing is refused from here on. The count of reclaimable pages goes by the pages that a row has.
        let was_idle = self.rows.idle[row.at()];
        self.set_idle(row, false);
        let (fence, mut rest) = (self.fence(row), pages);
        for at in 0..self.groups.len() {
            let of_group;
            (of_group, rest) = rest.split_at(self.num_columns(at, end - start));
            let first = self.num_columns(at, start);
            for column in self.groups[at].held_range(row, start, end) {
                let group = &mut self.groups[at];
                let (own_page, page) = (Page(group.table.row(row)[column]), Page(of_group[column - first]));
                let moved = group.pool.share(page, Verb::Rebind).and_then(|()| {
                    group.pool.release(own_page, row, fence.step, fence.completed, Verb::Rebind)?;
                    group.set(row, column, page);
                    Ok(())
                });
                moved.map_err(|record| self.page_error(at, record))?;
            }
            let protected = &mut self.groups[at].protected[row.at()];
            *protected = end.max(*protected);
        }
        self.set_idle(row, was_idle);
        self.note(&Call::Rebind { row: row.0, start, end, pages: pages.into() }, &Given::Nothing(()), None);
        Ok(())
    }

    /// Takes a free row on `len` tokens whose KV is in lent pages. The row shares them. It has no root until an extend
    /// of it has launched. `pages` has one page for each column, group after group; 0 for those below the group's
    /// window. Draft KV is valid up to the first page that was lent without. O(pages).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Config`] (a state group), [`Error::Shape`] (`len` is no page edge of
    /// every group, or not in `1..=max_context_len`; a wrong number of pages; no page within the sink or the window
    /// below `len`), [`Error::PageState`] (a page that is not lent), [`Error::Shape`] (one that is named twice),
    /// [`Error::OutOfRows`], [`Error::OutOfMemory`].
    pub fn admit_lent(&mut self, pages: &[i32], len: i32, tag: Option<&str>) -> Result<Row> {
        self.gate()?;
        self.check_stateless("admit_lent", NO_STATE)?;
        let (edge, max_len) = (self.page_edge(), self.max_context_len);
        if len < 1 || len > max_len || i64::from(len) % edge != 0 {
            return Err(Error::Shape(format!(
                "admit_lent: length must be a multiple of {edge} up to {max_len}, got {len}"
            )));
        }
        self.check_num_pages("admit_lent", len, pages.len())?;
        let (mut rest, mut drafted) = (pages, len);
        let mut starts = with_room(self.groups.len(), "a row")?;
        for at in 0..self.groups.len() {
            let of_group;
            (of_group, rest) = rest.split_at(self.num_columns(at, len));
            // The window begins behind the first run of columns without a page; those of the sink stand before it.
            let group = &self.groups[at];
            let (page_size, evict_to) = (group.page_size, group.evict_to(len));
            let sinks = (group.sink_len() / page_size) as usize;
            let rest_of_sink = of_group.get(sinks..).unwrap_or_default();
            let gone = match rest_of_sink.iter().take_while(|&&page| page == 0).count() {
                0 => 0,
                zeros => sinks + zeros,
            };
            if gone as i64 * page_size > evict_to {
                return Err(Error::Shape(format!(
                    "admit_lent in group {}: the pages of the columns [{sinks}, {gone}) are 0, at most those below {} are \
                     outside the window below {len}",
                    group.spec.name,
                    evict_to / page_size
                )));
            }
            let columns = || group.columns_in(gone, 0..of_group.len());
            let held = gathered(columns().map(|column| of_group[column]), "the pages of a row")?;
            self.check_lent("admit_lent", at, &held)?;
            let group = &self.groups[at];
            let mut cells = group.columns_in(gone, 0..of_group.len()).zip(&held);
            if let Some((column, _)) = cells.find(|&(_, &page)| !group.pool.is_lent_drafted(Page(page))) {
                drafted = drafted.min((column as i64 * page_size) as i32);
            }
            let shared = collected(held.iter().map(|&page| Page(page)), "the pages of a row")?;
            starts.push(Start { evicted: (gone as i64 * page_size) as i32, shared, tail: None });
        }
        let lens = StartLens { len, drafted, slot: Page::SINK };
        let row = self.new_row(starts, &lens, tag, pages.len(), Verb::AdmitLent)?;
        self.note(&Call::AdmitLent { length: len, pages: pages.into() }, &Given::Row(row), tag);
        Ok(row)
    }

    /// Notes that the cache outside holds these pages of the group no longer. Rows that share them keep them. All or
    /// none. O(pages).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (no such group; no such page), [`Error::PageState`] (a page
    /// that is not lent), [`Error::Shape`] (one that is named twice), [`Error::OutOfMemory`] (if calls are noted).
    pub fn release_lent(&mut self, group: usize, pages: &[i32]) -> Result<()> {
        self.gate()?;
        self.group(group)?;
        self.check_lent(Verb::ReleaseLent.name(), group, pages)?;
        self.recorder.make_room(pages.len(), None)?;
        let completed = self.steps.completed();
        for &page in pages.iter().rev() {
            let released = self.groups[group].pool.release_lent(Page(page), completed, Verb::ReleaseLent);
            released.map_err(|record| self.page_error(group, record))?;
        }
        self.note(&Call::ReleaseLent { group: group as i32, pages: pages.into() }, &Given::Nothing(()), None);
        Ok(())
    }

    /// The pages of the group that are lent to a cache outside, ascending. O(pages).
    ///
    /// # Errors
    /// As [`Ledger::group_spec`]; [`Error::OutOfMemory`].
    pub fn lent_pages(&self, group: usize) -> Result<Vec<i32>> {
        gathered(self.group(group)?.pool.lent_pages().map(|page| page.0), "the lent pages")
    }

    /// Columns of `len` tokens in the group.
    fn num_columns(&self, group: usize, len: i32) -> usize {
        (i64::from(len) / self.groups[group].page_size) as usize
    }

    fn check_num_pages(&self, verb: &str, len: i32, given: usize) -> Result<()> {
        let needed: usize = (0..self.groups.len()).map(|at| self.num_columns(at, len)).sum();
        if given == needed {
            return Ok(());
        }
        Err(Error::Shape(format!("{verb}: {len} tokens are {needed} pages of all groups, got {given}")))
    }

    /// The least common multiple of the page sizes. An entry of the index may be shorter, because it ends where the
    /// longest text does.
    fn page_edge(&self) -> i64 {
        self.groups.iter().fold(1, |edge: i64, group| {
            let (mut divisor, mut rest) = (edge, group.page_size);
            while rest > 0 {
                (divisor, rest) = (rest, divisor % rest);
            }
            (edge / divisor).saturating_mul(group.page_size)
        })
    }

    fn check_range(&self, verb: Verb, row: Row, start: i32, end: i32) -> Result<()> {
        let (edge, resolved) = (self.page_edge(), self.rows.resolved[row.at()]);
        let is_edge = |len: i32| i64::from(len) % edge == 0;
        if start < 0 || start >= end || end > resolved || !is_edge(start) || !is_edge(end) {
            return Err(Error::Shape(format!(
                "{verb} of {}: [{start}, {end}) must be a range in [0, {resolved}) with multiples of {edge}, the least \
                 common multiple of the page sizes, as bounds",
                self.rows.describe(row)
            )));
        }
        match self.groups.iter().find(|group| start > group.protected[row.at()]) {
            Some(group) => Err(Error::Shape(format!(
                "{verb} of {} in group {}: [{start}, {end}) leaves a gap behind protected_len {}",
                self.rows.describe(row),
                group.spec.name,
                group.protected[row.at()]
            ))),
            None => Ok(()),
        }
    }

    /// Refuses a range that is wrong, or that something may still write.
    fn check_lendable(&self, verb: Verb, row: Row, start: i32, end: i32) -> Result<()> {
        self.check_range(verb, row, start, end)?;
        if let Some((step, from)) = self.first_written(row).filter(|&(_, from)| from < end) {
            return Err(Error::NotReady(format!(
                "{verb} of {}: step {step} writes from position {from} on and is not complete, the range ends at {end}",
                self.rows.describe(row)
            )));
        }
        self.check_no_copy_into(row, verb.name())
    }

    /// Checks the pages that a rebind names in one group.
    fn check_rebind(&mut self, at: usize, row: Row, start: i32, end: i32, pages: &[i32]) -> Result<()> {
        let (group, first) = (&self.groups[at], self.num_columns(at, start));
        let is_gone = |&index: &usize| !group.is_held(row, first + index);
        if let Some(index) = (0..pages.len()).filter(is_gone).find(|&index| pages[index] != 0) {
            return Err(Error::Shape(format!(
                "rebind of {} in group {}: it holds no page at position {}, got page {}",
                self.rows.describe(row),
                group.spec.name,
                (first + index) as i64 * group.page_size,
                pages[index]
            )));
        }
        let columns = group.held_range(row, start, end);
        let held = gathered(columns.clone().map(|column| pages[column - first]), "the pages of a row")?;
        self.name_lent(Verb::Rebind.name(), at, &held)?;
        let group = &self.groups[at];
        let range = first..first + pages.len();
        let elsewhere = group.elsewhere(row, &range, |page| group.pool.is_named(page));
        self.groups[at].pool.unname(&held);
        let (group, drafted) = (&self.groups[at], self.rows.drafted[row.at()]);
        if let Some((column, page)) = elsewhere {
            return Err(Error::Shape(format!(
                "rebind of {} in group {}: page {} holds its position {}, and cannot hold another",
                self.rows.describe(row),
                group.spec.name,
                page.0,
                column as i64 * group.page_size
            )));
        }
        let loses_drafts = |&(column, page): &(usize, i32)| {
            (column as i64 * group.page_size) < drafted.into() && !group.pool.is_lent_drafted(Page(page))
        };
        match columns.zip(held).find(loses_drafts) {
            Some((_, page)) => Err(Error::Shape(format!(
                "rebind of {} in group {}: page {page} was lent without draft KV, the row has it up to {drafted}: lend \
                 the row's page instead",
                self.rows.describe(row),
                group.spec.name
            ))),
            None => Ok(()),
        }
    }

    /// Refuses pages of which one is not lent, or is named twice.
    fn check_lent(&mut self, verb: &str, at: usize, pages: &[i32]) -> Result<()> {
        self.name_lent(verb, at, pages)?;
        self.groups[at].pool.unname(pages);
        Ok(())
    }

    /// As [`check_lent`](Self::check_lent), and leaves the pages marked as named.
    fn name_lent(&mut self, verb: &str, at: usize, pages: &[i32]) -> Result<()> {
        let group = &mut self.groups[at];
        let Err((place, why)) = group.pool.name(pages) else { return Ok(()) };
        let (page, name) = (pages[place], &group.spec.name);
        Err(match why {
            Unnamed::Unknown => {
                let last = group.spec.num_pages;
                Error::Shape(format!("{verb} of page {page} in group {name}: its pages are 1 to {last}"))
            }
            Unnamed::Twice => Error::Shape(format!("{verb}: page {page} of group {name} is named twice")),
            Unnamed::NotLent(record) => self.lent_error(at, record.page, "not lent"),
        })
    }

    fn lent_error(&self, at: usize, page: Page, why: &str) -> Error {
        match self.page_error(at, self.groups[at].pool.seen(page)) {
            Error::PageState { group, page, state, owner } => {
                Error::PageState { group, page, state: format!("{state}, {why}"), owner }
            }
            other => other,
        }
    }
}
