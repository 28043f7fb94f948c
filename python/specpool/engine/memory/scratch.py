"""`Scratch`: memory that a forward gathers KV into, kept from one read to the next."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Memory that pages are gathered into, kept from one read to the next.

    Fresh memory would cost more than the copy itself, because the system clears it first.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor [num_rows, width] with any content.

        It is valid until the next call with the same name and dtype.
        """
        buffer, size = self._buffers.get((name, dtype)), num_rows * width
        if buffer is None or buffer.numel() < size:
            # Some extra room, so that a growing text does not allocate anew at each step.
            buffer = self._buffers[name, dtype] = torch.empty(size + size // 8, dtype=dtype)
        return buffer[:size].view(num_rows, width)
