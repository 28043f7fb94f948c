//! The rows: their lengths as a struct of arrays, `[num_rows + 1]` each, and who holds each row.
//!
//! For each row: `0 <= resolved <= resolved + in_flight <= allocated`. A row that is not live reads 0 everywhere
//! except in `epoch`, which never goes back.

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::memory::{self, room, zeroed};
use crate::shape::{Shape, runs};
use crate::state::step::{Plan, StepKind};

/// Characters of a tag that a message shows at most.
const MAX_SHOWN: usize = 100;

/// State of all rows; index 0 is padding and stays 0.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    /// Rows, besides row 0.
    count: usize,
    /// Rounds that one row may have in flight, `D + 1`.
    max_rounds: usize,
    pub(crate) live: Vec<bool>,
    /// r: tokens whose KV is final.
    pub(crate) resolved: Vec<i32>,
    /// k: rounds prepared and not resolved.
    pub(crate) in_flight: Vec<i32>,
    /// r plus the largest accept lengths of its rounds in flight.
    pub(crate) hi: Vec<i32>,
    /// Draft KV is valid below this.
    pub(crate) drafted: Vec<i32>,
    /// Bumped by every release.
    pub(crate) epoch: Vec<u64>,
    /// Whether an extend has launched since the row was admitted or cut shorter: its next root is known then.
    pub(crate) ready: Vec<bool>,
    /// r before the row's unlaunched extend, plus one; 0 if it has none.
    extend_from: Vec<i32>,
    /// How many rounds of `in_flight` are launched: their roots are written.
    pub(crate) launched_rounds: Vec<i32>,
    /// How many rounds of `in_flight` write no draft KV.
    pub(crate) undrafted_rounds: Vec<i32>,
    /// The last launched step that the row took part in; 0 if none.
    pub(crate) last_launched: Vec<u64>,
    /// The next step's number when the row was admitted: older steps belong to an earlier holder.
    pub(crate) admitted_at: Vec<u64>,
    /// Whether the row is between two turns of a session.
    pub(crate) idle: Vec<bool>,
    /// Number of idle rows.
    pub(crate) num_idle: usize,
    /// Tokens of the row's checkpoint plus one; 0 if it has none.
    checkpoint: Vec<i32>,
    /// `[num_rows + 1, max_rounds]`: the steps of the rounds in flight, oldest first.
    rounds: Vec<u64>,
    pub(crate) tags: Vec<Option<Box<str>>>,
    /// Rows that were never handed out: from this one to the last. They are handed out when no other row is free,
    /// lowest first.
    fresh: usize,
    /// Rows that were given back; the last one is handed out first.
    returned: Vec<Row>,
    /// (step, row): the row is free once that step is complete.
    fenced: Vec<(u64, Row)>,
}

impl Rows {
    pub(crate) fn new(num_rows: usize, max_rounds: usize) -> Result<Self> {
        let len = num_rows + 1;
        let lengths = || zeroed::<i32>(len, "row lengths");
        let num_rounds = len
            .checked_mul(max_rounds)
            .ok_or_else(|| Error::Config(format!("{num_rows} rows of {max_rounds} rounds are too many")))?;
        Ok(Self {
            count: num_rows,
            max_rounds,
            live: zeroed(len, "row states")?,
            resolved: lengths()?,
            in_flight: lengths()?,
            hi: lengths()?,
            drafted: lengths()?,
            epoch: zeroed(len, "row epochs")?,
            ready: zeroed(len, "row states")?,
            extend_from: lengths()?,
            launched_rounds: lengths()?,
            undrafted_rounds: lengths()?,
            last_launched: zeroed(len, "row fences")?,
            admitted_at: zeroed(len, "row states")?,
            idle: zeroed(len, "row states")?,
            num_idle: 0,
            checkpoint: lengths()?,
            rounds: zeroed(num_rounds, "rounds in flight")?,
            tags: zeroed(len, "row tags")?,
            fresh: 1,
            returned: Vec::new(),
            fenced: Vec::new(),
        })
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.count
    }

