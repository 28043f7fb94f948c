"""`Lines`: the sockets on which rank 0 sends its records, one to each other rank.

A broadcast of gloo passes two threads on each side, which takes longer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Any, Protocol

from specpool.engine.ranks.record import HEAD_BYTES, payload_bytes
from specpool.errors import RankError

_LOOPBACK = "127.0.0.1"
#: The name in the store of rank 0's port and of the secret that a caller must send.
_KEY = "records"
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")  # the secret, the caller's rank
#: Bytes of one read; most records are smaller and come whole.
_PIECE = 64 << 10
#: Seconds that a caller has for its first bytes.
_HELLO_SECONDS = 5.0


class Store(Protocol):
    """What all ranks can read."""

    def set(self, key: str, value: str) -> Any:
        """Keep a text."""

    def get(self, key: str) -> bytes:
        """Wait for a text."""


class Lines:
    """This rank's end of the sockets.

    Attributes:
        key: seals the records of this group, 32 bytes.
    """

    def __init__(self, sockets: list[socket.socket], key: bytes, timeout: float) -> None:
        """Use these sockets: on rank 0 one to each other rank, else the one to rank 0.

        Args:
            sockets: connected ones; `close` closes them.
            key: seals the records.
            timeout: seconds that a call waits for a peer.
        """
        self._sockets, self.key = sockets, key
        self._received = bytearray()  # what has come of the next record
        for peer in sockets:
            peer.settimeout(timeout)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def open(
        cls,
        store: Store,
        rank: int,
        world: int,
        host: str | None,
        timeout: float,
        secret: bytes = b"",
    ) -> Lines:
        """Connect rank 0 with the others, which must call it together.

        Args:
            store: tells the others rank 0's port, and a secret of this group.
            rank: this rank.
            world: the number of ranks.
            host: the address of rank 0's machine; None if all ranks are on this machine, and
                nothing listens beyond loopback.
            timeout: seconds that a call waits for a peer.
            secret: what all ranks know and never send, at most 64 bytes. The key of the records is
                made of it and of the secret in the store.

        Raises:
            RankError: not all ranks came within the timeout.
        """
        if rank:
            port, text = store.get(_KEY).decode().split()
            token = bytes.fromhex(text)
            line = socket.create_connection((host or _LOOPBACK, int(port)), timeout)
            line.sendall(_HELLO.pack(token, rank))
            return cls([line], _key_of(token, secret), timeout)
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server(("" if host else _LOOPBACK, 0), backlog=world) as listener:
            store.set(_KEY, f"{listener.getsockname()[1]} {token.hex()}")
            callers = _callers(listener, token, world, timeout)
            return cls(callers, _key_of(token, secret), timeout)

    def send(self, frame: bytes) -> None:
        """Send a record from rank 0 to all others.

        Raises:
            OSError: a rank has gone, or has not read for `timeout` seconds.
        """
        for peer in self._sockets:
            peer.sendall(frame)

    def receive(self) -> bytes:
        """Wait for rank 0's next record.

        Raises:
            OSError: rank 0 has gone, or said nothing for `timeout` seconds.
            RankError: what came is not a record.
        """
        while (size := _size_of(self._received)) > len(self._received):
            piece = self._sockets[0].recv(_PIECE)
            if not piece:
                raise ConnectionResetError("the connection was closed")
            self._received += piece
        frame, self._received = bytes(self._received[:size]), self._received[size:]
        return frame

    def close(self) -> None:
        """Close the sockets."""
        for peer in self._sockets:
            peer.close()


def _size_of(received: bytearray) -> int:
    """Return the bytes of the record that begins so, as far as they are known."""
    return HEAD_BYTES + payload_bytes(received) if len(received) >= HEAD_BYTES else HEAD_BYTES


def _key_of(token: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(token, key=secret, digest_size=32).digest()


def _callers(
    listener: socket.socket, token: bytes, world: int, timeout: float
) -> list[socket.socket]:
    """Wait for a call of each other rank. Drop callers without the secret.

    Raises:
        RankError: one does not come in time.
    """
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + timeout
    while len(peers) < world - 1:
        try:
            listener.settimeout(max(end - time.monotonic(), 0.001))
            caller, _ = listener.accept()
        except OSError as error:
            missing = sorted(set(range(1, world)) - set(peers))
            for peer in peers.values():
                peer.close()
            raise RankError(f"ranks {missing} did not call within {timeout:g} s") from error
        caller.settimeout(_HELLO_SECONDS)
        try:
            hello_token, rank = _HELLO.unpack(_read(caller, _HELLO.size))
        except OSError:
            hello_token, rank = b"", 0
        if hmac.compare_digest(hello_token, token) and 0 < rank < world and rank not in peers:
            peers[rank] = caller
        else:
            caller.close()
    return [peers[rank] for rank in sorted(peers)]


def _read(line: socket.socket, size: int) -> bytearray:
    """Read `size` bytes.

    Raises:
        OSError: the peer has gone, or sends nothing for the socket's timeout.
    """
    data = bytearray(size)
    view = memoryview(data)
    while len(view):
        count = line.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection was closed")
        view = view[count:]
    return data
