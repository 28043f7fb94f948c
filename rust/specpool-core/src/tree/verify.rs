//! Verify (docs/contract.md, The draft tree): walks down the tree along the target's own tokens. Greedy and sampled
//! decoding differ only in where those tokens come from (an argmax, or the seeded draw of `sample`).

use crate::check::{fit, same_len};
use crate::error::{Error, Result};
use crate::memory::{filled, with_room};

/// What verify accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// `[batch, S + 1]`: flat node ids `lane * N + node` of the walk, the root first, padded with -1.
    pub accept_index: Vec<i32>,
    /// `[batch]`: nodes of the walk, which is the number of accepted tokens, the bonus included.
    pub accept_len: Vec<i32>,
    /// `[batch * N]`: the target's token at each node of the walk, 0 elsewhere; the last one is the bonus.
    pub predict: Vec<i64>,
}

/// Walks each lane's tree from the root: goes to the first child whose token is the target's, until there is none.
///
/// All inputs are `[batch, N]`. A target token of -1 (the logits there held a NaN) stops the walk at that node. It is
/// returned in `predict` as the bonus, so that the caller can fail that request alone.
///
/// # Errors
/// [`Error::Shape`] when lengths differ or a link does not lead to a later node of the lane.
///
/// # Examples
/// ```
/// use specpool_core::tree::{build::Tree, verify::verify_tree};
///
/// // Root 7 with children 10 and 11; 12 follows 11.
/// let (tokens, tree) = ([7, 10, 11, 12], Tree::from_parents(&[-1, 0, 0, 2], 4)?);
/// let target = [11, 0, 12, 13]; // what the target says after each node
/// let verified = verify_tree(&tokens, &tree.first_child, &tree.next_sibling, &target, 4, 2)?;
/// assert_eq!(verified.accept_index, [0, 2, 3]);
/// assert_eq!(verified.accept_len, [3]); // 11, 12 and the bonus 13
/// # Ok::<(), specpool_core::Error>(())
/// ```
pub fn verify_tree(
    tokens: &[i64],
    first_child: &[i32],
    next_sibling: &[i32],
    target_tokens: &[i64],
    num_nodes: usize,
    num_steps: usize,
) -> Result<Verified> {
    let n = num_nodes;
    if n == 0 || !tokens.len().is_multiple_of(n) {
        return Err(Error::Shape(format!("tokens must be [batch, N >= 1], got {} tokens for N = {n}", tokens.len())));
    }
    same_len("first_child", first_child.len(), tokens.len())?;
    same_len("next_sibling", next_sibling.len(), tokens.len())?;
    same_len("target_tokens", target_tokens.len(), tokens.len())?;
    let (batch, width) = (tokens.len() / n, num_steps.saturating_add(1));
    fit("node ids", &[batch, n])?;
    let mut result = Verified {
        accept_index: filled(-1, fit("accept_index", &[batch, width])?, "accept_index")?,
        accept_len: with_room(batch, "accept_len")?,
        predict: filled(0, tokens.len(), "predict")?,
    };
    for lane in 0..batch {
        let first = lane * n;
        let (mut node, mut len) = (0, 0);
        loop {
            result.accept_index[lane * width + len] = (first + node) as i32;
            len += 1;
            let target = target_tokens[first + node];
            result.predict[first + node] = target;
            if target < 0 || len == width {
                break;
            }
            let mut child = link("first_child", first_child, lane, n, node)?;
            while let Some(c) = child {
                if tokens[first + c] == target {
                    break;
                }
                child = link("next_sibling", next_sibling, lane, n, c)?;
            }
            match child {
                Some(c) => node = c,
                None => break,
            }
        }
        result.accept_len.push(len as i32);
    }
    Ok(result)
}

/// The node that `node` links to. Links only lead forward, so a walk always ends.
fn link(name: &str, links: &[i32], lane: usize, n: usize, node: usize) -> Result<Option<usize>> {
    match links[lane * n + node] {
        -1 => Ok(None),
        to if to > node as i32 && to < n as i32 => Ok(Some(to as usize)),
        to => Err(Error::Shape(format!("{name}[{lane}, {node}] must be -1 or in ({node}, {n}), got {to}"))),
    }
}
