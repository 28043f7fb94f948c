//! A model of the device: KV slots with content tags, a table copy that deltas keep current, and the device's own true
//! length per row.
//!
//! Launched forwards run later, in step order, and know of the ledger only what they were launched with. Every token
//! of every sequence has its own tag. So the model finds a read that meets anything but its own sequence's token, and
//! a write to a page that is not its row's alone at that moment.
//!
//! One round of a row at root s, in one group:
//!
//! ```text
//!   reads [0, s), or [s-w+1, s) in a window group: the root is the query that sees furthest back
//!   writes the drafts' cells (where drafts live), [s, s+N) in verification, then keeps [s, s+accept_len)
//! ```

use std::sync::Arc;

use specpool_core::{DeltaEntries, Group, Layout, Ledger, Page, PageState, Plan, Row, Shape, StepKind};

/// What a slot holds: a token of some sequence, 0 for anything else.
pub type Tag = u32;

/// What went wrong, in words.
pub type Fault = String;

/// The constants of the device.
#[derive(Debug)]
struct Facts {
    groups: Vec<Group>,
    shapes: Vec<Shape>,
    /// Per group: columns of its table.
    columns: Vec<usize>,
    /// Per group: whether the target model's layers live here.
    has_target: Vec<bool>,
    page_fencing: bool,
    draft_kv: bool,
}

/// One row as the device knows it.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceRow {
    /// The tags of its sequence. Their number is the device's length.
    pub(crate) sequence: Vec<Tag>,
    /// Whether a forward of it failed: its length and contents then mean nothing.
    pub(crate) is_lost: bool,
}

/// A forward that was launched.
#[derive(Debug, Clone)]
pub struct Forward {
    /// What it was prepared with.
    pub plan: Arc<Plan>,
    /// The table changes that go before it, per group.
    pub delta: Vec<DeltaEntries>,
    /// The row that each of the plan's page copies is for.
    pub copy_rows: Vec<i32>,
}

/// How far a write reached, to show that no slot is reserved in vain: (group, shape, lo, hi, end of the write).
pub type Reach = (usize, usize, i32, i32, i64);

/// The device.
#[derive(Debug, Clone)]
pub struct Device {
    facts: Arc<Facts>,
    /// Per group: `int32 [num_rows + 1, columns]`.
    pub(crate) tables: Vec<Vec<i32>>,
    /// Per group: what the target model's layers hold, by slot.
    pub(crate) target: Vec<Vec<Tag>>,
    /// Per group: what the draft model's layer holds, by slot.
    pub(crate) draft: Vec<Vec<Tag>>,
    pub(crate) rows: Vec<DeviceRow>,
    next_tag: Tag,
    /// What the last forward reached, if it was a round.
    pub reached: Vec<Reach>,
    /// Planted faults.
    pub(crate) plant: Option<Plant>,
}

/// A fault planted in the device or its driver, to show that it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "`Plant::ALL` says what each does")]
pub enum Plant {
    CompleteEarly,
    SkipCopies,
    LateCopies,
    LowHi,
    NextA,
    DropDelta,
    KeepLength,
    AcceptMore,
    LaunchStale,
    NoClamp,
    OneMoreDraft,
    WiderWindow,
    ResolveMore,
    SkipAbandon,
}

impl Plant {
    /// Every plant: its name and what it does.
    pub const ALL: [(Self, &'static str, &'static str); 14] = [
        (Self::CompleteEarly, "complete-early", "the driver completes launched steps before they ran: no fence holds"),
        (Self::SkipCopies, "skip-copies", "the device ignores page copies"),
        (Self::LateCopies, "late-copies", "the device copies pages after the forward they ride on"),
        (Self::LowHi, "low-hi", "the device clamps its length into [lo, hi - 1]"),
        (Self::NextA, "next-a", "the device reckons hi with the next round's A in place of those in flight"),
        (Self::DropDelta, "drop-delta", "the device loses the first entry of every table delta"),
        (Self::KeepLength, "keep-length", "an extend goes on from the device's own length, not from the row's cut"),
        (Self::AcceptMore, "accept-more", "a round keeps one token more than it verified"),
        (Self::LaunchStale, "launch-stale", "the driver runs a stale step that the ledger refused to launch"),
        (Self::NoClamp, "no-clamp", "a round behind a failed forward starts from whatever length it finds"),
        (Self::OneMoreDraft, "one-more-draft", "each branch writes one draft more than its shape allows"),
        (Self::WiderWindow, "wider-window", "windows reach one position further back"),
        (Self::ResolveMore, "resolve-more", "the driver reports one accepted token more than the device kept"),
        (Self::SkipAbandon, "skip-abandon", "the driver resolves a failed forward as if it had run"),
    ];

    /// The plant of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, other, _)| *other == name).map(|&(plant, ..)| plant)
    }
}

