//! Where rows and prefixes come from: `admit`, `fork`, `pin_prefix`, `release_prefix`.

use super::states::State;
use super::{Copy, Holding, Model, ModelPrefix, ModelRow, Outcome, Refusal};

impl Model {
    pub(super) fn check_free_row(&self) -> Result<(), Refusal> {
        if self.free_rows.is_empty() { Err(Refusal::OutOfRows { fenced: self.fenced_rows.len() }) } else { Ok(()) }
    }

    pub(super) fn take_row(&mut self) -> usize {
        let row = self.free_rows.pop().unwrap();
        let (epoch, life) = (self.rows[row].epoch, self.rows[row].life + 1);
        let groups = vec![Holding::default(); self.groups.len()];
        self.rows[row] = ModelRow { live: true, epoch, life, groups, ..ModelRow::default() };
        row
    }

    pub(crate) fn admit(&mut self) -> Outcome {
        self.check_free_row()?;
        Ok(self.take_row() as i64)
    }

    /// Slots below this are outside every window of the queries at `len` and later.
    pub(super) fn evict_to(&self, group: usize, len: i32) -> i64 {
        let spec = &self.groups[group];
        spec.window.map_or(0, |window| (i64::from(len) - window + 1).max(0) / spec.page_size * spec.page_size)
    }

    /// Columns of the sink.
    pub(super) fn sinks(&self, group: usize) -> i64 {
        let spec = &self.groups[group];
        (spec.sink + spec.page_size - 1) / spec.page_size
    }

    /// The columns that must be held for anything to follow `len` tokens, besides the sink.
    pub(super) fn window_columns(&self, group: usize, len: i32) -> std::ops::Range<i64> {
        let page_size = self.groups[group].page_size;
        self.evict_to(group, len) / page_size..(i64::from(len) + page_size - 1) / page_size
    }

    /// All columns that must be held for anything to follow `len` tokens.
    pub(super) fn needed_columns(&self, group: usize, len: i32) -> Vec<i64> {
        let window = self.window_columns(group, len);
        (0..window.end).filter(|column| window.contains(column) || *column < self.sinks(group)).collect()
    }

    pub(super) fn holds_window(&self, group: usize, held: &Holding, len: i32) -> bool {
        self.needed_columns(group, len).iter().all(|column| held.table.contains_key(column))
    }

    /// Pages of a copied tail, per group.
    fn tails(&self, len: i32) -> Vec<usize> {
        self.groups.iter().map(|spec| usize::from(i64::from(len) % spec.page_size != 0)).collect()
    }

    /// Makes a new row on `len` tokens of `sources`: whole pages are shared, the tail is copied.
    pub(super) fn take_row_on(&mut self, sources: &[Holding], len: i32, drafted: i32) -> usize {
        let row = self.take_row();
        for (group, source) in sources.iter().enumerate() {
            let page_size = self.groups[group].page_size;
            let (whole, tokens) = (i64::from(len) / page_size, i64::from(len) % page_size);
            let mut held = Holding {
                allocated: whole * page_size,
                protected: whole * page_size,
                evicted: source.evicted.min(self.evict_to(group, len)),
                table: source
                    .table
                    .iter()
                    .filter(|&(&column, _)| column < whole)
                    .map(|(&c, &page)| (c, page))
                    .collect(),
                ..Holding::default()
            };
            self.shared.extend(held.pages().map(|page| (group, page)));
            if tokens > 0 {
                let (src, dst) = (source.table[&whole], self.new_page());
                held.table.insert(whole, dst);
                held.allocated += page_size;
                let life = self.rows[row].life;
                self.pending.push(Copy { group, src, dst, tokens, row, life });
            }
            self.rows[row].groups[group] = held;
        }
        self.rows[row].resolved = len;
        self.rows[row].drafted = drafted.min(len);
        row
    }

    pub(crate) fn admit_on(&mut self, prefix: u64, len: Option<i32>) -> Outcome {
        let source = self.prefixes.get(&prefix).ok_or(Refusal::Shape)?.clone();
        let len = len.unwrap_or(source.len);
        let is_cut = len != 0 && len != source.len;
        if len < 0 || len > source.len || (source.slot != 0 && is_cut) {
            return Err(Refusal::Shape);
        }
        if (0..self.groups.len()).any(|group| !self.holds_window(group, &source.groups[group], len)) {
            return Err(Refusal::NotReady);
        }
        self.check_free_row()?;
        self.check_pages(&self.tails(len), &vec![0; self.groups.len()])?;
        let row = self.take_row_on(&source.groups, len, source.drafted);
        if source.slot != 0 && len > 0 {
            self.rows[row].state = State { slot: source.slot, len };
        }
        Ok(row as i64)
    }

