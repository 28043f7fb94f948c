"""`Waiting`: requests without a row, in the order in which they will get one."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from specpool.request import Request


class Waiting:
    """The queue: the greater priority first, then in the order of arrival."""

    def __init__(self, *, shares_prompts: bool) -> None:
        """Nobody waits; see `Scheduler` for the option."""
        self._shares_prompts = shares_prompts
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """Who is admitted next."""
        return self._requests[0]

    def has_number_of(self, request: Request) -> bool:
        """Whether it waits, or another with its number and priority."""
        at = bisect.bisect_left(self._requests, _order(request), key=_order)
        return any(r.request_id == request.request_id for r in self._requests[at : at + 1])

    def add(self, request: Request) -> None:
        """Wait, and let siblings that share nothing yet wait beside it; twice is once."""
        shares = self._shares_prompts and len(request.tokens) > 1 and request.finish_reason is None
        siblings = [] if shares else request.siblings
        for each in [request, *siblings]:
            if each.finish_reason is None and each not in self._requests:
                bisect.insort(self._requests, each, key=_order)
        if siblings:
            request.siblings = []

    def part(self, request: Request) -> None:
        """Its siblings wait by themselves."""
        for sibling in request.siblings:
            self.add(sibling)
        request.siblings = []

    def remove(self, request: Request) -> None:
        """It has a row, or is over."""
        self._requests.remove(request)


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.request_id
