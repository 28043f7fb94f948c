//! The states of rows: what a step folds, takes and undoes, and the verbs that a state group refuses.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::memory::{copied, room, with_room};
use crate::state::group::Fence;
use crate::state::kept_states::{Marked, Writer};
use crate::state::page_pool::PageRecord;
use crate::state::state_group::{Fold, StateFolds, StateSlots, Target};
use crate::state::step::{Plan, StepKind, StepRecord};
use crate::verb::Verb;

/// In a plan that is not claimed: the lane takes a slot.
const FRESH: i32 = -1;

impl Ledger {
    /// Refuses a call that cannot work with states, for the reason given.
    pub(super) fn check_stateless(&self, call: &str, why: &str) -> Result<()> {
        match &self.states {
            None => Ok(()),
            Some(states) => Err(Error::Config(format!(
                "{call} is not supported with a state group, and this ledger has {:?}: {why}",
                states.spec.name
            ))),
        }
    }

    /// Checks that the lanes whose states are to be kept are lanes of the plan, each once.
    pub(super) fn check_keep(&self, rows: &[i32], keep: &[i32]) -> Result<()> {
        if self.states.is_none() {
            return Err(Error::Config(format!("keep names {} lanes, but this ledger has no state group", keep.len())));
        }
        let is_lane = |&lane: &i32| lane >= 0 && (lane as usize) < rows.len();
        if !keep.iter().all(is_lane) || !keep.is_sorted_by(|a, b| a < b) {
            return Err(Error::Shape(format!("keep must name lanes in 0..{}, ascending, got {keep:?}", rows.len())));
        }
        Ok(())
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
        let mut stealable = Vec::new();
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
                Target::FreshOrStolen(slot) => {
                    room(&mut stealable, 1, "a plan")?;
                    stealable.push((lane, slot));
                    FRESH
                }
            };
            need += usize::from(dst[lane] == FRESH);
            let is_stealable = stealable.last().is_some_and(|&(other, _)| other == lane);
            waiting += usize::from(dst[lane] == FRESH && !is_stealable && states.waits_for_fence(row));
        }
        let pool = &states.pool;
        let lacking = need.saturating_sub(pool.num_free() + pool.num_cached());
        if lacking > stealable.len() {
            let (group, free, reclaimable) = (states.spec.name.clone(), pool.num_free(), pool.num_reclaimable());
            // A lane whose own slot waits for a fence needs none once that step is complete.
            let (cached, fenced) = (pool.num_cached(), pool.num_fenced() + waiting);
            let need = need - stealable.len();
            return Err(Error::OutOfPages { group, need, free, cached, fenced, reclaimable });
        }
        for (lane, slot) in stealable.into_iter().take(lacking) {
            dst[lane] = slot.0;
        }
        plan.states = Some(Box::new(StateFolds { src, dst, from, to }));
        Ok(())
    }

    /// Takes the memory for the slots that the plan takes, and for the soft marks of the lanes `keep`. Returns the
    /// memory for what the step remembers of the marks.
    #[inline(never)]
    pub(super) fn make_room_for_folds(&mut self, plan: &Plan, keep: &[i32]) -> Result<Vec<Marked>> {
        let Some(folds) = &plan.states else { return Ok(Vec::new()) };
        let fresh = folds.dst.iter().filter(|&&dst| dst == FRESH).count();
        self.make_room_for_slots(fresh, keep.len())?;
        with_room(if keep.is_empty() { 0 } else { plan.num_lanes() }, "a plan")
    }

    /// Takes the slots of a plan that [`plan_folds`](Self::plan_folds) checked, and moves each row's c. The lanes `keep`
    /// leave soft marks, which are noted in `marked`.
    #[inline(never)]
    pub(super) fn claim_folds(
        &mut self,
        plan: &mut Plan,
        keep: &[i32],
        marked: &mut Vec<Marked>,
        verb: Verb,
    ) -> Result<()> {
        let completed = self.steps.completed();
        let Self { states: Some(states), num_evictions, .. } = self else { return Ok(()) };
        let Some(folds) = &mut plan.states else { return Ok(()) };
        for (lane, row) in plan.rows.iter().map(|&row| Row(row)).enumerate() {
            let slot = states.slot_of(row);
            if folds.dst[lane] == slot.0 && states.is_kept(slot) {
                states.unkeep(slot, completed, verb);
                *num_evictions += 1;
            }
            if folds.dst[lane] == FRESH {
                folds.dst[lane] = take_slot(states, row, plan.step, completed, num_evictions, verb)?.0;
            }
            states.len[row.at()] = folds.to[lane];
        }
        for &lane in keep {
            marked.resize(plan.num_lanes(), Marked::No);
            marked[lane as usize] = states.leave_soft_mark(Row(plan.rows[lane as usize]), verb);
        }
        Ok(())
    }

    /// Checks that a row that arrives can take a slot.
    pub(super) fn check_free_slot(&self) -> Result<()> {
        let Some(StateSlots { spec, pool, .. }) = &self.states else { return Ok(()) };
        if pool.num_free() + pool.num_cached() > 0 {
            return Ok(());
        }
        let (fenced, reclaimable) = (pool.num_fenced(), pool.num_reclaimable());
        Err(Error::OutOfPages { group: spec.name.clone(), need: 1, free: 0, cached: 0, fenced, reclaimable })
    }

    /// Takes the memory for `num_slots` slots to be taken, and for `num_marks` more soft marks.
    pub(super) fn make_room_for_slots(&mut self, num_slots: usize, num_marks: usize) -> Result<()> {
        let Some(states) = &mut self.states else { return Ok(()) };
        states.pool.make_room(num_slots)?;
        states.kept.make_room(states.pool.num_mapped() + num_slots, num_marks)
    }

    /// Takes a slot for a row that arrives, whose state contains `len` tokens. No step has written it.
    pub(super) fn import_state(&mut self, row: Row, len: i32, step: u64) -> Result<()> {
        let completed = self.steps.completed();
        let Self { states: Some(states), num_evictions, .. } = self else { return Ok(()) };
        let slot = take_slot(states, row, step, completed, num_evictions, Verb::ImportRow)?;
        states.kept.set_written(slot, Writer::default());
        states.len[row.at()] = len;
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
                let writer = Writer { step: plan.step, row: plan.rows[lane] };
                self.with_states(|states| states.launch(writer, fold, fence))?;
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
    pub(super) fn undo_fold(&mut self, record: &StepRecord, lane: usize, verb: Verb) -> Result<()> {
        let Some(fold) = record.fold(lane) else { return Ok(()) };
        let completed = self.steps.completed();
        self.with_states(|states| states.undo(Row(record.plan.rows[lane]), fold, completed, verb))
    }

    /// Takes the states out of the prefix index that the rows of a failed step wrote in it or in a later step.
    #[inline(never)]
    pub(super) fn drop_spoiled_states(&mut self, step: u64) {
        let Self { states: Some(states), steps, .. } = self else { return };
        let Some(record) = steps.get(step) else { return };
        // Before the step is complete, no other request gets a row of it. A row with an unfinished copy indexes nothing.
        let is_spoiled = |writer: Writer| writer.step >= step && record.plan.rows.contains(&writer.row);
        states.drop_spoiled(is_spoiled, steps.completed(), Verb::Abandon);
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

    pub(super) fn slot_error(&self, record: PageRecord) -> Error {
        self.record_error(self.states.as_ref().map_or("", |states| &states.spec.name), record)
    }
}

/// Takes a slot for the row: a free one, or the cached one that was used least recently. The caller has checked that there
/// is one.
fn take_slot(
    states: &mut StateSlots,
    row: Row,
    step: u64,
    completed: u64,
    num_evictions: &mut u64,
    verb: Verb,
) -> Result<Page> {
    if states.pool.num_free() == 0
        && let Some(oldest) = states.pool.oldest_cached()
    {
        states.unkeep(oldest, completed, verb);
        *num_evictions += 1;
    }
    states.take(row, step, verb).ok_or_else(|| {
        let name = &states.spec.name;
        Error::Corrupt(format!("state group {name}: the pool ran dry inside a claim that it had granted"))
    })
}
