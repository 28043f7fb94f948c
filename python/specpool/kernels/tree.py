"""Launchers of `cuda/tree.cu`: select, build, check, verify. Twins: `specpool.kernels.twins`.

In the shapes below M = K + (S-1)*K*K, the candidates of one lane in one round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import specpool._core as _core
from specpool.errors import ShapeError
from specpool.kernels import with_twin as twins
from specpool.kernels.checks import (
    ceil_pow2,
    device_of,
    expect,
    i32,
    number,
    outputs,
)
from specpool.kernels.launch import SHARED_BYTES, launch
from specpool.kernels.with_twin import with_twin


def _candidates(scores: Tensor, tokens: Tensor, parents: Tensor, topk: int) -> tuple[int, int]:
    """Check a round's buffers; return the batch and S, which follows from the parents' width."""
    device = device_of("candidate_parents", parents)
    k = number("topk", topk, 1)
    expect("candidate_parents", parents, torch.int64, (None, None), device)
    batch, width = parents.shape
    num_steps = (width - 1) // k
    if width < 1 + k or width != 1 + k * num_steps:
        raise ShapeError(
            f"candidate_parents must be [n, 1 + K * S] with K = {k}, got {[batch, width]}"
        )
    total = k + (num_steps - 1) * k * k
    expect("candidate_scores", scores, torch.float32, (batch, total), device)
    expect("candidate_tokens", tokens, torch.int64, (batch, total), device)
    return batch, num_steps


@with_twin(_core.select_topk)
def select_topk(
    step: int,
    topk_p: Tensor,
    topk_index: Tensor,
    scores: Tensor | None,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Record a draft step's candidates and keep the K best of each lane.

    Args:
        step: in [0, S).
        topk_p: float32 [n, K] at step 0, [n*K, K] after.
        topk_index: int64, of the same shape as topk_p: the tokens.
        scores: float32 [n, K], the result of the step before; None at step 0.
        candidate_scores: float32 [n, M], written.
        candidate_tokens: int64 [n, M], written.
        candidate_parents: int64 [n, 1 + K*S], written.
        out: the three results.

    Returns:
        input_ids int64 [n*K]; branch_parents int32 [n, K]; scores float32 [n, K].
    """
    device = device_of("topk_p", topk_p)
    expect("topk_p", topk_p, torch.float32, (None, None), device)
    k = topk_p.shape[1]
    n, s = _candidates(candidate_scores, candidate_tokens, candidate_parents, k)
    step = number("step", step, 0, s - 1)
    expect("topk_p", topk_p, torch.float32, (n if step == 0 else n * k, k), device)
    expect("topk_index", topk_index, torch.int64, topk_p.shape, device)
    expect("candidate_parents", candidate_parents, torch.int64, (n, 1 + k * s), device)
    if step > 0:
        expect("scores", scores, torch.float32, (n, k), device)
    names, shapes = ("input_ids", "branch_parents", "scores"), ((n * k,), (n, k), (n, k))
    kinds = (torch.int64, torch.int32, torch.float32)
    ids, parents, best_scores = outputs(names, out, kinds, shapes, device)
    if step > 0 and scores is not None and n and best_scores.data_ptr() == scores.data_ptr():
        raise ShapeError("out.scores must not be scores itself")
    block = (min(max(ceil_pow2(k * k), 32), 256),)
    buffers = (candidate_scores, candidate_tokens, candidate_parents)
    before = scores if step > 0 else None
    args = (i32(step), i32(s), i32(k), topk_p, topk_index, before, *buffers)
    launch("select_topk", (n,), block, (*args, ids, parents, best_scores))
    return ids, parents, best_scores


