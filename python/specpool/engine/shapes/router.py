"""`StepRouter`: finds the range of a batch size by lower bounds and captured graph sizes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from specpool._core import Shape


class StepRouter:
    """The ranges' keys (lower bounds of batch sizes), and the range in use.

    A batch runs in the smallest captured graph that holds it, so the graph's size decides the
    range. Near a key the batch size may go up and down, so the range in use changes only after
    `threshold_rounds` rounds in a row that belong to other ranges. With 0 it changes at once, as in
    SGLang.
    """

    def __init__(
        self,
        keys: Iterable[int],
        *,
        graph_sizes: Sequence[int] | None = None,
        threshold_rounds: int = 0,
    ) -> None:
        """Route to `keys`, lower bounds of batch sizes."""
        self._keys = sorted(keys)
        self._graph_sizes = None if graph_sizes is None else sorted(graph_sizes)
        self._threshold_rounds = threshold_rounds
        self._in_use: int | None = None
        self._num_elsewhere = 0  # rounds in a row that belong to other ranges

    def key_of(self, batch_size: int) -> int:
        """Return the key of a batch size's range: the greatest key that is not above it."""
        sizes = self._graph_sizes
        if sizes and batch_size <= sizes[-1]:
            batch_size = sizes[bisect.bisect_left(sizes, batch_size)]
        return self._keys[max(bisect.bisect_right(self._keys, batch_size) - 1, 0)]

    def activate(self, batch_size: int) -> int:
        """Return the key of the range for the next round, and count it for a change of range."""
        key = self.key_of(batch_size)
        self._num_elsewhere = 0 if key == self._in_use else self._num_elsewhere + 1
        if self._in_use is None or self._num_elsewhere >= self._threshold_rounds:
            self._in_use, self._num_elsewhere = key, 0
        return self._in_use

    def key_of_result(self, batch_size: int) -> int:
        """Return the key of the range that a round's result counts for."""
        if self._threshold_rounds and self._in_use is not None:
            return self._in_use
        return self.key_of(batch_size)

    def graph_sizes_of(
        self, candidates: Mapping[int, Iterable[Shape]]
    ) -> dict[Shape, list[int] | None]:
        """Return the graph sizes at which each shape can run; None if no graph sizes were given.

        `candidates` maps a range's key to its shapes.
        """
        shapes = sorted(
            {shape for batch_range in candidates.values() for shape in batch_range},
            key=lambda shape: (shape.num_steps, shape.topk, shape.num_draft_tokens),
        )
        sizes = self._graph_sizes
        if sizes is None:
            return dict.fromkeys(shapes)
        ranges = {size: set(candidates[self.key_of(size)]) for size in sizes}
        return {shape: [size for size in sizes if shape in ranges[size]] for shape in shapes}
