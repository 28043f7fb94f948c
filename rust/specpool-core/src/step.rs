//! A step's life: prepare -> launch -> resolve (decode only) and complete, or prepare -> cancel (spec 4).
//!
//! Steps are numbered from 1 in the order of their preparation and launched in that order, so the queue is always
//! `[launched .. | unlaunched ..]`. A number is never used twice.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};

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

/// One prepared forward and what it was prepared with. `b` is its number of lanes.
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
    /// `uint64 [b]`: each row's epoch; the lane counts only while the row is still at it.
    pub epochs: Vec<u64>,
    /// `int32 [b]`: least position where the device's true root can be (the extend's first position).
    pub lo: Vec<i32>,
    /// `int32 [b]`: greatest such position, inclusive. The device clamps its length into `[lo, hi]`.
    pub hi: Vec<i32>,
    /// `int32 [b]`: `resolved_len` before the step.
    pub start: Vec<i32>,
    /// `int32 [b]`: `resolved_len` right after prepare (`start` in a decode, whose tokens count at resolve).
    pub new_len: Vec<i32>,
    /// `int32 [num_groups, b]`: `allocated_len` before the step.
    pub allocated_before: Vec<i32>,
    /// `int32 [num_groups, b]`: `allocated_len` that the step needs and has.
    pub allocated_after: Vec<i32>,
}

impl Plan {
    /// b: rows that take part.
    #[must_use]
    pub fn num_lanes(&self) -> usize {
        self.rows.len()
    }
}

/// A step that is not over.
#[derive(Debug, Clone)]
pub(crate) struct StepRecord {
    pub(crate) plan: Arc<Plan>,
    /// Per lane: `drafted_len` before the step.
    pub(crate) drafted_before: Vec<i32>,
    /// A row has been released since prepare.
    pub(crate) stale: bool,
    /// Extends have nothing to resolve and are born resolved.
    pub(crate) resolved: bool,
}

/// All steps that are not over, oldest first.
#[derive(Debug, Clone)]
pub(crate) struct Steps {
    queue: VecDeque<StepRecord>,
    /// The newest `num_unlaunched` of the queue are not launched.
    num_unlaunched: usize,
    /// The number of the next step.
    next: u64,
    /// Every step up to this one has finished on the device.
    completed: u64,
    /// Runs of numbers that were cancelled, ascending: neighbours share one, so it stays short.
    cancelled: Vec<Range<u64>>,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self { queue: VecDeque::new(), num_unlaunched: 0, next: 1, completed: 0, cancelled: Vec::new() }
    }

    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    pub(crate) fn push(&mut self, plan: Arc<Plan>, drafted_before: Vec<i32>) {
        self.next = plan.step + 1;
        self.num_unlaunched += 1;
        let resolved = plan.kind == StepKind::Extend;
        self.queue.push_back(StepRecord { plan, drafted_before, stale: false, resolved });
    }

    fn num_launched(&self) -> usize {
        self.queue.len() - self.num_unlaunched
    }

    fn place(&self, step: u64) -> Option<usize> {
        self.queue.binary_search_by_key(&step, |record| record.plan.step).ok()
    }

    pub(crate) fn get(&self, step: u64) -> Option<&StepRecord> {
        self.place(step).map(|place| &self.queue[place])
    }

    pub(crate) fn is_launched(&self, step: u64) -> bool {
        self.place(step).is_some_and(|place| place < self.num_launched())
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &StepRecord> {
        self.queue.iter()
    }

    pub(crate) fn unlaunched(&self) -> impl Iterator<Item = &StepRecord> {
        self.queue.range(self.num_launched()..)
    }

    /// The first unlaunched step that can never be launched, if any.
    pub(crate) fn stale(&self) -> Option<u64> {
        self.unlaunched().find(|record| record.stale).map(|record| record.plan.step)
    }

    /// A row was released: unlaunched steps that it takes part in are stale from now on.
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
        if let Some(place) = self.place(step) {
            self.queue[place].resolved = true;
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

    /// Forgets the newest step, which is not launched; what came after it was cancelled before.
    pub(crate) fn cancel_newest(&mut self) {
        let Some(record) = self.queue.pop_back() else { return };
        self.num_unlaunched -= 1;
        let mut first = record.plan.step;
        while let Some(run) = self.cancelled.last().filter(|run| run.end >= first).cloned() {
            first = first.min(run.start);
            self.cancelled.pop();
        }
        self.cancelled.push(first..self.next);
    }

    /// Forgets steps that are over. One that waits for its resolve keeps the younger ones in the queue.
    fn retire(&mut self) {
        while self.num_launched() > 0
            && self.queue.front().is_some_and(|record| record.resolved && record.plan.step <= self.completed)
        {
            self.queue.pop_front();
        }
    }
}
