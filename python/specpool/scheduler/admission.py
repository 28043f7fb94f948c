"""`Admission`: gives rows to waiting requests."""

from __future__ import annotations

import contextlib

import numpy as np

from specpool._core import Ledger
from specpool.errors import NotReady, OutOfMemory, OutOfPages, OutOfRows
from specpool.memory.page_needs import PageNeeds
from specpool.scheduler.config import SchedulerConfig
from specpool.scheduler.ends import Ends
from specpool.scheduler.pins import Pins
from specpool.scheduler.requests.request import Request
from specpool.scheduler.requests.waiting import Waiting
from specpool.scheduler.room import Room
from specpool.scheduler.rows.conversations import Conversations
from specpool.scheduler.rows.host_handles import HostHandles
from specpool.scheduler.rows.running import Running


class Admission:
    """The part of the scheduler that gives rows to waiting requests and to samples.

    Waiting requests get rows in their order. Samples of a running prompt get forks of its row.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: SchedulerConfig,
        running: Running,
        waiting: Waiting,
        conversations: Conversations,
        pins: Pins,
        handles: HostHandles,
        needs: PageNeeds,
        room: Room,
        ends: Ends,
    ) -> None:
        """Move requests from `waiting` to `running`.

        Args:
            ledger: the rows and pages.
            config: limits how many requests run at once.
            running: the requests with a row.
            waiting: the requests without a row.
            conversations: give a turn its conversation's idle row.
            pins: give a request the longest pinned text that it begins with.
            handles: the KV of requests on the host; a request with a handle takes no pin.
            needs: the pages that each request needs next.
            room: frees pages if the tail of a pin finds none.
            ends: ends a request that the ledger has no memory for.
        """
        self._ledger, self._config, self._running, self._waiting = ledger, config, running, waiting
        self._conversations, self._pins, self._handles = conversations, pins, handles
        self._needs, self._room, self._ends = needs, room, ends

    def admit(self) -> None:
        """Admit waiting requests in order, while the pages for every row's next round fit."""
        claimed = None
        while self._waiting and len(self._running) < self._config.max_batch:
            request = self._waiting.first
            need = self._needs.of(len(request.tokens), request.shape_index)
            if claimed is None:
                free = [
                    self._ledger.free_pages(g) + self._ledger.reclaimable_pages(g)
                    for g in range(len(self._ledger.groups))
                ]
                lens = self._running.lens
                rows = np.flatnonzero(lens)
                claimed = self._needs.of_all(lens[rows], self._running.shapes[rows])
            claimed = claimed + need
            if self._running and ((need > free) | (claimed > self._needs.num_pages)).any():
                return
            place = self._conversations.take(request) or self._take_row(request)
            if place is None:
                return
            row, length = place
            self._running.start(request, row, length)
            self._waiting.remove(request)
            if length == len(request.tokens) - 1:  # no prefill will fork its siblings
                self._waiting.part(request)

    def _take_row(self, request: Request) -> tuple[int, int] | None:
        """Take a free row; return it and its number of tokens with KV from a pin, or None."""
        self._handles.take(request)
        pins = self._pins.shared_with(request.tokens) if request.handle is None else []
        while True:
            pin, length = pins[0] if pins else (None, 0)
            try:
                row = self._ledger.admit(
                    str(request.request_id),
                    prefix=None if pin is None else pin.prefix,
                    length=None if pin is None else length,
                )
            except NotReady:  # the window before that length is not held
                del pins[0]
            except OutOfRows:  # all free rows are fenced
                return None
            except OutOfPages as shortage:
                if not self._room.reclaim(shortage):
                    return None
            except OutOfMemory as shortage:
                if not self._running:  # no request will give memory back
                    self._ends.give_up([request], shortage)
                return None
            else:
                return row, length

    def fork(self, request: Request) -> None:
        """Fork the request's row for its siblings, once all but the prompt's last token has KV.

        Siblings that find no row or page wait.
        """
        while request.siblings:
            sibling, row = request.siblings[0], 0
            if sibling.finish_reason is None and len(self._running) < self._config.max_batch:
                with contextlib.suppress(OutOfRows, OutOfPages, OutOfMemory):
                    row = self._ledger.fork(request.row, str(sibling.request_id))
            if row:
                self._running.start(sibling, row, request.prefilled_len)
            else:
                self._waiting.add(sibling)
            del request.siblings[0]
