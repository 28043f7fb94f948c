"""Tiny random models with recurrent layers, of every family that the target must run."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

VOCAB = 259
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MAMBA = {**_TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "conv_kernel": 4}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]

# family -> (config class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", _MAMBA),
    "mamba2": (
        "Mamba2Config",
        {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4, "expand": 2},
    ),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA),
    "jamba": (
        "JambaConfig",
        {
            **_BASE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "bamba": ("BambaConfig", {**_BASE, **_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", {**_BASE, **_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_BASE,
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "logits_scaling": 2.0,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {**_BASE, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_BASE,
            **_EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_BASE,
            **_DELTA,
            **_EXPERTS,
            "head_dim": 8,
            "layer_types": _MIXED,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**_BASE, **_DELTA, "head_dim": 8, "layer_types": _MIXED}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **_BASE,
            **_DELTA,
            **_EXPERTS,
            "head_dim": 8,
            "layer_types": _MIXED,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**_BASE, **_DELTA, "layer_types": _MIXED}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 4,
        },
    ),
    "zamba": (
        "ZambaConfig",
        {
            **_BASE,
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_BASE,
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "chunk_size": 4,
            "adapter_rank": 4,
            "num_mem_blocks": 2,  # two blocks share three places
        },
    ),
    "lfm3": ("Lfm3Config", {**_BASE, "layer_types": ["conv", "full_attention", "conv"]}),
}


STATE_LAYERS = ("mixer", "mamba", "conv", "linear_attn")


def make_config(family: str) -> Any:
    """A fresh config, or None where this transformers has no such family."""
    name, arguments = FAMILIES[family]
    config_class = getattr(transformers, name, None)
    return None if config_class is None else config_class(**copy.deepcopy(arguments))


def make_model(config: Any, seed: int = 0) -> Any:
    """A float32 causal language model whose texts hang on tokens far back, through its states."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    for name, parameter in model.named_parameters():
        if "A_log" in name:
            parameter.data.fill_(-3)  # a state fades slowly
        elif "dt_bias" in name or "dt_proj.bias" in name:
            parameter.data.fill_(-1)
        elif parameter.ndim >= 2:
            is_state = any(part in name for part in STATE_LAYERS)
            parameter.data.normal_(0, 0.4 if is_state else 0.2)
    return model
