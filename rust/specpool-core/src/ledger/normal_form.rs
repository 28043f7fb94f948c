//! The state without arbitrary names: a page is named by its first appearance, a step by its place in the queue, and
//! an epoch by whether a plan's epoch is still current. Two ledgers of one configuration with the same normal form
//! behave the same from then on, except for the ids that they give. Enumerations use this; the ledger itself does not.

use super::Ledger;
use crate::ids::{Page, Row};
use crate::state::page_copy::TailCopy;
use crate::state::page_pool::{PagePool, PageState};
use crate::state::state_group::StateSlots;
use crate::state::step::StepState;

/// Names for pages, given in the order in which they are asked for. One set may serve a ledger and its successors.
#[derive(Debug, Clone, Default)]
pub struct PageNames {
    /// Per group and page, the slots of a state group as those of one more group: its name, or 0 if it has none yet.
    names: Vec<Vec<u64>>,
    /// Number of names given.
    count: u64,
}

impl PageNames {
    /// Forgets all names, and keeps the memory.
    pub fn clear(&mut self) {
        self.names.iter_mut().for_each(|names| names.fill(0));
        self.count = 0;
    }

    /// The page's name, 0 for page 0.
    pub fn name(&mut self, group: usize, page: i32) -> u64 {
        if page == 0 {
            return 0;
        }
        if self.names.len() <= group {
            self.names.resize(group + 1, Vec::new());
        }
        let (names, at) = (&mut self.names[group], page as usize);
        if names.len() <= at {
            names.resize(at + 1, 0);
        }
        if names[at] == 0 {
            self.count += 1;
            names[at] = self.count;
        }
        names[at]
    }

    /// The pages of a group that have a name, in the order of their ids, each with its name.
    pub fn named(&self, group: usize) -> impl Iterator<Item = (i32, u64)> {
        let names = self.names.get(group).map_or(&[][..], Vec::as_slice);
        names.iter().enumerate().filter(|&(_, &name)| name > 0).map(|(page, &name)| (page as i32, name))
    }
}

