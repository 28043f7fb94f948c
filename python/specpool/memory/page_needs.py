"""`PageNeeds`: the pages that requests need next, for admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Ledger
from specpool.arrays import Int32, Int64

if TYPE_CHECKING:
    from specpool.memory.group_sizes import GroupSizes


class PageNeeds:
    """A table of the pages that a request holds or needs for its next round and some growth.

    The core computes each entry (`Ledger.pages_needed`), once per shape and number of tokens.

    Attributes:
        num_pages: int64 [num_groups], all pages of each group.
    """

    def __init__(
        self, ledger: Ledger, headroom: int, choices: Sequence[tuple[int, ...]] = ()
    ) -> None:
        """Start an empty table.

        Args:
            ledger: gives groups and shapes.
            headroom: tokens that a row may grow before its next round.
            choices: sets of shape indices. Set i gets shape index `len(ledger.shapes) + i`, and
                needs the most that any of its shapes needs; see `RoundShapes.page_choices`.
        """
        self._ledger, self._headroom = ledger, headroom
        self.num_pages: Int64 = np.array([group.num_pages for group in ledger.groups], np.int64)
        self._alike = [*((shape,) for shape in range(len(ledger.shapes))), *choices]
        size = len(self._alike), ledger.max_context_len + 1, len(ledger.groups)
        self._counts = np.full(size, -1, np.int32)  # [shape, tokens, group]; -1 = not known yet
        self._step_pages = np.array(step_pages(ledger), np.int32)

    def of(self, length: int, shape: int) -> Int32:
        """Return the pages that a request of `length` tokens needs, int32 [num_groups].

        `shape` is an index into the shapes and choices.
        """
        counts: Int32 = self._counts[shape, length]
        if counts[0] < 0:
            last = self._ledger.max_context_len - 1
            hi = min(length + self._headroom, last)
            pages = [row_pages(self._ledger, length, hi, each) for each in self._alike[shape]]
            counts[:] = np.max(pages, axis=0)
        return counts

    def at_most(self, lo: int, hi: int, shape: int) -> Int64:
        """Return the most pages a row with roots in `[lo, hi]` needs, int64 [num_groups]."""
        pages = [self._ledger.pages_needed(lo, hi, each) for each in self._alike[shape]]
        most: Int64 = np.max(pages, axis=0)
        return most

    def of_all(self, lens: Int32, shapes: Int32) -> Int32:
        """Return the pages of these requests and one prefill step together, int32 [num_groups].

        `lens` and `shapes` are int32 [n]: tokens and shape index of each request.
        """
        counts: Int32 = self._counts[shapes, lens]
        for i in np.flatnonzero(counts[:, 0] < 0).tolist():
            counts[i] = self.of(int(lens[i]), int(shapes[i]))
        total: Int32 = counts.sum(axis=0, dtype=np.int32) + self._step_pages
        return total

    def of_each(self, lens: Int32, shapes: Int32) -> Int32:
        """Return the pages of requests of `lens` tokens, int32 [n], with each of some shapes.

        `shapes` are indices into the ledger's shapes, int32 [n, C]; so are the pages, [n, C, G].
        """
        counts: Int32 = self._counts[shapes, lens[:, None]]
        for i, j in np.argwhere(counts[:, :, 0] < 0).tolist():
            counts[i, j] = self.of(int(lens[i]), int(shapes[i, j]))
        return counts


def row_pages(ledger: Ledger | GroupSizes, lo: int, hi: int, shape: int) -> list[int]:
    """Return the pages of each group that a row with roots in `[lo, hi]` holds for itself.

    For window groups this is `pages_needed` without the chunk of a prefill step. One prefill step
    runs at a time for all rows, so `step_pages` counts its chunk once.
    """
    windows = [group.window for group in ledger.groups]
    needed = ledger.pages_needed(lo, hi, shape)
    kept = ledger.pages_needed(0, hi, shape)
    return [
        int(most if window is None else behind)
        for window, most, behind in zip(windows, needed, kept, strict=True)
    ]


def step_pages(ledger: Ledger | GroupSizes) -> list[int]:
    """Return the pages of each window group that a prefill step takes beyond its rows' own.

    Other groups get 0. Admission sets the pages of one step aside. The step before may still hold
    its pages until its rows are prepared again; the next chunk then waits for a turn. Setting those
    pages aside too would keep rows out: with windows for three rows, 2 to 4 would run instead of 7
    to 9.
    """
    windows, last = [group.window for group in ledger.groups], ledger.max_context_len - 1
    most, kept = ledger.pages_needed(last, last, 0), ledger.pages_needed(0, last, 0)
    return [
        0 if window is None else int(all_pages - behind)
        for window, all_pages, behind in zip(windows, most, kept, strict=True)
    ]
