//! Which candidate each row of a round gets: the most tokens per second in the long run, under memory.
//!
//! A row that stays for a given number of tokens stays `1 / tokens` rounds for each of them. So a token costs the
//! row's share of the round (its *rent*) and the seconds of its own draft, both over the tokens of its round, and the
//! rows' costs add up. Each row takes the candidate whose token is the cheapest. Nodes beyond the ridge, and pages in
//! short supply, have a price. docs/budget.md proves each step, and shows why the tokens of the next round over its
//! seconds are the wrong thing to maximise.

use crate::check::same_len;
use crate::error::{Error, Result};
use crate::memory::filled;

/// Halvings of an interval of prices, and doublings to find one.
const HALVINGS: usize = 12;
const DOUBLINGS: usize = 24;
/// Choices in turn with the charges of the shapes that the choice before used.
const CHARGE_ROUNDS: usize = 3;
/// Rents that are tried for rows without a target, each the one before over `RENT_STEP`.
const NUM_RENTS: usize = 10;
const RENT_STEP: f64 = 1.8;

/// The seconds of a round: `base + sum of charge of the shapes used + sum of lane seconds of the rows +
/// slope * max(0, nodes - ridge)`.
#[derive(Debug, Clone, Copy)]
pub struct Costs<'a> {
    /// Of a round with this many rows that drafts nothing, in seconds, above 0.
    pub base: f64,
    /// Nodes that one verify computes at no further cost.
    pub ridge: f64,
    /// Seconds of each further node.
    pub slope: f64,
    /// `[S]`: seconds that a shape costs once, if any row has it.
    pub charge: &'a [f64],
    /// `[S]`: seconds that each row of a shape adds.
    pub lane: &'a [f64],
    /// `[S]`: nodes of a row's verify.
    pub nodes: &'a [f64],
}

/// The rows of a round and what each of their candidates gives; C candidates, the narrowest first.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Candidates of each row.
    pub num_candidates: usize,
    /// `[B, C]`: the shape that a candidate is for this row; several may be the same.
    pub shapes: &'a [i32],
    /// `[B, S]`: expected tokens with each shape, 1 or more.
    pub tokens: &'a [f64],
    /// `[B]`: what the row's time is worth.
    pub worth: &'a [f64],
    /// `[B, 2]`: tokens that a round must give, as a constant and per second of the round; (0, 0) = no target.
    pub due: &'a [f64],
    /// `[B, C, G]`: pages that a candidate needs beyond the row's first; empty = memory does not bind.
    pub pages: &'a [i32],
    /// `[G]`: pages that may be used so.
    pub free: &'a [i64],
}

/// What was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// `[B]`: the candidate of each row.
    pub picks: Vec<i32>,
    /// Tokens per second in the long run, if every row is worth the same.
    pub rate: f64,
    /// No choice within the memory has a greater rate; without rows 0.
    pub bound: f64,
    /// The expected seconds of the round.
    pub seconds: f64,
    /// Rows with a target that is expected to be missed in this round.
    pub num_missed: usize,
}

/// Chooses a candidate for each row. Equal inputs give equal choices. `O(B C)` for each of some passes: two or three
/// if nothing is short.
///
/// # Errors
/// [`Error::Shape`] for lengths that differ, or numbers that are not finite or out of range.
pub fn choose(rows: &Rows<'_>, costs: &Costs<'_>) -> Result<Choice> {
    let mut solver = Solver::new(rows, costs)?;
    if rows.worth.is_empty() {
        return Ok(Choice { picks: Vec::new(), rate: 0.0, bound: 0.0, seconds: costs.base, num_missed: 0 });
    }
    solver.try_alike();
    solver.solve();
    solver.drop_charges();
    if rows.due.iter().any(|&due| due != 0.0) {
        solver.meet_targets();
    }
    let (picks, num_rows) = (solver.best, rows.worth.len() as f64);
    let seconds = solver.view.seconds(&picks);
    let cost = solver.view.cost(&picks);
    Ok(Choice {
        num_missed: solver.view.num_missed(&picks, seconds),
        rate: num_rows / cost,
        bound: num_rows / solver.least.clamp(f64::MIN_POSITIVE, cost),
        seconds,
        picks,
    })
}

