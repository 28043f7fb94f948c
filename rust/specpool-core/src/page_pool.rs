//! The pages of one group: which are free, owned or fenced, and by whom.
//!
//! Every page is in exactly one state. `take` moves free -> owned, `release` owned -> fenced or free, `complete`
//! fenced -> free, `give_back` (of a step that was never launched) owned -> free. Each transition checks the state it
//! leaves, in O(1), always.

use crate::check::in_range;
use crate::error::Result;
use crate::ids::{Page, Row};

/// What a page is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PageState {
    /// Can be handed out.
    #[default]
    Free,
    /// Held by a row.
    Owned,
    /// Given back, but a launched step may still touch it.
    Fenced,
}

impl std::fmt::Display for PageState {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Free => "free",
            Self::Owned => "owned",
            Self::Fenced => "fenced",
        })
    }
}

/// The operation that last touched a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the ledger's verbs")]
pub enum Verb {
    #[default]
    None,
    PrepareExtend,
    PrepareDecode,
    Cancel,
    Trim,
    Retract,
    Finish,
    Abort,
    Complete,
}

impl Verb {
    /// The verb as the ledger spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::PrepareExtend => "prepare_extend",
            Self::PrepareDecode => "prepare_decode",
            Self::Cancel => "cancel",
            Self::Trim => "trim",
            Self::Retract => "retract",
            Self::Finish => "finish",
            Self::Abort => "abort",
            Self::Complete => "complete",
        }
    }
}

/// The ownership map's line for one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRecord {
    /// The page.
    pub page: Page,
    /// What it is doing.
    pub state: PageState,
    /// Who holds it, or held it last; row 0 if nobody ever did.
    pub owner: Row,
    /// The step that it was last taken for.
    pub birth_step: u64,
    /// What touched it last.
    pub last_verb: Verb,
}

/// The pages `1..=num_pages` of one group.
#[derive(Debug, Clone)]
pub struct PagePool {
    num_pages: usize,
    /// Free pages that were handed out before; the last one goes first.
    returned: Vec<Page>,
    /// (step, page): free once that step is complete.
    fenced: Vec<(u64, Page)>,
    /// The ownership map of page 0 and of every page handed out so far. Pages behind its end are free, so that a huge
    /// pool costs nothing before it is used.
    map: Vec<PageRecord>,
}

fn blank(page: Page) -> PageRecord {
    PageRecord { page, state: PageState::Free, owner: Row(0), birth_step: 0, last_verb: Verb::None }
}

impl PagePool {
    /// A pool of free pages.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) unless `1 <= num_pages < 2^31`.
    pub fn new(num_pages: i64) -> Result<Self> {
        let num_pages = in_range("num_pages", num_pages, 1, i32::MAX.into())? as usize;
        Ok(Self { num_pages, returned: Vec::new(), fenced: Vec::new(), map: vec![blank(Page::SINK)] })
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

    /// Pages given back that a launched step may still touch.
    #[must_use]
    pub fn num_fenced(&self) -> usize {
        self.fenced.len()
    }

    /// The ownership map's line for `page`, if there is such a page.
    #[must_use]
    pub fn record(&self, page: Page) -> Option<PageRecord> {
        let exists = page.0 >= 1 && page.at() <= self.num_pages;
        exists.then(|| self.map.get(page.at()).copied().unwrap_or(blank(page)))
    }

    /// Hands a free page to `owner`, or nothing when there is none.
    pub fn take(&mut self, owner: Row, step: u64, verb: Verb) -> Option<Page> {
        let page = match self.returned.pop() {
            Some(page) => page,
            None if self.map.len() <= self.num_pages => {
                let page = Page(self.map.len() as i32);
                self.map.push(blank(page));
                page
            }
            None => return None,
        };
        self.map[page.at()] = PageRecord { page, state: PageState::Owned, owner, birth_step: step, last_verb: verb };
        Some(page)
    }

    /// Whether `owner` holds `page`.
    ///
    /// # Errors
    /// The page's record when it is free, fenced, another row's, or no page at all.
    pub fn check_owned(&self, page: Page, owner: Row) -> std::result::Result<(), PageRecord> {
        match self.record(page) {
            Some(record) if record.state == PageState::Owned && record.owner == owner => Ok(()),
            record => Err(record.unwrap_or(blank(page))),
        }
    }

    /// Takes `page` back from `owner`: free at once, or fenced until the step `fence` is complete.
    ///
    /// # Errors
    /// As [`PagePool::check_owned`]; nothing is changed then.
    pub fn release(
        &mut self,
        page: Page,
        owner: Row,
        fence: Option<u64>,
        verb: Verb,
    ) -> std::result::Result<(), PageRecord> {
        self.check_owned(page, owner)?;
        let record = &mut self.map[page.at()];
        record.last_verb = verb;
        if let Some(step) = fence {
            record.state = PageState::Fenced;
            self.fenced.push((step, page));
        } else {
            record.state = PageState::Free;
            self.returned.push(page);
        }
        Ok(())
    }

    /// Steps up to `completed` have finished on the device: their fences fall.
    pub fn complete(&mut self, completed: u64) {
        let Self { fenced, returned, map, .. } = self;
        fenced.retain(|&(fence, page)| {
            let stays = fence > completed;
            if !stays {
                map[page.at()].state = PageState::Free;
                map[page.at()].last_verb = Verb::Complete;
                returned.push(page);
            }
            stays
        });
    }

    /// Every broken rule of the pool itself, with the numbers (for the audit).
    pub(crate) fn broken(&self, completed: u64) -> Vec<String> {
        let mut report = Vec::new();
        let marked = |state| self.map[1..].iter().filter(|record| record.state == state).count();
        let (free, fenced) = (marked(PageState::Free), marked(PageState::Fenced));
        if free != self.returned.len() || fenced != self.fenced.len() {
            report.push(format!(
                "{free} returned pages are marked free and {fenced} fenced, the lists hold {} and {}",
                self.returned.len(),
                self.fenced.len()
            ));
        }
        let mut listed = vec![false; self.map.len()];
        let lists = (self.returned.iter().map(|&page| (PageState::Free, page)))
            .chain(self.fenced.iter().map(|&(_, page)| (PageState::Fenced, page)));
        for (state, page) in lists {
            if std::mem::replace(&mut listed[page.at()], true) {
                report.push(format!("page {} is listed twice", page.0));
            }
            if self.map[page.at()].state != state {
                report.push(format!("page {} is listed {state}, marked {}", page.0, self.map[page.at()].state));
            }
        }
        if let Some(&(fence, page)) = self.fenced.iter().find(|&&(fence, _)| fence <= completed) {
            report.push(format!("page {} is fenced behind step {fence}, complete is {completed}", page.0));
        }
        report
    }
}