impl Device {
    /// A device for the ledger that has done nothing yet.
    #[must_use]
    pub fn new(ledger: &Ledger, plant: Option<Plant>) -> Self {
        let groups: Vec<Group> =
            (0..ledger.num_groups()).filter_map(|at| ledger.group_spec(at).ok().cloned()).collect();
        let is_split = groups.iter().any(|group| !group.hosts_drafts);
        let tables: Vec<_> = (0..groups.len()).filter_map(|at| ledger.page_table(at).ok()).collect();
        let slots = |group: &Group| vec![0; ((group.num_pages + 1) * group.page_size) as usize];
        let facts = Facts {
            shapes: ledger.shapes().to_vec(),
            columns: tables.iter().map(|table| table.pages_per_row()).collect(),
            has_target: groups.iter().map(|group| !(is_split && group.hosts_drafts)).collect(),
            page_fencing: ledger.page_fencing(),
            draft_kv: ledger.draft_kv(),
            groups,
        };
        Self {
            tables: tables.iter().map(|table| vec![0; table.cells().len()]).collect(),
            target: facts.groups.iter().map(slots).collect(),
            draft: facts.groups.iter().map(slots).collect(),
            rows: vec![DeviceRow::default(); ledger.num_rows() + 1],
            next_tag: 1,
            reached: Vec::new(),
            facts: Arc::new(facts),
            plant,
        }
    }

    fn has(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    /// Starts a new request in the row, on an existing sequence (empty for a plain request).
    pub fn admit(&mut self, row: i32, sequence: Vec<Tag>) {
        self.rows[row as usize] = DeviceRow { sequence, is_lost: false };
    }

    /// The first `len` tokens of the row, all written.
    #[must_use]
    pub fn sequence(&self, row: i32, len: i32) -> Vec<Tag> {
        let sequence = &self.rows[row as usize].sequence;
        sequence[..(len as usize).min(sequence.len())].to_vec()
    }

    /// Sets the length of a row that was cut and has nothing on its way.
    pub fn set_length(&mut self, row: i32, len: i32) {
        if !self.has(Plant::KeepLength) {
            self.rows[row as usize].sequence.truncate(len as usize);
        }
    }

    /// Runs the next forward. A round keeps `accept_lens[lane]` tokens. It asks the ledger only who holds a page now.
    /// A forward that fails writes what it would have written, and leaves nothing that may be relied on.
    ///
    /// # Errors
    /// The law that was broken, with the numbers.
    pub fn run(
        &mut self,
        ledger: &Ledger,
        pinned: &Pinned,
        forward: &Forward,
        accept_lens: &[i32],
        fails: bool,
    ) -> Result<(), Fault> {
        self.reached.clear();
        self.apply_delta(&forward.delta);
        let plan = &*forward.plan;
        self.forget_new_pages(plan);
        if !self.has(Plant::LateCopies) {
            self.copy_pages(ledger, plan)?;
        }
        for (lane, &accept_len) in accept_lens.iter().enumerate() {
            let row = plan.rows[lane] as usize;
            let forward = Lane { device: self, ledger, pinned, plan, at: lane, row };
            match plan.kind {
                StepKind::Extend => forward.extend()?,
                StepKind::Decode => forward.round(accept_len)?,
            }
        }
        if self.has(Plant::LateCopies) {
            self.copy_pages(ledger, plan)?;
        }
        if fails {
            // Its copies may not have run either, so the rows that they were for are lost too.
            for (copy, &row) in plan.page_copies.iter().zip(&forward.copy_rows) {
                let (group, page_size) = (copy.group as usize, self.page_size(copy.group as usize));
                self.rows[row as usize].is_lost |= row != 0;
                self.target[group][(i64::from(copy.dst) * page_size) as usize..][..page_size as usize].fill(0);
            }
            for &row in &plan.rows {
                self.rows[row as usize].is_lost = true;
            }
        }
        Ok(())
    }

    fn page_size(&self, group: usize) -> i64 {
        self.facts.groups[group].page_size
    }

    fn apply_delta(&mut self, delta: &[DeltaEntries]) {
        let skipped = usize::from(self.has(Plant::DropDelta));
        for (group, entries) in delta.iter().enumerate() {
            for at in skipped..entries.rows.len() {
                let cell = entries.rows[at] as usize * self.facts.columns[group] + entries.columns[at] as usize;
                self.tables[group][cell] = entries.pages[at];
            }
        }
    }

    /// Clears the pages that are free.
    pub fn forget_pages(&mut self, is_free: impl Fn(usize, i32) -> bool) {
        for (group, (target, draft)) in self.target.iter_mut().zip(&mut self.draft).enumerate() {
            let page_size = self.facts.groups[group].page_size as usize;
            let pages = target.chunks_mut(page_size).zip(draft.chunks_mut(page_size)).enumerate();
            for (page, (target, draft)) in pages {
                let is_used = target.iter().chain(draft.iter()).any(|&tag| tag != 0);
                if is_used && is_free(group, page as i32) {
                    target.fill(0);
                    draft.fill(0);
                }
            }
        }
    }

    /// Clears the pages that the step claimed. They hold an earlier owner's contents, and nothing may rely on these.
    fn forget_new_pages(&mut self, plan: &Plan) {
        for group in 0..self.facts.groups.len() {
            for (lane, &row) in plan.rows.iter().enumerate() {
                let at = group * plan.num_lanes() + lane;
                let page_size = self.page_size(group);
                let columns =
                    i64::from(plan.allocated_before[at]) / page_size..i64::from(plan.allocated_after[at]) / page_size;
                for column in columns {
                    let page = self.tables[group][row as usize * self.facts.columns[group] + column as usize];
                    let slots = (i64::from(page) * page_size) as usize..((i64::from(page) + 1) * page_size) as usize;
                    self.target[group][slots.clone()].fill(0);
                    self.draft[group][slots].fill(0);
                }
            }
        }
    }

    fn copy_pages(&mut self, ledger: &Ledger, plan: &Plan) -> Result<(), Fault> {
        for copy in &plan.page_copies {
            let group = copy.group as usize;
            for (what, page) in [("reads", copy.src), ("writes", copy.dst)] {
                let record = ledger.page_record(group, Page(page)).map_err(|error| error.to_string())?;
                let is_bad = record.state == PageState::Free || (what == "writes" && record.state == PageState::Shared);
                if is_bad && self.facts.page_fencing {
                    return Err(format!("a copy of step {} {what} page {page}, which is {}", plan.step, record.state));
                }
            }
            if self.has(Plant::SkipCopies) {
                continue;
            }
            let page_size = self.page_size(group) as usize;
            let (src, dst) = (copy.src as usize * page_size, copy.dst as usize * page_size);
            for layer in [&mut self.target[group], &mut self.draft[group]] {
                layer.copy_within(src..src + copy.tokens as usize, dst);
                layer[dst + copy.tokens as usize..dst + page_size].fill(0);
            }
        }
        Ok(())
    }
}

/// Pages that pinned prefixes hold, per group, as the driver saw them in the rows' tables.
pub type Pinned = Vec<Vec<i32>>;

/// One lane of a forward that is running.
struct Lane<'a> {
    device: &'a mut Device,
    ledger: &'a Ledger,
    pinned: &'a Pinned,
    plan: &'a Plan,
    /// Its index in the plan's arrays.
    at: usize,
    row: usize,
}

