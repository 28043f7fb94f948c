"""One group's pages in host memory: who has them, and the copies between them and the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool.kernels import device as kernels
from specpool.kernels.moves import PageBlocked
from specpool.kernels.transfer import upload

Pages = npt.NDArray[np.int64]

# Of the space on the device through which pages travel.
_STAGED_BYTES = 32 << 20


class HostGroup:
    """Host pages of a group, numbered from 0: a page holds its slots in all of the group's layers.

    Copies are enqueued on torch's current stream: whatever follows on it finds them done.

    Attributes:
        page_size: slots of a page.
        page_bytes: of a page, in all layers.
        num_pages: pages in all.
        num_free: pages that nobody has.
    """

    def __init__(self, buffers: Sequence[Tensor], page_size: int, num_pages: int) -> None:
        """Take the memory.

        Args:
            buffers: keys and values of the group's layers, each [num_slots, ...].
            page_size: slots of a page.
            num_pages: host pages.
        """
        device = buffers[0].device
        pages = [buffer.view(len(buffer) // page_size, -1) for buffer in buffers]
        self._fields = kernels.Fields.of(pages, 1)
        self.page_size, self.num_pages, self.num_free = page_size, num_pages, num_pages
        self.page_bytes = sum(self._fields.widths)
        self._owners = np.zeros(num_pages, np.int64)  # the number of each page's handle; 0 = free
        self._memory = torch.empty(
            num_pages, self.page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        num_staged = min(max(_STAGED_BYTES // self.page_bytes, 1), num_pages)
        self._staged = torch.empty(num_staged, self.page_bytes, dtype=torch.uint8, device=device)
        self._staging = kernels.Fields.of([PageBlocked(self._staged, 1, self._fields.widths)], 1)

    def take(self, num_pages: int, owner: int) -> Pages:
        """Free pages, ascending, for a handle; there are as many."""
        pages = np.flatnonzero(self._owners == 0)[:num_pages]
        self._owners[pages] = owner
        self.num_free -= num_pages
        return pages

    def give_back(self, pages: Pages) -> None:
        """A handle's pages are free."""
        self._owners[pages] = 0
        self.num_free += len(pages)

    def save(self, device_pages: npt.NDArray[np.int32], pages: Pages) -> None:
        """Copy pages of the device to host pages."""
        for part, runs in self._parts(pages):
            (slots,) = upload(self._staged.device, device_pages[part])
            kernels.gather_kv(self._fields, slots, out=self._staging)
            for staged, first, end in runs:
                self._memory[first:end].copy_(self._staged[staged], non_blocking=True)

    def load(self, pages: Pages, device_pages: npt.NDArray[np.int32]) -> None:
        """Copy host pages to pages of the device."""
        for part, runs in self._parts(pages):
            for staged, first, end in runs:
                self._staged[staged].copy_(self._memory[first:end], non_blocking=True)
            (slots,) = upload(self._staged.device, device_pages[part])
            kernels.scatter_kv(self._fields, slots, self._staging)

    def _parts(self, pages: Pages) -> list[tuple[slice, list[tuple[slice, int, int]]]]:
        """What fits the staging space: the places of its pages, and their runs.

        A run is where its pages are staged, its first host page, and the end of its last.
        """
        parts = []
        for start in range(0, len(pages), len(self._staged)):
            part = slice(start, min(start + len(self._staged), len(pages)))
            edges = np.flatnonzero(np.diff(pages[part]) != 1) + 1
            starts, ends = [0, *edges.tolist()], [*edges.tolist(), part.stop - part.start]
            runs = [
                (slice(a, b), int(pages[start + a]), int(pages[start + b - 1]) + 1)
                for a, b in zip(starts, ends, strict=True)
            ]
            parts.append((part, runs))
        return parts

    def findings(self, held: dict[int, Pages]) -> list[str]:
        """What is wrong if these handles have these pages, and nobody else has any."""
        owners = np.zeros_like(self._owners)
        found = []
        for number, pages in held.items():
            if owners[pages].any() or len(np.unique(pages)) < len(pages):
                found.append(f"host pages of handle {number} are held twice")
            owners[pages] = number
        for page in np.flatnonzero(owners != self._owners).tolist():
            found.append(f"host page {page} is {self._owners[page]}'s, held by {owners[page]}")
        if self.num_free != int((self._owners == 0).sum()):
            found.append(f"{self.num_free} host pages free, {int((self._owners == 0).sum())} found")
        return found
