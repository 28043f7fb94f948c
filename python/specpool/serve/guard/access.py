"""`AccessGuard`: who may call the server: the key, the name it is called by, the room in it."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specpool.serve.api.errors import ApiError
from specpool.serve.config import ServeConfig
from specpool.serve.service import WORK_PATHS, Service

#: Paths without a key: whether the server lives, and the page, which asks for one.
OPEN_PATHS = frozenset({"/", "/health"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class AccessGuard:
    """Middleware: a wrong key gets 401, a strange name 403, and work without room 429 or 503.

    It answers before the body is read, so a flood costs little. Requests for work take turns.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """Guard this application."""
        self._app, self._service = app, service
        self._open = OPEN_PATHS | ({"/metrics"} if service.config.open_metrics else set())
        # Hashes have one length, so that a comparison tells nothing of a key.
        self._is_loopback = service.config.is_loopback
        self._keys = [_hash(key.encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            if scope["path"] in WORK_PATHS:
                await self._service.turns.take()
            try:
                self._check(scope)
            except ApiError as error:
                response = error.response()
                if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                    response.headers["connection"] = "close"  # its body is not read
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._is_loopback:
            _check_host(headers.get("host", ""), self._service.config)
        if scope["method"] == "OPTIONS":
            return
        if self._keys and path not in self._open:
            self._check_key(headers.get("authorization", ""))
        if path in WORK_PATHS:
            self._service.check_room()

    def _check_key(self, given: str) -> None:
        scheme, _, key = given.partition(" ")
        found = _hash(key.strip().encode("latin-1", "replace"))
        # No `any`: each key is compared, whichever fits.
        fits = [hmac.compare_digest(found, known) for known in self._keys]
        if scheme.lower() != "bearer" or not sum(fits):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _check_host(host: str, config: ServeConfig) -> None:
    """Refuse a strange name for a loopback server: a web page may have made it point here."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() not in {*_LOOPBACK_NAMES, *map(str.lower, config.hosts)}:
        raise ApiError(
            403,
            f"the server listens on loopback and is called {name!r:.100}: start it with "
            "--allow-host to allow this name",
            code="host_not_allowed",
        )


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
