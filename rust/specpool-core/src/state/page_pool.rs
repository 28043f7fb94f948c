//! The pages of one group: which are free, owned, shared, cached or fenced, by whom, and until when.
//!
//! Every page is in exactly one state:
//!
//! ```text
//!           take             share (a second holder)
//!   free ---------> owned -------------------------> shared
//!    ^                |                                |
//!    |                |  the last holder drops it      |
//!    |   complete     v                                |
//!    '-----------  fenced <----------------------------'     (straight to free when nothing can still touch it)
//! ```
//!
//! A page keeps the latest fence of everyone who held it. It is also fenced while a page copy that has not been
//! launched holds it. A shared page stays shared and read-only until nobody holds it. Each transition checks the state
//! that it leaves, in O(1), always.
//!
//! The prefix index is a holder too. A page that nobody else holds is *cached* (`indexed_pages`): it keeps its contents,
//! and it is given up when free pages do not suffice. So is a prefix cache outside the ledger (`lent_pages`).

use crate::check::in_range;
use crate::digest::Digest;
use crate::error::Result;
use crate::ids::{Page, Row};
use crate::memory::{self, room};
use crate::state::indexed_pages::PageList;
use crate::verb::Verb;

/// The state of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PageState {
    /// Can be handed out.
    #[default]
    Free,
    /// Held by one row, which may write it.
    Owned,
    /// Read-only, with a count of holders (rows, pinned prefixes, the prefix index).
    Shared,
    /// Given back, but a launched step or a page copy may still touch it.
    Fenced,
    /// Held by the prefix index alone; can be handed out after it is evicted.
    Cached,
}

impl std::fmt::Display for PageState {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Free => "free",
            Self::Owned => "owned",
            Self::Shared => "shared",
            Self::Fenced => "fenced",
            Self::Cached => "cached",
        })
    }
}

/// The ownership map's line for one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRecord {
    /// The page.
    pub page: Page,
    /// Its state.
    pub state: PageState,
    /// The row that took it from the pool last; row 0 if none ever did.
    pub owner: Row,
    /// Rows and pinned prefixes that hold it, and the prefix index and a cache outside if they do.
    pub holders: u32,
    /// The step that it was last taken for.
    pub birth_step: u64,
    /// The latest launched step that may touch it, over everyone who gave it back since it was taken; 0 if none.
    pub fence: u64,
    /// The verb that touched it last.
    pub last_verb: Verb,
}

/// One page's line, without the page's number.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Line {
    birth_step: u64,
    pub(super) fence: u64,
    owner: i32,
    pub(super) holders: u32,
    /// How many of the holders are idle rows.
    idle_holders: u32,
    /// Page copies that are not launched yet and read or write it.
    pub(super) copies: u32,
    /// The prefix index's entry that holds the page; 0 if none does.
    pub(super) entry: u32,
    /// The pages before and behind it in a [`PageList`], 0 at the ends.
    pub(super) before: i32,
    pub(super) behind: i32,
    pub(super) state: PageState,
    pub(super) last_verb: Verb,
    /// Whether a prefix cache outside holds the page (`lent_pages`).
    pub(super) lent: u8,
}

/// Who uses one page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PageCounts {
    /// Rows and pinned prefixes that hold it, and the prefix index and a cache outside if they do.
    pub(crate) holders: u32,
    /// How many of these are idle rows.
    pub(crate) idle_holders: u32,
    /// Page copies that are not launched yet and read or write it.
    pub(crate) copies: u32,
}

impl Line {
    /// Of a page that was just taken.
    fn taken(owner: Row, birth_step: u64, last_verb: Verb) -> Self {
        Self { birth_step, owner: owner.0, holders: 1, state: PageState::Owned, last_verb, ..Self::default() }
    }

    /// Rows and pinned prefixes that hold the page.
    pub(super) fn others(&self) -> u32 {
        self.holders.saturating_sub(u32::from(self.entry > 0))
    }

    /// Whether every holder, besides the prefix index, is an idle row.
    fn is_reclaimable(&self) -> bool {
        self.idle_holders > 0 && self.idle_holders == self.others()
    }
}

