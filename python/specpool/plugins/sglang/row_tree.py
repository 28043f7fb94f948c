"""Level `rows`: the pages that SGLang's radix tree takes from a row, or had already."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from specpool import SpecpoolError
from specpool.plugins.sglang.allocator import AllocatorError, upload
from specpool.plugins.sglang.book import Book

#: The tree's methods that insert a request's tokens, those that this SGLang has. Since 0.5.22 it
#: is one, before that there is one for a request that goes on, and one for a request that ends.
INSERTS = [
    name
    for name in ("checkpoint_into_tree", "insert_req", "cache_unfinished_req", "cache_finished_req")
    if hasattr(UnifiedRadixCache, name)
]
#: Whether the tree returns a request's matched slots when a batch needs them, as it does since
#: 0.5.22. Before that they lie in the request.
HAS_PREFIX_SLOTS = hasattr(UnifiedRadixCache, "prefix_device_indices")


def free_kv_row(original: Callable[..., None], cache: Any, kv: Any, ranges: Any) -> None:
    """Free nothing: the row's finish, which follows, gives back all of it."""


def prefix_slots(original: Callable[..., torch.Tensor], cache: Any, req: Any) -> torch.Tensor:
    """Return the slots that a request matched, on the device where SGLang's kernels read them."""
    book: Book = cache.req_to_token_pool.book
    slots = original(cache, req)
    return slots if book.mirror is None else upload(slots.numpy(), book.pool.device)


def upload_prefixes(book: Book, reqs: Any) -> None:
    """Move the slots that lie in the requests to the device where SGLang's kernels read them."""
    if HAS_PREFIX_SLOTS or book.mirror is None:
        return
    for req in reqs:
        if req.prefix_indices.is_cpu:
            req.prefix_indices = upload(req.prefix_indices.numpy(), book.pool.device)


def matched_slots(cache: Any, req: Any) -> torch.Tensor:
    """Return the slots on the host that a request without a row matched in the tree."""
    if not HAS_PREFIX_SLOTS:
        slots: torch.Tensor = req.prefix_indices
        return slots
    path: torch.Tensor = cache.path_device_indices(req.last_node)
    return path[: req.prefix_len]


def insert_request(
    original: Callable[..., Any], cache: Any, req: Any, *args: Any, **options: Any
) -> Any:
    """Around each of `INSERTS`: name the row whose pages the tree gets, or refuses."""
    book: Book = cache.req_to_token_pool.book
    book.inserted_row = req.kv.req_pool_idx
    try:
        with book.table_on_host():
            return original(cache, req, *args, **options)
    finally:
        book.inserted_row = None


def insert(original: Callable[..., Any], cache: Any, params: Any) -> Any:
    """Insert a row's tokens into the tree, and lend the ledger's pages to it, or rebind them.

    Raises:
        AllocatorError: the tokens are of no row; or the tree dropped other pages than those that it
            had already.
    """
    book: Book = cache.req_to_token_pool.book
    row, page_size = book.inserted_row, book.allocator.page_size
    if row is None:
        raise AllocatorError(f"the tree inserts {len(params.value)} tokens of no row")
    book.duplicates = []
    try:
        result = original(cache, params)
    finally:
        dropped, book.duplicates = book.duplicates, None
    first, last = params.prev_prefix_len // page_size, len(params.value) // page_size
    if first >= last and not dropped:
        return result
    path = cache.tree_core.collect_full_device_indices(
        result.last_device_node, cache.root_node_handle()
    ).numpy()
    slots = path[first * page_size : last * page_size]
    pages = slots[::page_size] // page_size
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
            span = (first + start) * page_size, (first + end) * page_size
            if is_inserted[start]:
                book.ledger.lend(row, *span)
            else:
                book.ledger.rebind(row, *span, pages[start:end].astype(np.int32))
                book.cells[row, slice(*span)] = slots[start * page_size : end * page_size]
                book.publish(*(np.array([number], np.int32) for number in (row, *span)))
    except SpecpoolError as error:
        raise AllocatorError(str(error)) from error
    return result
