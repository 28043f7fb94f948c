"""Models known by their configs alone: what their layers keep of a token, and how big they are.

No weights are read, and torch is not imported: a config of a common family is read as it is, others
take transformers. A target's config states what `probe` finds out by running the model; a test
holds the two together for every family.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.errors import CheckpointError, ConfigError
from specpool.memory.layer_kv import LayerKV
from specpool.models.eagle.config import EagleConfig
from specpool.models.files.checkpoint import (
    check_counts,
    find_folder,
    normal_name,
    read_config,
    weight_bytes,
    weight_files,
)
from specpool.models.files.headers import main_dtype, read_header
from specpool.models.files.names import fetch_config, find_model
from specpool.models.files.plain_config import FAMILIES, PlainConfig

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# Configs with one of these say otherwise how wide keys and values are.
_OTHER_KEYS = ("multi_query", "kv_channels", "attn_config")


@dataclass(frozen=True, slots=True)
class Outline:
    """What memory must know of a model."""

    layers: tuple[LayerKV, ...]
    dtype: str | None  # as stored; None = not said
    dtype_from: str  # who says it: `config` or `weights`; `` = nobody
    weight_bytes: int | None  # as stored; None = not known here
    num_parameters: int | None  # by the config, about; None = not known
    max_context_len: int
    vocab_size: int | None

    def loaded_bytes(self, dtype: str) -> int | None:
        """Bytes of the weights once they are `dtype`; by the config where there are no files."""
        if self.weight_bytes is None:
            known = self.num_parameters
            return None if known is None else known * ITEMSIZES[dtype]
        if self.dtype not in ITEMSIZES:
            return self.weight_bytes
        return self.weight_bytes * ITEMSIZES[dtype] // ITEMSIZES[self.dtype]


def target_outline(source: str, *, trust_remote_code: bool = False) -> Outline:
    """The outline of a decoder in a folder or on the hub, of which the config alone is fetched.

    Args:
        source: a folder or a hub name.
        trust_remote_code: run Python code that the config brings; otherwise it is refused.

    Raises:
        ConfigError: nothing found at `source`, or a model that cannot run over pages.
    """
    found = find_model(source)
    folder = found or fetch_config(source).parent
    raw = read_config(folder)
    check_counts(source, raw)
    plain = PlainConfig.parse(raw)
    if plain is None:
        plain = _by_transformers(source, folder, trust_remote_code)
    if found is None:
        _fetch_index(source)
    try:
        num_bytes = weight_bytes(folder)
    except CheckpointError:
        num_bytes = None
    dtype, dtype_from = _dtype(raw, folder)
    return Outline(
        layers=plain.layers,
        dtype=dtype,
        dtype_from=dtype_from,
        weight_bytes=num_bytes,
        num_parameters=plain.num_parameters or None,
        max_context_len=plain.max_context_len,
        vocab_size=plain.vocab_size or None,
    )


def _dtype(raw: dict[str, Any], folder: Path) -> tuple[str | None, str]:
    """The dtype of the weights, and who says it."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):  # transformers 5 and 4
            if isinstance(part.get(key), str):
                return part[key].removeprefix("torch."), "config"
    try:
        dtype = main_dtype(weight_files(folder))
    except CheckpointError:
        dtype = None
    return (dtype, "weights") if dtype in ITEMSIZES else (None, "")


def _by_transformers(source: str, folder: Path, trust_remote_code: bool) -> PlainConfig:
    """What transformers makes of a config.

    Raises:
        ConfigError: it is not installed, or the model cannot run over pages.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"the config of {source} takes transformers to read: pip install 'specpool[hf]', or "
            "give --layers, --kv-heads and --head-dim instead; without it these types are read, if "
            f"no key is missing: {', '.join(FAMILIES)}"
        ) from None
    from specpool.models.gate import max_context_len, text_config
    from specpool.models.target_folder import TargetFolder, load_config

    config = load_config(TargetFolder(source, folder, trust_remote_code))
    vocab_size = _integer(text_config(config), "vocab_size")
    return PlainConfig(stated_layers(config), max_context_len(config), vocab_size, 0)


def stated_layers(config: Any) -> tuple[LayerKV, ...]:
    """What each layer keeps of a token, by a config that `check_config` has passed.

    Raises:
        ConfigError: the config does not say it.
    """
    from specpool.models import torch_attention
    from specpool.models.gate import has_recurrent_layers, text_config
    from specpool.models.probe import chunk_size

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
    """The outline of an EAGLE head; of its weights the headers alone are read.

    Raises:
        CheckpointError: nothing found at `source`, or no EAGLE head.
    """
    folder = find_folder(source)
    files = weight_files(folder)
    raw = read_config(folder)
    weights: Any
    if all(path.suffix == ".safetensors" for path in files):
        headers = [read_header(path) for path in files]
        weights = {normal_name(name): t for header in headers for name, t in header.items()}
    else:
        from specpool.models.files.checkpoint import Weights

        weights = Weights(folder)
    try:
        config = EagleConfig.parse(raw, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    dtype = main_dtype(files)
    return Outline(
        layers=tuple(LayerKV(heads, dim, dim) for heads, dim in config.layer_kv),
        dtype=dtype if dtype in ITEMSIZES else None,
        dtype_from="weights" if dtype in ITEMSIZES else "",
        weight_bytes=weight_bytes(folder),
        num_parameters=None,
        max_context_len=config.max_position_embeddings,
        vocab_size=config.draft_vocab_size,
    )


def _fetch_index(name: str) -> None:
    """Fetch the index of a hub model's weights if there is one: it says how big they are."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "model.safetensors.index.json")
    except Exception:  # a single file has no index; offline, what is not there stays away
        pass
