"""EAGLE heads: every published layout against a slow reference, and what a head refuses."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_checkpoints import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    TARGET_LAYERS,
    VOCAB,
    H,
    State,
    Target,
    base_config,
    eagle3_state,
    eagle_state,
    write,
)
from eagle_reference import DenseCache, Reference, run_head, run_reference, to_double
from specpool.engine.assets.corpus import prompts
from specpool.engine.models.eagle.head import EagleHead
from specpool.engine.models.eagle.likeliest import likeliest
from specpool.errors import CheckpointError, ShapeError

torch.set_num_threads(1)


SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": base_config()}

# name -> (kind, config.json, tensors, target, options of the reference)
LAYOUTS: dict[str, tuple[str, dict[str, Any], State, Target, dict[str, Any]]] = {
    "eagle": ("eagle", base_config(bias=False), eagle_state(), Target(), {}),
    "eagle, fc bias": ("eagle", base_config(), eagle_state(fc_bias=True), Target(), {}),
    "eagle, bias told but not in the file": (
        "eagle",
        base_config(bias=True),
        eagle_state(),
        Target(),
        {},
    ),
    "eagle, qkv bias": (
        "eagle",
        base_config(qkv_bias=True),
        eagle_state(qkv_bias=True),
        Target(),
        {},
    ),
    "eagle, own head": ("eagle", base_config(), eagle_state(lm_head=True), Target(), {}),
    "eagle, two layers": (
        "eagle",
        base_config(num_hidden_layers=2),
        eagle_state(num_layers=2),
        Target(),
        {"num_layers": 2},
    ),
    "eagle, gelu": (
        "eagle",
        base_config(hidden_act="gelu"),
        eagle_state(),
        Target(),
        {"act": torch.nn.functional.gelu},
    ),
    "eagle, linear rope scaling": (
        "eagle",
        base_config(rope_scaling={"type": "linear", "factor": 4.0}),
        eagle_state(),
        Target(),
        {"rope_scale": 4.0},
    ),
    "eagle3": ("eagle3", base_config(draft_vocab_size=DRAFT_VOCAB), eagle3_state(), Target(), {}),
    "eagle3, fc bias": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB),
        eagle3_state(fc_bias=True),
        Target(),
        {},
    ),
    "eagle3, no draft vocabulary, own head": (
        "eagle3",
        base_config(),
        eagle3_state(draft_vocab=None),
        Target(),
        {},
    ),
    "eagle3, no draft vocabulary, target's head": (
        "eagle3",
        base_config(),
        eagle3_state(draft_vocab=None, lm_head=False),
        Target(),
        {},
    ),
    "eagle3, draft vocabulary told by d2t": ("eagle3", base_config(), eagle3_state(), Target(), {}),
    "eagle3, wider target": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, target_hidden_size=20),
        eagle3_state(target_h=20),
        Target(20),
        {},
    ),
    "eagle3, wider target told by fc": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB),
        eagle3_state(target_h=20),
        Target(20),
        {},
    ),
    "eagle3, two features": (
        "eagle3",
        base_config(
            draft_vocab_size=DRAFT_VOCAB,
            num_aux_hidden_states=2,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5]},
        ),
        eagle3_state(features=2),
        Target(),
        {},
    ),
    "eagle3, last hidden state": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, eagle_config={"use_aux_hidden_state": False}),
        eagle3_state(),
        Target(),
        {},
    ),
    "eagle3, last hidden state of a wider target": (
        "eagle3",
        base_config(
            draft_vocab_size=DRAFT_VOCAB, use_aux_hidden_state=False, target_hidden_size=20
        ),
        eagle3_state(target_h=20, features=1),
        Target(20),
        {},
    ),
    "eagle3, norm before fc": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, norm_before_fc=True),
        eagle3_state(input_norm=True),
        Target(),
        {},
    ),
    "eagle3, fc norm": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, eagle_config={"fc_norm": True}),
        eagle3_state(fc_norm=True),
        Target(),
        {},
    ),
    "eagle3, norm output": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, norm_output=True),
        eagle3_state(),
        Target(),
        {"norm_output": True},
    ),
    "eagle3, norm before residual": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, norm_before_residual=True),
        eagle3_state(),
        Target(),
        {"norm_before_residual": True},
    ),
    "eagle3, q and k norms": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, model_type="qwen3"),
        eagle3_state(qk_norm=True),
        Target(),
        {},
    ),
    "eagle3, two layers": (
        "eagle3",
        base_config(draft_vocab_size=DRAFT_VOCAB, num_hidden_layers=2),
        eagle3_state(num_layers=2),
        Target(),
        {"num_layers": 2},
    ),
    "speculators, its default": (
        "eagle3",
        {**SPECULATORS, "draft_vocab_size": DRAFT_VOCAB},
        eagle3_state(),
        Target(),
        {"norm_before_residual": True},
    ),
    "speculators, all options": (
        "eagle3",
        {
            **SPECULATORS,
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": False,
            "norm_output": True,
            "norm_before_fc": True,
            "fc_norm": False,
            "target_hidden_size": None,
        },
        eagle3_state(input_norm=True),
        Target(),
        {"norm_output": True},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_reference(name: str, tmp_path: Path) -> None:
    kind, config, state, target, options = LAYOUTS[name]
    # In float64, so that the order of sums does not matter; RoPE rows are float32 in both.
    head = target.load(write(tmp_path, config, state), dtype=torch.float64)
    assert head.kind == kind
    assert head.layer_kv == ((KV_HEADS, HEAD_DIM),) * options.get("num_layers", 1)
    hidden, logits = run_head(head, target)
    reference = Reference(kind, to_double(state), target, **options)
    expected_hidden, expected_logits = run_reference(reference, max(1, len(head.feature_layers)))
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert logits.shape == (8, head.draft_vocab_size)


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_and_values_need_no_result(name: str, tmp_path: Path) -> None:
    """Without a token to go on with, every layer still gets all keys and values."""
    _, config, state, target, _ = LAYOUTS[name]
    head = target.load(write(tmp_path, config, state))
    features = torch.randn(5, max(1, len(head.feature_layers)) * target.hidden_size)
    inputs, tokens, positions = head.combine(features), torch.arange(5), torch.arange(5)
    whole, told = DenseCache(head.num_layers), []
    head.forward(tokens, inputs, positions, whole)
    attend = DenseCache(head.num_layers)

    def telling(layer, q, k, v):
        told.append((layer, len(q), k, v))
        return attend(layer, q, k, v)

    out = head.forward(tokens, inputs, positions, telling, keep=tokens[:0])
    assert out.shape == (0, head.hidden_size)
    assert [len_q for _, len_q, _, _ in told] == [5] * (head.num_layers - 1) + [0]
    for layer, _, k, v in told:
        torch.testing.assert_close(k, torch.stack(whole.keys[layer]))
        torch.testing.assert_close(v, torch.stack(whole.values[layer]))


def strip_layer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def legacy_norms(name: str) -> str:
    for i, part in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{i}.", f"aux_norm_{part}.")
    return name


def speculators_eagle(name: str) -> str:
    return name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rename": lambda name: "model." + name},
        {"rename": strip_layer},
        {"rename": lambda name: "model." + strip_layer(name)},
        {"rename": lambda name: "model." * ("lm_head" not in name) + name},
        {"rename": legacy_norms, "config": {"fc_norm": None, "use_aux_norm": True}},
        {"form": "bin"},
        {"form": "sharded safetensors"},
        {"form": "sharded bin"},
        {"config": {"architectures": ["LlamaForCausalLM"]}},
        {"config": {"rope_theta": None, "rope_parameters": {"rope_theta": 100.0}}},
        {
            "config": {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            }
        },
        {"config": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}},
        {"config": {"fc_norm": None, "eagle_config": {"fc_norm": True}}},
        {"config": {"fc_norm": None}},  # only the tensors show it
        {"config": {"draft_vocab_size": None}},
        {"extra": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}},
        {"extra": {"embed_tokens.weight": Target().embedding}},
        {"extra": {"embed_tokens.weight": Target().embedding.bfloat16()}},
        {"nested": True},
    ],
)
def test_spellings_of_one_eagle3_head_give_identical_outputs(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    plain = {"draft_vocab_size": DRAFT_VOCAB, "fc_norm": True}
    state = eagle3_state(fc_norm=True)
    target = Target()
    expected = run_head(target.load(write(tmp_path / "plain", base_config(**plain), state)), target)
    config = base_config(**{**plain, **spelling.get("config", {})})
    if spelling.get("nested"):
        config = {**SPECULATORS, **plain, "norm_before_residual": False}
    folder = write(
        tmp_path / "other",
        config,
        {**state, **spelling.get("extra", {})},
        form=spelling.get("form", "safetensors"),
        rename=spelling.get("rename", lambda name: name),
    )
    same_outputs(run_head(target.load(folder), target), expected)


def same_outputs(found: Any, expected: Any) -> None:
    """Equal but for the last bits: where a file puts a tensor decides how BLAS reads it."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "rename"),
    [
        (base_config(), lambda name: "model." + name),
        (
            {"speculators_model_type": "eagle", "transformer_layer_config": base_config()},
            speculators_eagle,
        ),
    ],
)
def test_spellings_of_one_eagle1_head_give_identical_outputs(
    config: dict[str, Any], rename: Any, tmp_path: Path
) -> None:
    state, target = eagle_state(fc_bias=True), Target()
    expected = run_head(target.load(write(tmp_path / "plain", base_config(), state)), target)
    other = run_head(target.load(write(tmp_path / "other", config, state, rename=rename)), target)
    same_outputs(other, expected)


