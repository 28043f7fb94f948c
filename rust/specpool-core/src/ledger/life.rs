//! A prepared step's way: `launch`, `resolve`, `complete`, or `cancel`.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::page_pool::Verb;
use crate::step::StepKind;

impl Ledger {
    /// The step's forward is about to be enqueued. Call it before the first copy, table delta or kernel of the step.
    ///
    /// # Errors
    /// [`Error::Order`] unless it is the oldest step not launched; [`Error::StalePlan`] when a row of it was released
    /// since prepare (cancel it).
    pub fn launch(&mut self, step: u64) -> Result<()> {
        let plan = self.steps.check_launch(step)?.plan.clone();
        for (&row, &planned) in plan.rows.iter().zip(&plan.epochs) {
            let now = self.rows.epoch[row as usize];
            if now != planned {
                return Err(Error::StalePlan { step, row: row as usize, planned, now });
            }
        }
        for &row in &plan.rows {
            match plan.kind {
                StepKind::Extend => self.rows.launch_extend(Row(row)),
                StepKind::Decode => self.rows.launched_rounds[row as usize] += 1,
            }
            self.rows.last_launched[row as usize] = step;
        }
        self.steps.launch_next();
        Ok(())
    }

    /// The round's outcome: `accept_lens[lane]` tokens count, the bonus token included. Oldest round first per row.
    /// Lanes whose row was released since prepare are dropped, their entries unread.
    ///
    /// # Errors
    /// [`Error::Order`] (an extend; not launched; already resolved; an older round of a row is unresolved),
    /// [`Error::Shape`] (a wrong number of entries; one outside `1..=A` of its lane's shape).
    pub fn resolve(&mut self, step: u64, accept_lens: &[i32]) -> Result<()> {
        let plan = self.steps.check_resolve(step)?.plan.clone();
        if accept_lens.len() != plan.num_lanes() {
            return Err(Error::Shape(format!(
                "resolve of step {step}: {} lanes, {} accept_lens",
                plan.num_lanes(),
                accept_lens.len()
            )));
        }
        let stands = |lane: usize| self.rows.epoch[plan.rows[lane] as usize] == plan.epochs[lane];
        let lanes: Vec<usize> = (0..plan.num_lanes()).filter(|&lane| stands(lane)).collect();
        for &lane in &lanes {
            let row = Row(plan.rows[lane]);
            let oldest = self.rows.rounds_in_flight(row).first().copied();
            if oldest != Some(step) {
                return Err(Error::Order(format!(
                    "resolve of step {step}: the oldest round of {} is step {}",
                    self.rows.describe(row),
                    oldest.unwrap_or(0)
                )));
            }
            let most = self.shape_facts[plan.shapes[lane] as usize].max_accept_len;
            if !(1..=most).contains(&accept_lens[lane]) {
                return Err(Error::Shape(format!(
                    "resolve of step {step}: accept_len of {} must be in [1, {most}], got {}",
                    self.rows.describe(row),
                    accept_lens[lane]
                )));
            }
        }
        for lane in lanes {
            let most = self.shape_facts[plan.shapes[lane] as usize].max_accept_len;
            self.rows.resolve_oldest_round(Row(plan.rows[lane]), accept_lens[lane], most, plan.writes_draft);
        }
        self.steps.set_resolved(step);
        Ok(())
    }

    /// The step and every step before it have finished on the device: what was fenced behind them is free. Of a step
    /// that is complete already, no effect.
    ///
    /// # Errors
    /// [`Error::Order`] when it is not launched, or was cancelled.
    pub fn complete(&mut self, step: u64) -> Result<()> {
        self.steps.check_complete(step)?;
        self.steps.complete(step);
        let completed = self.steps.completed();
        self.rows.complete(completed);
        for group in &mut self.groups {
            group.pool.complete(completed);
        }
        Ok(())
    }

    /// Undoes the newest unlaunched step: its rows get their lengths back, the pages that it took are free at once.
    /// A lane whose row was released since prepare was undone by that.
    ///
    /// # Errors
    /// [`Error::Order`] unless it is the newest step and not launched.
    pub fn cancel(&mut self, step: u64) -> Result<()> {
        let record = self.steps.check_cancel(step)?;
        let plan = record.plan.clone();
        let drafted_before = record.drafted_before.clone();
        let lanes: Vec<usize> = (0..plan.num_lanes())
            .rev()
            .filter(|&lane| self.rows.epoch[plan.rows[lane] as usize] == plan.epochs[lane])
            .collect();
        let before = |group: usize, lane: usize| i64::from(plan.allocated_before[group * plan.num_lanes() + lane]);
        for (at, group) in self.groups.iter().enumerate() {
            for &lane in &lanes {
                let checked = group.check_shrink(Row(plan.rows[lane]), before(at, lane));
                checked.map_err(|record| self.page_error(at, record))?;
            }
        }
        for at in 0..self.groups.len() {
            for &lane in &lanes {
                let shrunk = self.groups[at].shrink(Row(plan.rows[lane]), before(at, lane), None, Verb::Cancel);
                shrunk.map_err(|record| self.page_error(at, record))?;
            }
        }
        for &lane in &lanes {
            let row = Row(plan.rows[lane]);
            match plan.kind {
                StepKind::Extend => self.rows.undo_extend(row, plan.start[lane], drafted_before[lane]),
                StepKind::Decode => {
                    let most = self.shape_facts[plan.shapes[lane] as usize].max_accept_len;
                    self.rows.pop_newest_round(row, most, plan.writes_draft);
                }
            }
        }
        self.steps.cancel_newest();
        Ok(())
    }
}
