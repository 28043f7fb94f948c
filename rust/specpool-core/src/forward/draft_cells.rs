//! The cells of a round's drafts, and the reads, copies and masks that follow from them (`layout` says where they
//! lie).

use crate::check::{fit, not_negative, same_len};
use crate::error::{Error, Result};
use crate::forward::slots::{Moves, RowView, TableView};
use crate::layout::{Branches, Layout};
use crate::memory::{filled, with_room, zeroed};

/// Most drafts of one lane and round.
const MAX_CELLS: usize = 1 << 20;

/// The form of the drafts of one round: the same for every lane.
#[derive(Debug, Clone, Copy)]
pub struct Drafts {
    num_steps: usize,
    topk: usize,
    layout: Layout,
    branches: Branches,
}

/// The draft cells of one lane.
#[derive(Debug, Clone, Copy)]
struct Lane {
    root: i64,
    last: i64,   // slots of the prefix in its partial tail page
    stride: i64, // positions from one branch to the next
}

/// What each branch of a draft step reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftReads {
    /// `[n * K + 1]`: where each branch's slots begin in `kv_indices`.
    pub kv_indptr: Vec<i32>,
    /// Slots: the prefix, then `step + 1` drafts.
    pub kv_indices: Vec<i32>,
}

/// A dense two-dimensional array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid<T> {
    /// Columns.
    pub width: usize,
    /// Row after row.
    pub cells: Vec<T>,
}

impl Lane {
    fn position(&self, branch: usize, step: usize) -> i64 {
        self.root + branch as i64 * self.stride + step as i64
    }
}

impl Drafts {
    /// The drafts of a round of `num_steps` steps and `topk` branches.
    ///
    /// # Errors
    /// [`Error::Shape`] when a number is 0 or too large.
    pub fn new(num_steps: usize, topk: usize, page_size: i64, layout: Layout) -> Result<Self> {
        let fields = [("num_steps", num_steps as i64), ("topk", topk as i64), ("page_size", page_size)];
        for (name, value) in fields {
            if !(1..1 << 31).contains(&value) {
                return Err(Error::Shape(format!("{name} must be in [1, 2^31), got {value}")));
            }
        }
        if num_steps * topk > MAX_CELLS {
            return Err(Error::Shape(format!(
                "num_steps * topk must be at most {MAX_CELLS}, got {num_steps} * {topk}"
            )));
        }
        let branches = Branches::new(layout, page_size, num_steps as i64, topk as i64);
        Ok(Self { num_steps, topk, layout, branches })
    }

    fn lane(&self, lane: usize, root: i32) -> Result<Lane> {
        let root = not_negative("roots", lane, root)?;
        // A row has at most 2^31 slots, so a position beyond is useless, and the sums below stay far inside i64.
        if self.branches.end(root) > 1 << 31 {
            return Err(Error::Shape(format!(
                "roots[{lane}] = {root} leaves no room for {} branches of {} drafts below 2^31",
                self.topk, self.num_steps
            )));
        }
        let last = root % self.branches.page_size;
        Ok(Lane { root, last, stride: self.branches.stride(last) })
    }

    fn check_step(&self, step: usize) -> Result<()> {
        if step < self.num_steps {
            return Ok(());
        }
        Err(Error::Shape(format!("step must be in [0, {}), got {step}", self.num_steps)))
    }

    /// `[n, K, S]`: the position in its row that each draft is written to.
    ///
    /// # Errors
    /// [`Error::Shape`] for a negative or too great root.
    pub fn write_positions(&self, roots: &[i32]) -> Result<Vec<i32>> {
        let len = fit("positions", &[roots.len(), self.topk, self.num_steps])?;
        let mut positions = with_room(len, "draft positions")?;
        self.each_cell(roots, |_, position| {
            positions.push(position as i32);
            Ok(())
        })?;
        Ok(positions)
    }

    /// `[n, K, S]`: the slot that each draft is written to.
    ///
    /// # Errors
    /// [`Error::Shape`] when lengths differ, or a position is outside the row or has no page.
    pub fn write_slots(&self, table: &TableView, rows: &[i32], roots: &[i32]) -> Result<Vec<i64>> {
        same_len("roots", roots.len(), rows.len())?;
        let mut slots = with_room(fit("slots", &[roots.len(), self.topk, self.num_steps])?, "draft slots")?;
        self.each_cell(roots, |lane, position| {
            slots.push(table.row(lane, rows[lane])?.mapped_slot(position)?);
            Ok(())
        })?;
        Ok(slots)
    }

