"""The controllers of a simulation: the real one, and `Dice`, which chooses at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from lab.sim.settings import Settings
from specpool._core import Shape
from specpool.engine.shapes import (
    AdaptiveConfig,
    AdaptiveController,
    BudgetController,
    Controller,
    RangeConfig,
)
from specpool.engine.shapes.base import NumCorrectDrafts


class Dice:
    """A controller that chooses candidates at random, for many rounds or for one."""

    def __init__(self, candidates: Sequence[Shape], rng: random.Random) -> None:
        """Begin with a random candidate."""
        self.candidates, self._rng = tuple(candidates), rng
        self._changes = rng.choice([0.03, 0.3, 1.0])
        self._shape = rng.choice(self.candidates)

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return a random candidate, which changes now and then."""
        if self._rng.random() < self._changes:
            self._shape = self._rng.choice(self.candidates)
        return self._shape

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> None:
        """Do nothing: the choice is random."""

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Do nothing: the choice is random."""


def simulated_controller(settings: Settings, seed: int) -> Controller | None:
    """Build the controller that the settings name; None if every request has a fixed shape."""
    if settings.adapts is None:
        return None
    shapes = [Shape.none(), *(Shape(*shape) for shape in settings.shapes)]
    rng = random.Random(seed ^ 0xD1CE)
    if settings.adapts == "dice":
        return Dice(shapes, rng)
    if settings.adapts == "budget":
        some = rng.sample(shapes, rng.randint(1, len(shapes)))
        turns = itertools.count()  # a time that only the calls move
        config = AdaptiveConfig(ranges={1: RangeConfig(candidates=tuple(some))}, policy="budget")
        return BudgetController(config, clock=lambda: float(next(turns)))
    by_depth = list({shape.num_steps: shape for shape in shapes}.values())
    ranges = {
        size: RangeConfig(
            candidates=tuple(rng.sample(by_depth, rng.randint(1, len(by_depth)))),
            update_interval=rng.choice([1, 1, 5]),
            warmup_batches=rng.choice([0, 3]),
            ema_alpha=rng.choice([0.2, 0.6]),
        )
        for size in sorted({1, *rng.sample(range(2, 9), 2)})
    }
    return AdaptiveController(
        AdaptiveConfig(ranges=ranges, threshold_rounds=settings.threshold_rounds)
    )
