//! Which candidate each row of a round gets: the one with the least expected seconds a token, within memory.
//!
//! A round takes `base`, the greatest `charge` of the shapes in use (rows of one drafter draft side by side, so only the
//! deepest draft counts), `mixed` if there are several shapes, and the `lane` of each row's shape. A row stays in the
//! batch for `1 / tokens` rounds a token. So its token costs its share of what the round takes once (its *rent*) and
//! its own lane, both over the tokens of its round, and the costs of the rows add up to the *cost* of the batch.
//! If the deepest shape is given, so is the rent, and the cheapest candidate of each row is the cheapest choice. So each
//! shape is tried as the deepest one. The tokens of the next round over its seconds would be the wrong goal: the fewer
//! tokens a round gives a request, the longer the request stays in the batch.

use crate::check::same_len;
use crate::error::{Error, Result};
use crate::memory::{filled, with_room};

/// Rents that are tried for rows that miss their targets, each the one before over `RENT_STEP`.
const NUM_RENTS: i32 = 10;
const RENT_STEP: f64 = 1.8;
/// Times that late rows are looked for: wider rows make the round longer, so more rows may be late.
const NUM_SERVES: usize = 3;

/// The seconds of a round with this many rows.
#[derive(Debug, Clone, Copy)]
pub struct Costs<'a> {
    /// Of a round that drafts nothing, above 0.
    pub base: f64,
    /// More if the rows have several shapes.
    pub mixed: f64,
    /// `[S]`: seconds that a shape adds once, if any row has it; of several shapes the greatest counts.
    pub charge: &'a [f64],
    /// `[S]`: seconds that each row of a shape adds.
    pub lane: &'a [f64],
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
    /// `[B, S]`: tokens by which a row is judged to be in time, 1 or more; empty = `tokens`.
    pub hoped: &'a [f64],
    /// `[B]`: what the row's time is worth.
    pub worth: &'a [f64],
    /// `[B]`: tokens of the row's rounds so far, above 0. A row that gives few tokens a round is in the batch for long,
    /// so it stands for as many of the batch's tokens as one of its rounds gives.
    pub gives: &'a [f64],
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
    /// The expected seconds of the round.
    pub seconds: f64,
    /// Rows with a target that is expected to be missed in this round.
    pub num_missed: usize,
}

/// Chooses a candidate for each row. Equal inputs give equal choices. `O(B C S)`; more if targets are missed.
///
/// # Errors
/// [`Error::Shape`] for lengths that differ, or numbers that are not finite or out of range.
pub fn choose(rows: &Rows<'_>, costs: &Costs<'_>) -> Result<Choice> {
    check(rows, costs)?;
    let chooser = Chooser::new(rows, costs)?;
    if chooser.num_rows == 0 {
        return Ok(Choice { picks: Vec::new(), rate: 0.0, seconds: costs.base, num_missed: 0 });
    }
    let mut picks = chooser.cheapest_choice()?;
    let is_missed = |picks: &[i32]| {
        let seconds = chooser.seconds(picks);
        (0..chooser.num_rows).filter(|&row| chooser.misses(row, picks[row], seconds)).count()
    };
    if is_missed(&picks) > 0 {
        picks = chooser.meet_targets(picks)?;
    }
    Ok(Choice {
        rate: rows.gives.iter().sum::<f64>() / chooser.cost(&picks),
        seconds: chooser.seconds(&picks),
        num_missed: is_missed(&picks),
        picks,
    })
}

struct Chooser<'a> {
    rows: &'a Rows<'a>,
    costs: &'a Costs<'a>,
    num_rows: usize,
    /// `[B, C]`: the cost of a candidate is `rent * fixed + lane`, where a round takes `fixed` seconds once.
    rent: Vec<f64>,
    lane: Vec<f64>,
}

