"""`LayerKV`: what one attention layer keeps of a token; plain numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None  # keys seen by a query, itself included; None = all

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's key and value, of numbers of `itemsize` bytes."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * itemsize
