//! The budget against brute force over all choices, and against a plain count of acceptance.

#![allow(clippy::cast_precision_loss, clippy::float_cmp, clippy::same_item_push)]

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use specpool_core::budget::acceptance::{Families, count_round, expected_tokens};
use specpool_core::budget::choose::{Choice, Costs, Rows, choose};

/// The inputs of one choice, with owned arrays.
#[derive(Debug, Clone)]
struct Case {
    num_candidates: usize,
    shapes: Vec<i32>,
    tokens: Vec<f64>,
    hoped: Vec<f64>,
    worth: Vec<f64>,
    gives: Vec<f64>,
    due: Vec<f64>,
    pages: Vec<i32>,
    free: Vec<i64>,
    base: f64,
    mixed: f64,
    charge: Vec<f64>,
    lane: Vec<f64>,
}

impl Case {
    /// Rows that decode plainly or draft; a draft gives so many tokens. A round takes a second, whatever they do.
    fn of(tokens: &[f64]) -> Self {
        let num_rows = tokens.len();
        Self {
            num_candidates: 2,
            shapes: [0, 1].repeat(num_rows),
            tokens: tokens.iter().flat_map(|&drafted| [1.0, drafted]).collect(),
            hoped: Vec::new(),
            worth: vec![1.0; num_rows],
            gives: vec![1.0; num_rows],
            due: vec![0.0; 2 * num_rows],
            pages: Vec::new(),
            free: Vec::new(),
            base: 1.0,
            mixed: 0.0,
            charge: vec![0.0; 2],
            lane: vec![0.0; 2],
        }
    }

    /// Every other row needs so many tokens per second. Of every fourth, more is hoped than expected.
    fn with_targets(mut self, tight: f64) -> Self {
        for row in (0..self.num_rows()).step_by(2) {
            self.due[2 * row + 1] = tight;
        }
        let num_shapes = self.lane.len();
        self.hoped = self.tokens.clone();
        for row in self.hoped.chunks_mut(num_shapes).step_by(4) {
            for tokens in row {
                *tokens = 1.0 + 1.3 * (*tokens - 1.0);
            }
        }
        self
    }

    fn num_rows(&self) -> usize {
        self.worth.len()
    }

    fn choose(&self) -> Choice {
        let rows = Rows {
            num_candidates: self.num_candidates,
            shapes: &self.shapes,
            tokens: &self.tokens,
            hoped: &self.hoped,
            worth: &self.worth,
            gives: &self.gives,
            due: &self.due,
            pages: &self.pages,
            free: &self.free,
        };
        let costs = Costs { base: self.base, mixed: self.mixed, charge: &self.charge, lane: &self.lane };
        choose(&rows, &costs).unwrap()
    }

    fn shape(&self, row: usize, pick: usize) -> usize {
        self.shapes[row * self.num_candidates + pick] as usize
    }

    /// The shapes of the rows, and the seconds that their round takes once.
    fn round_of(&self, picks: &[usize]) -> (Vec<usize>, f64) {
        let shapes: Vec<usize> = picks.iter().enumerate().map(|(row, &pick)| self.shape(row, pick)).collect();
        let charge = shapes.iter().map(|&shape| self.charge[shape]).fold(0.0, f64::max);
        let mixed = if shapes.iter().any(|&shape| shape != shapes[0]) { self.mixed } else { 0.0 };
        (shapes, self.base + charge + mixed)
    }

    /// Seconds of the tokens that the rows stand for: the mean round, simulated by its averages, over what it gives.
    /// Written apart from the core.
    fn cost(&self, picks: &[usize]) -> f64 {
        let (shapes, fixed) = self.round_of(picks);
        let stay: Vec<f64> = shapes
            .iter()
            .enumerate()
            .map(|(row, &shape)| self.gives[row] / self.tokens[row * self.lane.len() + shape])
            .collect();
        let (rows, total) = (self.num_rows() as f64, stay.iter().sum::<f64>());
        let lanes: f64 = shapes.iter().zip(&stay).map(|(&shape, stay)| self.lane[shape] * stay / total).sum();
        let worth: f64 = stay.iter().zip(&self.worth).map(|(stay, worth)| stay * worth / total).sum();
        (worth * fixed + rows * lanes) * total / rows
    }

