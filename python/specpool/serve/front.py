"""`Front`: uvicorn's server, which takes connections a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

log = logging.getLogger("specpool.serve")

#: Connections that wait in the kernel until they are taken.
_BACKLOG = 4096
#: Connections that are taken in one round of the event loop.
_ACCEPTS = 4
#: Seconds until the next try if no connection can be taken, for example for want of descriptors.
_PAUSE = 0.1


class Front(uvicorn.Server):
    """uvicorn's server without its signals: `drain` comes before its shutdown.

    An event loop takes all connections that wait, and only then goes on: a crowd of thousands would
    stop every other answer for as long. This server takes a few, and then looks at the others.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        """Serve nothing yet."""
        super().__init__(config)
        self._arrivals: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections on the sockets."""
        for listener in sockets or ():
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener, self._take, listener)
        await super().startup(sockets=[])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and end those that are open."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        await super().shutdown(sockets)

    def _take(self, listener: socket.socket) -> None:
        """Take a few of the connections that wait."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be taken: %s", error.strerror)
                loop.remove_reader(listener)
                loop.call_later(_PAUSE, self._go_on, listener)
                return
            connection.setblocking(False)
            self._keep(loop.connect_accepted_socket(self._protocol, connection))

    def _go_on(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener, self._take, listener)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run the work; an event loop alone would not keep it alive."""
        task = asyncio.get_running_loop().create_task(work)
        self._arrivals.add(task)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[Any]) -> None:
        self._arrivals.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a connection was lost at once: %s", error)
