"""What a round made is freed when the round is over, not when the garbage collector next runs.

A cycle of references that holds a tensor keeps memory of the device until then: torch cannot use it
again, and torch does not collect when memory runs out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cuda_host
import recurrent_families
from device_kit import kernels_run
from families import make_config, make_model
from fused_kit import use_doubles
from graph_kit import CHAIN, NONE, PROMPTS, TREE, make
from specpool import Engine, Grammar, SamplingParams, Shape
from specpool.engine.attention.view import AttentionView
from specpool.engine.models.eagle.plain import PlainStack
from specpool.engine.shapes import AdaptiveConfig

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3)
PARAMS = [GREEDY, DRAWN, GREEDY, DRAWN]
FORM = SamplingParams(max_new_tokens=24, structured=Grammar.regex("(ab|cd){1,30}"))
PENALTIES = dataclasses.replace(GREEDY, presence_penalty=0.5, repetition_penalty=1.2)
LOGPROBS = dataclasses.replace(DRAWN, logprobs=3)
BUDGET = AdaptiveConfig.from_dict(
    {"policy": "budget", "1": {"candidates": ["none", "chain:3", "tree:3x4x16"]}}
)
CASES: dict[str, tuple[dict[str, Any], list[SamplingParams]]] = {
    "plain": ({"shape": NONE}, PARAMS),
    "chain": ({"shape": CHAIN}, PARAMS),
    "chain, one round ahead": ({"shape": CHAIN, "overlap_depth": 1}, PARAMS),
    "chain, third head": ({"shape": CHAIN, "head": "tiny-eagle3"}, PARAMS),
    "dense": ({"shape": TREE, "page_size": 16}, PARAMS),
    "dense, by branch": ({"shape": TREE, "ancestry": "branch"}, PARAMS),
    "dense, shared": ({"shape": TREE, "page_size": 1, "placement": "shared"}, PARAMS),
    "holey": ({"shape": TREE, "page_size": 4, "layout": "holey"}, PARAMS),
    "block": ({"shape": CHAIN, "head": "tiny-block"}, PARAMS),
    "block tree": ({"shape": TREE, "head": "tiny-block", "layout": "holey"}, PARAMS),
    "small model": ({"shape": CHAIN, "head": "tiny-draft"}, PARAMS),
    "small model, tree": ({"shape": TREE, "head": "tiny-draft"}, PARAMS),
    "ngram": ({"shape": CHAIN, "draft": "ngram"}, PARAMS),
    "suffix": ({"shape": CHAIN, "draft": "suffix"}, PARAMS),
    "several": ({"shape": CHAIN, "draft": ["specpool/tiny-eagle", "ngram"]}, PARAMS),
    "mixed": ({"shape": TREE, "mixed_chunks": True, "prefill_tokens": 5}, PARAMS),
    "chunks of prompts": ({"shape": TREE, "prefill_tokens": 5}, PARAMS),
    "v1": ({"shape": CHAIN, "worker": "v1"}, PARAMS),
    "draft window": ({"shape": TREE, "draft_window": 16, "draft_sink": 4}, PARAMS),
    "by cost": ({"shape": None, "adaptive": "cost"}, PARAMS),
    "by budget": ({"shape": None, "adaptive": BUDGET}, PARAMS),
    "host tier": ({"shape": CHAIN, "host_bytes": 1 << 22}, PARAMS),
    "samples": ({"shape": CHAIN}, [dataclasses.replace(DRAWN, n=2)] * 4),
    "penalties": ({"shape": TREE}, [PENALTIES, LOGPROBS, GREEDY, DRAWN]),
    "forms": ({"shape": CHAIN, "forced_steps": 6}, [FORM, GREEDY, FORM, DRAWN]),
}
FAMILIES = ["mistral", "gemma2", "gemma3", "gpt_oss", "llama4", "mamba"]
WHERE = [
    pytest.param("cpu"),
    *(
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or ""
            ),
        )
        for name in ("kernels", "fused")
    ),
]


@pytest.fixture
def options(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of an engine, on a CPU or as on a GPU: by kernels, or also by fused attention."""
    if where == "cpu":
        yield {}
        return
    # A model drafts by its own modules, as on a GPU.
    monkeypatch.setattr(PlainStack, "from_model", classmethod(lambda cls, model: None))
    with kernels_run():
        if where == "fused":
            use_doubles(monkeypatch)
        yield {"dtype": "bfloat16"} if where == "fused" else {}


