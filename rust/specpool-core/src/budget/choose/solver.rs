//! `Solver`: looks for the picks that cost the least; docs/budget.md has its rules and why they hold.

use super::view::{Column, Sums, View};
use super::{Costs, Rows, check};
use crate::error::Result;
use crate::memory::filled;

/// Halvings of an interval of prices of pages, and doublings to find one.
const HALVINGS: usize = 12;
const DOUBLINGS: usize = 24;
/// Prices of nodes that are tried at most; about five are enough.
const PRICES: usize = 16;
/// Choices in turn with the charges of the shapes that the choice before used.
const CHARGE_ROUNDS: usize = 3;
/// Rents that are tried for rows without a target, each the one before over `RENT_STEP`.
const NUM_RENTS: usize = 10;
const RENT_STEP: f64 = 1.8;
/// Times that the rows that miss their targets are looked for in rounds of the seconds found before.
const NUM_SERVES: usize = 3;

/// The cost of some picks by the price of nodes: `seconds + price * over`.
#[derive(Clone, Copy)]
struct Line {
    seconds: f64,
    over: f64,
}

impl Line {
    fn at(self, price: f64) -> f64 {
        self.seconds + price * self.over
    }
}

pub(super) struct Solver<'a> {
    pub(super) view: View<'a>,
    /// The shapes that may be picked, as bits.
    allowed: u64,
    picks: Vec<i32>,
    /// Of the picks: their shapes as bits, and their sums.
    used: u64,
    sums: Sums,
    /// `[B]`: of the picks, the cost of a token, and the pick itself as a number of the same width.
    cost: Vec<f64>,
    index: Vec<f64>,
    pub(super) best: Vec<i32>,
    best_used: u64,
    pub(super) best_cost: f64,
    /// No choice costs less.
    pub(super) least: f64,
    node: f64,
    page: f64,
}

impl<'a> Solver<'a> {
    pub(super) fn new(rows: &'a Rows<'a>, costs: &'a Costs<'a>) -> Result<Self> {
        check(rows, costs)?;
        let num_rows = rows.worth.len();
        Ok(Self {
            view: View::new(rows, costs)?,
            allowed: u64::MAX,
            picks: filled(0, num_rows, "picks")?,
            used: 0,
            sums: Sums::default(),
            cost: filled(0.0, num_rows, "costs")?,
            index: filled(0.0, num_rows, "picks")?,
            best: filled(0, num_rows, "picks")?,
            best_used: 0,
            best_cost: f64::INFINITY,
            least: 0.0,
            node: 0.0,
            page: 0.0,
        })
    }

    /// Takes these picks as they are.
    fn put(&mut self, picks: Vec<i32>) {
        self.picks = picks;
        (self.used, self.sums) = (self.view.shapes_of(&self.picks), self.view.sums(&self.picks));
    }

    /// Keeps the picks if they fit and cost less than the best so far.
    fn keep(&mut self) {
        let cost = self.view.total(&self.sums, self.view.fixed(self.used));
        if cost < self.best_cost && self.view.fits(&self.picks) {
            (self.best_cost, self.best_used) = (cost, self.used);
            self.best.copy_from_slice(&self.picks);
        }
    }

    /// Each row's cheapest candidate, if the fixed seconds of a round are so many; of equals, the first.
    fn pick(&mut self, fixed: f64, node: f64, page: f64) {
        let (view, num_rows) = (&self.view, self.view.num_rows);
        let (rent, given) = (fixed / num_rows as f64, view.given());
        self.cost.fill(f64::INFINITY);
        self.index.fill(0.0);
        for at in 0..view.rows.num_candidates {
            let cells = at * num_rows..(at + 1) * num_rows;
            let inputs = view.rounds[cells].iter().zip(view.rows.worth);
            let outputs = self.cost.iter_mut().zip(&mut self.index);
            let this = at as f64;
            let keep = |(least, index): (&mut f64, &mut f64), cost: f64| {
                let less = cost < *least;
                *least = if less { cost } else { *least };
                *index = if less { this } else { *index };
            };
            let is_open = page == 0.0 && view.used[at] & !self.allowed == 0;
            match view.column(at) {
                Column::Alike(shape) if is_open => {
                    let own = view.costs.lane[shape] + node * (view.costs.nodes[shape] - given);
                    for (output, (&rounds, &worth)) in outputs.zip(inputs) {
                        keep(output, (worth * rent + own) * rounds);
                    }
                }
                Column::Each(lanes, nodes) if is_open => {
                    for (output, ((&rounds, &worth), (&lane, &nodes))) in
                        outputs.zip(inputs.zip(lanes.iter().zip(nodes)))
                    {
                        keep(output, (worth * rent + lane + node * (nodes - given)) * rounds);
                    }
                }
                _ => {
                    for (row, (output, (&rounds, &worth))) in outputs.zip(inputs).enumerate() {
                        let shape = view.shape(row, at);
                        let share = if page > 0.0 { view.share[at * num_rows + row] } else { 0.0 };
                        let own = view.costs.lane[shape] + node * (view.costs.nodes[shape] - given);
                        if self.allowed >> shape & 1 == 1 {
                            keep(output, (worth * rent + own) * rounds + page * share);
                        }
                    }
                }
            }
        }
        (self.used, self.sums) = (0, Sums::default());
        let picks = self.picks.iter_mut().zip(&self.index).zip(view.rows.worth).enumerate();
        for (row, ((pick, &index), &worth)) in picks {
            let at = index as usize;
            let shape = view.shape(row, at);
            *pick = at as i32;
            self.used |= 1 << shape;
            self.sums.add(view.costs, shape, worth, view.rounds[at * num_rows + row], 1.0);
        }
    }

