"""`Shared`: one question to the engine answers all who ask meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Asks one question at a time. Who comes while it is asked waits for the next, with all others.

    No answer is older than the call that gets it.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        """Ask by this."""
        self._ask = ask
        self._asked: asyncio.Future[T] | None = None
        self._next: asyncio.Future[T] | None = None  # not asked yet

    async def get(self) -> T:
        """Return an answer; raise what the question raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._asked))
            self._next.add_done_callback(_look)
        return await asyncio.shield(self._next)  # one who leaves cancels it for nobody else

    async def _after(self, earlier: asyncio.Future[T] | None) -> T:
        if earlier is not None:
            await asyncio.wait({earlier})
        self._asked, self._next = self._next, None
        return await self._ask()


def _look(answer: asyncio.Future[T]) -> None:
    """Take note of an error even if nobody waits for it any more."""
    if not answer.cancelled():
        answer.exception()
