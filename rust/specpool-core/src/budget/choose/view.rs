//! `View`: the inputs of a choice, candidate by candidate, and what picks of candidates cost.
#![allow(clippy::inline_always, reason = "a call for each row takes longer than its sums")]

use pulp::Arch;

use super::{Costs, Rows};
use crate::error::Result;
use crate::memory::filled;

/// Sums that are added side by side, so that no addition waits for another.
const LANES: usize = 4;

/// Sums over the rows, of a token of each.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    /// Rounds by what the row's time is worth.
    pub(super) worth: f64,
    pub(super) rounds: f64,
    /// Seconds of the lanes.
    pub(super) lanes: f64,
    pub(super) nodes: f64,
}

/// A candidate's column of lane seconds and nodes.
pub(super) enum Column<'a> {
    /// All rows have the same shape.
    Alike(usize),
    /// `[B]`: lane seconds and nodes of each row.
    Each(&'a [f64], &'a [f64]),
}

/// What is counted of picks.
#[derive(Clone)]
pub(super) struct Tally {
    sums: Sums,
    /// Rows of each shape, and the tokens of their contexts.
    num_lanes: [i32; 64],
    context: [f64; 64],
}

/// A candidate of a row with a target.
pub(super) struct TargetCell {
    /// By which the row is judged to be in time.
    pub(super) tokens: f64,
    /// As in `View`.
    pub(super) rounds: f64,
    /// Seconds of the row's lane and nodes.
    pub(super) own: f64,
}

/// What picks give to rows with targets.
pub(super) struct Outcome {
    /// Of the round.
    pub(super) seconds: f64,
    /// Of a token of each row, summed.
    pub(super) cost: f64,
    /// The worth of the tokens of rows that have no target, or meet it in this round, over `cost`.
    pub(super) goodput: f64,
    /// Rows that miss their target in this round.
    pub(super) num_missed: usize,
}

/// The inputs, candidate by candidate, so that a pass runs over neighbours in memory.
pub(super) struct View<'a> {
    pub(super) rows: &'a Rows<'a>,
    pub(super) costs: &'a Costs<'a>,
    pub(super) num_rows: usize,
    /// `[B]` and `[S]`, as in the inputs; zeros if they have none.
    pub(super) context: Vec<f64>,
    pub(super) per_token: Vec<f64>,
    /// `[C, B]`: rounds that the row's part of the batch's tokens takes: what it gives over the expected tokens.
    pub(super) rounds: Vec<f64>,
    /// `[C, B]`: seconds and nodes, as `lane` and `nodes` tell; empty if each candidate is one shape for all rows.
    lane_cells: Vec<f64>,
    node_cells: Vec<f64>,
    /// `[C, B]`: pages over free pages, summed over the groups; empty = memory does not bind.
    pub(super) share: Vec<f64>,
    /// `[C]`: the shapes that a candidate is for any row, as bits.
    pub(super) used: Vec<u64>,
    /// The rows with a target.
    pub(super) targets: Vec<usize>,
    /// Of the tokens of all rows, summed.
    worth: f64,
}

