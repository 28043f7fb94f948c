//! What keeps the budget's estimates and choices sound at their limits.

use specpool_core::budget::acceptance::{Families, count_round, expected_tokens};

const CHAINS: Families<'_> = Families { family: &[-1, 0, 0], num_steps: &[0, 1, 3], num_families: 1, depth: 3 };

/// A row that was right for long, and then is wrong at its first draft, never gets to its second. What it once was
/// there must not make deep drafts look good.
#[test]
fn a_row_that_turns_hard_loses_its_luck_at_depths_that_it_does_not_reach() {
    let (mut hits, mut tries) = (vec![0.0; 3], vec![0.0; 3]);
    let mut tokens = |rounds: usize, shape: i32, len: i32| {
        for _ in 0..rounds {
            count_round(&CHAINS, &mut hits, &mut tries, None, &[0], &[shape], &[len]).unwrap();
        }
        expected_tokens(&CHAINS, &hits, &tries, &[0.95; 3], &[0], 0.0).unwrap()
    };
    let easy = tokens(60, 2, 4);
    assert!(easy[2] > 3.6, "{easy:?}");
    // Expected drafts of the chain of three, over those of the chain of one.
    let beyond = |tokens: &[f64]| (tokens[2] - 1.0) / (tokens[1] - 1.0);
    assert!(beyond(&easy) > 2.7, "{easy:?}");
    let hard = tokens(60, 2, 1);
    assert!(hard[2] < 1.4 && beyond(&hard) < 2.2, "{hard:?}");
    tokens(60, 2, 4);
    let hard = tokens(60, 1, 1);
    assert!(beyond(&hard) < 2.2, "{hard:?}, with one draft a round");
}

/// Rows that are as alike as can be differ by less than chance. They still have odds of their own, and tokens that are
/// numbers.
#[test]
fn rows_that_are_alike_may_differ_a_little() {
    let rows: Vec<i32> = (0..30).collect();
    let (mut hits, mut tries) = (vec![0.0; 90], vec![0.0; 90]);
    for round in 0..60 {
        let len = [2 - round % 2; 30];
        count_round(&CHAINS, &mut hits, &mut tries, None, &rows, &[1; 30], &len).unwrap();
    }
    let tokens = |deviations: f64| expected_tokens(&CHAINS, &hits, &tries, &[0.5; 3], &rows, deviations).unwrap();
    for (mean, above) in tokens(0.0).chunks(3).zip(tokens(1.5).chunks(3)) {
        assert!((mean[1] - 1.5).abs() < 0.05, "{mean:?}");
        assert!(above[2] > mean[2] + 0.05 && above[2] < 2.5, "{above:?}");
    }
}
