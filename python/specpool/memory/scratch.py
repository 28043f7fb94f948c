"""Memory that a forward gathers KV into, kept from one read to the next."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Memory that pages are gathered into, kept from one read to the next.

    The system clears every page of fresh memory before a process may write it. That takes longer
    than the copy.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] of memory with any content, valid until the next call of that name."""
        kept, size = self._kept.get((name, dtype)), num_rows * width
        if kept is None or kept.numel() < size:
            # With some room, so that a text that gets longer does not ask for more each time.
            kept = self._kept[name, dtype] = torch.empty(size + size // 8, dtype=dtype)
        return kept[:size].view(num_rows, width)
