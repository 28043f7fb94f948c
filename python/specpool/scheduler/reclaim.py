"""`Ends` ends requests; `Room` frees pages when they run out."""

from __future__ import annotations

import time

from specpool._core import Ledger
from specpool.errors import ConfigError, OutOfMemory, OutOfPages, SpecpoolError, is_fault
from specpool.memory.page_needs import PageNeeds
from specpool.scheduler.conversations import Conversations
from specpool.scheduler.counts import Counts
from specpool.scheduler.pins import Pins
from specpool.scheduler.queues import Running, Waiting
from specpool.scheduler.request import Request
from specpool.scheduler.rows import HostHandles, Rows


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


class Room:
    """The part of the scheduler that frees pages.

    Attributes:
        in_flight: steps prepared and not finished. Pages fenced for them become free without help.
        num_retracted: retractions so far.
    """

    def __init__(
        self,
        ledger: Ledger,
        running: Running,
        waiting: Waiting,
        conversations: Conversations,
        pins: Pins,
        rows: Rows,
        needs: PageNeeds,
        ends: Ends,
    ) -> None:
        """Take pages from `conversations`, `pins` and `running`; retracted requests wait again."""
        self._ledger, self._running, self._waiting = ledger, running, waiting
        self._conversations, self._pins, self._rows = conversations, pins, rows
        self._needs, self._ends = needs, ends
        self.in_flight = self.num_retracted = 0

    def reclaim(self, shortage: OutOfPages) -> bool:
        """Drop the longest idle row, unless fenced pages will be enough; return whether one was."""
        if self.in_flight and shortage.need <= (shortage.free + shortage.cached + shortage.fenced):
            return False
        return self._conversations.reclaim(shortage)

    def make(self) -> None:
        """Drop a pin, or retract a request, because no step finds pages and none is in flight.

        Retract the last admitted request of the least priority. If it runs alone and shares
        nothing, end it with an error instead.
        """
        if self._pins:
            self._pins.drop_oldest()
            return
        newest_first = reversed(self._running.requests.values())
        victim = min(newest_first, key=lambda request: request.priority)
        is_alone = len(self._running) == 1
        if is_alone and not victim.shared_len:
            needs = self._needs.of(len(victim.tokens), victim.shape_index).tolist()
            victim.error = (
                f"kv_exhausted: alone it needs {needs} pages for its next round, the groups have "
                f"{[group.num_pages for group in self._ledger.groups]}"
            )
            self._ends.end(victim, "error")
            return
        self._rows.before_release(victim)
        # Alone it would find the same pages again, and lack the same ones.
        victim.skips_cache |= is_alone
        self._give_way(victim, is_alone)
        self.requeue(victim)

    def requeue(self, request: Request) -> None:
        """Queue a request again whose row is gone; it keeps its tokens."""
        self._running.leave(request)
        self._rows.return_lent(request)
        request.post()
        request.num_retractions += 1
        self.num_retracted += 1
        if request.conversation is not None:
            request.conversation.retraction_ct += 1
        self._waiting.add(request)  # first: after a Ctrl-C it must be in one of the two
        self._running.remove(request)

    def _give_way(self, victim: Request, is_alone: bool) -> None:
        """Take a retracted request's row, and keep its KV in the conversation or on the host."""
        conversation = victim.conversation
        # A row at its checkpoint would free nothing by falling back, and would be retracted again.
        # If the request runs alone, a waiting page copy may hold a page that the request needs.
        checkpoint = self._ledger.checkpoint_len(victim.row) or 0
        is_ahead = int(self._ledger.resolved_len[victim.row]) > checkpoint
        if is_ahead and not is_alone and self._conversations.fall_back(victim):
            return
        if conversation is not None or is_alone or victim.handle is not None or victim.tainted:
            self._rows.retract(victim.row)
        else:
            victim.handle = self._rows.release(victim.row)
        if conversation is not None:
            self._conversations.count_drop(conversation)