/// The pages `1..=num_pages` of one group.
#[derive(Debug, Clone)]
pub struct PagePool {
    num_pages: usize,
    /// Pages whose every holder is an idle row.
    num_reclaimable: usize,
    /// Pages that are shared.
    pub(super) num_shared: usize,
    /// Free pages that were handed out before; the last one is handed out first.
    returned: Vec<Page>,
    /// Pages that were given back: free once their fence is complete and no copy holds them.
    fenced: Vec<Page>,
    /// Fenced pages of the prefix index: cached once their fence is complete and no copy holds them.
    pub(super) waiting: PageList,
    /// Cached pages, the least recently used one first.
    pub(super) cached: PageList,
    /// The ownership map of page 0 and of every page handed out so far. Pages behind its end are free, so a huge pool
    /// costs nothing before it is used.
    pub(super) map: Vec<Line>,
}

type Checked = std::result::Result<(), PageRecord>;

impl PagePool {
    /// A pool of free pages.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) unless `1 <= num_pages < 2^31`.
    pub fn new(num_pages: i64) -> Result<Self> {
        let num_pages = in_range("num_pages", num_pages, 1, i32::MAX.into())? as usize;
        let map = vec![Line::default()];
        let (waiting, cached) = (PageList::default(), PageList::default());
        Ok(Self {
            num_pages,
            num_reclaimable: 0,
            num_shared: 0,
            returned: Vec::new(),
            fenced: Vec::new(),
            waiting,
            cached,
            map,
        })
    }

