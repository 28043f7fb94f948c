"""The slots of requests that grow, from the pages that were taken for them.

A slot is `page * page_size + offset`. These functions run where KV is on the host; on an
accelerator SGLang's own kernels do the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_I64 = npt.NDArray[np.int64]


def new_pages(prefix_lens: _I64, seq_lens: _I64, page_size: int) -> _I64:
    """Return how many pages each request takes to grow from `prefix_lens` to `seq_lens` tokens."""
    counts: _I64 = -(-seq_lens // page_size) - -(-prefix_lens // page_size)
    return counts


def of_pages(pages: npt.NDArray[Any], page_size: int) -> _I64:
    """Return every slot of `pages`, int64 [len(pages) * page_size]."""
    ids: _I64 = pages.astype(np.int64)
    if page_size == 1:
        return ids
    slots: _I64 = ids[:, None] * page_size + np.arange(page_size)
    return slots.ravel()


def of_next_token(last_slots: _I64, opens: npt.NDArray[np.bool_], starts: _I64) -> _I64:
    """Return the slot of one more token per request, int64 [requests].

    Args:
        last_slots: the slot of each request's last token.
        opens: which requests begin a new page.
        starts: the first slot of each new page, in the order of the requests.
    """
    slots: _I64 = last_slots + 1
    slots[opens] = starts
    return slots


def of_extension(
    prefix_lens: _I64, seq_lens: _I64, last_slots: _I64, counts: _I64, pages: _I64, page_size: int
) -> _I64:
    """Return the slots of tokens `prefix_lens` to `seq_lens` of each request, one after the other.

    A request fills the page of its last slot first, then its new pages.

    Args:
        prefix_lens: tokens that each request has slots for.
        seq_lens: tokens that it is to have slots for.
        last_slots: the slot of its last token; ignored where the prefix ends on a page's edge.
        counts: how many new pages each request takes.
        pages: the new pages, request by request.
        page_size: tokens of a page.

    Returns:
        int64 [sum(seq_lens - prefix_lens)].
    """
    lens = seq_lens - prefix_lens
    lane = np.repeat(np.arange(len(lens)), lens)
    # Position in the request's text, and which of its new pages holds it; below 0 none does.
    within = np.arange(len(lane)) - np.repeat(np.cumsum(lens) - lens, lens)
    position = prefix_lens[lane] + within
    ordinal = position // page_size - -(-prefix_lens // page_size)[lane]
    slots: _I64 = last_slots[lane] + 1 + within
    is_new = ordinal >= 0
    if is_new.any():
        first = np.cumsum(counts) - counts
        page = pages[(first[lane] + ordinal)[is_new]]
        slots[is_new] = page * page_size + position[is_new] % page_size
    return slots
