"""The KV buffers of every layer, and the page tables that the kernels read.

Slots of page 0 are a sink: padded lanes write there, and nobody reads what they wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Ledger


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None  # keys seen by a query, itself included; None = all

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * dtype.itemsize


class KVCache:
    """KV buffers per group and layer, and a mirror of each group's page table.

    The mirror is written by `apply_delta` alone, once per step and before its forward, so that a
    forward reads the tables as they were when its step was prepared (spec 4, table deltas).
    """

    def __init__(
        self,
        ledger: Ledger,
        layers: Sequence[LayerKV],
        layer_groups: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeroed buffers.

        Args:
            ledger: gives the groups' page sizes, page counts and tables.
            layers: what each layer stores.
            layer_groups: the group of each layer, `len(layers)` indices into `ledger.groups`.
            dtype: of keys and values.
            device: where the buffers live.
        """
        self.device = device
        self.dtype = dtype
        self.page_sizes = [group.page_size for group in ledger.groups]
        self.layer_groups = list(layer_groups)
        self.max_context_len = ledger.max_context_len
        self._ledger = ledger
        slots = [(group.num_pages + 1) * group.page_size for group in ledger.groups]

        def buffer(group: int, num_heads: int, head_dim: int) -> torch.Tensor:
            return torch.zeros(slots[group], num_heads, head_dim, dtype=dtype, device=device)

        # Each [num_slots, num_kv_heads, head_dim]. Zeroed, because a masked-out NaN is still a NaN
        # once the softmax's 0 has been multiplied with it.
        self.keys = [
            buffer(g, layer.num_kv_heads, layer.k_head_dim)
            for g, layer in zip(layer_groups, layers, strict=True)
        ]
        self.values = [
            buffer(g, layer.num_kv_heads, layer.v_head_dim)
            for g, layer in zip(layer_groups, layers, strict=True)
        ]
        # int32 [num_rows + 1, pages_per_row] per group, host
        self.tables = [ledger.full_table(g) for g in range(len(ledger.groups))]

    def buffers(self, layers: Sequence[int]) -> list[torch.Tensor]:
        """Keys and values of these layers."""
        return [self.keys[i] for i in layers] + [self.values[i] for i in layers]

    def apply_delta(self, step: int) -> None:
        """Bring the mirrors up to date with what preparing `step` changed."""
        for table, (rows, columns, pages) in zip(
            self.tables, self._ledger.take_delta(step), strict=True
        ):
            kernels.apply_table_delta(table, rows, columns, pages)
        self._ledger.ack_delta(step)

    def scrub(self, group: int, pages: npt.NDArray[np.int32]) -> None:
        """Zero these pages in every layer of a group, so that no NaN outlives its request."""
        size = self.page_sizes[group]
        index = torch.from_numpy(pages.astype(np.int64)).to(self.device)
        layers = [i for i, g in enumerate(self.layer_groups) if g == group]
        for buffer in self.buffers(layers):
            buffer.view(-1, size * buffer.shape[1] * buffer.shape[2])[index] = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in (*self.keys, *self.values))
