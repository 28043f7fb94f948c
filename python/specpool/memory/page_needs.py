"""Pages that requests need next: what admission reckons with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Ledger
from specpool.arrays import Int32, Int64

if TYPE_CHECKING:
    from specpool.memory.group_sizes import GroupSizes


class PageNeeds:
    """Pages of each group that a request holds or needs for its next round, and some growth.

    The core reckons them (`Ledger.pages_needed`), once for each shape and number of tokens.

    Attributes:
        num_pages: int64 [num_groups], pages of each group in all: an empty pool's.
    """

    def __init__(
        self, ledger: Ledger, headroom: int, choices: Sequence[tuple[int, ...]] = ()
    ) -> None:
        """Reckon for rows of `ledger` that may grow by `headroom` tokens first.

        The indices behind its shapes stand for the most that any of some shapes needs, for each
        of `choices`: see `RoundShapes`.
        """
        self._ledger, self._headroom = ledger, headroom
        self.num_pages: Int64 = np.array([group.num_pages for group in ledger.groups], np.int64)
        self._alike = [*((shape,) for shape in range(len(ledger.shapes))), *choices]
        size = len(self._alike), ledger.max_context_len + 1, len(ledger.groups)
        self._counts = np.full(size, -1, np.int32)  # by shape and tokens; -1 = not reckoned yet
        self._step_pages = np.array(step_pages(ledger), np.int32)

    def of(self, length: int, shape: int) -> Int32:
        """int32 [num_groups], of a request that goes on from so many tokens; index of its shape."""
        counts: Int32 = self._counts[shape, length]
        if counts[0] < 0:
            last = self._ledger.max_context_len - 1
            hi = min(length + self._headroom, last)
            pages = [row_pages(self._ledger, length, hi, each) for each in self._alike[shape]]
            counts[:] = np.max(pages, axis=0)
        return counts

    def at_most(self, lo: int, hi: int, shape: int) -> Int64:
        """int64 [num_groups], as `Ledger.pages_needed`."""
        pages = [self._ledger.pages_needed(lo, hi, each) for each in self._alike[shape]]
        most: Int64 = np.max(pages, axis=0)
        return most

    def of_all(self, lens: Int32, shapes: Int32) -> Int32:
        """int32 [num_groups], of these requests together and a prefill step; lens, shapes [n]."""
        counts: Int32 = self._counts[shapes, lens]
        for i in np.flatnonzero(counts[:, 0] < 0).tolist():
            counts[i] = self.of(int(lens[i]), int(shapes[i]))
        total: Int32 = counts.sum(axis=0, dtype=np.int32) + self._step_pages
        return total


def row_pages(ledger: Ledger | GroupSizes, lo: int, hi: int, shape: int) -> list[int]:
    """Pages of each group that a row holds beside others, its roots in `[lo, hi]`.

    As `pages_needed`, but behind a window without the chunk that a prefill step writes there: there
    is one such step at a time, whoever's tokens are in it (`step_pages`).
    """
    windows = [group.window for group in ledger.groups]
    needed = ledger.pages_needed(lo, hi, shape)
    kept = ledger.pages_needed(0, hi, shape)
    return [
        int(most if window is None else behind)
        for window, most, behind in zip(windows, needed, kept, strict=True)
    ]


def step_pages(ledger: Ledger | GroupSizes) -> list[int]:
    """Of each window group, what a prefill step takes beyond what its rows keep; 0 in others.

    Admission sets one step's pages aside. The step before it may still hold its own, until its rows
    are prepared again; then the next chunk waits for a turn. To set those aside too would keep
    rows out: with windows for three rows, 2 to 4 run instead of 7 to 9.
    """
    windows, last = [group.window for group in ledger.groups], ledger.max_context_len - 1
    most, kept = ledger.pages_needed(last, last, 0), ledger.pages_needed(0, last, 0)
    return [
        0 if window is None else int(all_pages - behind)
        for window, all_pages, behind in zip(windows, most, kept, strict=True)
    ]
