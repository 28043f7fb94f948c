//! Rows on common pages: `pin_prefix`, `release_prefix`, `admit_on` and `fork`, and the copies of their tails.
//!
//! Whole pages below `resolved_len` are shared, read-only. A partly filled tail is copied at once, so that no page is
//! ever written by one holder and read by another.

use super::Ledger;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::{Page, Row, ceil_align};
use crate::log::call::{Call, Given};
use crate::memory::{copied, room, with_room};
use crate::state::group::{Columns, GroupState};
use crate::state::page_copy::{PageCopy, TailCopy};
use crate::state::step::StepRecord;
use crate::verb::Verb;

/// Pages that are kept for later requests, whatever becomes of the row that wrote them.
#[derive(Debug, Clone)]
pub(crate) struct Prefix {
    /// Tokens.
    pub(crate) len: i32,
    /// Draft KV is valid below this.
    pub(crate) drafted: i32,
    /// The state slot that contains its tokens; page 0 without a state group.
    pub(crate) slot: Page,
    /// Per group.
    pub(crate) pages: Vec<PrefixPages>,
}

/// A prefix's pages in one group.
#[derive(Debug, Clone)]
pub(crate) struct PrefixPages {
    /// e: slots below it are not held, except the sink's.
    pub(super) evicted: i32,
    /// The pages of the sink's columns below e, and of the columns from e on.
    pub(crate) held: Vec<Page>,
}

impl Prefix {
    pub(crate) fn hash(&self, digest: &mut Digest) {
        digest.ints(&[self.len, self.drafted]);
        for pages in &self.pages {
            digest.word(pages.evicted as u64);
            digest.numbers(pages.held.iter().map(|page| page.0));
        }
        // With a state group, every prefix has one.
        if self.slot != Page::SINK {
            digest.ints(&[self.slot.0]);
        }
    }

    fn try_clone(&self) -> Result<Self> {
        let mut pages = with_room(self.pages.len(), "a prefix")?;
        for group in &self.pages {
            pages.push(PrefixPages { evicted: group.evicted, held: copied(&group.held, "the pages of a prefix")? });
        }
        Ok(Self { pages, ..*self })
    }
}

/// What a new row starts with, besides its pages.
pub(super) struct StartLens {
    pub(super) len: i32,
    pub(super) drafted: i32,
    /// The state slot that contains its tokens; page 0 if there is none.
    pub(super) slot: Page,
}

/// What a new row starts with in one group.
pub(super) struct Start {
    pub(super) evicted: i32,
    pub(super) shared: Vec<Page>,
    /// The page of its partly filled tail, to be copied.
    pub(super) tail: Option<Page>,
}

