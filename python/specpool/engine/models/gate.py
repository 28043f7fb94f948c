"""Checks of a Hugging Face model by its config: can it run over pages?

There are two gates, both at loading, before any pool exists. `check_config` and `check_class`
refuse models that are known not to fit, by config and class alone. `probe` then runs a few tokens
through the model's own attention and over pages and compares the logits. It also finds unknown
models that mix tokens outside attention, or that need something that paged attention does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from specpool.engine.models.files.plain_config import longest_context
from specpool.engine.models.torch_attention import CALLS_TORCH
from specpool.errors import ConfigError

# Config keys and names of layers that carry a state from token to token.
_RECURRENT_KEYS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "mamba_n_heads",
    "attn_layer_period",
    "attn_layer_indices",
    "hybrid_override_pattern",
    "layers_block_type",
    "block_types",
    "lru_width",
    "linear_num_key_heads",
    "linear_conv_kernel_dim",
    "conv_L_cache",
)
_RECURRENT_TYPES = frozenset({"rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba"})
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent", "hybrid"})
_KNOWN_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention"}
)
_MEDIA = ("image", "video", "audio")
#: Types with chunked attention that run here: a test compares each with transformers.
CHUNKED = ("llama4_text",)
#: Types with recurrent layers that run here: a test compares each with transformers.
RECURRENT = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
)


def refusal(model_type: str, reason: str) -> ConfigError:
    """Return the error that refuses a model of this type for this reason."""
    return ConfigError(f"cannot run a model of type {model_type!r} over pages: {reason}")


def text_config(config: Any) -> Any:
    """Return the text decoder's part of a config; it is the config itself unless multimodal."""
    return config.get_text_config(decoder=True)


def media_tokens(config: Any) -> dict[int, str]:
    """Return the tokens that stand for an image, a video or sound, with the config's key of each.

    A multimodal model replaces their embeddings by features of the image.
    """
    if text_config(config) is config:
        return {}
    keys = (f"{kind}_token_{end}" for kind in _MEDIA for end in ("id", "index"))
    token_of_key = {key: getattr(config, key, None) for key in keys}
    return {token: key for key, token in token_of_key.items() if isinstance(token, int)}


def check_config(config: Any) -> None:
    """Refuse, by config alone, models that cannot run over pages.

    Raises:
        ConfigError: the model cannot run; the message names its type and the reason.
    """
    text = text_config(config)
    for reason in _reasons(config, text):
        raise refusal(config.model_type, reason)


def has_recurrent_layers(config: Any) -> bool:
    """Return whether the config has layers that carry a state from token to token."""
    return next(_recurrent_reasons(config, text_config(config)), None) is not None


def _recurrent_reasons(config: Any, text: Any) -> Iterator[str]:
    layer_types = getattr(text, "layer_types", None) or ()
    if layer_types and _KNOWN_LAYER_TYPES.issuperset(layer_types):
        return  # a hybrid's config without any of its recurrent layers, as of its MTP layer
    if config.model_type in _RECURRENT_TYPES:
        yield "its layers are recurrent"
    for key in _RECURRENT_KEYS:
        if getattr(text, key, None) is not None:
            yield f"it has recurrent layers ({key} is set)"
    for index, kind in enumerate(layer_types):
        if kind in _RECURRENT_LAYERS:
            yield f"its layer {index} is recurrent ({kind})"


def _reasons(config: Any, text: Any) -> Iterator[str]:
    def get(key: str) -> Any:
        return getattr(text, key, None)

    if config.is_encoder_decoder or get("is_encoder_decoder"):
        yield "it is an encoder-decoder; its cross attention reads another sequence's KV"
    if get("add_cross_attention") or get("cross_attention_layers"):
        yield "it has cross attention, which reads another sequence's KV"
    # GPT-NeoX, a decoder, also has is_decoder=False, so look for type_vocab_size too.
    if get("is_decoder") is False and get("type_vocab_size"):
        yield "it is an encoder (is_decoder is false): its tokens see those behind them"
    if get("index_topk"):
        yield (
            f"an indexer picks the {get('index_topk')} keys that a query sees (index_topk), which"
            " no view says"
        )
    if get("num_kv_shared_layers"):
        yield f"its last {get('num_kv_shared_layers')} layers share the KV of earlier ones"
    layer_types = get("layer_types")
    is_chunked = "chunked_attention" in (layer_types or ())
    if (is_chunked and text.model_type not in CHUNKED) or (
        not layer_types and get("attention_chunk_size")
    ):
        yield (
            f"chunked attention (attention_chunk_size {get('attention_chunk_size')}); with it and"
            f" layer_types these types run: {', '.join(CHUNKED)}"
        )
    recurrent = next(_recurrent_reasons(config, text), None)
    if recurrent is not None and text.model_type not in RECURRENT:
        yield (
            f"{recurrent}, whose state is no KV that lies in pages; with such layers these types"
            f" run: {', '.join(RECURRENT)}"
        )
    for index, kind in enumerate(layer_types or ()):
        if recurrent is None and kind not in _KNOWN_LAYER_TYPES:
            yield f"layer {index} is of type {kind!r}, which is not plain attention over K and V"
    attn_config = get("attn_config")
    if (
        get("alibi")
        or getattr(attn_config, "alibi", False)
        or config.model_type in ("bloom", "mpt")
    ):
        yield (
            "alibi adds a bias to its scores, which its attention does by itself: transformers'"
            " AttentionInterface hands none over"
        )


def check_class(model_class: type, model_type: str, *, is_recurrent: bool) -> None:
    """Refuse model classes that do not call transformers' `AttentionInterface`.

    A class passes if it says so, or if its module has the table of attention functions. Classes
    with recurrent layers do neither, so they always pass. The probe finds wrong passes.

    Raises:
        ConfigError: the class does not call it; the message names the model type and the class.
    """
    calls_interface = getattr(model_class, "_supports_attention_backend", False) or hasattr(
        sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"
    )
    if not calls_interface and not is_recurrent and model_type not in CALLS_TORCH:
        raise refusal(
            model_type,
            f"{model_class.__name__} computes attention by itself, not through transformers'"
            " AttentionInterface",
        )


#: The longest context, in tokens, of a recurrent model whose config states none.
NO_POSITIONS = 1 << 18


def context_limit(config: Any) -> tuple[int, str]:
    """Return the longest context in tokens, and why it is not the config's; see `longest_context`.

    Raises:
        ConfigError: the config has no `max_position_embeddings`.
    """
    text = text_config(config)
    length = getattr(text, "max_position_embeddings", None)
    if length is None and has_recurrent_layers(config):
        return NO_POSITIONS, "its config states no positions, as its layers need none"
    if length is None:
        raise refusal(config.model_type, "its config has no max_position_embeddings")
    return longest_context(int(length), text)
