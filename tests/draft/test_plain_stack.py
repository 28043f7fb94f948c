"""Laws of `PlainStack`: it computes what the model computes, or it is not used."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.models import TargetModel
from specpool.engine.models.eagle import plain
from specpool.engine.models.eagle.plain import PlainStack

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


def model_of(kind, config, **changes) -> TargetModel:
    torch.manual_seed(3)
    model = kind(config(**(SIZES | changes))).eval()
    # Norms and biases are 1 and 0 in a new model: nothing would depend on them.
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return TargetModel.from_pretrained(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_gets_a_stack_of_its_own_logits(name):
    kind, config, changes = MODELS[name]
    with model_of(kind, config, **changes) as model:
        stack = PlainStack.from_model(model)
        assert stack is not None and stack._agrees(model)
        first = model.layer_kv[0]
        assert stack.head.layer_kv[0] == (first.num_kv_heads, first.k_head_dim)


def test_a_model_that_computes_something_else_runs_by_itself():
    """Same type, same weights: only the probe can tell."""
    with model_of(LlamaForCausalLM, LlamaConfig) as model:
        mlp = model.model.model.layers[0].mlp
        hook = mlp.register_forward_hook(lambda module, given, out: 1.1 * out)
        assert PlainStack.from_model(model) is None
        hook.remove()
        assert PlainStack.from_model(model) is not None


def test_other_types_windows_and_dtypes_run_by_themselves(monkeypatch):
    with model_of(GemmaForCausalLM, GemmaConfig, head_dim=8) as model:
        assert PlainStack.from_model(model) is None
    with model_of(MistralForCausalLM, MistralConfig, sliding_window=32) as model:
        assert PlainStack.from_model(model) is None  # the probe is shorter than the window
    draft = resolve("specpool/tiny-draft")
    with TargetModel.from_pretrained(draft, dtype="bfloat16") as model:
        assert PlainStack.from_model(model) is None
    with TargetModel.from_pretrained(draft, dtype="float32") as model:
        assert PlainStack.from_model(model) is not None
        monkeypatch.setattr(plain, "MAX_BYTES", 1 << 10)
        assert PlainStack.from_model(model) is None


@pytest.mark.parametrize("shape", [Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 6)])
def test_the_stack_drafts_as_the_modules_do(monkeypatch, shape):
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    found = []
    for most in (plain.MAX_BYTES, 0):
        monkeypatch.setattr(plain, "MAX_BYTES", most)
        options = {"draft": "specpool/tiny-draft", "shape": shape, "max_context_len": 256}
        with Engine.from_pretrained(**options) as engine:
            assert (engine.drafter._stack is None) == (most == 0)
            outputs = engine.generate(corpus.prompts(2, 24), params)
        found.append([(output.token_ids, output.accept_lens) for output in outputs])
    assert found[0] == found[1]
