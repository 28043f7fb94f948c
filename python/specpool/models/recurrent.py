"""Layers that carry a state from token to token: what a row's state is, and where it is kept.

A state belongs to a length: it holds all tokens below, and no cut brings an earlier one back. So it
is saved before a round and replayed over what the round kept (`StateForward`). The attention layers
of a hybrid keep their KV in pages as everywhere.
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

from specpool.models.gate import refusal, text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The layer that attends next, as it has told its cache: Zamba's share modules without a number.
ATTENDING: ContextVar[int | None] = ContextVar("specpool_attending", default=None)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one layer.

    Attributes:
        layer: index in the model.
        kind: `conv` or `recurrent`, as transformers calls them.
        index: among the layer's states of this kind.
        shape: of one row's.
        dtype: as the model keeps it.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row's."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def of(self, cache: Any) -> Tensor:
        """The state of each lane, [B, *shape]."""
        state: Tensor = getattr(cache.layers[self.layer], f"{self.kind}_states")[self.index]
        return state

    def put(self, cache: Any, state: Tensor) -> None:
        """Make it the lanes' state, so that the layer goes on from there."""
        layer = cache.layers[self.layer]
        getattr(layer, f"{self.kind}_states")[self.index] = state
        getattr(layer, f"is_{self.kind}_states_initialized")[self.index] = True
        layer.has_previous_state[self.index] = True
        if self.kind == "conv":
            layer.conv_kernel_size[self.index] = state.shape[-1]
            layer.dtype, layer.device = state.dtype, state.device


class RecurrentState:
    """Per row: the state of each recurrent layer at the row's length.

    A forward gathers by lane; what is to stay is put back.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        specs: Sequence[StateSpec],
        num_rows: int,
        device: torch.device,
    ) -> None:
        """Zeros, for rows 0 to `num_rows`."""
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
        """A cache for one forward that goes on from these rows' states.

        Args:
            rows: int64 [B].
            is_fresh: the rows have no token yet, whatever their last requests have left.
        """
        cache = paged_cache(self._config)
        for spec, state in zip(self._specs, self._by_row, strict=True):
            if is_fresh:
                spec.put(cache, state.new_zeros(len(rows), *spec.shape))
            else:
                spec.put(cache, state.index_select(0, rows))
        return cache

    def values(self, cache: Any) -> list[Tensor]:
        """What the lanes of a forward have come to; each [B, ...]."""
        return [spec.of(cache).clone() for spec in self._specs]

    def put(self, rows: Tensor, values: Sequence[Tensor]) -> None:
        """Keep these states of the rows, int64 [B]."""
        for state, value in zip(self._by_row, values, strict=True):
            state.index_copy_(0, rows, value.to(state.dtype))


def paged_cache(config: PretrainedConfig) -> Any:
    """A cache of transformers whose attention layers keep nothing: pages do."""
    from transformers.cache_utils import DynamicCache

    cache: Any = DynamicCache(config=config)
    for layer in attention_layers(cache):
        cache.layers[layer].update = partial(_pass_on, layer)
    return cache


def _pass_on(
    layer: int, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    ATTENDING.set(layer)
    return key, value


def attention_layers(cache: Any) -> list[int]:
    """The layers with KV."""
    from transformers.cache_utils import CacheLayerMixin

    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


def states_in(cache: Any) -> tuple[StateSpec, ...]:
    """What the layers have put into a cache that was empty."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin as Mixin

    return tuple(
        StateSpec(layer, name, index, tuple(state.shape[1:]), state.dtype)
        for layer, each in enumerate(cache.layers)
        if isinstance(each, Mixin)
        for name in ("conv", "recurrent")
        for index, state in getattr(each, f"{name}_states").items()
        if state is not None
    )


def check_transformers(config: Any) -> None:
    """Raise `ConfigError` where this transformers keeps states in another way."""
    import transformers

    kind = getattr(transformers.cache_utils, "LinearAttentionLayer", None)
    if kind is None or "number_of_states" not in inspect.signature(kind.__init__).parameters:
        raise refusal(
            config.model_type,
            f"transformers {transformers.__version__} keeps the states of its recurrent layers in"
            " another way than 5.23 does",
        )


def cache_argument(decoder: Any, config: Any) -> str:
    """How the decoder's forward calls its cache."""
    names = inspect.signature(decoder.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in names:
            return name
    raise refusal(text_config(config).model_type, "its forward takes no cache")
