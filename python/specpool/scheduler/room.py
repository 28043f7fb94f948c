"""`Room`: frees pages when they run out: from idle rows, then pins, then running requests.

Cached pages go before all of them: the ledger takes them by itself.
"""

from __future__ import annotations

from specpool._core import Ledger
from specpool.errors import OutOfPages
from specpool.memory.page_needs import PageNeeds
from specpool.scheduler.ends import Ends
from specpool.scheduler.pins import Pins
from specpool.scheduler.requests.request import Request
from specpool.scheduler.requests.waiting import Waiting
from specpool.scheduler.rows.conversations import Conversations
from specpool.scheduler.rows.rows import Rows
from specpool.scheduler.rows.running import Running


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
