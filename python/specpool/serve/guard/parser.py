"""`Http1Parser`: reads requests as HTTP/1.1, also those that offer another protocol."""

from __future__ import annotations

from array import array
from typing import Protocol

import httptools


class HasHead(Protocol):
    """A protocol that keeps the latest head: its target and its headers."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class Http1Parser(httptools.HttpRequestParser):
    """A parser that goes on behind a head with `Upgrade`, as a server may that ignores the offer.

    httptools ends such a request behind its head, so that its body is lost, or taken for the next
    request. Java's client offers HTTP/2 with the first request of each connection.
    """

    def __init__(self, protocol: HasHead) -> None:
        """Report to `protocol`. It must ignore a request while `is_offer`: its head comes again."""
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        """Forget what was read; httptools' `__init__` begins anew as often as it is called."""
        super().__init__(self._protocol)
        # As uvicorn does: a client may send a further request behind one with `Connection: close`.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def is_offer(self) -> bool:
        """Whether the request that is read offers another protocol; `CONNECT` asks for one."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        """Read the next bytes; the head of an offer is read again without `Upgrade`."""
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self.is_offer:
                    raise
                data = self._plain_head() + bytes(memoryview(data)[stop.args[0] :])
                self._begin()  # an offer with `Connection: close` has ended all reading

    def _plain_head(self) -> bytes:
        """Return the latest head without `Upgrade`."""
        version = self.get_http_version().encode()
        lines = [self.get_method() + b" " + self._protocol.url + b" HTTP/" + version]
        headers = self._protocol.headers
        lines += [name + b": " + value for name, value in headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
