"""`StepRange`: chooses the draft depth of a range of batch sizes from its acceptance.

The rule is SGLang's (sgl#21599), bit for bit in floating point (`tests/vectors/adaptive.json`).
"""

from __future__ import annotations

import math

from specpool._core import Shape
from specpool.engine.shapes.config import RangeConfig


class StepRange:
    """A range's EMA of `num_correct_drafts`, and the candidate that fits it."""

    def __init__(self, config: RangeConfig, initial_steps: int | None = None) -> None:
        """Begin at the initial depth if it is a candidate, else at the middle candidate."""
        self._config = config
        self.candidates = tuple(sorted(config.candidates, key=lambda shape: shape.num_steps))
        self._steps = [shape.num_steps for shape in self.candidates]
        self._at = (
            self._steps.index(initial_steps)
            if initial_steps in self._steps
            else len(self._steps) // 2
        )
        self.ema = float(self._steps[self._at] - 1)  # correct drafts of a lane and round
        self._num_rounds = 0

    @property
    def current(self) -> Shape:
        """The shape of the range's next round."""
        return self.candidates[self._at]

    def update(self, mean: float | None) -> Shape | None:
        """Learn from a round's mean `num_correct_drafts`; None if the round drafted nothing.

        Return the shape that the range switches to, or None.
        """
        config = self._config
        if mean is not None and self._steps[self._at] > 0:
            self.ema = (1 - config.ema_alpha) * self.ema + config.ema_alpha * mean
        self._num_rounds += 1
        since = self._num_rounds - config.warmup_batches
        if since <= 0 or since % config.update_interval:
            return None
        before = self._at
        self._at = self._decide()
        return None if self._at == before else self.current

    def _decide(self) -> int:
        steps, config, at = self._steps, self._config, self._at
        last = len(steps) - 1
        if steps[at] == 0:
            at = min(at + 1, last)
            if steps[at] > 0 and self.ema < 0:
                self.ema = float(steps[at] - 1)
        else:
            while at > 0 and self.ema <= self._edge(at - 1) + config.down_hysteresis:
                at -= 1
            if at == self._at:
                while at < last and self.ema > steps[at] - 0.5 + config.up_hysteresis:
                    at += 1
        if config.ceiling_coeff > 0:
            cap = max(1, math.ceil(self.ema * config.ceiling_coeff))
            if steps[at] <= steps[self._at]:
                while at > 0 and steps[at] > cap:
                    at -= 1
        return at

    def _edge(self, below: int) -> float:
        """Return the mean at or below which the candidate `below` is enough."""
        return 0.5 if self._steps[below] == 0 else self._steps[below] - 0.5
