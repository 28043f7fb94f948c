"""`EventStream`, `watched`: answers that end when their client leaves. `whole`: calls that do not.

uvicorn lets a call go on when its client leaves, Ray Serve cancels it, at any `await`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specpool.serve.api.errors import ApiError, internal

log = logging.getLogger("specpool.serve")

T = TypeVar("T")

#: Tasks that go on without their client. asyncio holds tasks weakly, so they are held here.
_detached: set[asyncio.Task[Any]] = set()


class EventStream(Response):
    """Server-sent events.

    A failure becomes the last event, so that a cut text is never taken for a whole one. If the
    client leaves, or reads too slowly (`GuardedProtocol`), the events stop.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: dict[str, str],
    ) -> None:
        """Send these events.

        Args:
            events: yields bytes; one item may hold several events.
            close: called at the end, however it comes.
            headers: further headers.
        """
        stream_headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=stream_headers | headers)
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        pump = leaving = None
        try:
            await send(start)
            pump = asyncio.ensure_future(self._pump(scope, send))
            leaving = asyncio.ensure_future(_wait_until_left(receive))
            await asyncio.wait({pump, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            for task in (pump, leaving):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

    async def _pump(self, scope: Scope, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            # It waits for the reader. If none reads, the connection ends, and so does the wait.
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async for part in self._events:
                await write(part)
        except ApiError as error:
            await write(error.event())
        except Exception:
            log.exception("request %s failed", scope.get("specpool.id"))
            await write(internal().event())
        await write(b"", more=False)


async def watched(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`; if the client leaves before, cancel it and return None."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_until_left(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, leaving):
            pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        if not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def whole(
    work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]] | None = None
) -> T:
    """Run `work` to its end, even if the caller is cancelled meanwhile.

    Args:
        work: changes the server and its engine, which must not differ.
        undo: called with the result if the caller has left, so that no client knows of it.
    """
    task = _start(work)

    def unheard(task: asyncio.Task[T]) -> None:
        if undo is not None and not task.cancelled() and task.exception() is None:
            _start(undo(task.result()))

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(unheard)
        raise


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.ensure_future(work)
    _detached.add(task)
    task.add_done_callback(_detached.discard)
    return task


async def _wait_until_left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
