"""Pages that were freed on an accelerator, on their way to the host.

A free names its pages by a tensor on the device. Reading it would wait for the device, so a copy is
started, and the pages come back when a later call needs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Copies that may be under way. When one more starts, the oldest is taken; it landed long ago.
MOST_COPIES = 64


class FreesInFlight:
    """Copies of page ids to the host, oldest first.

    When a copy is taken depends on the calls alone, never on the device's pace: tensor-parallel
    ranks that make the same calls hand out the same pages.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[torch.Tensor, Any]] = deque()
        self.num_pages = 0

    @property
    def num_copies(self) -> int:
        """How many copies are under way."""
        return len(self._copies)

    def start(self, pages: torch.Tensor) -> None:
        """Start a copy of page ids, int64 [n]; it waits for nothing."""
        up = torch.empty(pages.shape, dtype=torch.int64, pin_memory=True)
        up.copy_(pages, non_blocking=True)
        event = torch.get_device_module(pages.device).Event()
        event.record()
        self._copies.append((up, event))
        self.num_pages += up.numel()

    def oldest(self, leave: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the page ids of the oldest copies until `leave` are left; wait for each."""
        while len(self._copies) > leave:
            up, event = self._copies.popleft()
            event.synchronize()
            self.num_pages -= up.numel()
            yield up.numpy()
