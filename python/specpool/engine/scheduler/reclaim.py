"""`Reclaim`: takes rows and pages back, when a request ends and when pages run out.

When pages run out they come from idle rows, then from pins, then from running requests. Cached
pages go before all of them: the ledger takes them by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.rows import costing_speed
from specpool.engine.scheduler.state import State
from specpool.errors import ConfigError, OutOfMemory, OutOfPages, SpecpoolError, is_fault


class Reclaim:
    """The part of the scheduler that ends requests, and frees pages when none are left."""

    def __init__(self, state: State, before_release: Callable[[Request], None]) -> None:
        """Take rows and pages of `state`; `before_release` is as in `Scheduler`."""
        self._state, self._before_release = state, before_release

    def before_release(self, request: Request) -> None:
        """Keep the text of a request that is about to lose its row, as far as it has KV."""
        with costing_speed():
            self._state.prefix_cache.leave(request)
        self._before_release(request)

    def end(self, request: Request, reason: str) -> None:
        """End a request that runs or waits.

        Raises:
            SpecpoolError: the ledger refuses to take the row back; the row is then out of use.
        """
        state = self._state
        request.post()  # first, because Ctrl-C may come next
        request.finish_reason = reason
        request.times.ended = time.perf_counter()
        is_whole = reason in ("stop", "length")
        if is_whole:
            state.conversations.end(request)
        state.waiting.part(request)
        is_running, is_waiting = request in state.running, request in state.waiting
        if not (is_running or is_waiting):  # Ctrl-C came before it was queued
            return
        state.counts.end(reason, None if request.wants_pin else request.times)
        state.handles.return_handle(request)
        if is_waiting:  # also running, if Ctrl-C came while it changed lists
            state.waiting.remove(request)
        if not is_running:
            return
        if request.row and not state.rows.is_quarantined(request.row):
            self.before_release(request)
            if state.ledger.is_live(request.row):  # not after a Ctrl-C in its retraction
                try:
                    self._give_back(request, is_whole)
                except SpecpoolError:
                    state.rows.quarantine(request.row)
                    state.conversations.forget(request.row)
                    state.running.leave(request)
                    state.running.remove(request)
                    raise
        state.running.leave(request)
        state.running.remove(request)

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

    def drop_idle(self, shortage: OutOfPages) -> bool:
        """Drop the longest idle row, unless fenced pages will be enough; return whether one was."""
        if self._state.in_flight and shortage.need <= (
            shortage.free + shortage.cached + shortage.fenced
        ):
            return False
        return self._state.conversations.reclaim(shortage)

    def make_room(self) -> None:
        """Drop a pin, or retract a request, because no step finds pages and none is in flight.

        Retract the last admitted request of the least priority. If it runs alone and shares
        nothing, end it with an error instead.
        """
        state = self._state
        if state.pins:
            state.pins.drop_oldest()
            return
        newest_first = reversed(state.running.requests.values())
        victim = min(newest_first, key=lambda request: request.priority)
        is_alone = len(state.running) == 1
        if is_alone and not victim.shared_len:
            needs = state.needs.pages(len(victim.tokens), victim.shape_index).tolist()
            victim.error = (
                f"kv_exhausted: alone it needs {needs} pages for its next round, the groups have "
                f"{[group.num_pages for group in state.ledger.groups]}"
            )
            self.end(victim, "error")
            return
        self.before_release(victim)
        # Alone it would find the same pages again, and lack the same ones.
        victim.skips_cache |= is_alone
        self._release_victim(victim, is_alone)
        self.requeue(victim)

    def requeue(self, request: Request) -> None:
        """Queue a request again whose row is gone; it keeps its tokens."""
        state = self._state
        state.running.leave(request)
        state.handles.return_lent(request)
        request.post()
        request.num_retractions += 1
        state.num_retracted += 1
        if request.conversation is not None:
            request.conversation.retraction_ct += 1
        state.waiting.add(request)  # first: after a Ctrl-C it must be in one of the two
        state.running.remove(request)

    def _release_victim(self, victim: Request, is_alone: bool) -> None:
        """Take a retracted request's row, and keep its KV in the conversation or on the host."""
        state = self._state
        conversation = victim.conversation
        # A row at its checkpoint would free nothing by falling back, and would be retracted again.
        # If the request runs alone, a waiting page copy may hold a page that the request needs.
        checkpoint = state.ledger.checkpoint_len(victim.row) or 0
        is_ahead = int(state.ledger.resolved_len[victim.row]) > checkpoint
        if is_ahead and not is_alone and state.conversations.fall_back(victim):
            return
        if conversation is not None or is_alone or victim.handle is not None or victim.tainted:
            state.rows.retract(victim.row)
        else:
            victim.handle = state.rows.release(victim.row)
        if conversation is not None:
            state.conversations.count_drop(conversation)

    def _give_back(self, request: Request, is_whole: bool) -> None:
        """Give the row back to the request's conversation, or to the ledger."""
        state = self._state
        # A tainted request's KV has been scrubbed, so no conversation may keep it.
        if is_whole and request.conversation is not None and not request.tainted:
            state.conversations.keep(request.conversation, request.row, len(request.tokens))
        elif is_whole:
            state.rows.finish(request.row)
        elif not state.conversations.fall_back(request):
            state.rows.abort(request.row)
