//! Which candidate each row of a round gets: the most expected tokens per second of the whole batch, under memory
//! (docs/budget.md, where each step is proved).
//!
//! With a rate λ, a row takes the candidate with the greatest `tokens - λ seconds`. The best rate is the one that the
//! choice itself reaches (Dinkelbach). A node is worth λ times its seconds; a page, in short supply, has a price.

use crate::check::same_len;
use crate::error::{Error, Result};
use crate::memory::filled;

/// Rounds of Dinkelbach's iteration. Each one raises λ; five are rarely exceeded.
const MOST_STEPS: usize = 40;
/// Halvings of an interval of prices.
const HALVINGS: usize = 14;
/// Rates that are tried for the rows' targets, each `RATE_STEP` times the one before.
const NUM_RATES: usize = 12;
const RATE_STEP: f64 = 1.6;

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
    /// `[B, S]`: expected tokens with each shape.
    pub tokens: &'a [f64],
    /// `[B]`: what a token of the row is worth.
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
    /// Worth of the expected tokens per second.
    pub rate: f64,
    /// No choice within the memory has a greater rate, if no shape has a charge; without rows 0.
    pub bound: f64,
    /// The expected seconds of the round.
    pub seconds: f64,
    /// Rows with a target that is expected to be missed in this round.
    pub num_missed: usize,
}

/// Chooses a candidate for each row. Equal inputs give equal choices. `O(B C)` for each of some dozen passes.
///
/// # Errors
/// [`Error::Shape`] for lengths that differ, or numbers that are not finite or have the wrong sign.
pub fn choose(rows: &Rows<'_>, costs: &Costs<'_>) -> Result<Choice> {
    let mut solver = Solver::new(rows, costs)?;
    if solver.num_rows == 0 {
        return Ok(Choice { picks: Vec::new(), rate: 0.0, bound: 0.0, seconds: costs.base, num_missed: 0 });
    }
    solver.try_alike();
    solver.solve();
    let bound = solver.bound;
    solver.drop_charges();
    if rows.due.iter().any(|&due| due != 0.0) {
        solver.meet_targets();
    }
    let picks = solver.best;
    let (worth, seconds) = solver.view.value(&picks);
    let num_missed = solver.view.num_missed(&picks, seconds);
    Ok(Choice { picks, rate: worth / seconds, bound: bound.max(worth / seconds), seconds, num_missed })
}

/// What every row pays for nodes and pages beside the seconds of its lane.
#[derive(Debug, Clone, Copy)]
struct Prices {
    node: f64,
    page: f64,
}

/// The inputs, flattened for the passes: candidate by candidate, so that a pass runs over neighbours in memory.
struct View<'a> {
    rows: &'a Rows<'a>,
    costs: &'a Costs<'a>,
    /// `[C, B]`: worth of the expected tokens.
    gain: Vec<f64>,
    /// `[C, B]`: seconds of the lane, its nodes included at the price of `priced_node`.
    seconds: Vec<f64>,
    /// `[C, B]`: pages over free pages, summed over the groups; empty = memory does not bind.
    share: Vec<f64>,
    /// `[C]`: the shapes that a candidate is for any row, as bits.
    used: Vec<u64>,
    priced_node: f64,
}

struct Solver<'a> {
    view: View<'a>,
    num_rows: usize,
    /// The shapes of the latest picks, and those that may be picked, as bits.
    used: u64,
    allowed: u64,
    /// `[B]`: of the picks, their value, worth and seconds.
    most: Vec<f64>,
    worth: Vec<f64>,
    took: Vec<f64>,
    /// `[B]`: the picks as floating point, so that a pass has numbers of one width.
    index: Vec<f64>,
    picks: Vec<i32>,
    best: Vec<i32>,
    best_rate: f64,
    bound: f64,
    /// λ at the latest choice.
    rate: f64,
    prices: Prices,
}