/// The inputs, candidate by candidate, so that a pass runs over neighbours in memory.
struct View<'a> {
    rows: &'a Rows<'a>,
    costs: &'a Costs<'a>,
    num_rows: usize,
    /// `[C, B]`: rounds that a token takes, 1 over the expected tokens.
    rounds: Vec<f64>,
    /// `[C, B]`: seconds of the lane, and its nodes' at the price of `priced_node`.
    own: Vec<f64>,
    priced_node: f64,
    /// `[C, B]`: pages over free pages, summed over the groups; empty = memory does not bind.
    share: Vec<f64>,
    /// `[C]`: the shapes that a candidate is for any row, as bits.
    used: Vec<u64>,
}

impl View<'_> {
    #[inline]
    fn shape(&self, row: usize, pick: usize) -> usize {
        self.rows.shapes[row * self.rows.num_candidates + pick] as usize
    }

    fn tokens(&self, row: usize, pick: usize) -> f64 {
        self.rows.tokens[row * self.costs.lane.len() + self.shape(row, pick)]
    }

    /// The base and the charges of these shapes.
    fn fixed(&self, used: u64) -> f64 {
        let charges = self.costs.charge.iter().enumerate();
        self.costs.base + charges.map(|(shape, &it)| if used >> shape & 1 == 1 { it } else { 0.0 }).sum::<f64>()
    }

    /// Sets each lane's own seconds at a price of nodes. Each row has its share of the ridge for nothing.
    fn price(&mut self, node: f64) {
        if node == self.priced_node {
            return;
        }
        self.priced_node = node;
        let given = self.costs.ridge / self.num_rows as f64;
        for (at, own) in self.own.chunks_exact_mut(self.num_rows.max(1)).enumerate() {
            for (own, shapes) in own.iter_mut().zip(self.rows.shapes.chunks_exact(self.rows.num_candidates)) {
                let shape = shapes[at] as usize;
                *own = self.costs.lane[shape] + node * (self.costs.nodes[shape] - given);
            }
        }
    }

    fn shapes_of(&self, picks: &[i32]) -> u64 {
        picks.iter().enumerate().fold(0, |used, (row, &pick)| used | 1 << self.shape(row, pick as usize))
    }

    /// The seconds of a round.
    fn seconds(&self, picks: &[i32]) -> f64 {
        let (mut seconds, mut nodes) = (self.fixed(self.shapes_of(picks)), 0.0);
        for (row, &pick) in picks.iter().enumerate() {
            let shape = self.shape(row, pick as usize);
            seconds += self.costs.lane[shape];
            nodes += self.costs.nodes[shape];
        }
        seconds + self.costs.slope * (nodes - self.costs.ridge).max(0.0)
    }

    /// The rounds, own seconds and nodes of a token of each row, summed; rounds by worth first.
    fn sums(&self, picks: &[i32]) -> [f64; 4] {
        let mut sums = [0.0; 4];
        for (row, &pick) in picks.iter().enumerate() {
            let shape = self.shape(row, pick as usize);
            let rounds = self.rounds[pick as usize * self.num_rows + row];
            sums[0] += self.rows.worth[row] * rounds;
            sums[1] += rounds;
            sums[2] += rounds * self.costs.lane[shape];
            sums[3] += rounds * self.costs.nodes[shape];
        }
        sums
    }

    /// Nodes beyond the ridge, on average over the rounds.
    fn nodes_over(&self, picks: &[i32]) -> f64 {
        let [_, rounds, _, nodes] = self.sums(picks);
        nodes - rounds * self.costs.ridge / self.num_rows as f64
    }

    /// The seconds of a token of each row, summed.
    fn cost(&self, picks: &[i32]) -> f64 {
        let [worth, rounds, lanes, nodes] = self.sums(picks);
        let (num_rows, ridge) = (self.num_rows as f64, self.costs.ridge);
        let over = (nodes - rounds * ridge / num_rows).max(0.0);
        worth * self.fixed(self.shapes_of(picks)) / num_rows + lanes + self.costs.slope * over
    }

    fn pages(&self, row: usize, pick: i32, group: usize) -> i64 {
        let num_groups = self.rows.free.len();
        let cell = (row * self.rows.num_candidates + pick as usize) * num_groups + group;
        self.rows.pages.get(cell).map_or(0, |&pages| i64::from(pages))
    }

    /// Whether the pages are there.
    fn fits(&self, picks: &[i32]) -> bool {
        self.rows.pages.is_empty()
            || self.rows.free.iter().enumerate().all(|(group, &free)| {
                picks.iter().enumerate().map(|(row, &pick)| self.pages(row, pick, group)).sum::<i64>() <= free
            })
    }

    fn has_target(&self, row: usize) -> bool {
        self.rows.due[2 * row + 1] > 0.0
    }

    /// Whether a row with a target misses it in a round of so many seconds.
    fn misses(&self, row: usize, pick: i32, seconds: f64) -> bool {
        let due = self.rows.due[2 * row] + self.rows.due[2 * row + 1] * seconds;
        self.has_target(row) && self.tokens(row, pick as usize) < due
    }

    fn num_missed(&self, picks: &[i32], seconds: f64) -> usize {
        (0..picks.len()).filter(|&row| self.misses(row, picks[row], seconds)).count()
    }

    /// The worth of the rows that have no target or meet it, over the cost of the tokens of all.
    fn goodput(&self, picks: &[i32]) -> f64 {
        let seconds = self.seconds(picks);
        let met = (0..picks.len()).filter(|&row| !self.misses(row, picks[row], seconds));
        met.map(|row| self.rows.worth[row]).sum::<f64>() / self.cost(picks)
    }
}

