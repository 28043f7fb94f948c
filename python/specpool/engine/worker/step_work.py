"""`StepWork`: what a worker does for one step, and `RoundContext`: what all of it works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention import AttentionView
from specpool.engine.attention.lanes import Lanes, causal_view
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.scheduler.request import Request
from specpool.engine.worker.followers import Followers
from specpool.engine.worker.forward import Forward, Pass
from specpool.engine.worker.processors import Processors
from specpool.engine.worker.proposer import Proposer
from specpool.engine.worker.results import Outcome
from specpool.engine.worker.row_state import RowState
from specpool.kernels.fields import Fields


class StepWork(Protocol):
    """The work of one step on the device, in three parts that are called once each, in order.

    Attributes:
        requests: one per lane; empty in the capture of a graph.
    """

    requests: Sequence[Request]

    def launch(self) -> Pass:
        """Launch what comes before the target's forward; return the tokens that it is to read."""

    def outcome(self, output: TargetOutput) -> Outcome:
        """Choose the new tokens, and store what the rows' next steps need.

        `output` is the target's, for the tokens of `launch`.
        """

    def follow(self) -> None:
        """Launch what only later steps need, while the outcome is copied to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """What all steps of a worker work with.

    Attributes:
        cache: the pages; its first layers are the target's.
        rows: what one step of a row hands to the next.
        forward: runs the target.
        proposer: makes the trees of a round.
        processors: change logits where requests ask for it.
        followers: the drafters that keep KV.
        shapes: the ledger's shapes.
        target_fields: group -> the KV of the target's layers in it.
        state: the slots and rings of the target's recurrent layers; None if it has none.
        has_windows: whether some layer of the target has a window.
        last_position: positions beyond it are clamped to it.
    """

    cache: KVCache
    rows: RowState
    forward: Forward
    proposer: Proposer
    processors: Processors
    followers: Followers
    shapes: Sequence[Shape]
    target_fields: Mapping[int, Fields]
    state: RecurrentState | None
    has_windows: bool
    last_position: int

    def causal_reads(self, lanes: Lanes) -> tuple[Tensor, dict[int, AttentionView]]:
        """Return positions and views of lanes whose tokens see all positions up to their own.

        Returns:
            The tokens' positions, int64 [T], and a view for each group, as in `Pass`.
        """
        positions = lanes.positions
        if lanes.max_len > self.last_position + 1:
            positions = positions.clamp(max=self.last_position)
        views = {group: causal_view(self.cache, group, lanes) for group in self.target_fields}
        return positions, views


def are_greedy(requests: Sequence[Request]) -> bool:
    """Return whether every request takes the likeliest token; False in a capture, without any."""
    return bool(requests) and all(request.params.temperature == 0 for request in requests)
