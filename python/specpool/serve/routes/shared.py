"""`Shared`: one question to the engine answers all who ask meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Asks one question at a time. Callers that come while it is open share the next question.

    No answer is older than the call that gets it.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        """Ask by this."""
        self._ask = ask
        self._running: asyncio.Future[T] | None = None
        self._next: asyncio.Future[T] | None = None  # not asked yet

    async def get(self) -> T:
        """Return an answer; raise what the question raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask_after(self._running))
            self._next.add_done_callback(_look)
        return await asyncio.shield(self._next)  # a caller who leaves cancels it for nobody else

    async def _ask_after(self, earlier: asyncio.Future[T] | None) -> T:
        if earlier is not None:
            await asyncio.wait({earlier})
        self._running, self._next = self._next, None
        return await self._ask()


def _look(answer: asyncio.Future[T]) -> None:
    """Take note of an error even if nobody waits for it any more."""
    if not answer.cancelled():
        answer.exception()
