"""`CopyCost`: estimates the seconds of copies between device and host."""

from __future__ import annotations

import statistics
from collections import deque

_NUM_RATIOS = 9


class CopyCost:
    """Seconds of a copy: a fixed part and one for each byte, corrected by what copies took.

    Attributes:
        ratios: what the latest copies took, over what the line says.
    """

    def __init__(self, small: tuple[int, float], large: tuple[int, float]) -> None:
        """Fit a line through two measured copies, each (bytes, seconds)."""
        span = large[0] - small[0]
        self._per_byte = max(large[1] - small[1], 0.0) / span if span else large[1] / large[0]
        self._fixed = max(small[1] - small[0] * self._per_byte, 0.0)
        self.ratios: deque[float] = deque([1.0], maxlen=_NUM_RATIOS)

    def seconds(self, num_bytes: int) -> float:
        """Estimate the seconds of a copy of `num_bytes`."""
        # The median: one stall is no trend.
        return self._of_line(num_bytes) * statistics.median(self.ratios)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Update the estimate: a copy of `num_bytes` took `seconds`."""
        expected = self._of_line(num_bytes)
        if expected > 0:
            self.ratios.append(seconds / expected)

    def _of_line(self, num_bytes: int) -> float:
        return self._fixed + num_bytes * self._per_byte
