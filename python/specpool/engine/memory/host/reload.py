"""`reload`: copies a kept row's KV back from the host in one call."""

from __future__ import annotations

from contextlib import suppress

from specpool.engine.memory.host.copies import _synchronize
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.memory.kv_cache import KVCache
from specpool.errors import NotReady


def reload(tier: HostTier, cache: KVCache, handle: Handle, tag: str | None = None) -> int | None:
    """Give a handle a row and copy its KV back, with nothing in flight.

    Use it in a loop of your own; an engine reloads by steps of its scheduler.

    Returns:
        The row; or None if a copy failed. The handle is then dropped, and the caller must prefill
        the request.

    Raises:
        NotReady: a step is in flight.
        OutOfRows: no row is free; the handle stays valid.
        OutOfPages: a group has too few free pages; the handle stays valid.
    """
    ledger = tier.ledger
    if steps := ledger.steps():
        raise NotReady(f"reload of {handle.tag}: step {steps[0][0]} is not over")
    tag = handle.tag if tag is None else tag
    if ledger.states:
        row = ledger.import_row(handle.length, handle.drafted_len, tag)
        if tier.fill(handle, row):
            return row
        ledger.abort(row)
        return None
    tier.check_room(handle)
    row, start = ledger.admit(tag), 0
    while start < handle.length:
        start, writes_draft = tier.next_extend(handle, start)
        plan = ledger.prepare_extend([row], [start], writes_draft=writes_draft)
        ledger.launch(plan.step)
        try:
            cache.apply_delta(plan.step)
            cache.copy_pages(plan.page_copies)
            tier.restore(plan, [handle])
        except Exception:
            if handle in tier.handles:
                tier.drop(handle)
            with suppress(RuntimeError):  # a lost device has nothing to wait for
                _synchronize(cache.device)
            ledger.abandon(plan.step)
            return None
        finally:
            ledger.complete(plan.step)
    return row
