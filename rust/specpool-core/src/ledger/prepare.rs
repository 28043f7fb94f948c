//! Claims: `prepare_extend`, `tokens_required`, `prepare_decode`. A claim succeeds for the whole batch in every group,
//! or not at all.

use std::sync::Arc;

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::{Page, Row, ceil_align};
use crate::memory::{collected, copied, filled, room, with_room};
use crate::shape::runs;
use crate::state::group::GroupState;
use crate::state::kept_states::Marked;
use crate::state::sizing;
use crate::state::step::{Before, Plan, StepKind};
use crate::verb::Verb;

/// The name of a plan's memory in errors.
const PLAN: &str = "a plan";

impl Ledger {
    /// Prepares a prefill, or a chunk of one: gives each row the pages for `new_lens` tokens, and sets `resolved_len`
    /// to that. `writes_draft` says whether the forward also writes the draft model's KV of the new tokens.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (lengths, unknown or repeated rows, more than `max_batch`,
    /// `new_len <= resolved_len`, more than `max_chunk` new tokens), [`Error::NotReady`] (an uncancelled stale step;
    /// rounds in flight; an extend of the row that is not launched), [`Error::ContextEnd`] (every row whose new length
    /// is past L), [`Error::RowOverflow`], [`Error::OutOfPages`], [`Error::OutOfMemory`].
    pub fn prepare_extend(&mut self, rows: &[i32], new_lens: &[i32], writes_draft: bool) -> Result<Arc<Plan>> {
        self.prepare_extend_keeping(rows, new_lens, &[], writes_draft)
    }

    /// Does a [`prepare_extend`](Ledger::prepare_extend) whose lanes `keep` leave a *soft mark* on their states, which
    /// contain `new_len - 1` tokens then: [`index`](Ledger::index) takes them, although later steps fold on. A mark
    /// goes with a cancel, a cut below it and the row. If free and cached slots do not suffice, it gives way as a
    /// cached state does. A lane without a state leaves none.
    ///
    /// # Errors
    /// As `prepare_extend`, and before its others [`Error::Config`] (lanes are kept and there is no state group) and
    /// [`Error::Shape`] (`keep` is not ascending, or has a lane that is not in `0..` the number of rows).
    pub fn prepare_extend_keeping(
        &mut self,
        rows: &[i32],
        new_lens: &[i32],
        keep: &[i32],
        writes_draft: bool,
    ) -> Result<Arc<Plan>> {
        self.gate()?;
        if !keep.is_empty() {
            self.check_keep(rows, keep)?;
        }
        self.check_batch(rows, "new_lens", new_lens.len())?;
        for (&row, &new_len) in rows.iter().zip(new_lens) {
            let resolved = self.rows.resolved[row as usize];
            if new_len <= resolved {
                return Err(Error::Shape(format!("row {row}: new_len {new_len} is not above resolved_len {resolved}")));
            }
            if new_len - resolved > self.max_chunk {
                return Err(Error::Shape(format!(
                    "row {row}: an extend from {resolved} to {new_len} is longer than max_chunk {}",
                    self.max_chunk
                )));
            }
        }
        self.check_no_stale_step()?;
        for &row in rows {
            let row = Row(row);
            let rounds = self.rows.in_flight[row.at()];
            if rounds > 0 {
                return Err(Error::NotReady(format!(
                    "{} has {rounds} rounds in flight: resolve them before an extend",
                    self.rows.describe(row)
                )));
            }
            if self.rows.has_unlaunched_extend(row) {
                return Err(Error::NotReady(format!("{} has an extend that is not launched", self.rows.describe(row))));
            }
        }
        let past = |&(_, &new_len): &(&i32, &i32)| new_len > self.max_context_len;
        self.check_context(rows.iter().zip(new_lens).filter(past).map(|(&row, _)| row as usize))?;

        let shapes = filled(0, rows.len(), PLAN)?;
        let mut plan = self.plan(StepKind::Extend, rows, shapes, writes_draft)?;
        plan.new_len = copied(new_lens, PLAN)?;
        for group in &self.groups {
            for (&row, &new_len) in rows.iter().zip(new_lens) {
                let allocated = i64::from(group.allocated[row as usize]);
                let after = ceil_align(new_len.into(), group.page_size).max(allocated);
                if after > group.row_width {
                    return Err(overflow(&group.spec.name, row, new_len.into(), group.row_width));
                }
                plan.allocated_before.push(allocated as i32);
                plan.allocated_after.push(after as i32);
            }
        }
        self.check_pages(&plan)?;
        if self.states.is_some() {
            self.plan_folds(&mut plan)?;
        }
        let drafted = collected(rows.iter().map(|&row| self.rows.drafted[row as usize]), PLAN)?;
        let plan = self.claim(plan, drafted, keep, Verb::PrepareExtend)?;
        for (&row, &new_len) in rows.iter().zip(new_lens) {
            self.rows.push_extend(Row(row), new_len, writes_draft);
        }
        Ok(plan)
    }

