//! Claims: `prepare_extend`, `tokens_required`, `prepare_decode`.

use super::{Lane, Model, ModelStep, Outcome, PageId, Refusal, Round};

impl Model {
    /// r without the extend that a cancel may undo. The window of this length must stay.
    fn settled(&self, row: usize) -> i32 {
        self.rows[row].extend_from.unwrap_or(self.rows[row].resolved)
    }

    /// Columns of the row's table that its next preparation evicts, per group.
    fn evictions(&self, group: usize, row: usize) -> Vec<(i64, PageId)> {
        let state = &self.rows[row];
        let edge = self.evict_to(group, self.settled(row)) / self.groups[group].page_size;
        let sinks = self.sinks(group);
        state.groups[group].table.range(sinks..edge.max(sinks)).map(|(&column, &page)| (column, page)).collect()
    }

    /// Whether the checkpoint keeps the page at that column.
    fn checkpoint_wants(&self, group: usize, row: usize, column: i64) -> bool {
        self.rows[row].checkpoint.is_some_and(|len| self.window_columns(group, len).contains(&column))
    }

    /// Pages that the eviction of the batch frees at once.
    fn gain(&self, group: usize, rows: &[usize]) -> usize {
        let dropped: std::collections::BTreeSet<PageId> = (rows.iter())
            .flat_map(|&row| self.evictions(group, row).into_iter().map(move |cell| (row, cell)))
            .filter(|&(row, (column, _))| !self.checkpoint_wants(group, row, column))
            .map(|(_, (_, page))| page)
            .collect();
        let leaves = |row: usize, page: PageId| {
            let evicted = self.evictions(group, row);
            evicted.iter().any(|&(column, other)| other == page && !self.checkpoint_wants(group, row, column))
        };
        let free = |page: &&PageId| {
            let droppers: Vec<usize> = rows.iter().copied().filter(|&row| leaves(row, **page)).collect();
            self.would_be_free(group, **page, &droppers)
        };
        dropped.iter().filter(free).count()
    }

    fn evict(&mut self, group: usize, row: usize) {
        for (column, page) in self.evictions(group, row) {
            self.rows[row].groups[group].table.remove(&column);
            if self.checkpoint_wants(group, row, column) {
                self.rows[row].groups[group].kept.insert(column, page);
            } else {
                self.leave_fence(group, page, row);
            }
        }
        let to = self.evict_to(group, self.settled(row));
        let held = &mut self.rows[row].groups[group];
        held.evicted = held.evicted.max(to);
    }

    /// Claims `wanted[lane][group]` slots for each row, and makes a step: all or nothing.
    fn claim(&mut self, is_extend: bool, rows: &[usize], shapes: &[i32], wanted: &[Vec<i64>]) -> Outcome {
        let pages = |lane: usize, group: usize| {
            let page_size = self.groups[group].page_size;
            let first = self.rows[rows[lane]].groups[group].allocated / page_size;
            first..((wanted[lane][group] + page_size - 1) / page_size).max(first)
        };
        let need =
            |group| (0..rows.len()).map(|lane| pages(lane, group)).map(|columns| columns.end - columns.start).sum();
        let need: Vec<i64> = (0..self.groups.len()).map(need).collect();
        let gain: Vec<usize> = (0..self.groups.len()).map(|group| self.gain(group, rows)).collect();
        self.check_pages(&need.iter().map(|&pages| pages as usize).collect::<Vec<_>>(), &gain)?;
        let folds = self.plan_folds(is_extend, rows, shapes, wanted)?;
        let lane = |(at, &row): (usize, &usize)| {
            let state = &self.rows[row];
            let (lo, hi) = self.roots(row);
            Lane {
                row,
                epoch: state.epoch,
                life: state.life,
                shape: shapes.get(at).map_or(0, |&shape| shape as usize),
                lo,
                hi,
                start: state.resolved,
                drafted: state.drafted,
                idle: state.idle,
                allocated: state.groups.iter().map(|held| held.allocated).collect(),
                fold: folds[at],
            }
        };
        let mut lanes: Vec<Lane> = rows.iter().enumerate().map(lane).collect();
        let taken: Vec<Vec<_>> =
            (0..rows.len()).map(|at| (0..self.groups.len()).map(|g| pages(at, g)).collect()).collect();
        self.claim_folds(&mut lanes);
        for (&row, taken) in rows.iter().zip(taken) {
            for (group, columns) in taken.into_iter().enumerate() {
                self.evict(group, row);
                for column in columns {
                    let page = self.new_page();
                    let page_size = self.groups[group].page_size;
                    let held = &mut self.rows[row].groups[group];
                    held.table.insert(column, page);
                    held.allocated = (column + 1) * page_size;
                }
            }
            self.rows[row].idle = false;
        }
        self.drop_lost_copies();
        let (step, copies) = (self.next_step, std::mem::take(&mut self.pending));
        let (launched, abandoned) = (false, false);
        self.steps.push(ModelStep { step, is_extend, lanes, copies, launched, resolved: is_extend, abandoned });
        self.next_step += 1;
        Ok(step as i64)
    }

