//! A state group: the recurrent states of a model whose layers have no KV, one state slot a row (docs/contract.md,
//! Recurrent state).
//!
//! A slot holds the state after exactly c tokens of one text. What lies behind c is in a ring of recorded layer inputs
//! on the device:
//!
//! ```text
//!   [0, c) in the slot | [c, r) recorded | [r, root) in flight, recorded | [root, root + N) nodes
//! ```
//!
//! A step *folds* the records of `[from, to)` into the slot. `to` counts only tokens that were resolved when the step
//! was prepared, so the host always knows c, and a cut to c or more moves no slot.

use crate::check::in_range;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::memory::{self, zeroed};
use crate::shape::Shape;
use crate::state::group::Fence;
use crate::state::kept_states::{KeptStates, Marked, Writer};
use crate::state::page_pool::{PagePool, PageRecord};
use crate::verb::Verb;

/// The configuration of a state group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateGroup {
    /// The name of the group in errors and audits.
    pub name: String,
    /// Number of state slots.
    pub num_slots: i64,
    /// A round folds if at least this many resolved tokens are not in the slot. A greater number saves writes of
    /// states, and makes the ring longer.
    pub flush: i64,
    /// Whether a round of one node with nothing in flight folds its root too, because the root is certain then.
    pub eager: bool,
}

impl StateGroup {
    /// Checks what can be checked of a state group alone; a ledger checks more.
    ///
    /// # Errors
    /// [`Error::Config`] that names the group, the value and what is allowed.
    pub fn check(&self) -> Result<()> {
        if self.name.is_empty() {
            return Err(Error::Config("a state group needs a name".into()));
        }
        let settings = [("num_slots", self.num_slots), ("flush", self.flush)];
        let checked = settings.map(|(name, value)| in_range(name, value, 1, i32::MAX.into()));
        match checked.into_iter().find_map(Result::err) {
            Some(error) => Err(Error::Config(format!("state group {}: {error}", self.name))),
            None => Ok(()),
        }
    }

    /// Records that a row's ring must hold, if a forward may write the records of its nodes before it reads older ones.
    /// `shapes` are all that may run.
    ///
    /// # Errors
    /// [`Error::Config`] if `overlap_depth` is out of its range.
    pub fn ring_len(&self, shapes: &[Shape], overlap_depth: i64) -> Result<i64> {
        in_range("overlap_depth", overlap_depth, 0, i32::MAX.into())?;
        let accepts = shapes.iter().map(Shape::max_accept_len).max().unwrap_or(1);
        let nodes = shapes.iter().map(|shape| shape.num_draft_tokens).max().unwrap_or(1);
        Ok((overlap_depth + 1) * i64::from(accepts) + i64::from(nodes) + self.flush - 1)
    }
}

/// What the lanes of a plan do with their rows' states: `int32 [num_states, b]` each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateFolds {
    /// The state slot that each lane reads; 0 is a state of zeros.
    pub src: Vec<i32>,
    /// The state slot that each lane writes; 0 if it folds nothing.
    pub dst: Vec<i32>,
    /// c before the step: tokens that the slot `src` contains.
    pub from: Vec<i32>,
    /// c after the step: the lane folds the tokens `[from, to)` into the state.
    pub to: Vec<i32>,
}

/// What a lane does with its row's state: read the slot `src`, fold `[from, to)`, write the slot `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fold {
    /// The row's slot before the step; page 0 is a state of zeros.
    pub(crate) src: Page,
    /// Page 0 if nothing is folded, and so nothing is written.
    pub(crate) dst: Page,
    pub(crate) from: i32,
    /// The soft mark that the lane left.
    pub(crate) marked: Marked,
}

impl Fold {
    /// Whether the step writes another slot than it reads. Until its launch the step then holds `src` for the row.
    fn moves(self) -> bool {
        self.dst != Page::SINK && self.dst != self.src
    }

