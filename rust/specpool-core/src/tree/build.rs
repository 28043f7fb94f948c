//! The draft tree (docs/contract.md, The draft tree): select, organize, build. It knows nothing of pages or rows.
//!
//! Candidates of a round are numbered level by level: `K` of step 0, then `K*K` of each later step, laid out as
//! `branch * K + child`. Scores never rise from parent to child, and ties go to the lower number, so the parent of a
//! kept candidate is always kept too.

use std::cmp::Ordering;

use crate::check::{fit, same_len};
use crate::error::{Error, Result};
use crate::memory::{self, filled, with_room};

/// The candidates of one round, in buffers of fixed size that select fills step by step.
#[derive(Debug)]
pub struct Candidates<'a> {
    batch: usize,
    num_steps: usize,
    topk: usize,
    scores: &'a mut [f32],  // [batch, M], cumulative probability, M = K + (S-1)*K*K
    tokens: &'a mut [i64],  // [batch, M]
    parents: &'a mut [i64], // [batch, 1 + K*S]: -1, then per step the numbers of the kept candidates
}

/// What one selection keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// `[batch * K]`: the kept tokens, the draft model's next input.
    pub input_ids: Vec<i64>,
    /// `[batch, K]`: which branch of the step before each kept branch continues; `0..K` at step 0.
    pub branch_parents: Vec<i32>,
    /// `[batch, K]`: their cumulative probabilities.
    pub scores: Vec<f32>,
}

/// The `N - 1` best candidates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Organized {
    /// `[batch, 1 + K*(S-1)]` (no columns when `S == 1`): -1, then the numbers of the kept candidates.
    pub parent_list: Vec<i64>,
    /// `[batch, N - 1]`: numbers of the chosen candidates, ascending.
    pub top_scores_index: Vec<i64>,
    /// `[batch, N - 1]`: their tokens (the root's is not among them).
    pub draft_tokens: Vec<i64>,
}

/// A batch of built trees of `N` nodes each; node 0 is the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// `[batch, N]`: parent node, -1 for the root.
    pub parents: Vec<i32>,
    /// `[batch, N]`: distance from the root; a node's position is the root's plus this.
    pub depths: Vec<i32>,
    /// `[batch, N, N]`: `mask[b, i, j]` is true where node j is node i or an ancestor of it.
    pub mask: Vec<bool>,
    /// `[batch, N]`: first child, -1 = none.
    pub first_child: Vec<i32>,
    /// `[batch, N]`: next child of the same parent, -1 = none.
    pub next_sibling: Vec<i32>,
}

/// `M = K + (S-1)*K*K`: candidates of one round and lane.
#[must_use]
pub fn num_candidates(num_steps: usize, topk: usize) -> usize {
    topk.saturating_add(num_steps.saturating_sub(1).saturating_mul(topk).saturating_mul(topk))
}

/// Candidates that an error shows at most.
const MAX_SHOWN: usize = 16;

