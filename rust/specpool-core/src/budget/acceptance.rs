//! Acceptance by depth: decayed counts of each row, with those of all rows as their prior (docs/adaptive.md).
//!
//! A *family* is a set of shapes of one drafter whose depths are alike: its chains, or its trees of one width and
//! size. Counts are conditional: a depth is tried by the rows that were right up to it.

use crate::check::same_len;
use crate::error::{Error, Result};
use crate::memory::{filled, with_room};

/// What a row's counts weigh after it has drafted again: a memory of about 25 rounds.
const ROW_DECAY: f32 = 0.96;
/// What a row's counts weigh after a round without a draft. A row that does not draft goes back to its prior.
const IDLE_DECAY: f32 = 0.98;
/// Tries that the prior of a row's depth counts as.
const PRIOR_TRIES: f64 = 8.0;
/// The variance of log odds between rows that is assumed before there are rows, and the information that it counts as.
const SPREAD: f64 = 1.0;
const SPREAD_INFORMATION: f64 = 8.0;
/// The least variance, so that a row that changes is seen among rows that are alike.
const LEAST_SPREAD: f64 = 0.05;
/// Standard deviations that may be asked for.
const MOST_DEVIATIONS: f64 = 8.0;
/// The nearest that a prior comes to 0 and to 1, so that odds are finite.
const EDGE: f64 = 0.01;

/// How deep each shape drafts, and in which family.
#[derive(Debug, Clone, Copy)]
pub struct Families<'a> {
    /// `[S]`: the family of each shape; -1 = it drafts nothing.
    pub family: &'a [i32],
    /// `[S]`: the depth of each shape's drafts, at most `depth`.
    pub num_steps: &'a [i32],
    /// Families.
    pub num_families: usize,
    /// Depths that are counted in each family.
    pub depth: usize,
}

impl Families<'_> {
    fn check(&self) -> Result<()> {
        same_len("num_steps", self.num_steps.len(), self.family.len())?;
        for (shape, (&family, &steps)) in self.family.iter().zip(self.num_steps).enumerate() {
            let drafts = family >= 0;
            if family < -1 || family >= self.num_families as i32 || steps < 0 || steps > self.depth as i32 {
                return Err(Error::Shape(format!(
                    "shape {shape} has family {family} and {steps} steps; there are {} families of {} depths",
                    self.num_families, self.depth
                )));
            }
            if drafts != (steps > 0) {
                return Err(Error::Shape(format!("shape {shape} has family {family}, but {steps} steps")));
            }
        }
        Ok(())
    }

    /// The counts of one row.
    fn per_row(&self) -> usize {
        self.num_families * self.depth
    }

    /// Where a row's counts begin.
    fn start_of(&self, row: i32, num_rows: usize) -> Result<usize> {
        if row < 0 || row as usize >= num_rows {
            return Err(Error::Shape(format!("row {row} is not in [0, {num_rows})")));
        }
        Ok(row as usize * self.per_row())
    }

    /// The prior, `[F, depth]`, kept from 0 and 1, and the odds of these rows beside it, `[B]`, whose counts are
    /// `[rows, F, depth]`. Their logarithms are raised by so many standard deviations.
    fn odds(
        &self,
        hits: &[f32],
        tries: &[f32],
        prior: &[f64],
        rows: &[i32],
        deviations: f64,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        let per_row = self.per_row();
        if !(0.0..=MOST_DEVIATIONS).contains(&deviations) {
            return Err(Error::Shape(format!("deviations must be in [0, {MOST_DEVIATIONS}], got {deviations}")));
        }
        same_len("tries", tries.len(), hits.len())?;
        same_len("prior", prior.len(), per_row)?;
        if let Some(wrong) = prior.iter().find(|rate| !(0.0..=1.0).contains(*rate)) {
            return Err(Error::Shape(format!("a prior must be in [0, 1], got {wrong}")));
        }
        let num_rows = hits.len().checked_div(per_row).unwrap_or(0);
        let mut edged = with_room(per_row, "odds")?;
        edged.extend(prior.iter().map(|rate| rate.clamp(EDGE, 1.0 - EDGE)));
        let mut scores = with_room(rows.len(), "odds")?;
        for &row in rows {
            let first = self.start_of(row, num_rows)?;
            let cells = first..first + per_row;
            scores.push(score(&hits[cells.clone()], &tries[cells], &edged));
        }
        let spread = spread(&scores);
        let mut odds = with_room(rows.len(), "odds")?;
        // The posterior of the row's log odds, by a normal prior and one step of the likelihood's score.
        odds.extend(scores.iter().map(|(excess, information)| {
            let variance = spread / (1.0 + spread * information);
            (variance * excess + deviations * variance.sqrt()).exp()
        }));
        Ok((edged, odds))
    }

    fn shape(&self, shape: i32) -> Result<usize> {
        if shape < 0 || shape as usize >= self.family.len() {
            return Err(Error::Shape(format!("shape {shape} is not in [0, {})", self.family.len())));
        }
        Ok(shape as usize)
    }
}

