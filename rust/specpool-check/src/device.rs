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
//!   reads [0, s), or [s-w+1, s) and the sink in a window group: the root is the query that sees furthest back
//!   writes the drafts' cells (where drafts live), [s, s+N) in verification, then keeps [s, s+accept_len)
//! ```

mod lane;
mod states;

use std::sync::Arc;

use specpool_core::{DeltaEntries, Group, Ledger, Page, PageState, Plan, PrefixRun, Row, Shape, StepKind};

use lane::Lane;
use states::DeviceStates;
pub(crate) use states::LaneFold;

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
    pub(crate) states: Option<DeviceStates>,
    next_tag: Tag,
    /// Per row: the tokens that it computes, if tokens are known. Their tags then say what lies before them too, so equal
    /// texts have equal tags.
    texts: Option<Vec<Vec<i32>>>,
    /// What the last forward reached, if it was a round.
    pub reached: Vec<Reach>,
    /// The most records, from the oldest that it read to its last node, that a row of the last forward needed at once.
    pub ring_reached: i64,
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
    HalfImport,
    LateState,
    FoldOneMore,
    FoldToRoot,
    FoldBack,
    WriteShared,
    ReadRecycled,
    RingShort,
    SkipCompaction,
    SkipUndo,
    CutAnywhere,
    KeepCheckpoint,
    FreeAtOnce,
    KeepCancelledMark,
    KeepCutMark,
    ServeWaiting,
    ServeOtherText,
    KeepSpoiled,
    OutliveKv,
    EvictNewest,
    NeverSteal,
}

impl Plant {
    /// Every plant: its name and what it does.
    pub const ALL: [(Self, &'static str, &'static str); 35] = [
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
        (Self::HalfImport, "half-import", "the driver goes on with a row whose last page has not arrived"),
        (Self::LateState, "late-state", "the driver goes on with a row whose recurrent state has not arrived"),
        (Self::FoldOneMore, "fold-one-more", "a fold goes on for one token more than the plan says"),
        (Self::FoldToRoot, "fold-to-root", "the fold of a round goes on to the device's root"),
        (
            Self::FoldBack,
            "fold-back",
            "a round behind an eager one starts from the resolved tokens, not from its state",
        ),
        (Self::WriteShared, "write-shared", "a fold writes the slot that it reads, whoever else has it"),
        (Self::ReadRecycled, "read-recycled", "a row without a slot starts from what its new slot holds"),
        (Self::RingShort, "ring-short", "a ring has one record less"),
        (Self::SkipCompaction, "skip-compaction", "the records of accepted drafts are not moved"),
        (Self::SkipUndo, "skip-undo", "the model leaves a row the slot and c of a step that was not launched"),
        (Self::CutAnywhere, "cut-anywhere", "the model cuts a row below its state wherever the pages allow"),
        (Self::KeepCheckpoint, "keep-checkpoint", "in the model, a kept state outlives a cut below it"),
        (Self::FreeAtOnce, "free-at-once", "in the model, a slot that is given up waits for no step"),
        (Self::KeepCancelledMark, "keep-cancelled-mark", "in the model, a soft mark outlives the cancel of its step"),
        (Self::KeepCutMark, "keep-cut-mark", "in the model, a soft mark outlives a cut below it"),
        (Self::ServeWaiting, "serve-waiting", "in the model, a hit takes a state that a launched step still writes"),
        (Self::ServeOtherText, "serve-other-text", "in the model, a hit takes a state of as many other tokens"),
        (Self::KeepSpoiled, "keep-spoiled", "in the model, the states of a failed step stay in the index"),
        (Self::OutliveKv, "outlive-kv", "in the model, a state stays in the index without the KV of its text"),
        (Self::EvictNewest, "evict-newest", "in the model, the slots that were used last are given up first"),
        (Self::NeverSteal, "never-steal", "in the model, a row does not take its slot from what only keeps it"),
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
            states: DeviceStates::new(ledger, plant),
            next_tag: 1,
            texts: None,
            reached: Vec::new(),
            ring_reached: 0,
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
        self.states.iter_mut().for_each(|states| states.spoil(row as usize, 0));
    }

    /// From now on every row computes a text that is told beforehand.
    pub(crate) fn tell_texts(&mut self) {
        self.texts = Some(vec![Vec::new(); self.rows.len()]);
    }

    /// The tokens that the row has and will compute, `len` of them; `None` if tokens are not known.
    pub(crate) fn text(&self, row: i32, len: usize) -> Option<Vec<i32>> {
        let mut text = self.texts.as_ref()?[row as usize].clone();
        text.resize(len, 0);
        Some(text)
    }

    /// The row computes this text from here on.
    pub(crate) fn set_text(&mut self, row: i32, text: &[i32]) {
        self.texts.iter_mut().for_each(|texts| texts[row as usize] = text.to_vec());
    }

