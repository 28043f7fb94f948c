"""`AccessLog`: one line for each request, its id, and the last net for errors."""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specpool.serve.api.errors import ApiError, internal
from specpool.serve.service import Service

access = logging.getLogger("specpool.access")
log = logging.getLogger("specpool.serve")

#: Paths that are asked every second; they are logged when they fail.
_POLLED = frozenset({"/health", "/metrics", "/pool"})


#: Ids of requests: a random tag of this run of the server, then a number.
_TAG, _NUMBERS = secrets.token_hex(8), itertools.count(1)


class AccessLog:
    """Middleware, the outermost: it writes no prompt, no key and no query."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """Log the requests of this application."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ident = _ident(Headers(scope=scope).get("x-request-id", ""))
        scope["specpool.id"] = ident
        start, status = time.perf_counter(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = ident
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("request %s failed", ident)
            if status:  # the answer has begun: cut it, so that it is not taken for whole
                scope.get("specpool.abort", lambda: None)()
                return
            answer = error if isinstance(error, ApiError) else internal()
            await answer.response()(scope, receive, tell)
        finally:
            self._write(scope, ident, status, time.perf_counter() - start)

    def _write(self, scope: Scope, ident: str, status: int, seconds: float) -> None:
        # A path that no route has could be anything, and would grow the counters without end.
        route = scope.get("route")
        path = getattr(route, "path", None) or ("refused" if status >= 400 else "other")
        self._service.counters.answers.labels(path=path, status=str(status)).inc()
        is_poll = path in _POLLED and status == 200
        if self._service.config.access_log and not is_poll:
            client = scope.get("client") or ("-", 0)
            shown = scope["path"].encode("unicode_escape").decode()[:200]
            line = (
                f"{client[0]} {scope['method']} {shown} {status or 'left'} {1e3 * seconds:.1f} ms"
            )
            access.info("%s %s", line, ident)


def _ident(given: str) -> str:
    """Return the client's own id if it is harmless, else a new one."""
    if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII):
        return given
    return f"{_TAG}{next(_NUMBERS):08x}"