    /// Picks at these prices with the charges of the shapes that are used then; keeps what is best.
    fn settle(&mut self, node: f64, page: f64) {
        let mut fixed = self.view.fixed(self.best_used);
        for _ in 0..CHARGE_ROUNDS {
            self.pick(fixed, node, page);
            self.keep();
            let again = self.view.fixed(self.used);
            if again == fixed {
                break;
            }
            fixed = again;
        }
        (self.node, self.page) = (node, page);
    }

    /// Raises the bound: what the rows would cost at this price of nodes, without charges and pages.
    fn raise_bound(&mut self, node: f64) {
        self.pick(self.view.costs.base, node, 0.0);
        let line = self.line(&self.sums, self.view.costs.base);
        self.least = self.least.max(line.at(node));
    }

    /// The cost of picks with these sums, as a function of the price of nodes.
    fn line(&self, sums: &Sums, fixed: f64) -> Line {
        let seconds = sums.worth * fixed / self.view.num_rows as f64 + sums.lanes;
        Line { seconds, over: self.view.nodes_over(sums) }
    }

    /// Tries the same candidate for all rows, so that the choice is never worse than one shape for the batch.
    pub(super) fn try_alike(&mut self) {
        for at in 0..self.view.rows.num_candidates {
            match self.view.column(at) {
                Column::Alike(shape) => (self.used, self.sums) = (1 << shape, self.view.sums_alike(at, shape)),
                Column::Each(..) => {
                    self.picks.fill(at as i32);
                    (self.used, self.sums) = (self.view.used[at], self.view.sums(&self.picks));
                }
            }
            if self.view.total(&self.sums, self.view.fixed(self.used)) < self.best_cost {
                self.picks.fill(at as i32);
                self.keep();
            }
        }
    }

    /// Solves for the price of nodes, then of pages.
    pub(super) fn solve(&mut self) {
        let slope = self.view.costs.slope;
        self.raise_bound(0.0);
        if slope == 0.0 || self.view.nodes_over(&self.sums) <= 0.0 {
            self.settle(0.0, 0.0);
        } else {
            let (wide, sums) = (self.picks.clone(), self.sums);
            self.settle(slope, 0.0);
            if self.view.nodes_over(&self.sums) < 0.0 {
                self.fill_to_ridge(wide, &sums);
            } else {
                self.raise_bound(slope);
                self.settle(slope, 0.0);
            }
        }
        if !self.view.fits(&self.picks) {
            self.pay_for_pages();
        }
    }

    /// The best choice lies where the nodes begin to cost: find the price at which they just fit there.
    ///
    /// Each choice costs a line over the price, and the least cost is their lower hull, so two tangents meet at or
    /// above its top. A choice that costs less there is the next tangent; if there is none, the top is found.
    /// `wide` are the picks if nodes cost nothing, with their sums.
    fn fill_to_ridge(&mut self, mut wide: Vec<i32>, sums: &Sums) {
        let (slope, fixed) = (self.view.costs.slope, self.view.fixed(self.used));
        let (mut narrow, mut high, mut low) =
            (self.picks.clone(), self.line(&self.sums, fixed), self.line(sums, fixed));
        let mut node = slope;
        for _ in 0..PRICES {
            if low.over <= high.over {
                break;
            }
            node = ((high.seconds - low.seconds) / (low.over - high.over)).clamp(0.0, slope);
            self.pick(fixed, node, 0.0);
            self.keep();
            let line = self.line(&self.sums, fixed);
            if line.at(node) >= low.at(node) * (1.0 - 1e-12) {
                break;
            }
            if line.over > 0.0 {
                low = line;
                wide.copy_from_slice(&self.picks);
            } else {
                high = line;
                narrow.copy_from_slice(&self.picks);
            }
        }
        self.raise_bound(node);
        self.node = node;
        self.put(narrow);
        self.keep();
        self.widen_to(&wide);
    }