impl<'a> Chooser<'a> {
    fn new(rows: &'a Rows<'a>, costs: &'a Costs<'a>) -> Result<Self> {
        let (num_rows, num_shapes) = (rows.worth.len(), costs.lane.len());
        let mut rent = with_room(rows.shapes.len(), "rents")?;
        let mut lane = with_room(rows.shapes.len(), "seconds")?;
        for (row, shapes) in rows.shapes.chunks_exact(rows.num_candidates).enumerate() {
            let tokens = &rows.tokens[row * num_shapes..(row + 1) * num_shapes];
            for &shape in shapes {
                let rounds = rows.gives[row] / tokens[shape as usize];
                rent.push(rows.worth[row] * rounds / num_rows as f64);
                lane.push(costs.lane[shape as usize] * rounds);
            }
        }
        Ok(Self { rows, costs, num_rows, rent, lane })
    }

    fn cell(&self, row: usize, pick: i32) -> usize {
        row * self.rows.num_candidates + pick as usize
    }

    fn shape(&self, row: usize, pick: i32) -> usize {
        self.rows.shapes[self.cell(row, pick)] as usize
    }

    /// The seconds that a round with these picks takes once.
    fn fixed(&self, picks: &[i32]) -> f64 {
        let first = self.shape(0, picks[0]);
        let (mut charge, mut mixed) = (0.0_f64, 0.0);
        for (row, &pick) in picks.iter().enumerate() {
            let shape = self.shape(row, pick);
            charge = charge.max(self.costs.charge[shape]);
            if shape != first {
                mixed = self.costs.mixed;
            }
        }
        self.costs.base + charge + mixed
    }

    fn seconds(&self, picks: &[i32]) -> f64 {
        let lanes = picks.iter().enumerate().map(|(row, &pick)| self.costs.lane[self.shape(row, pick)]);
        self.fixed(picks) + lanes.sum::<f64>()
    }

    /// The seconds of the tokens that the rows stand for, summed.
    fn cost(&self, picks: &[i32]) -> f64 {
        let cells = || picks.iter().enumerate().map(|(row, &pick)| self.cell(row, pick));
        let rent: f64 = cells().map(|cell| self.rent[cell]).sum();
        rent * self.fixed(picks) + cells().map(|cell| self.lane[cell]).sum::<f64>()
    }

    /// The cheapest choice that has the pages; the first candidates if there is none.
    fn cheapest_choice(&self) -> Result<Vec<i32>> {
        let (mut best, mut least) = (filled(0, self.num_rows, "picks")?, f64::INFINITY);
        let mut picks = filled(0, self.num_rows, "picks")?;
        for pick in 0..self.rows.num_candidates {
            picks.fill(pick as i32);
            self.keep(&picks, &mut best, &mut least);
        }
        for &charge in self.costs.charge {
            self.pick(self.costs.base + charge + self.costs.mixed, charge, &mut picks);
            self.fit_pages(self.fixed(&picks), &mut picks)?;
            self.keep(&picks, &mut best, &mut least);
        }
        Ok(best)
    }

    /// Keeps picks that have the pages and cost less than the best so far.
    fn keep(&self, picks: &[i32], best: &mut [i32], least: &mut f64) {
        let cost = self.cost(picks);
        if cost < *least && self.fits(picks) {
            *least = cost;
            best.copy_from_slice(picks);
        }
    }

    /// Gives each row its cheapest candidate with at most this charge; of equals, the first.
    fn pick(&self, fixed: f64, most_charge: f64, picks: &mut [i32]) {
        for (row, best) in picks.iter_mut().enumerate() {
            let mut least = f64::INFINITY;
            *best = 0;
            for pick in 0..self.rows.num_candidates as i32 {
                let cost = self.cell_cost(row, pick, fixed);
                if cost < least && self.costs.charge[self.shape(row, pick)] <= most_charge {
                    (*best, least) = (pick, cost);
                }
            }
        }
    }

    /// The cost of a row's candidate in a round that takes `fixed` seconds once.
    fn cell_cost(&self, row: usize, pick: i32, fixed: f64) -> f64 {
        let cell = self.cell(row, pick);
        self.rent[cell] * fixed + self.lane[cell]
    }

    /// The pages that a candidate needs in each group beyond the row's first.
    fn pages(&self, row: usize, pick: i32) -> &[i32] {
        let num_groups = self.rows.free.len();
        &self.rows.pages[self.cell(row, pick) * num_groups..][..num_groups]
    }

