"""Functions that read the weights of an EAGLE head and check them against its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from specpool.engine.models.eagle.config import EagleConfig
from specpool.engine.models.files.checkpoint import Shape, Weights, check_tensors
from specpool.errors import CheckpointError

# Tensors that are not read: they are for training only, the target's, or recomputed.
IGNORED = (r"t2d", r".*rotary_emb\..*", r"verifier_.*")
#: The most tokens by which a target's vocabulary may be larger than its head's, if nothing else
#: says that they belong together: added tokens, and padding to a multiple.
MOST_ADDED = 1024


@dataclass(frozen=True, slots=True)
class _HeadLayer:
    """A decoder layer's tensors; None if the layer has no such tensor."""

    input_norm: torch.Tensor | None  # [h]
    pair_norm: torch.Tensor | None  # [2, h], in EAGLE-3's layer 0: norms of embedding and hidden
    qkv: torch.Tensor  # [(H + 2 Hk) D, in]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: torch.Tensor  # [H D, h], transposed
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [h]
    gate_up: torch.Tensor  # [2 I, h]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [I, h], transposed
    down_bias: torch.Tensor | None


def _add_linear(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = torch.addmm(residual, x, weight)
    return out if bias is None else out + bias


def _load_layer(get: Callable[[str], torch.Tensor | None], index: int) -> _HeadLayer:
    prefix = f"layers.{index}."

    def required(name: str) -> torch.Tensor:
        tensor = get(prefix + name)
        assert tensor is not None, name  # `check_tensors` made sure
        return tensor

    def fused(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        matrices = [required(name + ".weight") for name in names]
        biases = [get(prefix + name + ".bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            pairs = zip(matrices, biases, strict=True)
            bias = torch.cat([m.new_zeros(len(m)) if b is None else b for m, b in pairs])
        return torch.cat(matrices), bias

    input_norm = get(prefix + "input_layernorm.weight")
    hidden_norm = get(prefix + "hidden_norm.weight")
    pair_norm = None
    if input_norm is not None and hidden_norm is not None:
        pair_norm = torch.stack((input_norm, hidden_norm))
    qkv, qkv_bias = fused(*(f"self_attn.{x}_proj" for x in "qkv"))
    gate_up, gate_up_bias = fused("mlp.gate_proj", "mlp.up_proj")
    return _HeadLayer(
        input_norm=input_norm,
        pair_norm=pair_norm,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=get(prefix + "self_attn.q_norm.weight"),
        k_norm=get(prefix + "self_attn.k_norm.weight"),
        o=required("self_attn.o_proj.weight").t(),
        o_bias=get(prefix + "self_attn.o_proj.bias"),
        post_norm=required("post_attention_layernorm.weight"),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=required("mlp.down_proj.weight").t(),
        down_bias=get(prefix + "mlp.down_proj.bias"),
    )


def _check_target(
    config: EagleConfig,
    weights: Mapping[str, torch.Tensor],
    feature_layers: tuple[int, ...],
    hidden_size: int,
) -> None:
    """Raise if the head was trained for a target of another width."""
    trained_for = config.target_hidden_size
    if trained_for is None:
        trained_for = config.hidden_size
        if config.kind == "eagle3" and "fc.weight" in weights and feature_layers:
            # If the head is narrower than its target, only this matrix shows the target's width.
            shape, parts = weights["fc.weight"].shape, len(feature_layers)
            trained_for = shape[1] // parts if len(shape) == 2 and shape[1] else trained_for
    if config.kind == "eagle":
        trained_for = config.hidden_size
    if trained_for != hidden_size:
        raise CheckpointError(
            f"a head for another target: made for hidden size {trained_for}, "
            f"the target's is {hidden_size}"
        )


def check_vocabulary(
    head_kind: str, made_for: int, num_tokens: int, *, is_copied: bool = False
) -> str | None:
    """Return what to log if a target has more tokens than its head was made for; else None.

    Tokens that were added to a target, and rows that pad its tables, come after the tokens that the
    head knows. So the head drafts the others as before.

    Args:
        head_kind: what the head is, for the message.
        made_for: the tokens that the head was made for.
        num_tokens: the target's.
        is_copied: the head's file has a copy of the target's embedding, so the target is the same.

    Raises:
        CheckpointError: the target lacks tokens of the head, or has so many more that it is
            probably another one.
    """
    if made_for == num_tokens:
        return None
    numbers = f"made for a vocabulary of {made_for} tokens, the target's is {num_tokens}"
    if made_for > num_tokens:
        raise CheckpointError(
            f"{head_kind} for another target: {numbers}, which lacks the last "
            f"{made_for - num_tokens} of them"
        )
    num_added = num_tokens - made_for
    if num_added > MOST_ADDED and not is_copied:
        raise CheckpointError(
            f"{head_kind} for another target: {numbers}; of a target with up to {MOST_ADDED} added "
            f"tokens it would be taken, this one has {num_added} more, and the file has no copy of "
            "the target's embedding to compare"
        )
    return f"{numbers}: it has learned nothing of the last {num_added} of them"


def _check_tensors(
    config: EagleConfig,
    weights: Weights,
    feature_layers: tuple[int, ...],
    target_hidden_size: int,
) -> list[str]:
    """Raise unless the checkpoint holds the tensors of its config alone; return the unused ones."""
    h, vocab = config.hidden_size, config.vocab_size
    required: dict[str, Shape] = {}
    optional: dict[str, Shape] = {"fc.bias": (h,), "embed_tokens.weight": (vocab, h)}
    ignored = list(IGNORED)
    for i in range(config.num_layers):
        layer_required, layer_optional = layer_shapes(config, i)
        required |= layer_required
        optional |= layer_optional
    if config.kind == "eagle":
        required["fc.weight"] = (h, 2 * h)
        optional["lm_head.weight"] = (vocab, h)
    else:
        num_features = len(feature_layers) or 1
        width = num_features * target_hidden_size
        required["norm.weight"] = (h,)
        if width != h:
            required["fc.weight"] = (h, width)
        else:
            ignored.append(r"fc\..*")
        norms = [(config.norm_before_fc, "input_norm.weight", width)]
        norms += [
            (config.fc_norm, f"fc_norm.{i}.weight", target_hidden_size) for i in range(num_features)
        ]
        for norm_flag, name, size in norms:
            # None: the tensor may be there. False: it must not be there.
            if norm_flag is not False:
                (required if norm_flag else optional)[name] = (size,)
        own_head = config.draft_vocab_size != vocab or h != target_hidden_size
        (required if own_head else optional)["lm_head.weight"] = (config.draft_vocab_size, h)
        own_map = config.draft_vocab_size != vocab
        (required if own_map else optional)["d2t"] = (config.draft_vocab_size,)
        if h != target_hidden_size:
            required["embed_tokens.weight"] = (vocab, h)
    check_tensors(weights, required, optional, ignored)
    if "d2t" in weights:
        targets = weights["d2t"].to(torch.int64) + torch.arange(config.draft_vocab_size)
        bad_ids = ((targets < 0) | (targets >= vocab)).nonzero().flatten().tolist()
        if bad_ids:
            raise CheckpointError(
                f"d2t maps draft id {bad_ids[0]} to target id {int(targets[bad_ids[0]])}, "
                f"outside the vocabulary of {vocab} tokens"
            )
    is_unused = config.kind == "eagle3" and "fc.weight" not in required
    return [name for name in weights if is_unused and name.startswith("fc.")]


def layer_shapes(config: EagleConfig, index: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes of the tensors that layer `index` must have, and may have."""
    h, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    first3 = config.kind == "eagle3" and index == 0
    width = 2 * h if first3 else h
    prefix, attn = f"layers.{index}.", f"layers.{index}.self_attn."
    required: dict[str, Shape] = {
        attn + "q_proj.weight": (q_size, width),
        attn + "k_proj.weight": (kv_size, width),
        attn + "v_proj.weight": (kv_size, width),
        attn + "o_proj.weight": (h, q_size),
        prefix + "mlp.gate_proj.weight": (inner, h),
        prefix + "mlp.up_proj.weight": (inner, h),
        prefix + "mlp.down_proj.weight": (h, inner),
        prefix + "post_attention_layernorm.weight": (h,),
    }
    if first3 or index > 0:
        required[prefix + "input_layernorm.weight"] = (h,)
    if first3:
        required[prefix + "hidden_norm.weight"] = (h,)
    optional: dict[str, Shape] = {
        attn + "q_norm.weight": (head_dim,),
        attn + "k_norm.weight": (head_dim,),
    }
    for name, shape in list(required.items()):
        if name.endswith("_proj.weight"):
            is_qkv = name.startswith(attn) and "o_proj" not in name
            has_bias = config.qkv_bias and is_qkv
            (required if has_bias else optional)[name.removesuffix("weight") + "bias"] = shape[:1]
    return required, optional
