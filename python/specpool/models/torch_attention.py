"""Models that call torch's own attention function, past transformers' AttentionInterface.

For the time of a forward torch hands the call to ours. What these modules expand before it, they
would keep expanded in pages: so each KV head is taken once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

#: Types whose modules do so, under the name "sdpa": a test runs each of them beside transformers.
CALLS_TORCH = ("falcon",)


def num_kv_heads(text: Any) -> int:
    """KV heads of each layer, by the config."""
    if text.new_decoder_architecture:
        return int(text.num_kv_heads)
    return 1 if text.multi_query else int(text.num_attention_heads)


def num_shared(text: Any) -> int:
    """Neighbouring heads that are given copies of one KV head, by the config."""
    return (
        int(text.num_attention_heads) // num_kv_heads(text) if text.new_decoder_architecture else 1
    )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Those that call torch's function."""
    return [module for module in model.modules() if type(module).__name__ == "FalconAttention"]


class TorchAttention(TorchFunctionMode):
    """While entered, torch's attention function is `attend` (query, key, value -> output)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], shared: int) -> None:
        """Args: `attend` takes and gives [B, H, T, D]; `shared` is from `num_shared`."""
        super().__init__()
        self._attend, self._shared = attend, shared

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Every call of torch comes by here."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        return self._attend(query, key[:, :: self._shared], value[:, :: self._shared])
