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
from specpool.assets import corpus, resolve
from specpool.cli import main
from specpool.draft import BlockDrafter
from specpool.models import TargetModel

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


@pytest.mark.sample(8)
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