    fn fits(&self, picks: &[i32]) -> bool {
        if self.rows.pages.is_empty() {
            return true;
        }
        let needs = |group: usize| {
            picks.iter().enumerate().map(|(row, &pick)| i64::from(self.pages(row, pick)[group])).sum::<i64>()
        };
        self.rows.free.iter().enumerate().all(|(group, &free)| needs(group) <= free)
    }

    /// Narrows rows until the picks have their pages: rows get pages in the order of what they save for each, and each
    /// takes the cheapest candidate, not wider than its pick, that is left for it.
    fn fit_pages(&self, fixed: f64, picks: &mut [i32]) -> Result<()> {
        if self.fits(picks) {
            return Ok(());
        }
        let cost = |row: usize, pick: i32| self.cell_cost(row, pick, fixed);
        let mut order = with_room(self.num_rows, "rows")?;
        for (row, &pick) in picks.iter().enumerate() {
            let shares = self.pages(row, pick).iter().zip(self.rows.free);
            let share: f64 = shares.map(|(&pages, &free)| f64::from(pages) / (free.max(0) as f64 + 1.0)).sum();
            order.push(((cost(row, 0) - cost(row, pick)) / share.max(f64::MIN_POSITIVE), row));
        }
        order.sort_by(|left, right| right.0.total_cmp(&left.0).then(left.1.cmp(&right.1)));
        let mut left: Vec<i64> = self.rows.free.to_vec();
        for (_, row) in order {
            let mut best = 0;
            for pick in 1..=picks[row] {
                let has_pages = self.pages(row, pick).iter().zip(&left).all(|(&pages, &left)| i64::from(pages) <= left);
                if has_pages && cost(row, pick) < cost(row, best) {
                    best = pick;
                }
            }
            picks[row] = best;
            for (left, &pages) in left.iter_mut().zip(self.pages(row, best)) {
                *left -= i64::from(pages);
            }
        }
        Ok(())
    }

    /// The tokens that a row's round of these seconds must give; 0 without a target.
    fn due(&self, row: usize, seconds: f64) -> f64 {
        self.rows.due[2 * row] + self.rows.due[2 * row + 1] * seconds
    }

    fn has_target(&self, row: usize) -> bool {
        self.rows.due[2 * row + 1] > 0.0
    }

    /// Whether a row has a target and misses it in a round of these seconds.
    fn misses(&self, row: usize, pick: i32, seconds: f64) -> bool {
        self.has_target(row) && self.hoped(row, pick) < self.due(row, seconds)
    }

    /// The tokens by which a row is judged to be in time.
    fn hoped(&self, row: usize, pick: i32) -> f64 {
        let tokens = if self.rows.hoped.is_empty() { self.rows.tokens } else { self.rows.hoped };
        tokens[row * self.costs.lane.len() + self.shape(row, pick)]
    }

    /// The worth of the tokens of rows in time over the cost of all.
    fn goodput(&self, picks: &[i32]) -> f64 {
        let seconds = self.seconds(picks);
        let in_time = (0..self.num_rows).filter(|&row| !self.misses(row, picks[row], seconds));
        in_time.map(|row| self.rows.worth[row] * self.rows.gives[row]).sum::<f64>() / self.cost(picks)
    }

    /// Looks for picks with a greater goodput than these. It begins with one candidate for all rows, then with choices
    /// of ever lower rents, whose rounds are shorter. In each of them late rows take a wider candidate.
    fn meet_targets(&self, mut best: Vec<i32>) -> Result<Vec<i32>> {
        let mut most = self.goodput(&best);
        let shortest = self.costs.base + (0..self.num_rows).map(|row| self.shortest_lane(row)).sum::<f64>();
        let all = 0..self.rows.num_candidates as i32;
        let mut hopes = with_room(self.num_rows, "rows")?; // rows with a target that some candidate may meet
        hopes.extend(
            (0..self.num_rows)
                .filter(|&row| self.has_target(row) && all.clone().any(|pick| !self.misses(row, pick, shortest))),
        );
        let mut picks = filled(0, self.num_rows, "picks")?;
        for pick in all {
            picks.fill(pick);
            self.keep_greater(&picks, &mut best, &mut most);
            self.serve(&hopes, self.fixed(&picks), &mut picks, &mut best, &mut most)?;
        }
        let mut fixed = self.fixed(&best);
        for _ in 0..NUM_RENTS {
            self.pick(fixed, f64::INFINITY, &mut picks);
            self.serve(&hopes, fixed, &mut picks, &mut best, &mut most)?;
            fixed /= RENT_STEP;
        }
        Ok(best)
    }

