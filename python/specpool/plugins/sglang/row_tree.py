"""Level `rows`: the pages that SGLang's radix tree takes from a row, or had already."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specpool import SpecpoolError
from specpool.plugins.sglang.allocator import AllocatorError, upload
from specpool.plugins.sglang.book import Book


def free_kv_row(original: Callable[..., None], cache: Any, kv: Any, ranges: Any) -> None:
    """Free nothing: the row's finish, which follows, gives back all of it."""


def prefix_slots(original: Callable[..., torch.Tensor], cache: Any, req: Any) -> torch.Tensor:
    """Return the slots that a request matched, on the device where SGLang's kernels read them."""
    book: Book = cache.req_to_token_pool.book
    slots = original(cache, req)
    return slots if book.mirror is None else upload(slots.numpy(), book.pool.device)


def checkpoint(
    original: Callable[..., None], cache: Any, req: Any, *, up_to: int, **options: Any
) -> None:
    """Insert a request's tokens into the tree, and lend the ledger's pages to it, or rebind them.

    Raises:
        AllocatorError: the tree dropped other pages than those that it had already.
    """
    book: Book = cache.req_to_token_pool.book
    kv, page_size = req.kv, book.allocator.page_size
    row, first = kv.req_pool_idx, kv.cache_protected_len // page_size
    book.duplicates = []
    try:
        with book.table_on_host():
            original(cache, req, up_to=up_to, **options)
    finally:
        dropped, book.duplicates = book.duplicates, None
    last = kv.cache_protected_len // page_size
    cells = book.cells[row, first * page_size : last * page_size : page_size]
    pages = cells // page_size
    own_pages = book.ledger.page_table(0)[row, first:last].copy()
    is_inserted = pages == own_pages
    if sorted(dropped) != sorted(own_pages[~is_inserted].tolist()):
        raise AllocatorError(
            f"checkpoint of row {row}: the tree dropped pages {sorted(dropped)}, it had "
            f"{sorted(own_pages[~is_inserted].tolist())} already"
        )
    edges = [
        0,
        *(np.flatnonzero(is_inserted[1:] != is_inserted[:-1]) + 1).tolist(),
        len(is_inserted),
    ]
    try:
        for start, end in itertools.pairwise(edges):
            if start == end:
                continue
            span = (first + start) * page_size, (first + end) * page_size
            if is_inserted[start]:
                book.ledger.lend(row, *span)
            else:
                book.ledger.rebind(row, *span, pages[start:end])
                book.publish(*(np.array([number], np.int32) for number in (row, *span)))
    except SpecpoolError as error:
        raise AllocatorError(str(error)) from error
