"""Rows through shared memory, on Linux: `SharedMemorySender` and `SharedMemoryReceiver`.

```text
  sender    1 and a descriptor: the image lies in this memory | 2: in the memory of the row before
  sender    3, as often as the image has runs: the next run of pages is written
  receiver  1 or 0 | bytes of the message u32 | message       a refusal ends the connection
  sender    1: it has given its row up                        -> else the receiver undoes its own
```

The head of the image is there before the first message, so the receiver takes the runs in while the
sender writes the next ones.

A connection has one memfd, which stays mapped on both sides, because the system takes longer to
give memory than a copy takes. It has no name: when both processes have closed it, or are killed, it
is gone. Its seals keep the sender from cutting what the receiver reads; the checksums find what
else it does. The socket's file is for its owner alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specpool.engine.transfer.image import FIXED_BYTES, MAX_HEADER, Bytes, most_bytes, parse_header
from specpool.engine.transfer.layout import Layout
from specpool.engine.transfer.parcel import Parcel, TakeIn
from specpool.errors import ConfigError, TransferError, one_line

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NEW, _SAME, _RUN, _SETTLED = b"\1", b"\2", b"\3", b"\1"
_REPLY = struct.Struct("<BI")
_MAX_MESSAGE = 4096
#: Senders that may be connected to a receiver.
MAX_PEERS = 16
#: Seconds in which a peer must answer.
TIMEOUT = 10.0
# The system gives all memory at once, not page by page when it is touched.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class SharedMemoryReceiver:
    """Listens at a path for rows, and takes them in, one after the other, in threads."""

    def __init__(
        self,
        take_in: TakeIn,
        layout: Layout,
        path: str | os.PathLike[str],
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        """Listen at `path`.

        Args:
            take_in: called with each image, one at a time, while its sender writes it.
            layout: the engine's.
            path: of the socket. One that a killed process has left is replaced.
            timeout: seconds in which a peer must settle a row.

        Raises:
            ConfigError: another receiver, or a file, is at the path.
        """
        self._take_in, self._layout, self._timeout = take_in, layout, timeout
        self._path, self.failures = Path(path), list[str]()
        self._turn = threading.Lock()  # of the row that is taken in
        self._peers = dict[socket.socket, threading.Thread]()
        self._socket = _listening(self._path)
        self._thread = threading.Thread(target=self._run, name="specpool-rows", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, settle the row that is in, hang up, and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(self._timeout + 1)
        with self._turn:
            peers = dict(self._peers)
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        for thread in peers.values():
            thread.join(self._timeout + 1)
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> SharedMemoryReceiver:
        """Return the receiver itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if len(self._peers) >= MAX_PEERS:
                peer.close()
                continue
            thread = threading.Thread(target=self._serve, args=[peer], daemon=True)
            self._peers[peer] = thread
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            memory: Bytes | None = None
            while (memory := self._row(peer, memory)) is not None:
                pass
        except Exception as error:  # the next peer is served all the same
            self.failures.append(one_line(error))
            del self.failures[:-100]
        finally:
            self._peers.pop(peer, None)
            peer.close()

    def _row(self, peer: socket.socket, memory: Bytes | None) -> Bytes | None:
        """Take the next row of a peer; return the memory that it lay in, None at the end."""
        peer.settimeout(None)
        kind, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        if not kind:
            return None
        peer.settimeout(self._timeout)
        with self._turn:
            try:
                max_bytes = 2 * most_bytes(self._layout)  # the sender's memory may be twice its row
                memory = _received(kind, descriptors, memory, max_bytes)
                head = memory[: FIXED_BYTES + MAX_HEADER].tobytes()
                places = parse_header(head, self._layout)[1]
                if places.total > len(memory):
                    raise TransferError(
                        f"the memory has {len(memory)} bytes, the header says {places.total}"
                    )
                runs = _Runs(peer, places.num_runs)
                undo = self._take_in(memory[: places.total], runs.wait)
            except Exception as error:
                message = one_line(error, _MAX_MESSAGE // 4).encode()
                with contextlib.suppress(OSError):  # why the row did not come says more
                    peer.sendall(_REPLY.pack(0, len(message)) + message)
                raise
            self._settle(peer, undo)
        return memory

    def _settle(self, peer: socket.socket, undo: Callable[[], None]) -> None:
        """Tell the sender, and undo what was taken in if it does not hear of it."""
        try:
            peer.sendall(_REPLY.pack(1, 0))
            if peer.recv(1) != _SETTLED:
                raise TransferError("the sender did not settle its row")
        except BaseException:
            undo()
            raise


class _Runs:
    """The runs that a sender has written, as it says over the connection."""

    def __init__(self, peer: socket.socket, num_runs: int) -> None:
        self._peer, self._num_runs, self._num_there = peer, num_runs, 0

    def wait(self, num: int) -> None:
        """Return when `num` runs are there.

        Raises:
            TransferError: the sender is gone, silent, or says something else.
        """
        while self._num_there < num:
            where = f"after run {self._num_there} of {self._num_runs}"
            try:
                received = self._peer.recv(self._num_runs - self._num_there)
            except TimeoutError:
                raise TransferError(f"the sender is silent {where}") from None
            if not received:
                raise TransferError(f"the sender is gone {where}")
            if received.strip(_RUN):
                raise TransferError(f"the sender says {received[:80]!r} {where}")
            self._num_there += len(received)


def _listening(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, for the owner alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        if _is_left(path):
            path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(MAX_PEERS)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"rows cannot be received at {path}: {one_line(error)}") from None
    finally:
        os.umask(before)


def _is_left(path: Path) -> bool:
    """Whether a socket is at the path, and nobody listens."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def _received(kind: bytes, descriptors: list[int], memory: Bytes | None, max_bytes: int) -> Bytes:
    """Return the memory of the next row, of at most `max_bytes` bytes; close the descriptors."""
    try:
        if kind == _SAME and memory is not None and not descriptors:
            return memory
        if kind != _NEW or len(descriptors) != 1:
            raise TransferError(f"a row is one descriptor, got {len(descriptors)}")
        try:
            seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise TransferError("the memory is not sealed: its sender could still cut it")
        size, flags = os.fstat(descriptors[0]).st_size, mmap.MAP_SHARED | _POPULATE
        if not size:
            raise TransferError("the memory is empty")
        if size > max_bytes:  # to map it would take it, whatever the sender has written
            raise TransferError(
                f"the memory has {size} bytes, a row of this layout needs {max_bytes} at most"
            )
        mapped = mmap.mmap(descriptors[0], size, flags=flags, prot=mmap.PROT_READ)
        return np.frombuffer(mapped, np.uint8)  # the mapping goes with its last view
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class SharedMemorySender:
    """Sends rows to the receiver at a path, one after the other, over one connection.

    It connects with the first row, and again after an error. Until `close`, it holds as much memory
    as the largest row needed, at most twice as much.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 6 * TIMEOUT) -> None:
        """Prepare; nothing is connected yet.

        Args:
            path: the receiver's.
            timeout: seconds until the receiver must have taken a row in.
        """
        self._path, self._timeout = os.fspath(path), timeout
        self._peer: socket.socket | None = None
        self._memory: Bytes | None = None

    def send(self, parcel: Parcel) -> None:
        """Send a row; it ends here if it arrived, and goes on here if not.

        Raises:
            TransferError: the row did not arrive; the message says why.
        """
        try:
            self._send(parcel)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                why = f"the row did not arrive at {self._path}: {one_line(error)}"
                raise TransferError(why) from None
            raise
        finally:
            parcel.give_back()

    def close(self) -> None:
        """Hang up, and give the memory back."""
        peer, self._peer, self._memory = self._peer, None, None
        if peer is not None:
            peer.close()

    def __enter__(self) -> SharedMemorySender:
        """Return the sender itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _send(self, parcel: Parcel) -> None:
        peer, size = self._connected(), parcel.num_bytes
        descriptor, memory = None, self._memory
        if memory is None or len(memory) < size:
            descriptor, memory = _new(max(size, 0 if memory is None else 2 * size))

        def told(num_runs: int) -> None:
            if num_runs:
                peer.sendall(_RUN)
            elif descriptor is None:
                peer.sendall(_SAME)
            else:
                socket.send_fds(peer, [_NEW], [descriptor])

        try:
            with contextlib.suppress(ConnectionError):  # it refuses early: its answer says why
                parcel.write(memory[:size], told)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._memory = memory
        reply = _read(peer, _REPLY.size)
        is_in, left = _REPLY.unpack(reply) if len(reply) == _REPLY.size else (0, 0)
        if not is_in:
            message = _read(peer, min(left, _MAX_MESSAGE)).decode(errors="replace")
            raise TransferError(f"{self._path} refused the row: {message or 'it is gone'}")
        # Of a row whose last word is lost neither side has anything; the other order could leave it
        # on both.
        parcel.arrived()
        peer.sendall(_SETTLED)

    def _connected(self) -> socket.socket:
        if self._peer is not None and _is_open(self._peer):
            return self._peer
        self.close()
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peer.settimeout(self._timeout)
        self._peer.connect(self._path)
        return self._peer


def _is_open(peer: socket.socket) -> bool:
    """Whether the receiver has not hung up: it says nothing between two rows."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return not poll.poll(0)


def _read(peer: socket.socket, size: int) -> bytes:
    """Read `size` bytes; fewer if the other side is gone."""
    read = b""
    while len(read) < size and (piece := peer.recv(size - len(read))):
        read += piece
    return read


def _new(size: int) -> tuple[int, Bytes]:
    """Return a descriptor of new memory that nobody can cut, and its bytes, uint8 [size]."""
    descriptor = os.memfd_create("specpool-row", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | _POPULATE)
        return descriptor, np.frombuffer(mapped, np.uint8)
    except BaseException:
        os.close(descriptor)
        raise


def send(parcel: Parcel, path: str | os.PathLike[str], *, timeout: float = 6 * TIMEOUT) -> None:
    """Send one row over a connection of its own, as `SharedMemorySender.send` does."""
    with SharedMemorySender(path, timeout=timeout) as sender:
        sender.send(parcel)