/// Counts a round: `hits` and `tries` are `[rows, F, depth]`, the others one entry per lane.
///
/// A lane that drafted adds to its family. A lane that did not fades, so that the row is tried again some day.
/// Returns `[F, depth, 2]`: hits and tries of the lanes together. With a prior, `[F, depth]`, the hits are less those that
/// the rows owe to their own odds: a family is drafted by rows that gain by it, and would look as those rows are.
///
/// # Errors
/// [`Error::Shape`] for lengths, rows, shapes or accept lengths that cannot be, and for a prior that is no probability;
/// nothing is counted then.
pub fn count_round(
    families: &Families<'_>,
    hits: &mut [f32],
    tries: &mut [f32],
    prior: Option<&[f64]>,
    rows: &[i32],
    shapes: &[i32],
    accept_len: &[i32],
) -> Result<Vec<f64>> {
    families.check()?;
    let per_row = families.per_row();
    same_len("tries", tries.len(), hits.len())?;
    same_len("shapes", shapes.len(), rows.len())?;
    same_len("accept_len", accept_len.len(), rows.len())?;
    let num_rows = hits.len().checked_div(per_row).unwrap_or(0);
    for ((&row, &shape), &len) in rows.iter().zip(shapes).zip(accept_len) {
        families.start_of(row, num_rows)?;
        let steps = families.num_steps[families.shape(shape)?];
        if len < 1 || len > steps + 1 {
            return Err(Error::Shape(format!("an accept length of {len} after {steps} steps")));
        }
    }
    let own = match prior {
        Some(prior) => Some(families.odds(hits, tries, prior, rows, 0.0)?),
        None => None,
    };
    let mut totals = filled(0.0, 2 * per_row, "totals")?;
    for (lane, ((&row, &shape), &len)) in rows.iter().zip(shapes).zip(accept_len).enumerate() {
        let first = row as usize * per_row;
        let family = families.family[shape as usize];
        if family < 0 {
            for count in hits[first..first + per_row].iter_mut().chain(&mut tries[first..first + per_row]) {
                *count *= IDLE_DECAY;
            }
            continue;
        }
        let at = family as usize * families.depth;
        // All depths fade, or a row that turns hard would keep its old luck where it no longer gets to.
        let cells = first + at..first + at + families.depth;
        for count in hits[cells.clone()].iter_mut().chain(&mut tries[cells]) {
            *count *= ROW_DECAY;
        }
        for depth in 0..(families.num_steps[shape as usize] as usize).min(len as usize) {
            let is_hit = u8::from(depth + 1 < len as usize);
            hits[first + at + depth] += f32::from(is_hit);
            tries[first + at + depth] += 1.0;
            let owed =
                own.as_ref().map_or(0.0, |(edged, odds)| with_odds(edged[at + depth], odds[lane]) - edged[at + depth]);
            totals[2 * (at + depth)] += f64::from(is_hit) - owed;
            totals[2 * (at + depth) + 1] += 1.0;
        }
    }
    if own.is_some() {
        for cell in totals.chunks_exact_mut(2) {
            cell[0] = cell[0].clamp(0.0, cell[1]);
        }
    }
    Ok(totals)
}

