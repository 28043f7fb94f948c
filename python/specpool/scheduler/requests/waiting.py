"""`Waiting`: requests without a row, in the order in which they will get one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from specpool.scheduler.requests.request import Request


class Waiting:
    """The queue: the greater priority first, then in the order of arrival.

    Joining, leaving and finding who is next cost O(log n) of n who wait, and no more.
    """

    def __init__(self, *, shares_prompts: bool) -> None:
        """Nobody waits; see `Scheduler` for the option."""
        self._shares_prompts = shares_prompts
        self._requests: dict[int, Request] = {}  # who waits, by number
        # A heap of their orders. Who has left stays in it until it comes first, or `_tidy`.
        self._orders: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order, which costs a sort."""
        return iter(sorted(self._requests.values(), key=_order))

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def first(self) -> Request:
        """Who is admitted next."""
        while self._orders[0][1] not in self._requests:
            heapq.heappop(self._orders)
        return self._requests[self._orders[0][1]]

    def has_number_of(self, request: Request) -> bool:
        """Whether it waits, or another with its number."""
        return request.request_id in self._requests

    def add(self, request: Request) -> None:
        """Wait, and let siblings that share nothing yet wait beside it; twice is once."""
        shares = self._shares_prompts and len(request.tokens) > 1 and request.finish_reason is None
        siblings = [] if shares else request.siblings
        for each in [request, *siblings]:
            if each.finish_reason is None and each not in self:
                heapq.heappush(self._orders, _order(each))  # first: Ctrl-C may come between
                self._requests[each.request_id] = each
        if siblings:
            request.siblings = []

    def part(self, request: Request) -> None:
        """Queue the request's siblings by themselves; they share no prompt pages any more."""
        for sibling in request.siblings:
            self.add(sibling)
        request.siblings = []

    def remove(self, request: Request) -> None:
        """It has a row, or is over."""
        del self._requests[request.request_id]
        if len(self._orders) > 2 * len(self._requests) + _TIDY:
            self.tidy()

    def tidy(self) -> None:
        """Forget those who have left."""
        self._orders = sorted(map(_order, self._requests.values()))


# Orders of requests that have left, at most, beside one for each that waits.
_TIDY = 64


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.request_id
