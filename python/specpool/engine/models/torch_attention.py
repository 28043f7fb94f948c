"""Support for models that call torch's attention function instead of `AttentionInterface`.

During a forward, `TorchAttention` replaces torch's function by paged attention. These modules
repeat each KV head for several query heads before the call. Pages keep each KV head once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

#: Types whose "sdpa" modules call torch's function: a test compares each with transformers.
CALLS_TORCH = ("falcon",)


def num_kv_heads(text: Any) -> int:
    """Return the number of KV heads of each layer, by the config."""
    if text.new_decoder_architecture:
        return int(text.num_kv_heads)
    return 1 if text.multi_query else int(text.num_attention_heads)


def num_shared(text: Any) -> int:
    """Return how many neighbouring heads get copies of one KV head, by the config."""
    return (
        int(text.num_attention_heads) // num_kv_heads(text) if text.new_decoder_architecture else 1
    )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that call torch's function."""
    return [module for module in model.modules() if type(module).__name__ == "FalconAttention"]


class TorchAttention(TorchFunctionMode):
    """A mode in which torch's attention function is `attend` (query, key, value -> output)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], shared: int) -> None:
        """Set the function: it takes and returns [B, H, T, D]. `shared` is from `num_shared`."""
        super().__init__()
        self._attend, self._shared = attend, shared

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle every call of torch within the mode; replace the attention function alone."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        return self._attend(query, key[:, :: self._shared], value[:, :: self._shared])
