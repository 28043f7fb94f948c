//! The states that outlive the next fold of their rows: soft marks, and the states of the prefix index. A slot that one
//! of these keeps and that nobody holds is cached.
//!
//! What gives way when pages or slots do not suffice is told from outside (`observe`) and checked: it was cached, it is
//! as much as was lacking, and of the slots those go first that were used least recently.

use std::collections::{BTreeMap, BTreeSet};

use specpool_core::{Ledger, Row};

use super::states::{Lapse, SlotId, State};
use super::{Lane, Model, ModelStep};

/// A state that waits for `index`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) row: usize,
    pub(crate) state: State,
}

/// Who wrote the slots, what soft marks keep, and how long slots have been cached.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kept {
    /// In the order in which they were left.
    pub(crate) marks: Vec<Mark>,
    /// By slot: the last launched step that writes it, and its row.
    writers: BTreeMap<SlotId, (u64, usize)>,
    /// The calls that have succeeded.
    turn: u64,
    /// By cached slot: the turn in which it became so, or in which `index` found its state again.
    used: BTreeMap<SlotId, u64>,
    /// States whose KV is gone, of [`Lapse::OutliveKv`].
    pub(super) orphans: Vec<SlotId>,
}

/// What keeps a slot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Keeper {
    /// A soft mark of the row, on the state of so many tokens.
    Mark(usize, i32),
    /// The index, as the state of this text.
    Text(Vec<i32>),
}

impl Model {
    /// The slots that soft marks and the index keep.
    pub(crate) fn kept_slots(&self) -> BTreeSet<SlotId> {
        let marked = self.kept.marks.iter().map(|mark| mark.state.slot);
        let indexed = self.entries.values().filter_map(|entry| entry.state);
        marked.chain(indexed).chain(self.kept.orphans.iter().copied()).collect()
    }

    /// Kept slots that nobody holds and that no step may touch.
    pub(super) fn cached_states(&self) -> BTreeSet<SlotId> {
        let held = self.held_slots();
        self.kept_slots().into_iter().filter(|slot| !held.contains(slot) && !self.slot_waits(*slot)).collect()
    }

    /// Slots that only soft marks and the index keep.
    pub(crate) fn cached_slots(&self) -> usize {
        self.cached_states().len()
    }

    /// The soft marks of a row, oldest first.
    pub(crate) fn marks_of(&self, row: usize) -> impl Iterator<Item = State> {
        self.kept.marks.iter().filter(move |mark| mark.row == row).map(|mark| mark.state)
    }

    /// Whether a launched step that is not complete writes the slot.
    pub(super) fn is_waiting(&self, slot: SlotId) -> bool {
        self.kept.writers.get(&slot).is_some_and(|&(step, _)| step > self.completed)
    }

    pub(super) fn note_writers(&mut self, step: &ModelStep) {
        for lane in step.lanes.iter().filter(|lane| lane.fold.written() != 0) {
            self.kept.writers.insert(lane.fold.written(), (step.step, lane.row));
        }
    }

    /// Leaves a soft mark on the state that the lane's row has now, unless the row has one there.
    pub(super) fn leave_mark(&mut self, lane: &mut Lane) {
        let (row, state) = (lane.row, self.rows[lane.row].state);
        if state.slot != 0 && self.marks_of(row).all(|other| other.slot != state.slot) {
            self.kept.marks.push(Mark { row, state });
            lane.fold.is_marked = true;
        }
    }

    /// Takes back the soft mark that an unlaunched step left for the row on this slot, if `index` has not seen it.
    pub(super) fn unmark(&mut self, row: usize, slot: SlotId) {
        if self.lapse != Some(Lapse::KeepCancelledMark) {
            self.kept.marks.retain(|mark| mark.row != row || mark.state.slot != slot);
        }
    }

    /// Drops the soft marks of a row on states of more than `len` tokens.
    pub(super) fn drop_marks(&mut self, row: usize, len: i32) {
        self.kept.marks.retain(|mark| mark.row != row || mark.state.len <= len);
    }

    /// Nothing keeps the slot from here on.
    pub(super) fn unkeep(&mut self, slot: SlotId) {
        self.kept.marks.retain(|mark| mark.state.slot != slot);
        self.entries.values_mut().filter(|entry| entry.state == Some(slot)).for_each(|entry| entry.state = None);
    }

    /// Takes the states out of the index that the rows of a failed step wrote in it or later.
    pub(super) fn drop_spoiled(&mut self, step: &ModelStep) {
        let writers = &self.kept.writers;
        let is_spoiled = |slot: &SlotId| {
            let by_its_rows =
                |&(writer, row): &(u64, usize)| writer >= step.step && step.lanes.iter().any(|lane| lane.row == row);
            writers.get(slot).is_some_and(by_its_rows)
        };
        if self.lapse != Some(Lapse::KeepSpoiled) {
            self.entries.values_mut().for_each(|entry| entry.state = entry.state.filter(|slot| !is_spoiled(slot)));
        }
    }