    pub(crate) fn num_free(&self) -> usize {
        self.count + 1 - self.fresh + self.returned.len()
    }

    pub(crate) fn num_fenced(&self) -> usize {
        self.fenced.len()
    }

    /// Rows that can be handed out; the last one is handed out first.
    pub(crate) fn free(&self) -> impl Iterator<Item = Row> {
        (self.fresh..=self.count).rev().map(|row| Row(row as i32)).chain(self.returned.iter().copied())
    }

    pub(crate) fn fenced(&self) -> &[(u64, Row)] {
        &self.fenced
    }

    /// The row, if it is one that was admitted.
    pub(crate) fn check_live(&self, row: i32) -> Result<Row> {
        if row < 1 || row as usize > self.count {
            return Err(Error::Shape(format!("row {row} is not in 1..={}", self.count)));
        }
        if !self.live[row as usize] {
            return Err(Error::Shape(format!("row {row} is not admitted")));
        }
        Ok(Row(row))
    }

    /// `"row 3"`, or `"row 3 (tag)"` with the beginning of a long tag.
    pub(crate) fn describe(&self, row: Row) -> String {
        let Some(Some(tag)) = self.tags.get(row.at()) else { return format!("row {}", row.0) };
        match tag.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => format!("row {} ({}..)", row.0, &tag[..end]),
            None => format!("row {} ({tag})", row.0),
        }
    }

    /// The row that [`admit`](Self::admit) will give.
    pub(crate) fn next_free(&self) -> Option<Row> {
        self.returned.last().copied().or((self.fresh <= self.count).then_some(Row(self.fresh as i32)))
    }

    /// Takes the memory for one more row in use, for giving all used rows back, and for the tag, which it returns as
    /// it is kept.
    pub(crate) fn make_room(&mut self, tag: Option<&str>) -> Result<Option<Box<str>>> {
        let used = self.fresh.min(self.count);
        let (returned, fenced) = (self.returned.len(), self.fenced.len());
        room(&mut self.returned, used.saturating_sub(returned), "free rows")?;
        room(&mut self.fenced, used.saturating_sub(fenced), "fenced rows")?;
        tag.map(|tag| memory::text(tag, "a tag")).transpose()
    }

    /// Takes the next free row. `next_step` is the number of the step that will be prepared next.
    pub(crate) fn admit(&mut self, tag: Option<Box<str>>, next_step: u64) {
        let Some(row) = self.next_free() else { return };
        if self.returned.pop().is_none() {
            self.fresh += 1;
        }
        self.live[row.at()] = true;
        self.admitted_at[row.at()] = next_step;
        self.tags[row.at()] = tag;
    }

    /// Whether the row is still held by the request that it had when `step` was prepared.
    pub(crate) fn is_resident(&self, row: i32, step: u64) -> bool {
        self.live[row as usize] && self.admitted_at[row as usize] <= step
    }

    pub(crate) fn set_idle(&mut self, row: Row, is_idle: bool) {
        let was_idle = std::mem::replace(&mut self.idle[row.at()], is_idle);
        self.num_idle = self.num_idle + usize::from(is_idle) - usize::from(was_idle);
    }

    /// Tokens of the row's checkpoint.
    pub(crate) fn checkpoint(&self, row: Row) -> Option<i32> {
        Some(self.checkpoint[row.at()] - 1).filter(|&len| len >= 0)
    }

    pub(crate) fn set_checkpoint(&mut self, row: Row, len: Option<i32>) {
        self.checkpoint[row.at()] = len.map_or(0, |len| len + 1);
    }

    /// Makes the row, which is not idle, free, or fenced until the step `fence` is complete. Its tag stays for error
    /// messages.
    pub(crate) fn give_back(&mut self, row: Row, fence: Option<u64>) {
        self.forget_rounds(row);
        let at = row.at();
        self.live[at] = false;
        self.epoch[at] += 1;
        self.resolved[at] = 0;
        self.hi[at] = 0;
        self.drafted[at] = 0;
        self.last_launched[at] = 0;
        self.checkpoint[at] = 0;
        match fence {
            Some(step) => self.fenced.push((step, row)),
            None => self.returned.push(row),
        }
    }

    pub(crate) fn complete(&mut self, completed: u64) {
        let Self { fenced, returned, .. } = self;
        fenced.retain(|&(fence, row)| {
            if fence <= completed {
                returned.push(row);
            }
            fence > completed
        });
    }

    /// Keeps the row, but drops its rounds in flight; the row needs a new root.
    pub(crate) fn forget_rounds(&mut self, row: Row) {
        let at = row.at();
        self.in_flight[at] = 0;
        self.launched_rounds[at] = 0;
        self.undrafted_rounds[at] = 0;
        self.extend_from[at] = 0;
        self.ready[at] = false;
    }

    /// The steps of the rounds in flight, oldest first.
    pub(crate) fn rounds_in_flight(&self, row: Row) -> &[u64] {
        let rounds = &self.rounds[row.at() * self.max_rounds..][..self.max_rounds];
        // A count that was written behind the ledger's back is the audit's to report, not a panic's.
        rounds.get(..self.in_flight[row.at()] as usize).unwrap_or(rounds)
    }

    /// The step of the row's oldest round in flight; 0 if there is none.
    pub(crate) fn oldest_round(&self, row: Row) -> u64 {
        if self.in_flight[row.at()] > 0 { self.rounds[row.at() * self.max_rounds] } else { 0 }
    }

    /// Adds one round in flight to every lane of a decode.
    // Slices of one length, here and below, save the loop a bounds check for each array.
    pub(crate) fn push_rounds(&mut self, plan: &Plan, shapes: &[Shape]) {
        let len = self.count + 1;
        let (hi, in_flight) = (&mut self.hi[..len], &mut self.in_flight[..len]);
        let undrafted = &mut self.undrafted_rounds[..len];
        for (lanes, shape) in runs(&plan.shapes) {
            let max_accept_len = shapes[shape].max_accept_len() as i32;
            for &row in &plan.rows[lanes] {
                let at = row as usize;
                self.rounds[at * self.max_rounds + in_flight[at] as usize] = plan.step;
                in_flight[at] += 1;
                hi[at] += max_accept_len;
                if !plan.writes_draft {
                    undrafted[at] += 1;
                }
            }
        }
    }

    pub(crate) fn pop_newest_round(&mut self, row: Row, max_accept_len: i32, writes_draft: bool) {
        let at = row.at();
        self.in_flight[at] -= 1;
        self.hi[at] -= max_accept_len;
        self.undrafted_rounds[at] -= i32::from(!writes_draft);
    }

    /// Whether every lane's row is still at its epoch, and whether one of those that are cannot be resolved: its
    /// oldest round is of another step, or the number of accepted tokens is impossible.
    #[allow(clippy::needless_bitwise_bool, reason = "no branch per lane")]
    pub(crate) fn check_resolve(&self, plan: &Plan, accept_lens: &[i32], shapes: &[Shape]) -> (bool, bool) {
        let len = self.count + 1;
        let (epoch, in_flight) = (&self.epoch[..len], &self.in_flight[..len]);
        let (mut all_stand, mut is_wrong) = (true, false);
        for (lanes, shape) in runs(&plan.shapes) {
            let max_accept_len = shapes[shape].max_accept_len() as i32;
            let rows = plan.rows[lanes.clone()].iter().zip(&plan.epochs[lanes.clone()]);
            for ((&row, &planned), &accept_len) in rows.zip(&accept_lens[lanes]) {
                let at = row as usize;
                let stands = epoch[at] == planned;
                let is_oldest = (in_flight[at] > 0) & (self.rounds[at * self.max_rounds] == plan.step);
                let is_possible = (accept_len > 0) & (accept_len <= max_accept_len);
                all_stand &= stands;
                is_wrong |= stands & !(is_oldest & is_possible);
            }
        }
        (all_stand, is_wrong)
    }

    /// Resolves the oldest round of every lane with `accept_lens[lane]` tokens; 0 for a lane whose row has moved on.
    pub(crate) fn resolve_rounds(&mut self, plan: &Plan, accept_lens: &[i32], shapes: &[Shape]) {
        let len = self.count + 1;
        let (resolved, drafted) = (&mut self.resolved[..len], &mut self.drafted[..len]);
        let (hi, in_flight) = (&mut self.hi[..len], &mut self.in_flight[..len]);
        let (launched, undrafted) = (&mut self.launched_rounds[..len], &mut self.undrafted_rounds[..len]);
        for (lanes, shape) in runs(&plan.shapes) {
            let max_accept_len = shapes[shape].max_accept_len() as i32;
            for (&row, &accept_len) in plan.rows[lanes.clone()].iter().zip(&accept_lens[lanes]) {
                if accept_len == 0 {
                    continue;
                }
                let at = row as usize;
                if in_flight[at] > 1 {
                    let first = at * self.max_rounds;
                    self.rounds.copy_within(first + 1..first + in_flight[at] as usize, first);
                }
                let is_drafted = plan.writes_draft && drafted[at] == resolved[at];
                drafted[at] += if is_drafted { accept_len } else { 0 };
                resolved[at] += accept_len;
                hi[at] += accept_len - max_accept_len;
                in_flight[at] -= 1;
                launched[at] -= 1;
                if !plan.writes_draft {
                    undrafted[at] -= 1;
                }
            }
        }
    }

    /// Marks the lanes of a step as launched. In a decode, one more round of each is written.
    pub(crate) fn launch(&mut self, plan: &Plan) {
        let len = self.count + 1;
        let (launched, last) = (&mut self.launched_rounds[..len], &mut self.last_launched[..len]);
        let num_rounds = i32::from(plan.kind == StepKind::Decode);
        for &row in &plan.rows {
            launched[row as usize] += num_rounds;
            last[row as usize] = plan.step;
        }
        if plan.kind == StepKind::Extend {
            for &row in &plan.rows {
                self.extend_from[row as usize] = 0;
                self.ready[row as usize] = true;
            }
        }
    }

    pub(crate) fn has_unlaunched_extend(&self, row: Row) -> bool {
        self.extend_from[row.at()] != 0
    }

    pub(crate) fn push_extend(&mut self, row: Row, new_len: i32, writes_draft: bool) {
        let at = row.at();
        self.extend_from[at] = self.resolved[at] + 1;
        if writes_draft && self.drafted[at] == self.resolved[at] {
            self.drafted[at] = new_len;
        }
        self.set_resolved(row, new_len);
    }

    pub(crate) fn undo_extend(&mut self, row: Row, start: i32, drafted: i32) {
        self.extend_from[row.at()] = 0;
        self.drafted[row.at()] = drafted;
        self.set_resolved(row, start);
    }

    /// Sets r of a row without rounds in flight.
    pub(crate) fn set_resolved(&mut self, row: Row, len: i32) {
        self.resolved[row.at()] = len;
        self.hi[row.at()] = len;
    }

    /// r before the row's unlaunched extend. Its window is computed from this length, so that a cancel finds the
    /// window held.
    pub(crate) fn settled(&self, row: Row) -> i32 {
        match self.extend_from[row.at()] {
            0 => self.resolved[row.at()],
            from => from - 1,
        }
    }

    /// Tokens of the row that launched forwards write: r without its unlaunched extend, plus the roots of launched
    /// rounds. (An unlaunched extend has no launched round behind it.)
    pub(crate) fn written(&self, row: Row) -> i32 {
        self.settled(row) + self.launched_rounds[row.at()]
    }

    /// Adds everything that decides what the rows will do.
    pub(crate) fn hash(&self, digest: &mut Digest) {
        let lengths = [
            &self.resolved,
            &self.in_flight,
            &self.hi,
            &self.drafted,
            &self.extend_from,
            &self.launched_rounds,
            &self.undrafted_rounds,
            &self.checkpoint,
        ];
        for lengths in lengths {
            digest.ints(lengths);
        }
        for flags in [&self.live, &self.ready, &self.idle] {
            digest.ints(flags);
        }
        for &number in self.epoch.iter().chain(&self.last_launched) {
            digest.word(number);
        }
        for at in 1..=self.count {
            self.rounds_in_flight(Row(at as i32)).iter().for_each(|&step| digest.word(step));
        }
        digest.numbers(self.free().map(|row| row.0));
        for &(fence, row) in &self.fenced {
            digest.word(fence);
            digest.word(row.0 as u64);
        }
    }

    /// A copy with enough spare room for every used row to be given back. Rows that were never handed out are not
    /// touched.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let used = self.fresh.min(self.count + 1);
        let mut copy = Self::new(self.count, self.max_rounds)?;
        copy.take_over(self, used, self.try_clone_lists()?);
        copy.epoch[..used].copy_from_slice(&self.epoch[..used]);
        Ok(copy)
    }

    /// Copies the parts that have no fixed size, for [`restore`](Self::restore).
    pub(crate) fn try_clone_lists(&self) -> Result<Lists> {
        let used = self.fresh.min(self.count + 1);
        let mut lists = Lists {
            returned: memory::with_room(used, "free rows")?,
            fenced: memory::with_room(used, "fenced rows")?,
            tags: zeroed(self.tags.len(), "row tags")?,
        };
        lists.returned.extend_from_slice(&self.returned);
        lists.fenced.extend_from_slice(&self.fenced);
        for (copy, tag) in lists.tags[..used].iter_mut().zip(&self.tags) {
            *copy = tag.as_deref().map(|tag| memory::text(tag, "a tag")).transpose()?;
        }
        Ok(lists)
    }

    /// Takes over another state of the same rows, in place. Each epoch goes on from the greater of both.
    pub(crate) fn restore(&mut self, other: &Self, lists: Lists) {
        let used = self.fresh.max(other.fresh).min(self.count + 1);
        self.take_over(other, used, lists);
        for (now, then) in self.epoch.iter_mut().zip(&other.epoch).skip(1) {
            *now = (*now).max(*then) + 1;
        }
    }

    /// Takes over everything but the epochs, for rows below `used`. Neither state ever handed out a row behind them.
    fn take_over(&mut self, other: &Self, used: usize, lists: Lists) {
        let flags = [(&mut self.live, &other.live), (&mut self.ready, &other.ready), (&mut self.idle, &other.idle)];
        for (now, then) in flags {
            now[..used].copy_from_slice(&then[..used]);
        }
        let lengths = [
            (&mut self.resolved, &other.resolved),
            (&mut self.in_flight, &other.in_flight),
            (&mut self.hi, &other.hi),
            (&mut self.drafted, &other.drafted),
            (&mut self.extend_from, &other.extend_from),
            (&mut self.launched_rounds, &other.launched_rounds),
            (&mut self.undrafted_rounds, &other.undrafted_rounds),
            (&mut self.checkpoint, &other.checkpoint),
        ];
        for (now, then) in lengths {
            now[..used].copy_from_slice(&then[..used]);
        }
        let steps = [(&mut self.last_launched, &other.last_launched), (&mut self.admitted_at, &other.admitted_at)];
        for (now, then) in steps {
            now[..used].copy_from_slice(&then[..used]);
        }
        let rounds = used * self.max_rounds;
        self.rounds[..rounds].copy_from_slice(&other.rounds[..rounds]);
        self.num_idle = other.num_idle;
        self.fresh = other.fresh;
        Lists { returned: self.returned, fenced: self.fenced, tags: self.tags } = lists;
    }
}

/// The parts of a state of the rows that have no fixed size.
#[derive(Debug)]
pub(crate) struct Lists {
    returned: Vec<Row>,
    fenced: Vec<(u64, Row)>,
    tags: Vec<Option<Box<str>>>,
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