struct Solver<'a> {
    view: View<'a>,
    /// The shapes that may be picked, as bits.
    allowed: u64,
    /// The shapes of the latest picks.
    used: u64,
    picks: Vec<i32>,
    /// `[B]`: of the picks, the cost of a token, and the pick itself as a number of the same width.
    cost: Vec<f64>,
    index: Vec<f64>,
    best: Vec<i32>,
    best_cost: f64,
    /// No choice costs less.
    least: f64,
    node: f64,
    page: f64,
}

impl<'a> Solver<'a> {
    fn new(rows: &'a Rows<'a>, costs: &'a Costs<'a>) -> Result<Self> {
        check(rows, costs)?;
        let (num_rows, num_candidates, num_shapes) = (rows.worth.len(), rows.num_candidates, costs.lane.len());
        let cells = num_rows * num_candidates;
        let mut view = View {
            rows,
            costs,
            num_rows,
            rounds: filled(0.0, cells, "rounds")?,
            own: filled(0.0, cells, "seconds")?,
            priced_node: f64::NAN,
            share: Vec::new(),
            used: filled(0, num_candidates, "shapes")?,
        };
        let per_row = rows.shapes.chunks_exact(num_candidates).zip(rows.tokens.chunks_exact(num_shapes));
        for (row, (shapes, tokens)) in per_row.enumerate() {
            for (at, &shape) in shapes.iter().enumerate() {
                view.rounds[at * num_rows + row] = 1.0 / tokens[shape as usize];
                view.used[at] |= 1 << shape;
            }
        }
        Ok(Self {
            allowed: u64::MAX,
            used: 0,
            picks: filled(0, num_rows, "picks")?,
            cost: filled(0.0, num_rows, "costs")?,
            index: filled(0.0, num_rows, "picks")?,
            best: filled(0, num_rows, "picks")?,
            best_cost: f64::INFINITY,
            least: 0.0,
            node: 0.0,
            page: 0.0,
            view,
        })
    }

    /// Keeps the picks if they fit and cost less than the best so far.
    fn keep(&mut self) {
        let cost = self.view.cost(&self.picks);
        if cost < self.best_cost && self.view.fits(&self.picks) {
            self.best_cost = cost;
            self.best.copy_from_slice(&self.picks);
        }
    }

    /// Each row's cheapest candidate, if the fixed seconds of a round are so many; of equals, the first. Returns the
    /// cost.
    fn pick(&mut self, fixed: f64, node: f64, page: f64) -> f64 {
        self.view.price(node);
        let (view, num_rows) = (&self.view, self.view.num_rows);
        let rent = fixed / num_rows as f64;
        self.cost.fill(f64::INFINITY);
        self.index.fill(0.0);
        for at in 0..view.rows.num_candidates {
            let cells = at * num_rows..(at + 1) * num_rows;
            let inputs = view.rounds[cells.clone()].iter().zip(&view.own[cells]).zip(view.rows.worth);
            let outputs = self.cost.iter_mut().zip(&mut self.index);
            let this = at as f64;
            if page == 0.0 && view.used[at] & !self.allowed == 0 {
                for ((least, index), ((&rounds, &own), &worth)) in outputs.zip(inputs) {
                    let cost = (worth * rent + own) * rounds;
                    let less = cost < *least;
                    *least = if less { cost } else { *least };
                    *index = if less { this } else { *index };
                }
                continue;
            }
            for (row, ((least, index), ((&rounds, &own), &worth))) in outputs.zip(inputs).enumerate() {
                let share = if page > 0.0 { view.share[at * num_rows + row] } else { 0.0 };
                let cost = (worth * rent + own) * rounds + page * share;
                if self.allowed >> view.shape(row, at) & 1 == 1 && cost < *least {
                    (*least, *index) = (cost, this);
                }
            }
        }
        self.used = 0;
        let picks = self.picks.iter_mut().zip(&self.index);
        for (shapes, (pick, &index)) in view.rows.shapes.chunks_exact(view.rows.num_candidates).zip(picks) {
            *pick = index as i32;
            self.used |= 1 << shapes[index as usize];
        }
        self.cost.iter().sum()
    }

