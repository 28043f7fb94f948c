//! A step's life: prepare -> launch -> resolve (decode only) and complete, or prepare -> cancel.
//!
//! Steps are numbered from 1 in the order of their preparation and launched in that order, so the queue is always
//! `[launched .. | unlaunched ..]`. A number is never used twice.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::{Page, Row};
use crate::memory;
use crate::state::kept_states::Marked;
use crate::state::page_copy::{PageCopy, TailCopy};
use crate::state::state_group::{Fold, StateFolds};

/// What a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// A prefill, or a chunk of one.
    Extend,
    /// One round: a root, its drafts, their verification.
    Decode,
}

impl StepKind {
    /// `"extend"` or `"decode"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Extend => "extend",
            Self::Decode => "decode",
        }
    }
}

/// One prepared forward, and what it was prepared with. `b` is its number of lanes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The step's number, from 1.
    pub step: u64,
    /// What it runs.
    pub kind: StepKind,
    /// Whether it writes draft KV of the tokens that it keeps.
    pub writes_draft: bool,
    /// `int32 [b]`: each lane's row.
    pub rows: Vec<i32>,
    /// `int32 [b]`: each lane's shape, an index into the ledger's list (0 in an extend).
    pub shapes: Vec<i32>,
    /// `uint64 [b]`: each row's epoch. The lane counts only while the row still has this epoch.
    pub epochs: Vec<u64>,
    /// `int32 [b]`: the least position where the device's true root can be (in an extend, its first position).
    pub lo: Vec<i32>,
    /// `int32 [b]`: the greatest such position, inclusive. The device clamps its length into `[lo, hi]`.
    pub hi: Vec<i32>,
    /// `int32 [b]`: `resolved_len` before the step.
    pub start: Vec<i32>,
    /// `int32 [b]`: `resolved_len` right after prepare (in a decode it equals `start`; its tokens count at resolve).
    pub new_len: Vec<i32>,
    /// `int32 [num_groups, b]`: `allocated_len` before the step.
    pub allocated_before: Vec<i32>,
    /// `int32 [num_groups, b]`: `allocated_len` that the step needs and has.
    pub allocated_after: Vec<i32>,
    /// What the lanes do with their rows' states; `None` without a state group. Boxed, so that plans of most ledgers
    /// stay small.
    pub states: Option<Box<StateFolds>>,
    /// Copies of partly filled pages, to be applied in this order before the step's forward and every later one.
    pub page_copies: Vec<PageCopy>,
}

impl Plan {
    /// b: rows that take part.
    #[must_use]
    pub fn num_lanes(&self) -> usize {
        self.rows.len()
    }

    /// The lane's fold; `None` without a state group.
    pub(crate) fn fold(&self, lane: usize) -> Option<Fold> {
        let StateFolds { src, dst, from, .. } = self.states.as_deref()?;
        Some(Fold { src: Page(src[lane]), dst: Page(dst[lane]), from: from[lane], marked: Marked::No })
    }
}

/// What a step remembers beside its plan.
#[derive(Debug, Clone, Default)]
pub(crate) struct Before {
    /// Per lane: `drafted_len` before the step. Empty in a decode, which does not move it.
    pub(crate) drafted: Vec<i32>,
    /// Rows that were idle before the step.
    pub(crate) idle: Vec<i32>,
    /// The copies of its plan, with their rows.
    pub(crate) copies: Vec<TailCopy>,
    /// Per lane: the soft mark that it left. Empty if no lane was to leave one.
    pub(crate) marked: Vec<Marked>,
}

/// A step that is not over.
#[derive(Debug, Clone)]
pub(crate) struct StepRecord {
    pub(crate) plan: Arc<Plan>,
    pub(crate) before: Before,
    /// Whether a row has been released since prepare.
    pub(crate) stale: bool,
    /// Whether nothing is left to resolve. Extends have nothing to resolve and start resolved.
    pub(crate) resolved: bool,
    /// Whether its forward failed and its rows were retracted.
    abandoned: bool,
}

impl StepRecord {
    /// The lane's fold, with the mark that it left; `None` without a state group.
    pub(crate) fn fold(&self, lane: usize) -> Option<Fold> {
        let fold = self.plan.fold(lane)?;
        Some(Fold { marked: self.before.marked.get(lane).copied().unwrap_or_default(), ..fold })
    }

    /// Its forward failed.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned
    }
}

/// The state of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepState {
    /// Not launched.
    Prepared,
    /// Not launched, and never to be, because a row of it was released since. It must be cancelled.
    Stale,
    /// Launched; a decode's results are not resolved yet.
    Launched,
    /// Nothing is left to resolve; the device may not have finished the step.
    Resolved,
}

impl StepState {
    /// `"prepared"`, `"stale"`, `"launched"` or `"resolved"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepared => "prepared",
            Self::Stale => "stale",
            Self::Launched => "launched",
            Self::Resolved => "resolved",
        }
    }
}

