//! The full audit: counts every page and every row, and checks the sums (busy check, level 2).

use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::ledger::Ledger;
use crate::memory::{self, filled, room, zeroed};
use crate::state::group::{GroupState, Kept};
use crate::state::kept_states::IndexedState;
use crate::state::page_pool::{PageCounts, PageState};
use crate::state::state_group::{Fold, StateSlots};
use crate::state::step::StepKind;

/// Lines of a report before it is cut.
const MAX_LINES: usize = 20;

/// One broken rule, and its subject as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Index of the group.
    pub group: Option<usize>,
    /// The page of that group; 0 if a row holds the sink.
    pub page: Option<Page>,
    /// The row: live or not, or row 0.
    pub row: Option<Row>,
    /// The rule, with the numbers.
    pub text: String,
}

impl Finding {
    /// A finding about the ledger, or about one group.
    fn of(group: Option<usize>, text: String) -> Self {
        Self { group, page: None, row: None, text }
    }

    fn of_row(at: usize, group: Option<usize>, text: String) -> Self {
        Self { row: Some(Row(at as i32)), ..Self::of(group, text) }
    }

    fn of_page(at: usize, group: usize, text: String) -> Self {
        Self { page: Some(Page(at as i32)), ..Self::of(Some(group), text) }
    }
}

impl Ledger {
    /// Checks every invariant of the ledger, O(pages + table cells).
    ///
    /// # Errors
    /// [`Error::Corrupt`] with one line for each broken rule, [`Error::OutOfMemory`].
    pub fn check(&self) -> Result<()> {
        let report = self.audit()?;
        if report.is_empty() {
            return Ok(());
        }
        let hidden = report.len().saturating_sub(MAX_LINES);
        let mut report: Vec<String> = report.into_iter().take(MAX_LINES).map(|finding| finding.text).collect();
        if hidden > 0 {
            report.push(format!("and {hidden} more"));
        }
        Err(Error::Corrupt(report.join("; ")))
    }

    /// Returns every broken invariant of the ledger, O(pages + table cells); empty if there is none.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for the counts.
    pub fn audit(&self) -> Result<Vec<Finding>> {
        let mut report = Vec::new();
        self.audit_rows(&mut report)?;
        self.audit_rounds(&mut report)?;
        for group in 0..self.groups.len() {
            self.audit_group(group, &mut report)?;
        }
        self.audit_states(&mut report)?;
        report.extend(self.index.broken().into_iter().map(|text| Finding::of(None, text)));
        let is_full = |&(_, group): &(usize, &GroupState)| group.spec.window.is_none();
        for (at, group) in self.groups.iter().enumerate().filter(is_full) {
            for entry in self.index.all().filter(|&entry| self.index.pages(entry, at).contains(&0)) {
                let text = format!("entry {entry} lacks a page of group {}", group.spec.name);
                report.push(Finding::of(Some(at), text));
            }
        }
        Ok(report)
    }

