//! The pages of a pool that a prefix cache outside the ledger holds. It holds a page once or not at all.

use crate::ids::Page;
use crate::state::page_pool::{PagePool, PageRecord};
use crate::verb::Verb;

/// A cache outside holds the page.
const LENT: u8 = 1;
/// The page has draft KV in all of its slots.
const DRAFTED: u8 = 2;
/// The call that is being checked has named the page.
const NAMED: u8 = 4;

/// Why a call may not name a page.
pub(crate) enum Unnamed {
    /// There is no such page.
    Unknown,
    /// It is not lent.
    NotLent(PageRecord),
    /// The call has named it before.
    Twice,
}

impl PagePool {
    /// Whether a cache outside holds the page.
    pub(crate) fn is_lent(&self, page: Page) -> bool {
        self.line(page).lent & LENT > 0
    }

    /// Whether the lent page has draft KV in all of its slots.
    pub(crate) fn is_lent_drafted(&self, page: Page) -> bool {
        self.line(page).lent & DRAFTED > 0
    }

    /// 0 for a page that is not lent; another number for one with draft KV than for one without.
    pub(crate) fn lent_code(&self, page: Page) -> u8 {
        self.line(page).lent
    }

    /// The lent pages, ascending.
    pub(crate) fn lent_pages(&self) -> impl Iterator<Item = Page> + '_ {
        let lent = self.map.iter().enumerate().filter(|(_, line)| line.lent > 0);
        lent.map(|(page, _)| Page(page as i32))
    }

    /// Adds the cache outside as a holder of a page that is held and not lent.
    pub(crate) fn lend(&mut self, page: Page, is_drafted: bool, verb: Verb) -> Result<(), PageRecord> {
        self.share(page, verb)?;
        self.map[page.at()].lent = LENT | if is_drafted { DRAFTED } else { 0 };
        Ok(())
    }

    /// Drops the cache outside as a holder of a lent page.
    pub(crate) fn release_lent(&mut self, page: Page, completed: u64, verb: Verb) -> Result<(), PageRecord> {
        self.release_shared(page, completed, verb)?;
        self.map[page.at()].lent = 0;
        Ok(())
    }

    /// Marks every one of `pages` as named, until [`unname`](Self::unname). If one is not lent, or is there twice,
    /// returns its place and marks none.
    pub(crate) fn name(&mut self, pages: &[i32]) -> Result<(), (usize, Unnamed)> {
        for (at, &page) in pages.iter().enumerate() {
            let page = Page(page);
            let refused = match self.record(page) {
                None => Unnamed::Unknown,
                Some(record) if !self.is_lent(page) => Unnamed::NotLent(record),
                Some(_) if self.is_named(page) => Unnamed::Twice,
                Some(_) => {
                    self.map[page.at()].lent |= NAMED;
                    continue;
                }
            };
            self.unname(&pages[..at]);
            return Err((at, refused));
        }
        Ok(())
    }

    /// Whether the call that is being checked has named the page.
    pub(crate) fn is_named(&self, page: Page) -> bool {
        self.line(page).lent & NAMED > 0
    }

    pub(crate) fn unname(&mut self, pages: &[i32]) {
        for &page in pages {
            self.map[page as usize].lent &= !NAMED;
        }
    }
}