    /// Finds a price of pages at which the choice fits, then widens row by row while pages and cost allow.
    fn pay_for_pages(&mut self) {
        let (num_rows, num_candidates) = (self.view.num_rows, self.view.rows.num_candidates);
        let (wide, node) = (self.picks.clone(), self.node);
        let mut share = vec![0.0; self.view.rounds.len()];
        for row in 0..num_rows {
            for at in 0..num_candidates {
                let of = |(group, &free): (usize, &i64)| {
                    self.view.pages(row, at as i32, group) as f64 / (free.max(0) as f64 + 1.0)
                };
                share[at * num_rows + row] = self.view.rows.free.iter().enumerate().map(of).sum();
            }
        }
        self.view.share = share;
        let fixed = self.view.fixed(self.used);
        let (mut low, mut high) = (0.0, self.best_cost.min(1e300) * 1e-4);
        for _ in 0..DOUBLINGS {
            self.pick(fixed, node, high);
            if self.view.fits(&self.picks) {
                break;
            }
            (low, high) = (high, 3.0 * high);
        }
        for _ in 0..HALVINGS {
            let page = f64::midpoint(low, high);
            self.pick(fixed, node, page);
            if self.view.fits(&self.picks) {
                self.keep();
                high = page;
            } else {
                low = page;
            }
        }
        self.settle(node, high);
        self.widen_to(&wide);
    }

    /// Moves rows from the picks to those of `wide`, each if it fits and costs less.
    fn widen_to(&mut self, wide: &[i32]) {
        if !self.view.fits(&self.picks) {
            return;
        }
        let num_groups = if self.view.rows.pages.is_empty() { 0 } else { self.view.rows.free.len() };
        let mut left = self.view.rows.free.to_vec();
        for (group, left) in left.iter_mut().enumerate().take(num_groups) {
            *left -= (0..wide.len()).map(|row| self.view.pages(row, self.picks[row], group)).sum::<i64>();
        }
        let fixed = self.view.fixed(self.used);
        let mut cost = self.view.total(&self.sums, fixed);
        for (row, &to) in wide.iter().enumerate() {
            let from = self.picks[row];
            let (old, new) = (self.view.shape(row, from as usize), self.view.shape(row, to as usize));
            let more = |group: usize| self.view.pages(row, to, group) - self.view.pages(row, from, group);
            if to == from || self.used >> new & 1 == 0 || (0..num_groups).any(|group| more(group) > left[group]) {
                continue;
            }
            let (worth, at) = (self.view.rows.worth[row], |pick: i32| pick as usize * self.view.num_rows + row);
            let mut sums = self.sums;
            sums.add(self.view.costs, old, worth, self.view.rounds[at(from)], -1.0);
            sums.add(self.view.costs, new, worth, self.view.rounds[at(to)], 1.0);
            let instead = self.view.total(&sums, fixed);
            if instead < cost {
                (self.sums, cost) = (sums, instead);
                for (group, left) in left.iter_mut().enumerate().take(num_groups) {
                    *left -= more(group);
                }
                self.picks[row] = to;
            }
        }
        // A shape that no row has any more costs nothing.
        self.used = self.view.shapes_of(&self.picks);
        self.keep();
    }

    /// Gives up shapes whose rows save less than the shape costs once, the worst first.
    pub(super) fn drop_charges(&mut self) {
        let num_shapes = self.view.costs.lane.len();
        if self.view.costs.charge.iter().all(|&charge| charge == 0.0) {
            return;
        }
        for _ in 0..num_shapes {
            let fixed = self.view.fixed(self.best_used);
            self.pick(fixed, self.node, self.page);
            let worth = self.sums.worth;
            let mut worst = (0.0, None);
            for shape in 0..num_shapes {
                let (bit, price) = (1_u64 << shape, worth * self.view.costs.charge[shape] / self.view.num_rows as f64);
                if price == 0.0 || self.used & bit == 0 {
                    continue;
                }
                let net = self.regret(shape, fixed, price - worst.0) - price;
                if net < worst.0 {
                    worst = (net, Some(bit));
                }
            }
            let Some(bit) = worst.1 else { break };
            self.allowed &= !bit;
            self.pick(fixed, self.node, self.page);
            self.keep();
            self.settle(self.node, self.page);
        }
        self.allowed = u64::MAX;
    }

