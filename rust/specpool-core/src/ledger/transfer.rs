//! Rows that move to another ledger: `export` and `import_row`.
//!
//! An export is a prefix that takes its row's place: it holds every page that the row's tokens need, also a partly
//! filled last one, and the row's state slot. So a reader of these pages may take its time, and a transfer that fails
//! gives the row back with [`Ledger::admit_on`]. An import is a row on pages of its own, whose contents the caller
//! brings.

use super::Ledger;
use super::share::{Prefix, PrefixPages, pages_of};
use crate::error::{Error, Result};
use crate::ids::{Page, Row, ceil_align};
use crate::log::call::{Call, Given};
use crate::memory::{room, with_room};
use crate::verb::Verb;

/// The pages of a prefix in one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixRun<'a> {
    /// The first pages of `pages` that are of the group's sink: their columns are 0, 1, and so on. 0 without a sink, and
    /// if the window reaches back to the sink.
    pub num_sinks: usize,
    /// The column of the first other page. What lies before it is below the window.
    pub first_column: usize,
    /// One page for each column.
    pub pages: &'a [Page],
}

impl Ledger {
    /// Gives the row back, and keeps the pages of its tokens as a prefix of exactly `resolved_len` tokens, whose id it
    /// returns. They are read-only until [`Ledger::release_prefix`]; [`Ledger::prefix_pages`] names them.
    /// [`Ledger::admit_on`] makes a row of them again. With a state group the prefix has the c tokens that the row's
    /// state contains, and holds its slot too, which [`Ledger::prefix_state_slot`] names. O(pages).
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (unknown row; it has no tokens), [`Error::NotReady`] (a round
    /// or an extend of it is in flight; its last launched step is not complete; a page copy into it is not finished;
    /// its state contains no tokens, or a window below them is not held), [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let export = ledger.export(row)?; // the row is free; its three pages are not
    /// assert_eq!((ledger.prefix_len(export)?, ledger.free_pages(0)?), (10, 61));
    /// let sent = ledger.prefix_pages(export, 0)?.pages.len(); // read them, and send them with the lengths
    ///
    /// let mut other = Ledger::new(config)?; // in another process
    /// let row = other.import_row(10, 10, Some("request-1"))?;
    /// assert_eq!(other.page_table(0)?.row(row)[..sent].len(), 3); // write what was sent to these pages
    /// let plan = other.prepare_extend(&[row.0], &[11], true)?; // and go on
    /// assert_eq!(plan.start[0], 10);
    ///
    /// ledger.release_prefix(export)?; // it has arrived
    /// assert_eq!(ledger.free_pages(0)?, 64);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn export(&mut self, row: Row) -> Result<u64> {
        self.gate()?;
        let row = self.rows.check_live(row.0)?;
        let (at, resolved) = (row.at(), self.rows.resolved[row.at()]);
        if resolved == 0 {
            return Err(Error::Shape(format!("export of {}: it has no tokens", self.rows.describe(row))));
        }
        self.check_still(row, Verb::Export.name())?;
        self.check_no_copy_into(row, Verb::Export.name())?;
        let len = self.len_to_share(row, Verb::Export)?;
        if len == 0 {
            return Err(Error::NotReady(format!(
                "export of {}: its state has 0 of {resolved} tokens: run a round of it first",
                self.rows.describe(row)
            )));
        }
        self.check_give_back(row)?;
        let mut pages = with_room(self.groups.len(), "an export")?;
        for (group_at, group) in self.groups.iter().enumerate() {
            let cells = group.table.row(row);
            let held = pages_of(group.needed_columns(len), |column| Page(cells[column]), "the pages of an export")?;
            self.check_pages_of(group_at, row, &held)?;
            pages.push(PrefixPages { evicted: group.evict_to(len) as i32, held });
        }
        room(&mut self.prefixes, 1, "prefixes")?;
        self.recorder.make_room(0, None)?;
        for (group, prefix) in pages.iter().enumerate() {
            self.share(group, &prefix.held, Verb::Export)?;
        }
        let slot = self.states.as_ref().map_or(Page::SINK, |states| states.slot_of(row));
        self.with_states(|states| states.pool.share(slot, Verb::Export))?;
        let prefix = self.next_prefix;
        self.next_prefix += 1;
        self.prefixes.push((prefix, Prefix { len, drafted: self.rows.drafted[at].min(len), slot, pages }));
        self.drop_row(row, Verb::Export)?;
        self.note(&Call::Export { row: row.0 }, &Given::Prefix(prefix), None);
        Ok(prefix)
    }