impl View<'_> {
    #[inline]
    fn shape(&self, row: usize, pick: usize) -> usize {
        self.rows.shapes[row * self.rows.num_candidates + pick] as usize
    }

    #[inline]
    fn gain(&self, row: usize, pick: i32) -> f64 {
        self.gain[pick as usize * self.rows.worth.len() + row]
    }

    fn charges(&self, used: u64) -> f64 {
        self.costs.charge.iter().enumerate().map(|(shape, &it)| if used >> shape & 1 == 1 { it } else { 0.0 }).sum()
    }

    /// Sets the seconds of each lane at a price of nodes.
    fn price(&mut self, node: f64) {
        if node == self.priced_node {
            return;
        }
        self.priced_node = node;
        let (num_rows, num_candidates) = (self.rows.worth.len(), self.rows.num_candidates);
        for (at, seconds) in self.seconds.chunks_exact_mut(num_rows.max(1)).enumerate() {
            for (seconds, shapes) in seconds.iter_mut().zip(self.rows.shapes.chunks_exact(num_candidates)) {
                let shape = shapes[at] as usize;
                *seconds = self.costs.lane[shape] + node * self.costs.nodes[shape];
            }
        }
    }

    /// Worth of the tokens, and seconds.
    fn value(&self, picks: &[i32]) -> (f64, f64) {
        let (mut worth, mut seconds, mut nodes) = (0.0, self.costs.base, 0.0);
        let mut used = 0_u64;
        for (row, &pick) in picks.iter().enumerate() {
            let shape = self.shape(row, pick as usize);
            worth += self.gain(row, pick);
            seconds += self.costs.lane[shape];
            nodes += self.costs.nodes[shape];
            used |= 1 << shape;
        }
        seconds += self.charges(used);
        (worth, seconds + self.costs.slope * (nodes - self.costs.ridge).max(0.0))
    }

    fn num_nodes(&self, picks: &[i32]) -> f64 {
        picks.iter().enumerate().map(|(row, &pick)| self.costs.nodes[self.shape(row, pick as usize)]).sum()
    }

    /// Whether the pages are there.
    fn fits(&self, picks: &[i32]) -> bool {
        let num_groups = self.rows.free.len();
        if self.rows.pages.is_empty() {
            return true;
        }
        self.rows.free.iter().enumerate().all(|(group, &free)| {
            let at = |row: usize, pick: i32| (row * self.rows.num_candidates + pick as usize) * num_groups + group;
            picks.iter().enumerate().map(|(row, &pick)| i64::from(self.rows.pages[at(row, pick)])).sum::<i64>() <= free
        })
    }

    /// Tokens that the row must have in a round of so many seconds.
    fn due(&self, row: usize, seconds: f64) -> f64 {
        let due = &self.rows.due[2 * row..2 * row + 2];
        due[0] + due[1] * seconds
    }

    fn has_target(&self, row: usize) -> bool {
        self.rows.due[2 * row + 1] > 0.0
    }

    fn tokens(&self, row: usize, pick: i32) -> f64 {
        self.rows.tokens[row * self.costs.lane.len() + self.shape(row, pick as usize)]
    }

    fn num_missed(&self, picks: &[i32], seconds: f64) -> usize {
        let missed = |row: usize| self.has_target(row) && self.tokens(row, picks[row]) < self.due(row, seconds);
        (0..picks.len()).filter(|&row| missed(row)).count()
    }

    /// The worth per second of rows without a target, or that meet it.
    fn goodput(&self, picks: &[i32]) -> f64 {
        let (_, seconds) = self.value(picks);
        let mut worth = 0.0;
        for (row, &pick) in picks.iter().enumerate() {
            if !self.has_target(row) || self.tokens(row, pick) >= self.due(row, seconds) {
                worth += self.gain(row, pick);
            }
        }
        worth / seconds
    }
}

impl<'a> Solver<'a> {
    fn new(rows: &'a Rows<'a>, costs: &'a Costs<'a>) -> Result<Self> {
        let (num_shapes, num_candidates) = (costs.lane.len(), rows.num_candidates);
        let num_rows = rows.worth.len();
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
        let fields = [
            ("charge", costs.charge),
            ("lane", costs.lane),
            ("nodes", costs.nodes),
            ("tokens", rows.tokens),
            ("worth", rows.worth),
            ("ridge and slope", &[costs.ridge, costs.slope]),
        ];
        for (name, values) in fields {
            if let Some(wrong) = values.iter().find(|value| !(0.0..f64::INFINITY).contains(*value)) {
                return Err(Error::Shape(format!("{name} must be finite and 0 or more, got {wrong}")));
            }
        }
        if !(costs.base > 0.0 && costs.base.is_finite()) || rows.due.iter().any(|due| !due.is_finite()) {
            return Err(Error::Shape(format!("base must be above 0 and due finite, got base {}", costs.base)));
        }
        let cells = num_rows * num_candidates;
        let mut view = View {
            rows,
            costs,
            gain: filled(0.0, cells, "gains")?,
            seconds: filled(0.0, cells, "seconds")?,
            share: Vec::new(),
            used: filled(0, num_candidates, "shapes")?,
            priced_node: f64::NAN,
        };
        view.price(0.0);
        let per_row = rows.shapes.chunks_exact(num_candidates).zip(rows.tokens.chunks_exact(num_shapes));
        for (row, (shapes, tokens)) in per_row.enumerate() {
            for (at, &shape) in shapes.iter().enumerate() {
                view.gain[at * num_rows + row] = rows.worth[row] * tokens[shape as usize];
                view.used[at] |= 1 << shape;
            }
        }
        Ok(Self {
            num_rows,
            used: 0,
            allowed: u64::MAX,
            most: filled(0.0, num_rows, "values")?,
            worth: filled(0.0, num_rows, "values")?,
            took: filled(0.0, num_rows, "values")?,
            index: filled(0.0, num_rows, "values")?,
            picks: filled(0, num_rows, "picks")?,
            best: filled(0, num_rows, "picks")?,
            best_rate: 0.0,
            bound: 0.0,
            rate: 0.0,
            prices: Prices { node: 0.0, page: 0.0 },
            view,
        })
    }