    /// The seconds of the next round.
    fn seconds(&self, picks: &[usize]) -> f64 {
        let (shapes, fixed) = self.round_of(picks);
        fixed + shapes.iter().map(|&shape| self.lane[shape]).sum::<f64>()
    }

    fn fits(&self, picks: &[usize]) -> bool {
        let groups = self.free.len();
        (0..groups).all(|group| {
            let pages = |(row, &pick): (usize, &usize)| {
                self.pages.get((row * self.num_candidates + pick) * groups + group).copied().unwrap_or(0)
            };
            picks.iter().enumerate().map(pages).map(i64::from).sum::<i64>() <= self.free[group]
        })
    }

    /// Every choice, in turn.
    fn all(&self) -> Vec<Vec<usize>> {
        let mut found = vec![Vec::new()];
        for _ in 0..self.num_rows() {
            found = found
                .iter()
                .flat_map(|before| (0..self.num_candidates).map(move |pick| [before.as_slice(), &[pick]].concat()))
                .collect();
        }
        found
    }

    fn best(&self) -> f64 {
        let cost = |picks: &Vec<usize>| self.cost(picks);
        self.all().iter().filter(|picks| self.fits(picks)).map(cost).fold(f64::INFINITY, f64::min)
    }

    /// The cost of the choice, which must be what it says it is, and fit.
    fn checked(&self, choice: &Choice) -> f64 {
        let picks: Vec<usize> = choice.picks.iter().map(|&pick| pick as usize).collect();
        let (cost, seconds) = (self.cost(&picks), self.seconds(&picks));
        assert!((self.gives.iter().sum::<f64>() / cost - choice.rate).abs() <= 1e-9 * choice.rate);
        assert!((seconds - choice.seconds).abs() <= 1e-9 * seconds);
        assert!(self.fits(&picks), "{picks:?} needs more than {:?} pages", self.free);
        cost
    }

    /// What one row can save at most.
    fn step(&self) -> f64 {
        let costs = |row: usize| {
            let of = |pick: usize| {
                let mut picks = vec![0; self.num_rows()];
                picks[row] = pick;
                self.cost(&picks)
            };
            let all = (0..self.num_candidates).map(of);
            all.clone().fold(0.0, f64::max) - all.fold(f64::INFINITY, f64::min)
        };
        (0..self.num_rows()).map(costs).fold(0.0, f64::max)
    }
}

