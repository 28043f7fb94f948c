"""`AdaptiveController`: SGLang's policy, an EMA for each range of batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specpool._core import Shape
from specpool.engine.shapes.base import NumCorrectDrafts
from specpool.engine.shapes.config import AdaptiveConfig
from specpool.engine.shapes.ema import StepRange
from specpool.engine.shapes.router import StepRouter


class AdaptiveController:
    """A controller with a depth per range of batch sizes, set by the results of its rounds."""

    def __init__(
        self,
        config: AdaptiveConfig,
        *,
        initial: Shape | int | None = None,
        graph_sizes: Sequence[int] | None = None,
    ) -> None:
        """Build the ranges.

        Args:
            config: candidates and thresholds; its policy must be `ema`.
            initial: the shape (or depth) to begin with, in ranges that have it. Other ranges begin
                with their middle candidate; None if all ranges do.
            graph_sizes: the batch sizes with captured graphs; None if there are no graphs.

        Raises:
            ConfigError: no range has the shape `initial`.
        """
        shape = config.initial_shape(initial)
        steps = None if shape is None else shape.num_steps
        self.candidates = config.candidates
        self._ranges = {
            key: StepRange(batch_range, steps) for key, batch_range in config.ranges.items()
        }
        self._keys: dict[tuple[Shape, int], int] = {}  # key of the last range to choose it
        self._router = StepRouter(
            config.ranges, graph_sizes=graph_sizes, threshold_rounds=config.threshold_rounds
        )

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return the shape of the next decode round, of `batch_size` rows."""
        key = self._router.activate(batch_size)
        shape = self._ranges[key].current
        self._keys[shape, batch_size] = key
        return shape

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> Shape | None:
        """Learn from a round's result; return the shape that its range switches to, or None."""
        key = self._keys.get((shape, batch_size))
        batch_range = self._ranges[self._router.key_of(batch_size) if key is None else key]
        num_lanes = len(num_correct_drafts) if shape.num_steps else 0
        if not num_lanes:
            return batch_range.update(None)
        if isinstance(num_correct_drafts, np.ndarray):
            return batch_range.update(int(num_correct_drafts.sum()) / num_lanes)
        return batch_range.update(sum(num_correct_drafts) / num_lanes)

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Do nothing: this policy does not use the cost of rounds."""

    def graph_sizes_of_candidates(self) -> dict[Shape, list[int] | None]:
        """Return the graph sizes at which each candidate can run; None if there are no graphs."""
        return self._router.graph_sizes_of(
            {key: batch_range.candidates for key, batch_range in self._ranges.items()}
        )