impl Ledger {
    /// Writes the normal form of rows, steps, prefixes and copies, and names the pages that appear.
    /// [`Ledger::write_normal_pages`] then writes the pages themselves; call it after everything that names pages has
    /// been written.
    pub fn write_normal_form(&self, names: &mut PageNames, word: &mut impl FnMut(u64)) {
        let Self { groups, rows, steps, copies, prefixes, .. } = self;
        for at in 1..=rows.num_rows() {
            let row = Row(at as i32);
            let flags = [rows.live[at], rows.ready[at], rows.idle[at], rows.has_unlaunched_extend(row)];
            word(flags.iter().fold(0, |bits, &flag| bits << 1 | u64::from(flag)));
            let lengths = [rows.resolved[at], rows.in_flight[at], rows.hi[at], rows.drafted[at], rows.written(row)];
            for len in lengths {
                word(len as u64);
            }
            word(rows.checkpoint(row).map_or(0, |len| len as u64 + 1));
            word(self.age(rows.last_launched[at]));
            word(u64::from(rows.launched_rounds[at] as u32) << 32 | u64::from(rows.undrafted_rounds[at] as u32));
            rows.rounds_in_flight(row).iter().for_each(|&step| word(self.age(step)));
            for (at, group) in groups.iter().enumerate() {
                let lengths = [&group.allocated, &group.protected, &group.evicted];
                for lens in lengths {
                    word(lens[row.at()] as u64);
                }
                for column in group.held_columns(row) {
                    word(names.name(at, group.table.row(row)[column]));
                }
                for kept in group.kept(row) {
                    word(u64::from(kept.column));
                    word(names.name(at, kept.page.0));
                }
                word(u64::MAX);
            }
            self.write_slots(row, names, word);
        }
        rows.free().for_each(|row| word(row.0 as u64));
        for &(fence, row) in rows.fenced() {
            word(self.age(fence));
            word(row.0 as u64);
        }
        for (record, state) in steps.states() {
            let plan = &record.plan;
            let is_launched = matches!(state, StepState::Launched | StepState::Resolved);
            let is_complete = plan.step <= steps.completed();
            let flags = [is_complete, record.is_abandoned()];
            word(flags.iter().fold(plan.kind as u64 * 4 + state as u64, |bits, &flag| bits << 1 | u64::from(flag)));
            if is_complete && state == StepState::Resolved {
                continue; // Over, but behind a step that is not.
            }
            for lane in 0..plan.num_lanes() {
                let stands = plan.epochs[lane] == rows.epoch[plan.rows[lane] as usize];
                let is_resident = rows.is_resident(plan.rows[lane], plan.step);
                word((plan.rows[lane] as u64) << 2 | u64::from(stands) << 1 | u64::from(is_resident));
                word(plan.lo[lane] as u64);
            }
            // A resolve needs the shapes; only launch and cancel need the rest of the plan.
            if state != StepState::Resolved {
                word(u64::from(plan.writes_draft));
                plan.shapes.iter().for_each(|&shape| word(shape as u64));
            }
            if !is_launched {
                let lengths = [&plan.hi, &plan.start, &plan.new_len, &plan.allocated_before, &plan.allocated_after];
                let before = [&record.before.drafted, &record.before.idle];
                lengths.into_iter().chain(before).flatten().for_each(|&len| word(len as u64));
                for fold in (0..plan.num_lanes()).filter_map(|lane| record.fold(lane)) {
                    word(names.name(groups.len(), fold.src.0));
                    word(names.name(groups.len(), fold.dst.0));
                    word((fold.from as u64) << 2 | fold.marked as u64);
                }
            }
            for copy in record.before.copies.iter().filter(|_| !is_complete) {
                self.write_copy(copy, plan.step, names, word);
            }
            word(u64::MAX);
        }
        for copy in copies {
            self.write_copy(copy, steps.next(), names, word);
        }
        for (_, prefix) in prefixes {
            word(u64::from(prefix.len as u32) << 32 | u64::from(prefix.drafted as u32));
            for (at, pages) in prefix.pages.iter().enumerate() {
                pages.held.iter().for_each(|page| word(names.name(at, page.0)));
                word(u64::MAX);
            }
            word(names.name(groups.len(), prefix.slot.0));
        }
        self.write_index(names, word);
    }

    /// Writes the entries of the prefix index, the lists of its pages and states, and its salts.
    fn write_index(&self, names: &mut PageNames, word: &mut impl FnMut(u64)) {
        let groups = &self.groups;
        for entry in self.index.all() {
            word((self.index.len(entry) as u64) << 32 | self.index.drafted(entry) as u64);
            word(self.index.children(entry).len() as u64);
            self.index.tokens(entry).iter().for_each(|&token| word(token as u64));
            for at in 0..groups.len() {
                self.index.pages(entry, at).iter().for_each(|&page| word(names.name(at, page)));
            }
            self.write_indexed_states(entry, names, word);
        }
        for (at, group) in groups.iter().enumerate() {
            group.pool.listed_pages().for_each(|page| word(names.name(at, page.0)));
            word(u64::MAX);
        }
        if let Some(states) = &self.states {
            states.pool.listed_pages().for_each(|slot| word(names.name(groups.len(), slot.0)));
            word(u64::MAX);
        }
        for (salt, root) in self.index.salts() {
            for &byte in salt {
                word(byte.into());
            }
            word(self.index.children(root).len() as u64);
        }
    }