prop_compose! {
    /// Up to five rows of up to four shapes. Shape 0 needs no pages, adds no seconds, and gives one token.
    fn case(mixed: bool, paged: bool)(
        num_rows in 1_usize..6,
        num_shapes in 1_usize..5,
        seed in prop::collection::vec(0.0_f64..1.0, 256),
    ) -> Case {
        let mut dice = seed.into_iter().cycle();
        let mut die = move || dice.next().unwrap();
        let num_candidates = num_shapes;
        let mut shapes = Vec::new();
        let mut tokens = Vec::new();
        for _ in 0..num_rows {
            let most = (die() * num_shapes as f64) as i32; // a limit of steps
            shapes.extend((0..num_candidates as i32).map(|shape| shape.min(most)));
            let rate = die();
            let mut reached = 1.0;
            tokens.push(1.0);
            for _ in 1..num_shapes {
                reached *= rate;
                tokens.push(tokens.last().unwrap() + reached);
            }
        }
        let cells = num_rows * num_candidates;
        let pages: Vec<i32> = shapes.iter().map(|&shape| if paged { shape * 2 } else { 0 }).collect();
        Case {
            num_candidates,
            tokens,
            hoped: Vec::new(),
            worth: (0..num_rows).map(|_| 0.5 + die()).collect(),
            gives: (0..num_rows).map(|_| 1.0 + 3.0 * die()).collect(),
            due: vec![0.0; 2 * num_rows],
            pages: if paged { pages } else { Vec::new() },
            free: if paged { vec![(die() * 2.0 * cells as f64) as i64] } else { Vec::new() },
            base: 0.2 + die(),
            mixed: if mixed { die() * 0.3 } else { 0.0 },
            charge: (0..num_shapes).map(|shape| if shape > 0 { die() } else { 0.0 }).collect(),
            lane: (0..num_shapes).map(|s| s as f64 * die() * 0.4).collect(),
            shapes,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Without pages, and if several shapes take no more than their parts, the choice is the best there is.
    #[test]
    fn it_is_the_best_of_all_choices(case in case(false, false)) {
        let choice = case.choose();
        let (cost, best) = (case.checked(&choice), case.best());
        prop_assert!(cost <= best * (1.0 + 1e-9), "{} instead of {}", cost, best);
    }

    /// Under memory it fits, is no worse than any one candidate for all rows that fits, and near the best.
    #[test]
    fn memory_binds(case in case(false, true)) {
        let choice = case.choose();
        let (cost, best) = (case.checked(&choice), case.best());
        prop_assert!(cost <= alike(&case) * (1.0 + 1e-9));
        prop_assert!(cost <= best + 2.0 * case.step() + 1e-9, "{} instead of {}", cost, best);
    }

    /// If several shapes take more, it is no worse than any one candidate for all rows, and near the best.
    #[test]
    fn it_is_no_worse_than_one_shape_for_all(case in case(true, false)) {
        let choice = case.choose();
        let (cost, best) = (case.checked(&choice), case.best());
        prop_assert!(cost <= alike(&case) * (1.0 + 1e-9));
        prop_assert!(cost <= best * 1.2, "{} instead of {}", cost, best);
        prop_assert_eq!(&case.choose(), &choice);
    }

    /// Rows with targets: the goodput is no less than that of the fastest choice, nor than that of one candidate for
    /// all rows, and what is missed is counted.
    #[test]
    fn targets_raise_the_goodput(case in case(true, false), tight in 0.2_f64..4.0) {
        let before = case.choose();
        let case = case.with_targets(tight);
        let after = case.choose();
        let (good, missed) = goodput(&case, &after.picks);
        prop_assert!(good >= goodput(&case, &before.picks).0 - 1e-9);
        for pick in 0..case.num_candidates {
            let alike = goodput(&case, &vec![pick as i32; case.num_rows()]).0;
            prop_assert!(good >= alike * (1.0 - 1e-9), "{} with candidate {} for all, {} instead", alike, pick, good);
        }
        prop_assert_eq!(missed, after.num_missed);
    }

    /// Targets that no choice meets change nothing but the count of those that miss.
    #[test]
    fn hopeless_targets_change_no_choice(case in case(true, false)) {
        let free = case.choose();
        let mut hopeless = case;
        for row in 0..hopeless.num_rows() {
            hopeless.due[2 * row + 1] = 1e3;
        }
        let found = hopeless.choose();
        prop_assert_eq!(&found.picks, &free.picks);
        prop_assert_eq!(found.num_missed, hopeless.num_rows());
    }
}

/// The search for targets has no proof. Of 4,000 cases, always the same ones, it finds the best of all choices, or
/// nearly, in most.
#[test]
fn most_targets_are_met_as_well_as_can_be() {
    let mut runner = TestRunner::deterministic();
    let ratios: Vec<f64> = (0..4000)
        .map(|_| {
            let (case, tight) = (case(true, false), 0.2_f64..4.0).new_tree(&mut runner).unwrap().current();
            let case = case.with_targets(tight);
            let as_picks = |picks: &Vec<usize>| picks.iter().map(|&pick| pick as i32).collect::<Vec<_>>();
            let best = case.all().iter().map(|picks| goodput(&case, &as_picks(picks)).0).fold(0.0, f64::max);
            goodput(&case, &case.choose().picks).0 / best
        })
        .filter(|ratio| ratio.is_finite())
        .collect();
    let share = |least: f64| ratios.iter().filter(|&&ratio| ratio >= least).count() as f64 / ratios.len() as f64;
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    assert!(ratios.len() > 3000 && share(0.999) > 0.993 && mean > 0.9988, "mean {mean}, {} the best", share(0.999));
}

fn alike(case: &Case) -> f64 {
    (0..case.num_candidates)
        .map(|pick| vec![pick; case.num_rows()])
        .filter(|picks| case.fits(picks))
        .map(|picks| case.cost(&picks))
        .fold(f64::INFINITY, f64::min)
}

fn goodput(case: &Case, picks: &[i32]) -> (f64, usize) {
    let picks: Vec<usize> = picks.iter().map(|&pick| pick as usize).collect();
    let seconds = case.seconds(&picks);
    let (mut worth, mut missed) = (0.0, 0);
    for (row, &pick) in picks.iter().enumerate() {
        let tokens = if case.hoped.is_empty() { &case.tokens } else { &case.hoped };
        let tokens = tokens[row * case.lane.len() + case.shape(row, pick)];
        if tokens >= case.due[2 * row] + case.due[2 * row + 1] * seconds {
            worth += case.worth[row] * case.gives[row];
        } else {
            missed += 1;
        }
    }
    (worth / case.cost(&picks), missed)
}

#[test]
fn easy_rows_draft_and_hard_rows_do_not() {
    let case = Case { lane: vec![0.0, 0.3], ..Case::of(&[3.0, 1.1]) };
    assert_eq!(case.choose().picks, [1, 0]);
    let one_page = Case { pages: vec![0, 2, 0, 0], free: vec![1], ..case };
    assert_eq!(one_page.choose().picks, [0, 0], "the widening row finds one page of two");
}

/// Widening the late rows of one candidate for all may make a round so much longer that others are late. The search once
/// looked at the widened rows alone.
#[test]
fn one_candidate_for_all_is_not_passed_over() {
    let case = Case {
        num_candidates: 3,
        shapes: vec![0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 2],
        tokens: vec![1.0, 1.842, 2.552, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.679, 2.14, 1.0, 1.6, 1.961],
        worth: vec![0.97, 0.5, 0.5, 0.5, 0.5],
        gives: vec![1.0; 5],
        due: vec![0.0; 10],
        base: 0.8752,
        mixed: 0.2362,
        charge: vec![0.0, 0.0878, 0.0],
        lane: vec![0.0, 0.0433, 0.254],
        ..Case::of(&[])
    };
    let case = case.with_targets(1.4105);
    let good = goodput(&case, &case.choose().picks).0;
    assert!(good >= goodput(&case, &[1; 5]).0 * (1.0 - 1e-9), "{good}");
}

/// Rows that are alike get the same shape at any price of a page. Still no page is left that makes a row wider.
#[test]
fn targets_do_not_take_pages_that_are_not_there() {
    let mut case = Case::of(&[3.0, 3.0]);
    case.due = vec![0.0, 2.0, 0.0, 2.0];
    case.pages = vec![0, 1, 0, 1];
    case.free = vec![1];
    let choice = case.choose();
    assert_eq!((choice.picks.iter().sum::<i32>(), choice.num_missed), (1, 1));
}

#[test]
fn rows_that_are_alike_use_the_pages_that_are_there() {
    let case = |free: i64, charge: f64| {
        let (pages, free) = ([0, 2].repeat(6), vec![free]);
        Case { pages, free, charge: vec![0.0, charge], lane: vec![0.0, 0.01], ..Case::of(&[3.0; 6]) }
    };
    for free in 0..12 {
        let choice = case(free, 0.0).choose();
        assert_eq!(choice.picks.iter().sum::<i32>(), (free / 2) as i32, "with {free} pages");
        let (dear, best) = (case(free, 0.3), case(free, 0.3).best());
        assert!(dear.checked(&dear.choose()) <= best * (1.0 + 1e-9), "with {free} pages and a charge");
    }
}

/// The next round alone would leave the hard row without a draft.
#[test]
fn the_long_run_counts_and_not_the_next_round() {
    let case = Case { lane: vec![0.0, 0.25], ..Case::of(&[4.0, 1.8]) };
    let next = |tokens: f64, picks: &[usize]| tokens / case.seconds(picks);
    assert!(next(5.0, &[1, 0]) > next(5.8, &[1, 1]));
    let choice = case.choose();
    assert_eq!(choice.picks, [1, 1]);
    assert!((choice.rate - 3.310_344).abs() < 1e-5 && (2.0 / case.cost(&[1, 0]) - 2.909_09).abs() < 1e-5);
}

#[test]
fn no_rows_no_choice() {
    let rows = Rows {
        num_candidates: 1,
        shapes: &[],
        tokens: &[],
        hoped: &[],
        worth: &[],
        gives: &[],
        due: &[],
        pages: &[],
        free: &[],
    };
    let costs = Costs { base: 1.0, mixed: 0.0, charge: &[0.0], lane: &[0.0] };
    assert_eq!(choose(&rows, &costs).unwrap().picks, Vec::<i32>::new());
}

#[test]
fn wrong_numbers_are_refused() {
    let rows = Rows {
        num_candidates: 1,
        shapes: &[0],
        tokens: &[1.0],
        hoped: &[],
        worth: &[1.0],
        gives: &[1.0],
        due: &[0.0, 0.0],
        pages: &[],
        free: &[],
    };
    let costs = Costs { base: 1.0, mixed: 0.0, charge: &[0.0], lane: &[0.0] };
    let wrong_rows = [
        Rows { shapes: &[1], ..rows },
        Rows { shapes: &[-1], ..rows },
        Rows { tokens: &[f64::NAN], ..rows },
        Rows { tokens: &[0.5], ..rows },
        Rows { hoped: &[0.5], ..rows },
        Rows { hoped: &[1.0, 1.0], ..rows },
        Rows { worth: &[-1.0], ..rows },
        Rows { gives: &[0.0], ..rows },
        Rows { due: &[f64::NAN, 0.0], ..rows },
        Rows { pages: &[1, 2], free: &[1], ..rows },
        Rows { num_candidates: 0, ..rows },
    ];
    for wrong in wrong_rows {
        assert!(choose(&wrong, &costs).is_err(), "{wrong:?}");
    }
    let wrong_costs = [
        Costs { base: 0.0, ..costs },
        Costs { base: f64::INFINITY, ..costs },
        Costs { lane: &[f64::NAN], ..costs },
        Costs { charge: &[], ..costs },
        Costs { mixed: -1.0, ..costs },
    ];
    for wrong in wrong_costs {
        assert!(choose(&rows, &wrong).is_err(), "{wrong:?}");
    }
}

const FAMILIES: Families<'_> = Families { family: &[-1, 0, 0, 1], num_steps: &[0, 1, 3, 2], num_families: 2, depth: 3 };

proptest! {
    /// Tokens lie between 1 and the depth + 1, grow with the depth, and follow a row's own results.
    #[test]
    fn expected_tokens_follow_the_row(prior in 0.05_f64..0.95, rounds in 1_usize..60) {
        let (mut hits, mut tries) = (vec![0.0; 18], vec![0.0; 18]);
        for _ in 0..rounds {
            count_round(&FAMILIES, &mut hits, &mut tries, None, &[0, 2], &[2, 2], &[4, 1]).unwrap();
        }
        let priors = vec![prior; 6];
        let found = expected_tokens(&FAMILIES, &hits, &tries, &priors, &[0, 1, 2], 0.0).unwrap();
        for row in found.chunks(4) {
            prop_assert!(row[0] == 1.0 && row[1] > 1.0 && row[2] > row[1] && row[2] < 4.0 && row[3] < 3.0);
        }
        prop_assert!(found[2] > found[6] && found[6] > found[10]); // right, unknown, wrong
        prop_assert!(found[3] > found[7] && found[7] > found[11]); // a family that was never drafted follows the odds
        let plain = 1.0 + prior + prior * prior + prior * prior * prior;
        prop_assert!((found[6] - plain).abs() < 1e-9);
    }
}

/// Rows of one family say what another family may give them, also if they are far from the prior: not nothing, and not
/// everything.
#[test]
fn a_row_far_from_the_prior_is_not_taken_for_hopeless_or_sure() {
    let estimate = |prior: f64, is_right: fn(usize) -> bool| {
        let (mut hits, mut tries) = (vec![0.0; 6], vec![0.0; 6]);
        for round in 0..60 {
            let len = if is_right(round) { 2 } else { 1 };
            count_round(&FAMILIES, &mut hits, &mut tries, None, &[0], &[1], &[len]).unwrap();
        }
        expected_tokens(&FAMILIES, &hits, &tries, &[prior; 6], &[0], 0.0).unwrap()[3]
    };
    let tokens = |rate: f64| 1.0 + rate + rate * rate;
    let hard = estimate(0.93, |round| round % 10 < 3);
    assert!(tokens(0.25) < hard && hard < tokens(0.6), "{hard}, a row that is right 3 times of 10");
    let easy = estimate(0.07, |round| round % 10 < 7);
    assert!(tokens(0.4) < easy && easy < tokens(0.75), "{easy}, a row that is right 7 times of 10");
}

/// A row may be better than its results say, the less it has shown; the more, the nearer it is to them.
#[test]
fn deviations_raise_the_odds_of_rows_that_have_shown_little() {
    let odds = |rounds: usize, deviations: f64| {
        let (mut hits, mut tries) = (vec![0.0; 6], vec![0.0; 6]);
        for round in 0..rounds {
            let len = if round % 2 == 0 { 2 } else { 1 };
            count_round(&FAMILIES, &mut hits, &mut tries, None, &[0], &[1], &[len]).unwrap();
        }
        // The other family was never drafted, so its rate has the prior's odds, which are 1, times the row's own.
        let tokens = expected_tokens(&FAMILIES, &hits, &tries, &[0.5; 6], &[0], deviations).unwrap()[3];
        let rate = ((4.0 * tokens - 3.0).sqrt() - 1.0) / 2.0; // tokens = 1 + rate + rate * rate
        rate / (1.0 - rate)
    };
    // Before any row has shown anything, log odds between rows have a variance of 1.
    assert!((odds(0, 0.0) - 1.0).abs() < 1e-9 && (odds(0, 1.0).ln() - 1.0).abs() < 1e-9);
    assert!((odds(0, 2.0).ln() - 2.0).abs() < 1e-9);
    let above: Vec<f64> = [0, 4, 16, 64].iter().map(|&n| (odds(n, 1.0) / odds(n, 0.0)).ln()).collect();
    assert!(above.windows(2).all(|pair| pair[0] > pair[1] && pair[1] > 0.1), "{above:?}");
    let counts = [0.0; 6];
    for wrong in [-0.1, 8.1, f64::NAN] {
        assert!(expected_tokens(&FAMILIES, &counts, &counts, &[0.5; 6], &[0], wrong).is_err());
    }
}

/// The hits of all rows are those that rows with the prior's odds would have.
#[test]
fn hits_of_all_rows_are_less_what_rows_owe_to_their_odds() {
    let (mut hits, mut tries) = (vec![0.0; 18], vec![0.0; 18]);
    for round in 0..40 {
        let lens = [if round % 10 < 9 { 4 } else { 1 }, if round % 10 < 2 { 4 } else { 1 }];
        count_round(&FAMILIES, &mut hits, &mut tries, None, &[0, 1], &[2, 2], &lens).unwrap();
    }
    let prior = vec![0.6; 6];
    let count = |rows: &[i32], prior: Option<&[f64]>| {
        let (mut hits, mut tries) = (hits.clone(), tries.clone());
        count_round(&FAMILIES, &mut hits, &mut tries, prior, rows, &vec![3; rows.len()], &vec![2; rows.len()]).unwrap()
    };
    // Family 1 stands at 6; each row has one try at each of its depths, and is right at the first alone.
    let (plain, new) = (count(&[0, 1, 2], None), count(&[2], Some(&prior)));
    assert_eq!(plain[6..10], [3.0, 3.0, 0.0, 3.0]);
    assert!(new.iter().zip(count(&[2], None)).all(|(a, b)| (a - b).abs() < 1e-9), "a new row owes nothing");
    let (both, easy, hard) = (count(&[0, 1], Some(&prior)), count(&[0], Some(&prior)), count(&[1], Some(&prior)));
    assert!(easy[6] < 0.8 && hard[6] == 1.0, "{easy:?} {hard:?}: easy rows owe, and no cell has more hits than tries");
    assert!(easy[6] < both[6] && both[6] < 2.0);
    for wrong in [vec![0.6; 5], vec![1.5; 6], vec![f64::NAN; 6]] {
        assert!(count_round(&FAMILIES, &mut hits.clone(), &mut tries.clone(), Some(&wrong), &[0], &[3], &[2]).is_err());
    }
}

#[test]
fn a_row_that_does_not_draft_goes_back_to_its_prior() {
    let (mut hits, mut tries) = (vec![0.0; 6], vec![0.0; 6]);
    for _ in 0..30 {
        count_round(&FAMILIES, &mut hits, &mut tries, None, &[0], &[2], &[1]).unwrap();
    }
    let before = expected_tokens(&FAMILIES, &hits, &tries, &[0.6; 6], &[0], 0.0).unwrap()[2];
    for _ in 0..400 {
        count_round(&FAMILIES, &mut hits, &mut tries, None, &[0], &[0], &[1]).unwrap();
    }
    let after = expected_tokens(&FAMILIES, &hits, &tries, &[0.6; 6], &[0], 0.0).unwrap()[2];
    assert!(before < 1.2 && after > 2.0, "{before}, {after}");
}

#[test]
fn totals_are_those_of_the_lanes() {
    let (mut hits, mut tries) = (vec![0.0; 18], vec![0.0; 18]);
    let totals = count_round(&FAMILIES, &mut hits, &mut tries, None, &[0, 1, 2], &[2, 1, 3], &[3, 2, 1]).unwrap();
    assert_eq!(totals, [2.0, 2.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn a_round_that_cannot_be_is_not_counted() {
    let (mut hits, mut tries) = (vec![0.0; 6], vec![0.0; 6]);
    for (rows, shapes, lens) in [([0, 1], [2, 2], [1, 1]), ([0, 0], [2, 9], [1, 1]), ([0, 0], [2, 2], [1, 5])] {
        assert!(count_round(&FAMILIES, &mut hits, &mut tries, None, &rows, &shapes, &lens).is_err());
    }
    assert_eq!(tries, [0.0; 6]);
    let lying = Families { family: &[-1, 0], num_steps: &[1, 1], num_families: 1, depth: 1 };
    assert!(expected_tokens(&lying, &[], &[], &[0.5], &[], 0.0).is_err());
    assert!(expected_tokens(&FAMILIES, &hits, &tries, &[f64::NAN; 6], &[0], 0.0).is_err());
}
