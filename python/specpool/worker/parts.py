"""Helpers of a round: `Part`, the lanes that share a shape, and small questions about lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.attention.lanes import Lanes
from specpool.draft.base import DraftTree
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import Download
from specpool.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Part:
    """The lanes of a round that share a shape, and their trees."""

    lanes: Lanes
    tree: DraftTree
    positions: Tensor  # int32 [B, N], of each node
    num_steps: int
    chains_of: int | None  # the drafter whose chains all trees are; None = it is not one
    greedy: bool  # every lane takes the likeliest token
    first: int  # index of the part's first token among the round's
    is_broken: Tensor | None  # bool [B], lanes with an invalid tree; None = the host checked them
    requests: Sequence[Request]  # one per lane; none in a graph
    on_host: Download | None  # the trees, for lanes whose text has a form

    @property
    def is_chain(self) -> bool:
        """Whether the host sees that in every tree node i continues node i - 1."""
        depths = self.tree.depths
        if runs_kernels(depths.device):
            return False
        return bool((depths.numpy() == np.arange(depths.shape[1])).all())


def own_cells(parts: Sequence[Part], positions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what the nodes of all lanes see of their own trees, padded to the widest.

    Args:
        parts: of one round.
        positions: int32 [B, N] for each part, of its nodes.

    Returns:
        bool [B, N, N], and the positions int32 [B, N].
    """
    if len(parts) == 1:
        return parts[0].tree.mask, positions[0]
    num_lanes = sum(len(each) for each in positions)
    most = max(each.shape[1] for each in positions)
    mask = parts[0].tree.mask.new_zeros(num_lanes, most, most)
    by_lane = positions[0].new_zeros(num_lanes, most)
    start = 0
    for part, mine in zip(parts, positions, strict=True):
        batch, num_nodes = mine.shape
        mask[start : start + batch, :num_nodes, :num_nodes] = part.tree.mask
        by_lane[start : start + batch, :num_nodes] = mine
        start += batch
    return mask, by_lane


def bare_tree(roots: Tensor) -> DraftTree:
    """Return trees that consist of the roots, int64 [B], alone."""
    size = len(roots), 1
    depths = torch.zeros(size, dtype=torch.int32, device=roots.device)
    alone = torch.ones(*size, 1, dtype=torch.bool, device=roots.device)
    return DraftTree(roots.unsqueeze(1), depths, alone, depths - 1, depths - 1)


def not_finite(lanes: Lanes, hidden: Tensor) -> Tensor:
    """Return bool [B]: the lanes with a token whose hidden state, of [T, h], is not finite.

    The KV of such a token is not finite either.
    """
    spoiled = (~hidden.isfinite().all(1)).cumsum(0).index_select(0, lanes.lasts)
    return spoiled.diff(prepend=spoiled.new_zeros(1)) > 0


def are_greedy(requests: Sequence[Request]) -> bool:
    """Return whether every request takes the likeliest token."""
    return all(request.params.temperature == 0 for request in requests)


def draft_any(requests: Sequence[Request]) -> bool:
    """Return whether any request drafts. A request that never drafts keeps no draft KV."""
    return any(request.shape.num_draft_tokens > 1 for request in requests)
