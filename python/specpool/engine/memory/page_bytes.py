"""`PageBytes`: reads and writes pages and state slots as plain bytes, for rows that move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Ledger, checksum, gather_pages, scatter_pages
from specpool.arrays import Int32
from specpool.engine.memory.host.copies import group_buffers
from specpool.engine.memory.kv_cache import KVCache
from specpool.kernels.transfer import upload

Bytes = npt.NDArray[np.uint8]


class PageBytes:
    """The pages of a cache as bytes: a page has the slots of all layers of its group.

    State slots are the pages of one more group. A slot has the states of all recurrent layers.

    Copies run on torch's current stream, which must be the stream of the forwards. They are done
    when a call returns.

    Attributes:
        page_bytes: bytes of a page of each group.
    """

    def __init__(self, ledger: Ledger, cache: KVCache, slots: Sequence[torch.Tensor] = ()) -> None:
        """Read and write pages; nothing is allocated.

        Args:
            ledger: has the groups.
            cache: has their pages.
            slots: the states of recurrent layers, each [num_slots + 1, ...].
        """
        self._device = cache.device
        # Per group: the keys and values of each layer, [num_pages + 1, bytes of a page in it].
        self._buffers = [
            [b.view(len(b) // group.page_size, -1).view(torch.uint8) for b in buffers]
            for group, buffers in zip(
                ledger.groups,
                (group_buffers(cache, g) for g in range(len(ledger.groups))),
                strict=True,
            )
        ]
        if slots:
            self._buffers.append([s.view(len(s), -1).view(torch.uint8) for s in slots])
        self.page_bytes = [sum(b.shape[1] for b in buffers) for buffers in self._buffers]
        on_host = cache.device.type == "cpu"
        self._host = [[b.numpy() for b in buffers] for buffers in self._buffers] if on_host else []

    def read(self, group: int, pages: Int32, out: Bytes) -> int:
        """Copy pages, int32 [n], to `out`, uint8 [n * page_bytes]; return its checksum.

        `out` has the pages in the first buffer, then in the second, and so on.
        """
        if self._host:
            return gather_pages(self._host[group], pages, out)
        staged, fields = self._staged(group, len(pages))
        (slots,) = upload(self._device, pages)
        kernels.gather_kv(kernels.Fields.of(self._buffers[group], 1), slots, out=fields)
        torch.from_numpy(out).copy_(staged)
        return checksum(out)

    def write(self, group: int, pages: Int32, data: Bytes) -> int:
        """Copy `data`, uint8 [n * page_bytes], to pages, int32 [n]; return its checksum."""
        if self._host:
            return scatter_pages(self._host[group], pages, data)
        staged, fields = self._staged(group, len(pages))
        copy = data.copy()  # sum what is written: others may change `data`
        # A copy from pageable memory is done when it returns.
        staged.copy_(torch.from_numpy(copy))
        (slots,) = upload(self._device, pages)
        kernels.scatter_kv(kernels.Fields.of(self._buffers[group], 1), slots, fields)
        return checksum(copy)

    def _staged(self, group: int, num_pages: int) -> tuple[torch.Tensor, kernels.Fields]:
        """Return memory of the device for pages in a row, uint8 [n], and its fields."""
        widths = [b.shape[1] for b in self._buffers[group]]
        staged = torch.empty(num_pages * sum(widths), dtype=torch.uint8, device=self._device)
        parts = torch.split(staged, [num_pages * width for width in widths])
        views = [part.view(num_pages, width) for part, width in zip(parts, widths, strict=True)]
        return staged, kernels.Fields.of(views, 1)
