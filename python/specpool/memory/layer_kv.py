"""`LayerKV`: what one attention layer keeps of a token; plain numbers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None  # keys seen by a query, itself included; None = all
    # Extra scores take part in its softmax; nothing is stored for them.
    has_sinks: bool = field(default=False, compare=False)
    # The window does not slide: a query sees the keys of its own chunk of `window` positions.
    is_chunked: bool = False

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token's key and value, of numbers of `itemsize` bytes."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * itemsize


def bytes_by_window(layers: Sequence[LayerKV], itemsize: int) -> dict[int | None, int]:
    """Bytes of one token's KV in all layers of each window; None = those that see all."""
    found: dict[int | None, int] = {}
    for layer in layers:
        found[layer.window] = found.get(layer.window, 0) + layer.bytes_per_token(itemsize)
    return found