    /// Picks at these prices with the charges of the shapes that are used then; keeps what is best.
    fn settle(&mut self, node: f64, page: f64) {
        if self.view.costs.charge.iter().any(|&charge| charge > 0.0) {
            let mut fixed = self.view.fixed(self.view.shapes_of(&self.best));
            for _ in 0..CHARGE_ROUNDS {
                self.pick(fixed, node, page);
                self.keep();
                let again = self.view.fixed(self.used);
                if again == fixed {
                    break;
                }
                fixed = again;
            }
        } else {
            self.pick(self.view.costs.base, node, page);
            self.keep();
        }
        (self.node, self.page) = (node, page);
    }

    /// Raises the bound: what the rows would cost at this price of nodes, without charges and pages.
    fn raise_bound(&mut self, node: f64) {
        let least = self.pick(self.view.costs.base, node, 0.0);
        self.least = self.least.max(least);
    }

    /// Tries the same candidate for all rows, so that the choice is never worse than one shape for the batch.
    fn try_alike(&mut self) {
        for at in 0..self.view.rows.num_candidates {
            self.picks.fill(at as i32);
            self.keep();
        }
    }

    /// Solves for the price of nodes, then of pages.
    fn solve(&mut self) {
        let slope = self.view.costs.slope;
        self.raise_bound(0.0);
        if slope == 0.0 || self.view.nodes_over(&self.picks) <= 0.0 {
            self.settle(0.0, 0.0);
        } else {
            self.raise_bound(slope);
            self.settle(slope, 0.0);
            if self.view.nodes_over(&self.picks) < 0.0 {
                self.fill_to_ridge();
            }
        }
        if !self.view.fits(&self.picks) {
            self.pay_for_pages();
        }
    }

