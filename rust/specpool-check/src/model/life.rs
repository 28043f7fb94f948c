//! The life of a prepared step: `launch`, `resolve`, `complete`, `cancel`, `abandon`.

use std::collections::BTreeSet;

use super::{Model, Outcome, Refusal};

impl Model {
    fn position(&self, step: u64) -> Result<usize, Refusal> {
        self.steps.iter().position(|known| known.step == step).ok_or(Refusal::Order)
    }

    pub(crate) fn launch(&mut self, step: u64) -> Outcome {
        let at = self.steps.iter().position(|known| !known.launched).ok_or(Refusal::Order)?;
        if self.steps[at].step != step {
            return Err(Refusal::Order);
        }
        let moved = self.steps[at].lanes.iter().find(|lane| self.rows[lane.row].epoch != lane.epoch);
        if let Some(lane) = moved {
            return Err(Refusal::StalePlan { row: lane.row });
        }
        self.steps[at].launched = true;
        let record = self.steps[at].clone();
        for lane in &record.lanes {
            let row = &mut self.rows[lane.row];
            row.last_launched = step;
            if record.is_extend {
                row.extend_from = None;
                row.has_root = true;
            } else {
                row.rounds.iter_mut().filter(|round| round.step == step).for_each(|round| round.launched = true);
            }
        }
        self.launch_folds(&record);
        for copy in &record.copies {
            if self.page_fencing {
                self.fences.insert((copy.group, copy.src), step);
                self.fences.insert((copy.group, copy.dst), step);
            }
            let row = &mut self.rows[copy.row];
            if row.live && row.life == copy.life {
                row.last_launched = step;
            }
        }
        Ok(0)
    }

    pub(crate) fn resolve(&mut self, step: u64, accepts: &[i32]) -> Outcome {
        let at = self.position(step)?;
        let record = self.steps[at].clone();
        if !record.launched || record.resolved {
            return Err(Refusal::Order);
        }
        if accepts.len() != record.lanes.len() {
            return Err(Refusal::Shape);
        }
        let standing = record.lanes.iter().zip(accepts).filter(|(lane, _)| self.rows[lane.row].epoch == lane.epoch);
        let standing: Vec<(usize, i32)> = standing.map(|(lane, &accept)| (lane.row, accept)).collect();
        for &(row, accept) in &standing {
            let oldest = &self.rows[row].rounds[0];
            if oldest.step != step {
                return Err(Refusal::Order);
            }
            if accept < 1 || accept > oldest.most {
                return Err(Refusal::Shape);
            }
        }
        for &(row, accept) in &standing {
            let row = &mut self.rows[row];
            if row.rounds.remove(0).writes_draft && row.drafted == row.resolved {
                row.drafted += accept;
            }
            row.resolved += accept;
        }
        self.steps[at].resolved = true;
        self.forget_steps();
        Ok(0)
    }

    /// Removes the oldest steps that are resolved and complete.
    fn forget_steps(&mut self) {
        let completed = self.completed;
        let is_over = |step: &super::ModelStep| step.resolved && step.step <= completed;
        let first = self.steps.iter().position(|step| !is_over(step)).unwrap_or(self.steps.len());
        self.steps.drain(..first);
    }

    pub(crate) fn complete(&mut self, step: u64) -> Outcome {
        let is_over = step >= 1 && step <= self.completed && !self.cancelled.contains(&step);
        let launched = self.steps.iter().any(|known| known.step == step && known.launched);
        if !launched && !is_over {
            return Err(Refusal::Order);
        }
        self.completed = self.completed.max(step);
        let completed = self.completed;
        self.fences.retain(|_, &mut fence| fence > completed);
        self.slot_fences.retain(|_, &mut fence| fence > completed);
        let (free, fenced) = self.fenced_rows.iter().partition(|(fence, _)| *fence <= completed);
        self.fenced_rows = fenced;
        let free: Vec<(u64, usize)> = free;
        self.free_rows.extend(free.into_iter().map(|(_, row)| row));
        self.forget_steps();
        Ok(0)
    }

    pub(crate) fn cancel(&mut self, step: u64) -> Outcome {
        if self.steps.last().is_none_or(|newest| newest.launched || newest.step != step) {
            return Err(Refusal::Order);
        }
        let newest = self.steps.pop().unwrap();
        for lane in &newest.lanes {
            if self.rows[lane.row].epoch != lane.epoch {
                continue;
            }
            self.undo_fold(lane);
            let row = &mut self.rows[lane.row];
            for (group, held) in row.groups.iter_mut().enumerate() {
                let (page_size, end) = (self.groups[group].page_size, lane.allocated[group]);
                held.table.retain(|&column, _| column * page_size < end);
                held.allocated = end;
            }
            row.idle = lane.idle;
            if newest.is_extend {
                (row.resolved, row.drafted, row.extend_from) = (lane.start, lane.drafted, None);
            } else {
                row.rounds.pop();
            }
        }
        let waiting = std::mem::take(&mut self.pending);
        self.pending = newest.copies.into_iter().chain(waiting).collect();
        self.drop_lost_copies();
        self.cancelled.insert(step);
        Ok(0)
    }

    /// Drops pending copies whose row no longer holds the destination.
    pub(super) fn drop_lost_copies(&mut self) {
        let waiting = std::mem::take(&mut self.pending);
        self.pending = waiting.into_iter().filter(|copy| self.is_wanted(copy)).collect();
    }

    pub(crate) fn abandon(&mut self, step: u64) -> Outcome {
        let at = self.position(step)?;
        let record = self.steps[at].clone();
        if !record.launched || record.abandoned || step <= self.completed {
            return Err(Refusal::Order);
        }
        let lanes = record.lanes.iter().map(|lane| (lane.row, lane.life));
        let victims: BTreeSet<(usize, u64)> =
            lanes.chain(record.copies.iter().map(|copy| (copy.row, copy.life))).collect();
        for (row, life) in victims {
            if self.rows[row].live && self.rows[row].life == life {
                self.give_back(row as i32)?;
            }
        }
        self.drop_spoiled(&record);
        self.steps[at].abandoned = true;
        self.steps[at].resolved = true;
        Ok(0)
    }
}

impl Model {
    pub(crate) fn take_delta(&mut self, step: u64) -> Outcome {
        self.position(step)?;
        self.takes.insert(step);
        Ok(0)
    }

    pub(crate) fn ack_delta(&mut self, step: u64) -> Outcome {
        if !self.takes.contains(&step) {
            return Err(Refusal::Order);
        }
        self.takes.retain(|&taken| taken > step);
        Ok(0)
    }
}