@with_twin(twins.build_tree)
def build_tree(
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    root_tokens: Tensor,
    *,
    topk: int,
    num_draft_tokens: int,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose the N - 1 best candidates and link them (the twins' `organize` and `build_tree`).

    Args:
        candidate_scores: float32 [n, M], written by `select_topk`.
        candidate_tokens: int64 [n, M].
        candidate_parents: int64 [n, 1 + K*S].
        root_tokens: int64 [n].
        topk: K.
        num_draft_tokens: N, in [1, 1 + M]; 12 * M + 4 * N bytes must fit into 44 KiB.
        out: the six results.

    Returns:
        tokens int64 [n, N], the root's first; depths int32 [n, N]; mask bool [n, N, N], true where
        node j is node i or an ancestor of it; first_child, next_sibling int32 [n, N], -1 for
        none; parents int32 [n, N], -1 for the root.
    """
    n, s = _candidates(candidate_scores, candidate_tokens, candidate_parents, topk)
    device, total = candidate_scores.device, candidate_scores.shape[1]
    nodes = number("num_draft_tokens", num_draft_tokens, 1, 1 + total)
    shared = 12 * total + 4 * nodes
    number("12 * candidates + 4 * num_draft_tokens", shared, 0, SHARED_BYTES)
    expect("root_tokens", root_tokens, torch.int64, (n,), device)
    flat, ids = (n, nodes), torch.int32
    tokens, depths, mask, child, sibling, parents = outputs(
        ("tokens", "depths", "mask", "first_child", "next_sibling", "parents"),
        out,
        (torch.int64, ids, torch.bool, ids, ids, ids),
        (flat, flat, (n, nodes, nodes), flat, flat, flat),
        device,
    )
    block = (min(max(4 * ceil_pow2(max(total, nodes)), 32), 1024),)
    args = (i32(s), i32(topk), i32(nodes), candidate_scores, candidate_tokens, candidate_parents)
    results = (tokens, parents, depths, mask, child, sibling)
    launch("build_tree", (n,), block, (*args, root_tokens, *results), shared_mem=shared)
    return tokens, depths, mask, child, sibling, parents


@with_twin(twins.check_tree)
def check_tree(
    tokens: Tensor,
    depths: Tensor,
    mask: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    root_tokens: Tensor,
    *,
    vocab_size: int,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the lanes whose arrays are not a valid tree for verify, without reading values back.

    In a valid tree node 0 is the root token. A child sees what its parent sees, and itself.
    Siblings see the same nodes apart from themselves. A node's depth is the number of its
    ancestors. Links lead to later nodes. Tokens are below `vocab_size`. Nodes that no link leads to
    are never walked; for these only the depth and the number of visible nodes are compared.

    Args:
        tokens: int64 [n, N].
        depths: int32 [n, N].
        mask: bool [n, N, N].
        first_child: int32 [n, N], -1 means none.
        next_sibling: int32 [n, N], -1 means none.
        root_tokens: int64 [n].
        vocab_size: the target's.
        out: the three results.

    Returns:
        tokens int64 [n, N] and depths int32 [n, N], with the root's values in every node of a
        broken lane; is_broken bool [n].
    """
    device = device_of("tokens", tokens)
    expect("tokens", tokens, torch.int64, (None, None), device)
    n, nodes = tokens.shape
    number("num_draft_tokens", nodes, 1)
    vocab = number("vocab_size", vocab_size, 1)
    expect("depths", depths, torch.int32, (n, nodes), device)
    expect("mask", mask, torch.bool, (n, nodes, nodes), device)
    expect("first_child", first_child, torch.int32, (n, nodes), device)
    expect("next_sibling", next_sibling, torch.int32, (n, nodes), device)
    expect("root_tokens", root_tokens, torch.int64, (n,), device)
    results = outputs(
        ("tokens", "depths", "is_broken"),
        out,
        (torch.int64, torch.int32, torch.bool),
        ((n, nodes), (n, nodes), (n,)),
        device,
    )
    block = (min(32 * ceil_pow2(nodes), 1024),)  # a warp for each node
    links = (tokens, depths, mask, first_child, next_sibling, root_tokens)
    launch("check_tree", (n,), block, (i32(nodes), np.int64(vocab), *links, *results))
    safe_tokens, safe_depths, is_broken = results
    return safe_tokens, safe_depths, is_broken


@with_twin(_core.verify_tree)
def verify_tree(
    tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target_tokens: Tensor,
    *,
    num_steps: int,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root to the child with the target's token, as long as there is one.

    Args:
        tokens: int64 [n, N <= 1877], the root's first.
        first_child: int32 [n, N].
        next_sibling: int32 [n, N].
        target_tokens: int64 [n, N]; -1 ends the walk there and becomes the bonus token.
        num_steps: S, the most drafts accepted.
        out: the three results.

    Returns:
        accept_index int32 [n, S+1], flat node ids, padded with -1; accept_len int32 [n], the bonus
        included; predict int64 [n*N], the target's tokens at the walked nodes, 0 at others.
    """
    device = device_of("tokens", tokens)
    expect("tokens", tokens, torch.int64, (None, None), device)
    n, nodes = tokens.shape
    number("num_draft_tokens", nodes, 1, SHARED_BYTES // 24)
    width = number("num_steps", num_steps, 0) + 1
    number("n * num_draft_tokens", n * nodes, 0)
    expect("first_child", first_child, torch.int32, (n, nodes), device)
    expect("next_sibling", next_sibling, torch.int32, (n, nodes), device)
    expect("target_tokens", target_tokens, torch.int64, (n, nodes), device)
    accept_index, accept_len, predict = outputs(
        ("accept_index", "accept_len", "predict"),
        out,
        (torch.int32, torch.int32, torch.int64),
        ((n, width), (n,), (n * nodes,)),
        device,
    )
    block = (min(max(ceil_pow2(nodes), 32), 256),)
    args = (i32(nodes), i32(width), tokens, first_child, next_sibling, target_tokens)
    results = (accept_index, accept_len, predict)
    launch("verify_tree", (n,), block, (*args, *results), shared_mem=24 * nodes)
    return accept_index, accept_len, predict