impl<'a> View<'a> {
    pub(super) fn new(rows: &'a Rows<'a>, costs: &'a Costs<'a>) -> Result<Self> {
        let (num_rows, num_candidates, num_shapes) = (rows.worth.len(), rows.num_candidates, costs.lane.len());
        let cells = num_rows * num_candidates;
        let context = or_zeros(rows.context, num_rows, "context")?;
        let per_token = or_zeros(costs.per_token, num_shapes, "per_token")?;
        let mut used = filled(0_u64, num_candidates, "shapes")?;
        let is_alike = rows.shapes.get(num_candidates..).is_none_or(|rest| *rest == rows.shapes[..rest.len()]);
        let some = if is_alike { num_candidates.min(rows.shapes.len()) } else { rows.shapes.len() };
        for shapes in rows.shapes[..some].chunks_exact(num_candidates) {
            for (used, &shape) in used.iter_mut().zip(shapes) {
                *used |= 1 << shape;
            }
        }
        let (arch, mut rounds) = (Arch::new(), filled(0.0, cells, "rounds")?);
        if num_rows > 0 {
            for (at, rounds) in rounds.chunks_exact_mut(num_rows).enumerate() {
                let cells = rows.tokens.chunks_exact(num_shapes).zip(rows.shapes.chunks_exact(num_candidates));
                for (rounds, (tokens, shapes)) in rounds.iter_mut().zip(cells) {
                    *rounds = tokens[shapes[at] as usize];
                }
                // By itself, so that several are divided at once.
                arch.dispatch(|| {
                    for (rounds, gives) in rounds.iter_mut().zip(rows.gives) {
                        *rounds = gives / *rounds;
                    }
                });
            }
        }
        let targets = (0..num_rows).filter(|&row| rows.due[2 * row + 1] > 0.0).collect();
        let worth = rows.worth.iter().zip(rows.gives).map(|(worth, gives)| worth * gives).sum();
        let (lane_cells, node_cells, share) = (Vec::new(), Vec::new(), Vec::new());
        let mut view = Self {
            rows,
            costs,
            num_rows,
            context,
            per_token,
            rounds,
            lane_cells,
            node_cells,
            share,
            used,
            targets,
            worth,
        };
        if view.used.iter().any(|used| used.count_ones() > 1) {
            let (mut lanes, mut nodes) = (filled(0.0, cells, "seconds")?, filled(0.0, cells, "nodes")?);
            for row in 0..num_rows {
                for at in 0..num_candidates {
                    let shape = view.shape(row, at);
                    lanes[at * num_rows + row] = view.lane(row, shape);
                    nodes[at * num_rows + row] = view.nodes(row, shape);
                }
            }
            (view.lane_cells, view.node_cells) = (lanes, nodes);
        }
        Ok(view)
    }

    /// The seconds that a row with this shape adds to a round.
    #[inline(always)]
    pub(super) fn lane(&self, row: usize, shape: usize) -> f64 {
        self.costs.lane[shape] + self.per_token[shape] * self.context[row]
    }

    /// The nodes of a row with this shape, less those that are free because of its context.
    #[inline(always)]
    pub(super) fn nodes(&self, row: usize, shape: usize) -> f64 {
        self.costs.nodes[shape] - self.costs.ridge_per_token * self.context[row]
    }

    /// Adds a row that takes so many rounds for a token with this shape; rounds below 0 take it out again.
    #[inline(always)]
    pub(super) fn add(&self, sums: &mut Sums, row: usize, shape: usize, rounds: f64) {
        sums.worth += self.rows.worth[row] * rounds;
        sums.rounds += rounds;
        sums.lanes += rounds * self.lane(row, shape);
        sums.nodes += rounds * self.nodes(row, shape);
    }

    #[inline]
    pub(super) fn shape(&self, row: usize, pick: usize) -> usize {
        self.rows.shapes[row * self.rows.num_candidates + pick] as usize
    }

