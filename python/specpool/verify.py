"""The target's tokens at every node of a tree, and how far the drafts agree with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specpool import kernels
from specpool.draft.base import DraftTree, Int32, Int64
from specpool.request import Request, TokenLogprob


def draw_tokens(requests: Sequence[Request], logits: torch.Tensor, positions: Int64) -> Int64:
    """The target's own token for each node: greedy, or drawn with the request's seed (spec 5.5).

    Args:
        requests: the lanes, B of them.
        logits: [B * n, V], n nodes per lane.
        positions: int64 [B, n], the sequence position of the token that is drawn.

    Returns:
        int64 [B, n]; -1 where the logits are not finite.
    """
    scores = logits.float().cpu().numpy()
    params = [request.params for request in requests]
    if all(p.temperature == 0 for p in params):
        n = positions.size
        zeros = np.zeros(n, np.float32)
        tokens = kernels.sample_tokens(
            scores, zeros, np.zeros(n, np.int32), np.ones(n, np.float32), np.zeros(n)
        )
        return tokens.reshape(positions.shape)
    lanes = np.repeat(np.arange(len(params)), positions.shape[1])
    temperature = np.array([p.temperature for p in params], np.float32)[lanes]
    top_k = np.array([p.top_k for p in params], np.int32)[lanes]
    top_p = np.array([p.top_p for p in params], np.float32)[lanes]
    seeds = np.array([request.seed for request in requests], np.uint64)[lanes]
    uniforms = kernels.uniform(seeds, positions.ravel())
    tokens = kernels.sample_tokens(scores, temperature, top_k, top_p, uniforms)
    return tokens.reshape(positions.shape)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verify accepted."""

    accept_index: Int32  # [B, S+1], flat node ids b*N + node, -1 padded
    accept_len: Int32  # [B], the bonus token included
    nodes: Int64  # [sum(accept_len)], the accepted nodes, lane after lane
    tokens: Int64  # [sum(accept_len)], the target's token at each; -1 = logits not finite
    not_finite: list[bool]  # [B], whether some node's logits were not finite


def verify(tree: DraftTree, target_tokens: Int64, num_steps: int) -> Verdict:
    """Walk each tree along the target's own tokens (greedy or drawn: spec 5.4, 5.5)."""
    accept_index, accept_len, predict = kernels.verify_tree(
        tree.tokens, tree.first_child, tree.next_sibling, target_tokens, num_steps=num_steps
    )
    nodes = accept_index[accept_index >= 0].astype(np.int64)
    return Verdict(
        accept_index,
        accept_len,
        nodes,
        predict[nodes],
        [min(lane) < 0 for lane in target_tokens.tolist()],
    )


def logprobs_of(logits: torch.Tensor, tokens: Int64, num_top: int) -> list[TokenLogprob]:
    """Log probabilities of `tokens` [n] under `logits` [n, V], with the `num_top` most likely."""
    table = torch.log_softmax(logits.float(), -1)
    chosen = table.gather(1, torch.from_numpy(np.maximum(tokens, 0)).to(table.device)[:, None])
    values, ids = table.topk(min(num_top, table.shape[1]), -1)
    return [
        TokenLogprob(token, logprob, dict(zip(top_ids, top_values, strict=True)))
        for token, (logprob,), top_ids, top_values in zip(
            tokens.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
