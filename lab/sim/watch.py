"""`Watch`, `Pins` and `Tally`: the requests, the pinned texts and the counts of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from lab.sim.arrivals import Arrival, Text
from lab.sim.broken_law import BrokenLaw
from lab.sim.device import Ints
from specpool._core import Ledger
from specpool.engine.scheduler.pins import Pin
from specpool.engine.scheduler.request import Request


@dataclass(slots=True)
class Tally:
    """The counts of one simulation, or the sums of several."""

    scenarios: int = 0
    rounds: int = 0  # turns of the loop that launched a step
    requests: int = 0
    retractions: int = 0
    aborts: int = 0
    device_errors: int = 0
    tokens: int = 0
    mixed_rounds: int = 0  # with drafts from tokens that the host knows, and others
    switches: int = 0  # rounds whose choice differed from the one before
    forks: int = 0
    pins: int = 0
    dropped_pins: int = 0  # dropped to make room
    stop_strings: int = 0  # requests that a stop string ended
    turns: int = 0  # of sessions, ended by a stop or their length
    rewinds: int = 0
    session_forks: int = 0  # forks that share KV
    dropped_sessions: int = 0  # times that a session lost its KV between turns
    offloads: int = 0  # of requests' and sessions' KV, to the host
    reloads: int = 0
    failed_copies: int = 0
    reused: int = 0  # tokens that admitted requests found in the prefix index
    from_host: int = 0  # tokens of texts that came back from the host
    evictions: int = 0  # entries and pages that the index gave up to make room

    def add(self, other: Tally) -> None:
        """Add the counts of another simulation."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass(eq=False, slots=True)
class Watch:
    """A request that has arrived, and the record that the laws check it against."""

    arrival: Arrival
    request: Request
    text: Text
    came_at: int  # turn
    admission: int = 0  # its number in the order of admission; 0 if it has no row
    taken: tuple[int, int] | None = None  # the row and its epoch at the admission
    starts: Sequence[int] = ()  # possible starts of its first prefill; () if it has begun
    admitted_len: int = 0  # its tokens at the admission
    # Its row, epoch and tokens when its drafter last said whether a round is worth drafting.
    judged: tuple[int, int, int] = (0, 0, 0)
    # The same, and its tokens, when the turn's steps were prepared. Results may come before them.
    planned: tuple[tuple[int, int, int], int] = ((0, 0, 0), 0)
    num_tokens: int = 0  # at the latest check
    last_step: int = 0  # the latest turn with a step of it, or when it could have none
    may_end: set[str] = field(default_factory=set)  # allowed finish reasons beside the planned one

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of admission: greater priority first, then the order of arrival."""
        return -self.arrival.priority, self.arrival.request_id


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned text."""

    watch: Watch
    pin: Pin
    pages: list[Ints]  # the text's pages in each group


class Pins:
    """The texts that are pinned now, the oldest first.

    Args:
        ledger: the ledger of their prefixes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._page_sizes = [group.page_size for group in ledger.groups]
        self.pinned: list[Pinned] = []

    def lines(self, request: Request) -> list[Ints]:
        """Return the pages of the request's row in each group."""
        tables = (self._ledger.page_table(g) for g in range(len(self._page_sizes)))
        return [table[request.row].astype(np.int64) for table in tables]

    def add(self, watch: Watch, pin: Pin, lines: list[Ints]) -> None:
        """Add a request's pinned text; `lines` are the pages that its row had."""
        num_tokens = len(pin.tokens)
        pages = [
            line[: -(-num_tokens // P)] for line, P in zip(lines, self._page_sizes, strict=True)
        ]
        self.pinned.append(Pinned(watch, pin, pages))

    def look(self) -> list[Pinned]:
        """Forget the pins that the scheduler has dropped; return all that were known before."""
        before = self.pinned
        if before:
            prefixes = set(self._ledger.prefixes)
            self.pinned = [pinned for pinned in before if pinned.pin.prefix in prefixes]
        return before

    def num_held(self, g: int, rows: Sequence[int], indexed: Ints) -> int:
        """Count the pages of rows and pins; check each page's number of holders in the ledger.

        `indexed` are the pages that the prefix index holds besides.
        """
        table: npt.NDArray[np.int32] = self._ledger.page_table(g)
        pages = np.concatenate([table[rows].ravel(), *(pinned.pages[g] for pinned in self.pinned)])
        counts = np.bincount(pages, minlength=self._ledger.groups[g].num_pages + 1)
        _, _, holders = self._ledger.ownership_map(g)
        all_counts = counts.copy()
        all_counts[indexed] += 1
        (wrong,) = (all_counts[1:] != holders[1:]).nonzero()
        if len(wrong):
            page = int(wrong[0]) + 1
            raise BrokenLaw(
                f"page {page} of group {g} is held by {all_counts[page]} rows, pins and texts, the "
                f"ledger says by {holders[page]}"
            )
        return int((counts[1:] > 0).sum())


def shared_len(tokens: list[int], pins: list[Pinned]) -> int:
    """Return how many tokens the longest matching pin shares with `tokens`, never the last."""
    best = 0
    for pinned in pins:
        n = min(len(pinned.pin.tokens), len(tokens) - 1)
        if pinned.watch.text.tokens[:n] == tokens[:n]:
            best = max(best, n)
    return best