/// The expected tokens of each row's round with each shape, `[B, S]`, the bonus token included.
///
/// `hits` and `tries` are `[rows, F, depth]`, `prior` is `[F, depth]`: the rates of all rows. A row's rate at a depth
/// is `(hits + m q) / (tries + m)`, where q has the prior's odds times the row's own odds. These come from all counts
/// of the row, and are drawn towards 1 the more, the less the rows differ. With `deviations` the logarithm of a row's
/// own odds is so many standard deviations above the estimate.
///
/// # Errors
/// [`Error::Shape`] for lengths or rows that cannot be, for a prior that is no probability, and for deviations that are
/// not in `[0, 8]`.
pub fn expected_tokens(
    families: &Families<'_>,
    hits: &[f32],
    tries: &[f32],
    prior: &[f64],
    rows: &[i32],
    deviations: f64,
) -> Result<Vec<f64>> {
    families.check()?;
    let per_row = families.per_row();
    let (edged, odds) = families.odds(hits, tries, prior, rows, deviations)?;
    let mut tokens = with_room(rows.len() * families.family.len(), "expected tokens")?;
    // The tokens of a family's drafts up to each depth. Without a draft that is 1, as before any depth.
    let width = families.depth + 1;
    let mut reach = filled(1.0, families.num_families * width, "expected tokens")?;
    for (&row, odds) in rows.iter().zip(odds) {
        for family in 0..families.num_families {
            let mut reached = 1.0;
            for depth in 0..families.depth {
                let cell = family * families.depth + depth;
                let (hit, tried) = (hits[row as usize * per_row + cell], tries[row as usize * per_row + cell]);
                let rate = with_odds(edged[cell], odds);
                reached *= (f64::from(hit) + PRIOR_TRIES * rate) / (f64::from(tried) + PRIOR_TRIES);
                reach[family * width + depth + 1] = reach[family * width + depth] + reached;
            }
        }
        let shapes = families.family.iter().zip(families.num_steps);
        tokens.extend(shapes.map(|(&family, &steps)| reach[family.max(0) as usize * width + steps as usize]));
    }
    Ok(tokens)
}

/// A rate whose odds are so many times as great.
fn with_odds(rate: f64, odds: f64) -> f64 {
    let lean = odds * rate / (1.0 - rate);
    lean / (1.0 + lean)
}

/// Hits beyond those of the prior, which is within [`EDGE`], and the information in them: their variance, half-way
/// from the prior's rate to the row's. With the prior's own, a row that is right 3 times of 10 beside a prior of 0.93
/// would be taken for one that is never right.
fn score(hits: &[f32], tries: &[f32], edged: &[f64]) -> (f64, f64) {
    let (mut right, mut tried, mut expected, mut variance) = (0.0, 0.0, 0.0, 0.0);
    for ((&hit, &tries), rate) in hits.iter().zip(tries).zip(edged) {
        let tries = f64::from(tries);
        right += f64::from(hit);
        tried += tries;
        expected += tries * rate;
        variance += tries * rate * (1.0 - rate);
    }
    if tried == 0.0 {
        return (0.0, 0.0);
    }
    let (prior, middle) = (expected / tried, 0.5 * (expected + right) / tried);
    (right - expected, variance * middle * (1.0 - middle) / (prior * (1.0 - prior)))
}

/// The variance of log odds between the rows, by moments: what the scores vary more than by chance.
fn spread(scores: &[(f64, f64)]) -> f64 {
    let (mut beyond, mut total) = (SPREAD * SPREAD_INFORMATION, SPREAD_INFORMATION);
    for &(excess, information) in scores {
        if information > 0.5 {
            beyond += excess * excess / information - 1.0;
            total += information;
        }
    }
    (beyond / total).max(LEAST_SPREAD)
}
