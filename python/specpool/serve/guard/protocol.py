"""`GuardedProtocol`: uvicorn's HTTP protocol with limits on headers, their time and connections."""

from __future__ import annotations

import contextlib
import sys
from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specpool.serve.api.errors import ApiError
from specpool.serve.config import ServeConfig
from specpool.serve.guard.parser import Http1Parser

#: Seconds in which a refused client may go on sending: to close at once would cut off the answer.
_LINGER = 2.0


def guarded(serve: ServeConfig) -> type[HttpToolsProtocol]:
    """Return the protocol class for a server with these limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": serve, "idle": {}})


class GuardedProtocol(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it, with an answer.

    A client that takes nothing of its answer for `write_timeout` seconds is cut off. If there are
    too many connections, the one that is idle for the longest time makes room.

    Attributes:
        limits: the server's options.
        idle: the server's connections without a request, longest first.
    """

    parser: Http1Parser
    limits: ServeConfig
    idle: dict[GuardedProtocol, None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Http1Parser(self)
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None  # looks whether the client reads
        self._num_unread = 0  # bytes that it had not read at the latest look
        self._in_head = True
        self._head_bytes = 0  # of the head's parts that the parser has reported
        self._received_bytes = 0  # of a head that has not ended, as they come
        self._unanswered: list[RequestResponseCycle] = []  # requests, in their order
        self._refusal: ApiError | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is room for it."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections and not self._make_room():
            transport.abort()
            return
        self.idle[self] = None
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and tell all its requests that the client has left.

        uvicorn tells the latest one alone: the one before it, which runs, would go on.
        """
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()
        self._stop_waiting()
        self._stop_looking()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head that has not ended count."""
        if self._refusal is not None:
            return
        super().data_received(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_head:
            end = data.rfind(b"\r\n\r\n")  # of an earlier head, if there is one
            self._received_bytes += len(data) - (0 if end < 0 else end + 4)
            if self._received_bytes > self.limits.max_header:
                self._refuse()
        elif self.cycle.response_complete and self._timer is None:
            # Behind an answer: the rest of a body that nobody reads, or empty lines. They have
            # ended uvicorn's wait for the next request.
            self._timer = self.loop.call_later(self.limits.read_timeout, self.transport.close)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.idle.pop(self, None)
        self._in_head, self._head_bytes, self._received_bytes = True, 0, 0
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
        """End the head; that of an offer comes again without it."""
        if self.parser.is_offer:
            return
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        earlier = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered = [*earlier, self.cycle]

    def on_message_complete(self) -> None:
        """End a request; that of an offer has not begun."""
        if not self.parser.is_offer:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """End an answer; what the client has not read yet is still in the buffer."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._look()
        else:
            self._note_idle()

    def pause_writing(self) -> None:
        """Stop writing: the client reads too slowly."""
        super().pause_writing()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, with an error in OpenAI's shape."""
        error = self._refusal or ApiError(400, "this is no HTTP request", code="bad_request")
        self._refusal = error  # what else comes is not read
        response = error.response()
        head = [f"HTTP/1.1 {error.status} Refused".encode()]
        head += [name + b": " + value for name, value in response.raw_headers]
        head += [b"connection: close", b"", bytes(response.body)]
        self._stop_waiting()
        if any(cycle.response_started for cycle in self._unanswered if not cycle.response_complete):
            self.transport.close()  # in the middle of another answer it would be a part of that
            return
        self.transport.write(b"\r\n".join(head))
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # its request ends too
            return
        self.transport.write_eof()
        self.idle[self] = None
        self._timer = self.loop.call_later(_LINGER, self.transport.close)

    def _make_room(self) -> bool:
        """End the connection that is idle for the longest time; return whether there was one."""
        for connection in self.idle:
            del self.idle[connection]
            connection.connections.discard(connection)  # it is lost a moment later
            connection.transport.abort()
            return True
        return False

    def _look(self) -> None:
        """Look from now on whether the client reads."""
        if self._unread is None:
            self._num_unread = _num_unread(self.transport)
            self._unread = self.loop.call_later(self.limits.write_timeout, self._look_again)

    def _look_again(self) -> None:
        """Cut off a client that has read nothing since the latest look."""
        self._unread = None
        if not self.transport.get_write_buffer_size():  # what is left is the system's
            self._note_idle()
        elif _num_unread(self.transport) >= self._num_unread:
            self.transport.abort()
        else:
            self._look()

    def _note_idle(self) -> None:
        """Count as idle, unless there is a request."""
        if self.cycle.response_complete and not (self._in_head and self._received_bytes):
            self.idle[self] = None

    def _stop_looking(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
        if self._received_bytes:
            self._refusal = ApiError(
                408, f"no request came within {self.limits.read_timeout:g} s", code="read_timeout"
            )
            self.send_400_response("")
        else:
            self.transport.close()


def _num_unread(transport: Transport) -> int:
    """Return the bytes that a client has not taken yet, as far as the system reports them."""
    queued = bytearray(4)
    with contextlib.suppress(OSError, ImportError):
        import fcntl
        import termios

        # The system takes more only when a part of its own buffer is free: long after a byte left.
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return int(transport.get_write_buffer_size()) + int.from_bytes(queued, sys.byteorder)
