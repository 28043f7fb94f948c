"""Pieces of a round: the lanes that share a shape, and what is asked of requests and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.attention.lanes import Lanes
from specpool.draft.base import DraftTree
from specpool.models.target_output import TargetOutput
from specpool.scheduler.requests.request import Request


@dataclass(frozen=True, slots=True)
class Part:
    """The lanes of a round that share a shape, and their trees."""

    lanes: Lanes
    tree: DraftTree
    positions: Tensor  # int32 [B, N], of each node
    num_steps: int
    greedy: bool  # every lane takes the likeliest token
    first: int  # of its tokens, among all of the round
    is_broken: Tensor | None  # bool [B], lanes whose tree is none; None = the host has looked


def bare_tree(roots: Tensor) -> DraftTree:
    """Trees of int64 [B] roots alone."""
    size = len(roots), 1
    depths = torch.zeros(size, dtype=torch.int32, device=roots.device)
    alone = torch.ones(*size, 1, dtype=torch.bool, device=roots.device)
    return DraftTree(roots.unsqueeze(1), depths, alone, depths - 1, depths - 1)


def features_of(output: TargetOutput) -> Tensor:
    """What a head reads: the captured layers' inputs, or the last hidden state."""
    return output.hidden if output.features is None else output.features


def not_finite(lanes: Lanes, hidden: Tensor) -> Tensor:
    """Bool [B]: lanes with a hidden state, [T, h], that is not finite, and so with such KV."""
    spoiled = (~hidden.isfinite().all(1)).cumsum(0).index_select(0, lanes.lasts)
    return spoiled.diff(prepend=spoiled.new_zeros(1)) > 0


def are_greedy(requests: Sequence[Request]) -> bool:
    """Whether every request takes the likeliest token."""
    return all(request.params.temperature == 0 for request in requests)


def draft_any(requests: Sequence[Request]) -> bool:
    """Whether the lanes draft at all: a request that opted out keeps no draft KV."""
    return any(request.shape.num_draft_tokens > 1 for request in requests)
