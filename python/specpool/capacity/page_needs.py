"""`PageNeeds`: the pages that requests need next, for admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Ledger
from specpool.arrays import Int32, Int64

if TYPE_CHECKING:
    from specpool.capacity.group_sizes import GroupSizes


class PageNeeds:
    """The pages that a request holds or needs for its next round and some growth.

    The core computes them (`Ledger.pages_ahead`).

    Attributes:
        num_pages: int64 [num_groups], all pages of each group.
    """

    def __init__(
        self, ledger: Ledger, headroom: int, choices: Sequence[tuple[int, ...]] = ()
    ) -> None:
        """Count pages of `ledger`.

        Args:
            ledger: gives groups and shapes.
            headroom: tokens that a row may grow before its next round.
            choices: sets of shape indices. Set i gets shape index `len(ledger.shapes) + i`, and
                needs the most that any of its shapes needs; see `RoundShapes.page_choices`.
        """
        self._ledger, self._headroom = ledger, min(headroom, ledger.max_context_len)
        self.num_pages: Int64 = np.array([group.num_pages for group in ledger.groups], np.int64)
        sets = [*((shape,) for shape in range(len(ledger.shapes))), *choices]
        width = max(map(len, sets))
        # int32 [num_shapes + num_choices, width]: the shapes of each set, the first one repeated.
        self._sets: Int32 = np.array(
            [shapes + shapes[:1] * (width - len(shapes)) for shapes in sets], np.int32
        )
        self._page_sizes: Int64 = np.array([group.page_size for group in ledger.groups], np.int64)
        self._step_pages: Int64 = np.array(step_pages(ledger), np.int64)
        self._has_windows = bool(self._step_pages.any())

    def pages(self, length: int, shape: int) -> Int64:
        """Return the pages that a request of `length` tokens needs, int64 [num_groups].

        `shape` is an index into the shapes and choices.
        """
        by_shape = self.pages_by_shape(np.array([length], np.int32), self._sets[[shape]])
        pages: Int64 = by_shape[0].max(axis=0)
        return pages

    def max_pages(self, lo: int, hi: int, shape: int) -> Int64:
        """Return the most pages a row with roots in `[lo, hi]` needs, int64 [num_groups]."""
        pages = [self._ledger.pages_needed(lo, hi, index) for index in self._sets[shape].tolist()]
        max_pages: Int64 = np.max(pages, axis=0)
        return max_pages

    def total_pages(self, lens: Int32, shapes: Int32) -> tuple[Int64, Int64]:
        """Return the pages of these requests, and of their prefill chunks.

        Both are int64 [num_groups]; `with_step` adds them. `lens` and `shapes` are int32 [n]:
        tokens and shape index of each request.
        """
        pages = self.pages_by_shape(lens, self._sets[shapes]).max(axis=1)
        if not self._has_windows:
            return pages.sum(axis=0), self._step_pages
        return pages.sum(axis=0), self.chunk_pages(lens[:, None], pages).sum(axis=0)

    def chunk_pages(self, length: int | Int32, pages: Int64) -> Int64:
        """Return the pages that a prompt's tokens take beyond the `pages` of its next round.

        These are pages of window groups that its chunks fill and then pass.
        """
        return chunk_pages(length, self._page_sizes, pages)

    def with_step(self, pages: Int64, chunks: Int64) -> Int64:
        """Return the pages of requests and of one prefill step, int64 [num_groups].

        The step takes no more pages than the chunks of all these requests together.
        """
        return pages + np.minimum(chunks, self._step_pages)

    def pages_by_shape(self, lens: Int32, shapes: Int32) -> Int64:
        """Return the pages of requests of `lens` tokens, int32 [n], with each of some shapes.

        `shapes` are indices into the ledger's shapes, int32 [n, C]; the pages are int64 [n, C, G].
        """
        num_shapes = shapes.shape[1]
        pages = self._ledger.pages_ahead(lens.repeat(num_shapes), shapes.ravel(), self._headroom)
        return pages.reshape(len(lens), num_shapes, len(self.num_pages))


def chunk_pages(length: int | Int32, page_sizes: Int64, pages: Int64) -> Int64:
    """Return the pages of a prompt's tokens beyond `pages`; see `PageNeeds.chunk_pages`."""
    beyond: Int64 = np.maximum(-(-length // page_sizes) - pages, 0)
    return beyond


def row_pages(sizes: GroupSizes, lo: int, hi: int, shape: int) -> list[int]:
    """Return the pages of each group that a row with roots in `[lo, hi]` holds for itself.

    This is `Ledger.pages_ahead` without a ledger. For window groups it is `pages_needed` without
    the chunk of a prefill step: one prefill step runs at a time for all rows, so `step_pages`
    counts its chunk once.
    """
    whole_pages = sizes.pages_needed(lo, hi, shape)
    behind_windows = sizes.pages_needed(0, hi, shape)
    return [
        num_whole if group.window is None else num_behind
        for group, num_whole, num_behind in zip(
            sizes.groups, whole_pages, behind_windows, strict=True
        )
    ]


def step_pages(ledger: Ledger | GroupSizes) -> list[int]:
    """Return the most pages of each window group that a prefill step takes beyond its rows' own.

    Other groups get 0. Admission sets the pages of one step aside. The step before may still hold
    its pages until its rows are prepared again; the next chunk then waits for a turn. Setting those
    pages aside too would keep rows out: with windows for three rows, 2 to 4 would run instead of 7
    to 9.
    """
    windows, last = [group.window for group in ledger.groups], ledger.max_context_len - 1
    with_chunk, without_chunk = ledger.pages_needed(last, last, 0), ledger.pages_needed(0, last, 0)
    return [
        0 if window is None else int(all_pages - behind)
        for window, all_pages, behind in zip(windows, with_chunk, without_chunk, strict=True)
    ]
