"""`PlainConfig`: a decoder's config.json, read without transformers for the listed families.

transformers fills missing keys with defaults of the family. So a file is read here only if its
family is listed and no missing key matters. A test compares each family with transformers. All
other files need transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpool.capacity.layer_kv import LayerKV
from specpool.capacity.state_sizes import StateBytes


@dataclass(frozen=True, slots=True)
class _ConfigFamily:
    """The meaning of a family's keys.

    Attributes:
        slides: which layers have the window, if there is one. `never`: none; `all`: all; `asked`:
            all if `use_sliding_window` is true; a number n: all but every n-th.
        derives_head_dim: a missing `head_dim` means hidden_size / num_attention_heads.
        is_gated: whether an MLP has three matrices instead of two.
        expert_keys: the keys that may hold the number of experts.
    """

    slides: str | int = "never"
    derives_head_dim: bool = False
    is_gated: bool = True
    expert_keys: tuple[str, ...] = ()


_FAMILIES = {
    "llama": _ConfigFamily(derives_head_dim=True),
    "mistral": _ConfigFamily("all", derives_head_dim=True),
    "mixtral": _ConfigFamily("all", derives_head_dim=True, expert_keys=("num_local_experts",)),
    "qwen2": _ConfigFamily("asked", derives_head_dim=True),
    "qwen3": _ConfigFamily("asked"),
    "qwen3_moe": _ConfigFamily(
        "asked", derives_head_dim=True, expert_keys=("num_experts", "num_local_experts")
    ),
    "gemma": _ConfigFamily(),
    "gemma2": _ConfigFamily(2),
    "gemma3_text": _ConfigFamily(6),
    "gpt_oss": _ConfigFamily(2, expert_keys=("num_local_experts",)),
    "phi3": _ConfigFamily("all", derives_head_dim=True),
    "starcoder2": _ConfigFamily("all", derives_head_dim=True, is_gated=False),
    "olmo": _ConfigFamily(derives_head_dim=True),
    "olmo2": _ConfigFamily(derives_head_dim=True),
    "granite": _ConfigFamily(derives_head_dim=True),
    "cohere": _ConfigFamily(derives_head_dim=True),
    "cohere2": _ConfigFamily(4),
}
FAMILIES = tuple(_FAMILIES)

_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "max_position_embeddings",
    "vocab_size",
)
# Keys that change the architecture of a family, so that its file is not read here.
_OTHERS = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "attention_chunk_size",
    "text_config",
    "is_encoder_decoder",
    "add_cross_attention",
    "auto_map",
    "mlp_only_layers",
    "sliding_window_pattern",
)


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The content of a config that the sizing of memory needs.

    Attributes:
        layers: the KV of each layer.
        max_context_len: the longest context in tokens.
        vocab_size: width of the logits.
        num_parameters: about; without norms and biases. Tied embeddings count once.
        context_reason: why `max_context_len` is below the config's; empty if it is not.
        is_part: the files hold other parts beside the decoder, which are not counted.
        states: what recurrent layers keep; None if there are none.
        num_layers: decoder layers, if some keep no KV; else 0.
    """

    layers: tuple[LayerKV, ...]
    max_context_len: int
    vocab_size: int
    num_parameters: int
    context_reason: str = ""
    is_part: bool = False
    states: StateBytes | None = None
    num_layers: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> PlainConfig | None:
        """Read a parsed config.json; None if it needs transformers."""
        family = _FAMILIES.get(str(raw.get("model_type")))
        if family is None or any(raw.get(key) for key in _OTHERS):
            return None
        sizes = [raw.get(key) for key in _SIZES]
        if not all(type(size) is int and 0 < size < 1 << 30 for size in sizes):
            return None
        layers, heads, kv_heads, hidden, length, vocab = (int(size or 0) for size in sizes)
        head_dim = raw.get("head_dim")
        if head_dim is None and family.derives_head_dim:
            head_dim = hidden // heads
        windows = _windows(raw, family, layers)
        if type(head_dim) is not int or head_dim < 1 or windows is None or layers > 1 << 16:
            return None
        longest, reason = longest_context(length, raw)
        return cls(
            tuple(LayerKV(kv_heads, head_dim, head_dim, window) for window in windows),
            longest,
            vocab,
            _num_parameters(raw, family, layers, heads * head_dim, kv_heads * head_dim),
            context_reason=reason,
        )


def longest_context(length: int, config: Any) -> tuple[int, str]:
    """Return the longest context at which RoPE does not depend on other lanes of a batch, and why.

    NOTE: "longrope" and "dynamic" rotary embeddings change with the longest position *of the
    batch*, so one lane would change another's text. Below `original_max_position_embeddings` they
    do not change, so the context ends there.

    Args:
        length: the config's `max_position_embeddings`.
        config: a parsed config.json, or transformers' config.

    Returns:
        The length in tokens, and the reason if it is below `length`; else an empty text.
    """

    def value_of(key: str) -> Any:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    longest, reason = int(length), ""
    for key in ("rope_parameters", "rope_scaling"):  # transformers 5 and 4
        settings = value_of(key)
        if not isinstance(settings, dict):
            continue
        for rope in [settings, *(part for part in settings.values() if isinstance(part, dict))]:
            kind = rope.get("rope_type", rope.get("type"))
            if kind not in ("longrope", "su", "dynamic"):
                continue
            original = rope.get("original_max_position_embeddings") or value_of(
                "original_max_position_embeddings"
            )
            if original and original < longest:
                longest = int(original)
                reason = (
                    f"its config says {length}, but beyond the {longest} of "
                    f"original_max_position_embeddings its {kind} rotary embedding changes with "
                    "the longest row of a batch, so one request would change another's text"
                )
    return longest, reason


def _windows(raw: Mapping[str, Any], family: _ConfigFamily, layers: int) -> list[int | None] | None:
    """Return each layer's window; None if the file does not state them."""
    if family.slides == "never":
        return None if raw.get("sliding_window") else [None] * layers
    if "sliding_window" not in raw:
        return None  # transformers would use the family's default
    window = raw["sliding_window"]
    if family.slides == "asked" and "use_sliding_window" not in raw:
        return None
    if window is None or (family.slides == "asked" and not raw["use_sliding_window"]):
        return [None] * layers
    if type(window) is not int or window < 1:
        return None
    kinds = raw.get("layer_types")
    if kinds is None and family.slides == "all":
        return [window] * layers
    if kinds is None and isinstance(family.slides, int):
        return [None if (at + 1) % family.slides == 0 else window for at in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        return None
    if not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        return None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _num_parameters(
    raw: Mapping[str, Any], family: _ConfigFamily, layers: int, query_dim: int, kv_dim: int
) -> int:
    """Count the parameters of embeddings, attention, and MLP or experts with their router."""

    def size(key: str) -> int:
        value = raw.get(key)
        return value if type(value) is int and 0 < value < 1 << 30 else 0

    hidden = size("hidden_size")
    attention = 2 * hidden * (query_dim + kv_dim)
    num_experts = next((size(key) for key in family.expert_keys if size(key)), 0)
    inner = size("moe_intermediate_size") if num_experts else 0
    inner = inner or size("intermediate_size") or 4 * hidden
    mlp = (3 if family.is_gated else 2) * hidden * inner
    if num_experts:
        mlp = num_experts * (mlp + hidden)
    ties = raw.get("tie_word_embeddings", str(raw["model_type"]).startswith(("gemma", "cohere")))
    return size("vocab_size") * hidden * (1 if ties else 2) + layers * (attention + mlp)
