"""`LayerKV`: the KV that one attention layer keeps per token, as plain numbers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV that one attention layer stores per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None  # keys that a query sees, its own included; None means all
    # Whether attention sinks (extra scores) take part in the softmax; they store nothing.
    has_sinks: bool = field(default=False, compare=False)
    # Chunked attention: a query sees the keys of its own chunk of `window` positions.
    is_chunked: bool = False

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of one token's key and value; a number has `itemsize` bytes."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * itemsize


def bytes_by_window(layers: Sequence[LayerKV], itemsize: int) -> dict[int | None, int]:
    """Return window -> bytes of one token's KV in all layers of that window; None: full layers."""
    num_bytes: dict[int | None, int] = {}
    for layer in layers:
        num_bytes[layer.window] = num_bytes.get(layer.window, 0) + layer.bytes_per_token(itemsize)
    return num_bytes
