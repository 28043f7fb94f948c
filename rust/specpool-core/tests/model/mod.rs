//! A slow, plain model of the ledger: counts instead of pages, lists instead of arrays, and the refusals of spec 4 in
//! the documented order. It shares no code with the ledger but the reserve, which `tests/sizing.rs` proves.

use specpool_core::{Geometry, Group, Policy, Reserve, Shape};

#[derive(Debug, Clone, Default)]
pub(crate) struct Round {
    pub(crate) step: u64,
    pub(crate) most: i32,
    pub(crate) writes_draft: bool,
    pub(crate) launched: bool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ModelRow {
    pub(crate) live: bool,
    pub(crate) resolved: i32,
    pub(crate) drafted: i32,
    pub(crate) rounds: Vec<Round>,
    pub(crate) pages: Vec<i64>,
    pub(crate) epoch: u64,
    pub(crate) has_root: bool,
    pub(crate) unlaunched_extend_from: Option<i32>,
    pub(crate) last_launched: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Lane {
    pub(crate) row: usize,
    pub(crate) epoch: u64,
    pub(crate) before: ModelRow,
}

#[derive(Debug, Clone)]
pub(crate) struct ModelStep {
    pub(crate) step: u64,
    pub(crate) is_extend: bool,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) launched: bool,
    pub(crate) resolved: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) groups: Vec<Group>,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) reserves: Vec<Vec<Reserve>>,
    pub(crate) context: i32,
    pub(crate) depth: usize,
    pub(crate) rows: Vec<ModelRow>,
    pub(crate) steps: Vec<ModelStep>,
    pub(crate) next_step: u64,
    pub(crate) completed: u64,
    /// (fence, pages per group)
    pub(crate) fenced: Vec<(u64, Vec<i64>)>,
    pub(crate) fenced_rows: Vec<(u64, usize)>,
}

pub(crate) type Outcome = Result<i64, &'static str>;

impl Model {
    pub(crate) fn new(
        groups: &[Group],
        shapes: &[Shape],
        rows: usize,
        context: i32,
        depth: usize,
        policy: Policy,
    ) -> Self {
        let reserves = |group: &Group| {
            let geometry = Geometry::new(group.page_size, group.hosts_drafts, group.layout).unwrap();
            Reserve::for_shapes(geometry, shapes, policy, depth as i64).unwrap()
        };
        let row = ModelRow { pages: vec![0; groups.len()], ..ModelRow::default() };
        Self {
            groups: groups.to_vec(),
            shapes: shapes.to_vec(),
            reserves: groups.iter().map(reserves).collect(),
            context,
            depth,
            rows: vec![row; rows + 1],
            steps: Vec::new(),
            next_step: 1,
            completed: 0,
            fenced: Vec::new(),
            fenced_rows: Vec::new(),
        }
    }

    pub(crate) fn fenced_pages(&self, group: usize) -> i64 {
        self.fenced.iter().map(|(_, pages)| pages[group]).sum()
    }

    pub(crate) fn free_pages(&self, group: usize) -> i64 {
        let held: i64 = self.rows.iter().map(|row| row.pages[group]).sum();
        self.groups[group].num_pages - held - self.fenced_pages(group)
    }

    pub(crate) fn free_rows(&self) -> usize {
        self.rows[1..].iter().filter(|row| !row.live).count() - self.fenced_rows.len()
    }

    pub(crate) fn admitted(&mut self, row: usize) {
        assert!(!self.rows[row].live && self.fenced_rows.iter().all(|&(_, fenced)| fenced != row));
        self.rows[row].live = true;
    }

