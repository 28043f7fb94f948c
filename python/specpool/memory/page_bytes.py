"""`PageBytes`: reads and writes whole pages of a cache as plain bytes, for rows that move."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Ledger
from specpool.kernels.transfer import upload
from specpool.kernels.twin_moves import PageBlocked
from specpool.memory.host.copies import group_buffers
from specpool.memory.kv_cache import KVCache

Bytes = npt.NDArray[np.uint8]


class PageBytes:
    """The pages of a cache as bytes: a page has the slots of all layers of its group.

    Copies run on torch's current stream, which must be the stream of the forwards. They are done
    when a call returns.

    Attributes:
        page_bytes: bytes of a page of each group.
    """

    def __init__(self, ledger: Ledger, cache: KVCache) -> None:
        """Read and write the pages of `cache`; nothing is allocated."""
        self._device = cache.device
        self._fields = []
        for g, group in enumerate(ledger.groups):
            layers = [b.view(len(b) // group.page_size, -1) for b in group_buffers(cache, g)]
            self._fields.append(kernels.Fields.of(layers, 1))
        self.page_bytes = [sum(fields.widths) for fields in self._fields]

    def read(self, group: int, pages: npt.NDArray[np.int32], out: Bytes) -> None:
        """Copy pages, int32 [n], to `out`, uint8 [n * page_bytes]."""
        staged, fields = self._staged(group, out)
        (slots,) = upload(self._device, pages)
        kernels.gather_kv(self._fields[group], slots, out=fields)
        if self._device.type != "cpu":
            torch.from_numpy(out).view(len(pages), -1).copy_(staged)

    def write(self, group: int, pages: npt.NDArray[np.int32], of: Bytes) -> None:
        """Copy `of`, uint8 [n * page_bytes], to pages, int32 [n]."""
        staged, fields = self._staged(group, of)
        if self._device.type != "cpu":
            # A pageable copy is done when it returns, so `of` may go.
            staged.copy_(torch.from_numpy(of).view(len(pages), -1))
        (slots,) = upload(self._device, pages)
        kernels.scatter_kv(self._fields[group], slots, fields)

    def _staged(self, group: int, data: Bytes) -> tuple[torch.Tensor, kernels.Fields]:
        """Return the bytes as rows of pages, where the device can reach them."""
        widths, num_bytes = self._fields[group].widths, self.page_bytes[group]
        if self._device.type == "cpu":
            staged = torch.from_numpy(data).view(-1, num_bytes)
        else:
            num_pages = len(data) // num_bytes
            staged = torch.empty(num_pages, num_bytes, dtype=torch.uint8, device=self._device)
        return staged, kernels.Fields.of([PageBlocked(staged, 1, widths)], 1)