    /// Pages in all.
    #[must_use]
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Pages that can be handed out now.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.num_pages + 1 - self.map.len() + self.returned.len()
    }

    /// Pages given back that a launched step or a page copy may still touch.
    #[must_use]
    pub fn num_fenced(&self) -> usize {
        self.fenced.len() + self.waiting.len()
    }

    /// Pages whose every holder is an idle row, besides the prefix index.
    #[must_use]
    pub fn num_reclaimable(&self) -> usize {
        self.num_reclaimable
    }

    /// Pages that are shared: read-only, and held by rows or pinned prefixes.
    #[must_use]
    pub fn num_shared(&self) -> usize {
        self.num_shared
    }

    /// Pages that were handed out at least once, and page 0: those for which the ownership map has memory.
    #[must_use]
    pub fn num_mapped(&self) -> usize {
        self.map.len()
    }

    /// Bytes that the pool uses for each page handed out so far.
    #[must_use]
    pub const fn bytes_per_page() -> usize {
        size_of::<Line>() + 2 * size_of::<Page>()
    }

    /// Takes the memory for handing out `takes` more pages, and for giving back and fencing every page handed out so
    /// far. Then no [`take`](Self::take) and no release asks for more.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn make_room(&mut self, takes: usize) -> Result<()> {
        let fresh = takes.saturating_sub(self.returned.len());
        room(&mut self.map, fresh, "the ownership map")?;
        let all = self.map.len() + fresh;
        let (returned, fenced) = (self.returned.len(), self.fenced.len());
        room(&mut self.returned, all.saturating_sub(returned), "free pages")?;
        room(&mut self.fenced, all.saturating_sub(fenced), "fenced pages")
    }

    /// A copy with enough spare room for every page handed out so far to be given back.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let copied = |pages: &[Page]| -> Result<Vec<Page>> {
            let mut copy = memory::with_room(self.map.len(), "a page pool")?;
            copy.extend_from_slice(pages);
            Ok(copy)
        };
        let (returned, fenced) = (copied(&self.returned)?, copied(&self.fenced)?);
        Ok(Self { returned, fenced, map: memory::copied(&self.map, "a page pool")?, ..*self })
    }

    /// The record of a page. A page that was never handed out, and an id that is no page, read as free.
    pub(super) fn line(&self, page: Page) -> Line {
        self.map.get(page.at()).copied().unwrap_or_default()
    }

    pub(crate) fn seen(&self, page: Page) -> PageRecord {
        let Line { birth_step, fence, owner, holders, state, last_verb, .. } = self.line(page);
        PageRecord { page, state, owner: Row(owner), holders, birth_step, fence, last_verb }
    }

    /// The ownership map's line for `page`, if there is such a page.
    #[must_use]
    pub fn record(&self, page: Page) -> Option<PageRecord> {
        let exists = page.0 >= 1 && page.at() <= self.num_pages;
        exists.then(|| self.seen(page))
    }

    /// The lines of page 0 and of every page up to `last`.
    pub(crate) fn records(&self, last: usize) -> impl ExactSizeIterator<Item = PageRecord> {
        let len = last.min(self.num_pages) + 1;
        (0..len).map(|page| self.seen(Page(page as i32)))
    }

    /// Hands a free page to `owner`, or returns nothing if there is none. It asks for memory unless
    /// [`make_room`](Self::make_room) has.
    pub fn take(&mut self, owner: Row, birth_step: u64, last_verb: Verb) -> Option<Page> {
        let page = match self.returned.pop() {
            Some(page) => page,
            None if self.map.len() <= self.num_pages => {
                self.map.push(Line::default());
                Page(self.map.len() as i32 - 1)
            }
            None => return None,
        };
        self.map[page.at()] = Line::taken(owner, birth_step, last_verb);
        Some(page)
    }

    /// Hands `count` pages to `owner`, the same ones as [`take`](Self::take) one after the other; fewer if fewer are
    /// free. Returns how many.
    pub(crate) fn take_each(
        &mut self,
        count: usize,
        owner: Row,
        birth_step: u64,
        last_verb: Verb,
        mut visit: impl FnMut(Page),
    ) -> usize {
        let count = count.min(self.num_free());
        let line = Line::taken(owner, birth_step, last_verb);
        let again = count.min(self.returned.len());
        for page in self.returned.drain(self.returned.len() - again..).rev() {
            self.map[page.at()] = line;
            visit(page);
        }
        let first = self.map.len();
        self.map.resize(first + count - again, line);
        (first..self.map.len()).for_each(|page| visit(Page(page as i32)));
        count
    }

    /// The free pages, in the order in which they are handed out.
    pub(crate) fn free_pages(&self) -> impl Iterator<Item = Page> + '_ {
        let fresh = (self.map.len()..=self.num_pages).map(|page| Page(page as i32));
        self.returned.iter().rev().copied().chain(fresh)
    }

    /// Whether `row` may hold `page`: it owns it, or the page is shared.
    ///
    /// # Errors
    /// The page's record when it is free, fenced, another row's, or no page at all.
    pub fn check_held(&self, page: Page, row: Row) -> Checked {
        let line = self.line(page);
        match line.state {
            PageState::Owned if line.owner == row.0 => Ok(()),
            PageState::Shared => Ok(()),
            _ => Err(self.seen(page)),
        }
    }

    /// Notes that a row that holds the page has become idle.
    pub(crate) fn rest(&mut self, page: Page) {
        self.change(page, |line| line.idle_holders += 1);
    }

    /// Notes that an idle row that holds the page is idle no longer.
    pub(crate) fn wake(&mut self, page: Page) {
        self.change(page, |line| line.idle_holders = line.idle_holders.saturating_sub(1));
    }

    /// Changes a page's holders and updates the count of reclaimable pages.
    pub(super) fn change(&mut self, page: Page, change: impl FnOnce(&mut Line)) {
        // A cell that was written behind the ledger's back is reported by the audit and must not panic here.
        let Some(line) = self.map.get_mut(page.at()) else { return };
        let was_reclaimable = line.is_reclaimable();
        change(line);
        self.num_reclaimable += usize::from(line.is_reclaimable());
        self.num_reclaimable -= usize::from(was_reclaimable);
    }

    /// Adds one holder, which is not idle. From now on the page is read-only.
    ///
    /// # Errors
    /// The page's record when nobody holds it.
    pub fn share(&mut self, page: Page, verb: Verb) -> Checked {
        if self.line(page).holders == 0 {
            return Err(self.seen(page));
        }
        self.unlist(page);
        self.set_shared(page);
        self.change(page, |line| {
            line.holders += 1;
            line.last_verb = verb;
        });
        Ok(())
    }

    pub(super) fn set_shared(&mut self, page: Page) {
        let line = &mut self.map[page.at()];
        self.num_shared += usize::from(line.state != PageState::Shared);
        line.state = PageState::Shared;
    }

    /// Drops `row`, which is not idle, as a holder. `fence` is the last launched step by which the row may touch the
    /// page (0 if there is none, or if it is complete). When the last holder drops the page, it becomes free, or
    /// fenced until every fence left on it is complete. If only the prefix index holds it then, it becomes cached
    /// instead of free.
    ///
    /// # Errors
    /// As [`PagePool::check_held`]; nothing is changed then.
    pub fn release(&mut self, page: Page, row: Row, fence: u64, completed: u64, verb: Verb) -> Checked {
        self.check_held(page, row)?;
        self.drop_holder(page, fence, completed, verb);
        Ok(())
    }

    /// Whether the page is shared.
    ///
    /// # Errors
    /// The page's record when it is not.
    pub(crate) fn check_shared(&self, page: Page) -> Checked {
        if self.line(page).state == PageState::Shared { Ok(()) } else { Err(self.seen(page)) }
    }

    /// Drops a pinned prefix as a holder of the page.
    ///
    /// # Errors
    /// The page's record when it is not shared.
    pub fn release_shared(&mut self, page: Page, completed: u64, verb: Verb) -> Checked {
        self.check_shared(page)?;
        self.drop_holder(page, 0, completed, verb);
        Ok(())
    }

    fn drop_holder(&mut self, page: Page, fence: u64, completed: u64, verb: Verb) {
        self.change(page, |line| {
            line.holders -= 1;
            line.fence = line.fence.max(fence);
            line.last_verb = verb;
        });
        self.settle(page, completed);
    }

    /// Puts a page that is in no list, and that no row or pinned prefix holds, into the list of its new state.
    pub(super) fn settle(&mut self, page: Page, completed: u64) {
        let line = &mut self.map[page.at()];
        if line.others() > 0 {
            return;
        }
        let is_touched = line.fence > completed || line.copies > 0;
        let is_indexed = line.entry > 0;
        self.num_shared -= usize::from(line.state == PageState::Shared);
        line.state = match (is_touched, is_indexed) {
            (true, _) => PageState::Fenced,
            (false, true) => PageState::Cached,
            (false, false) => PageState::Free,
        };
        match (is_touched, is_indexed) {
            (true, true) => self.waiting.push(&mut self.map, page),
            (true, false) => self.fenced.push(page),
            (false, true) => self.cached.push(&mut self.map, page),
            (false, false) => self.returned.push(page),
        }
    }

    /// Notes that a page copy, not launched yet, reads or writes the page.
    pub(crate) fn hold(&mut self, page: Page) {
        self.map[page.at()].copies += 1;
        if self.map[page.at()].state == PageState::Cached {
            self.unlist(page);
            self.settle(page, 0);
        }
    }

    /// Notes that the copy was launched with the step `fence`, or dropped (0).
    pub(crate) fn unhold(&mut self, page: Page, fence: u64, completed: u64, verb: Verb) {
        let line = &mut self.map[page.at()];
        line.copies -= 1;
        line.fence = line.fence.max(fence);
        if line.state != PageState::Fenced || line.copies > 0 || line.fence > completed {
            return;
        }
        line.last_verb = verb;
        if line.entry > 0 {
            self.unlist(page);
        } else {
            self.fenced.retain(|&other| other != page);
        }
        self.settle(page, completed);
    }

    /// Holders that the page must lose to be free or cached at once; `None` if a fence or a copy would keep it.
    pub(crate) fn holders_if_unfenced(&self, page: Page, completed: u64) -> Option<u32> {
        let line = self.line(page);
        (line.fence <= completed && line.copies == 0).then_some(line.others())
    }

    /// Ends the fences of steps up to `completed`, which have finished on the device.
    pub fn complete(&mut self, completed: u64) {
        let Self { fenced, returned, map, .. } = self;
        fenced.retain(|&page| {
            let line = &mut map[page.at()];
            let stays = line.fence > completed || line.copies > 0;
            if !stays {
                line.state = PageState::Free;
                line.last_verb = Verb::Complete;
                returned.push(page);
            }
            stays
        });
        self.complete_waiting(completed);
    }

    /// Adds everything that decides what the pool will do: the lines of pages in use, and the order of the free ones.
    pub(crate) fn hash(&self, digest: &mut Digest) {
        for (page, line) in self.map.iter().enumerate().filter(|(_, line)| line.state != PageState::Free) {
            digest.ints(&[page as i64, line.state as i64, i64::from(line.owner), i64::from(line.holders)]);
            digest.word(line.fence);
            digest.word(line.copies.into());
            if line.lent > 0 {
                digest.word(line.lent.into());
            }
        }
        digest.numbers(self.fenced.iter().map(|page| page.0));
        for list in [&self.waiting, &self.cached].into_iter().filter(|list| list.len() > 0) {
            digest.numbers(list.pages(&self.map).map(|page| page.0));
        }
        // Pages that were handed out and given back in order are as if never touched.
        let mut fresh = self.map.len() as i32;
        let mut returned = &self.returned[..];
        while let Some((&bottom, above)) = returned.split_first().filter(|(bottom, _)| bottom.0 == fresh - 1) {
            (fresh, returned) = (bottom.0, above);
        }
        digest.word(fresh as u64);
        digest.numbers(returned.iter().map(|page| page.0));
    }

    /// Every broken rule of the pool itself, with the numbers, and the page if the rule is about one (for the audit).
    pub(crate) fn broken(&self, completed: u64) -> Result<Vec<(Option<Page>, String)>> {
        let mut report = Vec::new();
        let marked = |state| self.map[1..].iter().filter(|line| line.state == state).count();
        let counted = [PageState::Free, PageState::Fenced, PageState::Cached].map(marked);
        let listed = [self.returned.len(), self.num_fenced(), self.cached.len()];
        if counted != listed {
            let text = format!(
                "{} returned pages are marked free, {} fenced and {} cached, the lists hold {}, {} and {}",
                counted[0], counted[1], counted[2], listed[0], listed[1], listed[2]
            );
            report.push((None, text));
        }
        let mut listed = memory::zeroed(self.map.len(), "an audit of pages")?;
        let with_state = |state| move |page| (state, page);
        let lists = (self.returned.iter().copied().map(with_state(PageState::Free)))
            .chain(self.fenced.iter().copied().map(with_state(PageState::Fenced)))
            .chain(self.waiting.pages(&self.map).map(with_state(PageState::Fenced)))
            .chain(self.cached.pages(&self.map).map(with_state(PageState::Cached)));
        for (state, page) in lists {
            if std::mem::replace(&mut listed[page.at()], true) {
                report.push((Some(page), format!("page {} is listed twice", page.0)));
            }
            if self.map[page.at()].state != state {
                let text = format!("page {} is listed {state}, marked {}", page.0, self.map[page.at()].state);
                report.push((Some(page), text));
            }
        }
        let reclaimable = self.map.iter().filter(|line| line.is_reclaimable()).count();
        if reclaimable != self.num_reclaimable {
            let text = format!("{reclaimable} pages are held by idle rows only, {} are counted", self.num_reclaimable);
            report.push((None, text));
        }
        let shared = marked(PageState::Shared);
        if shared != self.num_shared {
            report.push((None, format!("{shared} pages are shared, {} are counted", self.num_shared)));
        }
        for (page, line) in self.map.iter().enumerate() {
            let mut note = |text: String| report.push((Some(Page(page as i32)), text));
            let (is_indexed, others) = (line.entry > 0, line.others());
            let is_right = match line.state {
                PageState::Owned => !is_indexed && others == 1,
                PageState::Shared => others > 0,
                PageState::Cached => is_indexed && others == 0,
                PageState::Free => !is_indexed && others == 0,
                PageState::Fenced => others == 0,
            };
            if !is_right {
                let indexed = if is_indexed { ", one of them the prefix index" } else { "" };
                note(format!("page {page} is {} with {} holders{indexed}", line.state, line.holders));
            }
            let is_touched = line.fence > completed || line.copies > 0;
            if line.state == PageState::Fenced && !is_touched {
                note(format!("page {page} is fenced behind step {}, complete is {completed}", line.fence));
            }
            if matches!(line.state, PageState::Free | PageState::Cached) && is_touched {
                note(format!(
                    "page {page} is {}, but step {} and {} copies may touch it",
                    line.state, line.fence, line.copies
                ));
            }
        }
        Ok(report)
    }

    /// How many pages are handed out before this free page.
    pub(crate) fn turn_of(&self, page: Page) -> usize {
        match self.returned.iter().rposition(|&other| other == page) {
            Some(at) => self.returned.len() - 1 - at,
            None => self.returned.len() + page.at() - self.map.len(),
        }
    }

    /// Page copies that are not launched yet and read or write the page.
    pub(crate) fn copies_of(&self, page: Page) -> u32 {
        self.line(page).copies
    }

    /// Who uses the page.
    pub(crate) fn counts_of(&self, page: Page) -> PageCounts {
        let Line { holders, idle_holders, copies, .. } = self.line(page);
        PageCounts { holders, idle_holders, copies }
    }

    /// Of each page in the map, for the audit's own count.
    pub(crate) fn counts(&self) -> impl Iterator<Item = PageCounts> {
        self.map.iter().map(|&Line { holders, idle_holders, copies, .. }| PageCounts { holders, idle_holders, copies })
    }
}

/// Plants faults that no public call can cause, and checks that they are found.
#[cfg(test)]
#[path = "page_pool_tests.rs"]
mod tests;