    /// Returns the slots that `prepare_decode` of the same rows and shapes would take, per group. It changes nothing.
    /// Rows that a prepare would refuse are counted too.
    ///
    /// # Errors
    /// [`Error::Shape`] for lengths that differ, unknown or repeated rows, unknown shapes.
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// let (required, free) = (ledger.tokens_required(&[row.0], &[1])?, ledger.free_pages(0)?);
    /// ledger.prepare_decode(&[row.0], &[1], true)?;
    /// assert_eq!(required[0], 4 * (free - ledger.free_pages(0)?) as i64); // pages of 4 slots
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    pub fn tokens_required(&self, rows: &[i32], shapes: &[i32]) -> Result<Vec<i64>> {
        self.check_rows(rows, "shapes", shapes.len())?;
        self.check_shapes(rows, shapes)?;
        let len = self.rows.live.len();
        let (resolved, in_flight) = (&self.rows.resolved[..len], &self.rows.in_flight[..len]);
        let hi = &self.rows.hi[..len];
        let required = |group: &GroupState| {
            let allocated = &group.allocated[..len];
            let mut slots = 0;
            for (lanes, shape) in runs(shapes) {
                let reserve = group.reserves[shape];
                for &row in &rows[lanes] {
                    let at = row as usize;
                    let (lo, has) = (i64::from(resolved[at] + in_flight[at]), i64::from(allocated[at]));
                    slots += reserve.next_allocated(has, lo, hi[at].into()) - has;
                }
            }
            slots
        };
        Ok(self.groups.iter().map(required).collect())
    }

    /// The most pages of each group that a row can hold while its roots lie in `[lo, hi]`, with at most one round in
    /// flight. An admission must promise that many, so that the row never runs out of pages. In a window group, where
    /// a row does not grow, it is the most that the row can ever hold: rounds of any shape with D in flight, and an
    /// extend of up to `lo` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] unless `0 <= lo <= hi < L`, or for an unknown shape.
    pub fn pages_needed(&self, lo: i32, hi: i32, shape: i32) -> Result<Vec<i64>> {
        if lo < 0 || lo > hi || hi >= self.max_context_len {
            return Err(Error::Shape(format!(
                "roots [{lo}, {hi}] must be a range inside [0, {})",
                self.max_context_len
            )));
        }
        if shape < 0 || shape as usize >= self.shapes.len() {
            return Err(Error::Shape(format!("shape {shape} is not in 0..{}", self.shapes.len())));
        }
        let pages = |group: &GroupState| {
            let all = group.reserves[shape as usize].pages(lo.into(), hi.into());
            let Some(window) = group.spec.window else { return all };
            let chunk = self.max_chunk.min(lo).into();
            let ahead = sizing::most_ahead(&group.reserves, &self.shapes, chunk, self.overlap_depth.into());
            all.min(sizing::window_pages(group.page_size, window, group.spec.sink, ahead))
        };
        Ok(self.groups.iter().map(pages).collect())
    }

