"""Which requests run: admission, prefill in chunks, decode rounds.

A request is admitted when every page it could ever need, in every group, fits beside what the
running ones could need. So no round ever runs out of pages, and nothing is retracted.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger, Shape
from specpool.errors import SpecpoolError
from specpool.request import Request


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prompts, or chunks of them, to be run in one forward."""

    requests: list[Request]
    chunk_lens: list[int]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One round of requests that share a shape."""

    requests: list[Request]
    shape: Shape


class Scheduler:
    """The waiting queue and the running batch, first come, first served."""

    def __init__(self, ledger: Ledger, *, max_batch: int, prefill_tokens: int) -> None:
        """Schedule on `ledger`; a prefill forward runs at most `prefill_tokens` tokens."""
        self._ledger = ledger
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._num_pages = np.array([group.num_pages for group in ledger.groups])

    def submit(self, request: Request) -> None:
        """Queue a request. A full row always fits the pools, so each one runs at last."""
        self._waiting.append(request)

    def requests(self) -> list[Request]:
        """All requests, running ones first."""
        return [*self._running, *self._waiting]

    def next_batch(self) -> PrefillBatch | DecodeBatch | None:
        """What to run now: prefill first, then decode; None when nothing is left."""
        self._admit()
        chunks: list[tuple[Request, int]] = []
        budget = self._prefill_tokens
        for request in self._running:
            if not request.is_prefilled and budget:
                chunks.append((request, min(budget, request.prompt_len - request.prefilled_len)))
                budget -= chunks[-1][1]
        if chunks:
            return PrefillBatch([r for r, _ in chunks], [n for _, n in chunks])
        if not self._running:
            return None
        # Shapes take turns: the request with the fewest rounds picks.
        shape = min(self._running, key=lambda request: len(request.accept_lens)).shape
        return DecodeBatch([r for r in self._running if r.shape == shape], shape)

    def release(self, request: Request) -> None:
        """Give a finished or aborted request's row and pages back; a waiting one is forgotten."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        row, request.row = request.row, 0
        if row:
            if request.finish_reason in ("stop", "length"):
                self._ledger.finish(row)
            else:
                self._ledger.abort(row)

    def release_strays(self) -> None:
        """Abort rows that no running request has: Ctrl-C came while one was taken or given back."""
        owned = {request.row for request in self._running}
        for row in range(1, self._ledger.num_rows + 1):
            if row not in owned:
                with contextlib.suppress(SpecpoolError):  # most are free
                    self._ledger.abort(row)

    def _admit(self) -> None:
        if not self._waiting or len(self._running) >= self._max_batch:
            return
        claimed = sum(map(self._pages_needed, self._running), np.zeros_like(self._num_pages))
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting[0]
            claimed += self._pages_needed(request)
            if (claimed > self._num_pages).any():
                return
            request.row = self._ledger.admit(tag=str(request.request_id))
            self._running.append(request)
            self._waiting.popleft()

    def _pages_needed(self, request: Request) -> npt.NDArray[np.int64]:
        """Pages of each group that the request may ever hold, int64 [num_groups]."""
        shape = self._ledger.shapes.index(request.shape)
        last_root = max(request.prompt_len, request.max_len - 2)
        return self._ledger.pages_needed(request.prompt_len, last_root, shape)