    /// `index` knows the text now: it takes the row's states of it.
    pub(super) fn index_states(&mut self, row: usize, text: &[i32]) {
        let unwritten: Vec<SlotId> = self.waiting_folds(row).map(|(_, fold)| fold.written()).collect();
        let its_own = Some(self.rows[row].state).filter(|state| state.slot != 0);
        let marked: Vec<State> = self.marks_of(row).collect();
        for (at, state) in marked.iter().copied().chain(its_own).enumerate() {
            if state.len as usize > text.len() || unwritten.contains(&state.slot) {
                continue;
            }
            let is_elsewhere = self.entries.values().any(|entry| entry.state == Some(state.slot));
            let turn = self.kept.turn;
            match self.entries.get_mut(&text[..state.len as usize]) {
                Some(entry) if entry.state.is_some() => {
                    self.kept.used.extend(entry.state.map(|slot| (slot, turn)));
                }
                Some(entry) if !is_elsewhere => entry.state = Some(state.slot),
                _ => {}
            }
            if at < marked.len() {
                self.kept.marks.retain(|mark| mark.row != row || mark.state.slot != state.slot);
            }
        }
    }

    fn keepers(&self, slot: SlotId) -> BTreeSet<Keeper> {
        let marks = self.kept.marks.iter().filter(|mark| mark.state.slot == slot);
        let texts = self.entries.iter().filter(|(_, entry)| entry.state == Some(slot));
        let marks = marks.map(|mark| Keeper::Mark(mark.row, mark.state.len));
        marks.chain(texts.map(|(text, _)| Keeper::Text(text.clone()))).collect()
    }

    /// Looks what the ledger has given up in the call that has just succeeded.
    pub(crate) fn observe(&mut self, ledger: &Ledger) -> Result<(), String> {
        if self.states.is_none() && self.entries.is_empty() {
            return Ok(());
        }
        let texts = texts_of(ledger);
        self.observe_entries(&texts.iter().map(|(text, _)| text.clone()).collect())?;
        let Some(states) = self.states.clone() else { return Ok(()) };
        let text = |error: specpool_core::Error| error.to_string();
        let mut keepers = BTreeSet::new();
        for row in 1..self.rows.len() {
            let marks = ledger.soft_marks(0, Row(row as i32)).map_err(text)?;
            keepers.extend(marks.map(|(_, len)| Keeper::Mark(row, len)));
        }
        for (place, _, len) in ledger.index_states(0).map_err(text)? {
            keepers.insert(Keeper::Text(texts[place].0[..len as usize].to_vec()));
        }
        let cached = self.cached_states();
        let in_use = self.held_slots().len() + self.fenced_slots() + cached.len();
        let lacking = in_use.saturating_sub(states.num_slots);
        let (lost, left): (Vec<SlotId>, Vec<SlotId>) =
            cached.into_iter().partition(|&slot| self.keepers(slot).is_disjoint(&keepers));
        if lost.len() != lacking {
            return Err(format!("{} cached slots were given up, {lacking} were lacking", lost.len()));
        }
        let used = |slot: &SlotId| self.kept.used.get(slot).copied().unwrap_or(0);
        let (latest, earliest) = (lost.iter().map(used).max(), left.iter().map(used).min());
        let is_reversed = self.lapse == Some(Lapse::EvictNewest);
        if let (Some(latest), Some(earliest)) = (latest, earliest)
            && (latest > earliest || is_reversed && latest < earliest)
        {
            return Err(format!("a slot used in turn {latest} was given up, one of turn {earliest} was not"));
        }
        for slot in lost {
            self.unkeep(slot);
        }
        self.note_uses();
        Ok(())
    }

    /// Notes which slots have become cached.
    fn note_uses(&mut self) {
        let (cached, held) = (self.cached_states(), self.held_slots());
        let kept = self.kept_slots();
        self.kept.turn += 1;
        let turn = self.kept.turn;
        self.kept.used.retain(|slot, _| cached.contains(slot));
        for slot in cached {
            self.kept.used.entry(slot).or_insert(turn);
        }
        self.kept.writers.retain(|slot, _| kept.contains(slot) || held.contains(slot));
    }
}

/// The texts of the ledger's entries, in its order, each with the page of its last token in group 0.
pub(crate) fn texts_of(ledger: &Ledger) -> Vec<(Vec<i32>, i32)> {
    let mut path = Vec::new();
    let mut text_of = |entry: specpool_core::Indexed<'_>| {
        path.truncate(entry.start);
        path.extend_from_slice(entry.tokens);
        (path.clone(), entry.pages[0].last().copied().unwrap_or(0))
    };
    ledger.index_entries().map(&mut text_of).collect()
}
