"""What ranks cannot do is one error with the numbers, before any weights are read. One process."""

from __future__ import annotations

import copy
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from specpool import ConfigError
from specpool.engine.assembly.ranked import for_ranks
from specpool.engine.config import EngineConfig
from specpool.engine.models.sharding import sharded
from specpool.engine.ranks.group import Ranks

RANKS: Any = SimpleNamespace(world=2)
LLAMA = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"host_bytes": 1 << 20},
            "offload 'cost' chooses by each rank's own clock, 2 ranks would differ: give offload "
            "'always'",
        ),
        ({"graph_sizes": (1, 4)}, r"graph_sizes \[1, 4\]: rounds of 2 ranks are not captured"),
    ],
)
def test_options_that_ranks_do_not_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        for_ranks(EngineConfig(**options), RANKS)
    assert for_ranks(EngineConfig(**options), None) == EngineConfig(**options)


@pytest.mark.parametrize("policy", ["ema", "cost", "budget"])
def test_every_policy_of_shapes_works_on_ranks(policy: str) -> None:
    assert for_ranks(EngineConfig(adaptive=policy), RANKS).adaptive is not None


def _check(config: Any, kind: type, world: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sharded(config, kind, world)


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "rank 3 would take cuda:1, this machine has 1 CUDA devices: start one rank for "),
        ("cuda:0", "device cuda:0: with ranks give 'cuda', each takes one of its own"),
    ],
)
def test_two_ranks_do_not_share_a_card(
    device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has no collective among ranks of one card."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    rank: Any = SimpleNamespace(rank=3)
    with pytest.raises(ConfigError, match=says):
        Ranks._own_device(rank, device)
    assert Ranks._own_device(rank, "cpu") == "cpu" and not taken
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Ranks._own_device(rank, "cuda") == "cuda:0" and taken == [0]


def test_models_that_ranks_cannot_share() -> None:
    llama = transformers.LlamaForCausalLM
    assert sharded(LLAMA, llama, 2)["distributed_config"].tp_size == 2
    _check(LLAMA, llama, 4, "'llama' has 2 KV heads, which 4 ranks cannot share")
    odd = transformers.LlamaConfig(
        hidden_size=36, num_attention_heads=3, num_key_value_heads=2, head_dim=12
    )
    _check(odd, llama, 2, "'llama' has 3 attention heads, which 2 ranks cannot share")
    mamba = transformers.MambaConfig()
    _check(mamba, transformers.MambaForCausalLM, 2, "'mamba' has recurrent layers, which 2 ranks")
    gpt2 = transformers.GPT2Config()
    _check(
        gpt2,
        transformers.GPT2LMHeadModel,
        2,
        "'gpt2' cannot be shared by 2 ranks: transformers has no tensor parallel plan for "
        "GPT2LMHeadModel",
    )


def test_a_plan_that_leaves_the_kv_heads_whole() -> None:
    config = copy.deepcopy(LLAMA)
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise"}
    _check(
        config,
        transformers.LlamaForCausalLM,
        2,
        "'llama' cannot be shared by 2 ranks: transformers' plan for it leaves all 2 KV heads",
    )


def test_packages_that_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    says = r"2 ranks need accelerate: pip install 'specpool\[ranks\]'"
    _check(LLAMA, transformers.LlamaForCausalLM, 2, says)
