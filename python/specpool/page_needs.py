"""Pages that requests need next: what admission reckons with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger

Int32 = npt.NDArray[np.int32]


class PageNeeds:
    """Pages of each group that a request holds or needs for its next round, and some growth.

    The core reckons them (`Ledger.pages_needed`), once for each shape and number of tokens.
    """

    def __init__(self, ledger: Ledger, headroom: int) -> None:
        """Reckon for rows of `ledger` that may grow by `headroom` tokens first."""
        self._ledger, self._headroom = ledger, headroom
        size = len(ledger.shapes), ledger.max_context_len + 1, len(ledger.groups)
        self._counts = np.full(size, -1, np.int32)  # by shape and tokens; -1 = not reckoned yet

    def of(self, length: int, shape: int) -> Int32:
        """int32 [num_groups], of a request that goes on from so many tokens; index of its shape."""
        counts: Int32 = self._counts[shape, length]
        if counts[0] < 0:
            last = self._ledger.max_context_len - 1
            hi = min(length + self._headroom, last)
            counts[:] = self._ledger.pages_needed(length, hi, shape)
        return counts

    def of_all(self, lens: Int32, shapes: Int32) -> Int32:
        """int32 [num_groups], of all these requests together; lens, shapes [n]."""
        counts: Int32 = self._counts[shapes, lens]
        for i in np.flatnonzero(counts[:, 0] < 0).tolist():
            counts[i] = self.of(int(lens[i]), int(shapes[i]))
        total: Int32 = counts.sum(axis=0, dtype=np.int32)
        return total
