"""Level `rows`: a streaming session's row between its turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specpool import SpecpoolError
from specpool.plugins.sglang.allocator import AllocatorError
from specpool.plugins.sglang.book import Book


def free_kv_aligned(
    original: Callable[..., None], session: Any, kv: Any, target: int, end: int
) -> None:
    """Cut a session's row to `target` tokens."""
    ledger, row = book_of(session).ledger, kv.req_pool_idx
    if target < max(int(ledger.allocated_len(0)[row]), int(ledger.resolved_len[row])):
        try:
            ledger.trim(row, target)
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error


def end_turn(original: Callable[..., bool], session: Any, req: Any, **options: Any) -> bool:
    """Note a session's turn as long as its KV is written.

    SGLang counts the whole turn as committed, also a last token whose KV no forward wrote. The row
    was cut to the tokens whose KV is written, so its length is the right one.
    """
    name = None if req.session is None else req.session.session_id
    is_kept = original(session, req, **options)
    slot = session.slots.get(name) if is_kept else None
    if slot is not None and slot.kv.holds_kv:
        ledger, row = book_of(session).ledger, slot.kv.req_pool_idx
        slot.kv.kv_committed_len = int(ledger.resolved_len[row])
        slot.kv.kv_allocated_len = min(slot.kv.kv_allocated_len, int(ledger.allocated_len(0)[row]))
    return is_kept


def book_of(session: Any) -> Book:
    """Return the book of the pools that the sessions of a tree are on."""
    # Before SGLang 0.5.22 it is a tree itself, around another or inside it.
    cache = session if hasattr(type(session), "req_to_token_pool") else session.cache
    book: Book = cache.req_to_token_pool.book
    return book
