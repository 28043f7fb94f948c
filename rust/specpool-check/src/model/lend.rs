//! What a prefix cache outside the ledger does: `lend`, `rebind`, `admit_lent`, `release_lent`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Holding, Model, Outcome, PageId, Refusal};

impl Model {
    /// Whether the length is a page edge of every group.
    fn is_edge(&self, len: i32) -> bool {
        self.groups.iter().all(|spec| i64::from(len) % spec.page_size == 0)
    }

    fn check_range(&self, row: usize, start: i32, end: i32) -> Result<(), Refusal> {
        let state = &self.rows[row];
        let is_in = 0 <= start && start < end && end <= state.resolved && self.is_edge(start) && self.is_edge(end);
        let leaves_gap = state.groups.iter().any(|held| i64::from(start) > held.protected);
        if is_in && !leaves_gap { Ok(()) } else { Err(Refusal::Shape) }
    }

    fn check_final(&self, row: usize, end: i32) -> Result<(), Refusal> {
        let is_written = self.first_written(row) < i64::from(end) || self.has_unfinished_copy(row);
        if is_written { Err(Refusal::NotReady) } else { Ok(()) }
    }

    fn protect(&mut self, row: usize, end: i32) {
        for held in &mut self.rows[row].groups {
            held.protected = held.protected.max(end.into());
        }
    }

    /// `name` is the ledger's page in a column of the row.
    pub(crate) fn lend(&mut self, row: i32, start: i32, end: i32, name: impl Fn(usize, i64) -> i32) -> Outcome {
        self.check_stateless()?;
        let row = self.live(row)?;
        self.check_range(row, start, end)?;
        self.check_final(row, end)?;
        let mut lent = BTreeMap::new();
        for (group, spec) in self.groups.iter().enumerate() {
            let columns = i64::from(start) / spec.page_size..i64::from(end) / spec.page_size;
            for (&column, &page) in self.rows[row].groups[group].table.range(columns) {
                if self.lent.values().any(|&(other, _)| other == page) {
                    return Err(Refusal::PageState);
                }
                let is_drafted = (column + 1) * spec.page_size <= self.rows[row].drafted.into();
                lent.insert((group, name(group, column)), (page, is_drafted));
            }
        }
        self.shared.extend(lent.iter().map(|(&(group, _), &(page, _))| (group, page)));
        self.lent.extend(lent);
        self.protect(row, end);
        Ok(0)
    }

    /// The pages of these names, each once.
    fn named(&self, group: usize, names: &[i32]) -> Result<Vec<(PageId, bool)>, Refusal> {
        let mut seen = BTreeSet::new();
        let page = |&name: &i32| {
            if name < 1 || name as usize > self.groups[group].num_pages {
                return Err(Refusal::Shape);
            }
            let page = *self.lent.get(&(group, name)).ok_or(Refusal::PageState)?;
            if seen.insert(name) { Ok(page) } else { Err(Refusal::Shape) }
        };
        names.iter().map(page).collect()
    }

    /// The names of each group's pages.
    fn split<'a>(&self, len: i32, mut pages: &'a [i32]) -> Result<Vec<&'a [i32]>, Refusal> {
        let counts: Vec<usize> = self.groups.iter().map(|spec| (i64::from(len) / spec.page_size) as usize).collect();
        if counts.iter().sum::<usize>() != pages.len() {
            return Err(Refusal::Shape);
        }
        let mut split = Vec::new();
        for count in counts {
            let of_group;
            (of_group, pages) = pages.split_at(count);
            split.push(of_group);
        }
        Ok(split)
    }

    pub(crate) fn rebind(&mut self, row: i32, start: i32, end: i32, pages: &[i32]) -> Outcome {
        self.check_stateless()?;
        let row = self.live(row)?;
        self.check_range(row, start, end)?;
        let mut bound = Vec::new();
        for (group, names) in self.split(end - start, pages)?.into_iter().enumerate() {
            let page_size = self.groups[group].page_size;
            let first = i64::from(start) / page_size;
            let held = &self.rows[row].groups[group];
            let cells = (first..).zip(names.iter().copied());
            let (here, gone): (Vec<_>, Vec<_>) = cells.partition(|(column, _)| held.table.contains_key(column));
            if gone.iter().any(|&(_, name)| name != 0) {
                return Err(Refusal::Shape);
            }
            let (columns, names): (Vec<_>, Vec<_>) = here.into_iter().unzip();
            let named = self.named(group, &names)?;
            for (&column, &(page, is_drafted)) in columns.iter().zip(&named) {
                let mut cells = held.table.iter().chain(&held.kept);
                let range = first..i64::from(end) / page_size;
                let is_elsewhere = cells.any(|(other, &its)| its == page && !range.contains(other));
                if is_elsewhere || (!is_drafted && column * page_size < self.rows[row].drafted.into()) {
                    return Err(Refusal::Shape);
                }
                bound.push((group, column, page));
            }
        }
        self.check_final(row, end)?;
        for (group, column, page) in bound {
            let own_page = self.rows[row].groups[group].table.insert(column, page).unwrap();
            self.leave_fence(group, own_page, row);
        }
        self.protect(row, end);
        Ok(0)
    }

    pub(crate) fn admit_lent(&mut self, pages: &[i32], len: i32) -> Outcome {
        self.check_stateless()?;
        if len < 1 || len > self.max_context_len || !self.is_edge(len) {
            return Err(Refusal::Shape);
        }
        let (mut sources, mut drafted) = (Vec::new(), i64::from(len));
        for (group, names) in self.split(len, pages)?.into_iter().enumerate() {
            let page_size = self.groups[group].page_size;
            let sinks = names.len().min(self.sinks(group) as usize);
            let zeros = names[sinks..].iter().take_while(|&&name| name == 0).count();
            let gone = sinks..sinks + zeros;
            let evicted = if zeros > 0 { gone.end as i64 * page_size } else { 0 };
            if evicted > self.evict_to(group, len) {
                return Err(Refusal::Shape);
            }
            let (columns, names): (Vec<_>, Vec<_>) =
                (0..).zip(names.iter().copied()).filter(|(column, _)| !gone.contains(&(*column as usize))).unzip();
            let named = self.named(group, &names)?;
            let mut cells = columns.iter().zip(&named);
            if let Some((&column, _)) = cells.find(|(_, (_, is_drafted))| !is_drafted) {
                drafted = drafted.min(column * page_size);
            }
            let pages = named.iter().map(|&(page, _)| page);
            sources.push(Holding { evicted, table: columns.into_iter().zip(pages).collect(), ..Holding::default() });
        }
        self.check_free_row()?;
        Ok(self.take_row_on(&sources, len, drafted as i32) as i64)
    }

    pub(crate) fn release_lent(&mut self, group: usize, pages: &[i32]) -> Outcome {
        if group >= self.groups.len() {
            return Err(Refusal::Shape);
        }
        self.named(group, pages)?;
        for &name in pages {
            self.lent.remove(&(group, name));
        }
        Ok(0)
    }
}
