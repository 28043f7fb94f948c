"""Between host and device without waiting: many arrays in one copy there, results back later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.errors import OrderError

_ALIGNMENT = 16

_is_refused = False


@contextlib.contextmanager
def no_transfers() -> Iterator[None]:
    """Within, while a graph is captured, every transfer raises OrderError.

    Each replay would repeat it from, or to, host memory that is somebody else's by then.
    """
    global _is_refused
    before, _is_refused = _is_refused, True
    try:
        yield
    finally:
        _is_refused = before


def _check(what: str) -> None:
    if _is_refused:
        raise OrderError(f"{what} within the capture of a graph")


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Tensors on `device` with what the arrays hold, any dtypes and shapes.

    A CPU tensor shares the memory of an array that can be written. Elsewhere all arrays travel in
    one copy out of pinned memory, in the order of torch's current stream: the host does not wait.

    Raises:
        OrderError: within `no_transfers`.
    """
    _check(f"an upload of {len(arrays)} arrays")
    if device.type == "cpu":
        return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    spans = spans_of(arrays)
    staged = torch.empty(spans[-1].stop, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(arrays, spans, staged.numpy())
    return unpack(arrays, spans, staged.to(device, non_blocking=True))


def overwrite(tensor: Tensor, array: NDArray[Any]) -> None:
    """`tensor`, contiguous, takes what an array of its dtype and shape holds; as `upload`."""
    _check("an upload")
    staged = torch.from_numpy(array)
    if tensor.device.type == "cuda":
        staged = staged.pin_memory()
    tensor.copy_(staged, non_blocking=True)


def spans_of(arrays: Sequence[NDArray[Any]]) -> list[slice]:
    """Where each array's bytes lie in the one buffer."""
    spans, end = [], 0
    for array in arrays:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        spans.append(slice(start, end))
    return spans


def pack(arrays: Sequence[NDArray[Any]], spans: Sequence[slice], into: NDArray[np.uint8]) -> None:
    """Writes the bytes of each array into its span."""
    for array, span in zip(arrays, spans, strict=True):
        into[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack(arrays: Sequence[NDArray[Any]], spans: Sequence[slice], packed: Tensor) -> list[Tensor]:
    """Views of `packed`, each with dtype and shape of its array."""
    return [
        packed[span].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, span in zip(arrays, spans, strict=True)
    ]


class Download:
    """A tensor on its way to the host; what is launched after it does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        """Copies `tensor` in the order of torch's current stream.

        Raises:
            OrderError: within `no_transfers`.
        """
        _check("a download")
        self._event: Any = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()  # the next replay of a graph writes it
        else:
            cuda: Any = torch.cuda  # its events are typed in some versions of torch only
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = cuda.Event()
            self._event.record(cuda.current_stream(tensor.device))

    def array(self) -> NDArray[Any]:
        """What the tensor held; waits until the copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