    fn each_cell(&self, roots: &[i32], mut visit: impl FnMut(usize, i64) -> Result<()>) -> Result<()> {
        for (lane, &root) in roots.iter().enumerate() {
            let cells = self.lane(lane, root)?;
            for branch in 0..self.topk {
                for step in 0..self.num_steps {
                    visit(lane, cells.position(branch, step))?;
                }
            }
        }
        Ok(())
    }

    /// Elements that `kv_indices` must have room for in each step of the round: `K * (sum(roots) + n*S)` (sgl#27338).
    ///
    /// # Errors
    /// [`Error::Shape`] when that does not fit into int32.
    pub fn read_capacity(&self, roots: &[i32]) -> Result<usize> {
        let prefixes: i64 = roots.iter().map(|&root| i64::from(root.max(0))).sum();
        fit("kv_indices", &[self.topk, prefixes as usize + roots.len() * self.num_steps])
    }

    /// The slots that each branch reads at `step`: its prefix, then `step + 1` drafts.
    ///
    /// With `ancestors` (`[n, K, width]`, `width > step`, see [`advance_ancestors`]) the drafts are the true
    /// ancestors. Without, each branch reads its own cells, as upstream.
    ///
    /// # Errors
    /// [`Error::Shape`] when lengths differ, an ancestor is no branch, or a position is outside its row.
    pub fn read_indices(
        &self,
        table: &TableView,
        rows: &[i32],
        roots: &[i32],
        step: usize,
        ancestors: Option<&[i32]>,
    ) -> Result<DraftReads> {
        self.check_step(step)?;
        same_len("roots", roots.len(), rows.len())?;
        self.read_capacity(roots)?;
        let width = self.ancestor_width(ancestors, rows.len(), step)?;
        let prefixes: usize = roots.iter().map(|&root| root.max(0) as usize).sum();
        let mut reads = DraftReads {
            kv_indptr: with_room(rows.len() * self.topk + 1, "kv_indptr")?,
            kv_indices: with_room(self.topk * (prefixes + rows.len() * (step + 1)), "kv_indices")?,
        };
        reads.kv_indptr.push(0);
        for (lane, (&row, &root)) in rows.iter().zip(roots).enumerate() {
            let (row, cells) = (table.row(lane, row)?, self.lane(lane, root)?);
            let prefix = reads.kv_indices.len();
            let prefix = prefix..prefix + cells.root as usize;
            for branch in 0..self.topk {
                if branch == 0 {
                    row.each_run(0..cells.root, |run| reads.kv_indices.extend(run.map(|slot| slot as i32)))?;
                } else {
                    reads.kv_indices.extend_from_within(prefix.clone());
                }
                for j in 0..=step {
                    let holder = self.holder(ancestors, lane, branch, width, j)?;
                    reads.kv_indices.push(row.slot(cells.position(holder, j))? as i32);
                }
                reads.kv_indptr.push(reads.kv_indices.len() as i32);
            }
        }
        Ok(reads)
    }

    fn ancestor_width(&self, ancestors: Option<&[i32]>, lanes: usize, step: usize) -> Result<usize> {
        let Some(ancestors) = ancestors else { return Ok(0) };
        let width = ancestors.len().checked_div(lanes * self.topk).unwrap_or(step + 1);
        same_len("ancestors", ancestors.len(), lanes * self.topk * width)?;
        if width <= step {
            return Err(Error::Shape(format!(
                "ancestors must have more than {step} columns at that step, got {width}"
            )));
        }
        Ok(width)
    }

    /// The branch whose cell of step `j` holds the draft that `branch` reads.
    fn holder(&self, ancestors: Option<&[i32]>, lane: usize, branch: usize, width: usize, j: usize) -> Result<usize> {
        let Some(ancestors) = ancestors else { return Ok(branch) };
        let holder = ancestors[(lane * self.topk + branch) * width + j];
        if holder < 0 || holder as usize >= self.topk {
            return Err(Error::Shape(format!(
                "ancestors[{lane}, {branch}, {j}] must be in [0, {}), got {holder}",
                self.topk
            )));
        }
        Ok(holder as usize)
    }

