"""Law: what a draft's checkpoint says is used, refused, or named once."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mtp_checkpoints
from specpool import ConfigError
from specpool.engine.assets import resolve
from specpool.engine.draft import BlockDrafter, EagleDrafter, LMDrafter, MTPDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.block.config import BlockConfig
from specpool.engine.models.eagle.config import EagleConfig
from specpool.engine.models.files.checkpoint import read_config

KINDS: dict[str, tuple[str, Callable[[Path, TargetModel], object]]] = {
    "eagle": ("specpool/tiny-eagle", EagleDrafter.from_pretrained),
    "eagle3": ("specpool/tiny-eagle3", EagleDrafter.from_pretrained),
    "block": ("specpool/tiny-block", BlockDrafter.from_pretrained),
    "language model": ("specpool/tiny-draft", LMDrafter.from_pretrained),
    "mtp": ("", MTPDrafter.from_pretrained),
}
TENSORS = {
    "eagle": ["surprise.weight", "layers.0.surprise"],
    "eagle3": ["surprise.weight", "layers.0.surprise"],
    "block": ["surprise.weight", "layers.0.surprise"],
    "language model": ["surprise.weight", "model.layers.0.surprise"],
    "mtp": ["mtp.surprise", "mtp.layers.1.mlp.up_proj.weight", "mtp.layers.0.surprise"],
}


def load(
    kind: str, folder: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> list[str]:
    """Load a changed draft of a kind; return what was logged or refused about it."""
    source, loader = KINDS[kind]
    if kind == "mtp":
        mtp_checkpoints.write(folder, "Qwen3", "qwen")
    else:
        shutil.copytree(resolve(source), folder)
    change(folder)
    caplog.clear()
    caplog.set_level(logging.WARNING, logger="transformers")
    caplog.set_level(logging.INFO, logger="specpool")
    target = folder if kind == "mtp" else resolve("specpool/tiny")
    try:
        with TargetModel.from_pretrained(target, dtype="float32") as model:
            loader(folder, model)
    except ConfigError as error:
        return [str(error)]
    # Of a language model, transformers' own report names the tensors.
    names = ("specpool", "transformers.modeling_utils") if kind == "language model" else "specpool"
    return [record.getMessage() for record in caplog.records if record.name in names]


def add_tensor(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        state = {**load_file(path), name: torch.ones(2, 3)}
        save_file(state, path, metadata={"format": "pt"})

    return change


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k in KINDS for name in TENSORS[k]])
def test_every_tensor_of_a_draft_is_used_or_named(
    kind: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = load(kind, tmp_path / "draft", add_tensor(name), caplog)
    assert sum(name in line for line in said) == 1, said


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_drafts_config_is_used_or_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "surprise_factor": 2.5}))

    said = load(kind, tmp_path / "draft", change, caplog)
    assert sum("surprise_factor" in line for line in said) == 1, said


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_named_of_a_draft_as_it_is_published(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = load(kind, tmp_path / "draft", lambda folder: None, caplog)
    assert said in ([], [f"draft head {tmp_path / 'draft'} reads the target's embedding"])


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"residual_multiplier": 0.2},
        {"embedding_multiplier": 12},
        {"attention_multiplier": 0.01},
        {"attn_logit_softcapping": 50.0},
        {"rope_interleaved": True},
        {"eagle_config": {"use_last_layernorm": False}},
        {"eagle_config": {"use_mtp_layernorm": True}},
        {"eagle_config": {"parallel_draft_step": 4}},
        {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    ],
)
def test_what_changes_a_heads_computation_is_refused_by_name(changes: dict[str, object]) -> None:
    head = read_config(Path(resolve("specpool/tiny-eagle3")))
    weights = {"layers.0.hidden_norm.weight": [0], "fc.weight": [0]}
    nested = changes.get("eagle_config")
    key = next(iter(nested if isinstance(nested, dict) else changes))
    with pytest.raises(ConfigError, match=key):
        EagleConfig.parse({**head, **changes}, weights)
    if "eagle_config" not in changes and "layer_types" not in changes:
        block = read_config(Path(resolve("specpool/tiny-block")))
        with pytest.raises(ConfigError, match=key):
            BlockConfig.parse({**block, **changes})


def test_what_modelopt_and_speculators_write_is_known() -> None:
    """No key of the configs that these tools write is named as unread."""
    layer = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2],
        "head_dim": 32, "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02,
        "intermediate_size": 320, "max_position_embeddings": 4096, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": 2, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 5e5, "tie_word_embeddings": False, "use_cache": True,
        "torch_dtype": "bfloat16", "vocab_size": 259, "max_window_layers": 28,
        "sliding_window": 4096, "use_sliding_window": False,
    }  # fmt: skip
    eagle = {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 0,
    }  # fmt: skip
    speculators = {
        "architectures": ["Eagle3Speculator"], "auto_map": {}, "draft_vocab_size": 128,
        "dtype": "float32", "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False, "has_no_defaults_at_init": False, "base_model_ep_plan": {},
        "norm_before_residual": True, "norm_before_fc": False, "speculators_config": {},
        "speculators_model_type": "eagle3", "speculators_version": "0.4.0", "target_hidden_size": 8,
        "transformer_layer_config": layer, "transformers_version": "4.57",
    }  # fmt: skip
    modelopt = {**layer, "draft_vocab_size": 128, "eagle_config": eagle}
    weights = {name: [0] * 128 for name in ("fc.weight", "d2t")}
    for raw in (modelopt, speculators):
        config = EagleConfig.parse(raw, weights)
        assert (config.unread, config.sliding_window) == ((), None)
