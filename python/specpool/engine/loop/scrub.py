"""Zero pages that may hold a NaN: attention reads masked slots too, and 0 * NaN is NaN."""

from __future__ import annotations

import contextlib

import numpy as np

from specpool._core import Ledger
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.scheduler.request import Request


def scrub_request(ledger: Ledger, cache: KVCache, request: Request) -> None:
    """Zero the pages of a request that produced a NaN, while it still has its row.

    Skip pages that other rows hold too. A page was free of NaN when it came to be shared, so it
    needs no scrub now; its last holder scrubs it if that request produced a NaN.
    """
    if not request.tainted:
        return
    # What it indexed may hold the NaN. Other salts share none of these pages.
    ledger.forget(request.salt)
    # A failing device may refuse the scrub too. Do not let that hide the first error.
    with contextlib.suppress(Exception):
        for group in range(len(ledger.groups)):
            pages = ledger.page_table(group)[request.row]
            _, _, num_holders = ledger.ownership_map(group)
            cache.scrub(group, pages[num_holders[pages] == 1])


def scrub_free(ledger: Ledger, cache: KVCache, *, all_groups: bool) -> None:
    """Zero the free pages of window groups, or of all groups.

    Call it before these pages are handed out again. While the NaN was on its way to the host, a
    prepare may have evicted a page with it from a window group, and an abort may have freed such a
    page in any group.
    """
    for group, window in enumerate(cache.windows):
        if all_groups or window is not None:
            states, _, _ = ledger.ownership_map(group)
            cache.scrub(group, np.flatnonzero(states[1:] == 0).astype(np.int32) + 1)
