//! Draft trees of random candidates: every law of select, organize and build that needs no figures from upstream.

use proptest::prelude::*;
use specpool_core::Error;
use specpool_core::tree::build::{Candidates, Tree, build_tree, num_candidates, parent_list_width};

/// A round of random probabilities with many ties; returns `parent_list`, `top_scores_index` and the scores.
fn round(s: usize, k: usize, n: usize, draws: &[u8]) -> (Vec<i64>, Vec<i64>, Vec<f32>) {
    let total = num_candidates(s, k);
    let (mut scores, mut tokens) = (vec![0.0; total], vec![0; total]);
    let mut parents = vec![0; 1 + s * k];
    let mut candidates = Candidates::new(1, s, k, &mut scores, &mut tokens, &mut parents).unwrap();
    let mut before = Vec::new();
    let mut draws = draws.iter().cycle();
    for step in 0..s {
        let count = if step == 0 { k } else { k * k };
        let mut p: Vec<f32> = (0..count).map(|_| f32::from(draws.next().unwrap() % 5) / 4.0).collect();
        p.chunks_mut(k).for_each(|line| line.sort_by(|a, b| b.total_cmp(a)));
        before = candidates.select(step, &p, &vec![7; count], &before).unwrap().scores;
    }
    let organized = candidates.organize(n).unwrap();
    assert_eq!(organized.parent_list.len(), parent_list_width(s, k));
    (organized.parent_list, organized.top_scores_index, scores)
}

proptest! {
    #[test]
    fn every_choice_is_the_best_and_builds(
        s in 1_usize..6, k in 1_usize..6, pick: prop::sample::Index, draws in prop::collection::vec(any::<u8>(), 1..200)
    ) {
        let total = num_candidates(s, k);
        let n = 1 + pick.index(total + 1);
        let (parent_list, chosen, scores) = round(s, k, n, &draws);
        prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
        // No candidate that was left out beats one that was taken; on a tie the lower index was taken.
        let worst = chosen.iter().map(|&c| (scores[c as usize], -c)).min_by(|a, b| a.partial_cmp(b).unwrap());
        for c in (0..total as i64).filter(|c| !chosen.contains(c)) {
            prop_assert!(worst.is_none_or(|worst| (scores[c as usize], -c) < worst));
        }
        // Also on ties, the parent of a chosen child is always chosen.
        let tree = build_tree(&parent_list, &chosen, 1, k).unwrap();
        prop_assert!(tree.depths.iter().all(|&depth| depth as usize <= s));
    }

    #[test]
    fn links_mask_and_depths_agree(seeds in prop::collection::vec(any::<u32>(), 1..40)) {
        let parents: Vec<i32> =
            seeds.iter().enumerate().map(|(i, &seed)| if i == 0 { -1 } else { (seed as usize % i) as i32 }).collect();
        let n = parents.len();
        let tree = Tree::from_parents(&parents, n).unwrap();
        for node in 0..n {
            let line = &tree.mask[node * n..][..n];
            prop_assert_eq!(line.iter().filter(|&&seen| seen).count(), tree.depths[node] as usize + 1);
            let mut children = Vec::new();
            let mut child = tree.first_child[node];
            while child != -1 {
                children.push(child);
                child = tree.next_sibling[child as usize];
            }
            let expected: Vec<i32> = (0..n as i32).filter(|&c| parents[c as usize] == node as i32).collect();
            prop_assert_eq!(children, expected);
        }
    }
}

#[test]
fn what_is_no_tree_is_said_with_its_numbers() {
    use specpool_core::tree::check::{Proposed, find_broken};
    let tree = Tree::from_parents(&[-1, 0, 0, 1, -1, 0, 0, 1], 4).unwrap();
    let (tokens, roots) = ([5, 6, 7, 8, 1, 2, 3, 4], [5, 1]);
    let why = |spoil: fn(&mut Vec<i64>, &mut Tree)| {
        let (mut tokens, mut tree) = (tokens.to_vec(), tree.clone());
        spoil(&mut tokens, &mut tree);
        let trees = Proposed {
            tokens: &tokens,
            depths: &tree.depths,
            mask: &tree.mask,
            first_child: &tree.first_child,
            next_sibling: &tree.next_sibling,
        };
        let broken = find_broken(&trees, &roots, 9).unwrap();
        broken.into_iter().map(|one| format!("{}: {}", one.lane, one.why)).collect::<Vec<_>>()
    };
    assert!(why(|_, _| ()).is_empty());
    assert_eq!(why(|tokens, _| tokens[4] = 2), ["1: node 0 of tree 1 is the root token 1, got 2"]);
    let beyond =
        ["0: draft token 9: the target's vocabulary is [0, 9)", "1: draft token -1: the target's vocabulary is [0, 9)"];
    assert_eq!(why(|tokens, _| (tokens[1], tokens[5]) = (9, -1)), beyond);
    assert_eq!(
        why(|_, tree| tree.depths[3] = 1),
        [
            "0: mask and depths disagree: a node sees its ancestors and itself, so node 3 of tree 0 at depth 1 cannot see \
          [0, 1, 3]"
        ]
    );
    assert_eq!(why(|_, tree| tree.first_child[6] = 1), ["1: first_child[1, 2] must be -1 or in (2, 4), got 1"]);
    assert_eq!(
        why(|_, tree| tree.next_sibling[1] = 3),
        ["0: mask and next_sibling[0, 1] = 3 disagree: node 1 sees [0, 1], so node 3 must see [0, 3], got [0, 1, 3]"]
    );
    let wide = Tree::from_parents(&[-1, 0], 2).unwrap();
    let empty = Proposed { tokens: &[], depths: &[], mask: &[], first_child: &[], next_sibling: &[] };
    assert_eq!(find_broken(&empty, &[], 9).unwrap(), []);
    assert!(find_broken(&empty, &[1], 9).is_err());
    let short = Proposed { tokens: &[5, 6], depths: &wide.depths[..1], ..empty };
    assert_eq!(find_broken(&short, &[5], 9).unwrap_err().to_string(), "depths must have 2 elements, got 1");
}

#[test]
fn refusals_state_the_numbers() {
    let text = |result: Result<Tree, Error>| result.unwrap_err().to_string();
    assert_eq!(text(Tree::from_parents(&[-1, 1], 2)), "parents[0, 1] must be in [0, 1), got 1");
    assert_eq!(text(Tree::from_parents(&[-1, 0, 0], 2)), "parents must have 2 elements, got 3");
    assert_eq!(
        text(build_tree(&[-1, 0, 1], &[2, 3], 1, 2)),
        "top_scores_index[0] chooses candidate 2, but not its parent (parent_list column 1 of 3)"
    );
    assert!(Tree::from_parents(&[], 1).is_ok_and(|tree| tree.mask.is_empty()));
    let error = Candidates::new(1, 1, 2, &mut [0.0], &mut [0; 2], &mut [0; 3]).unwrap_err();
    assert_eq!(error.to_string(), "candidate scores must have 2 elements, got 1");
}
