"""`NodeBudget`: how many of a round's drafted nodes the target reads; docs/budget.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool.arrays import Int32

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes that the target reads in a round.

    Attributes:
        num_nodes: V, at least the round's lanes.
        factors: float32 [B, D + 1], by which each lane's `DraftTree.p` counts at each depth.
    """

    num_nodes: int
    factors: Float32


class NodeBudget:
    """The choice of each round's nodes."""

    def __init__(self, most_steps: int, *, fixed: int) -> None:
        """Read at most `fixed` nodes in a round, but the root of each row in any case.

        `most_steps` is the depth of the deepest shape.
        """
        self._most_steps, self._fixed = most_steps, fixed

    def choose(self, nodes: Int32) -> NodeChoice | None:
        """Choose for a round whose lanes have drafted so many nodes, int32 [B]; None = read all."""
        num_lanes = len(nodes)
        num_nodes = max(self._fixed, num_lanes)
        if num_nodes >= int(nodes.sum()):
            return None
        return NodeChoice(num_nodes, np.ones((num_lanes, self._most_steps + 1), np.float32))
