//! `Solver`: looks for the picks that cost the least; docs/budget.md has its rules and why they hold.

use super::cheapest::Cheapest;
use super::view::{Column, Outcome, Sums, TargetCell, View};
use super::{Costs, Rows, check};
use crate::error::Result;
use crate::memory::filled;

/// Times that a price of pages is raised until the choice fits, and that the interval is narrowed then.
const RISES: usize = 24;
const NARROWINGS: usize = 12;
/// Prices of nodes that are tried at most; about five are enough.
const PRICES: usize = 16;
/// Choices in turn with the charges of the shapes that the choice before used.
const CHARGE_ROUNDS: usize = 3;
/// Rents that are tried for rows without a target, each the one before over `RENT_STEP`.
const NUM_RENTS: i32 = 10;
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
    cheapest: Cheapest,
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
            cheapest: Cheapest::new(num_rows)?,
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
        let (rent, given, allowed) = (fixed / num_rows as f64, view.given(), self.allowed);
        self.cheapest.begin();
        for at in 0..view.rows.num_candidates {
            let cells = at * num_rows..(at + 1) * num_rows;
            let inputs = view.rounds[cells.clone()].iter().zip(view.rows.worth);
            match view.column(at) {
                Column::Alike(shape) if allowed >> shape & 1 == 0 => {}
                Column::Alike(shape) => {
                    let own = view.costs.lane[shape] + node * (view.costs.nodes[shape] - given);
                    let per_token = view.per_token[shape] - node * view.costs.ridge_per_token;
                    let costs = inputs
                        .zip(&view.context)
                        .map(|((&rounds, &worth), &context)| (worth * rent + own + per_token * context) * rounds);
                    if page > 0.0 {
                        let shares = &view.share[cells];
                        self.cheapest.take(at, costs.zip(shares).map(|(cost, &share)| cost + page * share));
                    } else {
                        self.cheapest.take(at, costs);
                    }
                }
                Column::Each(lanes, nodes) if page == 0.0 && view.used[at] & !allowed == 0 => {
                    let costs = inputs.zip(lanes.iter().zip(nodes));
                    let cost = |((&rounds, &worth), (&lane, &nodes))| {
                        let own: f64 = lane + node * (nodes - given);
                        (worth * rent + own) * rounds
                    };
                    self.cheapest.take(at, costs.map(cost));
                }
                Column::Each(..) => {
                    let cost = |(row, (&rounds, &worth)): (usize, (&f64, &f64))| {
                        let shape = view.shape(row, at);
                        let share = if page > 0.0 { view.share[at * num_rows + row] } else { 0.0 };
                        if allowed >> shape & 1 == 0 {
                            return f64::INFINITY;
                        }
                        let own = view.lane(row, shape) + node * (view.nodes(row, shape) - given);
                        (worth * rent + own) * rounds + page * share
                    };
                    self.cheapest.take(at, inputs.enumerate().map(cost));
                }
            }
        }
        let (mut used, mut sums) = (0, Sums::default());
        for (row, (pick, at)) in self.picks.iter_mut().zip(self.cheapest.candidates()).enumerate() {
            let shape = view.shape(row, at as usize);
            *pick = at;
            used |= 1 << shape;
            view.add(&mut sums, row, shape, view.rounds[at as usize * num_rows + row]);
        }
        (self.used, self.sums) = (used, sums);
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
            // Within [0, slope], because only these prices give a bound (docs/budget.md, rule 3).
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
        self.widen_to(&wide, self.used);
    }

    /// Finds a price of pages at which the choice fits, then widens row by row while pages and cost allow.
    fn pay_for_pages(&mut self) {
        let num_rows = self.view.num_rows;
        let (wide, node) = (self.picks.clone(), self.node);
        let worth: Vec<f64> = self.view.rows.free.iter().map(|&free| 1.0 / (free.max(0) as f64 + 1.0)).collect();
        let mut share = vec![0.0; self.view.rounds.len()];
        for row in 0..num_rows {
            for at in 0..self.view.rows.num_candidates {
                let pages = self.view.pages(row, at as i32).iter().zip(&worth);
                share[at * num_rows + row] = pages.map(|(&pages, worth)| f64::from(pages) * worth).sum();
            }
        }
        self.view.share = share;
        let fixed = self.view.fixed(self.used);
        // Prices, and the pages that lack at each in the group that lacks the most; below 0 = they are left.
        let (mut low, mut high) = ((0.0, self.lack()), (self.best_cost.min(1e300) * 0.01, 0.0));
        for _ in 0..RISES {
            self.pick(fixed, node, high.0);
            high.1 = self.lack();
            if high.1 <= 0.0 {
                self.keep();
                break;
            }
            (low, high.0) = (high, 4.0 * high.0);
        }
        for _ in 0..NARROWINGS {
            if high.1 == 0.0 {
                break; // all pages are used
            }
            let at = (low.1 / (low.1 - high.1)).clamp(0.125, 0.875);
            let page = low.0 + at * (high.0 - low.0);
            self.pick(fixed, node, page);
            let lack = self.lack();
            if lack <= 0.0 {
                self.keep();
                high = (page, lack);
            } else {
                low = (page, lack);
            }
        }
        self.settle(node, high.0);
        let (narrow, used) = (self.picks.clone(), self.used);
        self.widen_to(&wide, used);
        // Rows that are alike get the same shape at any price, so wider ones are not in use yet.
        let more = self.view.shapes_of(&wide) & !used;
        if more != 0 {
            self.put(narrow);
            self.widen_to(&wide, used | more);
        }
    }

    /// The pages that the picks lack in the group that lacks the most; below 0 = they are left.
    fn lack(&self) -> f64 {
        -self.view.left(&self.picks).into_iter().min().unwrap_or(0) as f64
    }

    /// Moves rows from the picks to those of `wide`, each if it fits, costs less, and has one of the shapes `used`. The
    /// charges of these shapes count as paid; whether they are worth it is seen at the end.
    fn widen_to(&mut self, wide: &[i32], used: u64) {
        let mut left = self.view.left(&self.picks);
        if left.iter().any(|&left| left < 0) && !self.view.rows.pages.is_empty() {
            return;
        }
        let fixed = self.view.fixed(used);
        let mut cost = self.view.total(&self.sums, fixed);
        for (row, &to) in wide.iter().enumerate() {
            let from = self.picks[row];
            let (old, new) = (self.view.shape(row, from as usize), self.view.shape(row, to as usize));
            if to == from || used >> new & 1 == 0 {
                continue;
            }
            let pages = self.view.pages(row, to).iter().zip(self.view.pages(row, from));
            let more = pages.map(|(&to, &from)| i64::from(to) - i64::from(from));
            if more.clone().zip(&left).any(|(more, &left)| more > left) {
                continue;
            }
            let rounds = |pick: i32| self.view.rounds[pick as usize * self.view.num_rows + row];
            let mut sums = self.sums;
            self.view.add(&mut sums, row, old, -rounds(from));
            self.view.add(&mut sums, row, new, rounds(to));
            let instead = self.view.total(&sums, fixed);
            if instead < cost {
                (self.sums, cost) = (sums, instead);
                for (left, more) in left.iter_mut().zip(more) {
                    *left -= more;
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
                    let own = view.lane(row, instead) + self.node * (view.nodes(row, instead) - given);
                    let cost = (view.rows.worth[row] * rent + own) * view.rounds[cell];
                    other = other.min(cost + self.page * share);
                }
            }
            regret += other - self.cheapest.cost(row);
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
        if self.outcome_of_best().num_missed == 0 {
            return;
        }
        self.view.drop_hopeless();
        let found = self.outcome_of_best();
        if found.num_missed == 0 {
            return;
        }
        let (mut fixed, mut most) = (self.view.fixed(self.best_used), (found.goodput, -self.best_cost));
        let targets = self.view.target_cells(self.node);
        for at in 0..self.view.rows.num_candidates {
            self.picks.fill(at as i32);
            self.sums = match self.view.column(at) {
                Column::Alike(shape) => self.view.sums_alike(at, shape),
                Column::Each(..) => self.view.sums(&self.picks),
            };
            self.serve(self.view.fixed(self.view.used[at]), &targets, &mut most);
        }
        let least = fixed / RENT_STEP.powi(NUM_RENTS - 1);
        loop {
            self.pick(fixed, self.node, self.page);
            let is_narrow = self.picks.iter().all(|&pick| pick == 0);
            if self.serve(fixed, &targets, &mut most) || fixed <= least {
                break; // shorter rounds can only cost tokens
            }
            // From the narrowest choice on, lower rents change only what late rows take.
            fixed = if is_narrow { least } else { (fixed / RENT_STEP).max(least) };
        }
    }

    /// Widens rows of the picks that would miss their target, and keeps what is better than `most`, a goodput and the
    /// cost below 0. Wider rows make rounds longer, so their targets need more, and this is done a few times. Returns
    /// whether all targets are met.
    fn serve(&mut self, fixed: f64, targets: &[TargetCell], most: &mut (f64, f64)) -> bool {
        let tally = self.view.tally(&self.picks, self.sums);
        let mut seconds = self.view.outcome(&self.picks, &tally).seconds;
        let mut wider = Vec::new();
        for _ in 0..NUM_SERVES {
            self.widen_late_rows(fixed, targets, seconds, most.0, &mut wider);
            let mut tally = tally.clone();
            for (row, pick) in &mut wider {
                self.view.change(&mut tally, *row, self.picks[*row], *pick);
                std::mem::swap(&mut self.picks[*row], pick);
            }
            let found = self.view.outcome(&self.picks, &tally);
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
            for &(row, pick) in &wider {
                self.picks[row] = pick;
            }
        }
        false
    }

    /// What the best choice gives.
    pub(super) fn outcome_of_best(&self) -> Outcome {
        self.view.outcome(&self.best, &self.view.tally(&self.best, self.view.sums(&self.best)))
    }

    /// Finds for each row that would miss its target in a round of so many seconds the cheapest candidate that meets
    /// it, if that is worth what it costs: the row's worth over the cost that it adds must be above `goodput`, the
    /// worth over the cost of all.
    fn widen_late_rows(
        &self,
        fixed: f64,
        targets: &[TargetCell],
        seconds: f64,
        goodput: f64,
        wider: &mut Vec<(usize, i32)>,
    ) {
        let (view, rent) = (&self.view, fixed / self.view.num_rows as f64);
        wider.clear();
        for (&row, cells) in view.targets.iter().zip(targets.chunks_exact(view.rows.num_candidates)) {
            let (pick, worth, due) = (self.picks[row], view.rows.worth[row], view.due(row, seconds));
            let now = &cells[pick as usize];
            if now.tokens >= due {
                continue;
            }
            let rent = worth * rent;
            let mut least = (rent + now.own) * now.rounds + worth * view.rows.gives[row] / goodput;
            let mut found = pick;
            for (at, cell) in cells.iter().enumerate() {
                // Without a branch, because none could foretell it.
                let cost = if cell.tokens >= due { (rent + cell.own) * cell.rounds } else { f64::INFINITY };
                found = if cost < least { at as i32 } else { found };
                least = if cost < least { cost } else { least };
            }
            if found != pick {
                wider.push((row, found));
            }
        }
    }
}
