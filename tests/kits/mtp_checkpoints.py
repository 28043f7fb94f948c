"""Small targets with an MTP layer of random weights, in each published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import recurrent_families

#: The names of an MTP layer's own tensors by layout: start, projection, norms of embedding and
#: hidden state, final norm, start of the decoder layer's names. `{L}` is the number of layers.
LAYOUTS = {
    "deepseek": (
        "model.layers.{L}.",
        ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
        "model.layers.{L}.",
    ),
    "qwen": (
        "mtp.",
        ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        "mtp.layers.0.",
    ),
    "mimo": (
        "model.mtp_layers.0.",
        ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        "model.mtp_layers.0.",
    ),
}
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "Glm4Moe": {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Llama": {"num_key_value_heads": 2},
}


def write(folder: Path, family: str, layout: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random target of `family` with an MTP layer in `layout`.

    The MTP layer is a copy of the target's last layer, with its own norms and projection: half of
    the projection keeps the hidden state, so that some drafts are right.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        **_COMMON, **FAMILIES[family], num_nextn_predict_layers=1, **changes
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "embed" in name or "lm_head" in name:
            parameter.data.normal_(0, 0.3)
        else:
            parameter.data.normal_(0, 0.15)
    model.save_pretrained(folder, safe_serialization=True)
    add_layer(folder, layout, config.num_hidden_layers)
    return folder


def write_hybrid(folder: Path, family: str, *, copied: int = 1) -> Path:
    """Write a random target of `recurrent_families`, and its layer `copied` as an MTP layer too.

    Layer 1 has attention, layers 0 and 2 are recurrent. The embedding is large, so that one layer
    says much of what three say, and some drafts are right; and the MTP layer's attention is strong,
    so that a wrong KV cell gives other drafts.
    """
    config = recurrent_families.make_config(family)
    recurrent_families.make_model(config).save_pretrained(folder, safe_serialization=True)
    add_layer(folder, "qwen", config.num_hidden_layers, copied=copied)
    path = folder / "model.safetensors"
    state, h = load_file(path), config.hidden_size
    state["model.embed_tokens.weight"] *= 32
    state["mtp.layers.0.input_layernorm.weight"] = torch.rand(h)
    if "mtp.layers.0.self_attn.o_proj.weight" in state:
        state["mtp.layers.0.self_attn.o_proj.weight"] *= 8
    state["mtp.fc.weight"] = torch.cat([8 * torch.eye(h), 2 * torch.randn(h, h) / h**0.5], 1)
    save_file(state, path, metadata={"format": "pt"})
    return folder


def add_embedding(folder: Path) -> None:
    """Give the MTP layer of a hybrid an embedding of its own, and say so in the config.

    It is the target's but for its sign, so no draft that reads the target's is the same.
    """
    path = folder / "model.safetensors"
    state = load_file(path)
    state["mtp.embed_tokens.weight"] = -state["model.embed_tokens.weight"]
    save_file(state, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["mtp_use_dedicated_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))


def add_layer(folder: Path, layout: str, num_layers: int, *, copied: int | None = None) -> None:
    """Add an MTP layer to a folder's single weight file: a copy of a layer, by default the last."""
    path = folder / "model.safetensors"
    state = load_file(path)
    start, names, block = LAYOUTS[layout]
    start, block = start.format(L=num_layers), block.format(L=num_layers)
    source = f"model.layers.{num_layers - 1 if copied is None else copied}."
    extra = {
        block + name.removeprefix(source): tensor.clone()
        for name, tensor in state.items()
        if name.startswith(source)
    }
    h = state["model.norm.weight"].shape[0]
    eye = torch.eye(h)
    halves = [0.6 * torch.randn(h, h) / h**0.5, eye]
    projection = torch.cat(halves[::-1] if layout == "mimo" else halves, 1)
    norms = [torch.rand(h) + 0.5 for _ in range(2)]
    tensors = (projection, *norms, state["model.norm.weight"].clone())
    extra |= {f"{start}{n}.weight": t for n, t in zip(names, tensors, strict=True)}
    if layout == "deepseek":  # published checkpoints hold copies of the shared tables
        extra[start + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        extra[start + "shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file({**state, **extra}, path, metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Split the weight file into two with an index, the MTP layer's tensors in the second."""
    path = folder / "model.safetensors"
    state = load_file(path)
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[: len(names) // 2]}
    parts["model-00002-of-00002.safetensors"] = names[len(names) // 2 :]
    for file, shard_names in parts.items():
        save_file(
            {name: state[name] for name in shard_names}, folder / file, metadata={"format": "pt"}
        )
    weight_map = {name: file for file, shard_names in parts.items() for name in shard_names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()


def drop(folder: Path, *ends: str) -> None:
    """Remove the tensors whose names end so."""
    path = folder / "model.safetensors"
    state = {n: t for n, t in load_file(path).items() if not n.endswith(ends)}
    save_file(state, path, metadata={"format": "pt"})
