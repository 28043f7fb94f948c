//! Whether a row is quiet: nothing of it in flight, and no page copy into it; and the copies that wait.

use super::Ledger;
use crate::error::{Error, Result};
use crate::ids::Row;
use crate::state::page_copy::TailCopy;
use crate::verb::Verb;

impl Ledger {
    /// Checks that nothing moves in the row: everything below `resolved_len` is written and stays as it is.
    ///
    /// # Errors
    /// [`Error::Shape`] (unknown row), [`Error::NotReady`] (a round or an extend of it is in flight; its last launched
    /// step is not complete; a page copy into it is not finished).
    pub fn check_quiet(&self, row: Row) -> Result<()> {
        let row = self.rows.check_live(row.0)?;
        self.check_still(row, "check_quiet")?;
        self.check_no_copy_into(row, "check_quiet")
    }

    /// Refuses a row with a step in flight.
    pub(super) fn check_still(&self, row: Row, verb: &str) -> Result<()> {
        let at = row.at();
        let refuse = |why: String| Err(Error::NotReady(format!("{verb} of {}: {why}", self.rows.describe(row))));
        if self.rows.in_flight[at] > 0 || self.rows.has_unlaunched_extend(row) {
            return refuse(format!("{} rounds or an extend of it are in flight", self.rows.in_flight[at]));
        }
        let (last, completed) = (self.rows.last_launched[at], self.steps.completed());
        if last > completed {
            return refuse(format!("its last launched step {last} is not complete, {completed} is"));
        }
        Ok(())
    }

    /// The page copies that wait, ride on a step, or are unfinished on the device, with the step that a waiting one may
    /// ride on at the earliest. Only those whose row still holds the page.
    pub(super) fn unfinished_copies(&self) -> impl Iterator<Item = (&TailCopy, u64)> {
        let waiting = self.copies.iter().map(|copy| (copy, self.steps.next()));
        let riding = self.steps.incomplete();
        let riding = riding.flat_map(|record| record.before.copies.iter().map(|copy| (copy, record.plan.step)));
        waiting.chain(riding).filter(|&(copy, step)| {
            let group = &self.groups[copy.group()];
            // Without fences the row may have dropped the page since, and taken it again.
            let is_the_one = group.pool.record(copy.dst()).is_some_and(|record| record.birth_step <= step);
            is_the_one && group.holds(copy.row, copy.column, copy.dst())
        })
    }

    /// Refuses a row with an unfinished page copy into it.
    pub(super) fn check_no_copy_into(&self, row: Row, verb: &str) -> Result<()> {
        match self.unfinished_copies().find(|(copy, _)| copy.row == row) {
            Some((copy, _)) => Err(Error::NotReady(format!(
                "{verb} of {}: the copy of page {} to its page {} is not finished",
                self.rows.describe(row),
                copy.copy.src,
                copy.copy.dst
            ))),
            None => Ok(()),
        }
    }

    /// Puts the copies of a cancelled step back in front of all other waiting copies.
    pub(super) fn put_copies_back(&mut self, riding: Vec<TailCopy>) {
        if self.copies.is_empty() {
            self.copies = riding;
            return;
        }
        let len = riding.len();
        self.copies.extend(riding);
        self.copies.rotate_right(len);
    }

    /// Drops the waiting copies whose row no longer holds the page that they write.
    pub(super) fn drop_orphan_copies(&mut self, verb: Verb) {
        if self.copies.is_empty() {
            return;
        }
        let completed = self.steps.completed();
        let Self { copies, groups, .. } = self;
        copies.retain(|copy| {
            let group = &mut groups[copy.group()];
            let stays = group.holds(copy.row, copy.column, copy.dst());
            if !stays {
                for page in copy.pages() {
                    group.pool.unhold(page, 0, completed, verb);
                }
            }
            stays
        });
    }
}
