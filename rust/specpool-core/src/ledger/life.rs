//! The life of a prepared step: `launch`, `resolve`, `complete`; or `cancel`; or `abandon` if its forward failed.

use std::sync::Arc;

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::log::call::{Call, Given};
use crate::state::group::Fence;
use crate::state::step::{Plan, StepKind};
use crate::verb::Verb;

impl Ledger {
    /// Marks the step as enqueued. Call it before the first copy, table delta or kernel of the step.
    ///
    /// # Errors
    /// [`Error::Order`] unless it is the oldest step not launched; [`Error::StalePlan`] when a row of it was released
    /// since prepare (cancel it).
    pub fn launch(&mut self, step: u64) -> Result<()> {
        self.gate()?;
        let plan = self.steps.check_launch(step)?.plan.clone();
        for (&row, &planned) in plan.rows.iter().zip(&plan.epochs) {
            let now = self.rows.epoch[row as usize];
            if now != planned {
                return Err(Error::StalePlan { step, row: row as usize, planned, now });
            }
        }
        if self.states.is_some() {
            self.check_launch_folds(&plan)?;
        }
        if let Some(feed) = &mut self.feed {
            feed.make_room(&plan)?;
        }
        self.rows.launch(&plan);
        if self.states.is_some() {
            self.launch_folds(&plan)?;
        }
        if !plan.page_copies.is_empty() {
            self.launch_copies(step);
        }
        self.steps.launch_next();
        self.note(&Call::Launch { step }, &Given::Nothing(()), None);
        Ok(())
    }

    /// Marks the copies of the step as enqueued: from now on the step's fence keeps their pages, and their rows take
    /// part in the step.
    fn launch_copies(&mut self, step: u64) {
        let completed = self.steps.completed();
        let fence = if self.page_fencing { step } else { 0 };
        let copies = self.steps.get(step).into_iter().flat_map(|record| &record.before.copies);
        for copy in copies {
            for page in copy.pages() {
                self.groups[copy.group()].pool.unhold(page, fence, completed, Verb::Launch);
            }
            if self.rows.is_resident(copy.row.0, step) {
                self.rows.last_launched[copy.row.at()] = step;
            }
            let group = &self.groups[copy.group()];
            // Up to now the copy has held its page: a row that has it is the one that asked.
            if let Some(feed) = &mut self.feed
                && group.holds(copy.row, copy.column, copy.dst())
            {
                feed.launched(step, self.rows.epoch[copy.row.at()], *copy, group.page_size);
            }
        }
    }

    /// Counts a round's tokens: `accept_lens[lane]` of each lane, the bonus token included. Resolve the rounds of one
    /// row oldest first. Lanes whose row was released since prepare are dropped, and their entries are not read.
    ///
    /// # Errors
    /// [`Error::Order`] (an extend; not launched; already resolved; an older round of a row is unresolved),
    /// [`Error::Shape`] (a wrong number of entries; one outside `1..=A` of its lane's shape), [`Error::OutOfMemory`].
    pub fn resolve(&mut self, step: u64, accept_lens: &[i32]) -> Result<()> {
        self.gate()?;
        let plan = self.steps.check_resolve(step)?.plan.clone();
        if accept_lens.len() != plan.num_lanes() {
            return Err(Error::Shape(format!(
                "resolve of step {step}: {} lanes, {} accept_lens",
                plan.num_lanes(),
                accept_lens.len()
            )));
        }
        let (all_stand, is_wrong) = self.rows.check_resolve(&plan, accept_lens, &self.shapes);
        if is_wrong {
            return Err(self.refuse_resolve(&plan, accept_lens));
        }
        self.recorder.make_room(plan.num_lanes(), None)?;
        let mut standing = std::mem::take(&mut self.lanes);
        let counted = if all_stand {
            accept_lens
        } else {
            let lanes = plan.rows.iter().zip(&plan.epochs).zip(accept_lens);
            let stands = |row: i32, planned: u64| self.rows.epoch[row as usize] == planned;
            standing.clear();
            standing.extend(lanes.map(|((&row, &epoch), &len)| if stands(row, epoch) { len } else { 0 }));
            &standing[..]
        };
        self.rows.resolve_rounds(&plan, counted, &self.shapes);
        self.steps.set_resolved(step);
        self.note(&Call::Resolve { step, accept_lens: counted.into() }, &Given::Nothing(()), None);
        self.lanes = standing;
        Ok(())
    }

    /// Returns why a decode cannot be resolved, for the first lane that is not dropped and is out of order or out of
    /// range.
    fn refuse_resolve(&self, plan: &Plan, accept_lens: &[i32]) -> Error {
        let step = plan.step;
        for (lane, &accept_len) in accept_lens.iter().enumerate() {
            let row = Row(plan.rows[lane]);
            if self.rows.epoch[row.at()] != plan.epochs[lane] {
                continue;
            }
            let (oldest, row_name) = (self.rows.oldest_round(row), self.rows.describe(row));
            if oldest != step {
                return Error::Order(format!(
                    "resolve of step {step}: the oldest round of {row_name} is step {oldest}"
                ));
            }
            let max_accept_len = self.shapes[plan.shapes[lane] as usize].max_accept_len() as i32;
            if accept_len < 1 || accept_len > max_accept_len {
                return Error::Shape(format!(
                    "resolve of step {step}: accept_len of {row_name} must be in [1, {max_accept_len}], got {accept_len}"
                ));
            }
        }
        Error::Corrupt(format!("resolve of step {step} was refused without a reason"))
    }

