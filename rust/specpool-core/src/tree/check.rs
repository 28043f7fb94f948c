//! The check of trees that a drafter has proposed: a wrong one could change the text.

use crate::check::{fit, same_len};
use crate::error::{Error, Result};
use crate::memory::room;

/// Nodes that an error shows at most.
const MAX_SHOWN: usize = 16;

/// The trees of a round, one per lane, `N` nodes each; see [`Tree`](super::build::Tree).
#[derive(Debug, Clone, Copy)]
pub struct Proposed<'a> {
    /// `[batch, N]`, the root's first.
    pub tokens: &'a [i64],
    /// `[batch, N]`.
    pub depths: &'a [i32],
    /// `[batch, N, N]`.
    pub mask: &'a [bool],
    /// `[batch, N]`, -1 = none.
    pub first_child: &'a [i32],
    /// `[batch, N]`, -1 = none.
    pub next_sibling: &'a [i32],
}

/// A lane whose arrays are no tree, and what is wrong with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The lane.
    pub lane: usize,
    /// The first thing that is wrong, with the numbers.
    pub why: String,
}

/// Finds the lanes whose arrays verify could not walk.
///
/// In a tree node 0 is the root token. A child sees what its parent sees, and itself. Siblings see the same nodes apart
/// from themselves. A node's depth is the number of its ancestors. Links lead to later nodes. Tokens are in
/// `[0, vocab_size)`. Nodes that no link leads to are never walked; of these only the depth and the number of visible
/// nodes are compared. The cost is O(batch * N^2).
///
/// # Errors
/// [`Error::Shape`] when lengths differ.
pub fn find_broken(trees: &Proposed<'_>, root_tokens: &[i64], vocab_size: i64) -> Result<Vec<Broken>> {
    let batch = root_tokens.len();
    let n = trees.tokens.len().checked_div(batch).unwrap_or(0);
    if batch > 0 && n == 0 {
        return Err(Error::Shape(format!("{batch} trees must have a root each, got {} tokens", trees.tokens.len())));
    }
    let (flat, square) = (fit("tokens", &[batch, n])?, fit("mask", &[batch, n, n])?);
    same_len("tokens", trees.tokens.len(), flat)?;
    same_len("depths", trees.depths.len(), flat)?;
    same_len("mask", trees.mask.len(), square)?;
    same_len("first_child", trees.first_child.len(), flat)?;
    same_len("next_sibling", trees.next_sibling.len(), flat)?;
    let mut broken = Vec::new();
    for (lane, &root) in root_tokens.iter().enumerate() {
        let (nodes, seen) = (lane * n..(lane + 1) * n, lane * n * n..(lane + 1) * n * n);
        let proposed = Proposed {
            tokens: &trees.tokens[nodes.clone()],
            depths: &trees.depths[nodes.clone()],
            mask: &trees.mask[seen],
            first_child: &trees.first_child[nodes.clone()],
            next_sibling: &trees.next_sibling[nodes],
        };
        if let Err(why) = proposed.check(lane, root, vocab_size) {
            room(&mut broken, 1, "broken trees")?;
            broken.push(Broken { lane, why });
        }
    }
    Ok(broken)
}

impl Proposed<'_> {
    /// Checks one lane's tree.
    fn check(&self, lane: usize, root: i64, vocab_size: i64) -> std::result::Result<(), String> {
        if self.tokens[0] != root {
            return Err(format!("node 0 of tree {lane} is the root token {root}, got {}", self.tokens[0]));
        }
        if let Some(token) = self.tokens.iter().find(|&&token| token < 0 || token >= vocab_size) {
            return Err(format!("draft token {token}: the target's vocabulary is [0, {vocab_size})"));
        }
        for (node, &depth) in self.depths.iter().enumerate() {
            let line = self.line(node);
            let num_seen = line.iter().filter(|&&sees| sees).count() as i64;
            if !line[node] || num_seen != i64::from(depth) + 1 || (node == 0 && depth != 0) {
                return Err(format!(
                    "mask and depths disagree: a node sees its ancestors and itself, so node {node} of tree {lane} at \
                     depth {depth} cannot see {}",
                    shown(&self.seen(node))
                ));
            }
        }
        for (name, links, is_child) in
            [("first_child", self.first_child, true), ("next_sibling", self.next_sibling, false)]
        {
            for (node, &link) in links.iter().enumerate().filter(|(_, link)| **link != -1) {
                let Some(to) = usize::try_from(link).ok().filter(|&to| to > node && to < links.len()) else {
                    let n = links.len();
                    return Err(format!("{name}[{lane}, {node}] must be -1 or in ({node}, {n}), got {link}"));
                };
                if !self.sees_alike(node, to, is_child) {
                    let mut wanted = self.seen(node);
                    wanted.retain(|&other| is_child || other != node);
                    wanted.push(to);
                    return Err(format!(
                        "mask and {name}[{lane}, {node}] = {link} disagree: node {node} sees {}, so node {link} must \
                         see {}, got {}",
                        shown(&self.seen(node)),
                        shown(&wanted),
                        shown(&self.seen(to))
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether node `to` sees what a child (or else the next sibling) of `node` must see.
    fn sees_alike(&self, node: usize, to: usize, is_child: bool) -> bool {
        let (above, below) = (self.line(node), self.line(to));
        let num_different = above.iter().zip(below).filter(|(one, other)| one != other).count();
        !above[to] && below[node] == is_child && num_different == if is_child { 1 } else { 2 }
    }

    fn line(&self, node: usize) -> &[bool] {
        let n = self.tokens.len();
        &self.mask[node * n..][..n]
    }

    /// The nodes that a node sees.
    fn seen(&self, node: usize) -> Vec<usize> {
        (0..self.tokens.len()).filter(|&other| self.line(node)[other]).collect()
    }
}

fn shown(nodes: &[usize]) -> String {
    let first = &nodes[..nodes.len().min(MAX_SHOWN)];
    match nodes.len() - first.len() {
        0 => format!("{first:?}"),
        more => format!("{first:?} and {more} more"),
    }
}
