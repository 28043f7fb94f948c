"""Level `rows`: SGLang's allocators of KV slots on the ledger of a `Book`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from specpool import SpecpoolError
from specpool.plugins.sglang import limits
from specpool.plugins.sglang.allocator import AllocatorError
from specpool.plugins.sglang.book import Book
from specpool.plugins.sglang.row_pool import rows_of


class SpecpoolRowAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc] # no stubs
    """Takes the place of `PagedTokenToKVPoolAllocator`: its pages are the ledger's.

    Rows give their pages back when they finish. Only the tree's pages are freed here: by an
    eviction, or as duplicates of a checkpoint, which the rebind that follows gives back.

    The tree takes its device from this allocator, and gets slots on the host (`row_tree`). So the
    ids of its pages are read without a wait, on an accelerator too.
    """

    # Of the base, which has no types.
    size: int
    page_size: int
    free_group: list[torch.Tensor] | None

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        self.book: Book | None = None
        super().__init__(size, page_size, dtype, "cpu", kvcache, need_sort)
        self.debug_mode = False  # composites of SGLang read it; the checks here are always on
        self.clear()

    def clear(self) -> None:
        """Forget all that was handed out; `resize` calls it with a new `size`.

        Raises:
            AllocatorError: a round is in flight, or a group of frees is open.
            SystemExit: the model has states or windows, whose rows or slots are SGLang's own.
        """
        if self.free_group is not None:
            raise AllocatorError("clear inside a group of frees: end the group first")
        self.num_pages = self.size // self.page_size
        book = self.book if self.book is not None else Book.latest
        if book is None:
            limits.leave("rows that have recurrent states too are of another class")
        if book.allocator not in (None, self):
            limits.leave("layers with windows have slots of their own")
        if book.allocator is self:
            book.clear()
        self.book, book.allocator = book, self

    def _book(self) -> Book:
        if self.book is None:
            raise AllocatorError("an allocator before its row pool")
        return self.book

    def available_size(self) -> int:
        """Return how many tokens can be allocated. O(1)."""
        return self._book().ledger.free_pages(0) * self.page_size if self.num_pages else 0

    def get_all_free_pages(self) -> torch.Tensor:
        """Return the free pages, int64, ascending."""
        states, _, _ = self._book().ledger.ownership_map(0)
        return torch.from_numpy(np.flatnonzero(states[1:] == 0) + 1)

    @property
    def release_pages(self) -> torch.Tensor:
        """No page: none is staged."""
        return torch.empty((0,), dtype=torch.int64)

    @release_pages.setter
    def release_pages(self, pages: torch.Tensor | None) -> None:
        pass

    def merge_and_sort_free(self) -> None:
        """Nothing is staged."""

    @property
    def free_pages(self) -> torch.Tensor:
        """As `get_all_free_pages`."""
        return self.get_all_free_pages()

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor | None) -> None:
        """The ledger knows which pages are free."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return the slots of the batch that is being prefilled, int64; None if pages lack."""
        book = self._book()
        if book.batch is None:
            raise AllocatorError(f"alloc of {need_size} slots for no row of a prefill")
        return self._extend(book.batch.prefix_lens, book.batch.seq_lens_cpu)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """As `alloc`; the arguments are SGLang's."""
        if self._book().batch is None:
            raise AllocatorError(f"alloc_extend of {extend_num_tokens} slots for no prefill")
        return self._extend(prefix_lens_cpu, seq_lens_cpu)

    def _extend(self, prefix_lens: Any, seq_lens: Any) -> torch.Tensor | None:
        book = self._book()
        rows = rows_of(book.batch.reqs)
        starts, ends = np.asarray(prefix_lens, np.int32), np.asarray(seq_lens, np.int32)
        return book.extend(rows, starts, ends)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Refuse: a round claims its slots through the ledger.

        Raises:
            AllocatorError: always.
        """
        raise AllocatorError("SPECPOOL_SGLANG=rows: decoding without drafts")

    # SGLang groups frees because many are costly. These cost little, so they are checked at once.

    def free(self, free_index: torch.Tensor) -> None:
        """Give up the tree's pages of these slots, each page once."""
        if free_index.numel():
            pages = _host(free_index) // self.page_size
            self._drop(np.unique(pages) if self.page_size > 1 else pages)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Give up the tree's pages of neighbouring slots, which begin on a page's edge.

        Raises:
            AllocatorError: they do not, or a page is not the tree's.
        """
        if start_pos % self.page_size:
            raise AllocatorError(f"segment start {start_pos} is not page-aligned")
        if free_index.numel():
            self._drop(_host(free_index)[:: self.page_size] // self.page_size)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Give up these pages of the tree's.

        Raises:
            AllocatorError: a page is not the tree's, or is named twice.
        """
        if page_ids.numel():
            self._drop(_host(page_ids))

    def _drop(self, pages: Any) -> None:
        book = self._book()
        if book.duplicates is not None:
            book.duplicates += pages.tolist()
            return
        try:
            book.ledger.release_lent(0, pages.astype(np.int32))
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error


class SpecpoolRowTokenAllocator(SpecpoolRowAllocator):
    """Takes the place of `TokenToKVPoolAllocator`: pages of one slot."""

    def __init__(
        self, size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)


def _host(ids: torch.Tensor) -> Any:
    """Return the numbers of a tensor on the host.

    Raises:
        AllocatorError: it is on the device, so it is not the tree's, and reading it would wait.
    """
    if not ids.is_cpu:
        raise AllocatorError(f"a free of {ids.numel()} slots or pages on {ids.device}: no tree's")
    return ids.numpy()