    /// Whether a copy into a page of the row waits, or rides on a step that is not complete.
    pub(super) fn has_unfinished_copy(&self, row: usize) -> bool {
        let riding = self.steps.iter().filter(|step| step.step > self.completed).flat_map(|step| &step.copies);
        riding.chain(&self.pending).any(|copy| copy.row == row && self.is_wanted(copy))
    }

    /// Whether the row that the copy is for still holds the page that it writes.
    pub(super) fn is_wanted(&self, copy: &Copy) -> bool {
        self.rows[copy.row].groups[copy.group].pages().any(|page| page == copy.dst)
    }

    /// Refuses a row of which anything is in flight.
    pub(super) fn check_still(&self, row: usize) -> Result<(), Refusal> {
        let state = &self.rows[row];
        let busy = !state.rounds.is_empty() || state.extend_from.is_some() || state.last_launched > self.completed;
        if busy || self.has_unfinished_copy(row) { Err(Refusal::NotReady) } else { Ok(()) }
    }

    pub(crate) fn fork(&mut self, row: i32) -> Outcome {
        let row = self.live(row)?;
        let state = self.rows[row].clone();
        self.check_still(row)?;
        let len = self.check_fork(row)?;
        self.check_free_row()?;
        self.check_pages(&self.tails(len), &vec![0; self.groups.len()])?;
        let child = self.take_row_on(&state.groups, len, state.drafted);
        self.rows[child].state = state.state;
        for (group, spec) in self.groups.iter().enumerate() {
            let whole = i64::from(len) / spec.page_size * spec.page_size;
            let held = &mut self.rows[row].groups[group];
            held.protected = held.protected.max(whole);
        }
        Ok(child as i64)
    }

    /// The position from which on steps that are not complete write the row.
    pub(super) fn first_written(&self, row: usize) -> i64 {
        let state = &self.rows[row];
        let writes = |step: &super::ModelStep| {
            // A launched step writes whatever became of the plan. An unlaunched step that is stale never writes.
            let its = |lane: &&super::Lane| {
                lane.row == row && lane.life == state.life && (step.launched || lane.epoch == state.epoch)
            };
            step.lanes.iter().find(its).map(|lane| {
                // The oldest round in flight starts at r, a younger one at its lo if an older one fails.
                let oldest = state.rounds.first().map(|round| round.step);
                let is_oldest = oldest == Some(step.step) && lane.epoch == state.epoch;
                i64::from(if is_oldest { lane.lo.max(state.resolved) } else { lane.lo })
            })
        };
        let incomplete = self.steps.iter().filter(|step| step.step > self.completed);
        incomplete.filter_map(writes).min().unwrap_or(i64::MAX)
    }

    pub(crate) fn pin_prefix(&mut self, row: i32, len: i32) -> Outcome {
        self.check_stateless()?;
        let row = self.live(row)?;
        let state = &self.rows[row];
        if len < 1 || len > state.resolved {
            return Err(Refusal::Shape);
        }
        let length = self.groups.iter().map(|spec| i64::from(len) / spec.page_size * spec.page_size).min().unwrap();
        if length == 0 {
            return Err(Refusal::Shape);
        }
        let least = self.first_written(row);
        let columns = |spec: &super::ModelGroup| (length + spec.page_size - 1) / spec.page_size;
        let unwritten = self.groups.iter().any(|spec| columns(spec) * spec.page_size > least);
        let windows = (0..self.groups.len()).all(|group| self.holds_window(group, &state.groups[group], length as i32));
        if unwritten || !windows || self.has_unfinished_copy(row) {
            return Err(Refusal::NotReady);
        }
        let mut groups = Vec::new();
        for group in 0..self.groups.len() {
            let (columns, page_size) = (columns(&self.groups[group]), self.groups[group].page_size);
            let evict_to = self.evict_to(group, length as i32);
            let held = &mut self.rows[row].groups[group];
            held.protected = held.protected.max(columns * page_size);
            let common = Holding {
                allocated: columns * page_size,
                protected: columns * page_size,
                evicted: held.evicted.min(evict_to),
                table: held
                    .table
                    .iter()
                    .filter(|&(&column, _)| column < columns)
                    .map(|(&c, &page)| (c, page))
                    .collect(),
                ..Holding::default()
            };
            self.shared.extend(common.pages().map(|page| (group, page)));
            groups.push(common);
        }
        let drafted = self.rows[row].drafted.min(length as i32);
        self.prefixes.insert(self.next_prefix, ModelPrefix { len: length as i32, drafted, slot: 0, groups });
        self.next_prefix += 1;
        Ok(self.next_prefix as i64 - 1)
    }

    pub(crate) fn release_prefix(&mut self, prefix: u64) -> Outcome {
        self.prefixes.remove(&prefix).map(|_| 0).ok_or(Refusal::Shape)
    }
}