    fn audit_rows(&self, report: &mut Vec<Finding>) -> Result<()> {
        let rows = &self.rows;
        let live = rows.live.iter().filter(|&&live| live).count();
        let (free, fenced) = (rows.num_free(), rows.num_fenced());
        if live + free + fenced != rows.num_rows() {
            let all = rows.num_rows();
            report.push(Finding::of(None, format!("{live} live + {free} free + {fenced} fenced rows are not {all}")));
        }
        let idle = rows.idle.iter().filter(|&&idle| idle).count();
        if idle != rows.num_idle {
            report.push(Finding::of(None, format!("{idle} rows are idle, {} are counted", rows.num_idle)));
        }
        let mut listed = zeroed(rows.num_rows() + 1, "an audit of rows")?;
        for row in rows.free().chain(rows.fenced().iter().map(|&(_, row)| row)) {
            if rows.live[row.at()] || std::mem::replace(&mut listed[row.at()], true) {
                let text = format!("row {} is given back, and live or given back twice", row.0);
                report.push(Finding::of_row(row.at(), None, text));
            }
        }
        for at in 0..=rows.num_rows() {
            let (r, k, hi, drafted) = (rows.resolved[at], rows.in_flight[at], rows.hi[at], rows.drafted[at]);
            let name = || rows.describe(Row(at as i32));
            if !rows.live[at] && (r, k, hi, drafted) != (0, 0, 0, 0) {
                let text = format!("{} is not admitted but reads r={r} k={k} hi={hi} drafted={drafted}", name());
                report.push(Finding::of_row(at, None, text));
            }
            let checkpoint = rows.checkpoint(Row(at as i32)).unwrap_or(0);
            if !rows.live[at] && (rows.idle[at] || checkpoint != 0) || checkpoint > r {
                let text = format!("{}: r={r} idle={} checkpoint={checkpoint}", name(), rows.idle[at]);
                report.push(Finding::of_row(at, None, text));
            }
            if r < 0 || k < 0 || k > self.overlap_depth + 1 || hi < r + k || drafted < 0 || drafted > r {
                let text = format!("{}: r={r} k={k} hi={hi} drafted={drafted}", name());
                report.push(Finding::of_row(at, None, text));
            }
            for (number, group) in self.groups.iter().enumerate() {
                let a = group.allocated[at];
                let name_of_group = &group.spec.name;
                if a < r.saturating_add(k) || i64::from(a) % group.page_size != 0 || i64::from(a) > group.row_width {
                    let text = format!(
                        "{} in group {name_of_group}: kv_committed_len {} allocated_len {a} row_width {}",
                        name(),
                        r.saturating_add(k),
                        group.row_width
                    );
                    report.push(Finding::of_row(at, Some(number), text));
                }
                let (e, p) = (group.evicted[at], group.protected[at]);
                if i64::from(e) % group.page_size != 0
                    || e < 0
                    || p < 0
                    || p > r
                    || i64::from(e) > group.evict_to(rows.settled(Row(at as i32)))
                {
                    let text = format!(
                        "{} in group {name_of_group}: r={r} protected_len {p} evicted_len {e}, at most {} is out of its window",
                        name(),
                        group.evict_to(rows.settled(Row(at as i32)))
                    );
                    report.push(Finding::of_row(at, Some(number), text));
                }
                if !rows.live[at] && a != 0 {
                    let text = format!("{} is not admitted but holds {a} slots in group {name_of_group}", name());
                    report.push(Finding::of_row(at, Some(number), text));
                }
            }
        }
        Ok(())
    }

    /// The per-row counts of rounds must equal those of the steps in flight.
    fn audit_rounds(&self, report: &mut Vec<Finding>) -> Result<()> {
        let rows = &self.rows;
        let (len, what) = (rows.num_rows() + 1, "an audit of rounds");
        let (mut hi, mut launched) = (memory::copied(&rows.resolved, what)?, zeroed(len, what)?);
        let (mut undrafted, mut rounds) = (zeroed(len, what)?, filled(Vec::<u64>::new(), len, what)?);
        for record in self.steps.all().filter(|record| record.plan.kind == StepKind::Decode && !record.resolved) {
            let plan = &record.plan;
            for (lane, &row) in plan.rows.iter().enumerate() {
                let at = row as usize;
                if plan.epochs[lane] == rows.epoch[at] {
                    hi[at] += self.shapes[plan.shapes[lane] as usize].max_accept_len() as i32;
                    launched[at] += i32::from(self.steps.is_launched(plan.step));
                    undrafted[at] += i32::from(!plan.writes_draft);
                    room(&mut rounds[at], 1, what)?;
                    rounds[at].push(plan.step);
                }
            }
        }
        for at in 1..len {
            let row = Row(at as i32);
            let k = rows.in_flight[at].clamp(0, self.overlap_depth + 1);
            if rounds[at].len() != k as usize || rows.rounds_in_flight(row) != rounds[at] {
                let text = format!("{}: in_flight {k}, steps in flight {:?}", rows.describe(row), rounds[at]);
                report.push(Finding::of_row(at, None, text));
            } else if (rows.hi[at], rows.launched_rounds[at], rows.undrafted_rounds[at])
                != (hi[at], launched[at], undrafted[at])
            {
                let text = format!(
                    "{}: hi {} launched {} undrafted {}, the steps say {} {} {}",
                    rows.describe(row),
                    rows.hi[at],
                    rows.launched_rounds[at],
                    rows.undrafted_rounds[at],
                    hi[at],
                    launched[at],
                    undrafted[at]
                );
                report.push(Finding::of_row(at, None, text));
            }
        }
        Ok(())
    }

