//! The states of rows: what a step folds, takes and undoes, and the verbs that a state group refuses.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::memory::copied;
use crate::state::group::Fence;
use crate::state::page_pool::PageRecord;
use crate::state::state_group::{Fold, StateFolds, StateSlots, Target};
use crate::state::step::{Plan, StepKind};
use crate::verb::Verb;

/// In a plan that is not claimed: the lane takes a slot.
const FRESH: i32 = -1;

impl Ledger {
    /// Refuses a call that would need states which are not kept.
    pub(super) fn check_stateless(&self, call: &str) -> Result<()> {
        match &self.states {
            None => Ok(()),
            Some(states) => Err(Error::Config(format!(
                "{call} is not supported with a state group, and this ledger has {:?}",
                states.spec.name
            ))),
        }
    }

    /// Writes into the plan what each lane reads and folds, and where, and checks that there are slots for it.
    #[inline(never)]
    pub(super) fn plan_folds(&self, plan: &mut Plan) -> Result<()> {
        let Some(states) = &self.states else { return Ok(()) };
        let completed = self.steps.completed();
        let numbers = |numbers: &[i32]| copied(numbers, "a plan");
        let (mut src, mut dst) = (numbers(&plan.rows)?, numbers(&plan.rows)?);
        let (mut from, mut to) = (numbers(&plan.rows)?, numbers(&plan.new_len)?);
        let (mut need, mut waiting) = (0, 0);
        for (lane, row) in plan.rows.iter().map(|&row| Row(row)).enumerate() {
            let at = row.at();
            to[lane] = match plan.kind {
                // An identical prompt must compute its last token, from the state before it.
                StepKind::Extend => plan.new_len[lane] - 1,
                StepKind::Decode => {
                    let nodes = self.shapes[plan.shapes[lane] as usize].num_draft_tokens;
                    states.round_end(row, self.rows.resolved[at], self.rows.in_flight[at], nodes)
                }
            };
            (src[lane], from[lane]) = (states.slot[at], states.len[at]);
            dst[lane] = match states.target(row, to[lane], completed) {
                Target::Nowhere => 0,
                Target::Same(slot) => slot.0,
                Target::Fresh => FRESH,
            };
            need += usize::from(dst[lane] == FRESH);
            waiting += usize::from(dst[lane] == FRESH && states.waits_for_fence(row));
        }
        let pool = &states.pool;
        if need > pool.num_free() {
            let (group, free, reclaimable) = (states.spec.name.clone(), pool.num_free(), pool.num_reclaimable());
            // A lane whose own slot waits for a fence needs none once that step is complete.
            let fenced = pool.num_fenced() + waiting;
            return Err(Error::OutOfPages { group, need, free, cached: 0, fenced, reclaimable });
        }
        plan.states = Some(Box::new(StateFolds { src, dst, from, to }));
        Ok(())
    }

    /// Takes the memory for the slots that the plan takes.
    #[inline(never)]
    pub(super) fn make_room_for_folds(&mut self, plan: &Plan) -> Result<()> {
        let (Some(states), Some(folds)) = (&mut self.states, &plan.states) else { return Ok(()) };
        states.pool.make_room(folds.dst.iter().filter(|&&dst| dst == FRESH).count())
    }

    /// Takes the slots of a plan that [`plan_folds`](Self::plan_folds) checked, and moves each row's c.
    #[inline(never)]
    pub(super) fn claim_folds(&mut self, plan: &mut Plan, verb: Verb) -> Result<()> {
        let (Some(states), Some(folds)) = (&mut self.states, &mut plan.states) else { return Ok(()) };
        for (lane, row) in plan.rows.iter().map(|&row| Row(row)).enumerate() {
            if folds.dst[lane] == FRESH {
                let slot = states.take(row, plan.step, verb).ok_or_else(|| {
                    let name = &states.spec.name;
                    Error::Corrupt(format!("state group {name}: the pool ran dry inside a claim that it had granted"))
                })?;
                folds.dst[lane] = slot.0;
            }
            states.len[row.at()] = folds.to[lane];
        }
        Ok(())
    }

