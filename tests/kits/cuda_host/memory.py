"""Memory that a kernel may touch: arguments, buffers behind a table, windows of a huge range."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

MAP_NORESERVE = 0x4000  # Linux; `mmap` has it from Python 3.13 on


class Tensor(Protocol):
    """The part of a `torch.Tensor` on the CPU that is used here."""

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

    A slot whose byte offset passes 2^31 needs no 2 GiB: give the kernel `address`, and open windows
    where it should read and write. Any other access is an error; in the fast build only if it hits
    a page of memory without a window.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.address: int = libc.mmap(None, size, 0, flags, -1, 0)
        if self.address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"no range of {size} bytes")
        self.windows: dict[tuple[int, int], None] = {}  # (offset, bytes), in the order of opening

    def window(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Open the bytes `[offset, offset + size)` for good; they are zero at first."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"window [{offset}, {offset + size}) of {self.size} bytes")
        first = (self.address + offset) & -mmap.PAGESIZE
        length = self.address + offset + size - first
        if _libc().mprotect(first, length, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.windows[offset, size] = None
        content = (ctypes.c_uint8 * size).from_address(self.address + offset)
        setattr(content, "buffer", self)  # noqa: B010 - the array keeps the range
        return np.ctypeslib.as_array(content)

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
        shape, strides, item = buffer.shape, buffer.strides, buffer.itemsize
        read_only = read_only or not buffer.flags.writeable
    else:
        item = buffer.element_size()
        shape, strides = buffer.shape, tuple(n * item for n in buffer.stride())
    if 0 in shape:
        return []
    extents = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    before = sum(min(extent, 0) for extent in extents)
    size = sum(abs(extent) for extent in extents) + item
    return [Span(address_of(buffer) + before, size, name, read_only)]


class Registration:
    """Buffers that kernels may touch, until `forget` or the end of `with`."""

    def __init__(self, buffers: Sequence[Buffer], name: str, read_only: bool) -> None:
        self.buffers, self.name, self.read_only = buffers, name, read_only

    def forget(self) -> None:
        """Takes the buffers back; a second call does nothing."""
        if self in _registered:
            _registered.remove(self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        self.forget()

    def spans(self) -> list[Span]:
        """The spans that they cover now: a virtual buffer may have got more windows."""
        spans = []
        for i, buffer in enumerate(self.buffers):
            name = self.name if len(self.buffers) == 1 else f"{self.name}[{i}]"
            spans += spans_of(buffer, name, read_only=self.read_only)
        return spans


_registered: list[Registration] = []


def register(*buffers: Buffer, name: str = "buffer", read_only: bool = False) -> Registration:
    """Tells the checker of buffers that kernels reach through a table of addresses, at once.

    Register no more than a kernel should touch: single slots of a pool, if only those. A kernel
    that then reads or writes another slot of the same pool is caught.

    Args:
        buffers: arrays, CPU tensors or virtual buffers (all windows that are open at the launch).
        name: what messages call them.
        read_only: a store to them is an error.

    Returns:
        A context manager that takes them back; without `with` they stay until its `forget()`.
    """
    registration = Registration(buffers, name, read_only)
    _registered.append(registration)
    return registration


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


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
