"""`Part`: the lanes of a round that share a shape, with their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree
from specpool.engine.scheduler.request import Request
from specpool.kernels.transfer import Download


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The B lanes of a round that share a shape, and their trees of N nodes.

    Attributes:
        lanes: B lanes, N tokens each.
        tree: the trees.
        positions: int32 [B, N], of each node.
        num_steps: of the shape.
        chains_of: the drafter that has proposed all trees, if they are chains; else None.
        is_chain: whether the host knows that in every tree node i continues node i - 1. The walk
            of a broken lane ends at its root, which sees the same cells in any tree.
        first: the index of the part's first node among the round's.
        is_broken: bool [B], lanes whose tree was invalid; None if the host has checked all of them.
        requests: one per lane; empty in the capture of a graph.
        on_host: the trees, for lanes whose text has a form.
    """

    lanes: Lanes
    tree: DraftTree
    positions: Tensor
    num_steps: int
    chains_of: int | None
    is_chain: bool
    first: int
    is_broken: Tensor | None
    requests: Sequence[Request]
    on_host: Download | None
