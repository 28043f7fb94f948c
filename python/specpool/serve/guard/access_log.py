"""`AccessLog`: one line for each request, its id, and the last net for errors."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specpool.serve.api.errors import ApiError, internal, shutting_down
from specpool.serve.service import Service

access = logging.getLogger("specpool.access")
log = logging.getLogger("specpool.serve")

#: Paths that are asked every second; they are logged when they fail.
_POLLED = frozenset({"/health", "/metrics", "/pool"})


class AccessLog:
    """Middleware, the outermost: it writes no prompt, no key, no id of a session and no query."""

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[Route]) -> None:
        """Log the requests of this application, which has these routes."""
        self._app, self._service, self._routes = app, service, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ident = _ident(Headers(scope=scope).get("x-request-id", ""))
        scope["specpool.id"] = ident
        start, status, is_whole = time.perf_counter(), 0, False

        async def tell(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = ident
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                if not self._service.is_draining:  # its client has left, as Ray Serve says it
                    raise
                error = shutting_down()  # uvicorn waits no longer
            if not isinstance(error, ApiError):
                log.exception("request %s failed", ident)
            if status:
                if not is_whole:  # cut it, so that it is not taken for whole
                    scope.get("specpool.abort", lambda: None)()
                return
            answer = error if isinstance(error, ApiError) else internal()
            await answer.response()(scope, receive, tell)
        finally:
            self._write(scope, ident, status, time.perf_counter() - start)

    def _write(self, scope: Scope, ident: str, status: int, seconds: float) -> None:
        path = self._pattern(scope)
        self._service.counters.answers.labels(path=path, status=str(status)).inc()
        is_poll = path in _POLLED and status == 200
        if self._service.config.access_log and not is_poll:
            line = f"{_address(scope)} {scope['method']} {path} {status or 'left'}"
            access.info("%s %.1f ms %s", line, 1e3 * seconds, ident)

    def _pattern(self, scope: Scope) -> str:
        """Return the pattern of a request's path, such as `/v1/sessions/{ident}`.

        The path itself may hold the id of a session. One that no route has could be anything, and
        would grow the counters without end: it is "unknown".
        """
        if (route := scope.get("route")) is not None:
            return str(route.path)
        for route in self._routes:  # the request was refused before its route was looked for
            if route.matches(scope)[0] != Match.NONE:
                return str(route.path)
        return "unknown"


def _address(scope: Scope) -> str:
    """Return the client's address; `-` if there is none, or a proxy calls something else so."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return "-"
    return str(address).partition("%")[0]  # a zone could be any text


def _ident(client_ident: str) -> str:
    """Return the client's own id if it is harmless, else a new one."""
    if re.fullmatch(r"[\w.:-]{1,128}", client_ident, re.ASCII):
        return client_ident
    return secrets.token_hex(12)  # a number would tell clients how many requests there are