    /// The best choice lies where the nodes begin to cost: find the price at which they just fit there.
    fn fill_to_ridge(&mut self) {
        let (mut low, mut high) = (0.0, self.view.costs.slope);
        for _ in 0..HALVINGS {
            let node = f64::midpoint(low, high);
            self.raise_bound(node);
            self.settle(node, 0.0);
            if self.view.nodes_over(&self.picks) > 0.0 {
                low = node;
            } else {
                high = node;
            }
        }
        self.settle(low, 0.0);
        let wide = self.picks.clone();
        self.settle(high, 0.0);
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
        let (mut low, mut high) = (0.0, self.best_cost.min(1e300) * 1e-4);
        for _ in 0..DOUBLINGS {
            self.settle(node, high);
            if self.view.fits(&self.picks) {
                break;
            }
            (low, high) = (high, 3.0 * high);
        }
        for _ in 0..HALVINGS {
            let page = f64::midpoint(low, high);
            self.settle(node, page);
            if self.view.fits(&self.picks) {
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
        let (costs, num_rows) = (self.view.costs, self.view.num_rows as f64);
        let fixed = self.view.fixed(self.used) / num_rows;
        let [mut worth, mut rounds, mut lanes, mut nodes] = self.view.sums(&self.picks);
        let total = |worth: f64, rounds: f64, lanes: f64, nodes: f64| {
            worth * fixed + lanes + costs.slope * (nodes - rounds * costs.ridge / num_rows).max(0.0)
        };
        for (row, &to) in wide.iter().enumerate() {
            let from = self.picks[row];
            let (old, new) = (self.view.shape(row, from as usize), self.view.shape(row, to as usize));
            let more = |group: usize| self.view.pages(row, to, group) - self.view.pages(row, from, group);
            if to == from || self.used >> new & 1 == 0 || (0..num_groups).any(|group| more(group) > left[group]) {
                continue;
            }
            let at = |pick: i32| self.view.rounds[pick as usize * self.view.num_rows + row];
            let (before, after) = (at(from), at(to));
            let next = (
                worth + self.view.rows.worth[row] * (after - before),
                rounds + after - before,
                lanes + after * costs.lane[new] - before * costs.lane[old],
                nodes + after * costs.nodes[new] - before * costs.nodes[old],
            );
            if total(next.0, next.1, next.2, next.3) < total(worth, rounds, lanes, nodes) {
                (worth, rounds, lanes, nodes) = next;
                for (group, left) in left.iter_mut().enumerate().take(num_groups) {
                    *left -= more(group);
                }
                self.picks[row] = to;
            }
        }
        self.keep();
    }

    /// Gives up shapes whose rows save less than the shape costs once, the worst first.
    fn drop_charges(&mut self) {
        let num_shapes = self.view.costs.lane.len();
        if self.view.costs.charge.iter().all(|&charge| charge == 0.0) {
            return;
        }
        for _ in 0..num_shapes {
            let fixed = self.view.fixed(self.view.shapes_of(&self.best));
            self.pick(fixed, self.node, self.page);
            let [worth, ..] = self.view.sums(&self.picks);
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
        let (view, rent) = (&self.view, fixed / self.view.num_rows as f64);
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
                    let cost = (view.rows.worth[row] * rent + view.own[cell]) * view.rounds[cell];
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

    /// Looks for the choice with the most worth of rows that meet their targets. Rows with a target get the cheapest
    /// candidate that meets it; the others draft less and less, so that rounds become shorter.
    fn meet_targets(&mut self) {
        let mut seconds = self.view.seconds(&self.best);
        if self.view.num_missed(&self.best, seconds) == 0 {
            return;
        }
        let mut most = (self.view.goodput(&self.best), -self.best_cost);
        let mut fixed = self.view.fixed(self.view.shapes_of(&self.best));
        for _ in 0..NUM_RENTS {
            self.pick(fixed, self.node, self.page);
            for row in 0..self.view.num_rows {
                if self.view.has_target(row) {
                    self.serve(row, seconds);
                }
            }
            seconds = self.view.seconds(&self.picks);
            let found = (self.view.goodput(&self.picks), -self.view.cost(&self.picks));
            if found > most && self.view.fits(&self.picks) {
                most = found;
                self.best.copy_from_slice(&self.picks);
            }
            fixed /= RENT_STEP;
        }
    }

    /// Gives a row the candidate of the fewest seconds that meets its target in a round of so many, if there is one.
    fn serve(&mut self, row: usize, seconds: f64) {
        let mut least = f64::INFINITY;
        for at in 0..self.view.rows.num_candidates {
            let own = self.view.own[at * self.view.num_rows + row];
            if own < least && !self.view.misses(row, at as i32, seconds) {
                (least, self.picks[row]) = (own, at as i32);
            }
        }
    }
}

fn check(rows: &Rows<'_>, costs: &Costs<'_>) -> Result<()> {
    let (num_shapes, num_candidates, num_rows) = (costs.lane.len(), rows.num_candidates, rows.worth.len());
    same_len("charge", costs.charge.len(), num_shapes)?;
    same_len("nodes", costs.nodes.len(), num_shapes)?;
    if num_candidates == 0 || num_shapes == 0 || num_shapes > 64 {
        return Err(Error::Shape(format!(
            "a choice needs 1 to 64 shapes and a candidate, got {num_shapes} and {num_candidates}"
        )));
    }
    same_len("shapes", rows.shapes.len(), num_rows * num_candidates)?;
    same_len("tokens", rows.tokens.len(), num_rows * num_shapes)?;
    same_len("due", rows.due.len(), 2 * num_rows)?;
    if !rows.pages.is_empty() {
        same_len("pages", rows.pages.len(), num_rows * num_candidates * rows.free.len())?;
    }
    if let Some(wrong) = rows.shapes.iter().find(|&&shape| shape < 0 || shape as usize >= num_shapes) {
        return Err(Error::Shape(format!("shape {wrong} is not in [0, {num_shapes})")));
    }
    let fields: [(&str, &[f64], f64); 6] = [
        ("charge", costs.charge, 0.0),
        ("lane", costs.lane, 0.0),
        ("nodes", costs.nodes, 0.0),
        ("tokens", rows.tokens, 1.0),
        ("worth", rows.worth, 0.0),
        ("ridge and slope", &[costs.ridge, costs.slope], 0.0),
    ];
    for (name, values, least) in fields {
        if let Some(wrong) = values.iter().find(|value| !(least..f64::INFINITY).contains(*value)) {
            return Err(Error::Shape(format!("{name} must be finite and {least} or more, got {wrong}")));
        }
    }
    if !(costs.base > 0.0 && costs.base.is_finite()) || rows.due.iter().any(|due| !due.is_finite()) {
        return Err(Error::Shape(format!("base must be above 0 and due finite, got base {}", costs.base)));
    }
    Ok(())
}
