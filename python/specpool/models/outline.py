"""Models known by their configs alone: what their layers keep of a token, and how big they are.

No weights are read. A target's config states what `probe` finds out by running the model; a test
holds the two together for every family.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from specpool.errors import CheckpointError, ConfigError
from specpool.layer_kv import LayerKV
from specpool.models import torch_attention
from specpool.models.checkpoint import Weights, find_folder, read_config, weight_bytes
from specpool.models.eagle_config import EagleConfig
from specpool.models.support import (
    chunk_size,
    has_recurrent_layers,
    max_context_len,
    text_config,
)
from specpool.models.target_folder import find_target, load_config

# Configs with one of these say otherwise how wide keys and values are.
_OTHER_KEYS = ("multi_query", "kv_channels", "attn_config")


@dataclass(frozen=True, slots=True)
class Outline:
    """What memory must know of a model."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype | None  # as stored; None = not said
    weight_bytes: int | None  # as stored; None = not known here
    max_context_len: int

    def loaded_bytes(self, dtype: torch.dtype) -> int | None:
        """Bytes of the weights once they are `dtype`."""
        if self.weight_bytes is None or self.dtype is None:
            return self.weight_bytes
        return self.weight_bytes * dtype.itemsize // self.dtype.itemsize


def target_outline(source: str, *, trust_remote_code: bool = False) -> Outline:
    """The outline of a decoder in a folder or on the hub, of which the config alone is fetched.

    Args:
        source: a folder or a hub name.
        trust_remote_code: run Python code that the config brings; otherwise it is refused.

    Raises:
        ConfigError: nothing found at `source`, or a model that cannot run over pages.
    """
    folder = find_target(source, trust_remote_code=trust_remote_code, config_only=True)
    config = load_config(folder)
    dtype = getattr(config, "dtype", None)
    try:
        num_bytes = weight_bytes(folder.path)
    except CheckpointError:
        num_bytes = None
    return Outline(
        layers=stated_layers(config),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        weight_bytes=num_bytes,
        max_context_len=max_context_len(config),
    )


def stated_layers(config: Any) -> tuple[LayerKV, ...]:
    """What each layer keeps of a token, by a config that `check_config` has passed.

    Raises:
        ConfigError: the config does not say it.
    """
    text = text_config(config)
    if has_recurrent_layers(config):
        raise ConfigError(
            f"the config of type {config.model_type!r} has recurrent layers, whose states are no"
            " KV: give --layers, --kv-heads and --head-dim of those with attention instead"
        )
    refusal = ConfigError(
        f"the config of type {config.model_type!r} does not state in the usual keys what its layers"
        " keep: give --layers, --kv-heads and --head-dim instead"
    )
    is_falcon = text.model_type in torch_attention.CALLS_TORCH
    if not is_falcon and any(getattr(text, key, None) for key in _OTHER_KEYS):
        raise refusal
    try:
        num_layers, num_heads, hidden_size = (
            _integer(text, key)
            for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        num_kv_heads = _integer(text, "num_key_value_heads") or num_heads
        if is_falcon:
            num_kv_heads = torch_attention.num_kv_heads(text)
        head_dim = _integer(text, "head_dim") or hidden_size // max(num_heads, 1)
    except Exception as error:  # transformers 5, of a key whose value is each layer's own
        raise refusal from error
    v_head_dim = _integer(text, "v_head_dim") or head_dim
    if _integer(text, "kv_lora_rank"):  # a latent, kept as the heads that it is expanded to
        num_kv_heads = num_heads
        head_dim = _integer(text, "qk_nope_head_dim") + _integer(text, "qk_rope_head_dim")
    elif v_head_dim != head_dim:
        raise refusal
    if not (num_layers and num_kv_heads and head_dim):
        raise refusal
    chunks = [chunk_size(text, layer) for layer in range(num_layers)]
    return tuple(
        LayerKV(num_kv_heads, head_dim, v_head_dim, chunk or window, is_chunked=chunk is not None)
        for window, chunk in zip(_windows(text, int(num_layers)), chunks, strict=True)
    )


def _windows(text: Any, num_layers: int) -> list[int | None]:
    """Of each layer: with a window but no kinds of layers, all of them have it."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if window is None or kinds is None:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _integer(config: Any, key: str) -> int:
    """The config's value, 0 if it has none."""
    value = getattr(config, key, None)
    return value if isinstance(value, int) else 0


def head_outline(source: str | os.PathLike[str]) -> Outline:
    """The outline of an EAGLE head; of its weights the names alone are read.

    Raises:
        CheckpointError: nothing found at `source`, or no EAGLE head.
    """
    folder = find_folder(source)
    raw, weights = read_config(folder), Weights(folder)  # whose errors name the file
    try:
        config = EagleConfig.parse(raw, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    return Outline(
        layers=tuple(LayerKV(heads, dim, dim) for heads, dim in config.layer_kv),
        dtype=None,
        weight_bytes=weight_bytes(folder),
        max_context_len=config.max_position_embeddings,
    )
