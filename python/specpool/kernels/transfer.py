"""Copies between host and device without waiting: `upload` of many arrays at once, `Download`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.errors import OrderError

_ALIGNMENT = 16


class _Thread(threading.local):
    """What each thread has of its own: another one may serve while this one captures."""

    refuses_transfers = False


_thread = _Thread()


@contextlib.contextmanager
def no_transfers() -> Iterator[None]:
    """Make every transfer of this thread raise `OrderError` within the block, during a capture.

    Each replay would repeat the transfer with host memory that has another use by then.
    """
    before, _thread.refuses_transfers = _thread.refuses_transfers, True
    try:
        yield
    finally:
        _thread.refuses_transfers = before


def _check(action: str) -> None:
    if _thread.refuses_transfers:
        raise OrderError(f"{action} within the capture of a graph")


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copy arrays of any dtypes and shapes to tensors on `device`.

    A CPU tensor shares the memory of a writable array. On a GPU all arrays go in one copy from
    pinned memory, on torch's current stream, and the host does not wait.

    Raises:
        OrderError: called within `no_transfers`.
    """
    _check(f"an upload of {len(arrays)} arrays")
    if device.type == "cpu":
        return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    spans = spans_of(arrays)
    staged = torch.empty(spans[-1].stop, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(arrays, spans, staged.numpy())
    return unpack(arrays, spans, staged.to(device, non_blocking=True))


def overwrite(tensor: Tensor, array: NDArray[Any]) -> None:
    """Copy an array into a contiguous tensor of its dtype and shape; the host does not wait.

    Raises:
        OrderError: called within `no_transfers`.
    """
    _check("an upload")
    staged = torch.from_numpy(array)
    if tensor.device.type == "cuda":
        staged = staged.pin_memory()
    tensor.copy_(staged, non_blocking=True)


def spans_of(arrays: Sequence[NDArray[Any]]) -> list[slice]:
    """Return the slice of a common byte buffer for each array."""
    spans, end = [], 0
    for array in arrays:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        spans.append(slice(start, end))
    return spans


def pack(arrays: Sequence[NDArray[Any]], spans: Sequence[slice], target: NDArray[np.uint8]) -> None:
    """Write the bytes of each array into its span."""
    for array, span in zip(arrays, spans, strict=True):
        target[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def unpack(arrays: Sequence[NDArray[Any]], spans: Sequence[slice], packed: Tensor) -> list[Tensor]:
    """Return a view of `packed` for each array, with its dtype and shape."""
    return [
        packed[span].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, span in zip(arrays, spans, strict=True)
    ]


def mark(device: torch.device) -> Any:
    """Return an event behind all work launched on torch's current stream of `device`.

    The thread's current device may be another. On a CPU the event is None: the work is done.
    """
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda  # only some versions of torch have types for its events
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


class Download:
    """A copy of a tensor to the host. Work that is launched after it does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy on torch's current stream.

        Raises:
            OrderError: called within `no_transfers`.
        """
        _check("a download")
        self._event: Any = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()  # a copy, because a graph's next replay overwrites `tensor`
        else:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = mark(tensor.device)

    def array(self) -> NDArray[Any]:
        """Wait until the copy is done, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
