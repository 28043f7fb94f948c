"""`State`: what the parts of a scheduler share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specpool._core import Ledger
from specpool.capacity.page_needs import PageNeeds
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.conversations import Conversations
from specpool.engine.scheduler.counts import Counts
from specpool.engine.scheduler.pins import Pins
from specpool.engine.scheduler.prefix_cache import PrefixCache
from specpool.engine.scheduler.queues import Running, Waiting
from specpool.engine.scheduler.round_shapes import RoundShapes
from specpool.engine.scheduler.rows import HostHandles, Rows

if TYPE_CHECKING:
    from specpool.engine.shapes import Controller


class State:
    """The requests of a scheduler, their rows, and the KV that is kept for later requests.

    Attributes:
        ledger: the rows and pages.
        config: the options.
        round_shapes: the shape of each row's next round.
        needs: the pages that each request needs next.
        waiting: the requests without a row.
        running: the requests with a row.
        pins: the pinned texts.
        handles: the KV on the host of requests and conversations.
        rows: gives rows back to the ledger.
        conversations: the sessions, with the rows that they keep between their turns.
        prefix_cache: the texts that were computed before.
        counts: the counters.
        in_flight: steps prepared and not finished. Pages fenced for them become free without help.
        num_retracted: retractions so far.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: SchedulerConfig,
        *,
        host: HostTier | None = None,
        controller: Controller | None = None,
    ) -> None:
        """Start without requests; see `Scheduler` for the arguments."""
        self.ledger, self.config = ledger, config
        self.round_shapes = RoundShapes(
            ledger.shapes, ledger.num_rows + 1, controller, config.forced_shape
        )
        self.needs = PageNeeds(ledger, config.headroom, self.round_shapes.page_choices)
        self.waiting = Waiting()
        self.running = Running(ledger, self.round_shapes, reads_tokens=config.reads_tokens)
        self.handles = HostHandles(host, keeps_draft_kv=config.keeps_draft_kv)
        self.rows = Rows(ledger, self.handles)
        self.pins = Pins(ledger, self.rows.export)
        self.conversations = Conversations(ledger, config, self.rows, self.handles)
        self.prefix_cache = PrefixCache(ledger, config, self.running, self.handles)
        self.counts = Counts(ledger.shapes)
        self.in_flight = self.num_retracted = 0