    /// The pages of each group that rows of `lens` tokens hold or need for themselves, each for a round of its shape
    /// (an index into [`Ledger::shapes`]) after it has grown by up to `growth` tokens: `[lanes * groups]`, lane by lane.
    /// In a full group it is [`pages_needed`](Self::pages_needed) of the roots `[len, len + growth]`, cut to the
    /// context. In a window group it is the most that the row holds without the chunk of an extend: one extend runs at
    /// a time, so an admission counts its chunk once for all rows. O(lanes * groups).
    ///
    /// # Errors
    /// [`Error::Shape`] unless `growth >= 0` and each length is in `0..L`, or for an unknown shape;
    /// [`Error::OutOfMemory`].
    pub fn pages_ahead(&self, lens: &[i32], shapes: &[i32], growth: i32) -> Result<Vec<i64>> {
        if lens.len() != shapes.len() {
            return Err(Error::Shape(format!("{} lengths, {} shapes", lens.len(), shapes.len())));
        }
        if growth < 0 {
            return Err(Error::Shape(format!("growth must be at least 0, got {growth}")));
        }
        if let Some(&len) = lens.iter().find(|&&len| len < 0 || len >= self.max_context_len) {
            return Err(Error::Shape(format!("length {len} is not in 0..{}", self.max_context_len)));
        }
        if let Some(&shape) = shapes.iter().find(|&&shape| shape < 0 || shape as usize >= self.shapes.len()) {
            return Err(Error::Shape(format!("shape {shape} is not in 0..{}", self.shapes.len())));
        }
        let num_groups = self.groups.len();
        let mut pages = filled(0, lens.len() * num_groups, "the pages of rows")?;
        for (at, group) in self.groups.iter().enumerate() {
            let behind = group.spec.window.map(|window| {
                let ahead = sizing::most_ahead(&group.reserves, &self.shapes, 0, self.overlap_depth.into());
                sizing::window_pages(group.page_size, window, group.spec.sink, ahead)
            });
            let cells = pages.iter_mut().skip(at).step_by(num_groups);
            for ((&len, &shape), cell) in lens.iter().zip(shapes).zip(cells) {
                let hi = len.saturating_add(growth).min(self.max_context_len - 1).into();
                let reserve = &group.reserves[shape as usize];
                *cell = match behind {
                    None => reserve.pages(len.into(), hi),
                    Some(max_pages) => reserve.pages(0, hi).min(max_pages),
                };
            }
        }
        Ok(pages)
    }