    /// The slot that the step holds for the row until its launch; page 0 if there is none.
    pub(crate) fn held(self) -> Page {
        if self.moves() { self.src } else { Page::SINK }
    }
}

/// Where a fold writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Nothing is folded.
    Nowhere,
    /// In place.
    Same(Page),
    /// In a slot that the row must take.
    Fresh,
    /// In a slot that the row must take; or in place in this one, if the prefix index and soft marks give it up.
    FreshOrStolen(Page),
}

/// The slots of a ledger's rows.
#[derive(Debug, Clone)]
pub(crate) struct StateSlots {
    pub(crate) spec: StateGroup,
    pub(crate) pool: PagePool,
    /// `int32 [num_rows + 1]`: the slot of each row; 0 before its first fold.
    pub(crate) slot: Vec<i32>,
    /// `int32 [num_rows + 1]`: c, tokens that the slot contains.
    pub(crate) len: Vec<i32>,
    /// `int32 [num_rows + 1]`: the slot that `end_turn` keeps for each row; 0 if there is none.
    mark_slot: Vec<i32>,
    /// `int32 [num_rows + 1]`: tokens that the kept slot contains, at most c.
    mark_len: Vec<i32>,
    /// The states that wait for `index`, and those of the prefix index.
    pub(crate) kept: KeptStates,
}

type Held = std::result::Result<(), PageRecord>;

impl StateSlots {
    pub(crate) fn new(spec: StateGroup, num_rows: i64, sessions: bool) -> Result<Self> {
        spec.check()?;
        if sessions && spec.num_slots < 2 {
            return Err(Error::Config(format!(
                "state group {}: num_slots must be at least 2 with sessions, for a row and its checkpoint, got {}",
                spec.name, spec.num_slots
            )));
        }
        let lengths = || zeroed::<i32>(num_rows as usize + 1, "state slots");
        Ok(Self {
            pool: PagePool::new(spec.num_slots)?,
            slot: lengths()?,
            len: lengths()?,
            mark_slot: lengths()?,
            mark_len: lengths()?,
            kept: KeptStates::default(),
            spec,
        })
    }

