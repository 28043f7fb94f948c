"""`RoundSeconds`: estimates the seconds of a round by shape and batch size from measured rounds.

Load from other programs slows every shape, but only the running one is observed. So a shape's
figure learns from its first rounds after another shape, relative to the load at that time. If its
later rounds take longer than the figure, this is the current load of the batch size. A shape that
has not run since may be unaffected, so a probe may try it.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable

from specpool._core import Shape

_NUM_SAMPLES = 7
_WEIGHT = 0.2  # of the newest median, if it is near the figure
_NEAR = 0.2  # the share by which a near median may differ from the figure
_SETTLED_SAMPLES = 3  # with fewer samples, all of them may be stalls
_LOAD_SAMPLES = 5


class _Cell:
    """The seconds of one shape at one batch size: a running median, robust against a stall."""

    def __init__(self) -> None:
        self.load = 1.0  # the load beside which it ran last
        self._samples: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.seconds = self.least = 0.0  # the running median, and the least of the samples
        self.is_settled = False

    def add(self, seconds: float) -> bool:
        """Add a measured round; return whether the cell has settled with it."""
        self._samples.append(seconds)
        num = len(self._samples)
        median = sorted(self._samples)[(num - 1) // 2]
        is_near = abs(median - self.seconds) <= _NEAR * self.seconds
        self.seconds += (_WEIGHT if is_near else 1.0) * (median - self.seconds)
        self.least = min(self._samples)
        was_settled, self.is_settled = self.is_settled, num >= _SETTLED_SAMPLES
        return self.is_settled and not was_settled


class _Load:
    """The current load of one batch size: measured seconds over the figure, for any shape.

    Attributes:
        value: the load by the latest rounds of the running shape.
        beside: the load when this shape took over, by the rounds of the shape before.
        rounds: the running shape's rounds since then.
        first: the running shape's cell and its first round's seconds without load; None means the
            second round was used instead.
    """

    def __init__(self, value: float) -> None:
        self.value = self.beside = value
        self.rounds = 0
        self.first: tuple[_Cell, float] | None = None
        self._ratios: deque[float] = deque()
        self._shape: Shape | None = None

    def add(self, shape: Shape, ratio: float) -> None:
        """Add a round whose seconds were `ratio` times its shape's figure."""
        if shape != self._shape:
            self._shape, self.beside, self.rounds = shape, self.value, 0
            # Start with the old load: a shape with less than three rounds leaves it as it is.
            self._ratios = deque([self.value] * _LOAD_SAMPLES, _LOAD_SAMPLES)
        self.rounds += 1
        self._ratios.append(ratio)
        self.value = sorted(self._ratios)[_LOAD_SAMPLES // 2]


class RoundSeconds:
    """A table of measured rounds, which interpolates between them."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        """Start an empty table for `shapes`."""
        self._cells: dict[Shape, dict[int, _Cell]] = {shape: {} for shape in shapes}
        # Batch sizes to interpolate between: a shape's first, and every settled one.
        self._sizes: dict[Shape, list[int]] = {shape: [] for shape in self._cells}
        self._loads: dict[int, _Load] = {}  # by batch size
        self._latest = 1.0  # the load that was updated last

    def add(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Add a measured round."""
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
        """Learn from a settled shape's first rounds after another shape.

        The second round counts if there is one, because the first after a plain round also has the
        drafter's catch-up.
        """
        load.add(shape, seconds / cell.seconds)
        self._latest = load.value
        if load.rounds > 2:
            return
        if load.rounds == 1 and load.first is not None:  # the shape before had no second round
            before, unloaded_seconds = load.first
            before.add(unloaded_seconds)
        cell.load, unloaded_seconds = load.beside, seconds / load.beside
        load.first = (cell, unloaded_seconds) if load.rounds == 1 else None
        if load.rounds == 2:
            cell.add(unloaded_seconds)

    def is_measured(self, shape: Shape) -> bool:
        """Return whether any round of the shape has been measured."""
        return bool(self._sizes[shape])

    def expected(self, shape: Shape, batch_size: int) -> float:
        """Return the seconds of a round without the load; compare them within a batch size only.

        An unmeasured shape has the seconds of the nearest shape by nodes. If nothing has been
        measured, return 1.
        """
        cell = self._cells[shape].get(batch_size)
        if cell is not None and cell.is_settled:
            return cell.seconds
        if self._sizes[shape]:
            return self._measured_seconds(shape, batch_size)
        measured = [other for other, sizes in self._sizes.items() if sizes]
        if not measured:
            return 1.0
        nearest = min(measured, key=lambda s: abs(s.num_draft_tokens - shape.num_draft_tokens))
        return self._measured_seconds(nearest, batch_size)

    def hoped(self, shape: Shape, batch_size: int) -> float:
        """Return the least seconds that a round may take, if it had no stalls and no load."""
        seconds = self.expected(shape, batch_size)
        cell = self._cells[shape].get(batch_size)
        if cell is None:
            return seconds
        load = self._loads.get(batch_size)
        shared = 1.0 if load is None else min(1.0, cell.load / load.value)
        return min(seconds, cell.least) * shared

    def _measured_seconds(self, shape: Shape, batch_size: int) -> float:
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
        # Beyond the measured sizes, stay between constant seconds and constant seconds per row.
        edge = low if batch_size < low else high
        flat, by_row = cells[edge].seconds, cells[edge].seconds * batch_size / edge
        return min(max(seconds, min(flat, by_row)), max(flat, by_row))

    def _growth(self, start: int, end: int) -> float:
        """Return how a round grows between two batch sizes, by the shape with the most of them."""
        shape = max(self._sizes, key=lambda s: len(self._sizes[s]))
        if len(self._sizes[shape]) < 2:
            return 1.0
        return self._interpolated(shape, end) / self._interpolated(shape, start)
