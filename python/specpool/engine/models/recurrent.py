"""`RecurrentState`: the states of recurrent layers, which they carry from token to token, by row.

A state belongs to one length: it contains all tokens below, and it cannot be cut back to an earlier
length. So a round starts from a saved state, and the accepted tokens are run again from it
(`StateForward`). Attention layers of such a model keep their KV in pages as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specpool.engine.models.gate import refusal, text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The layer that attends next. Layers pass it to their cache, because Zamba's layers share attention
# modules that have no layer number.
ATTENDING: ContextVar[int | None] = ContextVar("specpool_attending", default=None)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one layer.

    Attributes:
        layer: index in the model.
        kind: `conv` or `recurrent`, as transformers calls them.
        index: index among the layer's states of this kind.
        shape: shape of one row's state.
        dtype: the model's dtype of the state.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row's state."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def get(self, cache: Any) -> Tensor:
        """Return the state of each lane in a cache, [B, *shape]."""
        state: Tensor = getattr(cache.layers[self.layer], f"{self.kind}_states")[self.index]
        return state

    def put(self, cache: Any, state: Tensor) -> None:
        """Write the lanes' state, [B, *shape], into a cache, so that the layer goes on from it."""
        layer = cache.layers[self.layer]
        getattr(layer, f"{self.kind}_states")[self.index] = state
        getattr(layer, f"is_{self.kind}_states_initialized")[self.index] = True
        layer.has_previous_state[self.index] = True
        if self.kind == "conv":
            layer.conv_kernel_size[self.index] = state.shape[-1]
            layer.dtype, layer.device = state.dtype, state.device


class RecurrentState:
    """The state of each recurrent layer for each row, at the row's length.

    A forward gathers states by lane. `put` saves the states that are to stay.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        specs: Sequence[StateSpec],
        num_rows: int,
        device: torch.device,
    ) -> None:
        """Allocate zeros for rows 0 to `num_rows`."""
        self._config, self._specs = config, specs
        self._by_row = [
            torch.zeros(num_rows + 1, *spec.shape, dtype=spec.dtype, device=device)
            for spec in specs
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows' states."""
        return sum(state.numel() * state.element_size() for state in self._by_row)

    def lanes(self, rows: Tensor, *, is_fresh: bool) -> Any:
        """Return a transformers cache for one forward that starts from these rows' states.

        Args:
            rows: int64 [B].
            is_fresh: the rows have no token yet, so start from zeros and ignore old states.
        """
        cache = paged_cache(self._config)
        for spec, state in zip(self._specs, self._by_row, strict=True):
            if is_fresh:
                spec.put(cache, state.new_zeros(len(rows), *spec.shape))
            else:
                spec.put(cache, state.index_select(0, rows))
        return cache

    def values(self, cache: Any) -> list[Tensor]:
        """Return copies of the states after a forward, one [B, ...] per spec."""
        return [spec.get(cache).clone() for spec in self._specs]

    def put(self, rows: Tensor, values: Sequence[Tensor]) -> None:
        """Save states, one [B, ...] per spec, for the rows, int64 [B]."""
        for state, value in zip(self._by_row, values, strict=True):
            state.index_copy_(0, rows, value.to(state.dtype))


def paged_cache(config: PretrainedConfig) -> Any:
    """Return a transformers cache whose attention layers keep nothing, because pages keep KV."""
    from transformers.cache_utils import DynamicCache

    cache: Any = DynamicCache(config=config)
    for layer in attention_layers(cache):
        cache.layers[layer].update = partial(_note_layer, layer)
    return cache


def _note_layer(
    layer: int, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    ATTENDING.set(layer)
    return key, value


def attention_layers(cache: Any) -> list[int]:
    """Return the indices of a cache's layers with KV."""
    from transformers.cache_utils import CacheLayerMixin

    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


def states_in(cache: Any) -> tuple[StateSpec, ...]:
    """Return the specs of the states that a forward has put into an empty cache."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin as Mixin

    return tuple(
        StateSpec(layer, name, index, tuple(state.shape[1:]), state.dtype)
        for layer, layer_cache in enumerate(cache.layers)
        if isinstance(layer_cache, Mixin)
        for name in ("conv", "recurrent")
        for index, state in getattr(layer_cache, f"{name}_states").items()
        if state is not None
    )


def check_transformers(config: Any) -> None:
    """Raise `ConfigError` if this version of transformers keeps states in another way."""
    import transformers

    kind = getattr(transformers.cache_utils, "LinearAttentionLayer", None)
    if kind is None or "number_of_states" not in inspect.signature(kind.__init__).parameters:
        raise refusal(
            config.model_type,
            f"transformers {transformers.__version__} keeps the states of its recurrent layers in"
            " another way than 5.23 does",
        )


def cache_argument(decoder: Any, config: Any) -> str:
    """Return the name of the cache argument of the decoder's forward."""
    names = inspect.signature(decoder.forward).parameters
    # `cache` since transformers 5.24.
    for name in ("cache", "past_key_values", "cache_params"):
        if name in names:
            return name
    raise refusal(text_config(config).model_type, "its forward takes no cache")