    /// Keeps the picks if they fit and are better than the best so far.
    fn keep(&mut self) -> bool {
        let (worth, seconds) = self.view.value(&self.picks);
        if worth / seconds <= self.best_rate || !self.view.fits(&self.picks) {
            return false;
        }
        self.best_rate = worth / seconds;
        self.best.copy_from_slice(&self.picks);
        true
    }

    /// Each row's best candidate at the rate and the prices; of equals, the first. Returns worth and lane seconds.
    fn pick(&mut self, rate: f64, prices: Prices) -> (f64, f64) {
        self.view.price(prices.node);
        let (num_rows, view) = (self.num_rows, &self.view);
        self.most.fill(f64::NEG_INFINITY);
        self.index.fill(0.0);
        for at in 0..view.rows.num_candidates {
            let cells = at * num_rows..(at + 1) * num_rows;
            let (gains, seconds) = (&view.gain[cells.clone()], &view.seconds[cells.clone()]);
            let is_open = view.used[at] & !self.allowed == 0;
            let state = self.most.iter_mut().zip(&mut self.worth).zip(&mut self.took).zip(&mut self.index);
            let this = at as f64;
            if is_open && prices.page == 0.0 {
                for ((((most, worth), took), pick), (&gain, &seconds)) in state.zip(gains.iter().zip(seconds)) {
                    let value = gain - rate * seconds;
                    let more = value > *most;
                    *most = if more { value } else { *most };
                    *worth = if more { gain } else { *worth };
                    *took = if more { seconds } else { *took };
                    *pick = if more { this } else { *pick };
                }
                continue;
            }
            for (row, (((most, worth), took), pick)) in state.enumerate() {
                let share = if prices.page > 0.0 { view.share[at * num_rows + row] } else { 0.0 };
                let is_allowed = self.allowed >> view.shape(row, at) & 1 == 1;
                let value = gains[row] - rate * seconds[row] - prices.page * share;
                if is_allowed && value > *most {
                    (*most, *worth, *took, *pick) = (value, gains[row], seconds[row], this);
                }
            }
        }
        self.used = 0;
        let picks = self.picks.iter_mut().zip(&self.index);
        for (shapes, (pick, &index)) in view.rows.shapes.chunks_exact(view.rows.num_candidates).zip(picks) {
            *pick = index as i32;
            self.used |= 1 << shapes[index as usize];
        }
        (self.worth.iter().sum(), self.took.iter().sum())
    }

    /// Dinkelbach's iteration at these prices; leaves the picks. Returns λ, an upper bound if no page has a price.
    fn iterate(&mut self, prices: Prices) -> f64 {
        let fixed = self.view.costs.base - prices.node * self.view.costs.ridge;
        // A price of nodes only makes a round shorter, so a rate that was reached is one to begin with. A price of
        // pages may exclude the choice that reached it.
        let mut rate = if prices.page == 0.0 { self.best_rate } else { 0.0 };
        for _ in 0..MOST_STEPS {
            let (worth, paid) = self.pick(rate, prices);
            let seconds = fixed + paid + self.view.charges(self.used);
            if seconds <= 0.0 {
                return f64::INFINITY; // the bound at this price says nothing
            }
            let next = worth / seconds;
            if next <= rate * (1.0 + 1e-12) {
                break;
            }
            rate = next;
        }
        self.rate = rate;
        rate
    }

