"""`CostController`: chooses the shape with the most expected tokens per second.

Expected tokens come from `Acceptance`, seconds from `RoundSeconds`. Only shapes that run are
measured, so now and then a short probe runs another candidate. Probes may cost a small share of the
time.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpool._core import Shape
from specpool.engine.shape_names import depth_order
from specpool.engine.shapes.acceptance import Acceptance
from specpool.engine.shapes.base import CHOICE_ROUNDS, NumCorrectDrafts
from specpool.engine.shapes.config import AdaptiveConfig
from specpool.engine.shapes.round_seconds import RoundSeconds
from specpool.engine.shapes.router import StepRouter

_GAIN = 1.02  # another shape must promise this many times the current one's rate
_PROBE_SHARE = 0.01  # the share of the time for probes
_MOST_SPARE = 2.0  # the most of that time to save up, in rounds
_PROBE_ROUNDS = 16  # the least rounds from one probe to the next


class CostController:
    """A controller by measured seconds and acceptance. Equal inputs give equal choices."""

    def __init__(
        self,
        config: AdaptiveConfig,
        *,
        initial: Shape | int | None = None,
        graph_sizes: Sequence[int] | None = None,
    ) -> None:
        """Begin without measurements.

        Args:
            config: the candidates of each range of batch sizes.
            initial: the shape to begin with; None means the shape with the best expected rate.
            graph_sizes: the batch sizes with captured graphs; None if there are no graphs.

        Raises:
            ConfigError: no range has the shape `initial`.
        """
        self.candidates = config.candidates
        self._ranges = {
            key: tuple(sorted(batch_range.candidates, key=depth_order))
            for key, batch_range in config.ranges.items()
        }
        self._router = StepRouter(
            config.ranges, graph_sizes=graph_sizes, threshold_rounds=config.threshold_rounds
        )
        self._acceptance = Acceptance(self.candidates)
        self._seconds = RoundSeconds(self.candidates)
        self._current = config.initial_shape(initial)
        self._chosen: dict[tuple[int, int], tuple[int, Shape]] = {}  # by (key, batch size)
        self._round = 0
        self._untried = {*self.candidates}  # to be probed once, unless measured by then
        self._probe: Shape | None = None
        self._probes_left = 0
        self._next_probe = 0
        # The time that probes may lose, in rounds; it starts full, because nothing is known yet.
        self._spare = _MOST_SPARE

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return the shape of the next decode round, of `batch_size` rows."""
        key = self._router.activate(batch_size)
        batch_range = self._ranges[key]
        self._round += 1
        if self._current is None:
            self._current = self._choice(key, batch_size)
        self._spare = min(self._spare + _PROBE_SHARE, _MOST_SPARE)
        if not self._probes_left and self._round >= self._next_probe:
            self._plan_probe(batch_range, batch_size)
        if self._probes_left:
            self._probes_left -= 1
            if self._probe in batch_range:
                return self._probe
        self._current = self._choice(key, batch_size)
        return self._current

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> Shape | None:
        """Learn from a round's result; return the shape that a jump switches to, or None."""
        if not self._acceptance.observe(shape, num_correct_drafts):
            return None
        key = self._router.key_of_result(batch_size)
        _, before = self._chosen.get((key, batch_size), (0, None))
        self._chosen.clear()
        after = self._choice(key, batch_size)
        return None if before is None or after == before else after

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Learn from the seconds of a round."""
        self._seconds.add(shape, batch_size, seconds)

    def _choice(self, key: int, batch_size: int) -> Shape:
        """Return the shape with the most tokens per second, chosen anew every few rounds."""
        since, shape = self._chosen.get((key, batch_size), (-CHOICE_ROUNDS, None))
        if shape is None or self._round - since >= CHOICE_ROUNDS:
            batch_range = self._ranges[key]
            rates = {shape: self._rate(shape, batch_size) for shape in batch_range}
            shape = max(batch_range, key=rates.__getitem__)
            gain = _GAIN if shape.num_steps else 1.0  # plain decoding need not promise more
            if self._current in rates and rates[shape] < gain * rates[self._current]:
                shape = self._current
            self._chosen[key, batch_size] = self._round, shape
        return shape

    def _rate(self, shape: Shape, batch_size: int) -> float:
        """Return the expected tokens of a lane per second."""
        return self._acceptance.expected(shape) / self._seconds.expected(shape, batch_size)

    def _plan_probe(self, batch_range: tuple[Shape, ...], batch_size: int) -> None:
        """Begin a probe if there is something to learn and time to spare for it."""
        self._next_probe = self._round + _PROBE_ROUNDS // 2
        for shape in batch_range if self._untried else ():
            if shape not in self._untried:
                continue
            self._untried.remove(shape)
            if not self._seconds.is_measured(shape):
                self._probe, self._probes_left, self._next_probe = shape, 2, self._round
                return
        current = self._current
        alternatives = [shape for shape in batch_range if shape != current]
        if current not in batch_range or not alternatives:
            return
        if not current.num_steps:
            alternatives = alternatives[
                :1
            ]  # plain rounds show no acceptance: probe the shallowest draft
        rate, tokens = self._rate(current, batch_size), self._acceptance.expected(current)
        best = 0.0
        for shape in alternatives:
            worth = self._seconds.hoped(shape, batch_size) * rate  # the current shape's tokens then
            gain = self._acceptance.hoped(shape) / worth - 1  # by the optimistic estimates
            if gain <= 0:
                continue
            lost = max((worth - self._acceptance.expected(shape)) / tokens, 0.1)
            if gain / lost > best and min(lost, _MOST_SPARE) <= self._spare:
                best, probe, price = gain / lost, shape, lost
        if best:
            self._spare -= price
            self._probe, self._probes_left = probe, 1
            self._next_probe = self._round + _PROBE_ROUNDS