    /// Checks that the step holds the slots that its launch gives back.
    #[inline(never)]
    pub(super) fn check_launch_folds(&self, plan: &Plan) -> Result<()> {
        let Some(states) = &self.states else { return Ok(()) };
        let mut folds = (0..plan.num_lanes()).filter_map(|lane| Some((Row(plan.rows[lane]), plan.fold(lane)?)));
        let checked = folds.try_for_each(|(row, fold)| states.check_launch(row, fold));
        checked.map_err(|record| self.slot_error(record))
    }

    /// Gives up the slots that the launched step reads and does not write, behind the step's fence.
    #[inline(never)]
    pub(super) fn launch_folds(&mut self, plan: &Plan) -> Result<()> {
        let step = if self.page_fencing { plan.step } else { 0 };
        let fence = Fence { step, completed: self.steps.completed() };
        for lane in 0..plan.num_lanes() {
            if let Some(fold) = plan.fold(lane) {
                self.with_states(|states| states.launch(Row(plan.rows[lane]), fold, fence))?;
            }
        }
        Ok(())
    }

    /// Checks that the lane's row holds what undoing its fold gives back.
    #[inline(never)]
    pub(super) fn check_undo_fold(&self, plan: &Plan, lane: usize) -> Result<()> {
        let (Some(states), Some(fold)) = (&self.states, plan.fold(lane)) else { return Ok(()) };
        states.check_undo(Row(plan.rows[lane]), fold).map_err(|record| self.slot_error(record))
    }

    /// Undoes one lane's fold, newest first.
    #[inline(never)]
    pub(super) fn undo_fold(&mut self, plan: &Plan, lane: usize, verb: Verb) -> Result<()> {
        let Some(fold) = plan.fold(lane) else { return Ok(()) };
        let completed = self.steps.completed();
        self.with_states(|states| states.undo(Row(plan.rows[lane]), fold, completed, verb))
    }

    /// Does something with the row's slots, if there are states, and makes an error of the record of a slot that is
    /// not as it should be.
    pub(super) fn with_states(
        &mut self,
        change: impl FnOnce(&mut StateSlots) -> std::result::Result<(), PageRecord>,
    ) -> Result<()> {
        match &mut self.states {
            None => Ok(()),
            Some(states) => change(states).map_err(|record| self.slot_error(record)),
        }
    }

    /// Checks that the row holds every slot that undoing its unlaunched folds and giving it back would drop.
    #[inline(never)]
    pub(super) fn check_slots(&self, row: Row) -> Result<()> {
        let Some(states) = &self.states else { return Ok(()) };
        let mut folds = self.unlaunched_folds(row);
        let undone =
            folds.try_for_each(|fold| states.check_undo(row, fold).and_then(|()| states.check_launch(row, fold)));
        undone.and_then(|()| states.check_held(row)).map_err(|record| self.slot_error(record))
    }

    /// Undoes all unlaunched folds of a row whose steps become stale.
    #[inline(never)]
    pub(super) fn undo_folds(&mut self, row: Row, verb: Verb) -> Result<()> {
        let Self { states: Some(states), steps, rows, .. } = self else { return Ok(()) };
        let completed = steps.completed();
        let undone = {
            let mut folds = steps.unlaunched_folds(row, rows.epoch[row.at()]);
            folds.try_for_each(|fold| states.undo(row, fold, completed, verb))
        };
        undone.map_err(|record| self.slot_error(record))
    }

    /// c of the row without its unlaunched folds.
    pub(super) fn settled_state_len(&self, states: &StateSlots, row: Row) -> i32 {
        self.unlaunched_folds(row).last().map_or(states.len[row.at()], |fold| fold.from)
    }

    /// The unlaunched folds of the row, newest first.
    pub(crate) fn unlaunched_folds(&self, row: Row) -> impl Iterator<Item = Fold> {
        self.steps.unlaunched_folds(row, self.rows.epoch[row.at()])
    }

    fn slot_error(&self, record: PageRecord) -> Error {
        self.record_error(self.states.as_ref().map_or("", |states| &states.spec.name), record)
    }
}