    /// A copy for a snapshot.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let copied = |numbers: &[i32]| memory::copied(numbers, "state slots");
        Ok(Self {
            spec: self.spec.clone(),
            pool: self.pool.try_clone()?,
            slot: copied(&self.slot)?,
            len: copied(&self.len)?,
            mark_slot: copied(&self.mark_slot)?,
            mark_len: copied(&self.mark_len)?,
            kept: self.kept.try_clone()?,
        })
    }

    /// Takes over a copy of another group's numbers, in place because Python has views of them.
    pub(crate) fn restore(&mut self, other: Self) {
        self.pool = other.pool;
        self.kept = other.kept;
        self.slot.copy_from_slice(&other.slot);
        self.len.copy_from_slice(&other.len);
        self.mark_slot.copy_from_slice(&other.mark_slot);
        self.mark_len.copy_from_slice(&other.mark_len);
    }

    /// Where the fold of a round of `nodes` nodes ends, for a row of `resolved` tokens. It never goes back: behind an
    /// eager round, c is beyond r.
    pub(crate) fn round_end(&self, row: Row, resolved: i32, in_flight: i32, nodes: u32) -> i32 {
        let len = self.len[row.at()];
        if self.spec.eager && in_flight == 0 && nodes == 1 {
            return resolved + 1;
        }
        if i64::from(resolved - len) < self.spec.flush { len } else { resolved }
    }

    /// Where a fold that ends at `to` writes. A slot is written in place only if nobody else holds it, and no launched
    /// step of another holder may still read it. What only the prefix index and soft marks hold beside the row can be
    /// stolen from them.
    pub(crate) fn target(&self, row: Row, to: i32, completed: u64) -> Target {
        let slot = self.slot_of(row);
        if to <= self.len[row.at()] {
            Target::Nowhere
        } else if slot == Page::SINK || self.pool.holders_if_unfenced(slot, completed) != Some(1) {
            Target::Fresh
        } else if self.is_kept(slot) {
            Target::FreshOrStolen(slot)
        } else {
            Target::Same(slot)
        }
    }

    /// Whether the row could write its slot in place, or steal it, were it not for the fences of former holders.
    pub(crate) fn waits_for_fence(&self, row: Row) -> bool {
        let slot = self.slot_of(row);
        slot != Page::SINK && self.pool.counts_of(slot).holders == 1 + u32::from(self.is_kept(slot))
    }

    pub(crate) fn slot_of(&self, row: Row) -> Page {
        Page(self.slot[row.at()])
    }

    /// The slot that `end_turn` keeps for the row, and the tokens that it contains.
    pub(crate) fn mark(&self, row: Row) -> Option<(Page, i32)> {
        let (slot, len) = (Page(self.mark_slot[row.at()]), self.mark_len[row.at()]);
        (slot != Page::SINK).then_some((slot, len))
    }

    /// The slots that the row itself holds: its own, and the one that `end_turn` keeps.
    pub(crate) fn slots_of(&self, row: Row) -> impl Iterator<Item = Page> + use<> {
        let slots = [self.slot[row.at()], self.mark_slot[row.at()]];
        slots.into_iter().filter(|&slot| slot != 0).map(Page)
    }

    /// Returns `len` if a row whose slot contains `state_len` tokens can go on from there. Otherwise returns the
    /// greatest shorter length at which a state is held; 0 if none is.
    pub(crate) fn next_cut(&self, row: Row, state_len: i32, len: i32) -> i32 {
        if len >= state_len { len } else { self.held_below(row, len).1 }
    }

    /// The slot of the greatest length up to `len` at which the row holds a state, and that length; page 0 and 0 if it
    /// holds none.
    fn held_below(&self, row: Row, len: i32) -> (Page, i32) {
        let held = self.mark(row).into_iter().chain(self.kept.marks_of(row));
        held.filter(|&(_, mark)| mark <= len).max_by_key(|&(_, mark)| mark).unwrap_or((Page::SINK, 0))
    }

    /// Takes a slot for the row's fold. The caller has checked that one is free.
    pub(crate) fn take(&mut self, row: Row, step: u64, verb: Verb) -> Option<Page> {
        let slot = self.pool.take(row, step, verb)?;
        self.slot[row.at()] = slot.0;
        Some(slot)
    }

    /// Checks that the row holds what undoing the fold gives back.
    pub(crate) fn check_undo(&self, row: Row, fold: Fold) -> Held {
        if fold.moves() { self.pool.check_held(fold.dst, row) } else { Ok(()) }
    }

    /// Takes back a fold that was not launched: no launched step has seen the slot that the row took for it.
    pub(crate) fn undo(&mut self, row: Row, fold: Fold, completed: u64, verb: Verb) -> Held {
        self.unmark(row, fold.marked, verb);
        if fold.moves() {
            self.pool.release(fold.dst, row, 0, completed, verb)?;
            self.slot[row.at()] = fold.src.0;
        }
        self.len[row.at()] = fold.from;
        Ok(())
    }

    /// Checks that the step holds the slot that its launch gives back.
    pub(crate) fn check_launch(&self, row: Row, fold: Fold) -> Held {
        if fold.held() == Page::SINK { Ok(()) } else { self.pool.check_held(fold.held(), row) }
    }

    /// Marks the fold as enqueued by `writer`: the step gives up the slot that it reads, behind the fence.
    pub(crate) fn launch(&mut self, writer: Writer, fold: Fold, fence: Fence) -> Held {
        self.kept.set_written(fold.dst, writer);
        match fold.held() {
            Page::SINK => Ok(()),
            slot => self.pool.release(slot, Row(writer.row), fence.step, fence.completed, Verb::Launch),
        }
    }

    /// Checks that the row holds its slots.
    pub(crate) fn check_held(&self, row: Row) -> Held {
        self.slots_of(row).try_for_each(|slot| self.pool.check_held(slot, row))
    }

    /// Cuts a row without unlaunched folds to `len` tokens, which [`next_cut`](Self::next_cut) allowed.
    pub(crate) fn cut(&mut self, row: Row, len: i32, fence: Fence, verb: Verb) -> Held {
        let at = row.at();
        if len < self.len[at] {
            let beyond = self.slot_of(row);
            let (slot, state_len) = self.held_below(row, len);
            if slot != Page::SINK {
                self.pool.share(slot, verb)?;
            }
            self.pool.release(beyond, row, fence.step, fence.completed, verb)?;
            (self.slot[at], self.len[at]) = (slot.0, state_len);
        }
        self.drop_soft_marks(row, len, fence.completed, verb);
        if self.mark(row).is_some_and(|(_, mark)| mark > len) { self.drop_mark(row, fence, verb) } else { Ok(()) }
    }

    /// Keeps the row's slot until the next `end_turn`, or a cut below it. A slot that is kept already stays.
    pub(crate) fn end_turn(&mut self, row: Row, fence: Fence, verb: Verb) -> Held {
        let (at, slot) = (row.at(), self.slot_of(row));
        if self.mark(row) == Some((slot, self.len[at])) {
            return Ok(());
        }
        self.drop_mark(row, fence, verb)?;
        if slot != Page::SINK {
            self.pool.share(slot, verb)?;
            (self.mark_slot[at], self.mark_len[at]) = (slot.0, self.len[at]);
        }
        Ok(())
    }

    /// Drops the kept slot. It needs no fence of its own: the row's steps touch a slot only while the row holds it, and
    /// where the row gave it up, that fence is on the slot.
    fn drop_mark(&mut self, row: Row, fence: Fence, verb: Verb) -> Held {
        if let Some((slot, _)) = self.mark(row) {
            self.pool.release(slot, row, 0, fence.completed, verb)?;
        }
        (self.mark_slot[row.at()], self.mark_len[row.at()]) = (0, 0);
        Ok(())
    }

    /// Gives back all slots of a row without unlaunched folds.
    pub(crate) fn clear(&mut self, row: Row, fence: Fence, verb: Verb) -> Held {
        self.drop_mark(row, fence, verb)?;
        self.drop_soft_marks(row, 0, fence.completed, verb);
        if self.slot_of(row) != Page::SINK {
            self.pool.release(self.slot_of(row), row, fence.step, fence.completed, verb)?;
        }
        (self.slot[row.at()], self.len[row.at()]) = (0, 0);
        Ok(())
    }

    /// Lets a new row of `len` tokens share the slot that contains them; page 0 if there are none.
    pub(crate) fn start(&mut self, row: Row, slot: Page, len: i32, verb: Verb) -> Held {
        if slot != Page::SINK {
            self.pool.share(slot, verb)?;
        }
        (self.slot[row.at()], self.len[row.at()]) = (slot.0, len);
        Ok(())
    }

    /// Counts every slot of the row as held by an idle row, or no longer so.
    pub(crate) fn set_idle(&mut self, row: Row, is_idle: bool) {
        let count = if is_idle { PagePool::rest } else { PagePool::wake };
        self.slots_of(row).for_each(|slot| count(&mut self.pool, slot));
    }

    /// Adds every number that decides what the group will do.
    /// `entries` are those of the prefix index, in the order of its trees.
    pub(crate) fn hash(&self, digest: &mut Digest, entries: impl Iterator<Item = u32>, completed: u64) {
        for numbers in [&self.slot, &self.len, &self.mark_slot, &self.mark_len] {
            digest.ints(numbers);
        }
        self.pool.hash(digest);
        self.kept.hash(digest, entries, completed);
    }
}