    pub(super) fn column(&self, at: usize) -> Column<'_> {
        if self.used[at].is_power_of_two() {
            return Column::Alike(self.used[at].trailing_zeros() as usize);
        }
        let cells = at * self.num_rows..(at + 1) * self.num_rows;
        Column::Each(&self.lane_cells[cells.clone()], &self.node_cells[cells])
    }

    /// The tokens by which a row is judged to be in time.
    fn hoped(&self, row: usize, pick: usize) -> f64 {
        let tokens = if self.rows.hoped.is_empty() { self.rows.tokens } else { self.rows.hoped };
        tokens[row * self.costs.lane.len() + self.shape(row, pick)]
    }

    /// The base and the charges of these shapes.
    pub(super) fn fixed(&self, used: u64) -> f64 {
        let charges = self.costs.charge.iter().enumerate();
        self.costs.base + charges.map(|(shape, &it)| if used >> shape & 1 == 1 { it } else { 0.0 }).sum::<f64>()
    }

    /// The nodes that each row has for nothing beside those of its context: its share of the ridge.
    pub(super) fn given(&self) -> f64 {
        self.costs.ridge / self.num_rows as f64
    }

    pub(super) fn shapes_of(&self, picks: &[i32]) -> u64 {
        picks.iter().enumerate().fold(0, |used, (row, &pick)| used | 1 << self.shape(row, pick as usize))
    }

    pub(super) fn sums(&self, picks: &[i32]) -> Sums {
        let mut sums = Sums::default();
        for (row, &pick) in picks.iter().enumerate() {
            let rounds = self.rounds[pick as usize * self.num_rows + row];
            self.add(&mut sums, row, self.shape(row, pick as usize), rounds);
        }
        sums
    }

    /// The sums if all rows have a candidate that is this shape for each of them.
    pub(super) fn sums_alike(&self, at: usize, shape: usize) -> Sums {
        let column = &self.rounds[at * self.num_rows..(at + 1) * self.num_rows];
        let [rounds, worth, held] = sums_of(column, self.rows.worth, &self.context);
        let lanes = rounds * self.costs.lane[shape] + held * self.per_token[shape];
        let nodes = rounds * self.costs.nodes[shape] - held * self.costs.ridge_per_token;
        Sums { worth, rounds, lanes, nodes }
    }

    /// Nodes beyond the ridge, on average over the rounds.
    pub(super) fn nodes_over(&self, sums: &Sums) -> f64 {
        sums.nodes - sums.rounds * self.given()
    }

    /// The seconds of a token of each row, summed, if the fixed seconds of a round are so many.
    pub(super) fn total(&self, sums: &Sums, fixed: f64) -> f64 {
        sums.worth * fixed / self.num_rows as f64 + sums.lanes + self.costs.slope * self.nodes_over(sums).max(0.0)
    }

    /// The pages that a candidate needs in each group beyond the row's first; empty = memory does not bind.
    pub(super) fn pages(&self, row: usize, pick: i32) -> &[i32] {
        if self.rows.pages.is_empty() {
            return &[];
        }
        let num_groups = self.rows.free.len();
        let cell = (row * self.rows.num_candidates + pick as usize) * num_groups;
        &self.rows.pages[cell..cell + num_groups]
    }

    /// The pages that are left in each group; below 0 = the picks do not fit.
    pub(super) fn left(&self, picks: &[i32]) -> Vec<i64> {
        let num_groups = self.rows.free.len();
        let needs = |group: usize| -> i64 {
            let rows = self.rows.pages.chunks_exact(self.rows.num_candidates * num_groups).zip(picks);
            rows.map(|(cells, &pick)| i64::from(cells[pick as usize * num_groups + group])).sum()
        };
        self.rows.free.iter().enumerate().map(|(group, &free)| free - needs(group)).collect()
    }

    /// Whether the pages are there.
    pub(super) fn fits(&self, picks: &[i32]) -> bool {
        self.rows.pages.is_empty() || self.left(picks).iter().all(|&left| left >= 0)
    }

    /// The tokens that a row's round of so many seconds must give.
    pub(super) fn due(&self, row: usize, seconds: f64) -> f64 {
        self.rows.due[2 * row] + self.rows.due[2 * row + 1] * seconds
    }

    /// Whether a row, which must have a target, misses it in a round of so many seconds.
    fn misses(&self, row: usize, pick: i32, seconds: f64) -> bool {
        self.hoped(row, pick as usize) < self.due(row, seconds)
    }

    /// `[T, C]`: what the search looks at of the rows with a target, side by side; a node costs `node`.
    pub(super) fn target_cells(&self, node: f64) -> Vec<TargetCell> {
        let cell = |row: usize, at: usize| {
            let shape = self.shape(row, at);
            TargetCell {
                tokens: self.hoped(row, at),
                rounds: self.rounds[at * self.num_rows + row],
                own: self.lane(row, shape) + node * (self.nodes(row, shape) - self.given()),
            }
        };
        let rows = self.targets.iter();
        rows.flat_map(|&row| (0..self.rows.num_candidates).map(move |at| cell(row, at))).collect()
    }

    /// What is counted of picks with these sums, so that a row may change its pick in a few steps.
    pub(super) fn tally(&self, picks: &[i32], sums: Sums) -> Tally {
        let mut tally = Tally { sums, num_lanes: [0; 64], context: [0.0; 64] };
        for (row, &pick) in picks.iter().enumerate() {
            let shape = self.shape(row, pick as usize);
            tally.num_lanes[shape] += 1;
            tally.context[shape] += self.context[row];
        }
        tally
    }

    /// Moves a row of the tally from one pick to another.
    pub(super) fn change(&self, tally: &mut Tally, row: usize, from: i32, to: i32) {
        for (pick, sign) in [(from, -1), (to, 1)] {
            let shape = self.shape(row, pick as usize);
            let rounds = self.rounds[pick as usize * self.num_rows + row];
            self.add(&mut tally.sums, row, shape, f64::from(sign) * rounds);
            tally.num_lanes[shape] += sign;
            tally.context[shape] += f64::from(sign) * self.context[row];
        }
    }

    /// The shapes of a tally, and the seconds of its round.
    fn round_of(&self, tally: &Tally) -> (u64, f64) {
        let (mut used, mut seconds, mut nodes) = (0, 0.0, 0.0);
        for (shape, &lanes) in tally.num_lanes[..self.costs.lane.len()].iter().enumerate() {
            used |= u64::from(lanes > 0) << shape;
            seconds += f64::from(lanes) * self.costs.lane[shape] + tally.context[shape] * self.per_token[shape];
            nodes += f64::from(lanes) * self.costs.nodes[shape] - tally.context[shape] * self.costs.ridge_per_token;
        }
        (used, self.fixed(used) + seconds + self.costs.slope * (nodes - self.costs.ridge).max(0.0))
    }

    /// What these picks, of which this is the tally, give to rows with targets.
    pub(super) fn outcome(&self, picks: &[i32], tally: &Tally) -> Outcome {
        let (used, seconds) = self.round_of(tally);
        let (mut worth, mut num_missed) = (self.worth, 0);
        for &row in &self.targets {
            if self.misses(row, picks[row], seconds) {
                worth -= self.rows.worth[row] * self.rows.gives[row];
                num_missed += 1;
            }
        }
        let cost = self.total(&tally.sums, self.fixed(used));
        Outcome { seconds, cost, goodput: worth.max(0.0) / cost, num_missed }
    }

    /// Takes out the rows whose target no candidate meets, even if the round is as short as one can be. They miss
    /// it whatever is chosen.
    pub(super) fn drop_hopeless(&mut self) {
        let num_candidates = self.rows.num_candidates;
        let least = |of: &dyn Fn(usize) -> f64, row: usize| {
            (0..num_candidates).map(|at| of(self.shape(row, at))).fold(f64::INFINITY, f64::min)
        };
        let lanes: f64 = (0..self.num_rows).map(|row| least(&|shape| self.lane(row, shape), row)).sum();
        let nodes: f64 = (0..self.num_rows).map(|row| least(&|shape| self.nodes(row, shape), row)).sum();
        let seconds = self.costs.base + lanes + self.costs.slope * (nodes - self.costs.ridge).max(0.0);
        let mut targets = std::mem::take(&mut self.targets);
        targets.retain(|&row| {
            let hopes = (0..num_candidates).any(|at| !self.misses(row, at as i32, seconds));
            if !hopes {
                self.worth -= self.rows.worth[row] * self.rows.gives[row];
            }
            hopes
        });
        self.targets = targets;
    }
}

/// A copy of the values, or so many zeros if there are none.
fn or_zeros(values: &[f64], len: usize, what: &'static str) -> Result<Vec<f64>> {
    let mut all = filled(0.0, len, what)?;
    if !values.is_empty() {
        all.copy_from_slice(values);
    }
    Ok(all)
}

/// The sums of the values, of these times `left`, and times `right`.
fn sums_of(values: &[f64], left: &[f64], right: &[f64]) -> [f64; 3] {
    let [mut all, mut by_left, mut by_right] = [[0.0; LANES]; 3];
    let (values, last) = values.as_chunks::<LANES>();
    let ((left, last_left), (right, last_right)) = (left.as_chunks::<LANES>(), right.as_chunks::<LANES>());
    for ((values, left), right) in values.iter().zip(left).zip(right) {
        for lane in 0..LANES {
            all[lane] += values[lane];
            by_left[lane] += values[lane] * left[lane];
            by_right[lane] += values[lane] * right[lane];
        }
    }
    for ((value, left), right) in last.iter().zip(last_left).zip(last_right) {
        all[0] += value;
        by_left[0] += value * left;
        by_right[0] += value * right;
    }
    [all, by_left, by_right].map(|lanes| lanes.iter().sum())
}