    /// The tag of the row's token at a position.
    fn tag(&mut self, row: usize, position: usize) -> Tag {
        if let Some(text) = self.text(row as i32, position + 1) {
            return tag_of(&text);
        }
        self.next_tag += 1;
        self.next_tag - 1
    }

    /// Writes the pages and the state slot of an imported row, as a sender would have filled them: new tags for its `len`
    /// tokens, or those of zeros if texts are known; draft KV below `drafted`. Returns its sequence.
    ///
    /// # Errors
    /// The ledger's.
    pub(crate) fn import(&mut self, ledger: &Ledger, row: Row, len: i32, drafted: i32) -> Result<Vec<Tag>, Fault> {
        self.set_text(row.0, &[]);
        let sequence: Vec<Tag> = (0..len as usize).map(|position| self.tag(row.at(), position)).collect();
        for group in 0..self.facts.groups.len() {
            let page_size = self.page_size(group) as usize;
            let table = ledger.page_table(group).map_err(|error| error.to_string())?;
            let columns = table.row(row).iter().enumerate().filter(|&(_, &page)| page != 0);
            let columns: Vec<(usize, usize)> = columns.map(|(column, &page)| (column, page as usize)).collect();
            let arrived = columns.len() - usize::from(self.has(Plant::HalfImport));
            for &(column, page) in &columns[..arrived] {
                for offset in 0..page_size {
                    let position = column * page_size + offset;
                    let tag = sequence.get(position).copied().unwrap_or(0);
                    self.target[group][page * page_size + offset] = tag;
                    self.draft[group][page * page_size + offset] = if position < drafted as usize { tag } else { 0 };
                }
            }
        }
        let is_late = self.has(Plant::LateState);
        if let Some(states) = self.states.as_mut().filter(|_| !is_late) {
            let slot = ledger.state_slot(0).map_err(|error| error.to_string())?[row.at()];
            states.slots[slot as usize] = Some(sequence[..].into());
        }
        Ok(sequence)
    }

    /// Checks that pages hold these tokens, and draft KV of the first `drafted`.
    ///
    /// # Errors
    /// The first slot that does not.
    pub(crate) fn check_kept(
        &self,
        group: usize,
        run: PrefixRun<'_>,
        sequence: &[Tag],
        drafted: i32,
    ) -> Result<(), Fault> {
        let (page_size, spec) = (self.page_size(group) as usize, &self.facts.groups[group]);
        let num_drafted = if spec.hosts_drafts && self.facts.draft_kv { drafted as usize } else { 0 };
        let num_written = if self.facts.has_target[group] { sequence.len() } else { 0 };
        for (layer, end) in [(&self.target[group], num_written), (&self.draft[group], num_drafted)] {
            for (position, &tag) in sequence.iter().enumerate().take(end) {
                let page = match position / page_size {
                    column if column < run.num_sinks => run.pages[column],
                    column if column < run.first_column => continue,
                    column => run.pages[column - run.first_column + run.num_sinks],
                };
                let written = layer[page.at() * page_size + position % page_size];
                if written != tag {
                    return Err(format!(
                        "position {position} of a prefix in group {group}, page {page:?}: token {written}, not {tag}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// The first `len` tokens of the row, all written.
    #[must_use]
    pub fn sequence(&self, row: i32, len: i32) -> Vec<Tag> {
        let sequence = &self.rows[row as usize].sequence;
        sequence[..(len as usize).min(sequence.len())].to_vec()
    }

    /// From now on `new` stands for the token that was `old`, wherever it lies: they are the same.
    pub(crate) fn equate(&mut self, old: Tag, new: Tag) {
        let layers =
            self.target.iter_mut().chain(&mut self.draft).chain(self.rows.iter_mut().map(|row| &mut row.sequence));
        layers.flatten().filter(|tag| **tag == old).for_each(|tag| *tag = new);
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
        self.ring_reached = 0;
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
            for (lane, &row) in plan.rows.iter().enumerate() {
                self.rows[row as usize].is_lost = true;
                if let Some(fold) = self.fold(plan, lane)
                    && let Some(states) = &mut self.states
                {
                    states.spoil(row as usize, fold.dst);
                }
            }
        }
        Ok(())
    }

    /// Whether the target model's layers lie in the group.
    pub(crate) fn has_target(&self, group: usize) -> bool {
        self.facts.has_target[group]
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

/// The tag of the last token of a text, which stands for all of them.
fn tag_of(text: &[i32]) -> Tag {
    text.iter().fold(0x811C_9DC5, |tag: Tag, &token| (tag ^ (token as u32 + 1)).wrapping_mul(0x0100_0193)) | 1
}

/// The tags of a text's tokens.
pub(crate) fn tags_of(text: &[i32]) -> Vec<Tag> {
    (1..=text.len()).map(|len| tag_of(&text[..len])).collect()
}

/// Pages that pinned prefixes hold, per group, as the driver saw them in the rows' tables.
pub type Pinned = Vec<Vec<i32>>;