    /// Solves for the seconds of the nodes, then for the pages.
    fn solve(&mut self) {
        let (ridge, slope) = (self.view.costs.ridge, self.view.costs.slope);
        let mut prices = Prices { node: 0.0, page: 0.0 };
        self.bound = self.iterate(prices);
        let below = self.view.num_nodes(&self.picks) <= ridge || slope == 0.0;
        self.prices = prices;
        self.keep();
        if !below {
            prices.node = slope;
            self.bound = self.bound.min(self.iterate(prices));
            self.prices = prices;
            self.keep();
            if self.view.num_nodes(&self.picks) < ridge {
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
        let mut wide: Option<Vec<i32>> = None;
        for _ in 0..HALVINGS {
            let prices = Prices { node: (low + high) / 2.0, page: 0.0 };
            self.bound = self.bound.min(self.iterate(prices));
            self.prices = prices;
            self.keep();
            if self.view.num_nodes(&self.picks) > self.view.costs.ridge {
                low = prices.node;
                wide = Some(self.picks.clone());
            } else {
                high = prices.node;
            }
        }
        if let Some(wide) = wide {
            self.iterate(Prices { node: high, page: 0.0 });
            self.widen_to(&wide);
        }
    }

    /// Finds a price of pages at which the choice fits, then widens row by row while pages and rate allow.
    fn pay_for_pages(&mut self) {
        let (num_groups, free) = (self.view.rows.free.len(), self.view.rows.free);
        let wide = self.picks.clone();
        self.view.share = vec![0.0; self.view.gain.len()];
        for (cell, pages) in self.view.rows.pages.chunks_exact(num_groups).enumerate() {
            let share = |(&pages, &free): (&i32, &i64)| f64::from(pages) / (free.max(0) as f64 + 1.0);
            let (row, at) = (cell / self.view.rows.num_candidates, cell % self.view.rows.num_candidates);
            self.view.share[at * self.num_rows + row] = pages.iter().zip(free).map(share).sum();
        }
        let node = self.prices.node;
        let (mut low, mut high) = (0.0, 1e-3 * self.view.gain.iter().sum::<f64>().max(1e-9));
        for _ in 0..MOST_STEPS {
            self.iterate(Prices { node, page: high });
            if self.view.fits(&self.picks) {
                break;
            }
            (low, high) = (high, 4.0 * high);
        }
        for _ in 0..HALVINGS {
            let page = (low + high) / 2.0;
            self.iterate(Prices { node, page });
            if self.view.fits(&self.picks) {
                high = page;
                self.keep();
            } else {
                low = page;
            }
        }
        self.prices.page = high;
        self.iterate(self.prices);
        self.keep();
        self.widen_to(&wide);
    }

    /// Moves rows from the picks towards `wide`, each as far as it fits and raises the rate.
    fn widen_to(&mut self, wide: &[i32]) {
        if !self.view.fits(&self.picks) {
            return;
        }
        let num_groups = self.view.rows.free.len();
        let num_candidates = self.view.rows.num_candidates;
        let pages = self.view.rows.pages;
        let mut left = self.view.rows.free.to_vec();
        for (row, &pick) in self.picks.iter().enumerate().take(if pages.is_empty() { 0 } else { self.num_rows }) {
            for (group, left) in left.iter_mut().enumerate() {
                *left -= i64::from(pages[(row * num_candidates + pick as usize) * num_groups + group]);
            }
        }
        let (mut worth, mut seconds) = self.view.value(&self.picks);
        let mut nodes = self.view.num_nodes(&self.picks);
        let over = |nodes: f64| self.view.costs.slope * (nodes - self.view.costs.ridge).max(0.0);
        for (row, &to) in wide.iter().enumerate() {
            let from = self.picks[row];
            if to == from {
                continue;
            }
            let at = |pick: i32, group: usize| (row * num_candidates + pick as usize) * num_groups + group;
            let more = |group: usize| {
                if pages.is_empty() { 0 } else { i64::from(pages[at(to, group)]) - i64::from(pages[at(from, group)]) }
            };
            let (old, new) = (self.view.shape(row, from as usize), self.view.shape(row, to as usize));
            if self.used >> new & 1 == 0 || (0..num_groups).any(|group| more(group) > left[group]) {
                continue;
            }
            let costs = self.view.costs;
            let after = nodes + costs.nodes[new] - costs.nodes[old];
            let (more_worth, more_seconds) = (
                self.view.gain(row, to) - self.view.gain(row, from),
                costs.lane[new] - costs.lane[old] + over(after) - over(nodes),
            );
            if (worth + more_worth) * seconds > worth * (seconds + more_seconds) {
                (worth, seconds, nodes) = (worth + more_worth, seconds + more_seconds, after);
                for (group, left) in left.iter_mut().enumerate() {
                    *left -= more(group);
                }
                self.picks[row] = to;
            }
        }
        self.keep();
    }

    /// Gives up shapes whose rows gain less than the shape costs once, the worst first.
    fn drop_charges(&mut self) {
        let num_shapes = self.view.costs.lane.len();
        if self.view.costs.charge.iter().all(|&charge| charge == 0.0) {
            return;
        }
        for _ in 0..num_shapes {
            let (rate, prices) = (self.best_rate, self.prices);
            self.pick(rate, prices);
            let mut worst = (0.0, None);
            for shape in 0..num_shapes {
                let (bit, price) = (1_u64 << shape, rate * self.view.costs.charge[shape]);
                if price == 0.0 || self.used & bit == 0 {
                    continue;
                }
                let net = self.regret(shape, price - worst.0, rate, prices) - price;
                if net < worst.0 {
                    worst = (net, Some(bit));
                }
            }
            let Some(bit) = worst.1 else { break };
            self.allowed &= !bit;
            self.iterate(prices);
            self.keep();
        }
        self.allowed = u64::MAX;
    }

    /// What the rows that have a shape would lose without it, counted up to `enough`; infinite if one has nothing else.
    fn regret(&self, shape: usize, enough: f64, rate: f64, prices: Prices) -> f64 {
        let view = &self.view;
        let mut regret = 0.0;
        for (row, &pick) in self.picks.iter().enumerate() {
            if view.shape(row, pick as usize) != shape {
                continue;
            }
            let mut other = f64::NEG_INFINITY;
            for at in 0..view.rows.num_candidates {
                let (instead, cell) = (view.shape(row, at), at * self.num_rows + row);
                if instead != shape && self.allowed >> instead & 1 == 1 {
                    let share = if prices.page > 0.0 { view.share[cell] } else { 0.0 };
                    other = other.max(view.gain[cell] - rate * view.seconds[cell] - prices.page * share);
                }
            }
            regret += self.most[row] - other;
            if regret >= enough {
                break;
            }
        }
        regret
    }

    /// Begins with the best candidate that is the same for all rows, so that the choice is never worse.
    fn try_alike(&mut self) {
        let costs = self.view.costs;
        for at in 0..self.view.rows.num_candidates {
            let cells = at * self.num_rows..(at + 1) * self.num_rows;
            let worth: f64 = self.view.gain[cells.clone()].iter().sum();
            let lanes: f64 = self.view.seconds[cells].iter().sum();
            let seconds = costs.base + self.view.charges(self.view.used[at]) + lanes;
            if worth > self.best_rate * seconds {
                self.picks.fill(at as i32);
                self.keep();
            }
        }
    }

    /// Looks for the choice with the most worth of rows that meet their targets. Rows with a target get the cheapest
    /// candidate that meets it; the others draft less and less, so that rounds become shorter.
    fn meet_targets(&mut self) {
        let (_, mut seconds) = self.view.value(&self.best);
        if self.view.num_missed(&self.best, seconds) == 0 {
            return;
        }
        let mut most = (self.view.goodput(&self.best), self.best_rate);
        let node = if self.view.num_nodes(&self.best) < self.view.costs.ridge { 0.0 } else { self.view.costs.slope };
        let mut rate = self.best_rate;
        for _ in 0..NUM_RATES {
            self.pick(rate, Prices { node, page: self.prices.page });
            for row in 0..self.num_rows {
                if self.view.has_target(row) {
                    self.serve(row, seconds, node);
                }
            }
            let (worth, took) = self.view.value(&self.picks);
            seconds = took;
            let found = (self.view.goodput(&self.picks), worth / took);
            if found > most && self.view.fits(&self.picks) {
                most = found;
                self.best.copy_from_slice(&self.picks);
            }
            rate *= RATE_STEP;
        }
    }

    /// Gives a row the cheapest candidate that meets its target in a round of so many seconds, if there is one.
    fn serve(&mut self, row: usize, seconds: f64, node: f64) {
        let due = self.view.due(row, seconds);
        let mut least = f64::INFINITY;
        for at in 0..self.view.rows.num_candidates {
            let shape = self.view.shape(row, at);
            let cost = self.view.costs.lane[shape] + node * self.view.costs.nodes[shape];
            if self.view.tokens(row, at as i32) >= due && cost < least {
                (least, self.picks[row]) = (cost, at as i32);
            }
        }
    }
}
