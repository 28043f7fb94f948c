"""What `specpool plan` must know of the models: by numbers, or by files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specpool.capacity.layer_kv import LayerKV, bytes_by_window
from specpool.capacity.state_sizes import StateBytes
from specpool.checks import check_choice, check_int
from specpool.cli.plan.question import Question
from specpool.engine.assets import resolve
from specpool.engine.config import EngineConfig
from specpool.engine.models.files.names import MTP, is_lookup
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes, show_bytes

if TYPE_CHECKING:
    from specpool.engine.models.outline import Outline

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of the models that the sizing of memory needs, of one device."""

    name: str
    tp: int  # devices that share the target
    target_layers: tuple[LayerKV, ...]  # with the heads of one device
    draft_layers: tuple[LayerKV, ...]
    drafts: bool
    reads_tokens: bool  # whether the drafter reads tokens (`Drafter.reads_tokens`)
    dtype: str
    weight_bytes: int
    max_context_len: int | None  # None if not known
    vocab_size: int | None  # None if not known
    notes: tuple[str, ...] = ()  # assumptions, for the user
    context_reason: str = ""  # why the context is not the target's own; empty if it is
    states: StateBytes | None = None  # of the target's recurrent layers

    def token_bytes(self) -> tuple[dict[int | None, int], int]:
        """Return a token's KV bytes in the target's layers, by window, and in the draft's."""
        size = ITEMSIZES[self.dtype]
        draft = sum(layer.bytes_per_token(size) for layer in self.draft_layers)
        return bytes_by_window(self.target_layers, size), draft


def model_of_numbers(question: Question) -> Model:
    """Build the model from the plain numbers of the command line.

    Raises:
        ConfigError: a number is missing, out of its range, or of no use.
    """
    sizes = {
        "layers": question.layers,
        "kv_heads": question.kv_heads,
        "head_dim": question.head_dim,
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is None]
    if missing:
        raise ConfigError(
            f"a plan is for --target, or for plain numbers: these lack {', '.join(missing)}"
        )
    draft, draft_layers = question.draft, question.draft_layers
    is_lookup_draft = draft is not None and is_lookup(draft)
    if draft not in (None, "none") and not is_lookup_draft:
        raise ConfigError(
            "beside plain numbers, --draft is 'ngram', 'suffix' or 'none': give --draft-layers"
        )
    if draft_layers and draft is not None:
        raise ConfigError(f"--draft {draft} has no layers: leave out --draft-layers")
    if draft_layers is None:
        draft_layers = 1 if draft is None else 0
    heads, head_dim = question.draft_kv_heads, question.draft_head_dim
    heads = question.kv_heads if heads is None else heads
    head_dim = question.head_dim if head_dim is None else head_dim
    values = {
        **sizes,
        "draft_kv_heads": heads,
        "draft_head_dim": head_dim,
    }
    for name, value in values.items():
        check_int(name, value, 1, 1 << 16)
    check_int("draft_layers", draft_layers, 0, 1 << 16)
    for name in ("draft_kv_heads", "draft_head_dim"):
        if draft_layers == 0 and getattr(question, name) is not None:
            raise ConfigError(
                f"{name} is of a draft model's layers, and there are none: leave it out"
            )
    if question.vocab_size is not None:
        check_int("vocab_size", question.vocab_size, 1, 1 << 30)
    dtype = "bfloat16" if question.dtype is None else question.dtype
    check_choice("dtype", dtype, tuple(ITEMSIZES))
    return Model(
        name=f"{question.layers} + {draft_layers} layers",
        tp=question.tp,
        target_layers=_of_a_device(
            _layers(question.layers, question.kv_heads, question.head_dim), question.tp
        ),
        draft_layers=_layers(draft_layers, heads, head_dim),
        drafts=draft_layers > 0 or is_lookup_draft,
        reads_tokens=is_lookup_draft,
        dtype=dtype,
        weight_bytes=_share(
            parse_bytes("weights", "0" if question.weights is None else question.weights),
            question.tp,
        ),
        max_context_len=None,
        vocab_size=question.vocab_size,
    )


def _layers(count: int | None, heads: int | None, dim: int | None) -> tuple[LayerKV, ...]:
    assert count is not None and heads is not None and dim is not None
    return (LayerKV(heads, dim, dim),) * count


