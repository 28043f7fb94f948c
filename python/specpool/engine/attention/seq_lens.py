"""`SeqLens`: the lengths of a batch's rows, exact on the device and late on the host (sgl#25818).

Only this file reads and writes the host's copy and its sum, so that the two always agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool.arrays import Int32
from specpool.errors import OrderError
from specpool.kernels.transfer import upload


class SeqLens:
    """The number of tokens with KV of each row of a batch, on the device and on the host.

    Under overlap the host knows only bounds, `[lo, hi]`. Its copy, `seq_lens_cpu`, is exact if the
    bounds are equal, else the upper bound. Every change of the lengths (a prepare, `filter`,
    `merge`, `ahead`, a verify) gives a new object whose sum is unknown until
    `refresh_seq_lens_cpu`.

    Attributes:
        lo: int32 [B], on the host: the least value of each length.
        hi: int32 [B], on the host: the greatest value of each length.
    """

    __slots__ = ("_late", "_on_device", "_sum", "hi", "lo")

    def __init__(
        self,
        on_device: Tensor,
        lo: Int32,
        hi: Int32,
        late: Callable[[], Int32] | None = None,
    ) -> None:
        """Wrap the lengths of B rows.

        Args:
            on_device: int32 [B], the exact lengths.
            lo: int32 [B], on the host: lower bounds.
            hi: int32 [B], on the host: upper bounds.
            late: waits for a copy that is on its way to the host and returns it, int32 [B]; None if
                no copy is on its way, so `refresh_seq_lens_cpu` makes one.
        """
        self._on_device, self.lo, self.hi, self._late = on_device, lo, hi, late
        self._sum: int | None = None

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.hi)

    @property
    def on_device(self) -> Tensor:
        """int32 [B], the exact lengths."""
        return self._on_device

    @property
    def is_exact(self) -> bool:
        """Whether the host knows every length."""
        return self.lo is self.hi or self.lo.tolist() == self.hi.tolist()

    @property
    def common(self) -> int | None:
        """The length of every row, if the host knows that all are equal; else None."""
        lens = self.hi.tolist()
        is_uniform = lens.count(lens[0]) == len(lens) and self.is_exact
        return lens[0] if is_uniform else None

    @property
    def seq_lens_cpu(self) -> Int32:
        """int32 [B], the host's copy: exact, or upper bounds."""
        return self.hi

    @property
    def seq_lens_sum(self) -> int:
        """The sum of the host's copy.

        Raises:
            OrderError: `refresh_seq_lens_cpu` was not called since the lengths changed.
        """
        if self._sum is None:
            raise OrderError(
                f"the sum of {len(self)} sequence lengths is not known since they changed: "
                "refresh_seq_lens_cpu first"
            )
        return self._sum

    def refresh_seq_lens_cpu(self, sync: bool) -> None:
        """Compute the sum of the host's copy; call it once per round, before building views.

        Args:
            sync: make the copy exact first. This waits for the device, unless the copy is exact
                already, as in plain decoding.
        """
        if sync and not self.is_exact:
            lens = self._on_device.cpu().numpy() if self._late is None else self._late()
            self.lo = self.hi = np.clip(lens, self.lo, self.hi)
        self._sum = int(self.hi.sum())

    def filter(self, keep: slice | npt.NDArray[np.bool_]) -> SeqLens:
        """Return some of the rows, in their order."""
        if isinstance(keep, slice):
            on_device = self._on_device[keep]
        else:
            (row_index,) = upload(self._on_device.device, np.flatnonzero(keep))
            on_device = self._on_device.index_select(0, row_index)
        late = self._late
        return self._with(on_device, lambda lens: lens[keep], late and (lambda: late()[keep]))

    @classmethod
    def merge(cls, parts: Sequence[SeqLens]) -> SeqLens:
        """Return the rows of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        on_device = torch.cat([part.on_device for part in parts])
        hi = np.concatenate([part.hi for part in parts])
        is_exact = all(part.is_exact for part in parts)
        return cls(on_device, hi if is_exact else np.concatenate([p.lo for p in parts]), hi)

    def ahead(self, num_tokens: int) -> SeqLens:
        """Return all rows, and their host bounds, `num_tokens` further on."""
        return self._with(self._on_device + num_tokens, lambda lens: lens + num_tokens)

    def grown(self, num_tokens: Tensor, least: Int32 | int, greatest: Int32 | int) -> SeqLens:
        """Return the rows, each further on by its `num_tokens`.

        Args:
            num_tokens: int32 [B], on the device.
            least: lower bound of `num_tokens`, for the host.
            greatest: upper bound of `num_tokens`, for the host.
        """
        hi = self.hi + greatest
        lo = hi if self.lo is self.hi and least is greatest else self.lo + least
        return SeqLens(self._on_device + num_tokens, lo, hi)

    def repeat(self, times: int) -> SeqLens:
        """Return each row `times` times, one copy right after the other."""
        on_device = self._on_device.repeat_interleave(times, output_size=len(self) * times)
        return self._with(on_device, lambda lens: np.repeat(lens, times))

    def _with(
        self,
        on_device: Tensor,
        change: Callable[[Int32], Int32],
        late: Callable[[], Int32] | None = None,
    ) -> SeqLens:
        hi = change(self.hi)
        return SeqLens(on_device, hi if self.lo is self.hi else change(self.lo), hi, late)


@dataclass(frozen=True, slots=True)
class Origins:
    """The position that each lane's pages begin at; see `KVCache.pages_of` for a sink.

    Attributes:
        on_device: int32 [B], or one number for all lanes.
        on_host: the same on the host; None if only the device knows them.
    """

    on_device: Tensor | int
    on_host: Int32 | int | None

    def since(self, positions: Tensor) -> Tensor:
        """Subtract each lane's origin from its positions, int32 [B] or [B, n]."""
        origins = self.on_device
        if isinstance(origins, int):
            return positions - origins if origins else positions
        return positions - (origins if positions.ndim == 1 else origins.unsqueeze(1))