    /// Prepares one round of each row, each with its own shape (an index into [`Ledger::shapes`]). `writes_draft` says
    /// whether the round also writes the draft KV of the tokens that it accepts.
    ///
    /// # Errors
    /// In this order, changing nothing: [`Error::Shape`] (lengths, unknown or repeated rows, unknown shapes, more than
    /// `max_batch`), [`Error::NotReady`] (an uncancelled stale step; no root: after admit, or after a cut that took
    /// tokens or rounds, no extend has launched yet), [`Error::ContextEnd`] (lists every row with
    /// `resolved_len >= L`), [`Error::Order`] (D + 1 rounds in flight), [`Error::DraftLag`], [`Error::RowOverflow`],
    /// [`Error::OutOfPages`], [`Error::OutOfMemory`].
    ///
    /// # Examples
    /// ```
    #[doc = include_str!("example.txt")]
    /// // With overlap the next round is prepared before the previous one is resolved.
    /// let first = ledger.prepare_decode(&[row.0], &[1], true)?;
    /// ledger.launch(first.step)?;
    /// let second = ledger.prepare_decode(&[row.0], &[0], true)?; // this one drafts nothing
    /// assert_eq!((second.lo[0], second.hi[0]), (11, 14)); // where its root can be: 1 to 4 tokens on
    /// ledger.launch(second.step)?;
    ///
    /// ledger.resolve(first.step, &[4])?;
    /// ledger.complete(first.step)?;
    /// ledger.resolve(second.step, &[1])?;
    /// ledger.complete(second.step)?;
    /// assert_eq!(ledger.resolved_len()[row.at()], 15);
    /// # Ok::<(), specpool_core::Error>(())
    /// ```
    #[allow(clippy::needless_bitwise_bool, reason = "no branch per lane")]
    pub fn prepare_decode(&mut self, rows: &[i32], shapes: &[i32], writes_draft: bool) -> Result<Arc<Plan>> {
        self.gate()?;
        self.check_batch(rows, "shapes", shapes.len())?;
        self.check_shapes(rows, shapes)?;
        self.check_no_stale_step()?;
        self.check_rounds(rows, shapes)?;

        let mut plan = self.plan(StepKind::Decode, rows, copied(shapes, PLAN)?, writes_draft)?;
        plan.new_len = copied(&plan.start, PLAN)?;
        for group in &self.groups {
            let first = plan.allocated_before.len();
            plan.allocated_before.extend(rows.iter().map(|&row| group.allocated[row as usize]));
            let before = &plan.allocated_before[first..];
            group.reserve(shapes, before, &plan.lo, &plan.hi, &mut plan.allocated_after);
            let lanes = plan.allocated_after[first..].iter().zip(before.iter().zip(&plan.lo));
            let is_wrong = lanes.fold(false, |is_wrong, (&after, (&before, &lo))| {
                is_wrong | (lo > before) | (i64::from(after) > group.row_width)
            });
            if is_wrong {
                return Err(self.refuse_claim(group, &plan));
            }
        }
        self.check_pages(&plan)?;
        if self.states.is_some() {
            self.plan_folds(&mut plan)?;
        }
        let plan = self.claim(plan, Vec::new(), &[], Verb::PrepareDecode)?;
        self.rows.push_rounds(&plan, &self.shapes);
        Ok(plan)
    }

    /// Returns why a round of the plan cannot be claimed in the group: the first lane that is past its pages or past
    /// its row.
    fn refuse_claim(&self, group: &GroupState, plan: &Plan) -> Error {
        for (lane, &row) in plan.rows.iter().enumerate() {
            let (lo, hi) = (i64::from(plan.lo[lane]), i64::from(plan.hi[lane]));
            let allocated = i64::from(group.allocated[row as usize]);
            if lo > allocated {
                return Error::Corrupt(format!(
                    "{} in group {}: kv_committed_len {lo} > allocated_len {allocated}",
                    self.rows.describe(Row(row)),
                    group.spec.name
                ));
            }
            let reserve = &group.reserves[plan.shapes[lane] as usize];
            if reserve.next_allocated(allocated, lo, hi) > group.row_width {
                return overflow(&group.spec.name, row, reserve.need(lo, hi), group.row_width);
            }
        }
        Error::Corrupt(format!("group {}: a claim was refused without a reason", group.spec.name))
    }

    /// A plan before its claim.
    fn plan(&self, kind: StepKind, rows: &[i32], shapes: Vec<i32>, writes_draft: bool) -> Result<Plan> {
        let state = &self.rows;
        let (lanes, claims) = (rows.len(), rows.len() * self.groups.len());
        let zeros = || filled(0, lanes, PLAN);
        let (mut start, mut lo, mut hi, mut epochs) = (zeros()?, zeros()?, zeros()?, filled(0, lanes, PLAN)?);
        let len = state.live.len();
        let (resolved, in_flight) = (&state.resolved[..len], &state.in_flight[..len]);
        let (farthest, epoch) = (&state.hi[..len], &state.epoch[..len]);
        let lanes = start.iter_mut().zip(&mut lo).zip(hi.iter_mut().zip(&mut epochs));
        for (&row, ((start, lo), (hi, planned))) in rows.iter().zip(lanes) {
            let at = row as usize;
            *start = resolved[at];
            *lo = resolved[at] + in_flight[at];
            *hi = farthest[at];
            *planned = epoch[at];
        }
        Ok(Plan {
            step: self.steps.next(),
            kind,
            writes_draft,
            rows: copied(rows, PLAN)?,
            shapes,
            epochs,
            lo,
            hi,
            start,
            new_len: Vec::new(),
            allocated_before: with_room(claims, PLAN)?,
            allocated_after: with_room(claims, PLAN)?,
            states: None,
            page_copies: Vec::new(),
        })
    }