impl Lane<'_> {
    fn fault<T>(&self, what: &str) -> Result<T, Fault> {
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
            let (found, token) = (layer[slot], state.sequence[position as usize]);
            if page == 0 || found != token {
                let model = if of_draft { "draft" } else { "target" };
                return self.fault(&format!(
                    "reads position {position} of group {group} in page {page}: {model} KV of token {found}, not {token}"
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

    fn read_prefix(&self, end: i64, drafts: bool) -> Result<(), Fault> {
        for group in 0..self.device.facts.groups.len() {
            if self.device.facts.has_target[group] {
                self.check_reads(group, self.window_start(group, end)..end, false)?;
            }
            if drafts && self.device.facts.groups[group].hosts_drafts {
                self.check_reads(group, self.window_start(group, end)..end, true)?;
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
            let tag = self.device.next_tag;
            self.device.next_tag += 1;
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

    fn extend(mut self) -> Result<(), Fault> {
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
        for group in 0..self.device.facts.groups.len() {
            self.check_writes(group, start..end)?;
        }
        self.keep(start, end)
    }

    /// `[lo, hi]` of the lane, as the device uses it.
    fn roots(&self) -> (i64, i64) {
        let (lo, hi) = (i64::from(self.plan.lo[self.at]), i64::from(self.plan.hi[self.at]));
        let rounds = lo - i64::from(self.plan.start[self.at]);
        let most = i64::from(self.device.facts.shapes[self.plan.shapes[self.at] as usize].max_accept_len());
        match self.device.plant {
            Some(Plant::LowHi) if hi > lo => (lo, hi - 1),
            Some(Plant::NextA) => (lo, i64::from(self.plan.start[self.at]) + rounds * most),
            _ => (lo, hi),
        }
    }

    fn round(mut self, accept_len: i32) -> Result<(), Fault> {
        let ((lo, hi), len) = (self.roots(), self.device.rows[self.row].sequence.len() as i64);
        if self.device.rows[self.row].is_lost {
            // The clamp keeps any length in the range, so every root of the range must be safe.
            let roots = if self.device.has(Plant::NoClamp) { 0..=0 } else { lo..=hi };
            for root in roots {
                self.write_round(root)?;
            }
            self.device.rows[self.row].sequence.resize(lo as usize, 0);
            return Ok(());
        }
        let root = len.clamp(lo, hi);
        if root != len {
            return self.fault(&format!("its length {len} is outside of [{lo}, {hi}]"));
        }
        let shape = self.device.facts.shapes[self.plan.shapes[self.at] as usize];
        self.read_prefix(root, shape.num_steps > 0 && self.device.facts.draft_kv)?;
        self.write_round(root)?;
        let more = i64::from(self.device.has(Plant::AcceptMore));
        self.keep(root, root + i64::from(accept_len) + more)
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
