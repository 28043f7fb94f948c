//! The verbs that make a row shorter or give it back: `trim`, `end_turn`, `retract`, `finish`, `abort`.

use super::{Holding, Model, ModelRow, Outcome, Refusal};

impl Model {
    /// Tokens of the row that launched forwards write.
    fn written(&self, row: usize) -> i32 {
        let state = &self.rows[row];
        let launched = state.rounds.iter().filter(|round| round.launched).count() as i32;
        state.extend_from.unwrap_or(state.resolved + launched)
    }

    fn can_cut(&self, row: usize, len: i32) -> bool {
        (0..self.groups.len()).all(|group| {
            let held = &self.rows[row].groups[group];
            let on_edge = i64::from(len) % self.groups[group].page_size == 0;
            let holds_all = self.needed_columns(group, len).iter().all(|&column| held.has_column(column));
            holds_all && (i64::from(len) >= held.protected || on_edge)
        }) && self.has_state_below(row, len)
    }

    /// Cuts the row to `len` tokens in one group. A checkpoint that does not stay is forgotten.
    fn cut(&mut self, row: usize, group: usize, len: i32, checkpoint_stays: bool) {
        let window = self.window_columns(group, len);
        let columns = window.end;
        let (page_size, evict_to) = (self.groups[group].page_size, self.evict_to(group, len));
        let mut held = std::mem::take(&mut self.rows[row].groups[group]);
        let dropped = held.table.split_off(&columns);
        for &page in dropped.values() {
            self.leave_fence(group, page, row);
        }
        if held.evicted > evict_to && window.is_empty() {
            held.evicted = evict_to;
        }
        if held.evicted > evict_to {
            let gone = held.kept.split_off(&columns);
            for &page in gone.values() {
                self.leave_fence(group, page, row);
            }
            let first = held.kept.keys().next().map_or(evict_to, |column| column * page_size);
            held.table.append(&mut held.kept);
            held.evicted = evict_to.min(first);
        } else if !checkpoint_stays {
            for &page in std::mem::take(&mut held.kept).values() {
                self.leave_fence(group, page, row);
            }
        }
        held.allocated = columns * page_size;
        held.protected = held.protected.min(held.allocated);
        self.rows[row].groups[group] = held;
    }

    /// What every release does to the row's steps.
    fn forget_rounds(&mut self, row: usize) {
        let state = &mut self.rows[row];
        state.epoch += 1;
        state.rounds.clear();
        state.has_root = false;
        state.extend_from = None;
    }

    fn release_tail(&mut self, row: usize, len: i32, ends_turn: bool) -> i32 {
        let longest = len.min(self.written(row));
        let cut = (0..=longest).rev().find(|&len| self.can_cut(row, len)).unwrap_or(0);
        let state = &self.rows[row];
        let roots = (cut - state.resolved).max(0) as usize;
        let drafted_roots = state.rounds[..roots].iter().all(|round| round.writes_draft);
        let all_drafted = state.drafted == state.resolved && drafted_roots;
        let drafted = if all_drafted { cut } else { state.drafted.min(cut) };
        let root_stands = state.has_root && !ends_turn && cut == state.resolved && state.rounds.is_empty();
        let stays = !ends_turn && state.checkpoint.is_some_and(|checkpoint| cut >= checkpoint);
        for group in 0..self.groups.len() {
            self.cut(row, group, cut, stays);
        }
        self.cut_states(row, cut);
        self.forget_rounds(row);
        let state = &mut self.rows[row];
        (state.resolved, state.drafted, state.has_root) = (cut, drafted, root_stands);
        state.idle = state.idle || ends_turn;
        if !stays {
            let checkpoint = ends_turn.then(|| self.keep_state(row));
            self.rows[row].checkpoint = checkpoint;
        }
        self.drop_lost_copies();
        cut
    }

    pub(crate) fn trim(&mut self, row: i32, len: i32) -> Outcome {
        let row = self.live(row)?;
        if len < 0 {
            return Err(Refusal::Shape);
        }
        Ok(self.release_tail(row, len, false).into())
    }

    pub(crate) fn end_turn(&mut self, row: i32, len: i32) -> Outcome {
        let needs_sessions = self.states.is_some() || self.groups.iter().any(|group| group.window.is_some());
        if needs_sessions && !self.sessions {
            return Err(Refusal::Config);
        }
        let row = self.live(row)?;
        if len < 0 {
            return Err(Refusal::Shape);
        }
        Ok(self.release_tail(row, len, true).into())
    }

    /// `retract`, `finish` or `abort`.
    pub(crate) fn give_back(&mut self, row: i32) -> Outcome {
        let row = self.live(row)?;
        for group in 0..self.groups.len() {
            for page in std::mem::take(&mut self.rows[row].groups[group]).pages() {
                self.leave_fence(group, page, row);
            }
        }
        self.drop_states(row);
        self.forget_rounds(row);
        let (epoch, life, fence) = (self.rows[row].epoch, self.rows[row].life, self.rows[row].last_launched);
        let groups = vec![Holding::default(); self.groups.len()];
        self.rows[row] = ModelRow { epoch, life, groups, ..ModelRow::default() };
        if fence > self.completed {
            self.fenced_rows.push((fence, row));
        } else {
            self.free_rows.push(row);
        }
        self.drop_lost_copies();
        Ok(0)
    }
}
