"""Between host and device without waiting: many arrays in one copy there, results back later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Tensors on `device` with what the arrays hold, any dtypes and shapes.

    A CPU tensor shares the memory of an array that can be written. Elsewhere all arrays travel in
    one copy out of pinned memory, in the order of torch's current stream: the host does not wait.
    """
    if device.type == "cpu":
        return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    spans = spans_of(arrays)
    staged = torch.empty(spans[-1].stop, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pack(arrays, spans, staged.numpy())
    return unpack(arrays, spans, staged.to(device, non_blocking=True))


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
        """Copies `tensor` in the order of torch's current stream."""
        self._event: Any = None
        self._host = tensor
        if tensor.device.type == "cuda":
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
