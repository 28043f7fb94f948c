//! The verbs that make a row shorter or give it back: `trim`, `end_turn`, `retract`, `finish`, `abort`. Each bumps the
//! row's epoch.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::log::call::{Call, Given};
use crate::state::group::{Fence, GroupState};
use crate::verb::Verb;

impl Ledger {
    /// Shortens the row and returns its new length c. Feed the tokens from c with an extend before the row's next
    /// round. Exception: a trim to the current length r with nothing in flight only frees the reserve behind r. The
    /// root stays, and rounds can go on.
    ///
    /// c is the greatest length that is at most `len`, at most what launched forwards have written, and from which the
    /// row can go on. This means that every window below c is still held, that the page of the last token is held if
    /// it is partly filled, and that c is a page edge in every group in which it is below `protected_len`, unless only
    /// the row and the prefix index hold that page. The index then forgets what is in the page from c on. 0 always
    /// qualifies.
    ///
    /// Rounds in flight no longer count. The pages behind c go back behind the row's fence. Pages of the row's
    /// checkpoint that its window needs come back into the table. A cut below the checkpoint ends the checkpoint. Set
    /// the device's length to c in stream order before the row's next forward, unless the root stayed: then it is r
    /// already, or will be.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted or `len < 0`.
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// assert_eq!(ledger.trim(row, 6)?, 6); // the user has edited the text behind 6 tokens
    /// let plan = ledger.prepare_extend(&[row.0], &[9], true)?; // feed the tokens from there
    /// assert_eq!((plan.start[0], plan.new_len[0]), (6, 9));
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn trim(&mut self, row: Row, len: i32) -> Result<i32> {
        self.gate()?;
        let resolved = self.cut(row, len, Verb::Trim)?;
        self.note(&Call::Trim { row: row.0, length: len }, &Given::Length(resolved), None);
        Ok(resolved)
    }

