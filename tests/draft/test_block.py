"""Laws of block drafters: they propose what the plain model does, and change no text."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from block_oracle import PlainBlock
from proposals import check, record
from specpool import CheckpointError, ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.cli import main
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import BlockDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.files.draft_kind import is_block_head

DRAFT = "specpool/tiny-block"
PROMPTS = [p[:n] for p, n in zip(corpus.prompts(3), (17, 30, 9), strict=True)]
CHAIN, TREE, WHOLE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12), Shape.eagle(7, 1, 8)
LAYOUTS = [
    {},
    {"page_size": 3, "layout": "holey"},
    {"page_size": 4, "layout": "holey", "placement": "shared"},
    {"page_size": 1, "overlap_depth": 1},
    {"page_size": 16, "worker": "v1"},
    {"page_size": 3, "draft_window": 12},
]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float().eval()


def make(draft: str | Path | None = DRAFT, **options: object) -> Engine:
    options = {"max_context_len": 160, **options}
    return Engine.from_pretrained(draft=draft if draft is None else str(draft), **options)


def copy(folder: Path, **changes: object) -> Path:
    """The shipped drafter with other values in its config; None = the key is left out."""
    shutil.copytree(resolve(DRAFT), folder, dirs_exist_ok=True)
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    nested = {**raw["dflash_config"], **raw.pop("nested", {})}
    raw["dflash_config"] = {k: v for k, v in nested.items() if v is not None}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder


VARIANTS = {
    "both ways": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "options", "variant"),
    list(itertools.product((CHAIN, TREE, WHOLE), LAYOUTS, VARIANTS)),
)
def test_proposals_equal_the_plain_models(model, tmp_path, shape, options, variant):
    """Pages, masks and earlier blocks change nothing, in the first rounds and in late ones."""
    folder = copy(tmp_path, **VARIANTS[variant])
    plain = PlainBlock(folder, model)
    with make(folder, shape=shape, **options) as engine:
        trees = record(engine)
        outputs = engine.generate(PROMPTS, GREEDY)
    texts = [o.prompt_ids + o.token_ids for o in outputs]
    whole = [each for each in trees if len(each[0]) == len(PROMPTS)]

    def logits(text: list[int], path: tuple[int, ...]) -> torch.Tensor:
        return plain.logits(text, shape.num_steps, options.get("draft_window"))[len(path)]

    check(logits, texts, [*whole[:2], whole[-1]])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "options", "temperature"),
    list(itertools.product((CHAIN, TREE, WHOLE), LAYOUTS, (0.0, 1.0))),
)
def test_the_text_is_that_of_plain_decoding(shape, options, temperature):
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    with make(None) as plain:
        expected = [o.token_ids for o in plain.generate(PROMPTS, params)]
    with make(shape=shape, **options) as engine:
        outputs = engine.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == expected
    assert max(max(o.accept_lens) for o in outputs) > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_sessions_the_prefix_cache_and_retraction_keep_the_drafts(model, shape):
    plain = PlainBlock(Path(resolve(DRAFT)), model)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    options = {"page_size": 4, "headroom": 0, "num_pages": 50}
    with make(shape=shape, **options) as engine:
        outputs = engine.generate(PROMPTS, params)
        assert engine.core.scheduler.num_retracted > 0
        with engine.open_session() as session:
            session.append(PROMPTS[0], params).output()
            trees = record(engine)
            turn = session.append(PROMPTS[1][:11], params).output()
        (again,) = engine.generate([PROMPTS[2]], params)
        assert engine.stats().prefix.hit_ct > 0
    assert again.token_ids == outputs[2].token_ids
    text = [*turn.prompt_ids, *turn.token_ids]

    def logits(text: list[int], path: tuple[int, ...]) -> torch.Tensor:
        return plain.logits(text, shape.num_steps)[len(path)]

    check(logits, [text], trees[: len(turn.accept_lens)][:6])


def test_the_whole_block_is_drafted_by_one_forward():
    with make(shape=WHOLE) as engine:
        ran, run = [], engine.drafter.head.forward
        engine.drafter.head.forward = lambda *given: ran.append(len(given[0])) or run(*given)
        (output,) = engine.generate(PROMPTS[:1], GREEDY)
    assert ran == [8] * len(output.accept_lens) and max(output.accept_lens) > 4


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vocab_size": 300}, "made for a vocabulary of 300 tokens, the target's is 259"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 100 is not the vocab_size 259"),
        ({"hidden_size": 64}, "made for hidden size 64, the target's is 128"),
        ({"num_target_layers": 5}, "made for 5 layers, the target has 4"),
        ({"num_hidden_layers": 3}, r"missing layers.2.self_attn.q_proj.weight \[128, 128\]"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers 1048576, at most 16384"),
        ({"nested": {"target_layer_ids": [0, 3]}}, r"\[0, 3\] has 3: allowed are 0..2"),
        ({"nested": {"target_layer_ids": [-1]}}, r"\[-1\] has -1: allowed are 0..2"),
        ({"nested": {"target_layer_ids": [1, 1]}}, r"\[1, 1\], not a list of different"),
        ({"nested": {"target_layer_ids": None}}, "target_layer_ids is None"),
        ({"nested": {"target_layer_ids": [0, 1]}}, r"fc.weight is \[128, 384\], expected .*256"),
        ({"nested": {"mask_token_id": 259}}, r"mask_token_id is 259, .* \[0, 259\)"),
        ({"nested": {"mask_token_id": None}}, r"mask_token_id is None, .* \[0, 259\)"),
        *(
            ({"nested": {"block_size": v}}, f"block_size is {v!r}, not an integer >= 2")
            for v in (1, 0, -8, 1.5, "x", True, 1 << 40)
        ),
        ({"nested": {"block_size": 2049}}, "block_size 2049 is above the 2048 positions"),
        *(
            ({"nested": {"target_layer_ids": v}}, "target_layer_ids is .*, not a list of different")
            for v in ([], [0.5], [True, 0], "x", 7)
        ),
        ({"nested": {"target_layer_ids": [1 << 40]}}, r"has 1099511627776: allowed are 0..2"),
        ({"nested": {"mask_token_id": 1 << 40}}, "mask_token_id is 1099511627776, not an integer"),
        *(
            ({"rms_norm_eps": v}, rf"rms_norm_eps is {v}, not a number in \(0, 1\)")
            for v in (1.5, 0, -1, float("nan"), float("inf"))
        ),
        *(({"rope_theta": v}, f"rope_theta is {v}, not a number > 0") for v in (0, -1, True)),
        ({"nested": {"conv_kernel_size": 2}}, "dflash_config has conv_kernel_size"),
        ({"nested": {"output_multiplier": 0.5}}, "output_multiplier 0.5 is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 is not supported"),
        ({"speculators_model_type": "dflash"}, "'dflash' speculator"),
        ({"quantization_config": {"bits": 4}}, "quantized block drafters"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is .* allowed are"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            "sliding_window 4 is below block_size 8",
        ),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(target, tmp_path, changes, match):
    with pytest.raises(CheckpointError, match=match):
        BlockDrafter.from_pretrained(copy(tmp_path, **changes), target)


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("hidden_norm.weight", None, r"missing hidden_norm.weight \[128\]"),
        ("layers.0.self_attn.q_norm.weight", None, r"missing layers.0.self_attn.q_norm.weight"),
        ("norm.weight", torch.ones(64), r"norm.weight is \[64\], expected \[128\]"),
        ("fc.weight", torch.ones(128, 384, dtype=torch.int8), "int8; quantized"),
        ("embed_tokens.weight", torch.ones(259, 128), "unexpected embed_tokens.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(target, tmp_path, name, tensor, match):
    path = copy(tmp_path) / "model.safetensors"
    state = load_file(path)
    state.pop(name, None)
    save_file(state if tensor is None else {**state, name: tensor}, path)
    with pytest.raises(CheckpointError, match=match):
        BlockDrafter.from_pretrained(tmp_path, target)


def test_a_shape_longer_than_the_block_is_refused(target):
    drafter = BlockDrafter.from_pretrained(resolve(DRAFT), target)
    long = EngineConfig(shape=Shape.eagle(8, 1, 9), max_context_len=128)
    with pytest.raises(ConfigError, match="has 8 steps, a block of 8 tokens drafts at most 7"):
        Engine(target, drafter, config=long)
    wide = EngineConfig(shape=Shape.eagle(2, 260, 300), max_context_len=128)
    with pytest.raises(ConfigError, match="topk 260 is above the 259 tokens that the target"):
        Engine(target, drafter, config=wide)
    Engine(target, drafter, config=EngineConfig(max_context_len=128))
    with pytest.raises(ConfigError, match="attached to another engine"):
        Engine(target, drafter, config=EngineConfig(max_context_len=128))


def test_a_block_drafter_is_told_by_its_config(tmp_path):
    assert is_block_head(resolve(DRAFT))
    for name in ("specpool/tiny", "specpool/tiny-eagle", "specpool/tiny-eagle3"):
        assert not is_block_head(resolve(name))
    assert not is_block_head(tmp_path)
    for raw in ({"architectures": ["DFlashDraftModel"]}, {"dflash_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert is_block_head(tmp_path)
    assert not is_block_head(tmp_path / "config.json")


def test_a_plan_counts_its_layers(monkeypatch, capsys):
    options = ["--draft", DRAFT, "--memory", "64MiB", "--max-context-len", "128"]
    monkeypatch.setattr("sys.argv", ["specpool", "plan", "--target", "specpool/tiny", *options])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    cells = {line.split()[1]: line.split() for line in out.splitlines() if " 16 " in line}
    layer = 2 * 2 * 32 * 2 * 16  # keys and values, 2 heads of 32, float16, 16 tokens
    assert f"{4 * layer:,}" in cells["target"] and f"{2 * layer:,}" in cells["draft,"]
