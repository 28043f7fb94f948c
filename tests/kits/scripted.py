"""A controller that does what a test has written down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specpool import Engine, Shape
from specpool.engine.shape_names import name_of
from specpool.engine.shapes import AdaptiveConfig


class Scripted:
    """Go through its shapes, so many rounds each, and remember the results."""

    def __init__(self, shapes: Sequence[Shape], rounds: int = 1) -> None:
        self.candidates = tuple(dict.fromkeys(shapes))
        self.script = [shape for shape in shapes for _ in range(rounds)]
        self.given: list[tuple[Shape, int]] = []
        self.told: list[tuple[Shape, int, list[int]]] = []
        self.timed: list[tuple[Shape, int]] = []

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        shape = self.script[len(self.given) % len(self.script)]
        self.given.append((shape, batch_size))
        return shape

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: np.ndarray
    ) -> None:
        self.told.append((shape, batch_size, num_correct_drafts.tolist()))

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        assert seconds > 0
        self.timed.append((shape, batch_size))

    def config(self) -> AdaptiveConfig:
        """The configuration for an engine that this controller can take over."""
        candidates = [name_of(shape) for shape in self.candidates]
        return AdaptiveConfig.from_dict({"1": {"candidates": candidates}})

    def take_over(self, engine: Engine) -> None:
        """Be the engine's controller from here on."""
        rounds = engine.core.scheduler.round_shapes
        self.candidates = rounds.controller.candidates
        rounds.controller = self
