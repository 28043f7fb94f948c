"""`GuardedProtocol`: uvicorn's HTTP protocol with limits on headers, their time and connections."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specpool.serve.api.errors import ApiError
from specpool.serve.config import ServeConfig


def guarded(serve: ServeConfig) -> type[HttpToolsProtocol]:
    """Return the protocol class for a server with these limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": serve})


class GuardedProtocol(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it, with an answer."""

    limits: ServeConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._refusal: ApiError | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is room for it."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head that has not ended count."""
        if self._refusal is not None:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_header:
                self._refuse()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        # For answers whose client does not read: a plain close would wait for it.
        self.scope["specpool.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """End the head."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        error = self._refusal or ApiError(400, "this is no HTTP request", code="bad_request")
        response = error.response()
        head = [f"HTTP/1.1 {error.status} Refused".encode()]
        head += [name + b": " + value for name, value in response.raw_headers]
        head += [b"connection: close", b"", bytes(response.body)]
        self._stop_waiting()
        self.transport.write(b"\r\n".join(head))
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.max_header:
            self._refusal = self._too_long()
            raise ValueError("the head is too long")  # the parser then asks for the answer

    def _refuse(self) -> None:
        self._refusal = self._too_long()
        self.send_400_response("")

    def _too_long(self) -> ApiError:
        return ApiError(
            431,
            f"the request's line and headers have more than {self.limits.max_header} bytes",
            code="headers_too_large",
        )

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self.limits.read_timeout, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        """End a connection whose request did not come in time."""
        if self._head_bytes:
            self._refusal = ApiError(
                408, f"no request came within {self.limits.read_timeout:g} s", code="read_timeout"
            )
            self.send_400_response("")
        else:
            self.transport.close()
