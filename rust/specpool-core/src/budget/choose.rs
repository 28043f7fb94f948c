//! Which candidate each row of a round gets: the most tokens per second in the long run, under memory.
//!
//! A row that stays for a given number of tokens stays `1 / tokens` rounds for each of them. So a token costs the
//! row's share of the round (its *rent*) and the seconds of its own draft, both over the tokens of its round, and the
//! rows' costs add up. Each row takes the candidate whose token is the cheapest. Nodes beyond the ridge, and pages in
//! short supply, have a price. docs/budget.md proves each step, and shows why the tokens of the next round over its
//! seconds are the wrong thing to maximise.

mod cheapest;
mod solver;
mod view;

use crate::check::same_len;
use crate::error::{Error, Result};
use solver::Solver;

/// Values that are checked at once.
const BLOCK: usize = 64;

/// The seconds of a round: `base + sum of charge of the shapes used + sum of (lane + per_token * context) of the rows +
/// slope * max(0, nodes - ridge - ridge_per_token * context of all rows)`.
#[derive(Debug, Clone, Copy)]
pub struct Costs<'a> {
    /// Of a round with this many rows that drafts nothing, in seconds, above 0.
    pub base: f64,
    /// Nodes that one verify computes at no further cost.
    pub ridge: f64,
    /// More of them for each token of the rows' contexts.
    pub ridge_per_token: f64,
    /// Seconds of each further node.
    pub slope: f64,
    /// `[S]`: seconds that a shape costs once, if any row has it.
    pub charge: &'a [f64],
    /// `[S]`: seconds that each row of a shape adds.
    pub lane: &'a [f64],
    /// `[S]`: seconds that each token of a row's context adds to `lane`; empty = none.
    pub per_token: &'a [f64],
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
    /// `[B, S]`: tokens by which a row is judged to be in time, 1 or more; empty = `tokens`.
    pub hoped: &'a [f64],
    /// `[B]`: tokens that the row's context has; empty = 0.
    pub context: &'a [f64],
    /// `[B]`: what the row's time is worth.
    pub worth: &'a [f64],
    /// `[B]`: tokens of the row's rounds so far, above 0. A row is in the batch for the longer, the fewer it gives, so
    /// it stands for as many of the batch's tokens as one of its rounds gives.
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
    let num_targets = solver.view.targets.len();
    if num_targets > 0 {
        solver.meet_targets();
    }
    let num_hopeless = num_targets - solver.view.targets.len();
    let (found, given) = (solver.outcome_of_best(), rows.gives.iter().sum::<f64>());
    // Without a choice that fits, the first candidates are returned.
    let cost = if solver.best_cost.is_finite() { solver.best_cost } else { found.cost };
    Ok(Choice {
        num_missed: found.num_missed + num_hopeless,
        rate: given / cost,
        bound: given / solver.least.clamp(f64::MIN_POSITIVE, cost),
        seconds: found.seconds,
        picks: solver.best,
    })
}

fn check(rows: &Rows<'_>, costs: &Costs<'_>) -> Result<()> {
    let (num_shapes, num_candidates, num_rows) = (costs.lane.len(), rows.num_candidates, rows.worth.len());
    same_len("charge", costs.charge.len(), num_shapes)?;
    same_len("nodes", costs.nodes.len(), num_shapes)?;
    if !costs.per_token.is_empty() {
        same_len("per_token", costs.per_token.len(), num_shapes)?;
    }
    if num_candidates == 0 || num_shapes == 0 || num_shapes > 64 {
        return Err(Error::Shape(format!(
            "a choice needs 1 to 64 shapes and a candidate, got {num_shapes} and {num_candidates}"
        )));
    }
    same_len("shapes", rows.shapes.len(), num_rows * num_candidates)?;
    same_len("tokens", rows.tokens.len(), num_rows * num_shapes)?;
    if !rows.hoped.is_empty() {
        same_len("hoped", rows.hoped.len(), num_rows * num_shapes)?;
    }
    if !rows.context.is_empty() {
        same_len("context", rows.context.len(), num_rows)?;
    }
    same_len("gives", rows.gives.len(), num_rows)?;
    same_len("due", rows.due.len(), 2 * num_rows)?;
    if !rows.pages.is_empty() {
        same_len("pages", rows.pages.len(), num_rows * num_candidates * rows.free.len())?;
    }
    // The greatest as a number without a sign, so that no value needs a branch: this runs in each round.
    if rows.shapes.iter().fold(0, |most, &shape| most.max(shape as u32)) >= num_shapes as u32 {
        let wrong = rows.shapes.iter().find(|&&shape| shape < 0 || shape as usize >= num_shapes).unwrap_or(&0);
        return Err(Error::Shape(format!("shape {wrong} is not in [0, {num_shapes})")));
    }
    let fields: [(&str, &[f64], f64); 10] = [
        ("charge", costs.charge, 0.0),
        ("lane", costs.lane, 0.0),
        ("per_token", costs.per_token, 0.0),
        ("nodes", costs.nodes, 0.0),
        ("context", rows.context, 0.0),
        ("tokens", rows.tokens, 1.0),
        ("hoped", rows.hoped, 1.0),
        ("worth", rows.worth, 0.0),
        ("gives", rows.gives, f64::MIN_POSITIVE),
        ("ridge and slope", &[costs.ridge, costs.ridge_per_token, costs.slope], 0.0),
    ];
    for (name, values, least) in fields {
        let within = least..f64::INFINITY;
        // Whole blocks at a time, so that they are compared side by side.
        let is_good = |block: &[f64]| block.iter().filter(|value| within.contains(*value)).count() == block.len();
        if !values.chunks(BLOCK).all(is_good)
            && let Some(wrong) = values.iter().find(|value| !within.contains(*value))
        {
            return Err(Error::Shape(format!("{name} must be finite and {least} or more, got {wrong}")));
        }
    }
    if !(costs.base > 0.0 && costs.base.is_finite()) || rows.due.iter().any(|due| !due.is_finite()) {
        return Err(Error::Shape(format!("base must be above 0 and due finite, got base {}", costs.base)));
    }
    Ok(())
}
