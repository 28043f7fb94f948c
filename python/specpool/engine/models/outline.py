"""`Outline`: the KV per token and the size of a model, read from its config alone.

No weights are read. A config of a common family is parsed without torch; others need transformers.
A test checks, for every family, that the config and `probe` agree on what layers keep.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.capacity.layer_kv import LayerKV
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.models.block.config import BlockConfig
from specpool.engine.models.eagle.config import EagleConfig
from specpool.engine.models.files.checkpoint import (
    check_counts,
    find_folder,
    normal_name,
    read_config,
    weight_bytes,
    weight_files,
)
from specpool.engine.models.files.draft_kind import is_block_config
from specpool.engine.models.files.headers import main_dtype, read_header
from specpool.engine.models.files.hub import from_hub
from specpool.engine.models.files.names import fetch_config, find_model
from specpool.engine.models.files.plain_config import FAMILIES, PlainConfig
from specpool.engine.models.mtp.layout import files_beside
from specpool.errors import CheckpointError, ConfigError, reading

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# A config with one of these keys states the width of keys and values in a way not read here.
_OTHER_KEYS = ("multi_query", "kv_channels", "attn_config")


@dataclass(frozen=True, slots=True)
class Outline:
    """The numbers of a model that the sizing of memory needs."""

    layers: tuple[LayerKV, ...]
    dtype: str | None  # of the stored weights; None if not known
    dtype_from: str  # where `dtype` is from: `config` or `weights`; empty if not known
    weight_bytes: int | None  # of the stored weights; None if not known
    num_parameters: int | None  # about, by the config; None if not known
    max_context_len: int
    vocab_size: int | None
    context_reason: str = ""  # why the context is not the config's; empty if it is
    states: StateBytes | None = None  # of recurrent layers, whose KV is not in `layers`
    num_layers: int = 0  # decoder layers, with those that keep no KV

    def loaded_bytes(self, dtype: str) -> int | None:
        """Return the bytes of the weights in `dtype`, by the files or else by the config."""
        if self.weight_bytes is None:
            known = self.num_parameters
            return None if known is None else known * ITEMSIZES[dtype]
        if self.dtype not in ITEMSIZES:
            return self.weight_bytes
        return self.weight_bytes * ITEMSIZES[dtype] // ITEMSIZES[self.dtype]


def target_outline(
    source: str, *, trust_remote_code: bool = False, dtype: str | None = None
) -> Outline:
    """Return the outline of a decoder; from the hub only the config is fetched.

    Args:
        source: a folder or a hub name.
        trust_remote_code: run Python code of the checkpoint; if False, a model that needs it is
            refused.
        dtype: what the weights are loaded in; None: as stored, or float32 if that is not known.
            Recurrent states depend on it.

    Raises:
        ConfigError: there is no model at `source`, or it cannot run over pages.
    """
    local_folder = find_model(source)
    folder = local_folder or fetch_config(source).parent
    raw = read_config(folder)
    check_counts(source, raw)
    plain = PlainConfig.parse(raw)
    stored_dtype, dtype_from = _dtype(raw, folder)
    if plain is None:
        loaded_dtype = dtype or stored_dtype or "float32"
        plain = _by_transformers(source, folder, trust_remote_code, loaded_dtype)
    if local_folder is None:
        _fetch_index(source)
    try:
        num_bytes = weight_bytes(folder)
        if plain.is_part and stored_dtype in ITEMSIZES and not raw.get("quantization_config"):
            num_bytes = min(num_bytes, plain.num_parameters * ITEMSIZES[stored_dtype])
    except CheckpointError:
        num_bytes = None
    return Outline(
        layers=plain.layers,
        dtype=stored_dtype,
        dtype_from=dtype_from,
        weight_bytes=num_bytes,
        num_parameters=plain.num_parameters or None,
        max_context_len=plain.max_context_len,
        vocab_size=plain.vocab_size or None,
        context_reason=plain.context_reason,
        states=plain.states,
        num_layers=plain.num_layers or len(plain.layers),
    )


def mtp_bytes_beside(source: str, target: Outline, dtype: str) -> int:
    """Return the bytes, in `dtype`, of a target's MTP layer in files that its index does not name.

    Args:
        source: the target's folder or hub name; of the latter nothing is known.
        target: the target's outline, whose `weight_bytes` do not count these files.
        dtype: what the weights are loaded in.

    Raises:
        CheckpointError: one of the files is not sound.
    """
    folder = find_model(source)
    try:
        files = [] if folder is None else files_beside(folder, target.num_layers)
    except CheckpointError:
        if target.weight_bytes is None:  # a config alone
            return 0
        raise
    if (stored := main_dtype(files)) not in ITEMSIZES:
        stored = dtype
    size = sum(path.stat().st_size for path in files)
    return size * ITEMSIZES[dtype] // ITEMSIZES[stored]


def _dtype(raw: dict[str, Any], folder: Path) -> tuple[str | None, str]:
    """Return the dtype of the weights, and where it is from: "config", "weights" or ""."""
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


def _by_transformers(source: str, folder: Path, trust_remote_code: bool, dtype: str) -> PlainConfig:
    """Read a config with transformers. `dtype` is as in `target_outline`.

    Raises:
        ConfigError: transformers is not installed, or the model cannot run over pages.
    """
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"the config of {source} takes transformers to read: pip install 'specpool[hf]', or "
            "give --layers, --kv-heads and --head-dim instead; without it these types are read, if "
            f"no key is missing: {', '.join(FAMILIES)}"
        ) from None
    from specpool.engine.models.gate import context_limit, has_recurrent_layers, text_config
    from specpool.engine.models.target_folder import (
        TargetFolder,
        empty_model,
        load_config,
        runs_own_code,
    )

    config = load_config(TargetFolder(source, folder, trust_remote_code))
    vocab_size = _integer(text_config(config), "vocab_size")
    longest, reason = context_limit(config)
    is_part = text_config(config) is not config and not runs_own_code(config)
    if has_recurrent_layers(config):
        from specpool.engine.models.state_outline import outline_states

        with reading(f"{source}: no model can be built of its config.json", ConfigError):
            outline = outline_states(config, getattr(torch, dtype))
        return PlainConfig(
            outline.layers,
            longest,
            vocab_size,
            outline.num_parameters,
            reason,
            is_part,
            outline.states,
            _integer(text_config(config), "num_hidden_layers"),
        )
    layers, num_parameters = stated_layers(config), 0
    if is_part:  # the files hold more than is loaded
        with reading(f"{source}: no model can be built of its config.json", ConfigError):
            parameters = empty_model(config).parameters()
        num_parameters = sum(parameter.numel() for parameter in parameters)
    return PlainConfig(layers, longest, vocab_size, num_parameters, reason, is_part)


def stated_layers(config: Any) -> tuple[LayerKV, ...]:
    """Return the KV of each layer by a config that `check_config` has passed.

    Raises:
        ConfigError: the config does not state it in the usual keys.
    """
    from specpool.engine.models import torch_attention
    from specpool.engine.models.gate import text_config
    from specpool.engine.models.probe import chunk_size

    text = text_config(config)
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
    except Exception as error:  # transformers 5 raises for a key with one value per layer
        raise refusal from error
    v_head_dim = _integer(text, "v_head_dim") or head_dim
    if _integer(text, "kv_lora_rank"):  # latent attention: pages keep the expanded heads
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
    """Return each layer's window; without `layer_types`, all layers have the config's window."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if window is None or kinds is None:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _integer(config: Any, key: str) -> int:
    """Return the config's integer value of a key, or 0."""
    value = getattr(config, key, None)
    return value if isinstance(value, int) else 0


def head_outline(source: str | os.PathLike[str]) -> Outline:
    """Return the outline of a head; of safetensors files only the headers are read.

    Raises:
        CheckpointError: there is nothing at `source`, or it is neither an EAGLE head nor a block
            drafter.
    """
    folder = find_folder(source)
    files = weight_files(folder)
    raw = read_config(folder)
    weights: Any
    if all(path.suffix == ".safetensors" for path in files):
        headers = [read_header(path) for path in files]
        weights = {normal_name(name): t for header in headers for name, t in header.items()}
    else:
        from specpool.engine.models.files.checkpoint import Weights

        weights = Weights(folder)
    try:
        config: BlockConfig | EagleConfig = (
            BlockConfig.parse(raw) if is_block_config(raw) else EagleConfig.parse(raw, weights)
        )
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
    """Fetch the index of a hub model's weights if there is one, because it has their size."""
    from huggingface_hub import hf_hub_download

    try:
        with from_hub(name) as only_cached:
            hf_hub_download(name, "model.safetensors.index.json", local_files_only=only_cached)
    except Exception:  # a single weight file has no index, and the network may be off
        pass