    fn check_batch(&self, rows: &[usize]) -> Result<(), &'static str> {
        let twice = (1..rows.len()).any(|i| rows[..i].contains(&rows[i]));
        let unknown = rows.iter().any(|&row| row == 0 || row >= self.rows.len() || !self.rows[row].live);
        if rows.is_empty() || twice || unknown { Err("Shape") } else { Ok(()) }
    }

    fn is_stale(&self, step: &ModelStep) -> bool {
        !step.launched && step.lanes.iter().any(|lane| self.rows[lane.row].epoch != lane.epoch)
    }

    fn claim(&mut self, is_extend: bool, rows: &[usize], wanted: &[Vec<i64>]) -> Outcome {
        let takes = |lane: usize, group: usize| (wanted[lane][group] - self.rows[rows[lane]].pages[group]).max(0);
        for group in 0..self.groups.len() {
            if (0..rows.len()).map(|lane| takes(lane, group)).sum::<i64>() > self.free_pages(group) {
                return Err("OutOfPages");
            }
        }
        let lanes = rows.iter().map(|&row| Lane { row, epoch: self.rows[row].epoch, before: self.rows[row].clone() });
        let lanes = lanes.collect();
        self.steps.push(ModelStep { step: self.next_step, is_extend, lanes, launched: false, resolved: is_extend });
        for (lane, &row) in rows.iter().enumerate() {
            for (held, &wanted) in self.rows[row].pages.iter_mut().zip(&wanted[lane]) {
                *held = wanted.max(*held);
            }
        }
        self.next_step += 1;
        Ok(self.next_step as i64 - 1)
    }

    pub(crate) fn prepare_extend(&mut self, rows: &[usize], lens: &[i32], writes_draft: bool) -> Outcome {
        self.check_batch(rows)?;
        if rows.iter().zip(lens).any(|(&row, &len)| len <= self.rows[row].resolved) {
            return Err("Shape");
        }
        let busy = |&row: &usize| !self.rows[row].rounds.is_empty() || self.rows[row].unlaunched_extend_from.is_some();
        if self.steps.iter().any(|step| self.is_stale(step)) || rows.iter().any(busy) {
            return Err("NotReady");
        }
        if lens.iter().any(|&len| len > self.context) {
            return Err("ContextEnd");
        }
        let pages = |&len: &i32| self.groups.iter().map(|g| (i64::from(len) + g.page_size - 1) / g.page_size).collect();
        let wanted: Vec<Vec<i64>> = lens.iter().map(pages).collect();
        let step = self.claim(true, rows, &wanted)?;
        for (&row, &len) in rows.iter().zip(lens) {
            let row = &mut self.rows[row];
            row.unlaunched_extend_from = Some(row.resolved);
            if writes_draft && row.drafted == row.resolved {
                row.drafted = len;
            }
            row.resolved = len;
        }
        Ok(step)
    }

    fn lo_hi(&self, row: usize) -> (i64, i64) {
        let row = &self.rows[row];
        let most: i32 = row.rounds.iter().map(|round| round.most).sum();
        (i64::from(row.resolved) + row.rounds.len() as i64, i64::from(row.resolved + most))
    }

    fn wanted(&self, row: usize, shape: usize) -> Vec<i64> {
        let (lo, hi) = self.lo_hi(row);
        let pages = |(g, group): (usize, &Group)| {
            let need = self.reserves[g][shape].need(lo, hi);
            self.rows[row].pages[g].max((need + group.page_size - 1) / group.page_size)
        };
        self.groups.iter().enumerate().map(pages).collect()
    }

    pub(crate) fn tokens_required(&self, rows: &[usize], shapes: &[usize]) -> Vec<i64> {
        let tokens = |(g, group): (usize, &Group)| {
            let lanes = rows.iter().zip(shapes);
            lanes.map(|(&row, &shape)| (self.wanted(row, shape)[g] - self.rows[row].pages[g]) * group.page_size).sum()
        };
        self.groups.iter().enumerate().map(tokens).collect()
    }

    pub(crate) fn prepare_decode(&mut self, rows: &[usize], shapes: &[usize], writes_draft: bool) -> Outcome {
        self.check_batch(rows)?;
        let any = |refuses: &dyn Fn(&ModelRow) -> bool| rows.iter().any(|&row| refuses(&self.rows[row]));
        if self.steps.iter().any(|step| self.is_stale(step)) || any(&|row| !row.has_root) {
            return Err("NotReady");
        }
        if any(&|row| row.resolved >= self.context) {
            return Err("ContextEnd");
        }
        if any(&|row| row.rounds.len() > self.depth) {
            return Err("Order");
        }
        for (&row, &shape) in rows.iter().zip(shapes) {
            let row = &self.rows[row];
            let lags = row.drafted < row.resolved || row.rounds.iter().any(|round| !round.writes_draft);
            if lags && self.shapes[shape] != Shape::NONE {
                return Err("DraftLag");
            }
        }
        let wanted: Vec<Vec<i64>> = rows.iter().zip(shapes).map(|(&row, &shape)| self.wanted(row, shape)).collect();
        let step = self.claim(false, rows, &wanted)?;
        for (&row, &shape) in rows.iter().zip(shapes) {
            let most = self.shapes[shape].max_accept_len() as i32;
            self.rows[row].rounds.push(Round { step: step as u64, most, writes_draft, launched: false });
        }
        Ok(step)
    }

    pub(crate) fn launch(&mut self, step: u64) -> Outcome {
        let at = self.steps.iter().position(|step| !step.launched).ok_or("Order")?;
        if self.steps[at].step != step {
            return Err("Order");
        }
        if self.is_stale(&self.steps[at]) {
            return Err("StalePlan");
        }
        self.steps[at].launched = true;
        for lane in self.steps[at].lanes.clone() {
            let row = &mut self.rows[lane.row];
            row.last_launched = step;
            if self.steps[at].is_extend {
                row.unlaunched_extend_from = None;
                row.has_root = true;
            } else {
                row.rounds.iter_mut().filter(|round| round.step == step).for_each(|round| round.launched = true);
            }
        }
        Ok(0)
    }

    pub(crate) fn resolve(&mut self, step: u64, accepts: &[i32]) -> Outcome {
        let found = self.steps.iter().position(|known| known.step == step).ok_or("Order")?;
        let known = self.steps[found].clone();
        if !known.launched || known.resolved {
            return Err("Order");
        }
        if accepts.len() != known.lanes.len() {
            return Err("Shape");
        }
        let standing = |lane: &&(usize, &Lane)| self.rows[lane.1.row].epoch == lane.1.epoch;
        let lanes: Vec<(usize, usize)> =
            known.lanes.iter().enumerate().filter(|lane| standing(&lane)).map(|(i, lane)| (i, lane.row)).collect();
        for &(i, row) in &lanes {
            let oldest = &self.rows[row].rounds[0];
            if oldest.step != step {
                return Err("Order");
            }
            if accepts[i] < 1 || accepts[i] > oldest.most {
                return Err("Shape");
            }
        }
        for &(i, row) in &lanes {
            let row = &mut self.rows[row];
            if row.rounds.remove(0).writes_draft && row.drafted == row.resolved {
                row.drafted += accepts[i];
            }
            row.resolved += accepts[i];
        }
        self.steps[found].resolved = true;
        Ok(0)
    }

    pub(crate) fn complete(&mut self, step: u64) -> Outcome {
        let launched = self.steps.iter().any(|known| known.step == step && known.launched);
        if !launched {
            return Err("Order");
        }
        self.completed = self.completed.max(step);
        self.fenced.retain(|&(fence, _)| fence > self.completed);
        self.fenced_rows.retain(|&(fence, _)| fence > self.completed);
        Ok(0)
    }

    pub(crate) fn cancel(&mut self, step: u64) -> Outcome {
        let newest = self.steps.last().filter(|newest| !newest.launched && newest.step == step).ok_or("Order")?.clone();
        self.steps.pop();
        for lane in newest.lanes {
            let row = &mut self.rows[lane.row];
            if row.epoch != lane.epoch {
                continue;
            }
            row.pages = lane.before.pages;
            if newest.is_extend {
                row.resolved = lane.before.resolved;
                row.drafted = lane.before.drafted;
                row.unlaunched_extend_from = None;
            } else {
                row.rounds.pop();
            }
        }
        Ok(0)
    }

    fn give_up(&mut self, row: usize, keep: &[i64]) -> Option<u64> {
        let state = &mut self.rows[row];
        let dropped: Vec<i64> = state.pages.iter().zip(keep).map(|(&held, &kept)| (held - kept).max(0)).collect();
        for (held, dropped) in state.pages.iter_mut().zip(&dropped) {
            *held -= dropped;
        }
        state.epoch += 1;
        state.rounds.clear();
        state.has_root = false;
        state.unlaunched_extend_from = None;
        let fence = Some(state.last_launched).filter(|&step| step > self.completed);
        if let Some(fence) = fence {
            self.fenced.push((fence, dropped));
        }
        fence
    }

    pub(crate) fn trim(&mut self, row: usize, len: i32) -> Outcome {
        self.check_batch(&[row])?;
        if len < 0 {
            return Err("Shape");
        }
        let state = self.rows[row].clone();
        let launched: Vec<&Round> = state.rounds.iter().filter(|round| round.launched).collect();
        let written = state.unlaunched_extend_from.unwrap_or(state.resolved + launched.len() as i32);
        let cut = len.min(written);
        let roots = (cut - state.resolved).max(0) as usize;
        let all_drafted = state.drafted == state.resolved && launched[..roots].iter().all(|round| round.writes_draft);
        let keep: Vec<i64> = self.groups.iter().map(|g| (i64::from(cut) + g.page_size - 1) / g.page_size).collect();
        self.give_up(row, &keep);
        self.rows[row].resolved = cut;
        self.rows[row].drafted = if all_drafted { cut } else { state.drafted.min(cut) };
        Ok(cut.into())
    }

    pub(crate) fn give_back(&mut self, row: usize) -> Outcome {
        self.check_batch(&[row])?;
        let fence = self.give_up(row, &vec![0; self.groups.len()]);
        let epoch = self.rows[row].epoch;
        self.rows[row] = ModelRow { epoch, pages: vec![0; self.groups.len()], ..ModelRow::default() };
        if let Some(fence) = fence {
            self.fenced_rows.push((fence, row));
        }
        Ok(0)
    }
}