/// Higher score first, then lower number; NaN counts as the lowest.
fn better(scores: &[f32], a: usize, b: usize) -> Ordering {
    let key = |i: usize| if scores[i].is_nan() { f32::NEG_INFINITY } else { scores[i] };
    key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// Writes the numbers of the `count` best scores, best first, to `order` (a scratch buffer with room for all).
fn top(scores: &[f32], count: usize, order: &mut Vec<usize>) {
    order.clear();
    order.extend(0..scores.len());
    if count < order.len() && count > 0 {
        order.select_nth_unstable_by(count - 1, |&a, &b| better(scores, a, b));
    }
    order.truncate(count);
    order.sort_unstable_by(|&a, &b| better(scores, a, b));
}

/// A probability that cannot raise a child above its parent: NaN counts as 0.
fn probability(p: f32) -> f32 {
    if p.is_nan() { 0.0 } else { p.clamp(0.0, 1.0) }
}

/// A score below `2^-126` counts as 0, because a GPU may flush it; NaN likewise.
fn score(p: f32) -> f32 {
    if p >= f32::MIN_POSITIVE { p } else { 0.0 }
}

impl<'a> Candidates<'a> {
    /// Borrows the three buffers of a round.
    ///
    /// # Errors
    /// [`Error::Shape`] when a buffer's length does not fit `batch`, `num_steps` and `topk`.
    pub fn new(
        batch: usize,
        num_steps: usize,
        topk: usize,
        scores: &'a mut [f32],
        tokens: &'a mut [i64],
        parents: &'a mut [i64],
    ) -> Result<Self> {
        if num_steps == 0 || topk == 0 {
            return Err(Error::Shape(format!("candidates need num_steps >= 1 and topk >= 1, got {num_steps}, {topk}")));
        }
        let total = fit("candidates", &[batch, num_candidates(num_steps, topk)])?;
        let num_parents = fit("parents", &[batch, num_steps.saturating_mul(topk).saturating_add(1)])?;
        same_len("candidate scores", scores.len(), total)?;
        same_len("candidate tokens", tokens.len(), total)?;
        same_len("candidate parents", parents.len(), num_parents)?;
        Ok(Self { batch, num_steps, topk, scores, tokens, parents })
    }

    /// Records step `step`'s candidates and keeps the K best of each lane.
    ///
    /// `topk_p`, `topk_index` are what the draft model returned: `[batch, K]` at step 0, `[batch * K, K]` after.
    /// `scores` `[batch, K]` is the step before's result, empty at step 0. A probability outside `[0, 1]` is
    /// clamped and a NaN counts as 0, so that no child outranks its parent.
    ///
    /// # Errors
    /// [`Error::Shape`] when a length does not fit or the step is not below `num_steps`; nothing is recorded then.
    pub fn select(&mut self, step: usize, topk_p: &[f32], topk_index: &[i64], scores: &[f32]) -> Result<Selection> {
        let (batch, k) = (self.batch, self.topk);
        if step >= self.num_steps {
            return Err(Error::Shape(format!("step must be in [0, {}), got {step}", self.num_steps)));
        }
        let per_lane = if step == 0 { k } else { k * k };
        same_len("topk_p", topk_p.len(), batch * per_lane)?;
        same_len("topk_index", topk_index.len(), batch * per_lane)?;
        same_len("scores", scores.len(), if step == 0 { 0 } else { batch * k })?;

        let total = num_candidates(self.num_steps, k);
        let first = if step == 0 { 0 } else { k + k * k * (step - 1) };
        let mut selection = Selection {
            input_ids: with_room(batch * k, "kept candidates")?,
            branch_parents: with_room(batch * k, "kept candidates")?,
            scores: with_room(batch * k, "kept candidates")?,
        };
        let mut order = with_room(per_lane, "the candidates of a lane")?;
        for lane in 0..batch {
            let p = &topk_p[lane * per_lane..][..per_lane];
            let tokens = &topk_index[lane * per_lane..][..per_lane];
            let level = &mut self.scores[lane * total + first..][..per_lane];
            self.tokens[lane * total + first..][..per_lane].copy_from_slice(tokens);
            let parents = &mut self.parents[lane * (1 + k * self.num_steps)..];
            if step == 0 {
                // Keeps the model's own order, as upstream: top-K probabilities come sorted.
                for (cell, &p) in level.iter_mut().zip(p) {
                    *cell = score(probability(p));
                }
                order.clear();
                order.extend(0..k);
                parents[0] = -1;
            } else {
                for (i, (cell, &p)) in level.iter_mut().zip(p).enumerate() {
                    *cell = score(scores[lane * k + i / k] * probability(p));
                }
                top(level, k, &mut order);
            }
            for (branch, &candidate) in order.iter().enumerate() {
                selection.input_ids.push(tokens[candidate]);
                selection.branch_parents.push(if step == 0 { branch } else { candidate / k } as i32);
                selection.scores.push(level[candidate]);
                parents[1 + k * step + branch] = (first + candidate) as i64;
            }
        }
        Ok(selection)
    }

    /// Chooses the `num_draft_tokens - 1` best of all candidates of each lane, once every step has been selected.
    ///
    /// # Errors
    /// [`Error::Shape`] unless `1 <= num_draft_tokens <= 1 + M`.
    pub fn organize(&self, num_draft_tokens: usize) -> Result<Organized> {
        let (total, num_parents) = (num_candidates(self.num_steps, self.topk), 1 + self.topk * self.num_steps);
        if num_draft_tokens == 0 || num_draft_tokens > total + 1 {
            return Err(Error::Shape(format!(
                "num_draft_tokens must be in [1, {}] for num_steps {}, topk {}, got {num_draft_tokens}",
                total + 1,
                self.num_steps,
                self.topk
            )));
        }
        let (count, width) = (num_draft_tokens - 1, parent_list_width(self.num_steps, self.topk));
        let mut organized = Organized {
            parent_list: with_room(self.batch * width, "a parent list")?,
            top_scores_index: with_room(self.batch * count, "chosen candidates")?,
            draft_tokens: with_room(self.batch * count, "chosen candidates")?,
        };
        let mut order = with_room(total, "the candidates of a lane")?;
        for lane in 0..self.batch {
            organized.parent_list.extend_from_slice(&self.parents[lane * num_parents..][..width]);
            top(&self.scores[lane * total..][..total], count, &mut order);
            order.sort_unstable();
            let tokens = &self.tokens[lane * total..][..total];
            organized.top_scores_index.extend(order.iter().map(|&i| i as i64));
            organized.draft_tokens.extend(order.iter().map(|&i| tokens[i]));
        }
        Ok(organized)
    }
}

/// Columns of `parent_list`: `1 + K*(S-1)`, none when `S == 1`.
#[must_use]
pub fn parent_list_width(num_steps: usize, topk: usize) -> usize {
    if num_steps <= 1 { 0 } else { 1 + topk * (num_steps - 1) }
}

/// Builds the trees that [`Candidates::organize`] chose.
///
/// `parent_list` is `[batch, any width]`, `top_scores_index` `[batch, N - 1]`.
///
/// # Errors
/// [`Error::Shape`] when a list is not ascending, or a chosen candidate's parent is not chosen.
pub fn build_tree(parent_list: &[i64], top_scores_index: &[i64], batch: usize, topk: usize) -> Result<Tree> {
    if topk == 0 {
        return Err(Error::Shape("topk must be at least 1, got 0".into()));
    }
    if batch == 0 {
        return Tree::from_parents(&[], 0);
    }
    let (width, count) = (parent_list.len() / batch, top_scores_index.len() / batch);
    same_len("parent_list", parent_list.len(), batch * width)?;
    same_len("top_scores_index", top_scores_index.len(), batch * count)?;
    fit("mask", &[batch, count + 1, count + 1])?;
    let mut parents = with_room(batch * (count + 1), "the parents of a tree")?;
    for lane in 0..batch {
        let (list, chosen) = (&parent_list[lane * width..][..width], &top_scores_index[lane * count..][..count]);
        if chosen.first().is_some_and(|&c| c < 0) || chosen.windows(2).any(|pair| pair[0] >= pair[1]) {
            let wrong = chosen.windows(2).position(|pair| pair[0] >= pair[1]).unwrap_or(0);
            let from = if count > MAX_SHOWN { wrong } else { 0 };
            let location = if count > MAX_SHOWN { format!(" from column {from} on") } else { String::new() };
            let shown = &chosen[from..count.min(from + MAX_SHOWN)];
            return Err(Error::Shape(format!(
                "top_scores_index[{lane}] must ascend from 0 or more, got {shown:?}{location}"
            )));
        }
        parents.push(-1);
        for &candidate in chosen {
            let column = candidate as usize / topk; // which kept candidate it continues; 0 is the root
            let parent = match list.get(column) {
                _ if column == 0 => Some(0),
                Some(number) => chosen.binary_search(number).ok().map(|index| index + 1),
                None => None,
            };
            let Some(parent) = parent else {
                return Err(Error::Shape(format!(
                    "top_scores_index[{lane}] chooses candidate {candidate}, but not its parent (parent_list \
                     column {column} of {width})"
                )));
            };
            parents.push(parent as i32);
        }
    }
    Tree::from_parents(&parents, count + 1)
}

impl Tree {
    /// Builds `parents.len() / num_nodes` trees from each node's parent.
    ///
    /// # Errors
    /// [`Error::Shape`] unless each root's parent is -1 and every other node's lies in `[0, node)`.
    pub fn from_parents(parents: &[i32], num_nodes: usize) -> Result<Self> {
        let n = num_nodes;
        if n == 0 && !parents.is_empty() {
            return Err(Error::Shape("a tree has at least one node, its root; got parents with 0 columns".into()));
        }
        let batch = parents.len().checked_div(n).unwrap_or(0);
        same_len("parents", parents.len(), batch * n)?;
        for (index, &parent) in parents.iter().enumerate() {
            let (lane, node) = (index / n, index % n);
            if node == 0 && parent != -1 {
                return Err(Error::Shape(format!("parents[{lane}, 0] is the root's and must be -1, got {parent}")));
            }
            if node > 0 && (parent < 0 || parent as usize >= node) {
                return Err(Error::Shape(format!("parents[{lane}, {node}] must be in [0, {node}), got {parent}")));
            }
        }
        let mut tree = Self {
            mask: memory::zeroed(fit("mask", &[batch, n, n])?, "a tree's mask")?,
            parents: memory::copied(parents, "a tree's nodes")?,
            depths: filled(0, parents.len(), "a tree's nodes")?,
            first_child: filled(-1, parents.len(), "a tree's nodes")?,
            next_sibling: filled(-1, parents.len(), "a tree's nodes")?,
        };
        for lane in 0..batch {
            tree.link(lane * n, &parents[lane * n..][..n]);
        }
        Ok(tree)
    }

    /// Fills one lane, whose nodes start at flat node `first`.
    fn link(&mut self, first: usize, parents: &[i32]) {
        let n = parents.len();
        let mask = &mut self.mask[first * n..][..n * n];
        mask[0] = true;
        for (node, &parent) in parents.iter().enumerate().skip(1) {
            let parent = parent as usize;
            self.depths[first + node] = self.depths[first + parent] + 1;
            mask.copy_within(parent * n..=parent * n + parent, node * n);
            mask[node * n + node] = true;
        }
        // Go backwards, so that the first child is the lowest node and siblings ascend.
        for (node, &parent) in parents.iter().enumerate().skip(1).rev() {
            let parent = first + parent as usize;
            self.next_sibling[first + node] = self.first_child[parent];
            self.first_child[parent] = node as i32;
        }
    }
}
