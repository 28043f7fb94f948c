//! The pages of a pool that the prefix index holds, and the order in which they are given up.
//!
//! ```text
//!   owned, shared --index--> shared --the last row drops it--> cached <--complete-- fenced
//!                              ^                                 |
//!                              '------------- share -------------'--unindex--> free
//! ```

use crate::ids::Page;
use crate::state::page_pool::{Line, PagePool, PageState};
use crate::verb::Verb;

/// Pages in order, linked through their lines, so that any of them leaves in O(1).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PageList {
    first: i32,
    last: i32,
    len: usize,
}

impl PageList {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds the page at the end.
    pub(super) fn push(&mut self, map: &mut [Line], page: Page) {
        let last = std::mem::replace(&mut self.last, page.0);
        (map[page.at()].before, map[page.at()].behind) = (last, 0);
        match last {
            0 => self.first = page.0,
            _ => map[last as usize].behind = page.0,
        }
        self.len += 1;
    }

    fn remove(&mut self, map: &mut [Line], page: Page) {
        let (before, behind) = (map[page.at()].before, map[page.at()].behind);
        match before {
            0 => self.first = behind,
            _ => map[before as usize].behind = behind,
        }
        match behind {
            0 => self.last = before,
            _ => map[behind as usize].before = before,
        }
        self.len -= 1;
    }

    /// The pages, first to last.
    pub(super) fn pages<'a>(&self, map: &'a [Line]) -> impl Iterator<Item = Page> + 'a {
        std::iter::successors(Some(Page(self.first)), |page| Some(Page(map[page.at()].behind))).take(self.len)
    }
}

impl PagePool {
    /// Pages that the prefix index alone holds and that can be handed out once they are evicted.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.cached.len()
    }

    /// Pages that a row or a pinned prefix holds, O(pages).
    pub(crate) fn num_held(&self) -> usize {
        self.map.iter().filter(|line| line.others() > 0).count()
    }

    /// The cached page that was used least recently.
    pub(crate) fn oldest_cached(&self) -> Option<Page> {
        self.cached.pages(&self.map).next()
    }

    /// The cached pages, the least recently used one first.
    pub(crate) fn cached_pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.cached.pages(&self.map)
    }

    /// The fenced pages of the prefix index, then the cached ones, the least recently used one first.
    pub(crate) fn listed_pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.waiting.pages(&self.map).chain(self.cached.pages(&self.map))
    }

    /// The prefix index's entry that holds the page; 0 if none does.
    pub(crate) fn entry_of(&self, page: Page) -> u32 {
        self.line(page).entry
    }

    /// Whether the page is cached.
    pub(crate) fn is_cached(&self, page: Page) -> bool {
        self.line(page).state == PageState::Cached
    }

    /// Whether one row owns the page.
    pub(crate) fn is_owned(&self, page: Page) -> bool {
        self.line(page).state == PageState::Owned
    }

    /// Adds the prefix index as a holder of a page that is held and that is not indexed.
    pub(crate) fn index(&mut self, page: Page, entry: u32, verb: Verb) {
        self.set_shared(page);
        self.change(page, |line| {
            line.holders += 1;
            line.entry = entry;
            line.last_verb = verb;
        });
    }

    /// Makes a page that a row holds read-only.
    pub(crate) fn freeze(&mut self, page: Page) {
        self.set_shared(page);
    }

    /// Names another entry as the holder of an indexed page.
    pub(crate) fn set_entry(&mut self, page: Page, entry: u32) {
        self.map[page.at()].entry = entry;
    }

    /// Takes back [`index`](Self::index) of a page that one row owned before, and holds alone now.
    pub(crate) fn unindex_owned(&mut self, page: Page, verb: Verb) {
        self.unindex(page, 0, verb);
        self.num_shared -= 1;
        self.map[page.at()].state = PageState::Owned;
    }

    /// Drops the prefix index as a holder.
    pub(crate) fn unindex(&mut self, page: Page, completed: u64, verb: Verb) {
        self.unlist(page);
        self.change(page, |line| {
            line.holders -= 1;
            line.entry = 0;
            line.last_verb = verb;
        });
        self.settle(page, completed);
    }

    /// Notes that the page was used: if it is cached, it is given up last.
    pub(crate) fn touch(&mut self, page: Page) {
        if self.is_cached(page) {
            self.cached.remove(&mut self.map, page);
            self.cached.push(&mut self.map, page);
        }
    }

    /// Takes an indexed page out of its list, if it is in one.
    pub(super) fn unlist(&mut self, page: Page) {
        let line = self.line(page);
        match line.state {
            PageState::Cached => self.cached.remove(&mut self.map, page),
            PageState::Fenced => self.waiting.remove(&mut self.map, page),
            _ => {}
        }
    }

    /// Ends the fences of indexed pages.
    pub(super) fn complete_waiting(&mut self, completed: u64) {
        let mut next = self.waiting.pages(&self.map).next();
        while let Some(page) = next {
            let line = &mut self.map[page.at()];
            next = Some(Page(line.behind)).filter(|page| page.0 > 0);
            if line.fence <= completed && line.copies == 0 {
                line.last_verb = Verb::Complete;
                self.unlist(page);
                self.settle(page, completed);
            }
        }
    }
}
