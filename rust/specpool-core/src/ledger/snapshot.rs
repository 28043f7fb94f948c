//! Saves and restores the whole state while nothing is in flight.

use std::sync::Arc;

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::log::call::Call;
use crate::memory::{copied, with_room};
use crate::state::state_group::StateSlots;
use crate::verb::Verb;

/// The state of a ledger at a moment when nothing was in flight.
#[derive(Debug, Clone)]
pub struct Snapshot {
    state: Ledger,
    number: u64,
    /// The event log that records this snapshot, if there is one.
    log: Option<Arc<()>>,
}

impl Snapshot {
    /// The snapshot's number in its ledger, from 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Ledger {
    /// Saves the whole state.
    ///
    /// # Errors
    /// [`Error::NotReady`] while a step is not over; [`Error::OutOfMemory`] when there is no memory for a second state.
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let snapshot = ledger.snapshot()?;
    /// ledger.finish(row)?;
    /// ledger.restore(&snapshot)?;
    /// assert_eq!(ledger.resolved_len()[row.at()], 10);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.gate()?;
        self.check_nothing_in_flight(Verb::Snapshot)?;
        let mut state = self.try_clone()?;
        self.snapshots += 1;
        let number = self.snapshots;
        state.snapshots = number;
        self.note_snapshot(&Call::Snapshot {}, number);
        Ok(Snapshot { state, number, log: self.recorder.log_identity().cloned() })
    }

    /// The state as it is saved: without deltas, and without pages and rows that were never touched.
    fn try_clone(&self) -> Result<Self> {
        let mut groups = with_room(self.groups.len(), "a snapshot")?;
        for group in &self.groups {
            groups.push(group.try_clone()?);
        }
        Ok(Self {
            groups,
            states: self.states.as_ref().map(StateSlots::try_clone).transpose()?,
            shapes: copied(&self.shapes, "a snapshot")?,
            rows: self.rows.try_clone()?,
            steps: self.steps.try_clone()?,
            copies: copied(&self.copies, "page copies")?,
            prefixes: self.try_clone_prefixes()?,
            index: self.index.try_clone()?,
            recorder: self.recorder.clone(),
            lanes: Vec::new(),
            feed: None,
            ..*self
        })
    }

    /// Goes back to a saved state of this ledger, or of one built alike. Every row's epoch moves on, and step and
    /// prefix numbers never go back, so steps that were prepared in between stay dead. Table cells that differ become
    /// pending deltas. The caller must restore the contents of the pages and state slots on the device.
    ///
    /// # Errors
    /// [`Error::NotReady`] while a step is not over; [`Error::Config`] when the snapshot comes from a ledger built
    /// differently, or when this ledger is recorded and its log does not contain the snapshot; [`Error::OutOfMemory`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.gate()?;
        self.check_nothing_in_flight(Verb::Restore)?;
        let state = &snapshot.state;
        if self.facts() != state.facts() {
            return Err(Error::Config("restore: the snapshot is of a ledger that was built otherwise".into()));
        }
        let is_in_it = |log: &Arc<()>| snapshot.log.as_ref().is_some_and(|other| Arc::ptr_eq(log, other));
        if self.recorder.log_identity().is_some_and(|log| !is_in_it(log)) {
            return Err(Error::Config(format!(
                "restore: snapshot {} is of another ledger, and this one is recorded: its log could not be replayed",
                snapshot.number
            )));
        }
        let (lists, prefixes) = (state.rows.try_clone_lists()?, state.try_clone_prefixes()?);
        let copies = copied(&state.copies, "page copies")?;
        let index = state.index.try_clone()?;
        let slots = state.states.as_ref().map(StateSlots::try_clone).transpose()?;
        let mut pools = with_room(self.groups.len(), "a snapshot")?;
        for (group, other) in self.groups.iter_mut().zip(&state.groups) {
            let cells = group.table.cells().iter().zip(other.table.cells());
            let differing = cells.filter(|(now, then)| now != then).count();
            group.make_room(0, differing + other.num_held())?;
            pools.push((other.pool.try_clone()?, other.try_clone_kept()?));
        }
        for ((group, other), (pool, kept)) in self.groups.iter_mut().zip(&state.groups).zip(pools) {
            for at in 1..group.allocated.len() {
                let row = Row(at as i32);
                for column in 0..group.table.pages_per_row() {
                    let (now, then) = (group.table.row(row)[column], other.table.row(row)[column]);
                    if now != then {
                        group.set(row, column, crate::ids::Page(then));
                    }
                }
            }
            group.allocated.copy_from_slice(&other.allocated);
            group.protected.copy_from_slice(&other.protected);
            group.evicted.copy_from_slice(&other.evicted);
            group.set_kept(kept);
            group.pool = pool;
        }
        if let (Some(states), Some(other)) = (&mut self.states, slots) {
            states.restore(other);
        }
        self.rows.restore(&state.rows, lists);
        self.steps.skip_to(&state.steps);
        self.copies = copies;
        self.prefixes = prefixes;
        self.index = index;
        self.feed.iter_mut().for_each(|feed| feed.cut_all(&self.rows.resolved));
        self.next_prefix = self.next_prefix.max(state.next_prefix);
        self.note_snapshot(&Call::Restore {}, snapshot.number);
        Ok(())
    }

    fn check_nothing_in_flight(&self, verb: Verb) -> Result<()> {
        match self.steps.oldest() {
            Some(step) => Err(Error::NotReady(format!("{verb}: step {step} is not over"))),
            None => Ok(()),
        }
    }

    /// Checks what two ledgers must have in common for one to take over the other's state.
    fn facts(&self) -> impl PartialEq + '_ {
        let specs: Vec<_> = self.groups.iter().map(|group| (&group.spec, group.row_width)).collect();
        let flags = (self.draft_kv, self.sessions, self.page_fencing, self.max_chunk);
        let specs = (specs, self.state_groups());
        (specs, &self.shapes, self.rows.num_rows(), self.max_context_len, self.overlap_depth, self.policy, flags)
    }
}
