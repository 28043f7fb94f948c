"""Memory that a kernel may touch: arguments, buffers behind a table of addresses, windows of a huge range."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Tensor(Protocol):
    """What is used of a `torch.Tensor` on the CPU."""

    device: Any
    shape: Any

    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Span:
    """Bytes `[address, address + size)`."""

    address: int
    size: int
    name: str
    read_only: bool = False

    @property
    def end(self) -> int:
        return self.address + self.size


class VirtualBuffer:
    """A range of addresses, gigabytes of them, of which only the windows exist.

    A slot whose byte offset passes 2^31 needs no 2 GiB: give the kernel `address` and open windows where
    it should read and write. Any other access is an error, in the fast build too (to the memory page).

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE
        self.address: int = libc.mmap(None, size, 0, flags, -1, 0)
        if self.address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"no range of {size} bytes")
        self.windows: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}

    def window(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes `[offset, offset + size)`, zero at first; a view that must not outlive the buffer."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"window [{offset}, {offset + size}) of {self.size} bytes")
        if (offset, size) not in self.windows:
            first = (self.address + offset) & -mmap.PAGESIZE
            length = self.address + offset + size - first
            if _libc().mprotect(first, length, mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            content = (ctypes.c_uint8 * size).from_address(self.address + offset)
            self.windows[offset, size] = np.frombuffer(content, np.uint8)
        return self.windows[offset, size]

    def __del__(self) -> None:
        if getattr(self, "address", None):
            _libc().munmap(self.address, self.size)


Buffer = npt.NDArray[Any] | Tensor | VirtualBuffer


def is_tensor(value: object) -> bool:
    return hasattr(value, "data_ptr")


def address_of(buffer: Buffer) -> int:
    """Where the buffer's first element lies; for a table of layer pointers (int64)."""
    if isinstance(buffer, VirtualBuffer):
        return buffer.address
    if isinstance(buffer, np.ndarray):
        return buffer.ctypes.data
    if buffer.device.type != "cpu":
        raise ValueError(f"a tensor on {buffer.device} was given to the host runner")
    return buffer.data_ptr()


def pointer_table(buffers: Iterable[Buffer]) -> npt.NDArray[np.int64]:
    """int64 [len(buffers)], the address of each; `register` the buffers too."""
    return np.array([address_of(b) for b in buffers], np.int64)


def spans_of(buffer: Buffer, name: str, *, read_only: bool = False) -> list[Span]:
    """What the buffer covers; of a strided view, from its first to its last element."""
    if isinstance(buffer, VirtualBuffer):
        return [
            Span(buffer.address + offset, size, f"{name}[{offset}:{offset + size}]", read_only)
            for offset, size in buffer.windows
        ]
    if isinstance(buffer, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(buffer) if buffer.size else (0, 0)
        return [Span(low, high - low, name, read_only or not buffer.flags.writeable)]
    extents = [(n - 1) * step for n, step in zip(buffer.shape, buffer.stride(), strict=True)]
    empty = any(n == 0 for n in buffer.shape)
    size = 0 if empty else (sum(extents) + 1) * buffer.element_size()
    return [Span(address_of(buffer), size, name, read_only)]


@dataclass(eq=False)
class register:  # noqa: N801 - reads as a verb, with or without `with`
    """Tells the checker of buffers that kernels reach through a table of addresses.

    Registers at once. As a context manager it takes them back at the end; else they stay until
    `forget()`. Register no more than the kernel should touch: single slots of a pool, if only those.

    Args:
        buffers: arrays, CPU tensors or virtual buffers (all windows that are open at the launch).
        name: what messages call them.
        read_only: a store to them is an error.
    """

    buffers: tuple[Buffer, ...] = field(init=False)
    name: str
    read_only: bool

    def __init__(self, *buffers: Buffer, name: str = "buffer", read_only: bool = False) -> None:
        self.buffers, self.name, self.read_only = buffers, name, read_only
        _registered.append(self)

    def forget(self) -> None:
        if self in _registered:
            _registered.remove(self)

    def __enter__(self) -> register:
        return self

    def __exit__(self, *error: object) -> None:
        self.forget()

    def spans(self) -> list[Span]:
        many = len(self.buffers) > 1
        names = [f"{self.name}[{i}]" if many else self.name for i in range(len(self.buffers))]
        found = []
        for buffer, name in zip(self.buffers, names, strict=True):
            found += spans_of(buffer, name, read_only=self.read_only)
        return found


_registered: list[register] = []


def registered_spans() -> list[Span]:
    return [span for registration in _registered for span in registration.spans()]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order: those that overlap become one.

    Raises:
        ValueError: a read-only span overlaps a writeable one without being a part of it.
    """
    result: list[Span] = []
    for span in sorted((s for s in spans if s.size), key=lambda s: (s.address, -s.size)):
        last = result[-1] if result else None
        if last is None or span.address >= last.end:
            result.append(span)
            continue
        if last.read_only != span.read_only:
            inside = span.end <= last.end and not last.read_only
            same = (span.address, span.end) == (last.address, last.end)
            if not inside and not same:
                raise ValueError(
                    f"{last.name} and {span.name} overlap and one of them is read-only"
                )
        name = last.name if span.name in last.name.split(" = ") else f"{last.name} = {span.name}"
        read_only = last.read_only and span.read_only
        result[-1] = Span(last.address, max(last.end, span.end) - last.address, name, read_only)
    return result


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