@pytest.mark.parametrize(("kind", "width"), [("eagle", H), ("eagle3", H), ("eagle3", 20)])
def test_an_own_embedding_is_read(
    kind: str, width: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: a head that was trained with another embedding than the target's reads that one."""
    caplog.set_level("INFO", logger="specpool")
    target = Target(width)
    state = eagle_state() if kind == "eagle" else eagle3_state(target_h=width)
    state["embed_tokens.weight"] = torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(8))
    config = base_config(**({} if kind == "eagle" else {"draft_vocab_size": DRAFT_VOCAB}))
    head = target.load(write(tmp_path, config, state), dtype=torch.float64)
    assert [r.getMessage().count("its own embedding [40, 16]") for r in caplog.records] == [1]
    assert [r.levelname for r in caplog.records] == ["WARNING" if width == H else "INFO"]
    own = Target(width)
    own.embedding = state["embed_tokens.weight"]
    reference = Reference(kind, to_double(state), own)
    expected = run_reference(reference, max(1, len(head.feature_layers)))
    same_outputs(run_head(head, target), expected)


def test_a_copy_of_the_embedding_takes_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="specpool")
    target = Target()
    state = {**eagle_state(), "embed_tokens.weight": target.embedding.half()}
    head = target.load(write(tmp_path, base_config(), state))
    assert head._embedding.data_ptr() == target.embedding.data_ptr()
    assert [r.getMessage() for r in caplog.records] == [
        f"draft head {tmp_path} reads the target's embedding"
    ]


