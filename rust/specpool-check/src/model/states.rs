//! Recurrent states. A slot is a number that is never used twice, and who holds it is the set of rows, checkpoints and
//! unlaunched steps that name it. A slot that nobody holds is free, unless a launched step may still touch it.

use std::collections::BTreeSet;

use specpool_core::LedgerConfig;

use super::{Lane, Model, ModelStep, Refusal};

/// A slot of the model; 0 is the state of no tokens.
pub(crate) type SlotId = u32;

/// In a fold that is not claimed: a slot that nobody has had.
const FRESH: SlotId = SlotId::MAX;

/// What the model must know of a state group.
#[derive(Debug, Clone)]
pub(crate) struct ModelStates {
    name: String,
    pub(super) num_slots: usize,
    flush: i32,
    eager: bool,
    /// Per shape: whether a round has its root and nothing else.
    is_root_only: Vec<bool>,
}

impl ModelStates {
    pub(super) fn of(config: &LedgerConfig) -> Option<Self> {
        config.states.first().map(|group| Self {
            name: group.name.clone(),
            num_slots: group.num_slots as usize,
            flush: group.flush as i32,
            eager: group.eager,
            is_root_only: config.shapes.iter().map(|shape| shape.num_draft_tokens == 1).collect(),
        })
    }
}

/// The state of the first `len` tokens of a row, in a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) slot: SlotId,
    pub(crate) len: i32,
}

/// What one lane does to its row's state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ModelFold {
    pub(crate) before: State,
    pub(crate) after: State,
    /// Whether the lane left a soft mark on the state after it.
    pub(crate) is_marked: bool,
}

impl ModelFold {
    /// The slot that the step writes; 0 if it folds nothing.
    pub(crate) fn written(self) -> SlotId {
        if self.after.len > self.before.len { self.after.slot } else { 0 }
    }

    /// The slot that the step reads and does not write.
    fn only_read(self) -> SlotId {
        if self.after.slot == self.before.slot { 0 } else { self.before.slot }
    }
}

/// Who holds a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SlotHolder {
    /// A row, as its state.
    Row(usize),
    /// A row, for its checkpoint.
    Checkpoint(usize),
    /// An unlaunched step of a row, which reads it and writes another.
    Step(u64, usize),
    /// An export.
    Prefix(u64),
}

impl SlotHolder {
    /// The row, unless it is an export.
    fn row(self) -> Option<usize> {
        match self {
            Self::Row(row) | Self::Checkpoint(row) | Self::Step(_, row) => Some(row),
            Self::Prefix(_) => None,
        }
    }
}

/// A rule that the model leaves out, to show that the ledger is compared with every one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lapse {
    /// A cut or a cancel leaves a row with what its unlaunched step would have made.
    SkipUndo,
    /// A cut ends wherever the pages allow.
    CutAnywhere,
    /// A checkpoint outlives a cut below it.
    KeepCheckpoint,
    /// A slot that is given up waits for no step.
    FreeAtOnce,
    /// A soft mark outlives the cancel of its step.
    KeepCancelledMark,
    /// A soft mark outlives a cut below it.
    KeepCutMark,
    /// A hit takes a state that a launched step still writes.
    ServeWaiting,
    /// A hit takes a state of as many tokens, whatever they are.
    ServeOtherText,
    /// The states of a failed step stay in the index.
    KeepSpoiled,
    /// A state stays in the index without the KV of its text.
    OutliveKv,
    /// The slots that were used last are given up first.
    EvictNewest,
    /// A row does not take its slot from the index and soft marks.
    NeverSteal,
}

impl Model {
    /// Refuses a call that would need states which are not kept.
    pub(super) fn check_stateless(&self) -> Result<(), Refusal> {
        if self.states.is_some() { Err(Refusal::Config) } else { Ok(()) }
    }

    fn stands(&self, lane: &Lane) -> bool {
        self.rows[lane.row].epoch == lane.epoch
    }

