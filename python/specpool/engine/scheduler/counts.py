"""`Counts` and `Latency`: the counters of a scheduler, and histograms of its requests' seconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpool._core import Shape
from specpool.arrays import Int32
from specpool.engine.scheduler.request import Times

#: Upper ends of a latency's buckets in seconds.
BUCKETS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, math.inf),
)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of seconds, over requests that ended by a stop or their length.

    Attributes:
        bounds: upper ends of the buckets in seconds, ascending; the last is infinite.
        cts: requests in each bucket.
        sum_seconds: the sum over all requests.
    """

    bounds: tuple[float, ...]
    cts: tuple[int, ...]
    sum_seconds: float

    @property
    def ct(self) -> int:
        """The number of requests in all buckets."""
        return sum(self.cts)


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Seconds from a request's arrival, of requests that ended by a stop or their length.

    Attributes:
        queue: until the request got a row.
        first_token: until the host had its first token.
        request: until the request's end.
    """

    queue: Histogram
    first_token: Histogram
    request: Histogram


class Latency:
    """The histograms of a scheduler's latencies."""

    def __init__(self) -> None:
        """Start with empty histograms."""
        self._queue, self._first_token, self._request = _Seconds(), _Seconds(), _Seconds()

    def add(self, times: Times) -> None:
        """Add a request that has ended."""
        self._queue.add(times.since_queued("started"))
        self._first_token.add(times.since_queued("first_token"))
        self._request.add(times.since_queued("ended"))

    def stats(self) -> LatencyStats:
        """Return the histograms."""
        parts = self._queue, self._first_token, self._request
        return LatencyStats(*(part.histogram() for part in parts))


class _Seconds:
    """A histogram that grows."""

    def __init__(self) -> None:
        self._cts, self._sum = [0] * len(BUCKETS), 0.0

    def add(self, seconds: float | None) -> None:
        if seconds is not None:
            self._cts[bisect_left(BUCKETS, seconds)] += 1
            self._sum += seconds

    def histogram(self) -> Histogram:
        return Histogram(BUCKETS, tuple(self._cts), self._sum)


# The most steps whose arrays are kept before they are added up.
_MOST_WAITING = 256


class Counts:
    """The counters of a scheduler. Steps leave their arrays, which are added up when read."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """Start at 0; rounds have one of these shapes."""
        max_accept_len = max(shape.max_accept_len for shape in shapes)
        # The drafts of a round of each shape, int32 [num_shapes].
        self._num_drafts = np.array([shape.num_draft_tokens - 1 for shape in shapes], np.int32)
        self.round_ct = self.prefill_ct = 0
        self.drafted_round_ct = self.draft_ct = 0  # rows' rounds with drafts, and their drafts
        self.forced_token_ct = 0  # accepted drafts that the form of a text left no choice about
        self.end_cts: Counter[str] = Counter()  # requests by finish reason
        self.latency = Latency()
        self._accept_cts = np.zeros(max_accept_len + 1, np.int64)  # rows' rounds by accept length
        self._prefilled_token_ct = self._first_token_ct = 0
        self._rounds: list[Int32] = []  # like `_prefills`, not added up yet
        self._prefills: list[tuple[Int32, Int32, Int32]] = []

    def round(self, accept_len: Int32, shapes: Int32) -> list[int]:
        """Count a decode step with these accept lengths and shapes, int32 [B] each.

        Returns:
            The number of drafts of each lane.
        """
        num_drafts = self._num_drafts[shapes]
        self.round_ct += 1
        self.drafted_round_ct += int(np.count_nonzero(num_drafts))
        self.draft_ct += int(num_drafts.sum())
        self._rounds.append(accept_len)
        if len(self._rounds) > _MOST_WAITING:
            self._add_up()
        drafts: list[int] = num_drafts.tolist()
        return drafts

    def forced(self, num_drafts: int, num_correct: int) -> None:
        """Count a row's round whose first drafts a form had forced."""
        self.forced_token_ct += min(num_drafts, num_correct)

    def prefill(self, start: Int32, new_len: Int32, drawn: Int32) -> None:
        """Count a prefill step: first position, end and drawn tokens of each lane, int32 [B]."""
        self.prefill_ct += 1
        self._prefills.append((start, new_len, drawn))
        if len(self._prefills) > _MOST_WAITING:
            self._add_up()

    def end(self, reason: str, times: Times | None = None) -> None:
        """Count the end of a request, and its latency if `times` are given."""
        if times is not None and reason in ("stop", "length"):
            self.latency.add(times)
        self.end_cts[reason] += 1

    @property
    def accept_cts(self) -> list[int]:
        """Rounds of single rows by accept length, from 0."""
        self._add_up()
        cts: list[int] = self._accept_cts.tolist()
        return cts

    @property
    def prefilled_token_ct(self) -> int:
        """The tokens of prefill steps."""
        self._add_up()
        return self._prefilled_token_ct

    @property
    def generated_token_ct(self) -> int:
        """The tokens that the steps generated."""
        accepted = sum(length * ct for length, ct in enumerate(self.accept_cts))
        return self._first_token_ct + accepted

    def _add_up(self) -> None:
        rounds, self._rounds = self._rounds, []
        if rounds:
            lens = np.concatenate(rounds)
            self._accept_cts += np.bincount(lens, minlength=len(self._accept_cts))
        prefills, self._prefills = self._prefills, []
        for start, new_len, drawn in prefills:
            self._prefilled_token_ct += int((new_len - start).sum())
            self._first_token_ct += int(drawn.sum())
