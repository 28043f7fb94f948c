"""`RecurrentState`: the states of recurrent layers in slots, and the inputs recorded since.

A state belongs to one length: it contains all tokens below, and it cannot be cut back to an earlier
length. So a slot changes only by tokens that are certain, and what the layers have read since is in
a ring (docs/contract.md, Recurrent state). Attention layers of such a model keep their KV in pages
as usual.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specpool.capacity.state_sizes import StateBytes
from specpool.engine.memory.buffers import zeroed_buffer
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
        return math.prod(self.shape) * self.dtype.itemsize

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

    def drop(self, cache: Any) -> None:
        """Let a cache hold the state no longer."""
        getattr(cache.layers[self.layer], f"{self.kind}_states")[self.index] = None


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """What is kept of one recurrent mixer, a module that carries states from token to token.

    Attributes:
        states: its states.
        width: numbers of its input for one token.
        dtype: the dtype of its input.
    """

    states: tuple[StateSpec, ...]
    width: int
    dtype: torch.dtype

    @property
    def record_bytes(self) -> int:
        """Bytes of its input for one token."""
        return self.width * self.dtype.itemsize


def bytes_of_mixers(mixers: Sequence[MixerSpec], flush: int) -> StateBytes:
    """Return what a row keeps of these mixers, with the state group's `flush`."""
    return StateBytes(
        slot=sum(state.num_bytes for mixer in mixers for state in mixer.states),
        record=sum(mixer.record_bytes for mixer in mixers),
        flush=flush,
    )


class RecurrentState:
    """The state slots of each mixer, and for each row a ring of the inputs that it has read.

    Attributes:
        ring_len: R; the record of position p lies at `p % R` of its row's ring.
        slots: for each mixer its states, each [num_slots + 1, ...]. Slot 0 stays zero.
        rings: for each mixer, [(num_rows + 1) * R, width].
    """

    def __init__(
        self,
        mixers: Sequence[MixerSpec],
        *,
        num_slots: int,
        num_rows: int,
        ring_len: int,
        device: torch.device,
    ) -> None:
        """Allocate zeros; the arguments are without slot 0 and row 0.

        Raises:
            ConfigError: the device has no room for them.
        """
        self.ring_len = ring_len

        def buffer(content: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            options = "kv_bytes, max_batch, max_sessions or cached_states"
            return zeroed_buffer(shape, dtype, device, content=content, options=options)

        self.slots = [
            [
                buffer("a layer's states", (num_slots + 1, *spec.shape), spec.dtype)
                for spec in mixer.states
            ]
            for mixer in mixers
        ]
        self.rings = [
            buffer("a layer's records", ((num_rows + 1) * ring_len, mixer.width), mixer.dtype)
            for mixer in mixers
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots and rings."""
        return sum(buffer.nbytes for buffer in (*self.rings, *self.slot_buffers))

    @property
    def slot_buffers(self) -> list[Tensor]:
        """The states of all mixers, each [num_slots + 1, ...]: all that a slot has."""
        return [state for states in self.slots for state in states]

    def compact(
        self, rows: Tensor, roots: Tensor, accept_index: Tensor, *, num_draft_tokens: int
    ) -> None:
        """Move the records of the accepted nodes to positions root, root + 1, ...

        The arguments are those of `kernels.compact_accepted`, which moves the KV.
        """
        places = torch.arange(accept_index.shape[1], device=rows.device)
        nodes = torch.where(accept_index < 0, places, accept_index % num_draft_tokens)
        first, roots = rows.long().unsqueeze(1) * self.ring_len, roots.long().unsqueeze(1)
        src = (first + (roots + nodes) % self.ring_len).view(-1)
        dst = (first + (roots + places) % self.ring_len).view(-1)
        for ring in self.rings:
            ring.index_copy_(0, dst, ring.index_select(0, src))


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