    /// The pages that are held must match the cells, checkpoints, prefixes and copies that hold them.
    fn audit_group(&self, at: usize, report: &mut Vec<Finding>) -> Result<()> {
        let group = &self.groups[at];
        let (name, pool) = (&group.spec.name, &group.pool);
        // The pages that a checkpoint kept outside the table were not shared together with those in the table.
        let has_checkpoints = self.sessions && group.spec.window.is_some();
        let mut counts = filled(PageCounts::default(), pool.num_mapped(), "an audit of pages")?;
        let mut count = |page: Page, is_idle: bool| {
            if let Some(counts) = counts.get_mut(page.at()) {
                counts.holders += 1;
                counts.idle_holders += u32::from(is_idle);
            }
        };
        for row in (0..=self.rows.num_rows()).map(|row| Row(row as i32)) {
            let num_protected = (group.protected[row.at()].max(0) as usize).div_ceil(group.page_size as usize);
            let row_name = || self.rows.describe(row);
            for (column, &cell) in group.table.row(row).iter().enumerate() {
                let page = Page(cell);
                let record = pool.record(page);
                let mut note = |text: String| {
                    let of_row = Finding::of_row(row.at(), Some(at), text);
                    report.push(Finding { page: record.map(|record| record.page), ..of_row });
                };
                if !group.is_held(row, column) {
                    if cell != 0 {
                        note(format!("{} column {column} of group {name} is page {cell}, beyond its end", row_name()));
                    }
                    continue;
                }
                let is_shared = record.is_some_and(|record| record.state == PageState::Shared);
                if let Err(record) = pool.check_held(page, row) {
                    note(format!(
                        "{} column {column} of group {name} is page {cell}, which is {}, owner {}",
                        row_name(),
                        record.state,
                        self.rows.describe(record.owner)
                    ));
                } else if is_shared && column >= num_protected {
                    note(format!(
                        "{} column {column} of group {name} is page {cell}, which is shared, beyond protected_len {}",
                        row_name(),
                        group.protected[row.at()]
                    ));
                } else if !is_shared && column < num_protected && !has_checkpoints {
                    note(format!(
                        "{} column {column} of group {name} is page {cell}, which is owned, below protected_len {}",
                        row_name(),
                        group.protected[row.at()]
                    ));
                }
                count(page, self.rows.idle[row.at()]);
            }
            self.audit_checkpoint(at, row, report);
            group.kept(row).iter().for_each(|kept| count(kept.page, self.rows.idle[row.at()]));
        }
        self.prefix_holders(at).for_each(|page| count(page, false));
        self.index_holders(at).for_each(|(_, page)| count(page, false));
        pool.lent_pages().for_each(|page| count(page, false));
        for (entry, page) in self.index_holders(at).filter(|&(entry, page)| pool.entry_of(page) != entry) {
            let text = format!("entry {entry} holds page {} of group {name}, of entry {}", page.0, pool.entry_of(page));
            report.push(Finding::of_page(page.at(), at, text));
        }
        let riding = self.steps.unlaunched().flat_map(|record| &record.before.copies);
        for copy in self.copies.iter().chain(riding).filter(|copy| copy.group() == at) {
            copy.pages().iter().for_each(|page| counts[page.at()].copies += 1);
        }
        for (page, (counted, marked)) in counts.iter().zip(pool.counts()).enumerate() {
            if (counted.holders, counted.copies) != (marked.holders, marked.copies) {
                let text = format!(
                    "page {page} of group {name}: {} holders and {} copies, the pool counts {} and {}",
                    counted.holders, counted.copies, marked.holders, marked.copies
                );
                report.push(Finding::of_page(page, at, text));
            }
            if counted.idle_holders != marked.idle_holders {
                let text = format!(
                    "page {page} of group {name}: {} of its holders are idle rows, the pool counts {}",
                    counted.idle_holders, marked.idle_holders
                );
                report.push(Finding::of_page(page, at, text));
            }
        }
        let held = pool.num_held();
        let (free, cached, fenced, all) = (pool.num_free(), pool.num_cached(), pool.num_fenced(), pool.num_pages());
        if held + free + cached + fenced != all {
            let text = format!(
                "group {name}: {held} pages held + {free} free + {cached} cached + {fenced} fenced are not {all}"
            );
            report.push(Finding::of(Some(at), text));
        }
        let of_delta = group.delta.broken().map(|line| (None, line));
        let parts = pool.broken(self.steps.completed())?.into_iter().chain(of_delta);
        report.extend(parts.map(|(page, line)| {
            let text = format!("group {name}: {line}");
            Finding { page, ..Finding::of(Some(at), text) }
        }));
        Ok(())
    }

