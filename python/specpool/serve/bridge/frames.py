"""Lists of messages as frames on a socket: 8 bytes of length, then a pickle.

Both ends are processes of one server, started by it; nobody else can write to the socket.
"""

from __future__ import annotations

import pickle
import select
import socket
from typing import Any

#: Bytes of a frame's length.
HEAD = 8


def frame_of(messages: list[Any]) -> bytes:
    """Return the frame of a list of messages."""
    content = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(HEAD, "little") + content


class SocketLine:
    """The engine's end of a socket; its calls wait."""

    def __init__(self, sock: socket.socket) -> None:
        """Read and write frames on this socket."""
        self._socket = sock
        sock.setblocking(True)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def poll(self, timeout: float | None) -> bool:
        """Return whether a frame has begun to come; wait up to `timeout` seconds, or for ever."""
        return bool(self._poll.poll(None if timeout is None else 1e3 * timeout))

    def recv(self) -> list[Any]:
        """Return the next list of messages.

        Raises:
            EOFError: the other end is gone.
        """
        size = int.from_bytes(self._exactly(HEAD), "little")
        messages: list[Any] = pickle.loads(self._exactly(size))
        return messages

    def send(self, messages: list[Any]) -> None:
        """Send a list of messages.

        Raises:
            OSError: the other end is gone.
        """
        self._socket.sendall(frame_of(messages))

    def _exactly(self, size: int) -> bytearray:
        content, have = bytearray(size), 0
        view = memoryview(content)
        while have < size:
            count = self._socket.recv_into(view[have:])
            if not count:
                raise EOFError
            have += count
        return content