    /// Keeps picks that have the pages and a greater goodput than the best so far.
    fn keep_greater(&self, picks: &[i32], best: &mut [i32], most: &mut f64) {
        let goodput = self.goodput(picks);
        if goodput > *most && self.fits(picks) {
            *most = goodput;
            best.copy_from_slice(picks);
        }
    }

    fn shortest_lane(&self, row: usize) -> f64 {
        let picks = 0..self.rows.num_candidates as i32;
        picks.map(|pick| self.costs.lane[self.shape(row, pick)]).fold(f64::INFINITY, f64::min)
    }

    /// Widens late rows of the picks, and keeps what has the pages and a greater goodput than `most`.
    ///
    /// A late row takes the cheapest candidate that is in time, if its worth over what that adds to the cost is above
    /// `most`: a row below it would lower the goodput.
    fn serve(&self, hopes: &[usize], fixed: f64, picks: &mut Vec<i32>, best: &mut [i32], most: &mut f64) -> Result<()> {
        let mut seconds = self.seconds(picks);
        let mut wider = filled(0, self.num_rows, "picks")?;
        for _ in 0..NUM_SERVES {
            wider.copy_from_slice(picks);
            for &row in hopes.iter().filter(|&&row| self.misses(row, picks[row], seconds)) {
                let cost = |pick| self.cell_cost(row, pick, fixed);
                let mut least = cost(picks[row]) + self.rows.worth[row] * self.rows.gives[row] / *most;
                for pick in 0..self.rows.num_candidates as i32 {
                    if cost(pick) < least && !self.misses(row, pick, seconds) {
                        (wider[row], least) = (pick, cost(pick));
                    }
                }
            }
            self.keep_greater(&wider, best, most);
            let longer = self.seconds(&wider);
            if longer <= seconds {
                break;
            }
            seconds = longer;
            std::mem::swap(picks, &mut wider);
        }
        Ok(())
    }
}

fn check(rows: &Rows<'_>, costs: &Costs<'_>) -> Result<()> {
    let (num_shapes, num_candidates, num_rows) = (costs.lane.len(), rows.num_candidates, rows.worth.len());
    same_len("charge", costs.charge.len(), num_shapes)?;
    if num_candidates == 0 || num_shapes == 0 {
        return Err(Error::Shape(format!(
            "a choice needs a shape and a candidate, got {num_shapes} and {num_candidates}"
        )));
    }
    same_len("shapes", rows.shapes.len(), num_rows * num_candidates)?;
    same_len("tokens", rows.tokens.len(), num_rows * num_shapes)?;
    if !rows.hoped.is_empty() {
        same_len("hoped", rows.hoped.len(), num_rows * num_shapes)?;
    }
    same_len("gives", rows.gives.len(), num_rows)?;
    same_len("due", rows.due.len(), 2 * num_rows)?;
    if !rows.pages.is_empty() {
        same_len("pages", rows.pages.len(), num_rows * num_candidates * rows.free.len())?;
    }
    if let Some(wrong) = rows.shapes.iter().find(|&&shape| shape < 0 || shape as usize >= num_shapes) {
        return Err(Error::Shape(format!("shape {wrong} is not in [0, {num_shapes})")));
    }
    let fields: [(&str, &[f64], f64); 7] = [
        ("mixed", &[costs.mixed], 0.0),
        ("charge", costs.charge, 0.0),
        ("lane", costs.lane, 0.0),
        ("tokens", rows.tokens, 1.0),
        ("hoped", rows.hoped, 1.0),
        ("worth", rows.worth, 0.0),
        ("gives", rows.gives, f64::MIN_POSITIVE),
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