    /// The folds of the row that are prepared and not launched, oldest first, each with its step.
    pub(super) fn waiting_folds(&self, row: usize) -> impl Iterator<Item = (u64, ModelFold)> {
        let lanes = self.steps.iter().filter(|step| !step.launched).flat_map(|step| {
            let lanes = step.lanes.iter().filter(move |lane| lane.row == row && self.stands(lane));
            lanes.map(|lane| (step.step, lane.fold))
        });
        lanes.collect::<Vec<_>>().into_iter()
    }

    /// Everyone who holds a slot of a row, with the slot.
    fn slots_held_for(&self, row: usize) -> Vec<(SlotId, SlotHolder)> {
        let state = &self.rows[row];
        let mut held = vec![(state.state.slot, SlotHolder::Row(row))];
        held.extend(state.kept.map(|kept| (kept.slot, SlotHolder::Checkpoint(row))));
        held.extend(self.waiting_folds(row).map(|(step, fold)| (fold.only_read(), SlotHolder::Step(step, row))));
        held.retain(|&(slot, _)| slot != 0);
        held
    }

    fn slots_held(&self) -> impl Iterator<Item = (SlotId, SlotHolder)> {
        let exports = self.prefixes.iter().map(|(&id, prefix)| (prefix.slot, SlotHolder::Prefix(id)));
        let exports = exports.filter(|&(slot, _)| slot != 0);
        (0..self.rows.len()).flat_map(|row| self.slots_held_for(row)).chain(exports)
    }

    /// Everyone who holds the slot.
    pub(crate) fn slot_holders(&self, slot: SlotId) -> BTreeSet<SlotHolder> {
        self.slots_held().filter(|&(other, _)| other == slot).map(|(_, holder)| holder).collect()
    }

    pub(super) fn held_slots(&self) -> BTreeSet<SlotId> {
        self.slots_held().map(|(slot, _)| slot).collect()
    }

    /// Whether a launched step of someone who gave the slot up may still touch it.
    pub(super) fn slot_waits(&self, slot: SlotId) -> bool {
        self.slot_fences.get(&slot).is_some_and(|&step| step > self.completed)
    }

    /// Slots that nobody holds but that a launched step may still touch.
    pub(crate) fn fenced_slots(&self) -> usize {
        let held = self.held_slots();
        self.slot_fences.keys().filter(|&&slot| self.slot_waits(slot) && !held.contains(&slot)).count()
    }

    /// Slots that can be taken.
    pub(crate) fn free_slots(&self) -> usize {
        let all = self.states.as_ref().map_or(0, |states| states.num_slots);
        all - self.held_slots().len() - self.fenced_slots() - self.cached_slots()
    }

    /// Slots whose every holder is an idle row.
    pub(crate) fn reclaimable_slots(&self) -> usize {
        let is_idle_row = |holder: &SlotHolder| holder.row().is_some_and(|row| self.rows[row].idle);
        let is_idle = |slot: &SlotId| self.slot_holders(*slot).iter().all(is_idle_row);
        self.held_slots().iter().filter(|slot| is_idle(slot)).count()
    }

    /// Where the state of a row ends once a round of that shape has run.
    fn state_len_after(&self, states: &ModelStates, row: usize, shape: usize) -> i32 {
        let state = &self.rows[row];
        let root_is_certain = state.rounds.is_empty() && states.is_root_only[shape];
        let pending = state.resolved - state.state.len;
        if states.eager && root_is_certain {
            state.resolved + 1
        } else if pending >= states.flush {
            state.resolved
        } else {
            state.state.len
        }
    }