    /// Says that this step and every step before it have finished on the device, and frees what was fenced behind
    /// them. A step that is complete already changes nothing.
    ///
    /// # Errors
    /// [`Error::Order`] when it is not launched, or was cancelled.
    pub fn complete(&mut self, step: u64) -> Result<()> {
        self.gate()?;
        self.steps.check_complete(step)?;
        self.steps.complete(step);
        let completed = self.steps.completed();
        self.rows.complete(completed);
        for group in &mut self.groups {
            group.pool.complete(completed);
        }
        self.states.iter_mut().for_each(|states| states.pool.complete(completed));
        self.note(&Call::Complete { step }, &Given::Nothing(()), None);
        Ok(())
    }

    /// Undoes the newest unlaunched step, also a stale one. Its rows get their lengths back. The pages that it took
    /// are free at once. Its page copies wait again, before all others. A lane whose row was released since prepare is
    /// skipped: the release has undone it. Pages that the prepare evicted stay evicted.
    ///
    /// # Errors
    /// [`Error::Order`] unless it is the newest step and not launched.
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let before = ledger.state_hash();
    /// let plan = ledger.prepare_decode(&[row.0], &[1], true)?;
    /// ledger.cancel(plan.step)?; // the forward is not run after all
    /// assert_eq!(ledger.state_hash(), before);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn cancel(&mut self, step: u64) -> Result<()> {
        self.gate()?;
        let plan = Arc::clone(&self.steps.check_cancel(step)?.plan);
        let stands = |ledger: &Self, lane: usize| ledger.rows.epoch[plan.rows[lane] as usize] == plan.epochs[lane];
        let lanes = || (0..plan.num_lanes()).rev();
        let allocated = |group: usize, lane: usize| i64::from(plan.allocated_before[group * plan.num_lanes() + lane]);
        for (at, group) in self.groups.iter().enumerate() {
            for lane in lanes().filter(|&lane| stands(self, lane)) {
                let checked = group.check_shrink(Row(plan.rows[lane]), allocated(at, lane));
                checked.map_err(|record| self.page_error(at, record))?;
            }
        }
        if self.states.is_some() {
            lanes().filter(|&lane| stands(self, lane)).try_for_each(|lane| self.check_undo_fold(&plan, lane))?;
        }
        let Some(record) = self.steps.cancel_newest() else { return Ok(()) };
        let before = &record.before;
        // No launched step has seen the pages that the prepare took.
        let fence = Fence { step: 0, completed: self.steps.completed() };
        for lane in lanes() {
            if !stands(self, lane) {
                continue;
            }
            let row = Row(plan.rows[lane]);
            match plan.kind {
                StepKind::Extend => self.rows.undo_extend(row, plan.start[lane], before.drafted[lane]),
                StepKind::Decode => {
                    let max_accept_len = self.shapes[plan.shapes[lane] as usize].max_accept_len() as i32;
                    self.rows.pop_newest_round(row, max_accept_len, plan.writes_draft);
                }
            }
            if self.states.is_some() {
                self.undo_fold(&record, lane, Verb::Cancel)?;
            }
        }
        for at in 0..self.groups.len() {
            for lane in lanes() {
                if stands(self, lane) {
                    let shrunk = self.groups[at].shrink(Row(plan.rows[lane]), allocated(at, lane), fence, Verb::Cancel);
                    shrunk.map_err(|record| self.page_error(at, record))?;
                }
            }
        }
        for lane in lanes().filter(|&lane| before.idle.contains(&plan.rows[lane])) {
            if stands(self, lane) {
                self.set_idle(Row(plan.rows[lane]), true);
            }
        }
        self.put_copies_back(record.before.copies);
        self.drop_orphan_copies(Verb::Cancel);
        self.note(&Call::Cancel { step }, &Given::Nothing(()), None);
        Ok(())
    }

    /// Gives up a launched step whose forward failed. Retracts every row in it, and every row that a page copy of it
    /// went to, unless the row was given back since. A row that was cut since is retracted too. A decode counts as
    /// resolved then. The prefix index gives up the states that these rows wrote in the step or later. The pages of the
    /// rows stay fenced until [`Ledger::complete`] reaches the step; call that after a
    /// synchronize or a reset of the device.
    ///
    /// # Errors
    /// [`Error::Order`] when it is not launched, is complete, or is abandoned already.
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let plan = ledger.prepare_decode(&[row.0], &[1], true)?;
    /// ledger.launch(plan.step)?;
    /// ledger.abandon(plan.step)?; // the kernel failed: its rows are gone, and it may still write their pages
    /// assert_eq!((ledger.free_pages(0)?, ledger.fenced_pages(0)?), (60, 4));
    /// ledger.complete(plan.step)?; // the device is reset
    /// assert_eq!(ledger.free_pages(0)?, 64);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn abandon(&mut self, step: u64) -> Result<()> {
        self.gate()?;
        let record = self.steps.check_abandon(step)?;
        let mut rows = std::mem::take(&mut self.lanes);
        rows.clear();
        rows.extend(&record.plan.rows);
        rows.extend(record.before.copies.iter().map(|copy| copy.row.0));
        rows.retain(|&row| self.rows.is_resident(row, step));
        rows.sort_unstable();
        rows.dedup();
        let checked = rows.iter().try_for_each(|&row| self.check_give_back(Row(row)));
        let dropped = checked.and_then(|()| rows.iter().try_for_each(|&row| self.drop_row(Row(row), Verb::Abandon)));
        self.lanes = rows;
        dropped?;
        if self.states.is_some() {
            self.drop_spoiled_states(step);
        }
        self.steps.set_abandoned(step);
        self.note(&Call::Abandon { step }, &Given::Nothing(()), None);
        Ok(())
    }
}
