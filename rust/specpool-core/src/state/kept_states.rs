//! The states that outlive the next fold of their rows: *soft marks*, which wait for `index`, and the states of the
//! prefix index (docs/contract.md, Recurrent state).
//!
//! A slot that one of these holds is *kept*. The pool counts all that keeps a slot as one holder, as it counts the
//! prefix index of a page: if nobody else holds the slot, it is cached, and it is given up when free slots do not
//! suffice. The pool's entry of a kept slot is the one whose text the state belongs to, or [`MARKED`].

use crate::digest::Digest;
use crate::error::Result;
use crate::ids::{Page, Row};
use crate::memory::{copied, room};
use crate::state::prefix_index::NONE;
use crate::state::state_group::StateSlots;
use crate::verb::Verb;

/// The pool's entry of a slot that soft marks keep, and not the prefix index.
pub(crate) const MARKED: u32 = u32::MAX;

/// Which soft mark a prepare left on a row's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Marked {
    /// None.
    #[default]
    No,
    /// One on a slot that the row owned.
    Owned,
    /// One on a slot that was shared before.
    Shared,
}

/// A state of a row that is kept until `index` takes it. Under pressure it gives way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SoftMark {
    pub(crate) row: Row,
    /// Tokens that the state contains.
    pub(crate) len: i32,
    pub(crate) slot: Page,
}

/// A state of the prefix index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexedState {
    /// The entry that has the last of its tokens.
    pub(crate) entry: u32,
    /// Tokens that the state contains, from the start of the text on.
    pub(crate) len: i32,
    pub(crate) slot: Page,
}

/// The last launched step that wrote a slot, and its row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Writer {
    pub(crate) step: u64,
    pub(crate) row: i32,
}

/// What keeps slots, and who wrote them.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeptStates {
    /// In the order in which they were left.
    pub(crate) marks: Vec<SoftMark>,
    /// By entry, then by length.
    pub(crate) indexed: Vec<IndexedState>,
    /// By slot, up to the greatest that was ever written.
    writers: Vec<Writer>,
}

/// For errors.
const KEPT: &str = "kept states";

impl KeptStates {
    pub(crate) fn try_clone(&self) -> Result<Self> {
        Ok(Self {
            marks: copied(&self.marks, KEPT)?,
            indexed: copied(&self.indexed, KEPT)?,
            writers: copied(&self.writers, KEPT)?,
        })
    }

    /// Takes the memory for the writers of `num_slots` slots, page 0 among them, and for `num_marks` more marks.
    pub(crate) fn make_room(&mut self, num_slots: usize, num_marks: usize) -> Result<()> {
        let more = num_slots.saturating_sub(self.writers.len());
        room(&mut self.writers, more, KEPT)?;
        room(&mut self.marks, num_marks, KEPT)
    }

    /// Takes the memory for all that [`StateSlots::index_state`] does with the row's states.
    pub(crate) fn make_room_to_index(&mut self) -> Result<()> {
        let states = self.marks.len() + 1;
        room(&mut self.indexed, states, KEPT)
    }

    /// Notes the step that writes the slot; nothing for page 0. The prepare has taken the memory.
    pub(crate) fn set_written(&mut self, slot: Page, writer: Writer) {
        if slot != Page::SINK {
            self.writers.resize(self.writers.len().max(slot.at() + 1), Writer::default());
            self.writers[slot.at()] = writer;
        }
    }

    /// The last launched step that wrote the slot; step 0 if none did.
    pub(crate) fn writer(&self, slot: Page) -> Writer {
        self.writers.get(slot.at()).copied().unwrap_or_default()
    }

    /// The slots that soft marks of the row keep, and the tokens that they contain.
    pub(crate) fn marks_of(&self, row: Row) -> impl Iterator<Item = (Page, i32)> {
        self.marks.iter().filter(move |mark| mark.row == row).map(|mark| (mark.slot, mark.len))
    }

    /// The entry's states of up to `max_len` tokens, the longest first.
    pub(crate) fn of_entry(&self, entry: u32, max_len: i32) -> impl Iterator<Item = &IndexedState> {
        let end = self.indexed.partition_point(|state| (state.entry, state.len) <= (entry, max_len));
        self.indexed[..end].iter().rev().take_while(move |state| state.entry == entry)
    }

    fn has_mark_on(&self, slot: Page) -> bool {
        self.marks.iter().any(|mark| mark.slot == slot)
    }

    fn insert(&mut self, state: IndexedState) {
        let place = self.indexed.partition_point(|other| (other.entry, other.len) < (state.entry, state.len));
        self.indexed.insert(place, state);
    }

    /// Adds everything that decides what becomes of the states: nothing where none are kept.
    pub(crate) fn hash(&self, digest: &mut Digest, entries: impl Iterator<Item = u32>, completed: u64) {
        if self.marks.is_empty() && self.indexed.is_empty() {
            return;
        }
        for mark in &self.marks {
            digest.ints(&[mark.row.0, mark.len, mark.slot.0]);
        }
        for entry in entries {
            digest.numbers(self.of_entry(entry, i32::MAX).flat_map(|state| [state.len, state.slot.0]));
        }
        let kept = self.marks.iter().map(|mark| mark.slot).chain(self.indexed.iter().map(|state| state.slot));
        for (slot, writer) in kept.map(|slot| (slot, self.writer(slot))).filter(|(_, writer)| writer.step > completed) {
            digest.ints(&[slot.0, writer.row]);
            digest.word(writer.step);
        }
    }
}