    /// What each lane does to its row's state, with slot [`FRESH`] where it has to take one.
    pub(super) fn plan_folds(
        &self,
        is_extend: bool,
        rows: &[usize],
        shapes: &[i32],
        wanted: &[Vec<i64>],
    ) -> Result<Vec<ModelFold>, Refusal> {
        let Some(states) = &self.states else { return Ok(vec![ModelFold::default(); rows.len()]) };
        let (mut folds, mut need, mut waiting, mut stealing) = (Vec::new(), 0_usize, 0, Vec::new());
        let kept = self.kept_slots();
        for (lane, &row) in rows.iter().enumerate() {
            let before = self.rows[row].state;
            let len = if is_extend {
                // The last token of a prompt is left to be computed.
                wanted[lane][0] as i32 - 1
            } else {
                self.state_len_after(states, row, shapes[lane] as usize)
            };
            let is_alone = self.slot_holders(before.slot).into_iter().eq([SlotHolder::Row(row)]);
            let is_its_own = before.slot != 0 && is_alone;
            let can_write = is_its_own && !self.slot_waits(before.slot);
            let slot = if len == before.len || (can_write && !kept.contains(&before.slot)) {
                before.slot
            } else {
                need += 1;
                waiting += usize::from(is_its_own && !can_write);
                stealing.extend(Some(lane).filter(|_| can_write && self.lapse != Some(Lapse::NeverSteal)));
                FRESH
            };
            folds.push(ModelFold { before, after: State { slot, len }, is_marked: false });
        }
        let (group, free, reclaimable) = (states.name.clone(), self.free_slots(), self.reclaimable_slots());
        let cached = self.cached_slots();
        let lacking = need.saturating_sub(free + cached);
        if lacking > stealing.len() {
            let (need, fenced) = (need - stealing.len(), self.fenced_slots() + waiting);
            return Err(Refusal::OutOfPages { group, need, free, cached, fenced, reclaimable });
        }
        for lane in stealing.into_iter().take(lacking) {
            folds[lane].after.slot = folds[lane].before.slot;
        }
        Ok(folds)
    }

    /// Refuses a row that arrives if no slot is free or cached.
    pub(super) fn check_free_slot(&self) -> Result<(), Refusal> {
        let Some(states) = &self.states else { return Ok(()) };
        if self.free_slots() + self.cached_slots() > 0 {
            return Ok(());
        }
        let (group, fenced, reclaimable) = (states.name.clone(), self.fenced_slots(), self.reclaimable_slots());
        Err(Refusal::OutOfPages { group, need: 1, free: 0, cached: 0, fenced, reclaimable })
    }

    /// A row that arrives takes a slot that nobody has had.
    pub(super) fn take_state(&mut self, row: usize, len: i32) {
        if self.states.is_some() {
            self.next_slot += 1;
            self.rows[row].state = State { slot: self.next_slot, len };
        }
    }

    /// Takes the slots of the folds, and moves each row's state.
    pub(super) fn claim_folds(&mut self, lanes: &mut [Lane]) {
        for lane in lanes {
            if lane.fold.after.slot == FRESH {
                self.next_slot += 1;
                lane.fold.after.slot = self.next_slot;
            } else if lane.fold.written() != 0 {
                self.unkeep(lane.fold.written());
            }
            self.rows[lane.row].state = lane.fold.after;
        }
    }

    /// The launched step gives up the slots that it only reads.
    pub(super) fn launch_folds(&mut self, step: &ModelStep) {
        self.note_writers(step);
        for lane in &step.lanes {
            self.leave_slot(lane.fold.only_read(), step.step);
        }
    }

    /// Somebody whose last launched step is `fence` gives the slot up.
    fn leave_slot(&mut self, slot: SlotId, fence: u64) {
        let is_free_at_once = !self.page_fencing || self.lapse == Some(Lapse::FreeAtOnce);
        if slot != 0 && fence > self.completed && !is_free_at_once {
            let latest = self.slot_fences.entry(slot).or_default();
            *latest = fence.max(*latest);
        }
    }

    /// Puts the state of a cancelled lane back.
    pub(super) fn undo_fold(&mut self, lane: &Lane) {
        if self.lapse != Some(Lapse::SkipUndo) {
            self.undo_mark(lane.row, lane.fold);
            self.rows[lane.row].state = lane.fold.before;
        }
    }

    fn undo_mark(&mut self, row: usize, fold: ModelFold) {
        if fold.is_marked {
            self.unmark(row, fold.after.slot);
        }
    }

    /// The row's state without its unlaunched steps.
    pub(super) fn settled_state(&self, row: usize) -> State {
        let first = self.waiting_folds(row).next().filter(|_| self.lapse != Some(Lapse::SkipUndo));
        first.map_or(self.rows[row].state, |(_, fold)| fold.before)
    }