/// Runs of cancelled numbers that are remembered, so that completing one is refused. The count is bounded, because a
/// ledger may live for years. Completing an older cancelled number is accepted without effect.
const MAX_CANCELLED: usize = 1024;

/// All steps that are not over, oldest first.
#[derive(Debug, Clone)]
pub(crate) struct Steps {
    queue: VecDeque<StepRecord>,
    /// The newest `num_unlaunched` of the queue are not launched.
    num_unlaunched: usize,
    /// The number of the next step.
    next: u64,
    /// The last step up to which every step has finished on the device.
    completed: u64,
    /// The latest runs of numbers that were cancelled, ascending; neighbours share one.
    cancelled: VecDeque<Range<u64>>,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), num_unlaunched: 0, next: 1, completed: 0, cancelled: VecDeque::new() }
    }

    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Takes the memory for one more step, and for the cancel of every unlaunched one.
    pub(crate) fn make_room(&mut self) -> Result<()> {
        memory::room_in_queue(&mut self.queue, 1, "steps in flight")?;
        memory::room_in_queue(&mut self.cancelled, self.num_unlaunched + 1, "cancelled steps")
    }

    pub(crate) fn push(&mut self, plan: Arc<Plan>, before: Before) {
        self.next = plan.step + 1;
        self.num_unlaunched += 1;
        let resolved = plan.kind == StepKind::Extend;
        self.queue.push_back(StepRecord { plan, before, stale: false, resolved, abandoned: false });
    }

    /// Makes numbers go on behind those of another ledger whose state is taken over. They never go back.
    pub(crate) fn skip_to(&mut self, other: &Self) {
        self.next = self.next.max(other.next);
        self.completed = self.completed.max(other.completed);
    }

    /// The oldest step that is not over.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.queue.front().map(|record| record.plan.step)
    }

    /// The steps of a state that is saved while none is in flight: their numbers, and those that were cancelled.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let mut copy = Self { next: self.next, completed: self.completed, ..Self::new() };
        memory::room_in_queue(&mut copy.cancelled, self.cancelled.len(), "cancelled steps")?;
        copy.cancelled.extend(self.cancelled.iter().cloned());
        Ok(copy)
    }

    /// Every step that is not over, oldest first, and its state.
    pub(crate) fn states(&self) -> impl Iterator<Item = (&StepRecord, StepState)> {
        self.queue.iter().enumerate().map(|(index, record)| {
            let state = match (index < self.num_launched(), record.stale, record.resolved) {
                (false, false, _) => StepState::Prepared,
                (false, true, _) => StepState::Stale,
                (true, _, false) => StepState::Launched,
                (true, _, true) => StepState::Resolved,
            };
            (record, state)
        })
    }

    /// The steps that the device may still run, launched or not.
    pub(crate) fn incomplete(&self) -> impl Iterator<Item = &StepRecord> {
        self.queue.iter().filter(|record| record.plan.step > self.completed)
    }

    /// The step, if it is launched, not complete and not abandoned.
    pub(crate) fn check_abandon(&self, step: u64) -> Result<&StepRecord> {
        let refuse = |why: &str| Err(Error::Order(format!("abandon of step {step}: {why}")));
        match self.get(step) {
            None => refuse("no such step is in flight"),
            Some(_) if !self.is_launched(step) => refuse("it is not launched: cancel it"),
            Some(_) if step <= self.completed => refuse("it is complete"),
            Some(record) if record.abandoned => refuse("it is already abandoned"),
            Some(record) => Ok(record),
        }
    }

    pub(crate) fn set_abandoned(&mut self, step: u64) {
        if let Some(index) = self.index_of(step) {
            self.queue[index].abandoned = true;
        }
        self.set_resolved(step);
    }

    /// Adds everything that decides what the steps in flight will do.
    pub(crate) fn hash(&self, digest: &mut Digest) {
        for (record, state) in self.states() {
            let plan = &record.plan;
            digest.word(plan.step);
            let is_complete = plan.step <= self.completed;
            digest.ints(&[plan.kind as i64, i64::from(plan.writes_draft), state as i64, i64::from(record.abandoned)]);
            digest.word(is_complete.into());
            for lanes in [&plan.rows, &plan.shapes, &plan.lo, &plan.hi, &plan.new_len, &plan.allocated_before] {
                digest.ints(lanes);
            }
            plan.epochs.iter().for_each(|&epoch| digest.word(epoch));
            if let Some(StateFolds { src, dst, from, to }) = plan.states.as_deref() {
                for lanes in [src, dst, from, to] {
                    digest.ints(lanes);
                }
            }
            for before in [&record.before.drafted, &record.before.idle] {
                digest.ints(before);
            }
            if !record.before.marked.is_empty() {
                digest.numbers(record.before.marked.iter().map(|&marked| marked as i64));
            }
            record.before.copies.iter().for_each(|copy| copy.hash(digest));
        }
    }

    fn num_launched(&self) -> usize {
        self.queue.len() - self.num_unlaunched
    }

    fn index_of(&self, step: u64) -> Option<usize> {
        self.queue.binary_search_by_key(&step, |record| record.plan.step).ok()
    }

    pub(crate) fn get(&self, step: u64) -> Option<&StepRecord> {
        self.index_of(step).map(|index| &self.queue[index])
    }

    pub(crate) fn is_launched(&self, step: u64) -> bool {
        self.index_of(step).is_some_and(|index| index < self.num_launched())
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &StepRecord> {
        self.queue.iter()
    }

    pub(crate) fn unlaunched(&self) -> impl DoubleEndedIterator<Item = &StepRecord> {
        self.queue.range(self.num_launched()..)
    }

    /// The unlaunched folds of a row at this epoch, newest first; none without a state group.
    pub(crate) fn unlaunched_folds(&self, row: Row, epoch: u64) -> impl Iterator<Item = Fold> {
        self.unlaunched().rev().filter_map(move |record| {
            let lane = record.plan.rows.iter().position(|&other| other == row.0)?;
            if record.plan.epochs[lane] == epoch { record.fold(lane) } else { None }
        })
    }

    /// The first unlaunched step that can never be launched, if any.
    pub(crate) fn stale(&self) -> Option<u64> {
        self.unlaunched().find(|record| record.stale).map(|record| record.plan.step)
    }

    /// Makes the unlaunched steps of a released row stale.
    pub(crate) fn mark_stale(&mut self, row: i32) {
        let launched = self.num_launched();
        for record in self.queue.range_mut(launched..) {
            record.stale = record.stale || record.plan.rows.contains(&row);
        }
    }

    /// The step, if it is the one to launch next.
    pub(crate) fn check_launch(&self, step: u64) -> Result<&StepRecord> {
        match self.unlaunched().next() {
            Some(record) if record.plan.step == step => Ok(record),
            Some(record) => {
                Err(Error::Order(format!("launch of step {step}: the next step to launch is {}", record.plan.step)))
            }
            None => Err(Error::Order(format!("launch of step {step}: no step is waiting to be launched"))),
        }
    }

    pub(crate) fn launch_next(&mut self) {
        self.num_unlaunched -= 1;
    }

    /// The step, if it is a launched decode that is not resolved.
    pub(crate) fn check_resolve(&self, step: u64) -> Result<&StepRecord> {
        let refuse = |why: &str| Err(Error::Order(format!("resolve of step {step}: {why}")));
        match self.get(step) {
            None => refuse("no such step is in flight"),
            Some(_) if !self.is_launched(step) => refuse("it is not launched"),
            Some(record) if record.plan.kind == StepKind::Extend => refuse("an extend has nothing to resolve"),
            Some(record) if record.resolved => refuse("it is already resolved"),
            Some(record) => Ok(record),
        }
    }

    pub(crate) fn set_resolved(&mut self, step: u64) {
        if let Some(index) = self.index_of(step) {
            self.queue[index].resolved = true;
        }
        self.retire();
    }

    pub(crate) fn check_complete(&self, step: u64) -> Result<()> {
        let refuse = |why: &str| Err(Error::Order(format!("complete of step {step}: {why}")));
        let run = self.cancelled.partition_point(|run| run.end <= step);
        if self.cancelled.get(run).is_some_and(|run| run.contains(&step)) {
            return refuse("it was cancelled");
        }
        if step == 0 || (step > self.completed && !self.is_launched(step)) {
            return refuse("it is not launched");
        }
        Ok(())
    }

    pub(crate) fn complete(&mut self, step: u64) {
        self.completed = self.completed.max(step);
        self.retire();
    }

    /// The step, if it is the newest and not launched.
    pub(crate) fn check_cancel(&self, step: u64) -> Result<&StepRecord> {
        match self.unlaunched().last() {
            Some(record) if record.plan.step == step => Ok(record),
            Some(record) => {
                Err(Error::Order(format!("cancel of step {step}: the newest unlaunched step is {}", record.plan.step)))
            }
            None => Err(Error::Order(format!("cancel of step {step}: no step is waiting to be launched"))),
        }
    }

    /// Takes the newest step, which is not launched, out of the queue. Later steps were cancelled before.
    pub(crate) fn cancel_newest(&mut self) -> Option<StepRecord> {
        let record = self.queue.pop_back()?;
        self.num_unlaunched -= 1;
        let mut first = record.plan.step;
        while let Some(run) = self.cancelled.back().filter(|run| run.end >= first).cloned() {
            first = first.min(run.start);
            self.cancelled.pop_back();
        }
        self.cancelled.push_back(first..self.next);
        if self.cancelled.len() > MAX_CANCELLED && self.cancelled[0].end <= self.completed {
            self.cancelled.pop_front();
        }
        Some(record)
    }

    /// Forgets steps that are over. A step that waits for its resolve keeps the younger ones in the queue.
    fn retire(&mut self) {
        while self.num_launched() > 0
            && self.queue.front().is_some_and(|record| record.resolved && record.plan.step <= self.completed)
        {
            self.queue.pop_front();
        }
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
