"""`AccessGuard`: who may call the server: the key, the site, the server's name, the room in it."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specpool.serve.api.errors import ApiError
from specpool.serve.config import ServeConfig, is_loopback_address
from specpool.serve.guard.body import refuse
from specpool.serve.service import WORK_PATHS, Service

#: Paths without a key: whether the server lives, and the page, which asks for one.
OPEN_PATHS = frozenset({"/", "/health"})


class AccessGuard:
    """Middleware: a wrong key gets 401, a strange name or site 403, work without room 429 or 503.

    It answers before the body is read, so a flood costs little. Requests for work take turns.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """Guard this application."""
        self._app, self._service = app, service
        self._open = OPEN_PATHS | ({"/metrics"} if service.config.open_metrics else set())
        self._is_loopback = service.config.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            if scope["path"] in WORK_PATHS:
                await self._service.turns.take()
            try:
                self._check(scope)
            except ApiError as error:
                if scope["method"] in ("GET", "HEAD", "OPTIONS"):
                    await error.response()(scope, receive, send)
                else:
                    await refuse(error, scope, receive, send, self._service.config.max_body)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._is_loopback:
            _check_host(headers.get("host", ""), self._service.config)
        if scope["method"] == "OPTIONS":
            return
        is_read = scope["method"] in ("GET", "HEAD")
        if not (is_read and path in OPEN_PATHS):
            _check_site(headers, self._service.config.origins, is_read=is_read)
        if path not in self._open:
            scope["specpool.key"] = self._service.keys.check(headers.get("authorization", ""))
        if path in WORK_PATHS:
            self._service.check_room()


def _check_host(host: str, config: ServeConfig) -> None:
    """Refuse a strange name for a loopback server: a web page may have made it point here."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    # No site can make an address point elsewhere. Some clients write IPv6 without brackets.
    if is_loopback_address(host) or is_loopback_address(name.strip("[]")):
        return
    names = (known.lower().removesuffix(".") for known in ("localhost", config.host, *config.hosts))
    if name.lower().removesuffix(".") not in names:
        raise ApiError(
            403,
            f"the server listens on loopback and is called {name!r:.100}: start it with "
            "--allow-host to allow this name",
            code="host_not_allowed",
        )


def _check_site(headers: Headers, origins: Collection[str], *, is_read: bool) -> None:
    """Refuse what a page of another site has made a browser send, unless `origins` names the site.

    A browser may send such a request without asking, if it has no JSON: the page cannot read the
    answer, but the server has done the work. Clients that are not browsers send none of these
    headers.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if "*" in origins or origin in origins:
        return
    if site is not None:  # the browser knows, also behind a proxy that changes the host
        is_foreign = site not in ("same-origin", "none")
    elif origin is not None:
        host = headers.get("host", "")
        is_foreign = origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())
    else:
        return
    if is_read and headers.get("sec-fetch-mode") == "navigate":  # a person follows a link
        return
    if is_foreign:
        raise ApiError(
            403,
            f"a page of another site, {origin or site!r:.100}, has sent the request: start the "
            "server with --allow-origin to allow this site",
            code="origin_not_allowed",
        )