def test_a_tied_head_reads_its_own_embedding_as_output_matrix(tmp_path: Path) -> None:
    table = torch.randn(VOCAB, H)
    state = {**eagle3_state(lm_head=False, draft_vocab=None), "embed_tokens.weight": table}
    config = base_config(tie_word_embeddings=True, draft_vocab_size=VOCAB)
    head = Target().load(write(tmp_path, config, state))
    hidden = torch.randn(3, H)
    normed = torch.nn.functional.rms_norm(hidden, (H,), state["norm.weight"], 1e-5)
    torch.testing.assert_close(head.logits(hidden), normed @ table.T)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("with_table", ["none", "copy", "own"])
def test_tokens_that_were_added_to_a_target_change_no_draft_and_may_be_read(
    kind: str, with_table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: a head of 40 tokens drafts for its target after 5 tokens were added to that."""
    target = Target()
    tables = {"copy": target.embedding.clone(), "own": torch.randn(VOCAB, H)}
    state = eagle_state(lm_head=True) if kind == "eagle" else eagle3_state()
    if with_table in tables:
        state["embed_tokens.weight"] = tables[with_table]
    config = base_config(**({} if kind == "eagle" else {"draft_vocab_size": DRAFT_VOCAB}))
    folder = write(tmp_path, config, state)
    before = run_head(target.load(folder), target)
    more = torch.randn(5, H)
    sizes = {
        "vocab_size": VOCAB + 5,
        "embedding_weight": torch.cat([target.embedding, more]),
        "lm_head_weight": torch.cat([target.lm_head, more]),
    }
    head = target.load(folder, **sizes)
    same_outputs(run_head(head, target), before)
    assert torch.isfinite(head.embed(torch.tensor([VOCAB, VOCAB + 4]))).all()
    assert int(head.topk(torch.randn(64, H), 4)[1].max()) < VOCAB
    numbers = (
        "made for a vocabulary of 40 tokens, the target's is 45: it has learned nothing of the last"
    )
    assert sum(numbers in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("vocab", "message"),
    [(VOCAB - 1, "which lacks the last 1 of them"), (VOCAB + 1025, "this one has 1025 more")],
)
def test_another_vocabulary_is_refused_with_the_reason(
    vocab: int, message: str, tmp_path: Path
) -> None:
    target, table = Target(), torch.randn(VOCAB + 1025, H)
    table[:VOCAB] = target.embedding
    folder = write(tmp_path, base_config(), eagle_state())
    sizes = {"vocab_size": vocab, "embedding_weight": table, "lm_head_weight": table}
    with pytest.raises(CheckpointError, match=f"of 40 tokens, the target's is {vocab}.*{message}"):
        target.load(folder, **sizes)
    if vocab > VOCAB:  # a copy of the first rows shows that it is the same target
        state = {**eagle_state(), "embed_tokens.weight": target.embedding}
        target.load(write(tmp_path / "copy", base_config(), state), **sizes)


def test_missing_config_keys_take_their_defaults(tmp_path: Path) -> None:
    config = base_config(
        head_dim=None, num_key_value_heads=None, rms_norm_eps=None, num_hidden_layers=None
    )
    state = eagle_state()
    for x in "qkv":
        state[f"layers.0.self_attn.{x}_proj.weight"] = torch.zeros(H, H)
    state["layers.0.self_attn.o_proj.weight"] = torch.zeros(H, H)
    head = Target().load(write(tmp_path, config, state))
    assert head.layer_kv == ((HEADS, H // HEADS),)
    assert (head.config.rms_norm_eps, head.num_layers) == (1e-6, 1)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (2, 4, 5)),  # inputs of 2, L//2, L-3
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 3, 7]}}, (0, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
        ({"aux_hidden_state_layer_ids": [1, 3, 8]}, (1, 3, 8)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            },
            (2, 4, 5),
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
    ],
)
def test_nested_layer_ids_are_outputs_and_top_level_ones_inputs(
    keys: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB, **keys), eagle3_state())
    assert Target().load(folder).feature_layers == expected


CONFLICT = {
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}, r"\[1, 3, 9\].*0\.\.8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-2, 3, 4]}}, r"\[-1, 4, 5\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3], "num_aux_hidden_states": 3}, "2 layer inp"),
        ({"eagle_aux_hidden_state_layer_ids": "1,2"}, "not a list of layer numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, True, 4]}, "not a list of layer numbers"),
        (CONFLICT, r"\(2, 4, 5\).*\(1, 3, 4\); say which with feature_layers"),
    ],
)
def test_layer_ids_that_cannot_be_are_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB, **keys), eagle3_state())
    with pytest.raises(CheckpointError, match=message):
        Target().load(folder)


def test_default_layer_ids_need_a_target_that_deep(tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB), eagle3_state())
    with pytest.raises(CheckpointError, match=r"\[2, 1, -1\].*0\.\.2; name others"):
        Target().load(folder, num_layers=2)
    assert Target().load(folder, num_layers=2, feature_layers=[0, 1, 2]).feature_layers == (0, 1, 2)


def test_feature_layers_override_whatever_the_file_says(tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB, **CONFLICT), eagle3_state())
    assert Target().load(folder, feature_layers=[1, 3, 4]).feature_layers == (1, 3, 4)


def test_the_targets_own_logits_serve_a_head_without_one(tmp_path: Path) -> None:
    target = Target()
    folder = write(tmp_path, base_config(), eagle_state())

    def capped(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ target.lm_head.T)

    hidden = torch.randn(3, H)
    assert torch.equal(target.load(folder, compute_logits=capped).logits(hidden), capped(hidden))
    tied = target.load(folder, lm_head_weight=None).logits(hidden)
    torch.testing.assert_close(tied, hidden @ target.embedding.T)


def test_d2t_is_an_offset(tmp_path: Path) -> None:
    state = eagle3_state()
    head = Target().load(write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB), state))
    kept = state["t2d"].nonzero().flatten()
    assert torch.equal(head.to_target_ids(torch.arange(DRAFT_VOCAB)), kept)
    assert head.to_target_ids(torch.tensor([[3], [5]])).shape == (2, 1)


@pytest.mark.parametrize("k", [1, 2, 5, DRAFT_VOCAB])
def test_topk_is_a_stable_sort_of_the_softmax(k: int, tmp_path: Path) -> None:
    state = eagle3_state()
    # Rows in threes are equal: ties everywhere, also across the k-th place.
    state["lm_head.weight"] = state["lm_head.weight"][::3].repeat_interleave(3, 0)
    head = Target().load(write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB), state))
    hidden = torch.randn(4, H, generator=torch.Generator().manual_seed(0))
    hidden[3] = 0  # all tokens are equally probable
    p, ids = head.topk(hidden, k)
    expected = torch.softmax(head.logits(hidden), -1).sort(dim=-1, descending=True, stable=True)
    assert p.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert torch.equal(p, expected.values[:, :k])
    assert torch.equal(ids, head.to_target_ids(expected.indices[:, :k]))


@pytest.mark.parametrize("k", [0, -1, DRAFT_VOCAB + 1])
def test_topk_refuses_a_k_outside_the_draft_vocabulary(k: int, tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB), eagle3_state())
    with pytest.raises(ShapeError, match=rf"\[1, {DRAFT_VOCAB}\], got {k}"):
        Target().load(folder).topk(torch.zeros(1, H), k)


@pytest.mark.parametrize(
    ("config", "state", "widths"),
    [
        (base_config(), eagle_state(), r"\[16\]"),
        (base_config(draft_vocab_size=DRAFT_VOCAB), eagle3_state(), r"\[16, 48\]"),
    ],
)
def test_combine_refuses_features_of_another_width(
    config: dict[str, Any], state: State, widths: str, tmp_path: Path
) -> None:
    head = Target().load(write(tmp_path, config, state))
    assert head.combine(torch.zeros(2, H)).shape == (2, H)
    with pytest.raises(ShapeError, match=rf"32 wide, expected {widths}"):
        head.combine(torch.zeros(2, 32))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_scaling_is_transformers_in_both_spellings(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    target, state = Target(), eagle_state()
    old = write(tmp_path / "old", base_config(rope_scaling=scaling), state)
    new_config = base_config(rope_theta=None, rope_parameters={"rope_theta": 100.0, **scaling})
    new = write(tmp_path / "new", new_config, state)
    llama = LlamaConfig(
        hidden_size=H,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        rope_theta=100.0,
        rope_scaling=scaling,
    )
    positions = torch.tensor([0, 1, 17, 63])
    cos, sin = LlamaRotaryEmbedding(llama)(torch.zeros(1), positions[None])
    seen = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q, k))
        return q

    # The same token and feature at every position: only the rotation distinguishes positions.
    hidden = torch.ones(4, H)
    for folder in (old, new):
        target.load(folder).forward(torch.zeros(4, dtype=torch.int64), hidden, positions, attend)
    plain = write(tmp_path / "plain", base_config(), state)
    target.load(plain).forward(torch.zeros(4, dtype=torch.int64), hidden, positions * 0, attend)
    (q_old, k_old), (q_new, k_new), (q, k) = seen
    assert torch.equal(q_old, q_new)
    assert torch.equal(k_old, k_new)
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(q_old, expected[0][0])
    torch.testing.assert_close(k_old, expected[1][0])


def test_positions_beyond_the_heads_own_can_be_reserved(tmp_path: Path) -> None:
    head = Target().load(write(tmp_path, base_config(), eagle_state()))
    arguments = (torch.tensor([1]), torch.ones(1, H), torch.tensor([99]), DenseCache(1))
    assert head.max_positions == 64
    with pytest.raises(IndexError):
        head.forward(*arguments)
    before = head.forward(torch.tensor([1]), torch.ones(1, H), torch.tensor([63]), DenseCache(1))
    head.reserve_positions(100)
    head.reserve_positions(10)
    assert head.max_positions == 100
    assert head.forward(*arguments).shape == (1, H)
    after = head.forward(torch.tensor([1]), torch.ones(1, H), torch.tensor([63]), DenseCache(1))
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_runs_in_bfloat16(kind: str, tmp_path: Path) -> None:
    state = eagle_state() if kind == "eagle" else eagle3_state()
    config = base_config(draft_vocab_size=None if kind == "eagle" else DRAFT_VOCAB)
    target = Target()
    head = target.load(write(tmp_path, config, state), dtype=torch.bfloat16)
    width = H * max(1, len(head.feature_layers))
    features = torch.randn(2, width, dtype=torch.bfloat16)
    hidden = head.forward(
        torch.tensor([1, 2]), head.combine(features), torch.arange(2), DenseCache(1)
    )
    assert hidden.dtype == head.logits(hidden).dtype == torch.bfloat16
    assert head.topk(hidden, 3)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "state", "options", "message"),
    [
        (base_config(), eagle_state(), {"hidden": 20}, "hidden size 16, the target's is 20"),
        (
            base_config(draft_vocab_size=DRAFT_VOCAB),
            eagle3_state(),
            {"hidden": 20},
            "hidden size 16, the target's is 20",
        ),
        (
            base_config(draft_vocab_size=DRAFT_VOCAB, target_hidden_size=20),
            eagle3_state(target_h=20),
            {},
            "hidden size 20, the target's is 16",
        ),
        (
            base_config(vocab_size=50),
            eagle_state(),
            {},
            "vocabulary of 50 tokens, the target's is 40",
        ),
        (
            base_config(vocab_size=50, draft_vocab_size=DRAFT_VOCAB),
            eagle3_state(),
            {},
            "vocabulary of 50 tokens, the target's is 40",
        ),
    ],
)
def test_a_head_for_another_target_is_refused_with_both_numbers(
    config: dict[str, Any],
    state: State,
    options: dict[str, int],
    message: str,
    tmp_path: Path,
) -> None:
    target = Target(options.get("hidden", H))
    with pytest.raises(CheckpointError, match=f"another target: .*{message}"):
        target.load(write(tmp_path, config, state))


@pytest.mark.parametrize("name", ["embedding_weight", "lm_head_weight"])
def test_target_tensors_of_a_wrong_shape_are_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(), eagle_state())
    with pytest.raises(ShapeError, match=r"is \[40, 15\], expected \[40, 16\]"):
        Target().load(folder, **{name: torch.zeros(VOCAB, 15)})


def test_a_padded_target_vocabulary_is_cut(tmp_path: Path) -> None:
    head = Target().load(
        write(tmp_path, base_config(), eagle_state()),
        embedding_weight=torch.zeros(VOCAB + 24, H),
        lm_head_weight=torch.zeros(VOCAB + 24, H),
    )
    assert head.logits(torch.zeros(1, H)).shape == (1, VOCAB)


def test_all_that_does_not_fit_is_named_in_one_message(tmp_path: Path) -> None:
    state = eagle3_state()
    del state["layers.0.hidden_norm.weight"]
    state["layers.0.mlp.up_proj.weight"] = torch.zeros(INNER, H + 1)
    state["surprise"] = torch.zeros(3, 2)
    state["norm.weight"] = torch.zeros(H, dtype=torch.int8)
    folder = write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB), state, rename=strip_layer)
    with pytest.raises(CheckpointError) as caught:
        Target().load(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "missing layers.0.hidden_norm.weight [16]" in message
    assert "midlayer.mlp.up_proj.weight is [24, 17], expected [24, 16]" in message
    assert "unexpected surprise [3, 2]" in message
    assert "norm.weight is torch.int8" in message


@pytest.mark.parametrize(
    ("config", "state", "message"),
    [
        ({"norm_before_fc": True}, {}, r"missing input_norm.weight \[48\]"),
        ({"norm_before_fc": False}, {"input_norm": True}, "unexpected input_norm.weight"),
        ({"fc_norm": True}, {}, r"missing fc_norm.0.weight \[16\]"),
        ({"draft_vocab_size": 30}, {}, r"lm_head.weight is \[24, 16\], expected \[30, 16\]"),
        ({"draft_vocab_size": 41}, {}, "draft_vocab_size 41 is above vocab_size 40"),
        ({"draft_vocab_size": 24}, {"lm_head": False}, r"missing lm_head.weight \[24, 16\]"),
        ({"qkv_bias": True}, {}, r"missing layers.0.self_attn.q_proj.bias \[24\]"),
        ({"num_hidden_layers": 2}, {}, "missing layers.1.self_attn.q_proj.weight"),
        ({"hidden_act": "wobble"}, {}, "hidden_act 'wobble'"),
        ({"rope_scaling": {"rope_type": "wobble"}}, {}, "cannot build RoPE"),
        ({"rope_scaling": {"rope_type": "linear"}}, {}, "cannot build RoPE"),
    ],
)
def test_config_and_tensors_must_agree(
    config: dict[str, Any], state: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = base_config(**{"draft_vocab_size": DRAFT_VOCAB, **config})
    with pytest.raises(CheckpointError, match=message):
        Target().load(write(tmp_path, config, eagle3_state(**state)))


@pytest.mark.parametrize(("entry", "value", "target_id"), [(0, -1, -1), (23, 17, 40)])
def test_a_d2t_that_leaves_the_vocabulary_is_refused(
    entry: int, value: int, target_id: int, tmp_path: Path
) -> None:
    state = eagle3_state()
    state["d2t"][entry] = value
    with pytest.raises(CheckpointError, match=rf"draft id {entry} to target id {target_id},.* 40"):
        Target().load(write(tmp_path, base_config(draft_vocab_size=DRAFT_VOCAB), state))


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_the_shipped_heads_guess_the_shipped_target(name: str) -> None:
    from transformers import LlamaForCausalLM

    tiny = Path(str(resources.files("specpool.engine.assets") / "tiny"))
    model = LlamaForCausalLM.from_pretrained(tiny / "target").float().eval()
    head = EagleHead.from_pretrained(
        tiny / name,
        num_layers=4,
        hidden_size=128,
        vocab_size=259,
        embedding_weight=model.get_input_embeddings().weight,
        lm_head_weight=model.lm_head.weight,
    )
    assert head.kind == name.removesuffix("1")
    assert head.feature_layers == (() if name == "eagle1" else (1, 2, 3))
    prompt = torch.tensor(prompts(4))
    with torch.inference_mode():
        output = model(input_ids=prompt, output_hidden_states=True)
        targets = output.logits.argmax(-1)
        # hidden_states[i] is the input of layer i; the last one is after the final norm
        wanted = [output.hidden_states[i] for i in head.feature_layers or (TARGET_LAYERS // 2,)]
        features = torch.cat(wanted, -1)
        correct = 0
        for lane in range(4):
            tokens, length = prompt[lane], prompt.shape[1] - 1
            hidden = head.forward(
                tokens[1:], head.combine(features[lane, :-1]), torch.arange(length), DenseCache(1)
            )
            correct += int((head.topk(hidden, 1)[1][:, 0] == targets[lane, 1:]).sum())
    # Trained to 0.9 on held-out text; with two features swapped it is below 0.6.
    assert correct / (4 * length) > 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_likeliest_token_is_the_first_of_more(dtype: torch.dtype) -> None:
    """Law: the shorter way of chains gives the token and the probability of the way of trees."""
    logits = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0] = 1.0  # equals: the lower id comes first
    logits[1, :4] = 9.0
    p, ids = likeliest(logits, 1)
    more_p, more_ids = likeliest(logits, 2)
    assert torch.equal(ids[:, 0], more_ids[:, 0])
    assert ids[:2, 0].tolist() == [0, 0]
    torch.testing.assert_close(p[:, 0], more_p[:, 0])
    p, ids = likeliest(torch.full((1, 5), torch.nan, dtype=dtype), 1)
    assert (p.item(), 0 <= ids.item() < 5) == (0.0, True)
