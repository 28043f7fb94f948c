"""`PageBytes`: reads and writes whole pages of a cache as plain bytes, for rows that move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Ledger
from specpool.arrays import Int32
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
        # Per group: the keys and values of each layer, [num_pages + 1, bytes of a page in it].
        self._buffers = [
            [b.view(len(b) // group.page_size, -1).view(torch.uint8) for b in of]
            for group, of in zip(
                ledger.groups,
                (group_buffers(cache, g) for g in range(len(ledger.groups))),
                strict=True,
            )
        ]
        self.page_bytes = [sum(b.shape[1] for b in of) for of in self._buffers]
        # Per group, on a CPU: where each buffer's bytes lie in a page, and the buffer.
        self._columns = [_columns(of) for of in self._buffers] if cache.device.type == "cpu" else []

    def read(self, group: int, pages: Int32, out: Bytes) -> None:
        """Copy pages, int32 [n], to `out`, uint8 [n * page_bytes]."""
        if self._device.type == "cpu":
            rows, runs = out.reshape(len(pages), -1), _runs(pages)
            for column, buffer in self._columns[group]:
                for at, run in runs:
                    rows[at, column] = buffer[run]
            return
        staged, fields = self._staged(group, len(pages))
        (slots,) = upload(self._device, pages)
        kernels.gather_kv(kernels.Fields.of(self._buffers[group], 1), slots, out=fields)
        torch.from_numpy(out).view(len(pages), -1).copy_(staged)

    def write(self, group: int, pages: Int32, of: Bytes) -> None:
        """Copy `of`, uint8 [n * page_bytes], to pages, int32 [n]."""
        if self._device.type == "cpu":
            rows, runs = of.reshape(len(pages), -1), _runs(pages)
            for column, buffer in self._columns[group]:
                for at, run in runs:
                    buffer[run] = rows[at, column]
            return
        staged, fields = self._staged(group, len(pages))
        # A copy from pageable memory is done when it returns, so `of` may go.
        staged.copy_(torch.from_numpy(of).view(len(pages), -1))
        (slots,) = upload(self._device, pages)
        kernels.scatter_kv(kernels.Fields.of(self._buffers[group], 1), slots, fields)

    def _staged(self, group: int, num_pages: int) -> tuple[torch.Tensor, kernels.Fields]:
        """Return memory of the device for pages in a row, and its fields."""
        widths = tuple(b.shape[1] for b in self._buffers[group])
        size = (num_pages, self.page_bytes[group])
        staged = torch.empty(size, dtype=torch.uint8, device=self._device)
        return staged, kernels.Fields.of([PageBlocked(staged, 1, widths)], 1)


def _columns(buffers: Sequence[torch.Tensor]) -> list[tuple[slice, Bytes]]:
    ends = itertools.accumulate((b.shape[1] for b in buffers), initial=0)
    return [
        (slice(*place), buffer.numpy())
        for place, buffer in zip(itertools.pairwise(ends), buffers, strict=True)
    ]


def _runs(pages: Int32) -> list[tuple[slice, slice | Int32]]:
    """Return the pages as slices of consecutive ones; many short ones as they are."""
    edges = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    if 2 * len(edges) > len(pages):
        return [(slice(0, len(pages)), pages)]
    return [
        (slice(a, b), slice(int(pages[a]), int(pages[a]) + b - a))
        for a, b in itertools.pairwise(edges)
    ]
