"""The usual bookkeeping of a speculative engine in plain Python: the other side of `bench ledger`.

It has an object per request, a free list of pages, and a loop over the requests for the estimate,
for prepare and for resolve, as SGLang's scheduler does in its overlap mode. The functions have
SGLang's names. It counts a few things per request that the ledger leaves to the scheduler. It lacks
what the ledger has: fences, epochs, page owners, a plan that outlives the call, and refusals that
change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def ceil_align(length: int, unit: int) -> int:
    """`length` rounded up to a multiple of `unit`."""
    return -(-length // unit) * unit


class Req:
    """A request: its row, and its lengths in tokens and slots."""

    def __init__(self, req_pool_idx: int) -> None:
        self.req_pool_idx = req_pool_idx
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.decode_batch_idx = 0
        self.spec_verify_ct = 0
        self.spec_accept_tokens = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a prepared round gives to the forward: one entry for each lane, or each new page."""

    cur_kv_lens: Ints  # [b]
    nxt_kv_lens: Ints  # [b]
    rows: Ints  # [n]
    columns: Ints  # [n]
    pages: Ints  # [n]


class PlainLedger:
    """Pages and lengths of all requests.

    `reserve` is what a round may claim beyond the committed length: SGLang's is
    `2 * get_alloc_len_per_decode()`.
    """

    def __init__(
        self, *, page_size: int, num_pages: int, num_rows: int, pages_per_row: int, reserve: int
    ) -> None:
        self.page_size = page_size
        self.reserve = reserve
        self.free_pages = list(range(num_pages, 0, -1))
        self.free_rows = list(range(num_rows, 0, -1))
        self.page_table = np.zeros((num_rows + 1, pages_per_row), np.int32)

    def admit(self) -> Req:
        """A request without pages."""
        return Req(self.free_rows.pop())

    def new_tokens_required_next_decode(self, reqs: Sequence[Req]) -> int:
        """Slots that the next decode of these requests takes."""
        total = 0
        for req in reqs:
            missing = max(0, req.kv_committed_len + self.reserve - req.kv_allocated_len)
            cur = req.kv_allocated_len
            total += ceil_align(cur + missing, self.page_size) - ceil_align(cur, self.page_size)
        return total

    def prepare_for_extend(self, reqs: Sequence[Req], new_lens: Sequence[int]) -> Claim:
        """Pages for prompts; the tokens count at once."""
        for req, new_len in zip(reqs, new_lens, strict=True):
            req.kv_committed_len = new_len
        return self._alloc(reqs, [ceil_align(length, self.page_size) for length in new_lens])

    def prepare_for_decode(self, reqs: Sequence[Req]) -> Claim:
        """Pages for one more round of each request."""
        nxt_kv_lens = []
        for req in reqs:
            missing = max(0, req.kv_committed_len + self.reserve - req.kv_allocated_len)
            nxt_kv_lens.append(ceil_align(req.kv_allocated_len + missing, self.page_size))
            req.kv_committed_len += 1  # the root's KV is written whatever the drafts do
            req.decode_batch_idx += 1
        return self._alloc(reqs, nxt_kv_lens)

    def _alloc(self, reqs: Sequence[Req], nxt_kv_lens: Sequence[int]) -> Claim:
        """Raises MemoryError, changing nothing, when there are too few free pages."""
        cur_kv_lens = [req.kv_allocated_len for req in reqs]
        num_pages = (sum(nxt_kv_lens) - sum(cur_kv_lens)) // self.page_size
        if num_pages > len(self.free_pages):
            raise MemoryError(f"need {num_pages} pages, {len(self.free_pages)} free")
        rows, columns, pages = [], [], []
        for req, cur, nxt in zip(reqs, cur_kv_lens, nxt_kv_lens, strict=True):
            for column in range(cur // self.page_size, nxt // self.page_size):
                rows.append(req.req_pool_idx)
                columns.append(column)
                pages.append(self.free_pages.pop())
            req.kv_allocated_len = nxt
        self.page_table[rows, columns] = pages
        arrays = (cur_kv_lens, nxt_kv_lens, rows, columns, pages)
        return Claim(*(np.array(array, np.int32) for array in arrays))

    def resolve(self, reqs: Sequence[Req], accept_lens: Ints) -> None:
        """The round's outcome: `accept_lens` [b] tokens count, the bonus token included."""
        for req, accept_len in zip(reqs, accept_lens.tolist(), strict=True):
            req.kv_committed_len += accept_len - 1
            req.spec_verify_ct += 1
            req.spec_accept_tokens += accept_len

    def release(self, req: Req) -> None:
        """Gives the request's pages and row back."""
        pages = self.page_table[req.req_pool_idx, : req.kv_allocated_len // self.page_size]
        self.free_pages.extend(reversed(pages.tolist()))
        pages[:] = 0
        self.free_rows.append(req.req_pool_idx)