impl Ledger {
    /// Keeps the row's first tokens for later requests: at most `len`, and only as many as fill whole pages in every
    /// group. The pages are shared, read-only, until [`Ledger::release_prefix`]. Returns the prefix's id; ids count
    /// from 1.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Config`] (a state group), [`Error::Shape`] (unknown row; `len` not in
    /// `1..=resolved_len`; no whole page fits), [`Error::NotReady`] (a step that is not complete writes these pages; a
    /// page copy into the row is not finished; the window below the prefix's end is not held), [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let system_prompt = ledger.pin_prefix(row, 10)?;
    /// assert_eq!(ledger.prefix_len(system_prompt)?, 8); // whole pages
    /// ledger.finish(row)?;
    /// assert_eq!(ledger.free_pages(0)?, 62); // two pages stay for later requests
    /// ledger.release_prefix(system_prompt)?;
    /// assert_eq!(ledger.free_pages(0)?, 64);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn pin_prefix(&mut self, row: Row, len: i32) -> Result<u64> {
        self.gate()?;
        self.check_stateless(
            Verb::PinPrefix.name(),
            "a prefix ends where a state does, and seldom at a whole page: fork the row, and export the fork",
        )?;
        let row = self.rows.check_live(row.0)?;
        let (at, resolved) = (row.at(), self.rows.resolved[row.at()]);
        if len < 1 || len > resolved {
            return Err(Error::Shape(format!(
                "pin_prefix of {}: length must be in [1, {resolved}], got {len}",
                self.rows.describe(row)
            )));
        }
        let whole = |page_size: i64| i64::from(len) / page_size * page_size;
        let length = self.groups.iter().map(|group| whole(group.page_size)).min().unwrap_or(0) as i32;
        if length == 0 {
            return Err(Error::Shape(format!(
                "pin_prefix of {}: {len} tokens fill no whole page of every group",
                self.rows.describe(row)
            )));
        }
        let end = |page_size: i64| ceil_align(length.into(), page_size) as i32;
        let pages_end = self.groups.iter().map(|group| end(group.page_size)).max().unwrap_or(0);
        if let Some((step, from)) = self.first_written(row).filter(|&(_, from)| from < pages_end) {
            return Err(Error::NotReady(format!(
                "pin_prefix of {}: step {step} writes from position {from} on and is not complete, the prefix's pages \
                 end at {pages_end}",
                self.rows.describe(row)
            )));
        }
        self.check_no_copy_into(row, Verb::PinPrefix.name())?;
        for group in &self.groups {
            let (evicted, needed) = (i64::from(group.evicted[at]), group.evict_to(length));
            if group.lacks_window(evicted, length) {
                return Err(Error::NotReady(format!(
                    "pin_prefix of {} in group {}: the window below {length} needs the slots from {needed} on, held \
                     are those from {evicted} on",
                    self.rows.describe(row),
                    group.spec.name
                )));
            }
        }
        let mut pages = with_room(self.groups.len(), "a prefix")?;
        for group in &self.groups {
            let evicted = i64::from(group.evicted[at]).min(group.evict_to(length));
            let columns = group.columns(evicted, end(group.page_size).into());
            let row = group.table.row(row);
            let columns = group.columns_in(columns.start, 0..columns.end);
            let held = pages_of(columns, |column| Page(row[column]), "the pages of a prefix")?;
            pages.push(PrefixPages { evicted: evicted as i32, held });
        }
        for (at, group) in pages.iter().enumerate() {
            self.check_pages_of(at, row, &group.held)?;
        }
        room(&mut self.prefixes, 1, "prefixes")?;
        for (group, prefix) in pages.iter().enumerate() {
            self.share(group, &prefix.held, Verb::PinPrefix)?;
            let group = &mut self.groups[group];
            group.protected[at] = group.protected[at].max(end(group.page_size));
        }
        let prefix = self.next_prefix;
        self.next_prefix += 1;
        self.prefixes.push((
            prefix,
            Prefix { len: length, drafted: self.rows.drafted[at].min(length), slot: Page::SINK, pages },
        ));
        self.note(&Call::PinPrefix { row: row.0, length: len }, &Given::Prefix(prefix), None);
        Ok(prefix)
    }

    /// Stops keeping the prefix's pages. Rows that share them keep them.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such prefix.
    pub fn release_prefix(&mut self, prefix: u64) -> Result<()> {
        self.gate()?;
        let index = self.place_of_prefix(prefix)?;
        let completed = self.steps.completed();
        for (at, group) in self.prefixes[index].1.pages.iter().enumerate() {
            let pool = &self.groups[at].pool;
            let checked = group.held.iter().try_for_each(|&page| pool.check_shared(page));
            checked.map_err(|record| self.page_error(at, record))?;
        }
        self.check_prefix_slot(self.prefixes[index].1.slot)?;
        let (_, Prefix { pages, slot, .. }) = self.prefixes.remove(index);
        if slot != Page::SINK {
            self.with_states(|states| states.pool.release_shared(slot, completed, Verb::ReleasePrefix))?;
        }
        for (at, group) in pages.iter().enumerate() {
            for &page in group.held.iter().rev() {
                let released = self.groups[at].pool.release_shared(page, completed, Verb::ReleasePrefix);
                released.map_err(|record| self.page_error(at, record))?;
            }
        }
        self.note(&Call::ReleasePrefix { prefix }, &Given::Nothing(()), None);
        Ok(())
    }

    /// Takes a free row on the first `len` tokens of a pinned prefix (all of them by default). The row shares the
    /// whole pages, and gets a new page for a partly filled tail. The next step that is prepared carries the copy of
    /// the tail. The row has no root until an extend of it has launched. With a state group it has all tokens of the
    /// export and shares its state, or none.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (no such prefix, `len` not in `0..=` its length; with a state
    /// group, `len` is neither 0 nor all of it), [`Error::NotReady`] (a window below `len` is not held), [`Error::OutOfRows`], [`Error::OutOfPages`],
    /// [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let prefix = ledger.pin_prefix(row, 8)?;
    /// let other = ledger.admit_on(prefix, Some(6), Some("request-2"))?; // six of the eight tokens are its own too
    /// let plan = ledger.prepare_extend(&[other.0], &[20], true)?;
    /// assert_eq!(plan.start[0], 6); // the prefill begins behind them
    /// let copy = plan.page_copies[0]; // the first page is shared; two tokens of the second are copied
    /// assert_eq!(copy.tokens, 2);
    /// assert_eq!(copy.src, ledger.page_table(0)?.row(row)[1]);
    /// assert_eq!(copy.dst, ledger.page_table(0)?.row(other)[1]);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn admit_on(&mut self, prefix: u64, len: Option<i32>, tag: Option<&str>) -> Result<Row> {
        self.gate()?;
        let pinned = self.prefix(prefix)?;
        let (max_len, drafted, slot) = (pinned.len, pinned.drafted, pinned.slot);
        let len = len.unwrap_or(max_len);
        if len < 0 || len > max_len {
            return Err(Error::Shape(format!("admit on prefix {prefix}: length must be in [0, {max_len}], got {len}")));
        }
        if slot != Page::SINK && len != 0 && len != max_len {
            return Err(Error::Shape(format!(
                "admit on prefix {prefix}: length must be 0 or {max_len}, the tokens that its state contains, got {len}"
            )));
        }
        let mut starts = with_room(self.groups.len(), "a row")?;
        for (group, pages) in self.groups.iter().zip(&pinned.pages) {
            let held = i64::from(pages.evicted);
            if group.lacks_window(held, len) {
                return Err(Error::NotReady(format!(
                    "admit on prefix {prefix} in group {}: the window below {len} needs the slots from {} on, held \
                     are those from {held} on",
                    group.spec.name,
                    group.evict_to(len)
                )));
            }
            let evicted = held.min(group.evict_to(len));
            let first = (held / group.page_size) as usize;
            let sinks = group.columns_in(first, 0..first).count();
            let page = |column: usize| pages.held[if column < sinks { column } else { column - first + sinks }];
            starts.push(Self::start(group, evicted, len, page)?);
        }
        self.check_prefix_slot(slot)?;
        let slot = if len == 0 { Page::SINK } else { slot };
        let lens = StartLens { len, drafted: drafted.min(len), slot };
        let row = self.new_row(starts, &lens, tag, 0, Verb::AdmitOn)?;
        self.note(&Call::AdmitOn { prefix, length: Some(len) }, &Given::Row(row), tag);
        Ok(row)
    }

    /// Takes a free row with the same tokens as `parent`: shares its whole pages and copies its tail. The new row has
    /// no root until an extend of it has launched. With a state group it has the c tokens that the parent's state
    /// contains, and shares the state.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (unknown row), [`Error::NotReady`] (a round or an extend of
    /// the parent is in flight; its last launched step is not complete; a page copy into it is not finished; a window
    /// below the parent's state is not held),
    /// [`Error::OutOfRows`], [`Error::OutOfPages`], [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let twin = ledger.fork(row, Some("second sample"))?; // two answers to one prompt
    /// let (pages, twins) = (ledger.page_table(0)?.row(row), ledger.page_table(0)?.row(twin));
    /// assert_eq!(pages[..2], twins[..2]); // 8 of the 10 tokens lie on common pages
    /// assert_ne!(pages[2], twins[2]);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn fork(&mut self, parent: Row, tag: Option<&str>) -> Result<Row> {
        self.gate()?;
        let parent = self.rows.check_live(parent.0)?;
        self.check_still(parent, Verb::Fork.name())?;
        self.check_no_copy_into(parent, Verb::Fork.name())?;
        let (at, len) = (parent.at(), self.len_to_share(parent, Verb::Fork)?);
        let drafted = self.rows.drafted[at];
        self.check_slots(parent)?;
        let mut starts = with_room(self.groups.len(), "a row")?;
        for (group_at, group) in self.groups.iter().enumerate() {
            let evicted = i64::from(group.evicted[at]).min(group.evict_to(len));
            let row = group.table.row(parent);
            let start = Self::start(group, evicted, len, |column| Page(row[column]))?;
            self.check_pages_of(group_at, parent, &start.shared)?;
            starts.push(start);
        }
        let slot = self.states.as_ref().map_or(Page::SINK, |states| states.slot_of(parent));
        let row = self.new_row(starts, &StartLens { len, drafted: drafted.min(len), slot }, tag, 0, Verb::Fork)?;
        for group in &mut self.groups {
            let whole = i64::from(len) / group.page_size * group.page_size;
            group.protected[at] = group.protected[at].max(whole as i32);
        }
        self.note(&Call::Fork { row: parent.0 }, &Given::Row(row), tag);
        Ok(row)
    }

    /// The tokens of a row that another may go on from: all of them; with a state group, those that its state contains.
    pub(super) fn len_to_share(&self, row: Row, verb: Verb) -> Result<i32> {
        let (at, resolved) = (row.at(), self.rows.resolved[row.at()]);
        let len = self.states.as_ref().map_or(resolved, |states| states.len[at]);
        match self.groups.iter().find(|group| group.lacks_window(group.evicted[at].into(), len)) {
            None => Ok(len),
            Some(group) => Err(Error::NotReady(format!(
                "{verb} of {} in group {}: its state has {len} of {resolved} tokens, and the window below needs the \
                 slots from {} on, held are those from {} on: run a round of it first",
                self.rows.describe(row),
                group.spec.name,
                group.evict_to(len),
                group.evicted[at]
            ))),
        }
    }

    /// Checks that a prefix holds its state slot.
    fn check_prefix_slot(&self, slot: Page) -> Result<()> {
        match self.states.as_ref().filter(|_| slot != Page::SINK) {
            None => Ok(()),
            Some(states) => states.pool.check_shared(slot).map_err(|record| self.slot_error(record)),
        }
    }

    /// What a row of `len` tokens starts with; `page` returns the page of a column.
    pub(super) fn start(group: &GroupState, evicted: i64, len: i32, page: impl Fn(usize) -> Page) -> Result<Start> {
        let whole = (i64::from(len) / group.page_size) as usize;
        let columns = group.columns_in((evicted / group.page_size) as usize, 0..whole);
        let shared = pages_of(columns, &page, "the pages of a row")?;
        let tail = (i64::from(len) % group.page_size != 0).then(|| page(whole));
        Ok(Start { evicted: evicted as i32, shared, tail })
    }

    /// Takes a row with the shared pages of `starts`, and a page for each tail. `noted` numbers of the call are noted.
    pub(super) fn new_row(
        &mut self,
        starts: Vec<Start>,
        &StartLens { len, drafted, slot }: &StartLens,
        tag: Option<&str>,
        noted: usize,
        verb: Verb,
    ) -> Result<Row> {
        let row = self.next_free_row()?;
        for (at, start) in starts.iter().enumerate() {
            let pool = &self.groups[at].pool;
            // The row takes some of the cached pages itself.
            let taken = start.shared.iter().chain(&start.tail).filter(|&&page| pool.is_cached(page)).count();
            if start.tail.is_some() && pool.num_free() + pool.num_cached() - taken == 0 {
                return Err(self.out_of_pages(at, 1, 0));
            }
        }
        let step = self.steps.next();
        self.recorder.make_room(noted, tag)?;
        let tag = self.rows.make_room(tag)?;
        for (group, start) in self.groups.iter_mut().zip(&starts) {
            let tails = usize::from(start.tail.is_some());
            group.make_room(tails, start.shared.len() + tails)?;
        }
        // Copies that ride on unlaunched steps come back if the step is cancelled.
        let riding: usize = self.steps.unlaunched().map(|record| record.before.copies.len()).sum();
        room(&mut self.copies, riding + starts.len(), "page copies")?;
        self.rows.admit(tag, step);
        // Before pages are evicted, which may take the slot from the index.
        self.with_states(|states| states.start(row, slot, len, verb))?;
        for (at, start) in starts.iter().enumerate() {
            self.share(at, &start.shared, verb)?;
            start.tail.iter().for_each(|&src| self.groups[at].pool.hold(src));
        }
        for (at, start) in starts.into_iter().enumerate() {
            if start.tail.is_some() {
                self.evict_cached(at, 1, verb);
            }
            let group = &mut self.groups[at];
            let first = (i64::from(start.evicted) / group.page_size) as usize;
            let whole = i64::from(len) / group.page_size * group.page_size;
            for (column, &page) in group.columns_in(first, 0..(whole / group.page_size) as usize).zip(&start.shared) {
                group.set(row, column, page);
            }
            group.evicted[row.at()] = start.evicted;
            group.protected[row.at()] = whole as i32;
            group.allocated[row.at()] = whole as i32;
            if let Some(src) = start.tail {
                group.grow(row, whole + group.page_size, step, verb)?;
                let column = (whole / group.page_size) as usize;
                let dst = Page(group.table.row(row)[column]);
                let tokens = i64::from(len) - whole;
                let copy = PageCopy { group: at as i32, src: src.0, dst: dst.0, tokens: tokens as i32 };
                group.pool.hold(dst);
                self.copies.push(TailCopy { copy, row, column });
            }
        }
        self.rows.set_resolved(row, len);
        self.rows.drafted[row.at()] = drafted;
        self.feed.iter_mut().for_each(|feed| feed.admitted(row));
        Ok(row)
    }

    /// Adds one holder to each of the pages, which were checked before.
    pub(super) fn share(&mut self, group: usize, pages: &[Page], verb: Verb) -> Result<()> {
        let pool = &mut self.groups[group].pool;
        let shared = pages.iter().try_for_each(|&page| pool.share(page, verb));
        shared.map_err(|record| self.page_error(group, record))
    }

    /// The row that the next admission takes.
    pub(super) fn next_free_row(&self) -> Result<Row> {
        let (num_rows, fenced) = (self.rows.num_rows(), self.rows.num_fenced());
        self.rows.next_free().ok_or(Error::OutOfRows { num_rows, fenced })
    }

    pub(super) fn prefix(&self, prefix: u64) -> Result<&Prefix> {
        Ok(&self.prefixes[self.place_of_prefix(prefix)?].1)
    }

    fn place_of_prefix(&self, prefix: u64) -> Result<usize> {
        let index = self.prefixes.binary_search_by_key(&prefix, |&(id, _)| id);
        index.map_err(|_| Error::Shape(format!("there is no prefix {prefix}")))
    }

    /// Copies of all prefixes, with their ids.
    pub(super) fn try_clone_prefixes(&self) -> Result<Vec<(u64, Prefix)>> {
        let mut prefixes = with_room(self.prefixes.len(), "prefixes")?;
        for (id, prefix) in &self.prefixes {
            prefixes.push((*id, prefix.try_clone()?));
        }
        Ok(prefixes)
    }

    pub(super) fn check_pages_of(&self, group: usize, row: Row, pages: &[Page]) -> Result<()> {
        let held = pages.iter().try_for_each(|&page| self.groups[group].pool.check_held(page, row));
        held.map_err(|record| self.page_error(group, record))
    }

    /// Among the incomplete steps of the row, the one that writes from the lowest position on, and that position.
    pub(super) fn first_written(&self, row: Row) -> Option<(u64, i32)> {
        let writes = |record: &StepRecord| {
            let lane = record.plan.rows.iter().position(|&other| other == row.0)?;
            self.writes_from(record, lane).map(|from| (record.plan.step, from))
        };
        self.steps.incomplete().filter_map(writes).min_by_key(|&(_, from)| from)
    }

    /// The position from which on an incomplete step writes the row of its lane; `None` if the row is another
    /// request's by now.
    pub(super) fn writes_from(&self, record: &StepRecord, lane: usize) -> Option<i32> {
        let plan = &record.plan;
        let (row, stands) = (Row(plan.rows[lane]), plan.epochs[lane] == self.rows.epoch[plan.rows[lane] as usize]);
        let is_its = if self.steps.is_launched(plan.step) { self.rows.is_resident(row.0, plan.step) } else { stands };
        // The row's oldest round in flight starts at r. A younger one may start at its lo, if an older one fails.
        let is_oldest = stands && self.rows.oldest_round(row) == plan.step;
        let from = if is_oldest { plan.lo[lane].max(self.rows.resolved[row.at()]) } else { plan.lo[lane] };
        is_its.then_some(from)
    }

    /// `free` counts the pages that the call could have had, including those that it would evict itself.
    pub(super) fn out_of_pages(&self, group: usize, need: usize, free: usize) -> Error {
        let GroupState { spec, pool, .. } = &self.groups[group];
        let (cached, fenced, reclaimable) = (pool.num_cached(), pool.num_fenced(), pool.num_reclaimable());
        Error::OutOfPages { group: spec.name.clone(), need, free, cached, fenced, reclaimable }
    }

    /// Every page of the group that a pinned prefix holds, once for each prefix that holds it.
    pub(crate) fn prefix_holders(&self, group: usize) -> impl Iterator<Item = Page> + '_ {
        self.prefixes.iter().flat_map(move |(_, prefix)| prefix.pages[group].held.iter().copied())
    }
}

/// The pages of the columns.
pub(super) fn pages_of(columns: Columns, page: impl Fn(usize) -> Page, what: &'static str) -> Result<Vec<Page>> {
    let mut pages = with_room(columns.clone().count(), what)?;
    pages.extend(columns.map(page));
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_sees_every_number_of_a_prefix() {
        let prefix = |len, drafted, slot, evicted, pages: &[i32]| {
            let held = pages.iter().map(|&page| Page(page)).collect();
            let mut digest = Digest::new();
            Prefix { len, drafted, slot: Page(slot), pages: vec![PrefixPages { evicted, held }] }.hash(&mut digest);
            digest.value()
        };
        let mut hashes = [
            prefix(4, 4, 0, 0, &[1, 2]),
            prefix(8, 4, 0, 0, &[1, 2]),
            prefix(4, 8, 0, 0, &[1, 2]),
            prefix(4, 4, 1, 0, &[1, 2]),
            prefix(4, 4, 2, 0, &[1, 2]),
            prefix(4, 4, 0, 2, &[1, 2]),
            prefix(4, 4, 0, 0, &[1, 3]),
            prefix(4, 4, 0, 0, &[1]),
        ];
        hashes.sort_unstable();
        assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
