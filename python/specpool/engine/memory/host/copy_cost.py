"""`CopyCost`: estimates the seconds of copies between device and host."""

from __future__ import annotations

import statistics
from collections import deque

_NUM_RATIOS = 9


class CopyCost:
    """The estimated seconds of a copy: a line in its bytes, corrected by the latest copies.

    Attributes:
        ratios: measured seconds over those of the line, for each of the latest copies.
    """

    def __init__(self, small: tuple[int, float], large: tuple[int, float]) -> None:
        """Fit a line through two measured copies, each (bytes, seconds)."""
        span = large[0] - small[0]
        self._per_byte = max(large[1] - small[1], 0.0) / span if span else large[1] / large[0]
        self._fixed = max(small[1] - small[0] * self._per_byte, 0.0)
        self.ratios: deque[float] = deque([1.0], maxlen=_NUM_RATIOS)

    def seconds(self, num_bytes: int) -> float:
        """Estimate the seconds of a copy of `num_bytes`."""
        # The median ignores a single stall.
        return self._line_seconds(num_bytes) * statistics.median(self.ratios)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Correct the estimate by a copy of `num_bytes` that took `seconds`."""
        expected = self._line_seconds(num_bytes)
        if expected > 0:
            self.ratios.append(seconds / expected)

    def _line_seconds(self, num_bytes: int) -> float:
        return self._fixed + num_bytes * self._per_byte
