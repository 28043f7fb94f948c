"""`RoundCost`: the seconds of a round in which rows have different shapes, from a table.

The table (`RoundSeconds`) has rounds whose rows all have one shape, as the start timed them. What a
shape adds to a plain round grows evenly from one row to all rows: a charge once, then a share per
row. Rounds in service correct this for what the start could not see, such as longer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool._core import Shape
from specpool.arrays import Int32
from specpool.engine.shapes.round_seconds import RoundSeconds

Float64 = npt.NDArray[np.float64]

_STEP = 0.2  # the share of a round's error that is corrected
_MOST_ERROR = 0.5  # of an estimate, unless the round before was as wrong: a stall does not repeat
_FADE = 0.002  # the share by which a shape seems to add less for each round that it does not run
_LEAST_BASE = 0.1  # of the table's plain round, which is left whatever service says


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of rounds of one batch size, as `choose_shapes` takes them."""

    base: float  # of a round that drafts nothing
    mixed: float  # more if the rows have several shapes
    charge: Float64  # [S], once if any row has the shape; the greatest counts
    lane: Float64  # [S], for each row of the shape

    def seconds(self, shapes: Int32) -> float:
        """Return the seconds of a round whose rows have these shapes, int32 [B]."""
        used = np.unique(shapes)
        mixed = self.mixed if len(used) > 1 else 0.0
        return float(self.base + mixed + self.charge[used].max() + self.lane[shapes].sum())


class RoundCost:
    """The table, and what service has found beside it.

    The corrections are shares of the table's plain round of the same batch size: of every round, of
    a round of several shapes, and of a round whose rows all have a shape. Each round changes those
    that it depends on by normalized least mean squares (Widrow and Hoff, 1960). A shape that does
    not run seems to add ever less, so that it is tried again: the start may have measured it too
    slow.
    """

    def __init__(self, shapes: Sequence[Shape], narrowest: Shape) -> None:
        """Start without measurements; shape indices are into `shapes`."""
        self._shapes, self._narrowest = [*shapes], narrowest
        self._table = RoundSeconds(shapes)
        self._every, self._mixed = 0.0, 0.0
        self._of_shape: Float64 = np.zeros(len(shapes))
        self._latest_error = 0.0  # of the latest round, over its estimate
        self._costs: dict[int, Costs] = {}  # by batch size, since the latest measurement

    def add_uniform_round(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Add a round whose rows all had this shape."""
        self._table.add(shape, batch_size, seconds)
        self._costs.clear()

    def costs(self, batch_size: int) -> Costs:
        """Return the seconds of rounds of this batch size. O(shapes) after a measurement."""
        costs = self._costs.get(batch_size)
        if costs is None:
            costs = self._costs[batch_size] = self._estimate(batch_size)
        return costs

    def _estimate(self, batch_size: int) -> Costs:
        seconds, narrowest = self._table.expected, self._narrowest
        plain, plain_alone = seconds(narrowest, batch_size), seconds(narrowest, 1)
        charge, lane = np.zeros((2, len(self._shapes)))
        for index, shape in enumerate(self._shapes):
            extra = max(seconds(shape, batch_size) - plain, 0.0)
            extra_alone = min(max(seconds(shape, 1) - plain_alone, 0.0), extra)
            lane[index] = min((extra - extra_alone) / max(batch_size - 1, 1), extra / batch_size)
            charge[index] = extra - batch_size * lane[index]
        lane += self._of_shape * plain / batch_size
        charge = np.maximum(charge + batch_size * np.minimum(lane, 0.0), 0.0)
        lane = np.maximum(lane, 0.0)
        base = plain * max(1 + self._every, _LEAST_BASE)
        return Costs(base, self._mixed * plain, charge, lane)

    def observe(self, shapes: Int32, seconds: float, *, explores: bool = True) -> None:
        """Learn from a round in service, whose rows had these shapes, int32 [B].

        If it `explores`, shapes that did not run seem to add less from now on.
        """
        size, used = len(shapes), np.unique(shapes)
        if len(used) == 1 and not self._table.is_measured(self._shapes[used[0]]):
            self.add_uniform_round(self._shapes[used[0]], size, seconds)
            return
        costs, plain = self.costs(size), self._table.expected(self._narrowest, size)
        known = costs.seconds(shapes)
        error = seconds / known - 1
        bound, self._latest_error = max(self._latest_error, _MOST_ERROR), error
        error = max(min(error, bound), -_MOST_ERROR) * known / plain
        share = np.bincount(shapes, minlength=len(self._shapes)) / size
        share[self._shapes.index(self._narrowest)] = 0.0  # it is in every round's share
        is_mixed = len(used) > 1
        step = _STEP * error / (1 + is_mixed + float(share @ share))
        if explores:
            idle = np.ones(len(self._shapes), np.bool_)
            idle[used] = False
            self._of_shape -= _FADE * idle * (costs.charge + size * costs.lane) / plain
            if idle[self._shapes.index(self._narrowest)]:  # the same total, less of it by all
                fade = _FADE * costs.base / plain
                self._every -= fade
                self._of_shape += fade * ~idle
        self._every += step
        self._of_shape += step * share
        self._mixed = max(self._mixed + step, 0.0) if is_mixed else self._mixed * (1 - _FADE)
        self._costs.clear()
