"""Level `rows`: SGLang's row pool on the ledger of a `Book`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from specpool import SpecpoolError
from specpool.plugins.sglang.allocator import AllocatorError
from specpool.plugins.sglang.book import Book
from specpool.plugins.sglang.row_tree import matched_slots


class SpecpoolRows(ReqToTokenPool):  # type: ignore[misc] # no stubs
    """Takes the place of `ReqToTokenPool`: a row is a row of the ledger, admitted and finished."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.book = Book(self)

    @property
    def free_slots(self) -> list[int]:
        """A list as long as the number of free rows; SGLang's checks read its length."""
        return list(range(self.available_size()))

    @free_slots.setter
    def free_slots(self, rows: list[int]) -> None:
        """The ledger knows which rows are free."""

    def available_size(self) -> int:
        """Return how many rows are free."""
        if self.book.allocator is None:
            size: int = self.size
            return size
        return self.book.ledger.num_free_rows

    def alloc(self, reqs: Sequence[Any]) -> list[int] | None:
        """Give each request without one a row, on the pages that it matched in the tree.

        Raises:
            AllocatorError: the tree names a page that is not lent.
        """
        new = [req for req in reqs if not req.kv.holds_kv]
        if len(new) > self.available_size():
            return None
        for req in new:
            req.kv.req_pool_idx = self._admit(req)
        return [req.kv.req_pool_idx for req in reqs]

    def _admit(self, req: Any) -> int:
        book = self.book
        try:
            slots = matched_slots(book.batch.tree_cache, req).numpy()
            if not len(slots):
                row = book.ledger.admit(req.rid)
            else:
                page_size = book.allocator.page_size
                pages = (slots[::page_size] // page_size).astype(np.int32)
                row = book.ledger.admit_lent(pages, len(slots), req.rid)
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error
        self.req_generation[row] += 1
        # Since SGLang 0.5.20.
        if (hook := getattr(self, "_on_alloc_rows", None)) is not None:
            hook([row])
        return row

    def alloc_rows(self, need_size: int) -> list[int] | None:
        """Take rows for no request: beam search does.

        Raises:
            AllocatorError: always; rows of one beam share pages that each of them writes.
        """
        raise AllocatorError("SPECPOOL_SGLANG=rows: beam search takes rows without a request")

    def free_rows(self, indices: Sequence[int]) -> None:
        """Give back the rows and all that they hold.

        Raises:
            AllocatorError: a row is free.
        """
        try:
            for row in indices:
                if self._aux_cache is not None:
                    self._aux_cache.free(row)
                self.book.ledger.finish(row)
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error

    def clear(self) -> None:
        """Forget every row."""
        self.book.clear()
        if self._aux_cache is not None:
            self._aux_cache.clear()


def rows_of(reqs: Sequence[Any]) -> Any:
    """Return the requests' rows, int32 [requests]."""
    return np.fromiter((req.kv.req_pool_idx for req in reqs), np.int32, len(reqs))