    /// The cells of a lane that the K queries of a draft step see, and the positions of those cells.
    ///
    /// Column `c` of both arrays is the cell at position `root + c`. `own_mask` is `[n, K, width]`. `own_positions` is
    /// `[n, width]` and holds the position in the *sequence* of the cell's token. Cells that hold no draft are masked.
    ///
    /// # Errors
    /// As [`Drafts::read_indices`].
    pub fn visibility(&self, roots: &[i32], step: usize, ancestors: Option<&[i32]>) -> Result<(Grid<bool>, Grid<i32>)> {
        self.check_step(step)?;
        let ancestor_width = self.ancestor_width(ancestors, roots.len(), step)?;
        let mut lanes = with_room(roots.len(), "lanes")?;
        for (lane, &root) in roots.iter().enumerate() {
            lanes.push(self.lane(lane, root)?);
        }
        let widest = lanes.iter().map(|cells| cells.position(self.topk - 1, step) - cells.root + 1).max();
        let width = widest.unwrap_or(0) as usize;
        let mut mask = zeroed(fit("own_mask", &[roots.len(), self.topk, width])?, "own_mask")?;
        let mut positions = with_room(roots.len() * width, "own_positions")?;
        for (lane, cells) in lanes.iter().enumerate() {
            for branch in 0..self.topk {
                let seen = &mut mask[(lane * self.topk + branch) * width..][..width];
                for j in 0..=step {
                    let holder = self.holder(ancestors, lane, branch, ancestor_width, j)?;
                    seen[(cells.position(holder, j) - cells.root) as usize] = true;
                }
            }
            positions.extend((0..width as i64).map(|c| (cells.root + c % cells.stride) as i32));
        }
        Ok((Grid { width: self.topk * width, cells: mask }, Grid { width, cells: positions }))
    }

    /// The pages that each branch reads, for readers of whole pages: `[n * K, width]`. Of these, branch b of a lane
    /// reads the first `root + step + 1` slots: first the prefix's pages below `base`, then the branch's own pages.
    /// Unused columns are 0.
    ///
    /// # Errors
    /// [`Error::Shape`] when the layout is dense and K > 1, lengths differ, or a position is outside its row.
    pub fn branch_pages(&self, table: &TableView, rows: &[i32], roots: &[i32], step: usize) -> Result<Grid<i32>> {
        self.check_step(step)?;
        self.need_holey("branch_pages")?;
        same_len("roots", roots.len(), rows.len())?;
        let p = self.branches.page_size;
        let mut width = 0;
        for (lane, &root) in roots.iter().enumerate() {
            let cells = self.lane(lane, root)?;
            width = width.max(((cells.root + step as i64) / p + 1) as usize);
        }
        let mut pages = zeroed(fit("branch_pages", &[rows.len(), self.topk, width])?, "branch_pages")?;
        for (lane, (&row, &root)) in rows.iter().zip(roots).enumerate() {
            let (row, cells) = (table.row(lane, row)?, self.lane(lane, root)?);
            let below = (cells.root / p) as usize; // pages of the prefix without its partial tail
            let num_columns = ((cells.last + step as i64) / p + 1) as usize;
            for branch in 0..self.topk {
                let line = &mut pages[(lane * self.topk + branch) * width..][..below + num_columns];
                let shift = branch as i64 * cells.stride / p;
                for (column, page) in line.iter_mut().enumerate() {
                    *page = row.page(column as i64 + if column < below { 0 } else { shift })? as i32;
                }
            }
        }
        Ok(Grid { width, cells: pages })
    }

    fn need_holey(&self, what: &str) -> Result<()> {
        if self.layout == Layout::Holey || self.topk == 1 {
            return Ok(());
        }
        Err(Error::Shape(format!("{what} needs the holey layout where topk > 1, got dense with topk {}", self.topk)))
    }

    /// Copies of the prefix's partial tail page into the holes before the drafts of branches `1..K`. Make them once
    /// per round.
    ///
    /// # Errors
    /// [`Error::Shape`] when lengths differ, or a position is outside its row or has no page.
    pub fn prefix_tail_moves(&self, table: &TableView, rows: &[i32], roots: &[i32]) -> Result<Moves> {
        self.need_holey("duplicate_prefix_tail")?;
        self.moves(table, rows, roots, |_, row, cells, moves| {
            for branch in 1..self.topk as i64 {
                moves.make_room(cells.last as usize)?;
                for position in cells.root - cells.last..cells.root {
                    moves.src.push(row.mapped_slot(position)?);
                    moves.dst.push(row.mapped_slot(position + branch * cells.stride)?);
                }
            }
            Ok(())
        })
    }