def _of_a_device(layers: tuple[LayerKV, ...], tp: int) -> tuple[LayerKV, ...]:
    """Return the layers with the KV heads of one device.

    Raises:
        ConfigError: the devices do not divide the heads.
    """
    for layer in layers:
        if layer.num_kv_heads % tp:
            raise ConfigError(f"tp: {tp} devices cannot share {layer.num_kv_heads} KV heads")
    return tuple(replace(layer, num_kv_heads=layer.num_kv_heads // tp) for layer in layers)


def _share(num_bytes: int, tp: int) -> int:
    """Return a device's part of the target's weights."""
    return -(-num_bytes // tp)


def model_of_files(question: Question) -> Model:
    """Build the model from the configs of `--target` and `--draft`.

    Raises:
        ConfigError: a checkpoint is not found, or an option states what its files state.
    """
    for name in ("layers", "kv_heads", "head_dim", "vocab_size"):
        if getattr(question, name) is not None:
            raise ConfigError(f"--target states it: leave out --{name.replace('_', '-')}")
    draft = question.draft
    for name in ("draft_layers", "draft_kv_heads", "draft_head_dim"):
        if draft is not None and getattr(question, name) is not None:
            raise ConfigError(f"--draft states it: leave out --{name.replace('_', '-')}")
        if getattr(question, name) is not None and question.draft_layers is None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --draft-layers")
    if question.draft_layers is not None:
        check_int("draft_layers", question.draft_layers, 1, 1 << 16)
    from specpool.engine.models.outline import mtp_bytes_beside, target_outline

    assert question.target is not None
    if draft is None and question.draft_layers is None and question.target == "specpool/tiny":
        draft = "specpool/tiny-eagle"
    if draft == "none":
        draft = None
    is_lookup_draft = draft is not None and is_lookup(draft)
    target = target_outline(
        question.target, trust_remote_code=question.trust_remote_code, dtype=question.dtype
    )
    if target.states is not None:
        _check_recurrent(question)
    head, longest, reason = None, target.max_context_len, target.context_reason
    if draft is not None and draft != MTP and not is_lookup_draft:
        head, is_whole = _draft_outline(draft, question)
        if is_whole and head.max_context_len < longest:
            reason = f"the draft model has {head.max_context_len} positions, the target {longest}"
            longest = head.max_context_len
    dtype, notes = question.dtype or target.dtype, []
    if dtype is None:
        dtype = "float32"
        notes.append(
            "float32 is assumed: the config names no dtype, and there are no weights to ask; give "
            "--dtype"
        )
    elif question.dtype is None and target.dtype_from == "weights":
        notes.append(f"{dtype} is the weights': the config names no dtype")
    check_choice("dtype", dtype, tuple(ITEMSIZES))
    if question.weights is not None:
        weight_bytes = _share(parse_bytes("weights", question.weights), question.tp)
    else:
        loaded_bytes = target.loaded_bytes(dtype)
        if loaded_bytes is None:
            raise ConfigError(
                f"the size of {question.target}'s weights is not known here: give --weights, such "
                "as 16GB"
            )
        if target.weight_bytes is None:
            notes.append(
                f"the weights are estimated from the config: {target.num_parameters:,} parameters "
                f"in {dtype}; --weights says it better"
            )
        weight_bytes = _share(loaded_bytes, question.tp)
        weight_bytes += (head.loaded_bytes(dtype) or 0) if head is not None else 0
        if draft == MTP:
            weight_bytes += mtp_bytes_beside(question.target, target, dtype)
    if dtype == "float32":
        copied_bytes = min(weight_bytes, EngineConfig().packed_weight_bytes)
        notes.append(
            f"on a CPU up to {show_bytes(copied_bytes)} more hold a second copy of weights where "
            "that is quicker (--packed-weight-bytes): add them to --workspace"
        )
    planned = question.draft_layers
    if planned is not None:
        draft_layers = _planned_layers(question, target)
        notes.append("the weights of the draft layers are not counted: add them to --workspace")
    else:
        draft_layers = _draft_layers(draft, target, head)
    if question.tp > 1 and draft_layers:
        notes.append(
            f"each of {question.tp} devices keeps a whole draft model, and whole copies of the "
            "target's embedding and output matrix for it, which are not counted: raise --workspace"
        )
    suffix = draft if planned is None else f"{planned} draft layer{'s' if planned > 1 else ''}"
    return Model(
        name=question.target + (f" + {suffix}" if suffix is not None else ""),
        tp=question.tp,
        target_layers=_of_a_device(target.layers, question.tp),
        draft_layers=draft_layers,
        drafts=draft is not None or planned is not None,
        reads_tokens=is_lookup_draft,
        dtype=dtype,
        weight_bytes=weight_bytes,
        max_context_len=longest,
        context_reason=reason,
        vocab_size=target.vocab_size,
        notes=tuple(notes),
        states=target.states,
    )


def _check_recurrent(question: Question) -> None:
    """Raise `ConfigError` for what an engine refuses of a target with recurrent layers."""
    if question.tp > 1:
        raise ConfigError(
            f"tp: a target with recurrent layers runs on one device, not {question.tp}"
        )


def _planned_layers(question: Question, target: Outline) -> tuple[LayerKV, ...]:
    """Return the layers of a planned draft model; sizes that are not set are the target's."""
    if not target.layers and None in (question.draft_kv_heads, question.draft_head_dim):
        raise ConfigError(
            "the target has no layer with attention that a draft layer could be like: give "
            "--draft-kv-heads and --draft-head-dim"
        )
    last = target.layers[-1] if target.layers else LayerKV(0, 0, 0)
    heads = last.num_kv_heads if question.draft_kv_heads is None else question.draft_kv_heads
    dim = last.k_head_dim if question.draft_head_dim is None else question.draft_head_dim
    check_int("draft_kv_heads", heads, 1, 1 << 16)
    check_int("draft_head_dim", dim, 1, 1 << 16)
    return _layers(question.draft_layers, heads, dim)


def _draft_layers(draft: str | None, target: Outline, head: Outline | None) -> tuple[LayerKV, ...]:
    """Return the KV of the draft's layers. An MTP layer keeps that of a layer of its target.

    Raises:
        ConfigError: no layer of the target keeps KV, so no MTP layer of its kind drafts.
    """
    if draft == MTP:
        if not target.layers:
            raise ConfigError(
                "--draft mtp: no layer of the target has attention, as an MTP layer must"
            )
        return (replace(target.layers[-1], window=None),)
    return () if head is None else head.layers


def _draft_outline(draft: str, question: Question) -> tuple[Outline, bool]:
    """Return the outline of a draft model, and whether it is a language model, not a head."""
    from specpool.engine.models.files.draft_kind import is_language_model
    from specpool.engine.models.outline import head_outline, target_outline

    if is_language_model(resolve(draft)):
        outline = target_outline(draft, trust_remote_code=question.trust_remote_code)
        if outline.states is not None:
            raise ConfigError(f"--draft {draft} has recurrent layers, so it cannot draft")
        return outline, True
    return head_outline(resolve(draft)), False
