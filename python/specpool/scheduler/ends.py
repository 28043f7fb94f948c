"""`Ends`: ends requests, and gives their rows back."""

from __future__ import annotations

import time

from specpool._core import Ledger
from specpool.errors import ConfigError, OutOfMemory, SpecpoolError, is_fault
from specpool.scheduler.counts import Counts
from specpool.scheduler.requests.request import Request
from specpool.scheduler.requests.waiting import Waiting
from specpool.scheduler.rows.conversations import Conversations
from specpool.scheduler.rows.host_handles import HostHandles
from specpool.scheduler.rows.rows import Rows
from specpool.scheduler.rows.running import Running


class Ends:
    """The part of the scheduler that ends running and waiting requests."""

    def __init__(
        self,
        ledger: Ledger,
        running: Running,
        waiting: Waiting,
        conversations: Conversations,
        rows: Rows,
        handles: HostHandles,
        counts: Counts,
    ) -> None:
        """End requests of `running` and `waiting`; the other parts take what they give back."""
        self._ledger, self._running, self._waiting = ledger, running, waiting
        self._conversations, self._rows = conversations, rows
        self._handles, self._counts = handles, counts

    def end(self, request: Request, reason: str) -> None:
        """End a request that runs or waits.

        Raises:
            SpecpoolError: the ledger refuses to take the row back; the row is then out of use.
        """
        request.post()  # first, because Ctrl-C may come next
        request.finish_reason = reason
        request.times.ended = time.perf_counter()
        is_whole = reason in ("stop", "length")
        if is_whole:
            self._conversations.end(request)
        self._waiting.part(request)
        is_running, is_waiting = request in self._running, request in self._waiting
        if not (is_running or is_waiting):  # Ctrl-C came before it was queued
            return
        self._counts.end(reason, None if request.wants_pin else request.times)
        self._handles.return_handle(request)
        if is_waiting:  # also running, if Ctrl-C came while it changed lists
            self._waiting.remove(request)
        if not is_running:
            return
        if request.row and not self._rows.is_quarantined(request.row):
            self._rows.before_release(request)
            if self._ledger.is_live(request.row):  # not after a Ctrl-C in its retraction
                try:
                    self._give_back(request, is_whole)
                except SpecpoolError:
                    self._rows.quarantine(request.row)
                    self._conversations.forget(request.row)
                    self._running.leave(request)
                    self._running.remove(request)
                    raise
        self._running.leave(request)
        self._running.remove(request)

    def fault(self, request: Request, error: BaseException) -> None:
        """End a request with an error because code that works for it alone has failed.

        Raises:
            BaseException: `error`, if it concerns more than this request: Ctrl-C, or an error of
                the ledger.
        """
        is_shared = isinstance(error, SpecpoolError) and not isinstance(error, ConfigError)
        if is_shared or not is_fault(error):
            raise error
        request.error = f"the request failed: {type(error).__name__}: {error}"
        self.end(request, "error")

    def give_up(self, requests: list[Request], shortage: OutOfMemory) -> None:
        """End with an error the requests of a call for which the ledger had no memory."""
        for request in requests:
            request.error = f"a step was not prepared: {type(shortage).__name__}: {shortage}"
            self.end(request, "error")

    def _give_back(self, request: Request, is_whole: bool) -> None:
        """Give the row back to the request's conversation, or to the ledger."""
        # A tainted request's KV has been scrubbed, so no conversation may keep it.
        if is_whole and request.conversation is not None and not request.tainted:
            self._conversations.keep(request.conversation, request.row, len(request.tokens))
        elif is_whole:
            self._rows.finish(request.row)
        elif not self._conversations.fall_back(request):
            self._rows.abort(request.row)