    /// Copies of the drafts `0..step` of each branch's parent over the branch's own, to be made after the selection of
    /// `step`. A reader of whole pages then sees true ancestors. `branch_parents` is `[n, K]`. Branches may swap.
    ///
    /// # Errors
    /// [`Error::Shape`] when lengths differ, a parent is no branch, or a position is outside its row or has no page.
    pub fn branch_copy_moves(
        &self,
        table: &TableView,
        rows: &[i32],
        roots: &[i32],
        step: usize,
        branch_parents: &[i32],
    ) -> Result<Moves> {
        self.check_step(step)?;
        same_len("branch_parents", branch_parents.len(), rows.len() * self.topk)?;
        self.moves(table, rows, roots, |lane, row, cells, moves| {
            for branch in 0..self.topk {
                let parent = self.holder(Some(branch_parents), lane, branch, 1, 0)?;
                if parent == branch {
                    continue;
                }
                moves.make_room(step)?;
                for j in 0..step {
                    moves.src.push(row.mapped_slot(cells.position(parent, j))?);
                    moves.dst.push(row.mapped_slot(cells.position(branch, j))?);
                }
            }
            Ok(())
        })
    }

    /// Collects moves lane by lane. Padded lanes have none.
    fn moves(
        &self,
        table: &TableView,
        rows: &[i32],
        roots: &[i32],
        mut visit: impl FnMut(usize, &RowView, &Lane, &mut Moves) -> Result<()>,
    ) -> Result<Moves> {
        same_len("roots", roots.len(), rows.len())?;
        if table.page_size() != self.branches.page_size {
            let (table, drafts) = (table.page_size(), self.branches.page_size);
            return Err(Error::Shape(format!("page_size of the table is {table}, of the drafts {drafts}")));
        }
        let mut moves = Moves::default();
        for (lane, (&row, &root)) in rows.iter().zip(roots).enumerate() {
            let (row, cells) = (table.row(lane, row)?, self.lane(lane, root)?);
            if !row.is_padding() {
                visit(lane, &row, &cells, &mut moves)?;
            }
        }
        Ok(moves)
    }
}

/// Advances `ancestors` `[n, K, width]` to `step`, in place: each branch takes its parent's line and adds itself.
///
/// Entry `[b, k, j]` is the branch whose cell of step j holds the j-th draft on branch k's path.
///
/// # Errors
/// [`Error::Shape`] when lengths differ, the step is outside, or a parent is no branch; nothing is written then.
pub fn advance_ancestors(ancestors: &mut [i32], branch_parents: &[i32], topk: usize, step: usize) -> Result<()> {
    let width = ancestors.len().checked_div(branch_parents.len()).unwrap_or(step.saturating_add(1));
    same_len("ancestors", ancestors.len(), branch_parents.len() * width)?;
    if topk == 0 || !branch_parents.len().is_multiple_of(topk) || step >= width {
        return Err(Error::Shape(format!(
            "ancestors [n, {topk}, {width}] has no column for step {step}, or branch_parents is not [n, {topk}]"
        )));
    }
    if let Some(at) = branch_parents.iter().position(|&parent| parent < 0 || parent as usize >= topk) {
        let (lane, branch, parent) = (at / topk, at % topk, branch_parents[at]);
        return Err(Error::Shape(format!("branch_parents[{lane}, {branch}] must be in [0, {topk}), got {parent}")));
    }
    if branch_parents.is_empty() {
        return Ok(()); // Without a lane the other sizes of the arrays do not matter.
    }
    let mut before = filled(0, topk * width, "the ancestors of a lane")?;
    for (lane, parents) in branch_parents.chunks_exact(topk).enumerate() {
        let lines = &mut ancestors[lane * topk * width..][..topk * width];
        before.copy_from_slice(lines);
        for (branch, &parent) in parents.iter().enumerate() {
            let line = &mut lines[branch * width..][..width];
            line[..step].copy_from_slice(&before[parent as usize * width..][..step]);
            line[step] = branch as i32;
        }
    }
    Ok(())
}
