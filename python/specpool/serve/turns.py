"""`Turns`: lets a crowd go on a few at a time."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """A queue whose first few go on in each round of the event loop.

    An event loop runs everything that is ready, and only then looks at its sockets again: a crowd
    of thousands would keep it from every other answer for as long. Between two rounds of this
    queue, all others are served.
    """

    def __init__(self, per_round: int) -> None:
        """Let `per_round` go on at once."""
        self._per_round = per_round
        # Not empty = `_next` is due in the next round.
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a turn: one round at least."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        num_left = self._per_round
        while self._waiting and num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled meanwhile
                turn.set_result(None)
                num_left -= 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
