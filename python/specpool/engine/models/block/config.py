"""`BlockConfig`: the config.json of a block drafter in the layout of DFlash.

The keys are those of a Qwen3 decoder, and beside them, at the top level or in `dflash_config`,
`block_size`, `mask_token_id` and `target_layer_ids` (https://github.com/z-lab/dflash).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpool.checks import shown
from specpool.engine.models.eagle.config import NEUTRAL, ConfigReader, EagleConfig
from specpool.engine.models.files.checkpoint import check_counts
from specpool.errors import CheckpointError

#: Tokens of a block if the config does not say it, as in the published code.
_BLOCK_SIZE = 16
_KNOWN = frozenset(
    {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "mask_token"}
)
#: Keys beside them: the first holds them, and the windows of layers are read from `layer_types`.
_SILENT = frozenset(
    {"dflash_config", "use_sliding_window", "max_window_layers", "tie_word_embeddings"}
)
#: Options that are supported with these values alone, with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "sample_from_anchor": (False,),
}


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The content of a block drafter's config.json.

    Attributes:
        layers: the decoder layers, in the words of a head's config.
        block_size: the most tokens of a block, the root included.
        mask_token_id: the token that stands for one that is not known yet.
        target_layer_ids: target layers whose *outputs* are the features, in this order.
        num_target_layers: layers of the target; None if not stated.
        windows: per layer, the keys that a query sees, its own included; None means all.
        causal: per layer, whether a token of the block sees no token behind it.
        unread: keys of the config that nothing here reads, and that are not known to be neutral.
    """

    layers: EagleConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    unread: tuple[str, ...]

    @property
    def layer_kv(self) -> tuple[tuple[int, int], ...]:
        """Per layer (num_kv_heads, head_dim)."""
        return self.layers.layer_kv

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the drafter was trained for."""
        return self.layers.max_position_embeddings

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the drafter can propose: those of the target."""
        return self.layers.draft_vocab_size

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> BlockConfig:
        """Read a `config.json`.

        Raises:
            CheckpointError: a key is missing or has a wrong value, or is of a variant that is not
                supported; the message has its name and value.
        """
        if "speculators_model_type" in raw:
            raise CheckpointError(
                f"a {shown(raw['speculators_model_type'])} speculator: block drafters are read in "
                "DFlash's own layout alone"
            )
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"config.json: dflash_config is {shown(nested)}, not an object")
        check_counts("a block drafter", raw)
        _check_options(raw, nested)
        spec = ConfigReader({**raw, **nested})
        spec.check_neutral(NEUTRAL, of_eagle3=False)
        layers = EagleConfig.of_layers(spec)
        if spec.integer("draft_vocab_size", default=layers.vocab_size) != layers.vocab_size:
            raise CheckpointError(
                f"config.json: draft_vocab_size {spec.get('draft_vocab_size')[1]} is not the "
                f"vocab_size {layers.vocab_size}: block drafters share the target's vocabulary"
            )
        block_size = spec.integer("block_size", least=2, default=_BLOCK_SIZE)
        if block_size > layers.max_position_embeddings:
            raise CheckpointError(
                f"config.json: block_size {block_size} is above the "
                f"{layers.max_position_embeddings} positions of max_position_embeddings"
            )
        mask = spec.maybe_integer("mask_token_id", least=0)
        if mask is None or mask >= layers.vocab_size:
            raise CheckpointError(
                f"config.json: mask_token_id is {mask}, it must be a token of the vocabulary "
                f"[0, {layers.vocab_size})"
            )
        windows, causal = _attention(spec, layers.num_layers, block_size)
        return cls(
            layers=layers,
            block_size=block_size,
            mask_token_id=mask,
            target_layer_ids=_layer_ids(spec.get("target_layer_ids")[1]),
            num_target_layers=spec.maybe_integer("num_target_layers"),
            windows=windows,
            causal=causal,
            unread=tuple(
                key for key in spec.unread() if key not in _SILENT.union(_KNOWN, _NEUTRAL)
            ),
        )

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the target layers whose *inputs* are the features.

        The output of the last layer is refused: published code reads it behind the final norm,
        which is not a layer's input.

        Args:
            num_layers: the target's.

        Raises:
            CheckpointError: the drafter was made for a target of another depth.
        """
        if self.num_target_layers not in (None, num_layers):
            raise CheckpointError(
                f"a block drafter for another target: made for {self.num_target_layers} layers, "
                f"the target has {num_layers}"
            )
        wrong = [i for i in self.target_layer_ids if not 0 <= i < num_layers - 1]
        if wrong:
            raise CheckpointError(
                f"config.json: target_layer_ids {list(self.target_layer_ids)} has {wrong[0]}: "
                f"allowed are 0..{num_layers - 2}, because the target has {num_layers} layers and "
                "the last one's output is not supported"
            )
        return tuple(i + 1 for i in self.target_layer_ids)


def _check_options(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Refuse what changes the model in a way that is not known here."""
    names = raw.get("architectures")
    if isinstance(names, list) and any("dflash2" in str(name).lower() for name in names):
        raise CheckpointError(
            f"config.json: architectures {shown(names)}: DFlash2 is not supported"
        )
    if raw.get("quantization_config"):
        raise CheckpointError("config.json: quantized block drafters are not supported")
    for key, values in _NEUTRAL.items():
        value = nested.get(key, raw.get(key))
        if value is not None and value not in values:
            raise CheckpointError(f"config.json: {key} {shown(value)} is not supported")
    unknown = sorted(set(nested) - _KNOWN - set(_NEUTRAL))
    if unknown:
        raise CheckpointError(
            f"config.json: dflash_config has {', '.join(unknown)!s:.160}: block drafters with such "
            "options are not supported"
        )


def _layer_ids(value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and value and all(type(i) is int for i in value)
    if not is_list or len(set(value)) < len(value):
        raise CheckpointError(
            f"config.json: target_layer_ids is {shown(value)}, not a list of different layer "
            "numbers"
        )
    return tuple(value)


def _attention(
    spec: ConfigReader, num_layers: int, block_size: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's window, and whether it is causal within the block.

    As in the published code, sliding layers are causal and full ones are not, unless `is_causal` or
    `causal` says it for all.
    """
    kinds = spec.layer.get("layer_types") or ["full_attention"] * num_layers
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise CheckpointError(f"config.json: layer_types is {shown(kinds)}, allowed are {allowed}")
    if len(kinds) < num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    slides = [kind == "sliding_attention" for kind in kinds[:num_layers]]
    window = spec.integer("sliding_window") if any(slides) else None
    if window is not None and window < block_size:
        raise CheckpointError(
            f"config.json: sliding_window {window} is below block_size {block_size}: not supported"
        )
    is_causal = spec.flag("is_causal", "causal")
    causal = tuple(is_sliding if is_causal is None else is_causal for is_sliding in slides)
    return tuple(window if is_sliding else None for is_sliding in slides), causal