    pub(crate) fn prepare_extend_keeping(
        &mut self,
        rows: &[i32],
        lens: &[i32],
        keep: &[i32],
        writes_draft: bool,
    ) -> Outcome {
        if !keep.is_empty() && self.states.is_none() {
            return Err(Refusal::Config);
        }
        let is_ascending = keep.windows(2).all(|pair| pair[0] < pair[1]);
        if !is_ascending || keep.iter().any(|&lane| lane < 0 || lane as usize >= rows.len()) {
            return Err(Refusal::Shape);
        }
        let step = self.prepare_extend(rows, lens, writes_draft)?;
        let Some(mut record) = self.steps.pop() else { return Ok(step) };
        for &lane in keep {
            self.leave_mark(&mut record.lanes[lane as usize]);
        }
        self.steps.push(record);
        Ok(step)
    }

    pub(crate) fn prepare_extend(&mut self, rows: &[i32], lens: &[i32], writes_draft: bool) -> Outcome {
        let rows = self.check_batch(rows, lens.len())?;
        let grows = |(&row, &len): (&usize, &i32)| {
            let resolved = self.rows[row].resolved;
            len > resolved && i64::from(len) - i64::from(resolved) <= i64::from(self.max_chunk)
        };
        if !rows.iter().zip(lens).all(grows) {
            return Err(Refusal::Shape);
        }
        let busy = |&row: &usize| !self.rows[row].rounds.is_empty() || self.rows[row].extend_from.is_some();
        if self.any_stale() || rows.iter().any(busy) {
            return Err(Refusal::NotReady);
        }
        let past = |&(_, &len): &(&usize, &i32)| len > self.max_context_len;
        let ended: Vec<usize> = rows.iter().zip(lens).filter(past).map(|(&row, _)| row).collect();
        if !ended.is_empty() {
            return Err(Refusal::ContextEnd(ended));
        }
        let wanted: Vec<Vec<i64>> = lens.iter().map(|&len| vec![len.into(); self.groups.len()]).collect();
        let step = self.claim(true, &rows, &[], &wanted)?;
        for (&row, &len) in rows.iter().zip(lens) {
            let row = &mut self.rows[row];
            row.extend_from = Some(row.resolved);
            if writes_draft && row.drafted == row.resolved {
                row.drafted = len;
            }
            row.resolved = len;
        }
        Ok(step)
    }

    /// Slots that the row must hold for a round of that shape, per group.
    fn wanted(&self, row: usize, shape: usize) -> Vec<i64> {
        let (lo, hi) = self.roots(row);
        self.groups.iter().map(|group| group.reserves[shape].need(lo.into(), hi.into())).collect()
    }

    /// `[lo, hi]`: where the root of the row's next round can be.
    fn roots(&self, row: usize) -> (i32, i32) {
        let row = &self.rows[row];
        let most: i32 = row.rounds.iter().map(|round| round.most).sum();
        (row.resolved + row.rounds.len() as i32, row.resolved + most)
    }

    pub(crate) fn prepare_decode(&mut self, rows: &[i32], shapes: &[i32], writes_draft: bool) -> Outcome {
        let rows = self.check_batch(rows, shapes.len())?;
        if shapes.iter().any(|&shape| shape < 0 || shape as usize >= self.shapes.len()) {
            return Err(Refusal::Shape);
        }
        if self.any_stale() || rows.iter().any(|&row| !self.rows[row].has_root) {
            return Err(Refusal::NotReady);
        }
        let ended: Vec<usize> =
            rows.iter().copied().filter(|&row| self.rows[row].resolved >= self.max_context_len).collect();
        if !ended.is_empty() {
            return Err(Refusal::ContextEnd(ended));
        }
        if rows.iter().any(|&row| self.rows[row].rounds.len() > self.depth) {
            return Err(Refusal::Order);
        }
        for (&row, &shape) in rows.iter().zip(shapes) {
            let state = &self.rows[row];
            let undrafted = state.rounds.iter().filter(|round| !round.writes_draft).count() as i32;
            let lags = state.drafted < state.resolved || undrafted > 0;
            if self.draft_kv && lags && self.shapes[shape as usize].1 {
                let (drafted, resolved) = (state.drafted.into(), state.resolved.into());
                return Err(Refusal::DraftLag { row, drafted, resolved, undrafted });
            }
        }
        let lanes = rows.iter().zip(shapes);
        let wanted: Vec<Vec<i64>> = lanes.map(|(&row, &shape)| self.wanted(row, shape as usize)).collect();
        let step = self.claim(false, &rows, shapes, &wanted)?;
        for (&row, &shape) in rows.iter().zip(shapes) {
            let most = self.shapes[shape as usize].0;
            self.rows[row].rounds.push(Round { step: step as u64, most, writes_draft, launched: false });
        }
        Ok(step)
    }
}
