//! What a batch must be before anything is claimed for it: its rows, its shapes, and what keeps a row from a round.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::memory::{gathered, zeroed};
use crate::shape::runs;

/// Up to so many rows are compared with each other; a mark for each row of the ledger takes longer.
const FEW: usize = 8;

impl Ledger {
    #[allow(clippy::needless_bitwise_bool, reason = "no branch per lane")]
    pub(super) fn check_rows(&self, rows: &[i32], name: &str, len: usize) -> Result<()> {
        if rows.len() != len {
            return Err(Error::Shape(format!("{} rows, {len} {name}", rows.len())));
        }
        let live = &self.rows.live[..];
        let mut is_wrong = false;
        if rows.len() <= FEW {
            for (lane, &row) in rows.iter().enumerate() {
                let at = (row as u32 as usize).min(live.len() - 1);
                is_wrong |= (at as i32 != row) | !live[at] | rows[..lane].contains(&row);
            }
        } else {
            // One byte for each row: with bits, each lane would wait for the store of the lane before.
            let mut seen = zeroed(live.len(), "the check of a batch")?;
            for &row in rows {
                let at = (row as u32 as usize).min(live.len() - 1);
                is_wrong |= (at as i32 != row) | !live[at] | seen[at];
                seen[at] = true;
            }
        }
        if !is_wrong {
            return Ok(());
        }
        for (lane, &row) in rows.iter().enumerate() {
            self.rows.check_live(row)?;
            if rows[..lane].contains(&row) {
                return Err(Error::Shape(format!("row {row} is named twice")));
            }
        }
        Ok(())
    }

    pub(super) fn check_batch(&self, rows: &[i32], name: &str, len: usize) -> Result<()> {
        if rows.is_empty() || rows.len() > self.max_batch {
            return Err(Error::Shape(format!("a step takes 1..={} rows, got {}", self.max_batch, rows.len())));
        }
        self.check_rows(rows, name, len)
    }

    #[allow(clippy::needless_bitwise_bool, reason = "no branch per lane")]
    pub(super) fn check_shapes(&self, rows: &[i32], shapes: &[i32]) -> Result<()> {
        let known = self.shapes.len();
        if shapes.iter().fold(true, |is_known, &shape| is_known & ((shape as u32 as usize) < known)) {
            return Ok(());
        }
        match rows.iter().zip(shapes).find(|&(_, &shape)| shape as u32 as usize >= known) {
            Some((row, shape)) => Err(Error::Shape(format!("row {row}: shape {shape} is not in 0..{known}"))),
            None => Ok(()),
        }
    }

    pub(super) fn check_no_stale_step(&self) -> Result<()> {
        match self.steps.stale() {
            Some(step) => Err(Error::NotReady(format!(
                "step {step} is stale and can never be launched: cancel it, and what was prepared after it, first"
            ))),
            None => Ok(()),
        }
    }

    pub(super) fn check_context(&self, ended: impl Iterator<Item = usize>) -> Result<()> {
        let ended = gathered(ended, "the rows at the context end")?;
        if ended.is_empty() {
            return Ok(());
        }
        Err(Error::ContextEnd { rows: ended, max_context_len: self.max_context_len.into() })
    }

    /// Checks everything that can keep a row from one more round, except pages.
    #[allow(clippy::needless_bitwise_bool, reason = "no branch per lane")]
    pub(super) fn check_rounds(&self, rows: &[i32], shapes: &[i32]) -> Result<()> {
        let state = &self.rows;
        let len = state.live.len();
        let (ready, resolved, in_flight) = (&state.ready[..len], &state.resolved[..len], &state.in_flight[..len]);
        let (drafted, undrafted) = (&state.drafted[..len], &state.undrafted_rounds[..len]);
        let lags = |at: usize| (drafted[at] < resolved[at]) | (undrafted[at] > 0);
        // One pass without an exit serves the usual case, a batch without errors. Only if it finds one, look for the
        // error that comes first.
        let mut is_late = false;
        for (lanes, shape) in runs(shapes) {
            let drafts = self.draft_kv & self.shapes[shape].drafts();
            for &row in &rows[lanes] {
                let at = row as usize;
                is_late |= !ready[at]
                    | (resolved[at] >= self.max_context_len)
                    | (in_flight[at] > self.overlap_depth)
                    | (drafts & lags(at));
            }
        }
        if !is_late {
            return Ok(());
        }
        if let Some(&row) = rows.iter().find(|&&row| !state.ready[row as usize]) {
            return Err(Error::NotReady(format!(
                "{} has no root: extend it and launch the extend first",
                state.describe(Row(row))
            )));
        }
        let ended = |&&row: &&i32| state.resolved[row as usize] >= self.max_context_len;
        self.check_context(rows.iter().filter(ended).map(|&row| row as usize))?;
        if let Some(&row) = rows.iter().find(|&&row| state.in_flight[row as usize] > self.overlap_depth) {
            return Err(Error::Order(format!(
                "{} has {} rounds in flight, overlap_depth {} allows {}",
                state.describe(Row(row)),
                state.in_flight[row as usize],
                self.overlap_depth,
                self.overlap_depth + 1
            )));
        }
        let lagging = |&(&row, &shape): &(&i32, &i32)| self.shapes[shape as usize].drafts() && lags(row as usize);
        match rows.iter().zip(shapes).find(lagging).filter(|_| self.draft_kv) {
            Some((&row, _)) => {
                let at = row as usize;
                let (drafted, resolved) = (state.drafted[at].into(), state.resolved[at].into());
                Err(Error::DraftLag { row: at, drafted, resolved, undrafted: state.undrafted_rounds[at] })
            }
            None => Ok(()),
        }
    }
}
