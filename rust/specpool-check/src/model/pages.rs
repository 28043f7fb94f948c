//! Who holds a page, and which pages are fenced or free.

use std::collections::BTreeSet;

use super::{Copy, Holding, Model, PageId, Refusal};

/// Who holds a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Holder {
    /// A row, in its table or for its checkpoint.
    Row(usize),
    /// A pinned prefix.
    Prefix(u64),
    /// A cache outside.
    Outside,
}

impl Model {
    fn holdings(&self, group: usize) -> impl Iterator<Item = (Holder, &Holding)> {
        let rows = self.rows.iter().enumerate().map(move |(row, state)| (Holder::Row(row), &state.groups[group]));
        let prefixes = self.prefixes.iter().map(move |(&id, prefix)| (Holder::Prefix(id), &prefix.groups[group]));
        rows.chain(prefixes)
    }

    /// The pages that a cache outside holds.
    fn lent_pages(&self, group: usize) -> impl Iterator<Item = PageId> {
        self.lent.iter().filter(move |((at, _), _)| *at == group).map(|(_, &(page, _))| page)
    }

    /// Everyone who holds the page.
    pub(crate) fn holders(&self, group: usize, page: PageId) -> Vec<Holder> {
        let inside = self.holdings(group).filter(|(_, held)| held.pages().any(|other| other == page));
        let outside = self.lent_pages(group).filter(|&other| other == page).map(|_| Holder::Outside);
        inside.map(|(who, _)| who).chain(outside).collect()
    }

    /// Whether the prefix index holds the page.
    pub(crate) fn is_indexed(&self, group: usize, page: PageId) -> bool {
        group == 0 && self.entries.values().any(|entry| entry.page == page)
    }

    /// Pages that the prefix index alone holds, and that no step and no copy may touch.
    pub(crate) fn cached(&self, group: usize) -> BTreeSet<PageId> {
        if group > 0 || self.entries.is_empty() {
            return BTreeSet::new();
        }
        let held = self.held_pages(group);
        let is_cached = |page: &PageId| !held.contains(page) && !self.is_touched(group, *page);
        self.indexed_pages().into_iter().filter(is_cached).collect()
    }

    /// Every page that someone holds.
    pub(crate) fn held_pages(&self, group: usize) -> BTreeSet<PageId> {
        self.holdings(group).flat_map(|(_, held)| held.pages()).chain(self.lent_pages(group)).collect()
    }

    /// Whether the page is read-only: it was shared since somebody took it.
    pub(crate) fn is_shared(&self, group: usize, page: PageId) -> bool {
        self.shared.contains(&(group, page))
    }

    /// Copies that are not launched. Each holds both of its pages until it is.
    fn waiting_copies(&self) -> impl Iterator<Item = &Copy> {
        self.steps.iter().filter(|step| !step.launched).flat_map(|step| &step.copies).chain(&self.pending)
    }

    fn is_copied(&self, group: usize, page: PageId) -> bool {
        self.waiting_copies().any(|copy| copy.group == group && (copy.src == page || copy.dst == page))
    }

    /// Whether a launched step that is not complete, or a copy, may touch the page.
    pub(crate) fn is_touched(&self, group: usize, page: PageId) -> bool {
        self.is_copied(group, page) || self.fences.get(&(group, page)).is_some_and(|&step| step > self.completed)
    }

    /// Pages that nobody holds but that a step or a copy may still touch.
    pub(crate) fn fenced_pages(&self, group: usize) -> usize {
        let fences = self.fences.keys().filter(|(at, _)| *at == group).map(|&(_, page)| page);
        let copies = self.waiting_copies().filter(|copy| copy.group == group).flat_map(|copy| [copy.src, copy.dst]);
        let held = self.held_pages(group);
        let all: BTreeSet<PageId> = fences.chain(copies).collect();
        all.into_iter().filter(|page| !held.contains(page) && self.is_touched(group, *page)).count()
    }

    /// Pages that can be handed out.
    pub(crate) fn free_pages(&self, group: usize) -> usize {
        let in_use = self.held_pages(group).len() + self.fenced_pages(group) + self.cached(group).len();
        self.groups[group].num_pages - in_use
    }

    /// Pages whose every holder is an idle row.
    pub(crate) fn reclaimable_pages(&self, group: usize) -> usize {
        let idle = |who: Holder| matches!(who, Holder::Row(row) if self.rows[row].idle);
        let pages = self.held_pages(group);
        pages.into_iter().filter(|&page| self.holders(group, page).into_iter().all(idle)).count()
    }

    /// A new page, which nobody has had.
    pub(super) fn new_page(&mut self) -> PageId {
        self.next_page += 1;
        self.next_page - 1
    }

    /// Drops the row as a holder of the page. The row's last launched step may still touch it.
    pub(super) fn leave_fence(&mut self, group: usize, page: PageId, row: usize) {
        let fence = self.rows[row].last_launched;
        if self.page_fencing && fence > self.completed {
            let latest = self.fences.entry((group, page)).or_default();
            *latest = fence.max(*latest);
        }
    }

    /// Whether everyone who holds the page drops it, so that it is free at once.
    pub(super) fn would_be_free(&self, group: usize, page: PageId, droppers: &[usize]) -> bool {
        let untouched = |row: usize| !self.page_fencing || self.rows[row].last_launched <= self.completed;
        let drops = |who: Holder| matches!(who, Holder::Row(row) if droppers.contains(&row) && untouched(row));
        !self.is_touched(group, page) && self.holders(group, page).into_iter().all(drops)
    }

    /// Refuses the call if a group lacks pages, and names the first such group. `gained` pages become free by the call
    /// itself.
    pub(super) fn check_pages(&self, need: &[usize], gained: &[usize]) -> Result<(), Refusal> {
        for (group, spec) in self.groups.iter().enumerate() {
            let (free, cached) = (self.free_pages(group) + gained[group], self.cached(group).len());
            if need[group] > free + cached {
                return Err(Refusal::OutOfPages {
                    group: spec.name.clone(),
                    need: need[group],
                    free,
                    cached,
                    fenced: self.fenced_pages(group),
                    reclaimable: self.reclaimable_pages(group),
                });
            }
        }
        Ok(())
    }
}