    /// What the rows that have a shape would lose without it, counted up to `enough`; infinite if one has nothing else.
    fn regret(&self, shape: usize, fixed: f64, enough: f64) -> f64 {
        let (view, rent, given) = (&self.view, fixed / self.view.num_rows as f64, self.view.given());
        let mut regret = 0.0;
        for (row, &pick) in self.picks.iter().enumerate() {
            if view.shape(row, pick as usize) != shape {
                continue;
            }
            let mut other = f64::INFINITY;
            for at in 0..view.rows.num_candidates {
                let (instead, cell) = (view.shape(row, at), at * view.num_rows + row);
                if instead != shape && self.allowed >> instead & 1 == 1 {
                    let share = if self.page > 0.0 { view.share[cell] } else { 0.0 };
                    let own = view.costs.lane[instead] + self.node * (view.costs.nodes[instead] - given);
                    let cost = (view.rows.worth[row] * rent + own) * view.rounds[cell];
                    other = other.min(cost + self.page * share);
                }
            }
            regret += other - self.cost[row];
            if regret >= enough {
                break;
            }
        }
        regret
    }

    /// Looks for the choice with the most worth of rows that meet their targets over the cost. It begins with one
    /// candidate for all rows, then with choices in which all rows draft less and less, so that rounds become shorter;
    /// rows that would miss a target then take a wider candidate.
    pub(super) fn meet_targets(&mut self) {
        let found = self.view.outcome(&self.best);
        if found.num_missed == 0 {
            return;
        }
        let (mut fixed, mut most) = (self.view.fixed(self.best_used), (found.goodput, -self.best_cost));
        for at in 0..self.view.rows.num_candidates {
            self.picks.fill(at as i32);
            self.serve(self.view.fixed(self.view.used[at]), &mut most);
        }
        for _ in 0..NUM_RENTS {
            self.pick(fixed, self.node, self.page);
            if self.serve(fixed, &mut most) {
                break; // shorter rounds can only cost tokens
            }
            fixed /= RENT_STEP;
        }
    }

    /// Widens rows of the picks that would miss their target, and keeps what is better than `most`, a goodput and the
    /// cost below 0. Wider rows make rounds longer, so their targets need more, and this is done a few times. Returns
    /// whether all targets are met.
    fn serve(&mut self, fixed: f64, most: &mut (f64, f64)) -> bool {
        let narrow = self.picks.clone();
        let mut seconds = self.view.seconds(&self.picks);
        for _ in 0..NUM_SERVES {
            self.picks.copy_from_slice(&narrow);
            self.widen_late_rows(fixed, seconds, most.0);
            let found = self.view.outcome(&self.picks);
            if (found.goodput, -found.cost) > *most && self.view.fits(&self.picks) {
                *most = (found.goodput, -found.cost);
                self.best_cost = found.cost;
                self.best.copy_from_slice(&self.picks);
            }
            if found.num_missed == 0 {
                return true;
            }
            if found.seconds <= seconds {
                break;
            }
            seconds = found.seconds;
        }
        false
    }

    /// Gives each row that would miss its target in a round of so many seconds the cheapest candidate that meets it,
    /// if that is worth what it costs: the row's worth over the cost that it adds must be above `goodput`, the worth
    /// over the cost of all.
    fn widen_late_rows(&mut self, fixed: f64, seconds: f64, goodput: f64) {
        let (view, rent, given) = (&self.view, fixed / self.view.num_rows as f64, self.view.given());
        for &row in &view.targets {
            let (pick, worth) = (self.picks[row], view.rows.worth[row]);
            if !view.misses(row, pick, seconds) {
                continue;
            }
            let cost = |at: usize| {
                let shape = view.shape(row, at);
                let own = view.costs.lane[shape] + self.node * (view.costs.nodes[shape] - given);
                (worth * rent + own) * view.rounds[at * view.num_rows + row]
            };
            let mut least = cost(pick as usize) + worth * view.rows.gives[row] / goodput;
            for at in 0..view.rows.num_candidates {
                let cost = cost(at);
                if cost < least && !view.misses(row, at as i32, seconds) {
                    (least, self.picks[row]) = (cost, at as i32);
                }
            }
        }
    }
}