    /// Does a [`trim`](Ledger::trim) for a session that stays. The row becomes idle and its pages count as
    /// reclaimable. The windows below its new `resolved_len` are held as its checkpoint until the next `end_turn`. Any
    /// prepare ends the idle time.
    ///
    /// # Errors
    /// As [`Ledger::trim`]; [`Error::Config`] when there are window groups and the ledger was built without
    /// `sessions`, because its pools may not have room for a checkpoint.
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// ledger.end_turn(row, 10)?; // the client has read it all and may come back
    /// assert!(ledger.idle()[row.at()]);
    /// assert_eq!(ledger.reclaimable_pages(0)?, 3); // what dropping the session would free
    ///
    /// let plan = ledger.prepare_extend(&[row.0], &[14], true)?; // its next turn
    /// assert_eq!(plan.start[0], 10);
    /// assert!(!ledger.idle()[row.at()]);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn end_turn(&mut self, row: Row, len: i32) -> Result<i32> {
        self.gate()?;
        if let Some(group) = self.groups.iter().find(|group| group.spec.window.is_some() && !self.sessions) {
            return Err(Error::Config(format!(
                "end_turn keeps a checkpoint in window group {}: build the ledger with sessions",
                group.spec.name
            )));
        }
        if let Some(states) = self.states.as_ref().filter(|_| !self.sessions) {
            return Err(Error::Config(format!(
                "end_turn keeps a checkpoint in state group {}: build the ledger with sessions",
                states.spec.name
            )));
        }
        let resolved = self.cut(row, len, Verb::EndTurn)?;
        let fence = self.fence(row);
        for at in 0..self.groups.len() {
            let dropped = self.groups[at].drop_kept(row, fence, Verb::EndTurn);
            dropped.map_err(|record| self.page_error(at, record))?;
        }
        self.with_states(|states| states.end_turn(row, fence, Verb::EndTurn))?;
        self.rows.set_checkpoint(row, Some(self.checkpoint_to_be(row)));
        self.set_idle(row, true);
        self.drop_orphan_copies(Verb::EndTurn);
        self.note(&Call::EndTurn { row: row.0, length: len }, &Given::Length(resolved), None);
        Ok(resolved)
    }

    /// Takes everything from a row whose request will come back later.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted.
    pub fn retract(&mut self, row: Row) -> Result<()> {
        self.give_back(row, &Call::Retract { row: row.0 })
    }

    /// Takes everything from a row whose request is done.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted.
    pub fn finish(&mut self, row: Row) -> Result<()> {
        self.give_back(row, &Call::Finish { row: row.0 })
    }

    /// Takes everything from a row whose request was given up.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted.
    pub fn abort(&mut self, row: Row) -> Result<()> {
        self.give_back(row, &Call::Abort { row: row.0 })
    }

    fn give_back(&mut self, row: Row, call: &Call<'_>) -> Result<()> {
        self.gate()?;
        let row = self.rows.check_live(row.0)?;
        self.check_give_back(row)?;
        self.drop_row(row, call.verb())?;
        self.note(call, &Given::Nothing(()), None);
        Ok(())
    }

    /// Whether the row holds every page that releasing it would drop.
    pub(super) fn check_give_back(&self, row: Row) -> Result<()> {
        for (at, group) in self.groups.iter().enumerate() {
            group.check_cut(row, 0).map_err(|record| self.page_error(at, record))?;
        }
        self.check_slots(row)
    }

    /// Gives a live row and everything it holds back.
    pub(super) fn drop_row(&mut self, row: Row, verb: Verb) -> Result<()> {
        self.set_idle(row, false);
        let fence = self.fence(row);
        for at in 0..self.groups.len() {
            let cleared = self.groups[at].clear(row, fence, verb);
            cleared.map_err(|record| self.page_error(at, record))?;
        }
        if self.states.is_some() {
            self.undo_folds(row, verb)?;
            self.with_states(|states| states.clear(row, fence, verb))?;
        }
        let last = self.rows.last_launched[row.at()];
        self.rows.give_back(row, Some(last).filter(|&step| step > fence.completed));
        self.steps.mark_stale(row.0);
        self.drop_orphan_copies(verb);
        self.feed.iter_mut().for_each(|feed| feed.cut(row, 0));
        Ok(())
    }

    fn cut(&mut self, row: Row, len: i32, verb: Verb) -> Result<i32> {
        let row = self.rows.check_live(row.0)?;
        if len < 0 {
            return Err(Error::Shape(format!(
                "{} of {}: length must be at least 0, got {len}",
                verb,
                self.rows.describe(row)
            )));
        }
        let at = row.at();
        let mut cut = len.min(self.rows.written(row));
        while let Some(shorter) = self.next_cut(row, cut).filter(|&to| to < cut) {
            cut = shorter;
        }
        let takes_nothing = cut == self.rows.resolved[at] && self.rows.in_flight[at] == 0;
        let keeps_root = verb == Verb::Trim && takes_nothing && self.rows.ready[at];
        let drafted = self.drafted_after_cut(row, cut);
        for (at, group) in self.groups.iter().enumerate() {
            group.check_cut(row, cut).map_err(|record| self.page_error(at, record))?;
        }
        self.check_slots(row)?;
        self.shorten_index(row, cut, verb);
        let (fence, checkpoint) = (self.fence(row), self.rows.checkpoint(row).filter(|&len| len <= cut));
        let was_idle = self.rows.idle[at];
        self.set_idle(row, false);
        for at in 0..self.groups.len() {
            let shorter = self.groups[at].cut(row, cut, checkpoint.is_some(), fence, verb);
            shorter.map_err(|record| self.page_error(at, record))?;
        }
        if self.states.is_some() {
            self.undo_folds(row, verb)?;
            self.with_states(|states| states.cut(row, cut, fence, verb))?;
        }
        self.rows.set_checkpoint(row, checkpoint);
        self.rows.forget_rounds(row);
        self.rows.ready[at] |= keeps_root;
        self.rows.set_resolved(row, cut);
        self.rows.drafted[at] = drafted;
        self.rows.epoch[at] += 1;
        self.steps.mark_stale(row.0);
        self.drop_orphan_copies(verb);
        self.feed.iter_mut().for_each(|feed| feed.cut(row, cut));
        // `end_turn` has more pages to drop, and marks the row idle itself.
        self.set_idle(row, was_idle && verb == Verb::Trim);
        Ok(cut)
    }

    /// The length whose windows the row's checkpoint holds: that of its state if these are held, because a later cut
    /// goes back to it, and else all its tokens.
    fn checkpoint_to_be(&self, row: Row) -> i32 {
        let resolved = self.rows.resolved[row.at()];
        let Some(state_len) = self.states.as_ref().map(|states| states.len[row.at()]) else { return resolved };
        let holds = |group: &GroupState| !group.lacks_window(group.evicted[row.at()].into(), state_len);
        if self.groups.iter().all(holds) { state_len } else { resolved }
    }

    /// The longest cut of at most `len` tokens that one of the groups, or the row's state, allows. A shorter one may be
    /// needed for the others: ask again with what it returns until that does not change.
    fn next_cut(&self, row: Row, len: i32) -> Option<i32> {
        let held = self.groups.iter().map(|group| group.next_cut(row, len)).min();
        match &self.states {
            None => held,
            Some(states) => held.min(Some(states.next_cut(row, self.settled_state_len(states, row), len))),
        }
    }

    /// Makes the row idle or not, O(its pages). End the idle time before the row's pages change and mark it idle
    /// after: the count of reclaimable pages uses the pages that the row has at the call.
    pub(super) fn set_idle(&mut self, row: Row, is_idle: bool) {
        if self.rows.idle[row.at()] != is_idle {
            self.rows.set_idle(row, is_idle);
            self.groups.iter_mut().for_each(|group| group.set_idle(row, is_idle));
            self.states.iter_mut().for_each(|states| states.set_idle(row, is_idle));
        }
    }

    /// The fence of what the row gives back: the last launched step that it took part in.
    pub(super) fn fence(&self, row: Row) -> Fence {
        let step = if self.page_fencing { self.rows.last_launched[row.at()] } else { 0 };
        Fence { step, completed: self.steps.completed() }
    }

    /// Where draft KV ends after a cut: at the cut, if roots of launched rounds count and everything below is drafted.
    fn drafted_after_cut(&self, row: Row, cut: i32) -> i32 {
        let (resolved, drafted) = (self.rows.resolved[row.at()], self.rows.drafted[row.at()]);
        let counted_roots = (cut - resolved).max(0) as usize;
        let wrote = |&step: &u64| self.steps.get(step).is_some_and(|record| record.plan.writes_draft);
        if drafted == resolved && self.rows.rounds_in_flight(row).iter().take(counted_roots).all(wrote) {
            cut
        } else {
            drafted.min(cut)
        }
    }
}