    /// Checks that every group has the pages of the plan's claims, counting the plan's own evictions, and that the row
    /// holds every page that is evicted.
    fn check_pages(&self, plan: &Plan) -> Result<()> {
        let lanes = plan.num_lanes();
        for (at, group) in self.groups.iter().enumerate() {
            if group.spec.window.is_some() {
                for &row in &plan.rows {
                    let columns = group.evicted_columns(Row(row), self.evict_to(group, Row(row)));
                    group.check_columns(Row(row), columns).map_err(|record| self.page_error(at, record))?;
                }
            }
            let range = at * lanes..(at + 1) * lanes;
            let slots: i64 = (plan.allocated_after[range.clone()].iter().zip(&plan.allocated_before[range]))
                .map(|(&after, &before)| i64::from(after) - i64::from(before))
                .sum();
            let (need, free) = ((slots / group.page_size) as usize, group.pool.num_free());
            let cached = group.pool.num_cached();
            if need > free + cached {
                let free = free + self.freed_by_evictions(group, plan)?;
                if need > free + cached {
                    return Err(self.out_of_pages(at, need, free));
                }
            }
        }
        Ok(())
    }

    /// Where the row's window in the group begins, by the length before an extend that is not launched.
    fn evict_to(&self, group: &GroupState, row: Row) -> i64 {
        group.evict_to(self.rows.settled(row))
    }

    /// Pages that the plan's own evictions free at once: those without a fence whose every holder evicts them.
    fn freed_by_evictions(&self, group: &GroupState, plan: &Plan) -> Result<usize> {
        let completed = self.steps.completed();
        let mut dropped: Vec<Page> = Vec::new();
        for row in plan.rows.iter().map(|&row| Row(row)) {
            if self.fence(row).step > completed {
                continue; // What this row drops is fenced.
            }
            let keep = group.checkpoint_columns(self.rows.checkpoint(row));
            let columns = group.evicted_columns(row, self.evict_to(group, row));
            room(&mut dropped, columns.len(), "pages that are evicted")?;
            dropped.extend(columns.filter(|column| !keep.contains(column)).map(|at| Page(group.table.row(row)[at])));
        }
        dropped.sort_unstable();
        let is_freed = |drops: &&[Page]| {
            group.pool.holders_if_unfenced(drops[0], completed).is_some_and(|holders| holders as usize == drops.len())
        };
        Ok(dropped.chunk_by(|a, b| a == b).filter(is_freed).count())
    }

    /// Takes the memory for all that [`claim`](Self::claim) does, and for undoing it.
    fn make_room(&mut self, plan: &mut Plan, keep: &[i32]) -> Result<Vec<Marked>> {
        let lanes = plan.num_lanes();
        for at in 0..self.groups.len() {
            let range = at * lanes..(at + 1) * lanes;
            let claims = plan.allocated_after[range.clone()].iter().zip(&plan.allocated_before[range]);
            let slots: i64 = claims.map(|(&after, &before)| i64::from(after) - i64::from(before)).sum();
            let pages = (slots / self.groups[at].page_size) as usize;
            self.groups[at].make_room(pages, pages)?;
            if self.groups[at].spec.window.is_some() {
                for row in plan.rows.iter().map(|&row| Row(row)) {
                    let (to, checkpoint) = (self.evict_to(&self.groups[at], row), self.rows.checkpoint(row));
                    self.groups[at].make_room_to_keep(row, to, checkpoint)?;
                }
            }
        }
        let marked = if self.states.is_some() { self.make_room_for_folds(plan, keep)? } else { Vec::new() };
        plan.page_copies = with_room(self.copies.len(), PLAN)?;
        self.lanes.clear();
        room(&mut self.lanes, lanes + self.copies.len(), "lanes")?;
        self.steps.make_room()?;
        self.recorder.make_room(lanes + keep.len(), None)?;
        Ok(marked)
    }