    /// Takes a free row of `len` tokens on pages of its own, with none below the windows, for KV that comes from
    /// elsewhere. Draft KV is valid below `drafted`. The row has no root until an extend of it has launched. With a
    /// state group it takes a state slot too, whose state contains all its tokens. O(pages).
    ///
    /// The caller writes the pages and the slot before anything reads them: before the next launch, and behind every
    /// launched forward. If the KV does not arrive, [`Ledger::abort`] takes the row back.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (`len` not in `1..=max_context_len`; `drafted` not in
    /// `0..=len`), [`Error::OutOfRows`], [`Error::OutOfPages`] (of the groups, then of the state group),
    /// [`Error::OutOfMemory`].
    pub fn import_row(&mut self, len: i32, drafted: i32, tag: Option<&str>) -> Result<Row> {
        self.gate()?;
        let max_len = self.max_context_len;
        if len < 1 || len > max_len {
            return Err(Error::Shape(format!("import_row: length must be in [1, {max_len}], got {len}")));
        }
        if drafted < 0 || drafted > len {
            return Err(Error::Shape(format!("import_row: drafted_len must be in [0, {len}], got {drafted}")));
        }
        let row = self.next_free_row()?;
        for at in 0..self.groups.len() {
            let (need, pool) = (self.groups[at].needed_columns(len).count(), &self.groups[at].pool);
            if need > pool.num_free() + pool.num_cached() {
                return Err(self.out_of_pages(at, need, pool.num_free()));
            }
        }
        self.check_free_slot()?;
        self.recorder.make_room(0, tag)?;
        let kept_tag = self.rows.make_room(tag)?;
        for group in &mut self.groups {
            let need = group.needed_columns(len).count();
            group.make_room(need, need)?;
        }
        self.make_room_for_slots(1, 0)?;
        let step = self.steps.next();
        self.rows.admit(kept_tag, step);
        for at in 0..self.groups.len() {
            self.evict_cached(at, self.groups[at].needed_columns(len).count(), Verb::ImportRow);
            let group = &mut self.groups[at];
            let first = group.evict_to(len);
            (group.allocated[row.at()], group.protected[row.at()]) = (0, 0);
            group.grow(row, group.sink_len().min(first), step, Verb::ImportRow)?;
            (group.evicted[row.at()], group.allocated[row.at()]) = (first as i32, first as i32);
            let end = ceil_align(len.into(), group.page_size);
            group.grow(row, end, step, Verb::ImportRow)?;
        }
        self.import_state(row, len, step)?;
        self.rows.set_resolved(row, len);
        self.rows.drafted[row.at()] = drafted;
        self.note(&Call::ImportRow { length: len, drafted_len: drafted }, &Given::Row(row), tag);
        Ok(row)
    }

    /// The pages of a prefix or an export in the group. O(1).
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such prefix, or no such group.
    pub fn prefix_pages(&self, prefix: u64, group: usize) -> Result<PrefixRun<'_>> {
        let (pages, state) = (&self.prefix(prefix)?.pages, self.group(group)?);
        let PrefixPages { evicted, held } = &pages[group];
        let first_column = (i64::from(*evicted) / state.page_size) as usize;
        let num_sinks = state.columns_in(first_column, 0..first_column).count();
        Ok(PrefixRun { num_sinks, first_column, pages: held })
    }

    /// The state slot that contains the tokens of an export; page 0 without a state group. O(1).
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such prefix.
    pub fn prefix_state_slot(&self, prefix: u64) -> Result<Page> {
        Ok(self.prefix(prefix)?.slot)
    }

    /// Below this, a prefix or an export has draft KV. O(1).
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such prefix.
    pub fn prefix_drafted_len(&self, prefix: u64) -> Result<i32> {
        Ok(self.prefix(prefix)?.drafted)
    }
}
