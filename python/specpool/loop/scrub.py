"""Zero pages that may hold a NaN: attention reads masked slots too, and 0 * NaN is NaN."""

from __future__ import annotations

import contextlib

import numpy as np

from specpool._core import Ledger
from specpool.memory.kv_cache import KVCache
from specpool.scheduler.requests.request import Request


def scrub_request(ledger: Ledger, cache: KVCache, request: Request) -> None:
    """Zero the pages of a request that produced a NaN, while it still has its row.

    A page that others hold too was whole when they came to share it, so its last holder zeroes it.
    """
    if not request.tainted:
        return
    # A device in trouble may not even scrub; the error that brought us here is the one to see.
    with contextlib.suppress(Exception):
        for group in range(len(ledger.groups)):
            pages = ledger.page_table(group)[request.row]
            _, _, num_holders = ledger.ownership_map(group)
            cache.scrub(group, pages[num_holders[pages] == 1])


def scrub_free(ledger: Ledger, cache: KVCache, *, all_groups: bool) -> None:
    """Zero the free pages of window groups, or of all groups.

    A round that was prepared meanwhile may have freed a page with a NaN behind its window, and an
    abort one in any group. Nobody has taken these pages yet.
    """
    for group, window in enumerate(cache.windows):
        if all_groups or window is not None:
            states, _, _ = ledger.ownership_map(group)
            cache.scrub(group, np.flatnonzero(states[1:] == 0).astype(np.int32) + 1)
