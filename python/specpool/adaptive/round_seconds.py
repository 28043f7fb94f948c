"""`RoundSeconds`: how long a round takes, by shape and batch size, from the rounds measured.

A machine that others use slows all shapes down alike, and only the one that runs is seen to. So a
shape's figure learns when it takes over from another, beside which it stands; what its later rounds
take longer than told is the batch size's load by now. Who has not run since may be free of it: that
is a hope, for a probe to look into.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable

from specpool._core import Shape

_NUM_SAMPLES = 7
_WEIGHT = 0.2  # of the newest median, where it is near
_NEAR = 0.2  # share by which medians of one figure differ
_SETTLED_SAMPLES = 3  # with fewer, a stall may be all that was seen
_LOAD_SAMPLES = 5


class _Cell:
    """One shape at one batch size: a running figure of medians, so that one stall is no trend."""

    def __init__(self) -> None:
        self.load = 1.0  # beside which it ran last
        self._samples: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.seconds = self.least = 0.0  # the running figure, and the least of the latest
        self.is_settled = False

    def add(self, seconds: float) -> bool:
        """Take over a measured round; returns whether the cell has settled with it."""
        self._samples.append(seconds)
        num = len(self._samples)
        median = sorted(self._samples)[(num - 1) // 2]
        is_near = abs(median - self.seconds) <= _NEAR * self.seconds
        self.seconds += (_WEIGHT if is_near else 1.0) * (median - self.seconds)
        self.least = min(self._samples)
        was_settled, self.is_settled = self.is_settled, num >= _SETTLED_SAMPLES
        return self.is_settled and not was_settled


class _Load:
    """What rounds of one batch size take longer by now than told, whatever their shape.

    Attributes:
        value: by the latest rounds of the shape that runs.
        beside: before it took over, by another shape's.
        rounds: of it since then.
        first: the cell of its shape and what its first round says; None = the second has said it.
    """

    def __init__(self, value: float) -> None:
        self.value = self.beside = value
        self.rounds = 0
        self.first: tuple[_Cell, float] | None = None
        self._ratios: deque[float] = deque()
        self._shape: Shape | None = None

    def add(self, shape: Shape, ratio: float) -> None:
        """A round took so many times what was told."""
        if shape != self._shape:
            self._shape, self.beside, self.rounds = shape, self.value, 0
            # Who ran too shortly to turn this has told no load: the next stands beside the old one.
            self._ratios = deque([self.value] * _LOAD_SAMPLES, _LOAD_SAMPLES)
        self.rounds += 1
        self._ratios.append(ratio)
        self.value = sorted(self._ratios)[_LOAD_SAMPLES // 2]


class RoundSeconds:
    """A table of measured rounds, and a guess in between."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        """An empty table for `shapes`."""
        self._cells: dict[Shape, dict[int, _Cell]] = {shape: {} for shape in shapes}
        # Batch sizes to interpolate between: a shape's first, and every settled one.
        self._sizes: dict[Shape, list[int]] = {shape: [] for shape in self._cells}
        self._loads: dict[int, _Load] = {}  # by batch size
        self._latest = 1.0  # of them

    def add(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """A round took so long."""
        cells = self._cells.get(shape)
        if cells is None or not seconds > 0:
            return
        cell = cells.setdefault(batch_size, _Cell())
        sizes = self._sizes[shape]
        load = self._loads.get(batch_size)
        if load is None:
            load = self._loads[batch_size] = _Load(self._latest)
        if cell.is_settled:
            self._compare(cell, load, shape, seconds)
        elif cell.add(seconds / load.value) and batch_size not in sizes:
            bisect.insort(sizes, batch_size)
        if not sizes:
            sizes.append(batch_size)

    def _compare(self, cell: _Cell, load: _Load, shape: Shape, seconds: float) -> None:
        """Learn from a settled shape's round, if it took over from another one.

        From the second, where there is one: the first after a plain round makes up for it.
        """
        load.add(shape, seconds / cell.seconds)
        self._latest = load.value
        if load.rounds > 2:
            return
        if load.rounds == 1 and load.first is not None:  # of the shape before, which had no other
            before, took = load.first
            before.add(took)
        cell.load, took = load.beside, seconds / load.beside
        load.first = (cell, took) if load.rounds == 1 else None
        if load.rounds == 2:
            cell.add(took)

    def is_measured(self, shape: Shape) -> bool:
        """Whether any round of the shape has been."""
        return bool(self._sizes[shape])

    def of(self, shape: Shape, batch_size: int) -> float:
        """Seconds that a round takes without the load, to be compared within a batch size.

        An unmeasured shape's are those of the nearest by nodes; 1 where nothing has been measured.
        """
        cell = self._cells[shape].get(batch_size)
        if cell is not None and cell.is_settled:
            return cell.seconds
        if self._sizes[shape]:
            return self._of_measured(shape, batch_size)
        measured = [other for other, sizes in self._sizes.items() if sizes]
        if not measured:
            return 1.0
        nearest = min(measured, key=lambda s: abs(s.num_draft_tokens - shape.num_draft_tokens))
        return self._of_measured(nearest, batch_size)

    def hoped(self, shape: Shape, batch_size: int) -> float:
        """Seconds that it may take, should stalls and the load have been the others' alone."""
        seconds = self.of(shape, batch_size)
        cell = self._cells[shape].get(batch_size)
        if cell is None:
            return seconds
        load = self._loads.get(batch_size)
        shared = 1.0 if load is None else min(1.0, cell.load / load.value)
        return min(seconds, cell.least) * shared

    def _of_measured(self, shape: Shape, batch_size: int) -> float:
        cell = self._cells[shape].get(batch_size)
        if cell is None:
            return self._interpolated(shape, batch_size)
        if cell.is_settled:
            return cell.seconds
        return min(cell.seconds, self._interpolated(shape, batch_size))

    def _interpolated(self, shape: Shape, batch_size: int) -> float:
        cells, sizes = self._cells[shape], self._sizes[shape]
        if len(sizes) == 1:
            return cells[sizes[0]].seconds * self._growth(sizes[0], batch_size)
        at = min(max(bisect.bisect_left(sizes, batch_size), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        first, last = cells[low].seconds, cells[high].seconds
        seconds = first + (last - first) * (batch_size - low) / (high - low)
        if low <= batch_size <= high:
            return seconds
        # Beyond what was measured a round takes no less than flat, no more than by the row.
        edge = low if batch_size < low else high
        flat, by_row = cells[edge].seconds, cells[edge].seconds * batch_size / edge
        return min(max(seconds, min(flat, by_row)), max(flat, by_row))

    def _growth(self, start: int, end: int) -> float:
        """How a round's time grows between two batch sizes, by the shape measured at the most."""
        shape = max(self._sizes, key=lambda s: len(self._sizes[s]))
        if len(self._sizes[shape]) < 2:
            return 1.0
        return self._interpolated(shape, end) / self._interpolated(shape, start)
