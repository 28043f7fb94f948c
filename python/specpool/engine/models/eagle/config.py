"""`EagleConfig`: a head's config.json, read from any of its published spellings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

from specpool.checks import shown
from specpool.errors import CheckpointError

Kind = Literal["eagle", "eagle3"]

_MOST = (1 << 31) - 1  # of every size
#: Keys that change no result of a head: names, tokens of texts, training, files, and a window that
#: `sliding_window` found to be switched off.
_SILENT = frozenset(
    """
    _name_or_path architectures attention_dropout attn_implementation auto_map
    base_model_ep_plan base_model_pp_plan base_model_tp_plan bos_token_id dtype
    embed_requires_grad eos_token_id has_lm_head has_no_defaults_at_init hidden_dropout
    initializer_range is_decoder modal_type model_type output_router_logits pad_token_id
    parallel_draft_heads_num_layers pretraining_tp router_aux_loss_coef sliding_window
    speculators_config speculators_version target_model_type torch_dtype transformers_version
    transformers_weights truncated_vocab_size unk_token_id use_cache
    """.split()
)
#: Biases exist exactly if the file has them, whatever these keys say.
_BY_TENSORS = frozenset({"attention_bias", "bias", "mlp_bias"})
#: Options that change the computation, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (0, 0.0),
    "embedding_multiplier": (1, 1.0),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "partial_rotary_factor": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "scale_emb": (1, 1.0),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The content of a head's config.json, in one spelling.

    Attributes:
        kind: `eagle` (EAGLE-1 and 2) or `eagle3`.
        hidden_size: h of the head.
        target_hidden_size: h of its target; None if not stated.
        vocab_size: V of the target.
        draft_vocab_size: Vd, the size of the head's own output vocabulary; V if it has none.
        num_layers: decoder layers, almost always 1.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: D.
        intermediate_size: I of the MLP.
        rms_norm_eps: epsilon of all norms.
        hidden_act: activation of the MLP, by transformers' name.
        qkv_bias: q, k, v must have a bias; if False, they may have one.
        rope_theta: RoPE base.
        rope_scaling: RoPE parameters of transformers, `rope_type` included; None means plain RoPE.
        max_position_embeddings: positions that the head was trained for.
        sliding_window: keys that a query sees, its own included; None means all.
        norm_before_residual: EAGLE-3: the residual is `hidden_norm(g)`, not `g`.
        norm_output: EAGLE-3: the recurrent feature is post-norm.
        norm_before_fc: EAGLE-3: one norm over the concatenated features; None: only if its
            weights exist.
        fc_norm: EAGLE-3: a norm per feature; None: only if its weights exist.
        use_aux_hidden_state: EAGLE-3: features are layer inputs; else the last hidden state.
        num_aux_hidden_states: EAGLE-3: layer inputs per feature; None if not stated.
        feature_layers: EAGLE-3: target layers whose inputs are the features; None if not stated.
        ties_embedding: without an output matrix in the file, the head's own embedding takes its
            place.
        unread: keys of the config that nothing here reads, and that are not known to be neutral.
    """

    kind: Kind
    hidden_size: int
    target_hidden_size: int | None
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    hidden_act: str
    qkv_bias: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    sliding_window: int | None
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool | None
    fc_norm: bool | None
    use_aux_hidden_state: bool
    num_aux_hidden_states: int | None
    feature_layers: tuple[int, ...] | None
    ties_embedding: bool
    unread: tuple[str, ...]

    @property
    def layer_kv(self) -> tuple[tuple[int, int], ...]:
        """Per layer (num_kv_heads, head_dim)."""
        return ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, Any],
        weights: Mapping[str, Sized],
        feature_layers: Sequence[int] | None = None,
    ) -> EagleConfig:
        """Read a `config.json` in any published spelling.

        The kind follows from config keys and tensor names, because `architectures` is often wrong.

        Args:
            raw: the parsed `config.json`.
            weights: the head's tensors under their normal names.
            feature_layers: target layers whose inputs are the features; overrides the file.

        Raises:
            CheckpointError: it is not an EAGLE head, or a key is missing or has a wrong value.
        """
        spec = ConfigReader(raw)
        kind = _kind(spec, weights)
        if spec.get("quantization_config")[1]:
            raise CheckpointError("config.json: quantized heads are not supported")
        spec.check_neutral(NEUTRAL, of_eagle3=kind == "eagle3")
        if spec.integer("num_local_experts", least=0, default=0):
            raise CheckpointError("config.json: mixture-of-experts heads are not supported")
        hidden_size, num_heads = spec.integer("hidden_size"), spec.integer("num_attention_heads")
        num_kv_heads = spec.integer("num_key_value_heads", default=num_heads)
        head_dim = spec.integer("head_dim", default=hidden_size // num_heads)
        _check_heads(num_heads, num_kv_heads, head_dim)
        num_layers = spec.integer("num_hidden_layers", default=1)
        if num_layers > max(1, len(weights)):
            raise CheckpointError(
                f"config.json: {num_layers} layers, the weight files hold {len(weights)} tensors"
            )
        vocab_size = spec.integer("vocab_size")
        rope_theta, rope_scaling = spec.rope()
        head = cls(
            kind=kind,
            hidden_size=hidden_size,
            target_hidden_size=spec.maybe_integer("target_hidden_size"),
            vocab_size=vocab_size,
            draft_vocab_size=_draft_vocab_size(spec, weights, kind, vocab_size),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=spec.integer("intermediate_size"),
            rms_norm_eps=spec.epsilon(),
            hidden_act=spec.activation(),
            qkv_bias=bool(spec.flag("qkv_bias")),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=spec.integer("max_position_embeddings", default=2048),
            sliding_window=spec.sliding_window(),
            norm_before_residual=spec.flag_or("norm_before_residual", spec.is_speculators),
            norm_output=bool(spec.flag("norm_output")),
            norm_before_fc=spec.flag("norm_before_fc"),
            fc_norm=spec.flag("fc_norm", "use_aux_norm"),
            use_aux_hidden_state=spec.flag_or("use_aux_hidden_state", True),
            num_aux_hidden_states=spec.maybe_integer("num_aux_hidden_states"),
            feature_layers=(
                spec.feature_layers() if feature_layers is None else tuple(feature_layers)
            ),
            ties_embedding=spec.flag_or("tie_word_embeddings", False),
            unread=(),
        )
        return replace(head, unread=spec.unread())

    @classmethod
    def of_layers(cls, spec: ConfigReader) -> EagleConfig:
        """Read the decoder layers alone, of a config in the words of Llama or Qwen3.

        Raises:
            CheckpointError: a key is missing or has a wrong value.
        """
        hidden_size, num_heads = spec.integer("hidden_size"), spec.integer("num_attention_heads")
        vocab_size, (theta, scaling) = spec.integer("vocab_size"), spec.rope()
        num_kv_heads = spec.integer("num_key_value_heads", default=num_heads)
        head_dim = spec.integer("head_dim", default=hidden_size // num_heads)
        _check_heads(num_heads, num_kv_heads, head_dim)
        return cls(
            kind="eagle",
            hidden_size=hidden_size,
            target_hidden_size=None,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            num_layers=spec.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=spec.integer("intermediate_size"),
            rms_norm_eps=spec.epsilon(),
            hidden_act=spec.activation(),
            qkv_bias=False,
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=spec.integer("max_position_embeddings", default=2048),
            sliding_window=None,
            norm_before_residual=False,
            norm_output=False,
            norm_before_fc=None,
            fc_norm=None,
            use_aux_hidden_state=False,
            num_aux_hidden_states=None,
            feature_layers=None,
            ties_embedding=False,
            unread=(),
        )


class _Part(Mapping[str, Any]):
    """An object of a config.json that notes which of its keys were asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class ConfigReader:
    """A reader that finds keys in the places that publishers use, and checks their types.

    The decoder's keys are at the top level, or in `transformer_layer_config` (speculators). The
    head's options are at the top level, in `eagle_config`, or beside the decoder's keys. The reader
    notes the keys that were asked for; `unread` returns the others.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = _Part(raw)
        layer = self._part("transformer_layer_config", None)
        self.layer = self.raw if layer is None else _Part(layer)
        self.eagle = _Part(self._part("eagle_config", {}) or {})
        self.is_speculators = "speculators_model_type" in self.raw

    def unread(self) -> tuple[str, ...]:
        """Return the keys with a value that nobody asked for, unless they change no result."""
        parts = {"": self.raw, "eagle_config.": self.eagle}
        if self.layer is not self.raw:
            parts["transformer_layer_config."] = self.layer
        known = _SILENT | _BY_TENSORS | set(NEUTRAL)
        known = known.union(*(part.read for part in parts.values()))
        return tuple(
            start + key
            for start, part in parts.items()
            for key, value in part.items()
            if key not in known and value is not None
        )

    def check_neutral(self, options: Mapping[str, tuple[Any, ...]], *, of_eagle3: bool) -> None:
        """Refuse options that change the computation, unless they have a value that does not.

        Args:
            options: the values of each option that change nothing.
            of_eagle3: refuse the options of `eagle_config` too, which have no meaning for EAGLE-1.

        Raises:
            CheckpointError: an option has another value.
        """
        for settings in (self.raw, self.layer, *([self.eagle] if of_eagle3 else ())):
            for key, values in options.items():
                value = settings.get(key)
                if value is not None and value not in values:
                    raise CheckpointError(
                        f"config.json: {key} {shown(value)} changes what a head computes and is "
                        "not supported"
                    )

    def _part(self, key: str, default: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        part: Any = self.raw.get(key)
        if part is not None and not isinstance(part, Mapping):
            raise CheckpointError(f"config.json: {key} is {shown(part)}, not an object")
        return default if part is None else part

    def activation(self) -> str:
        """Return the name of the MLP's activation; `silu` if it is not stated."""
        name = self.layer.get("hidden_act")
        if name is not None and not isinstance(name, str):
            raise CheckpointError(f"config.json: hidden_act is {shown(name)}, not a name")
        return name or "silu"

    def get(self, *keys: str) -> tuple[str, Any]:
        """Return the first of `keys` that is present and not null, and its value (None if none)."""
        for settings in (self.raw, self.eagle, self.layer):
            for key in keys:
                if settings.get(key) is not None:
                    return key, settings[key]
        return keys[0], None

    def maybe_integer(self, key: str, *, least: int = 1) -> int | None:
        """Return an integer of at least `least`; None if the key is not there."""
        value = self.get(key)[1]
        if value is not None and (type(value) is not int or not least <= value <= _MOST):
            raise CheckpointError(
                f"config.json: {key} is {shown(value)}, not an integer >= {least}"
                + (f" and <= {_MOST}" if type(value) is int and value > _MOST else "")
            )
        return value

    def integer(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        """Return an integer, or the default; without one the key must be there."""
        value = self.maybe_integer(key, least=least)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: no {key}")
        return value

    def epsilon(self) -> float:
        """Return the epsilon of the norms; 1e-6 if it is not stated."""
        return self.number("rms_norm_eps", default=1e-6, below=1)

    def number(
        self,
        key: str,
        *,
        default: float,
        below: float = float("inf"),
        settings: Mapping[str, Any] | None = None,
    ) -> float:
        """Return a number of `settings`, or of the places that publishers use."""
        value = self.get(key)[1] if settings is None else settings.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < below:
            allowed = "> 0" if below == float("inf") else f"in (0, {below})"
            raise CheckpointError(f"config.json: {key} is {shown(value)}, not a number {allowed}")
        return float(value)

    def flag(self, *keys: str) -> bool | None:
        """Return the first of these keys that is there, which must be true or false."""
        key, value = self.get(*keys)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}, neither true nor false")
        return value

    def flag_or(self, key: str, default: bool) -> bool:
        """Return a flag, or the default."""
        value = self.flag(key)
        return default if value is None else value

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """Read base and scaling from `rope_parameters` (transformers 5) or the two older keys."""
        params, older = (self.layer.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        params = params or older
        if isinstance(params, Mapping) and isinstance(params.get("full_attention"), Mapping):
            params = params["full_attention"]  # one entry per layer type
        if not isinstance(params, Mapping):
            raise CheckpointError(f"config.json: the RoPE parameters are {params!r}, not an object")
        theta = self.number("rope_theta", default=10000.0, settings=self.layer)
        theta = self.number("rope_theta", default=theta, settings=params)
        scaling = {k: v for k, v in params.items() if k not in ("rope_theta", "type")}
        rope_type = scaling.setdefault("rope_type", params.get("type") or "default")
        # For text, multimodal RoPE rotates every section by the same position, as plain RoPE does.
        return theta, None if rope_type in ("default", "mrope") else scaling

    def sliding_window(self) -> int | None:
        """Return the window of all layers; None if they are full layers.

        Raises:
            CheckpointError: some layers have a window and others have none.
        """
        layer_types, is_on = (self.layer.get(k) for k in ("layer_types", "use_sliding_window"))
        num_full = self.maybe_integer("max_window_layers", least=0) or 0
        if layer_types:
            if not isinstance(layer_types, list):
                raise CheckpointError(
                    f"config.json: layer_types is {shown(layer_types)}, not a list of names"
                )
            kinds = layer_types[: self.integer("num_hidden_layers", default=1)]
            if any(kind != kinds[0] for kind in kinds):
                raise CheckpointError(
                    f"config.json: layer_types {shown(kinds)}: a head's layers must be of one type"
                )
            slides = kinds[0] == "sliding_attention"
        else:
            # Qwen writes a window and switches it off, by a flag or for its first layers; mistral
            # has no switch.
            slides = (is_on is None or bool(is_on)) and num_full == 0
        return self.maybe_integer("sliding_window") if slides else None

    def feature_layers(self) -> tuple[int, ...] | None:
        """Return the layers whose *inputs* are the features; None if not stated.

        Ids in `eagle_config` (SGLang) name layers whose output is meant, so 1 is added. Ids at the
        top level (speculators, vLLM) name inputs already.
        """
        key = "eagle_aux_hidden_state_layer_ids"
        layers_by_key = {}
        if self.eagle.get(key) is not None:
            layers_by_key["eagle_config." + key] = tuple(i + 1 for i in _ids(key, self.eagle[key]))
        for name in (key, "aux_hidden_state_layer_ids"):
            if self.raw.get(name) is not None:
                layers_by_key[name] = _ids(name, self.raw[name])
        if len(set(layers_by_key.values())) > 1:
            meanings = "; ".join(
                f"{name} means the inputs of {ids}" for name, ids in layers_by_key.items()
            )
            raise CheckpointError(f"config.json: {meanings}; say which with feature_layers")
        return next(iter(layers_by_key.values()), None)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"config.json: {num_heads} heads over {num_kv_heads} key-value heads of size "
            f"{head_dim}; the first must divide by the second, the size by 2"
        )


def _ids(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(i) is not int for i in value):
        raise CheckpointError(f"config.json: {key} is {value!r}, not a list of layer numbers")
    return tuple(value)


def _kind(spec: ConfigReader, weights: Mapping[str, Sized]) -> Kind:
    algorithm = spec.raw.get("speculators_model_type", "eagle")
    if algorithm not in ("eagle", "eagle3"):
        raise CheckpointError(f"a {algorithm!r} speculator, not an EAGLE head")
    keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    tensors = ("layers.0.hidden_norm.weight", "d2t")
    if (
        algorithm == "eagle3"
        or any(spec.get(key)[1] is not None for key in keys)
        or any(name in weights for name in tensors)
    ):
        return "eagle3"
    architectures = spec.raw.get("architectures")
    if "embed_tokens.weight" in weights and "fc.weight" not in weights:
        raise CheckpointError(
            f"a language model (architectures {shown(architectures)}), not an "
            "EAGLE head: drafts come from an EAGLE head of the target, or from 'ngram'"
        )
    if "fc.weight" not in weights:
        raise CheckpointError(
            f"not an EAGLE head: no fc.weight among {len(weights)} tensors "
            f"(model_type {spec.layer.get('model_type')!r}, "
            f"num_hidden_layers {spec.layer.get('num_hidden_layers')})"
        )
    return "eagle"


def _draft_vocab_size(
    spec: ConfigReader, weights: Mapping[str, Sized], kind: Kind, vocab_size: int
) -> int:
    if kind == "eagle":
        return vocab_size
    size = spec.maybe_integer("draft_vocab_size")
    if size is None:
        size = len(weights["d2t"]) if "d2t" in weights else vocab_size
    if size > vocab_size:
        raise CheckpointError(
            f"config.json: draft_vocab_size {size} is above vocab_size {vocab_size}"
        )
    return size
