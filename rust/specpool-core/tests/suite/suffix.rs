//! Laws of the suffix index, against a plain search of the texts.
#![allow(clippy::cast_precision_loss, reason = "shares of small counts")]

use proptest::prelude::*;
use specpool_core::suffix::SuffixIndex;

/// How often each token followed `context` in the texts.
fn followers(texts: &[Vec<u32>], context: &[u32]) -> Vec<(u32, usize)> {
    let mut found = std::collections::BTreeMap::new();
    for text in texts {
        for end in context.len()..text.len() {
            if &text[end - context.len()..end] == context {
                *found.entry(text[end]).or_insert(0) += 1;
            }
        }
    }
    found.into_iter().collect()
}

/// The longest end of `text`, of at most `most` tokens, that something followed.
fn longest(texts: &[Vec<u32>], text: &[u32], most: usize) -> usize {
    (0..=most.min(text.len())).rev().find(|&n| n == 0 || !followers(texts, &text[text.len() - n..]).is_empty()).unwrap()
}

/// Builds an index of texts that grow side by side, `step` tokens at a time.
fn index_of(texts: &[Vec<u32>], step: usize, max_context: i64) -> (SuffixIndex, Vec<u64>) {
    let mut index = SuffixIndex::new(1 << 20, max_context).unwrap();
    let numbers: Vec<u64> = texts.iter().map(|_| index.begin()).collect();
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    for start in (0..longest).step_by(step) {
        for (text, &number) in texts.iter().zip(&numbers) {
            let end = text.len().min(start + step);
            index.extend(number, &text[start.min(end)..end]).unwrap();
        }
    }
    (index, numbers)
}

proptest! {
    #[test]
    fn the_first_level_is_what_followed_the_longest_known_end(
        texts in prop::collection::vec(prop::collection::vec(0u32..3, 1..40), 1..4),
        step in 1usize..5,
        max_context in 1i64..9,
    ) {
        let (index, numbers) = index_of(&texts, step, max_context);
        prop_assert!(index.num_states() <= 2 * index.num_tokens() + 2);
        for (text, &number) in texts.iter().zip(&numbers) {
            let most = usize::try_from(max_context - 1).unwrap();
            let n = longest(&texts, text, most);
            let got = index.propose(number, 1, 8, 9).unwrap();
            prop_assert_eq!(got.match_len, n);
            if n == 0 {
                prop_assert!(got.tokens.is_empty());
                continue;
            }
            let want = followers(&texts, &text[text.len() - n..]);
            let total: usize = want.iter().map(|&(_, count)| count).sum();
            prop_assert_eq!(got.tokens.len(), want.len());
            for (token, p) in got.tokens.iter().zip(&got.probabilities) {
                let count = want.iter().find(|(known, _)| known == token).unwrap().1;
                let share = count as f32 / total as f32;
                prop_assert!((p - share).abs() < 1e-6, "token {} has {}, counts say {}", token, p, share);
            }
            prop_assert!(got.probabilities.windows(2).all(|pair| pair[0] >= pair[1]));
            let (len, best) = index.best(number).unwrap();
            prop_assert_eq!((len, best), (n, got.probabilities[0]));
        }
    }

    #[test]
    fn every_path_multiplies_what_followed_its_own_context(
        texts in prop::collection::vec(prop::collection::vec(0u32..3, 2..40), 1..3),
        max_context in 2i64..9,
    ) {
        let (index, numbers) = index_of(&texts, 3, max_context);
        let most = usize::try_from(max_context - 1).unwrap();
        for (text, &number) in texts.iter().zip(&numbers) {
            let got = index.propose(number, 4, 2, 12).unwrap();
            prop_assert!(got.tokens.len() <= 11);
            let mut paths: Vec<(Vec<u32>, f32, usize)> = vec![(vec![], 1.0, got.match_len)];
            for i in 0..got.tokens.len() {
                let (parent, p, known) = paths[got.parents[i] as usize].clone();
                prop_assert!(parent.len() < 4);
                let context: Vec<u32> = text.iter().chain(&parent).copied().collect();
                // A context cannot be longer than what the path has matched so far.
                let n = longest(&texts, &context, most.min(known));
                let want = followers(&texts, &context[context.len() - n..]);
                let total: usize = want.iter().map(|&(_, count)| count).sum();
                let count = want.iter().find(|&&(token, _)| token == got.tokens[i]).map_or(0, |&(_, count)| count);
                prop_assert!((got.probabilities[i] - p * count as f32 / total as f32).abs() < 1e-5);
                let mut path = parent;
                path.push(got.tokens[i]);
                paths.push((path, got.probabilities[i], n + 1));
            }
        }
    }

    #[test]
    fn memory_is_bounded_and_old_texts_are_known_for_a_while(
        tokens in prop::collection::vec(0u32..4, 1..400),
        max_tokens in 2i64..60,
    ) {
        let mut index = SuffixIndex::new(max_tokens, 8).unwrap();
        let text = index.begin();
        for &token in &tokens {
            index.extend(text, &[token]).unwrap();
            prop_assert!(index.num_tokens() <= usize::try_from(max_tokens).unwrap());
            prop_assert!(index.num_states() <= 2 * index.num_tokens() + 2);
            index.propose(text, 3, 2, 8).unwrap();
        }
    }
}

#[test]
fn a_repeated_token_costs_no_more_than_its_context() {
    let mut index = SuffixIndex::new(1 << 20, 16).unwrap();
    let text = index.begin();
    index.extend(text, &vec![7; 200_000]).unwrap();
    let got = index.propose(text, 5, 1, 6).unwrap();
    assert_eq!((got.tokens, got.parents), (vec![7; 5], vec![0, 1, 2, 3, 4]));
}

#[test]
fn wrong_numbers_are_refused() {
    let error = SuffixIndex::new(1, 8).unwrap_err().to_string();
    assert!(error.contains("max_tokens"), "{error}");
    assert!(SuffixIndex::new(100, 0).unwrap_err().to_string().contains("max_context"));
    let mut index = SuffixIndex::new(100, 8).unwrap();
    assert!(index.extend(3, &[1]).unwrap_err().to_string().contains("no text 3"));
    assert!(index.end(3).is_err() && index.propose(3, 1, 1, 2).is_err() && index.best(3).is_err());
}
