//! What makes a row shorter or gives it back: `trim`, `retract`, `finish`, `abort`. Each bumps the row's epoch.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::{Row, ceil_align};
use crate::page_pool::Verb;

impl Ledger {
    /// Cuts the row to at most `len` tokens and to what launched forwards have written; returns the new
    /// `resolved_len`. The caller feeds the tokens from there: no round before an extend of the row has launched.
    /// Rounds in flight no longer count, the pages behind the new length go back behind the row's fence.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted or `len < 0`.
    pub fn trim(&mut self, row: Row, len: i32) -> Result<i32> {
        let row = self.rows.check_live(row.0)?;
        if len < 0 {
            return Err(Error::Shape(format!(
                "trim of {}: length must be at least 0, got {len}",
                self.rows.describe(row)
            )));
        }
        let at = row.at();
        let cut = len.min(self.rows.written(row));
        let drafted = self.drafted_after_cut(row, cut);
        self.drop_pages(row, cut, Verb::Trim)?;
        self.rows.forget_rounds(row);
        self.rows.set_resolved(row, cut);
        self.rows.drafted[at] = drafted;
        self.rows.epoch[at] += 1;
        self.steps.mark_stale(row.0);
        Ok(cut)
    }

    /// Takes everything from a row whose request will come back later.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted.
    pub fn retract(&mut self, row: Row) -> Result<()> {
        self.give_back(row, Verb::Retract)
    }

    /// Takes everything from a row whose request is done.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted.
    pub fn finish(&mut self, row: Row) -> Result<()> {
        self.give_back(row, Verb::Finish)
    }

    /// Takes everything from a row whose request was given up.
    ///
    /// # Errors
    /// [`Error::Shape`] when the row is not admitted.
    pub fn abort(&mut self, row: Row) -> Result<()> {
        self.give_back(row, Verb::Abort)
    }

    fn give_back(&mut self, row: Row, verb: Verb) -> Result<()> {
        let row = self.rows.check_live(row.0)?;
        self.drop_pages(row, 0, verb)?;
        let fence = self.fence(row);
        self.rows.give_back(row, fence);
        self.steps.mark_stale(row.0);
        Ok(())
    }

    /// The last launched step that the row took part in, while that is not complete.
    fn fence(&self, row: Row) -> Option<u64> {
        Some(self.rows.last_launched[row.at()]).filter(|&step| step > self.steps.completed())
    }

    /// Gives back every page that lies wholly at or beyond `len`, in all groups.
    fn drop_pages(&mut self, row: Row, len: i32, verb: Verb) -> Result<()> {
        let fence = self.fence(row);
        for (at, group) in self.groups.iter().enumerate() {
            let to = ceil_align(len.into(), group.page_size);
            group.check_shrink(row, to).map_err(|record| self.page_error(at, record))?;
        }
        for at in 0..self.groups.len() {
            let to = ceil_align(len.into(), self.groups[at].page_size);
            let shrunk = self.groups[at].shrink(row, to, fence, verb);
            shrunk.map_err(|record| self.page_error(at, record))?;
        }
        Ok(())
    }

    /// Where draft KV ends after a cut: at the cut, if roots of launched rounds count and all that is below is drafted.
    fn drafted_after_cut(&self, row: Row, cut: i32) -> i32 {
        let (resolved, drafted) = (self.rows.resolved[row.at()], self.rows.drafted[row.at()]);
        let counted_roots = (cut - resolved).max(0) as usize;
        let wrote = |&step: &u64| self.steps.get(step).is_some_and(|record| record.plan.writes_draft);
        if drafted == resolved && self.rows.rounds_in_flight(row).iter().take(counted_roots).all(wrote) {
            cut
        } else {
            drafted.min(cut)
        }
    }
}
