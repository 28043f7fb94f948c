//! One lane of a forward at work: what it reads, checks and writes.

use specpool_core::{Group, Layout, Ledger, Page, PageState, Plan, Row, Shape};

use super::{Device, Fault, Pinned, Plant, Tag};

/// One lane of a forward that is running.
pub(super) struct Lane<'a> {
    pub(super) device: &'a mut Device,
    pub(super) ledger: &'a Ledger,
    pub(super) pinned: &'a Pinned,
    pub(super) plan: &'a Plan,
    /// Its index in the plan's arrays.
    pub(super) at: usize,
    pub(super) row: usize,
}

impl Lane<'_> {
    pub(super) fn fault<T>(&self, what: &str) -> Result<T, Fault> {
        Err(format!("step {}, row {}: {what}", self.plan.step, self.row))
    }

    /// The page and the slot of a position, by the device's own table.
    fn slot(&self, group: usize, position: i64) -> Result<(i32, usize), Fault> {
        let (page_size, columns) = (self.device.page_size(group), self.device.facts.columns[group]);
        let column = (position / page_size) as usize;
        if column >= columns {
            return self.fault(&format!("position {position} of group {group} is beyond the row's {columns} pages"));
        }
        let page = self.device.tables[group][self.row * columns + column];
        Ok((page, (i64::from(page) * page_size + position % page_size) as usize))
    }

    /// Checks that each position of the range is in a page that is this row's alone now, and below what the plan
    /// claimed.
    fn check_writes(&self, group: usize, positions: std::ops::Range<i64>) -> Result<(), Fault> {
        let page_size = self.device.page_size(group);
        let claimed = i64::from(self.plan.allocated_after[group * self.plan.num_lanes() + self.at]);
        if positions.end > claimed {
            return self
                .fault(&format!("writes up to {} in group {group}, {claimed} slots are claimed", positions.end));
        }
        for column in positions.start / page_size..(positions.end + page_size - 1) / page_size {
            let (page, _) = self.slot(group, column * page_size)?;
            if page == 0 && self.device.rows[self.row].is_lost {
                continue; // Its window has moved past that root since, so the write goes to the sink.
            }
            if page == 0 {
                return self.fault(&format!("writes column {column} of group {group}, which has no page"));
            }
            if !self.device.facts.page_fencing {
                continue; // With one stream, the next owner of the page writes it after this.
            }
            let record = self.ledger.page_record(group, Page(page)).map_err(|error| error.to_string())?;
            let is_its = record.owner == Row(self.row as i32);
            if !is_its || !matches!(record.state, PageState::Owned | PageState::Fenced) {
                let (state, owner) = (record.state, record.owner.0);
                return self.fault(&format!("writes page {page} of group {group}: {state}, of row {owner}"));
            }
            // The same check, without asking the ownership map.
            if self.pinned[group].contains(&page) {
                return self.fault(&format!("writes page {page} of group {group}, which a prefix holds"));
            }
            let Ok(table) = self.ledger.page_table(group) else { continue };
            let columns = self.device.facts.columns[group];
            let other = table.cells().iter().position(|&other| other == page).map_or(self.row, |cell| cell / columns);
            if other != self.row || table.cells().iter().filter(|&&other| other == page).count() > 1 {
                return self.fault(&format!("writes page {page} of group {group}, which is in another row's table"));
            }
        }
        Ok(())
    }

    /// Checks that positions of the range hold the row's own tokens, in the target's layers or in the draft model's.
    fn check_reads(&self, group: usize, positions: std::ops::Range<i64>, of_draft: bool) -> Result<(), Fault> {
        let state = &self.device.rows[self.row];
        if state.is_lost {
            return Ok(());
        }
        let layer = if of_draft { &self.device.draft[group] } else { &self.device.target[group] };
        for position in positions {
            let (page, slot) = self.slot(group, position)?;
            let (written, token) = (layer[slot], state.sequence[position as usize]);
            if page == 0 || written != token {
                let model = if of_draft { "draft" } else { "target" };
                return self.fault(&format!(
                    "reads position {position} of group {group} in page {page}: {model} KV of token {written}, not {token}"
                ));
            }
        }
        Ok(())
    }

    /// The first position that a query at `position` sees.
    fn window_start(&self, group: usize, position: i64) -> i64 {
        let more = i64::from(self.device.has(Plant::WiderWindow));
        self.device.facts.groups[group].window.map_or(0, |window| (position - window + 1 - more).max(0))
    }

    /// Checks what a query at `end` sees before it: its window, and the sink.
    fn check_seen(&self, group: usize, end: i64, of_draft: bool) -> Result<(), Fault> {
        let start = self.window_start(group, end);
        self.check_reads(group, 0..self.device.facts.groups[group].sink.min(start), of_draft)?;
        self.check_reads(group, start..end, of_draft)
    }

    fn read_prefix(&self, end: i64, drafts: bool) -> Result<(), Fault> {
        for group in 0..self.device.facts.groups.len() {
            if self.device.facts.has_target[group] {
                self.check_seen(group, end, false)?;
            }
            if drafts && self.device.facts.groups[group].hosts_drafts {
                self.check_seen(group, end, true)?;
            }
        }
        Ok(())
    }

    fn set(&mut self, group: usize, position: i64, tag: Tag, of_draft: bool) -> Result<(), Fault> {
        let (_, slot) = self.slot(group, position)?;
        let device = &mut *self.device;
        let layer = if of_draft { &mut device.draft[group] } else { &mut device.target[group] };
        layer[slot] = tag;
        Ok(())
    }

    /// Writes tokens `[start, end)` as the row's next ones: new tags, in every layer that the forward writes.
    fn keep(&mut self, start: i64, end: i64) -> Result<(), Fault> {
        for position in start..end {
            let tag = self.device.tag(self.row, self.device.rows[self.row].sequence.len());
            self.device.rows[self.row].sequence.push(tag);
            for group in 0..self.device.facts.groups.len() {
                if self.device.facts.has_target[group] {
                    self.set(group, position, tag, false)?;
                }
                if self.device.facts.groups[group].hosts_drafts {
                    self.set(group, position, if self.plan.writes_draft { tag } else { 0 }, true)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn extend(mut self) -> Result<(), Fault> {
        let (start, end) = (self.plan.start[self.at], self.plan.new_len[self.at]);
        let keeps_length = self.device.has(Plant::KeepLength);
        let state = &mut self.device.rows[self.row];
        if (state.sequence.len() as i32) < start && !state.is_lost {
            let len = state.sequence.len();
            return self.fault(&format!("extends from {start}, but has {len} tokens"));
        }
        let start = if keeps_length { (state.sequence.len() as i32).min(end - 1) } else { start };
        // The length is set in stream order before the row's next forward.
        state.sequence.resize(start as usize, 0);
        let (start, end) = (i64::from(start), i64::from(end));
        self.read_prefix(start, false)?;
        self.read_state(start)?;
        for group in 0..self.device.facts.groups.len() {
            self.check_writes(group, start..end)?;
        }
        self.keep(start, end)?;
        self.write_state(start);
        Ok(())
    }

    /// `[lo, hi]` of the lane, as the device uses it.
    pub(super) fn roots(&self) -> (i64, i64) {
        let (lo, hi) = (i64::from(self.plan.lo[self.at]), i64::from(self.plan.hi[self.at]));
        let rounds = lo - i64::from(self.plan.start[self.at]);
        let max_accept_len = i64::from(self.device.facts.shapes[self.plan.shapes[self.at] as usize].max_accept_len());
        match self.device.plant {
            Some(Plant::LowHi) if hi > lo => (lo, hi - 1),
            Some(Plant::NextA) => (lo, i64::from(self.plan.start[self.at]) + rounds * max_accept_len),
            _ => (lo, hi),
        }
    }

    pub(super) fn round(mut self, accept_len: i32) -> Result<(), Fault> {
        let ((lo, hi), len) = (self.roots(), self.device.rows[self.row].sequence.len() as i64);
        if self.device.rows[self.row].is_lost {
            // The clamp keeps any length in the range, so every root of the range must be safe.
            let roots = if self.device.has(Plant::NoClamp) { 0..=0 } else { lo..=hi };
            for root in roots {
                self.write_round(root)?;
            }
            self.device.rows[self.row].sequence.resize(lo as usize, 0);
            return self.spoil_state();
        }
        let root = len.clamp(lo, hi);
        if root != len {
            return self.fault(&format!("its length {len} is outside of [{lo}, {hi}]"));
        }
        let shape = self.device.facts.shapes[self.plan.shapes[self.at] as usize];
        self.read_prefix(root, shape.num_steps > 0 && self.device.facts.draft_kv)?;
        self.record_nodes(root);
        self.read_state(root)?;
        self.write_round(root)?;
        let more = i64::from(self.device.has(Plant::AcceptMore));
        self.keep(root, root + i64::from(accept_len) + more)?;
        self.write_state(root);
        Ok(())
    }

    /// Makes every write of one round from that root, before it keeps the accepted tokens.
    fn write_round(&mut self, root: i64) -> Result<(), Fault> {
        let index = self.plan.shapes[self.at] as usize;
        let shape = self.device.facts.shapes[index];
        let window = root..root + i64::from(shape.num_draft_tokens);
        for group in 0..self.device.facts.groups.len() {
            let mut end = 0;
            let spec = self.device.facts.groups[group].clone();
            if spec.hosts_drafts && shape.num_steps > 0 {
                let more = i64::from(self.device.has(Plant::OneMoreDraft));
                for drafts in draft_positions(&spec, shape, root, more) {
                    self.check_writes(group, drafts.clone())?;
                    end = drafts.end.max(end);
                    for position in drafts {
                        self.set(group, position, 0, true)?;
                    }
                }
            }
            let verifies = self.device.facts.has_target[group];
            if verifies || self.plan.writes_draft {
                self.check_writes(group, window.clone())?;
                end = window.end.max(end);
                for position in window.clone() {
                    self.set(group, position, 0, !verifies)?;
                }
            }
            let (lo, hi) = (self.plan.lo[self.at], self.plan.hi[self.at]);
            self.device.reached.push((group, index, lo, hi, end));
        }
        Ok(())
    }
}

/// Where each branch writes: its drafts, and in the holey layout the copy of the prefix's tail before them.
fn draft_positions(group: &Group, shape: Shape, root: i64, more: i64) -> Vec<std::ops::Range<i64>> {
    let (page_size, num_steps) = (group.page_size, i64::from(shape.num_steps));
    let (last, is_holey) = (root % page_size, group.layout == Layout::Holey && page_size > 1 && shape.topk > 1);
    let pages = (last + num_steps + page_size - 1) / page_size;
    (0..i64::from(shape.topk))
        .map(|branch| {
            let (tail, first) = match (is_holey, branch) {
                (false, _) => (0, root + branch * num_steps),
                (true, 0) => (0, root),
                (true, _) => (last, root - last + branch * pages * page_size + last),
            };
            first - tail..first + num_steps + more
        })
        .collect()
}
