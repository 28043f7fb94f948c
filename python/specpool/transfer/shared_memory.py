"""Rows through shared memory, on Linux: `send` and `SharedMemoryReceiver`.

The sender fills a memfd, seals it and passes its descriptor over a Unix socket. The memory has no
name: when both processes have closed it, or are killed, it is gone. The seals keep the sender from
changing or cutting what the receiver reads. The socket's file is for its owner alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specpool.errors import ConfigError, TransferError, one_line
from specpool.transfer.image import FIXED_BYTES, MAX_HEADER, Bytes, parse_header
from specpool.transfer.layout import Layout
from specpool.transfer.parcel import Parcel, TakeIn

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MAX_MESSAGE = 4096
#: Seconds in which a peer must answer.
TIMEOUT = 10.0


class SharedMemoryReceiver:
    """Listens at a path for rows, and takes them in, one after the other, in a thread."""

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
            take_in: called with each whole image, in the receiver's thread.
            layout: the engine's.
            path: of the socket; it must not exist.
            timeout: seconds in which a peer must send what comes next.

        Raises:
            ConfigError: another receiver, or a file, is at the path.
        """
        self._take_in, self._layout, self._timeout = take_in, layout, timeout
        self._path, self.failures = Path(path), list[str]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"rows cannot be received at {path}: {error.strerror}") from None
        finally:
            os.umask(before)
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._run, name="specpool-rows", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(self._timeout + 1)
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
            with peer:
                peer.settimeout(self._timeout)
                try:
                    self._serve(peer)
                except Exception as error:
                    self.failures.append(one_line(error))
                    del self.failures[:-100]

    def _serve(self, peer: socket.socket) -> None:
        try:
            undo = self._receive(peer)
        except Exception as error:
            peer.sendall(b"\0" + one_line(error, _MAX_MESSAGE // 4).encode())
            raise
        try:
            peer.sendall(b"\1")
            if peer.recv(1) != b"\1":  # the sender has given the row up
                raise TransferError("the sender did not settle its row")
        except BaseException:
            undo()
            raise

    def _receive(self, peer: socket.socket) -> Callable[[], None]:
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        try:
            if len(descriptors) != 1:
                raise TransferError(f"a row is one descriptor, got {len(descriptors)}")
            return self._take(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _take(self, descriptor: int) -> Callable[[], None]:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise TransferError("the memory is not sealed: its sender could still change it")
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, FIXED_BYTES + MAX_HEADER, 0)
        total = parse_header(head, self._layout)[1].total
        if size != total:
            raise TransferError(f"the image has {size} bytes, its header says {total}")
        # Nobody keeps the view; the mapping goes with it.
        return self._take_in(np.frombuffer(mapped(descriptor, size), np.uint8))


_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map sealed memory. What is written to the mapping is seen by nobody else."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE  # torch warns of arrays that cannot be written
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=protection)


def send(parcel: Parcel, path: str | os.PathLike[str], *, timeout: float = 6 * TIMEOUT) -> None:
    """Send a row through shared memory; it ends here if it arrived, and goes on here if not.

    Args:
        parcel: the row; `Engine.export` gives it.
        path: the receiver's.
        timeout: seconds until the receiver must have taken it in.

    Raises:
        TransferError: the row did not arrive; the message says why.
    """
    try:
        _send(parcel, os.fspath(path), timeout)
    except OSError as error:
        raise TransferError(f"the row did not arrive at {path}: {one_line(error)}") from None
    finally:
        parcel.give_back()


def _send(parcel: Parcel, path: str, timeout: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout)
        peer.connect(path)
        descriptor = sealed(parcel)
        try:
            socket.send_fds(peer, [b"\1"], [descriptor])
        finally:
            os.close(descriptor)
        reply = peer.recv(1)
        if reply == b"\1":
            parcel.arrived()
            peer.sendall(b"\1")
            return
        message = peer.recv(_MAX_MESSAGE).decode(errors="replace") if reply else "it is gone"
        raise TransferError(f"{path} refused the row: {message}")


def sealed(parcel: Parcel) -> int:
    """Write a row's image to new shared memory that nobody can change; return its descriptor."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("specpool-row", flags)
    try:
        os.ftruncate(descriptor, parcel.num_bytes)
        with mmap.mmap(descriptor, parcel.num_bytes, flags=mmap.MAP_SHARED | _POPULATE) as memory:
            image: Bytes | None = np.frombuffer(memory, np.uint8)
            assert image is not None
            parcel.write(image)
            image = None  # the mapping closes only without views
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise
