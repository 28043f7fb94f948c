"""`BodyGuard`: reads a request's body within its limits."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specpool.serve.api.errors import ApiError
from specpool.serve.service import WORK_PATHS, Service

#: Paths whose bodies may have `max_body` bytes; those of others are some numbers.
_LARGE = WORK_PATHS | {"/tokenize", "/detokenize"}
_SMALL_BODY = 64 << 10
#: How long, and how many times the most bytes, the rest of a refused body is dropped.
_SKIP_SECONDS, _SKIP_BODIES = 2.0, 4


class BodyGuard:
    """Middleware: a body that is too large gets 413, one that is too slow 408."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """Guard this application."""
        self._app, self._service, self._config = app, service, service.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        if scope["path"] not in WORK_PATHS:
            await self._pass(scope, receive, send)
            return
        self._service.num_arriving += 1
        arrival = contextlib.ExitStack()
        arrival.callback(self._arrived)
        # The path calls it once its texts are submitted; they may run for minutes.
        scope["specpool.arrived"] = arrival.close
        with arrival:
            await self._pass(scope, receive, send)

    def _arrived(self) -> None:
        self._service.num_arriving -= 1

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and go on; work waits for its turn."""
        is_whole = False

        async def receive_part() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        try:
            body = await self._read(scope, receive_part)
        except ApiError as error:
            if error.status == 413 and not is_whole:
                await refuse(error, scope, receive, send, self._config.max_body)
                return
            response = error.response()
            response.headers["connection"] = "close"  # what is left of the body is not read
            await response(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        if scope["path"] in WORK_PATHS:
            await self._service.turns.take()
        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None if the client has left.

        Raises:
            ApiError: it is too large or too slow.
        """
        max_bytes = self._config.max_body
        if scope["path"] not in _LARGE:
            max_bytes = min(max_bytes, _SMALL_BODY)
        for name, value in scope["headers"]:
            if name == b"content-length" and (len(value) > 18 or int(value) > max_bytes):
                raise _too_large(max_bytes)
        parts, size = [], 0
        end = asyncio.get_running_loop().time() + self._config.read_timeout
        while True:
            seconds_left = end - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(seconds_left, 0.001))
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    f"the body did not come within {self._config.read_timeout:g} s",
                    code="read_timeout",
                ) from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)


async def refuse(
    error: ApiError, scope: Scope, receive: Receive, send: Send, max_body: int
) -> None:
    """Answer a request whose body is not read, drop what still comes of it, and close.

    A client that sends when the connection closes loses the answer: node's `fetch`, for one. So the
    answer is sent whole, and its end waits `_SKIP_SECONDS`, or for `_SKIP_BODIES` bodies, at most.
    """
    response = error.response()
    response.headers["connection"] = "close"

    async def hold(message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if is_body else message)

    await response(scope, receive, hold)
    size, end = 0, asyncio.get_running_loop().time() + _SKIP_SECONDS
    with contextlib.suppress(asyncio.TimeoutError):
        while size < _SKIP_BODIES * max_body:
            seconds_left = end - asyncio.get_running_loop().time()
            message = await asyncio.wait_for(receive(), max(seconds_left, 0.001))
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
    await send({"type": "http.response.body", "body": b""})


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