    /// Every slot that is held must match the rows, checkpoints, unlaunched folds and exports that hold it.
    fn audit_states(&self, report: &mut Vec<Finding>) -> Result<()> {
        let Some(states) = &self.states else { return Ok(()) };
        let (name, pool) = (&states.spec.name, &states.pool);
        let mut counts = filled(PageCounts::default(), pool.num_mapped(), "an audit of state slots")?;
        for row in (0..=self.rows.num_rows()).map(|row| Row(row as i32)) {
            let (at, slot, len) = (row.at(), states.slot_of(row), states.len[row.at()]);
            let mark = states.mark(row);
            let mut note = |text: String| {
                let text = format!("{} in state group {name}: {text}", self.rows.describe(row));
                report.push(Finding::of_row(at, None, text));
            };
            if !self.rows.live[at] && (slot != Page::SINK || len != 0 || mark.is_some()) {
                let mark_slot = mark.map_or(0, |(slot, _)| slot.0);
                note(format!(
                    "it is not admitted, but has slot {} of {len} tokens, and keeps slot {mark_slot}",
                    slot.0
                ));
            }
            if (slot == Page::SINK) != (len == 0) || len < 0 {
                note(format!("slot {} has {len} tokens", slot.0));
            }
            if let Some((_, mark)) = mark.filter(|&(_, mark)| mark < 1 || mark > len) {
                note(format!("its slot has {len} tokens, the kept one {mark}"));
            }
            // An eager round folds its own root.
            let max_len = self.rows.resolved[at] + i32::from(states.spec.eager && self.rows.in_flight[at] > 0);
            if len > max_len {
                note(format!("the state has {len} tokens, at most {max_len} are resolved"));
            }
            let folds = self.unlaunched_folds(row).map(Fold::held).filter(|&slot| slot != Page::SINK);
            for slot in states.slots_of(row).chain(folds) {
                if let Err(record) = pool.check_held(slot, row) {
                    let owner = self.rows.describe(record.owner);
                    note(format!("it holds slot {}, which is {}, owner {owner}", slot.0, record.state));
                }
                if let Some(counts) = counts.get_mut(slot.at()) {
                    counts.holders += 1;
                    counts.idle_holders += u32::from(self.rows.idle[at]);
                }
            }
        }
        for slot in self.prefixes.iter().map(|(_, prefix)| prefix.slot).filter(|&slot| slot != Page::SINK) {
            if let Some(counts) = counts.get_mut(slot.at()) {
                counts.holders += 1;
            }
        }
        self.audit_kept(states, &mut counts, report)?;
        for (slot, (counted, marked)) in counts.iter().zip(pool.counts()).enumerate() {
            if *counted != marked {
                report.push(Finding::of(
                    None,
                    format!(
                        "slot {slot} of state group {name}: {} holders, {} of them idle, the pool counts {} and {}",
                        counted.holders, counted.idle_holders, marked.holders, marked.idle_holders
                    ),
                ));
            }
        }
        let held = pool.num_held();
        let (free, cached, fenced, all) = (pool.num_free(), pool.num_cached(), pool.num_fenced(), pool.num_pages());
        if held + free + cached + fenced != all {
            let text = format!(
                "state group {name}: {held} slots held + {free} free + {cached} cached + {fenced} fenced are not {all}"
            );
            report.push(Finding::of(None, text));
        }
        let parts = pool.broken(self.steps.completed())?.into_iter();
        report.extend(parts.map(|(_, line)| Finding::of(None, format!("state group {name}: {line}"))));
        Ok(())
    }