@contextlib.contextmanager
def uncollected() -> Iterator[list[Any]]:
    """Yield a list that gets, at the end of the block, what only a collection would free."""
    garbage: list[Any] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield garbage
        gc.collect()
        garbage += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


SLICE = {  # the rest is for `make test-full`
    ("dense", "fused"),
    ("chain, one round ahead", "fused"),
    ("small model, tree", "kernels"),
    ("block tree", "cpu"),
    ("mixed", "cpu"),
    ("forms", "cpu"),
}


def is_ours(thing: Any) -> bool:
    """Whether it holds memory, or was made by specpool; not by the host runner of the kernels."""
    if isinstance(thing, torch.Tensor | np.ndarray):
        return True
    module = thing.__module__ if isinstance(thing, types.FunctionType) else type(thing).__module__
    return str(module).startswith("specpool")


def check(engine: Engine, params: list[SamplingParams]) -> None:
    """Submit requests, run them to their end, and look what is left for the collector."""
    vocab_size = engine.target.config.vocab_size
    engine.generate([[1, 2, 3]], GREEDY)  # what is loaded once is loaded
    with uncollected() as garbage:
        for prompt, how in zip(PROMPTS, params, strict=False):
            engine.submit([token % vocab_size for token in prompt], how)
        while engine.turn():
            pass
    left = [thing for thing in garbage if is_ours(thing)]
    assert not [type(thing).__name__ for thing in left if isinstance(thing, AttentionView)]
    assert not sorted({repr(type(thing)) for thing in left})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "where"),
    [
        pytest.param(
            case,
            each.values[0],
            marks=[*each.marks, *([] if (case, each.values[0]) in SLICE else [pytest.mark.full])],
        )
        for case in CASES
        for each in WHERE
    ],
)
def test_a_round_leaves_nothing_to_the_collector(case, where, options):
    """Law: without the collector, no tensor and no object of specpool outlives its use."""
    how, params = CASES[case]
    if FORM in params:
        pytest.importorskip("llguidance")
    how = {"graph_sizes": (), "busy_check": 0, "max_context_len": 200, "max_batch": 4, **how}
    if "draft" in how:
        engine = Engine.from_pretrained(**how, **options)
    else:
        engine = make(**how, **options)
    with engine:
        check(engine, params)


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", [each for each in WHERE if each.values != ("fused",)])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_of_models_leaves_anything_to_the_collector(family, where, options):
    """Windows, sinks, soft caps, chunked attention; recurrent layers."""
    if family in recurrent_families.FAMILIES:
        model, shape = recurrent_families.make_model(recurrent_families.make_config(family)), CHAIN
    else:
        model, shape = make_model(make_config(family)), Shape.eagle(2, 2, 5)
    how = {"draft": "ngram", "shape": shape, "max_context_len": 120, "busy_check": 0}
    with Engine.from_pretrained(model, **how, **options) as engine:
        check(engine, PARAMS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", WHERE)
def test_a_session_leaves_nothing_to_the_collector(where, options):
    how = {"graph_sizes": (), "busy_check": 0, "max_context_len": 200}
    with make(TREE, **how, **options) as engine:
        with engine.open_session() as session:
            session.append(PROMPTS[0], GREEDY).output()
            with uncollected() as garbage:
                session.append(PROMPTS[1], GREEDY).output()
                session.rewind(session.num_tokens - 3)
                session.append(PROMPTS[2], DRAWN).output()
    assert not {repr(type(thing)) for thing in garbage if is_ours(thing)}
