"""`Waiting`: the queue of requests without a row."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from specpool.scheduler.requests.request import Request


class Waiting:
    """The queue of waiting requests: greater priority first, then in the order of arrival.

    Joining, leaving and finding the next request cost O(log n) for n waiting requests.
    """

    def __init__(self, *, shares_prompts: bool) -> None:
        """Start empty; see `SchedulerConfig` for the option."""
        self._shares_prompts = shares_prompts
        self._requests: dict[int, Request] = {}  # the waiting requests, by number
        # A heap of their orders. A request that has left stays until it comes first, or `tidy`.
        self._orders: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order, at the cost of a sort."""
        return iter(sorted(self._requests.values(), key=_order))

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def first(self) -> Request:
        """The request to admit next."""
        while self._orders[0][1] not in self._requests:
            heapq.heappop(self._orders)
        return self._requests[self._orders[0][1]]

    def has_number_of(self, request: Request) -> bool:
        """Return whether a request with this number waits."""
        return request.request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request, and its siblings unless they will share its prompt.

        A second call does nothing.
        """
        shares = self._shares_prompts and len(request.tokens) > 1 and request.finish_reason is None
        siblings = [] if shares else request.siblings
        for each in [request, *siblings]:
            if each.finish_reason is None and each not in self:
                heapq.heappush(self._orders, _order(each))  # first: an order alone does no harm
                self._requests[each.request_id] = each
        if siblings:
            request.siblings = []

    def part(self, request: Request) -> None:
        """Queue the request's siblings separately, because they can no longer share its pages."""
        for sibling in request.siblings:
            self.add(sibling)
        request.siblings = []

    def remove(self, request: Request) -> None:
        """Take a request that got a row, or has ended, from the queue."""
        del self._requests[request.request_id]
        if len(self._orders) > 2 * len(self._requests) + _TIDY:
            self.tidy()

    def tidy(self) -> None:
        """Rebuild the heap without requests that have left."""
        self._orders = sorted(map(_order, self._requests.values()))


# The heap is rebuilt when it holds this many orders and two for each waiting request.
_TIDY = 64


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.request_id
