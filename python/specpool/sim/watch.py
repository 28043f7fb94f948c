"""Who is in a simulation: requests that have come, texts that are pinned, and what has happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger
from specpool.scheduler.pins import Pin
from specpool.scheduler.requests.request import Request
from specpool.sim.arrivals import Arrival, Text
from specpool.sim.device import BrokenLaw, Ints


@dataclass(slots=True)
class Tally:
    """What has happened; sums over simulations are sums of these."""

    scenarios: int = 0
    rounds: int = 0  # turns of the loop that launched a step
    requests: int = 0
    retractions: int = 0
    aborts: int = 0
    device_errors: int = 0
    tokens: int = 0
    switches: int = 0  # of a controller's choice
    forks: int = 0
    pins: int = 0
    dropped_pins: int = 0  # to make room
    stop_strings: int = 0  # that ended a text
    turns: int = 0  # of sessions, that have ended by a stop or their length
    rewinds: int = 0
    session_forks: int = 0  # with KV
    dropped_sessions: int = 0  # that had to give their KV up between turns
    offloads: int = 0  # of retracted requests and of sessions, to the host
    reloads: int = 0
    failed_copies: int = 0

    def add(self, other: Tally) -> None:
        """Count what the other has counted."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(eq=False, slots=True)
class Watch:
    """A request that has come, and what is known of it."""

    arrival: Arrival
    request: Request
    text: Text
    came_at: int  # turn
    admission: int = 0  # the how manieth it was; 0 = without a row
    taken: tuple[int, int] | None = None  # the row then, and its epoch
    starts: Sequence[int] = ()  # where its first prefill step may begin; () = it has begun
    num_tokens: int = 0  # when it was looked at last
    last_step: int = 0  # the turn in which it was in a step, or could not yet be
    may_end: set[str] = field(default_factory=set)  # finish reasons besides the planned one

    @property
    def order(self) -> tuple[int, int]:
        """Who is admitted first: the greater priority, then whoever came first."""
        return -self.arrival.priority, self.arrival.request_id


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned text."""

    watch: Watch
    pin: Pin
    pages: list[Ints]  # of each group


class Pins:
    """The texts that are pinned now, the oldest first.

    Args:
        ledger: whose prefixes they are.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._page_sizes = [group.page_size for group in ledger.groups]
        self.kept: list[Pinned] = []

    def lines(self, request: Request) -> list[Ints]:
        """Of each group: the pages of the request's row."""
        tables = (self._ledger.page_table(g) for g in range(len(self._page_sizes)))
        return [table[request.row].astype(np.int64) for table in tables]

    def add(self, watch: Watch, pin: Pin, lines: list[Ints]) -> None:
        """The request's text is pinned; its row had the pages of `lines`."""
        num_tokens = len(pin.tokens)
        pages = [
            line[: -(-num_tokens // P)] for line, P in zip(lines, self._page_sizes, strict=True)
        ]
        self.kept.append(Pinned(watch, pin, pages))

    def look(self) -> list[Pinned]:
        """Know no longer of those that the scheduler has dropped; returns what was kept before."""
        before = self.kept
        if before:
            prefixes = set(self._ledger.prefixes)
            self.kept = [pinned for pinned in before if pinned.pin.prefix in prefixes]
        return before

    def num_held(self, g: int, rows: Sequence[int]) -> int:
        """Pages that rows and pins hold; each has as many holders as there are of these."""
        table: npt.NDArray[np.int32] = self._ledger.page_table(g)
        pages = np.concatenate([table[rows].ravel(), *(pinned.pages[g] for pinned in self.kept)])
        counts = np.bincount(pages, minlength=self._ledger.groups[g].num_pages + 1)
        _, _, holders = self._ledger.ownership_map(g)
        (wrong,) = (counts[1:] != holders[1:]).nonzero()
        if len(wrong):
            page = int(wrong[0]) + 1
            raise BrokenLaw(
                f"page {page} of group {g} is held by {counts[page]} rows and pins, the ledger "
                f"says by {holders[page]}"
            )
        return int((counts[1:] > 0).sum())


def shared_len(tokens: list[int], pins: list[Pinned]) -> int:
    """How many of the tokens, but for the last, the longest of these texts has."""
    best = 0
    for pinned in pins:
        n = min(len(pinned.pin.tokens), len(tokens) - 1)
        if pinned.watch.text.tokens[:n] == tokens[:n]:
            best = max(best, n)
    return best