    /// A soft mark is on a state that its row has had, and a state of the index has the tokens of its entry. What keeps a
    /// slot counts as one holder.
    fn audit_kept(&self, states: &StateSlots, counts: &mut [PageCounts], report: &mut Vec<Finding>) -> Result<()> {
        let (name, pool, kept) = (&states.spec.name, &states.pool, &states.kept);
        let mut note = |text: String| report.push(Finding::of(None, format!("state group {name}: {text}")));
        for mark in &kept.marks {
            let max_len = states.len[mark.row.at()];
            if mark.len < 1 || mark.len > max_len {
                let row = self.rows.describe(mark.row);
                note(format!("the soft mark of {row} has {} tokens, its state {max_len}", mark.len));
            }
            if !states.is_kept(mark.slot) {
                note(format!("a soft mark is on slot {}, which the pool does not count", mark.slot.0));
            }
        }
        for entry in self.index.all() {
            let start = self.index.start(entry);
            let lens = start as i32 + 1..=(start + self.index.len(entry)) as i32;
            for state in kept.of_entry(entry, i32::MAX).filter(|state| !lens.contains(&state.len)) {
                note(format!("slot {} has {} tokens, its entry {entry} ends {lens:?}", state.slot.0, state.len));
            }
        }
        let order = |state: &IndexedState| (state.entry, state.len);
        if !kept.indexed.is_sorted_by(|a, b| order(a) < order(b)) {
            note("the states of the index are out of order".to_owned());
        }
        for state in kept.indexed.iter().filter(|state| pool.entry_of(state.slot) != state.entry) {
            let (slot, entry) = (state.slot, pool.entry_of(state.slot));
            note(format!("entry {} holds slot {}, which is of entry {entry}", state.entry, slot.0));
        }
        let entries = self.index.all().map(|entry| kept.of_entry(entry, i32::MAX).count());
        let (in_use, all) = (entries.sum::<usize>(), kept.indexed.len());
        if in_use != all {
            note(format!("the entries in use have {in_use} states, {all} are indexed"));
        }
        let slots = kept.marks.iter().map(|mark| mark.slot).chain(kept.indexed.iter().map(|state| state.slot));
        let mut seen = zeroed::<bool>(counts.len(), "an audit of state slots")?;
        for slot in slots {
            if let Some(counts) = counts.get_mut(slot.at()) {
                counts.holders += u32::from(!std::mem::replace(&mut seen[slot.at()], true));
            }
        }
        Ok(())
    }

    /// A checkpoint's pages are all held, and those outside the table lie below e.
    fn audit_checkpoint(&self, at: usize, row: Row, report: &mut Vec<Finding>) {
        let group = &self.groups[at];
        let needed = group.checkpoint_columns(self.rows.checkpoint(row));
        let below = group.bounds(row).start;
        let is_right = |kept: &Kept| {
            let column = kept.column as usize;
            needed.contains(&column) && column < below && !group.is_held(row, column)
        };
        let kept = group.kept(row);
        let kept_at = |column: usize| kept.iter().any(|kept| kept.column as usize == column);
        let is_complete = needed.clone().all(|column| group.is_held(row, column) || kept_at(column));
        if !kept.iter().all(is_right) || !is_complete || !kept.is_sorted_by_key(|kept| kept.column) {
            let text = format!(
                "{} in group {}: the checkpoint needs columns {needed:?}, e is at {below}, kept are {kept:?}",
                self.rows.describe(row),
                group.spec.name
            );
            report.push(Finding::of_row(row.at(), Some(at), text));
        }
    }
}

/// Plants faults that no public call can cause, and checks that the audit finds them.
#[cfg(test)]
#[path = "audit_tests.rs"]
mod tests;
