"""`BodyGuard`: reads a request's body within its limits, before any path sees the request."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specpool.serve.api.errors import ApiError
from specpool.serve.config import ServeConfig


class BodyGuard:
    """Middleware: a body that is too large gets 413, one that is too slow 408."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        """Guard this application."""
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            response = error.response()
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None = the client has left.

        Raises:
            ApiError: it is too large or too slow.
        """
        most = self._config.max_body
        for name, value in scope["headers"]:
            if name == b"content-length" and (len(value) > 18 or int(value) > most):
                raise self._too_large()
        parts, size = [], 0
        end = asyncio.get_running_loop().time() + self._config.read_timeout
        while True:
            left = end - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0.001))
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
            if size > most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._config.max_body} bytes", code="request_too_large"
        )
