"""Lengths of a batch's rows: on the device the truth, on the host a late copy (sgl#25818).

The host's copy and its sum are a pair that this file alone reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool.arrays import Int32
from specpool.errors import OrderError
from specpool.kernels.transfer import upload


class SeqLens:
    """Tokens with KV of each row of one batch; where its forward goes on.

    Under overlap the host has bounds of them only, `[lo, hi]`. Its copy, `seq_lens_cpu`, is exact
    where the bounds meet and the upper bound elsewhere. Whatever changes the lengths (a prepare,
    `filter`, `merge`, `ahead`, a verify) gives an object whose sum is unknown, until
    `refresh_seq_lens_cpu`.

    Attributes:
        lo: int32 [B], on the host: least that each can be.
        hi: int32 [B], on the host: greatest that each can be.
    """

    __slots__ = ("_late", "_on_device", "_sum", "hi", "lo")

    def __init__(
        self,
        on_device: Tensor,
        lo: Int32,
        hi: Int32,
        late: Callable[[], Int32] | None = None,
    ) -> None:
        """Bounds that `on_device`, int32 [B], is known to keep.

        Args:
            on_device: the truth.
            lo: least.
            hi: greatest.
            late: waits for the copy that is on its way to the host, int32 [B]; None = there is
                none, a copy is made when it is asked for.
        """
        self._on_device, self.lo, self.hi, self._late = on_device, lo, hi, late
        self._sum: int | None = None

    def __len__(self) -> int:
        """B."""
        return len(self.hi)

    @property
    def on_device(self) -> Tensor:
        """int32 [B]."""
        return self._on_device

    @property
    def is_exact(self) -> bool:
        """Whether the host knows every length."""
        return self.lo is self.hi or self.lo.tolist() == self.hi.tolist()

    @property
    def common(self) -> int | None:
        """The length of every row, if the host knows that they are equal."""
        lens = self.hi.tolist()
        same = lens.count(lens[0]) == len(lens) and self.is_exact
        return lens[0] if same else None

    @property
    def seq_lens_cpu(self) -> Int32:
        """int32 [B], the host's copy: exact, or upper bounds."""
        return self.hi

    @property
    def seq_lens_sum(self) -> int:
        """The copy's sum.

        Raises:
            OrderError: it is not known since the lengths changed.
        """
        if self._sum is None:
            raise OrderError(
                f"the sum of {len(self)} sequence lengths is not known since they changed: "
                "refresh_seq_lens_cpu first"
            )
        return self._sum

    def refresh_seq_lens_cpu(self, sync: bool) -> None:
        """Make the sum known.

        Args:
            sync: bring the copy up to date first; waits for the device unless it is exact already,
                as in plain decoding. Once per round, before anything is built from the lengths.
        """
        if sync and not self.is_exact:
            lens = self._on_device.cpu().numpy() if self._late is None else self._late()
            self.lo = self.hi = np.clip(lens, self.lo, self.hi)
        self._sum = int(self.hi.sum())

    def filter(self, keep: slice | npt.NDArray[np.bool_]) -> SeqLens:
        """Some of the rows, in their order."""
        if isinstance(keep, slice):
            on_device = self._on_device[keep]
        else:
            (kept,) = upload(self._on_device.device, np.flatnonzero(keep))
            on_device = self._on_device.index_select(0, kept)
        late = self._late
        return self._with(on_device, lambda of: of[keep], late and (lambda: late()[keep]))

    @classmethod
    def merge(cls, parts: Sequence[SeqLens]) -> SeqLens:
        """The rows of all, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        on_device = torch.cat([part.on_device for part in parts])
        hi = np.concatenate([part.hi for part in parts])
        is_exact = all(part.is_exact for part in parts)
        return cls(on_device, hi if is_exact else np.concatenate([p.lo for p in parts]), hi)

    def ahead(self, num_tokens: int) -> SeqLens:
        """All rows so many tokens further on; what the host knows of them, it knows then."""
        return self._with(self._on_device + num_tokens, lambda of: of + num_tokens)

    def grown(self, num_tokens: Tensor, least: Int32 | int, most: Int32 | int) -> SeqLens:
        """Each row further on by `num_tokens`, int32 [B] on the device, between least and most."""
        hi = self.hi + most
        lo = hi if self.lo is self.hi and least is most else self.lo + least
        return SeqLens(self._on_device + num_tokens, lo, hi)

    def repeat(self, times: int) -> SeqLens:
        """Each row so many times in a row."""
        on_device = self._on_device.repeat_interleave(times, output_size=len(self) * times)
        return self._with(on_device, lambda of: np.repeat(of, times))

    def _with(
        self,
        on_device: Tensor,
        change: Callable[[Int32], Int32],
        late: Callable[[], Int32] | None = None,
    ) -> SeqLens:
        hi = change(self.hi)
        return SeqLens(on_device, hi if self.lo is self.hi else change(self.lo), hi, late)
