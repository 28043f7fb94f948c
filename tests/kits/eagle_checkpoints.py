"""Random EAGLE checkpoints of every published layout, written to disk for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specpool.engine.models.eagle.head import EagleHead

H, HEADS, KV_HEADS, HEAD_DIM, INNER = 16, 4, 2, 6, 24  # head_dim is not h / heads on purpose
VOCAB, DRAFT_VOCAB, TARGET_LAYERS = 40, 24, 8

State = dict[str, torch.Tensor]
Rename = Callable[[str], str]


@dataclass
class Target:
    """The sizes that a head takes from its target."""

    hidden_size: int = H
    embedding: torch.Tensor = field(init=False)
    lm_head: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCAB, self.hidden_size, generator=generator)
        self.lm_head = torch.randn(VOCAB, self.hidden_size, generator=generator)

    def load(self, folder: Path | str, **options: Any) -> EagleHead:
        arguments = {
            "num_layers": TARGET_LAYERS,
            "hidden_size": self.hidden_size,
            "vocab_size": VOCAB,
            "embedding_weight": self.embedding,
            "lm_head_weight": self.lm_head,
        }
        return EagleHead.from_pretrained(folder, **{**arguments, **options})


def base_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": H,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
    }
    return {k: v for k, v in {**config, **changes}.items() if v is not None}


def _random(state: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            scale = 1.0 if "norm" in name else 0.3
            state[name] = torch.randn(tensor.shape, generator=generator) * scale
    return state


def layer_state(index: int, width: int, *, h: int = H) -> State:
    attn, mlp = f"layers.{index}.self_attn.", f"layers.{index}.mlp."
    return {
        attn + "q_proj.weight": torch.zeros(HEADS * HEAD_DIM, width),
        attn + "k_proj.weight": torch.zeros(KV_HEADS * HEAD_DIM, width),
        attn + "v_proj.weight": torch.zeros(KV_HEADS * HEAD_DIM, width),
        attn + "o_proj.weight": torch.zeros(h, HEADS * HEAD_DIM),
        mlp + "gate_proj.weight": torch.zeros(INNER, h),
        mlp + "up_proj.weight": torch.zeros(INNER, h),
        mlp + "down_proj.weight": torch.zeros(h, INNER),
        f"layers.{index}.post_attention_layernorm.weight": torch.zeros(h),
    }


def eagle_state(
    *, fc_bias: bool = False, qkv_bias: bool = False, num_layers: int = 1, lm_head: bool = False
) -> State:
    """EAGLE-1 (notes: `fc`, one layer without an input norm, no final norm, no head)."""
    state: State = {"fc.weight": torch.zeros(H, 2 * H)}
    if fc_bias:
        state["fc.bias"] = torch.zeros(H)
    for i in range(num_layers):
        state |= layer_state(i, H)
        if i:
            state[f"layers.{i}.input_layernorm.weight"] = torch.zeros(H)
    if qkv_bias:
        for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            state[f"layers.0.self_attn.{x}_proj.bias"] = torch.zeros(heads * HEAD_DIM)
    if lm_head:
        state["lm_head.weight"] = torch.zeros(VOCAB, H)
    return _random(state, 1)


def eagle3_state(
    *,
    h: int = H,
    target_h: int = H,
    draft_vocab: int | None = DRAFT_VOCAB,
    features: int = 3,
    fc_bias: bool = False,
    input_norm: bool = False,
    fc_norm: bool = False,
    qk_norm: bool = False,
    lm_head: bool = True,
    num_layers: int = 1,
) -> State:
    """EAGLE-3, canonical names; `draft_vocab=None` = the target's vocabulary."""
    state: State = {"fc.weight": torch.zeros(h, features * target_h)}
    if fc_bias:
        state["fc.bias"] = torch.zeros(h)
    for i in range(num_layers):
        state |= layer_state(i, 2 * h if i == 0 else h, h=h)
        state[f"layers.{i}.input_layernorm.weight"] = torch.zeros(h)
    state["layers.0.hidden_norm.weight"] = torch.zeros(h)
    state["norm.weight"] = torch.zeros(h)
    if input_norm:
        state["input_norm.weight"] = torch.zeros(features * target_h)
    if fc_norm:
        state |= {f"fc_norm.{i}.weight": torch.zeros(target_h) for i in range(features)}
    if qk_norm:
        state |= {f"layers.0.self_attn.{x}_norm.weight": torch.zeros(HEAD_DIM) for x in "qk"}
    if lm_head:
        state["lm_head.weight"] = torch.zeros(draft_vocab or VOCAB, h)
    if h != target_h:
        state["embed_tokens.weight"] = torch.zeros(VOCAB, h)
    state = _random(state, 3)
    if draft_vocab is not None:
        generator = torch.Generator().manual_seed(9)
        draft_ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        state["d2t"] = draft_ids - torch.arange(draft_vocab)
        state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, draft_ids, True)
    return state


def write(
    folder: Path,
    config: dict[str, Any] | str | None,
    state: State | None,
    *,
    form: str = "safetensors",
    rename: Rename = lambda name: name,
) -> Path:
    """Write a checkpoint folder; `form` is safetensors, bin, or either of them sharded."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
    if state is None:
        return folder
    tensors = {rename(name): tensor.contiguous() for name, tensor in state.items()}
    stem, suffix = ("model", "safetensors") if "safetensors" in form else ("pytorch_model", "bin")
    shards = {f"{stem}.{suffix}": tensors}
    if form.startswith("sharded"):
        names, half = list(tensors), len(tensors) // 2
        shards = {
            f"{stem}-0000{i}-of-00002.{suffix}": {name: tensors[name] for name in part}
            for i, part in ((1, names[:half]), (2, names[half:]))
        }
        weight_map = {name: file for file, part in shards.items() for name in part}
        index = folder / f"{stem}.{suffix}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file, part in shards.items():
        if suffix == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file)
    return folder
