"""`Times`, the milestones of one request, and `Latency`, histograms over many requests."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

#: Upper ends of a latency's buckets in seconds.
BUCKETS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, math.inf),
)


@dataclass(slots=True)
class Times:
    """The times of a request's milestones, by `time.perf_counter`; None = not reached yet."""

    queued: float | None = None
    started: float | None = None  # when it got its first row
    first_token: float | None = None  # when the host had it
    ended: float | None = None

    def since_queued(self, name: str) -> float | None:
        """Return the seconds from arrival to the milestone `name`; None = not reached."""
        end = getattr(self, name)
        return None if end is None or self.queued is None else end - self.queued


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
