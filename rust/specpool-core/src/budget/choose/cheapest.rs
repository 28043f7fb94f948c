//! `Cheapest`: each row's cheapest candidate so far. Candidates come one by one, each for all rows at once.
#![allow(clippy::inline_always, reason = "only what is inlined is compiled for the instructions chosen")]

use pulp::Arch;

use crate::error::Result;
use crate::memory::filled;

pub(super) struct Cheapest {
    arch: Arch,
    /// `[B]`: the least cost of a token, and its candidate as a number of the same width.
    cost: Vec<f64>,
    index: Vec<f64>,
}

impl Cheapest {
    pub(super) fn new(num_rows: usize) -> Result<Self> {
        Ok(Self { arch: Arch::new(), cost: filled(0.0, num_rows, "costs")?, index: filled(0.0, num_rows, "picks")? })
    }

    /// Forgets all candidates.
    pub(super) fn begin(&mut self) {
        self.cost.fill(f64::INFINITY);
        self.index.fill(0.0);
    }

    /// Takes candidate `at` where it costs less; `costs` has the cost of each row.
    pub(super) fn take(&mut self, at: usize, costs: impl Iterator<Item = f64>) {
        let (cost, index) = (&mut self.cost, &mut self.index);
        self.arch.dispatch(|| keep(cost, index, at as f64, costs));
    }

    /// The least cost of a row.
    pub(super) fn cost(&self, row: usize) -> f64 {
        self.cost[row]
    }

    /// The cheapest candidate of each row; of equals the first, and the first of all if none has a finite cost.
    pub(super) fn candidates(&self) -> impl Iterator<Item = i32> {
        self.index.iter().map(|&index| index as i32)
    }
}

#[inline(always)]
fn keep(least: &mut [f64], index: &mut [f64], at: f64, costs: impl Iterator<Item = f64>) {
    for ((least, index), cost) in least.iter_mut().zip(index).zip(costs) {
        let (old, before) = (*least, *index);
        // A sum, because `if cost < old { at } else { before }` becomes a masked store, which takes several times as
        // long. It is exact: all are small whole numbers.
        *index = before + if cost < old { at - before } else { 0.0 };
        *least = if cost < old { cost } else { old };
    }
}
