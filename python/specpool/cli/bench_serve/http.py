"""`Caller`: a small asyncio client for one server, parsed by httptools; it needs little CPU."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import SplitResult

import httptools


class CallFailed(Exception):  # noqa: N818 - it is counted, not fatal
    """A request that got no whole answer, or an error."""


class _Exchange(asyncio.Protocol):
    """One connection; it reads one answer at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_whole = False
        self.status = 0
        self.is_lost = False
        self.keeps_alive = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.is_lost = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._wake()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True
        self.keeps_alive = self._parser.should_keep_alive()

    def send(self, head: bytes, body: bytes) -> None:
        assert self.transport is not None
        self._parts, self._is_whole, self.status = [], False, 0
        self.transport.write(head + body)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            CallFailed: the answer was cut.
        """
        while True:
            if self._parts:
                body, self._parts = b"".join(self._parts), []
                yield body
            elif self._is_whole:
                return
            elif self.is_lost:
                raise CallFailed("the connection was cut")
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Caller:
    """Calls one server; connections are kept for later calls."""

    def __init__(self, url: SplitResult, api_key: str | None) -> None:
        """Call the server at `url`, whose path comes in front of every path."""
        self.url = url.geturl()
        self._host, self._prefix = url.hostname or "", url.path.rstrip("/")
        self._is_tls = url.scheme == "https"
        self._port = url.port or (443 if self._is_tls else 80)
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._fixed = f"host: {name}:{self._port}\r\n"
        if api_key:
            self._fixed += f"authorization: Bearer {api_key}\r\n"
        self._idle: list[_Exchange] = []

    async def whole(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Return the status and the body of an answer.

        Raises:
            CallFailed: there was none, or it was cut.
        """
        exchange = await self._send(method, path, body)
        try:
            content = b"".join([part async for part in exchange.parts()])
        except BaseException:
            self._drop(exchange)
            raise
        self._give_back(exchange)
        return exchange.status, content

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Yield the events of a stream, until `[DONE]`.

        Raises:
            CallFailed: the answer is an error, or the stream was cut or ended with one.
        """
        exchange = await self._send("POST", path, body)
        try:
            held, is_done = b"", False
            async for part in exchange.parts():
                held += part
                if exchange.status != 200:
                    continue
                *blocks, held = held.replace(b"\r\n", b"\n").split(b"\n\n")
                for block in blocks:
                    data = b"".join(
                        line[5:].strip() for line in block.split(b"\n") if line[:5] == b"data:"
                    )
                    if data == b"[DONE]":
                        is_done = True
                    elif data:
                        yield _checked(json.loads(data))
            if exchange.status != 200:
                raise CallFailed(f"{exchange.status}: {held[:200].decode(errors='replace')}")
            if not is_done:
                raise CallFailed("the stream ended without [DONE]")
        except BaseException:  # also when the reader leaves
            self._drop(exchange)
            raise
        self._give_back(exchange)

    def close(self) -> None:
        """Close the connections that are kept."""
        for exchange in self._idle:
            self._drop(exchange)
        self._idle.clear()

    async def _send(self, method: str, path: str, body: Any) -> _Exchange:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}"
        if content:
            head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
        exchange = await self._connection()
        exchange.send(f"{head}\r\n".encode(), content)
        return exchange

    async def _connection(self) -> _Exchange:
        while self._idle:
            exchange = self._idle.pop()
            if not exchange.is_lost:
                return exchange
        context = ssl.create_default_context() if self._is_tls else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Exchange, self._host, self._port, ssl=context
            )
        except OSError as error:
            raise CallFailed(f"no connection: {error.strerror or error}") from None
        return connection

    def _give_back(self, exchange: _Exchange) -> None:
        if exchange.keeps_alive and not exchange.is_lost:
            self._idle.append(exchange)
        else:
            self._drop(exchange)

    def _drop(self, exchange: _Exchange) -> None:
        if exchange.transport is not None:
            exchange.transport.abort()


def _checked(event: Any) -> Any:
    if isinstance(event, dict) and "error" in event:
        raise CallFailed(f"an error in the stream: {str(event['error'])[:200]}")
    return event
