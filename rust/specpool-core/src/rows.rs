//! The rows: per-row lengths as a struct of arrays, `[num_rows + 1]` each, and who holds a row (spec 4).
//!
//! Of one row: `0 <= resolved <= resolved + in_flight <= allocated`. A row that is not live reads 0 everywhere but in
//! `epoch`, which never goes back.

use crate::error::{Error, Result};
use crate::ids::{Row, zeroed};

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
    /// r + sum of their largest accept lengths.
    pub(crate) hi: Vec<i32>,
    /// Draft KV is valid below this.
    pub(crate) drafted: Vec<i32>,
    /// Bumped by every release.
    pub(crate) epoch: Vec<u64>,
    /// An extend has launched since the row was admitted or cut: its next root is known.
    pub(crate) ready: Vec<bool>,
    /// r before the row's unlaunched extend, plus one; 0 when it has none.
    extend_from: Vec<i32>,
    /// Rounds of `in_flight` that are launched: their roots are written.
    pub(crate) launched_rounds: Vec<i32>,
    /// Rounds of `in_flight` that write no draft KV.
    pub(crate) undrafted_rounds: Vec<i32>,
    /// The last launched step that the row took part in, 0 if none.
    pub(crate) last_launched: Vec<u64>,
    /// `[num_rows + 1, max_rounds]`: the steps of the rounds in flight, oldest first.
    rounds: Vec<u64>,
    pub(crate) tags: Vec<Option<Box<str>>>,
    /// Rows that can be handed out; the last one goes first.
    free: Vec<Row>,
    /// (step, row): free once that step is complete.
    fenced: Vec<(u64, Row)>,
}

impl Rows {
    pub(crate) fn new(num_rows: usize, max_rounds: usize) -> Result<Self> {
        let len = num_rows + 1;
        let lengths = || zeroed::<i32>(len, "row lengths");
        let num_rounds = len
            .checked_mul(max_rounds)
            .ok_or_else(|| Error::Config(format!("{num_rows} rows of {max_rounds} rounds are too many")))?;
        let mut free = zeroed::<i32>(num_rows, "free rows")?.into_iter().map(Row).collect::<Vec<_>>();
        for (at, row) in free.iter_mut().enumerate() {
            *row = Row((num_rows - at) as i32);
        }
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
            rounds: zeroed(num_rounds, "rounds in flight")?,
            tags: zeroed(len, "row tags")?,
            free,
            fenced: Vec::new(),
        })
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.count
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn num_fenced(&self) -> usize {
        self.fenced.len()
    }

    pub(crate) fn free(&self) -> &[Row] {
        &self.free
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

    /// `"row 3"`, or `"row 3 (tag)"`.
    pub(crate) fn describe(&self, row: Row) -> String {
        match self.tags.get(row.at()) {
            Some(Some(tag)) => format!("row {} ({tag})", row.0),
            _ => format!("row {}", row.0),
        }
    }

    pub(crate) fn admit(&mut self, tag: Option<&str>) -> Option<Row> {
        let row = self.free.pop()?;
        self.live[row.at()] = true;
        self.tags[row.at()] = tag.map(Into::into);
        Some(row)
    }

    /// Makes the row free, or fenced until the step `fence` is complete. Its tag stays for error messages.
    pub(crate) fn give_back(&mut self, row: Row, fence: Option<u64>) {
        self.forget_rounds(row);
        let at = row.at();
        self.live[at] = false;
        self.epoch[at] += 1;
        self.resolved[at] = 0;
        self.hi[at] = 0;
        self.drafted[at] = 0;
        self.last_launched[at] = 0;
        match fence {
            Some(step) => self.fenced.push((step, row)),
            None => self.free.push(row),
        }
    }

    pub(crate) fn complete(&mut self, completed: u64) {
        let Self { fenced, free, .. } = self;
        fenced.retain(|&(fence, row)| {
            if fence <= completed {
                free.push(row);
            }
            fence > completed
        });
    }

    /// The row stays but what it had in flight does not count any more, and it needs a new root.
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
        &self.rounds[row.at() * self.max_rounds..][..self.in_flight[row.at()] as usize]
    }

    pub(crate) fn push_round(&mut self, row: Row, step: u64, max_accept_len: i32, writes_draft: bool) {
        let at = row.at();
        self.rounds[at * self.max_rounds + self.in_flight[at] as usize] = step;
        self.in_flight[at] += 1;
        self.hi[at] += max_accept_len;
        self.undrafted_rounds[at] += i32::from(!writes_draft);
    }

    pub(crate) fn pop_newest_round(&mut self, row: Row, max_accept_len: i32, writes_draft: bool) {
        let at = row.at();
        self.in_flight[at] -= 1;
        self.hi[at] -= max_accept_len;
        self.undrafted_rounds[at] -= i32::from(!writes_draft);
    }

    pub(crate) fn resolve_oldest_round(&mut self, row: Row, accept_len: i32, max_accept_len: i32, writes_draft: bool) {
        let at = row.at();
        let oldest = at * self.max_rounds;
        self.rounds.copy_within(oldest + 1..oldest + self.in_flight[at] as usize, oldest);
        if writes_draft && self.drafted[at] == self.resolved[at] {
            self.drafted[at] += accept_len;
        }
        self.resolved[at] += accept_len;
        self.hi[at] += accept_len - max_accept_len;
        self.in_flight[at] -= 1;
        self.launched_rounds[at] -= 1;
        self.undrafted_rounds[at] -= i32::from(!writes_draft);
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

    pub(crate) fn launch_extend(&mut self, row: Row) {
        self.extend_from[row.at()] = 0;
        self.ready[row.at()] = true;
    }

    /// Sets r of a row without rounds in flight.
    pub(crate) fn set_resolved(&mut self, row: Row, len: i32) {
        self.resolved[row.at()] = len;
        self.hi[row.at()] = len;
    }

    /// Tokens of the row that launched forwards write: r without its unlaunched extend, plus the roots of launched
    /// rounds (an unlaunched extend has no launched round behind it).
    pub(crate) fn written(&self, row: Row) -> i32 {
        match self.extend_from[row.at()] {
            0 => self.resolved[row.at()] + self.launched_rounds[row.at()],
            from => from - 1,
        }
    }
}