impl StateSlots {
    /// Whether the prefix index or a soft mark holds the slot.
    pub(crate) fn is_kept(&self, slot: Page) -> bool {
        self.pool.entry_of(slot) != NONE
    }

    /// Whether the prefix index holds the slot.
    pub(crate) fn is_indexed(&self, slot: Page) -> bool {
        ![NONE, MARKED].contains(&self.pool.entry_of(slot))
    }

    /// Leaves a soft mark on the row's slot, if it has one and no mark of the row is on it.
    pub(crate) fn leave_soft_mark(&mut self, row: Row, verb: Verb) -> Marked {
        let (slot, len) = (self.slot_of(row), self.len[row.at()]);
        if slot == Page::SINK || self.kept.marks_of(row).any(|(other, _)| other == slot) {
            return Marked::No;
        }
        let marked = if self.pool.is_owned(slot) { Marked::Owned } else { Marked::Shared };
        if !self.is_kept(slot) {
            self.pool.index(slot, MARKED, verb);
        }
        self.kept.marks.push(SoftMark { row, len, slot });
        marked
    }

    /// Takes back the soft mark that a prepare left on the row's slot, unless it is gone already.
    pub(super) fn unmark(&mut self, row: Row, marked: Marked, verb: Verb) {
        let slot = self.slot_of(row);
        let place = self.kept.marks.iter().position(|mark| mark.row == row && mark.slot == slot);
        match (marked, place) {
            (Marked::No, _) | (_, None) => {}
            (Marked::Owned, Some(place)) => {
                self.kept.marks.remove(place);
                self.pool.unindex_owned(slot, verb);
            }
            (Marked::Shared, Some(place)) => self.drop_soft_mark(place, 0, verb),
        }
    }

    /// Drops the soft marks of the row that contain more than `len` tokens.
    pub(crate) fn drop_soft_marks(&mut self, row: Row, len: i32, completed: u64, verb: Verb) {
        let is_beyond = |mark: &SoftMark| mark.row == row && mark.len > len;
        while let Some(place) = self.kept.marks.iter().position(is_beyond) {
            self.drop_soft_mark(place, completed, verb);
        }
    }

    /// It needs no fence: the row's steps touch a slot only while the row holds it.
    fn drop_soft_mark(&mut self, place: usize, completed: u64, verb: Verb) {
        let slot = self.kept.marks.remove(place).slot;
        if self.pool.entry_of(slot) == MARKED && !self.kept.has_mark_on(slot) {
            self.pool.unindex(slot, completed, verb);
        }
    }

    /// Moves a row's state of `len` tokens into the prefix index, behind all that the entry has of them.
    pub(crate) fn index_state(&mut self, entry: u32, len: i32, slot: Page, verb: Verb) {
        if self.is_kept(slot) {
            self.pool.set_entry(slot, entry);
        } else {
            self.pool.index(slot, entry, verb);
        }
        self.kept.insert(IndexedState { entry, len, slot });
    }

    /// Ends the soft mark of a row that `index` has seen.
    pub(crate) fn end_soft_mark(&mut self, row: Row, slot: Page, completed: u64, verb: Verb) {
        if let Some(place) = self.kept.marks.iter().position(|mark| mark.row == row && mark.slot == slot) {
            self.drop_soft_mark(place, completed, verb);
        }
    }

    /// Takes the states of the entry that contain more than `len` tokens out of the prefix index. Those of up to
    /// `shared` tokens go to `sibling`, which begins with these.
    pub(crate) fn leave_entry(
        &mut self,
        entry: u32,
        len: i32,
        sibling: Option<(u32, i32)>,
        completed: u64,
        verb: Verb,
    ) {
        let beyond = |state: &IndexedState| (state.entry, state.len) <= (entry, len);
        loop {
            let place = self.kept.indexed.partition_point(beyond);
            let Some(&state) = self.kept.indexed.get(place).filter(|state| state.entry == entry) else { return };
            self.kept.indexed.remove(place);
            match sibling {
                Some((sibling, shared)) if state.len <= shared => {
                    self.pool.set_entry(state.slot, sibling);
                    self.kept.insert(IndexedState { entry: sibling, ..state });
                }
                _ => self.leave_index(state.slot, completed, verb),
            }
        }
    }

    fn leave_index(&mut self, slot: Page, completed: u64, verb: Verb) {
        if self.kept.has_mark_on(slot) {
            self.pool.set_entry(slot, MARKED);
        } else {
            self.pool.unindex(slot, completed, verb);
        }
    }

    /// Takes the states out of the prefix index that `is_spoiled` by their writers.
    pub(crate) fn drop_spoiled(&mut self, is_spoiled: impl Fn(Writer) -> bool, completed: u64, verb: Verb) {
        let spoiled = |kept: &KeptStates| kept.indexed.iter().position(|state| is_spoiled(kept.writer(state.slot)));
        while let Some(place) = spoiled(&self.kept) {
            let state = self.kept.indexed.remove(place);
            self.leave_index(state.slot, completed, verb);
        }
    }

    /// Gives up whatever keeps the slot.
    pub(crate) fn unkeep(&mut self, slot: Page, completed: u64, verb: Verb) {
        self.kept.marks.retain(|mark| mark.slot != slot);
        self.kept.indexed.retain(|state| state.slot != slot);
        self.pool.unindex(slot, completed, verb);
    }
}