    /// Evicts and grows every lane, lets the lanes `keep` leave soft marks, and puts the step, with the waiting copies,
    /// into the queue.
    fn claim(&mut self, mut plan: Plan, drafted: Vec<i32>, keep: &[i32], verb: Verb) -> Result<Arc<Plan>> {
        let mut marked = self.make_room(&mut plan, keep)?;
        let mut idle = Vec::new();
        if self.rows.num_idle > 0 {
            idle = with_room(plan.num_lanes(), PLAN)?;
            idle.extend(plan.rows.iter().copied().filter(|&row| self.rows.idle[row as usize]));
        }
        for &row in &idle {
            self.set_idle(Row(row), false);
        }
        for at in 0..self.groups.len() {
            let lanes = at * plan.num_lanes()..(at + 1) * plan.num_lanes();
            if self.groups[at].spec.window.is_some() {
                for row in plan.rows.iter().map(|&row| Row(row)) {
                    let (fence, checkpoint) = (self.fence(row), self.rows.checkpoint(row));
                    let to = self.evict_to(&self.groups[at], row);
                    let evicted = self.groups[at].evict(row, to, checkpoint, fence, verb);
                    evicted.map_err(|record| self.page_error(at, record))?;
                }
            }
            let (before, after) = (&plan.allocated_before[lanes.clone()], &plan.allocated_after[lanes]);
            if self.groups[at].pool.num_cached() > 0 {
                let slots: i64 = after.iter().zip(before).map(|(&after, &before)| i64::from(after - before)).sum();
                self.evict_cached(at, (slots / self.groups[at].page_size) as usize, verb);
            }
            let group = &mut self.groups[at];
            each_growing_lane(before, after, |lane| {
                group.grow(Row(plan.rows[lane]), after[lane].into(), plan.step, verb)
            })?;
        }
        if self.states.is_some() {
            self.claim_folds(&mut plan, keep, &mut marked, verb)?;
        }
        self.drop_orphan_copies(verb);
        let copies = std::mem::take(&mut self.copies);
        plan.page_copies.extend(copies.iter().map(|copy| copy.copy));
        let plan = Arc::new(plan);
        self.steps.push(Arc::clone(&plan), Before { drafted, idle, copies, marked });
        self.note_plan(&plan, keep);
        Ok(plan)
    }
}

/// Calls `visit` with every lane that takes pages. Which lanes do is hardly predictable, so they are found without a
/// branch.
pub(super) fn each_growing_lane<E>(
    before: &[i32],
    after: &[i32],
    mut visit: impl FnMut(usize) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    /// Lanes compared at once.
    const BLOCK: usize = 256;
    let mut lanes = [0; BLOCK];
    for (block, (before, after)) in before.chunks(BLOCK).zip(after.chunks(BLOCK)).enumerate() {
        let mut len = 0;
        for (lane, (before, after)) in before.iter().zip(after).enumerate() {
            lanes[len] = lane as u32;
            len += usize::from(after > before);
        }
        for &lane in &lanes[..len] {
            visit(block * BLOCK + lane as usize)?;
        }
    }
    Ok(())
}

fn overflow(group: &str, row: i32, need: i64, width: i64) -> Error {
    Error::RowOverflow { group: group.into(), row: row as usize, need, width }
}