    /// Writes every named page and state slot, and how many unnamed pages are fenced behind which step.
    pub fn write_normal_pages(&self, names: &PageNames, word: &mut impl FnMut(u64)) {
        let pools = self.groups.iter().map(|group| &group.pool);
        for (at, pool) in pools.chain(self.states.iter().map(|states| &states.pool)).enumerate() {
            let mut lines: Vec<(u64, u64)> = Vec::new();
            let mut is_named = vec![false; pool.num_mapped()];
            for (page, name) in names.named(at) {
                is_named[page as usize] = true;
                let line = self.page_line(pool, Page(page));
                // Without page fencing, a free page with a name is one that a step on its way still touches.
                let turn = if line == 0 { pool.turn_of(Page(page)) as u64 } else { 0 };
                lines.push((name, line | turn));
            }
            lines.sort_unstable();
            for (name, line) in lines {
                word(name);
                word(line);
            }
            let is_other = |page: &usize| !is_named[*page];
            let mut others: Vec<u64> = (1..is_named.len())
                .filter(is_other)
                .map(|page| self.page_line(pool, Page(page as i32)))
                .filter(|&line| line > 0)
                .collect();
            others.sort_unstable();
            for line in others {
                word(line);
            }
            word(u64::MAX);
        }
    }

    /// The cells of a group's table, row by row, whose change no acknowledged delta has reported, in no order; none if
    /// there is no such group.
    pub fn pending_cells(&self, group: usize) -> impl Iterator<Item = u32> {
        self.groups.get(group).into_iter().flat_map(|group| group.delta.pending())
    }

    /// 0 for a free page.
    fn page_line(&self, pool: &PagePool, page: Page) -> u64 {
        let Some(record) = pool.record(page).filter(|record| record.state != PageState::Free) else { return 0 };
        let owner = if record.state == PageState::Owned { record.owner.0 as u64 } else { 0 };
        let counts = u64::from(record.holders) << 8 | u64::from(pool.copies_of(page));
        let lent = u64::from(pool.lent_code(page));
        (record.state as u64) << 60 | owner << 40 | self.age(record.fence) << 24 | lent << 22 | counts
    }

    /// A step as its place in the queue, from 1; 0 if it is complete.
    fn age(&self, step: u64) -> u64 {
        if step <= self.steps.completed() {
            return 0;
        }
        self.steps.all().position(|record| record.plan.step == step).map_or(u64::MAX, |index| index as u64 + 1)
    }

    /// The slots of a row's states, named as the pages of one more group.
    fn write_slots(&self, row: Row, names: &mut PageNames, word: &mut impl FnMut(u64)) {
        let Some(states) = &self.states else { return };
        let state = (states.slot_of(row), states.len[row.at()]);
        for (slot, len) in [state, states.mark(row).unwrap_or((Page::SINK, 0))] {
            word(names.name(self.groups.len(), slot.0));
            word(len as u64);
        }
        let mut num_marks = 0;
        for (slot, len) in states.kept.marks_of(row) {
            self.write_kept(states, slot, len, names, word);
            num_marks += 1;
        }
        word(num_marks);
    }

    fn write_indexed_states(&self, entry: u32, names: &mut PageNames, word: &mut impl FnMut(u64)) {
        let Some(states) = &self.states else { return };
        for state in states.kept.of_entry(entry, i32::MAX) {
            self.write_kept(states, state.slot, state.len, names, word);
        }
        word(u64::MAX);
    }

    /// A kept slot with its tokens and, while a step writes it, that step and its row.
    fn write_kept(&self, states: &StateSlots, slot: Page, len: i32, names: &mut PageNames, word: &mut impl FnMut(u64)) {
        let writer = states.kept.writer(slot);
        let age = self.age(writer.step);
        word(names.name(self.groups.len(), slot.0));
        word(if age == 0 { len as u64 } else { (len as u64) << 32 | age << 16 | writer.row as u64 });
    }

    fn write_copy(&self, copy: &TailCopy, step: u64, names: &mut PageNames, word: &mut impl FnMut(u64)) {
        let group = copy.group();
        for page in copy.pages() {
            word(names.name(group, page.0));
        }
        let is_resident = self.rows.is_resident(copy.row.0, step);
        word(
            (copy.row.0 as u64) << 32
                | (copy.column as u64) << 16
                | (copy.copy.tokens as u64) << 1
                | u64::from(is_resident),
        );
    }
}