    /// Whether the row can go on from `len` tokens: its state has no more, or a state of just these is held.
    pub(super) fn has_state_below(&self, row: usize, len: i32) -> bool {
        let is_kept = self.states_kept_for(row).any(|kept| kept.len == len);
        let is_lenient = self.lapse == Some(Lapse::CutAnywhere);
        is_lenient || len == 0 || is_kept || self.settled_state(row).len <= len
    }

    /// The states that the row can go back to: that of its checkpoint, and those of its soft marks.
    fn states_kept_for(&self, row: usize) -> impl Iterator<Item = State> {
        self.rows[row].kept.into_iter().chain(self.marks_of(row))
    }

    /// Cuts the row's states to `len` tokens. Its steps are stale from here on.
    pub(super) fn cut_states(&mut self, row: usize, len: i32) {
        let (settled, fence) = (self.settled_state(row), self.rows[row].last_launched);
        for (_, fold) in self.waiting_folds(row).collect::<Vec<_>>() {
            self.undo_mark(row, fold);
        }
        self.rows[row].state = settled;
        if settled.len > len {
            self.leave_slot(settled.slot, fence);
            let kept = self.states_kept_for(row).filter(|kept| kept.len <= len).max_by_key(|kept| kept.len);
            self.rows[row].state = kept.unwrap_or_default();
        }
        let outlives = self.lapse == Some(Lapse::KeepCheckpoint);
        self.rows[row].kept = self.rows[row].kept.filter(|kept| kept.len <= len || outlives);
        if self.lapse != Some(Lapse::KeepCutMark) {
            self.drop_marks(row, len);
        }
    }

    /// Keeps the row's state for its checkpoint, and returns how many tokens that has.
    pub(super) fn keep_state(&mut self, row: usize) -> i32 {
        let state = self.rows[row].state;
        self.rows[row].kept = (state.slot != 0).then_some(state);
        let resolved = self.rows[row].resolved;
        let is_held = |group: usize| self.holds_window(group, &self.rows[row].groups[group], state.len);
        let can_return = self.states.is_some() && (0..self.groups.len()).all(is_held);
        if can_return { state.len } else { resolved }
    }

    /// The row goes. What `end_turn` kept waits only for the steps that read it, which have left their fence already.
    pub(super) fn drop_states(&mut self, row: usize) {
        let (state, fence) = (self.settled_state(row), self.rows[row].last_launched);
        self.leave_slot(state.slot, fence);
        self.drop_marks(row, 0);
    }

    /// Refuses a fork or an export of a row whose state has tokens below which a window is gone. Returns the tokens of the
    /// fork.
    pub(super) fn check_fork(&self, row: usize) -> Result<i32, Refusal> {
        let state = &self.rows[row];
        if self.states.is_none() {
            return Ok(state.resolved);
        }
        let is_held = |group: usize| self.holds_window(group, &state.groups[group], state.state.len);
        if (0..self.groups.len()).all(is_held) { Ok(state.state.len) } else { Err(Refusal::NotReady) }
    }
}

/// Compares what a plan does to the states with what the model's step does.
pub(crate) fn same_folds(plan: &specpool_core::Plan, step: &ModelStep) -> Result<(), String> {
    let Some(folds) = &plan.states else { return Ok(()) };
    for (at, lane) in step.lanes.iter().enumerate() {
        let (src, dst) = (folds.src[at], folds.dst[at]);
        let plan = (src != 0, dst != 0, dst == src, folds.from[at], folds.to[at]);
        let ModelFold { before, after, .. } = lane.fold;
        let written = lane.fold.written();
        let model = (before.slot != 0, written != 0, written == before.slot, before.len, after.len);
        if plan != model {
            return Err(format!(
                "step {}, row {}: has a slot, writes one, the same one, from, to: the ledger says {plan:?}, the model \
                 {model:?}",
                step.step, lane.row
            ));
        }
    }
    Ok(())
}
