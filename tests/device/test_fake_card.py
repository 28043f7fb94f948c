"""Whole engines on a card that is not there: devices, dtypes and shapes are torch's own.

Host and device tensors that are mixed, reads of the device that a step waits for, and operators
that do not take their arguments on a card are found here alone: all other kits run on CPU tensors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import cuda_host
import recurrent_families
from cuda_host.errors import ArgumentError
from fake_cuda import DEVICE, Card
from graph_kit import CHAIN, NONE, PROMPTS, TREE, make
from specpool import Engine, Grammar, SamplingParams, Shape
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.assets import resolve
from specpool.engine.attention.lanes import Lanes
from specpool.engine.worker import draft_round
from specpool.kernels import launch

pytestmark = [
    pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or ""),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card"),
]

GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3)
PARAMS = [GREEDY, DRAWN, GREEDY, DRAWN]
PENALTIES = [
    dataclasses.replace(GREEDY, repetition_penalty=1.3, logit_bias={5: 1.0}),
    dataclasses.replace(DRAWN, presence_penalty=0.5, frequency_penalty=0.2, min_p=0.05),
    dataclasses.replace(DRAWN, logprobs=3),
    GREEDY,
]
FORM = Grammar.regex(r"(.|\n)*")
FORMS = [dataclasses.replace(p, structured=FORM, ignore_eos=False) for p in PARAMS]
SAMPLES = [dataclasses.replace(DRAWN, n=2)] * 4
SEVERAL = ["specpool/tiny-draft", "ngram", "specpool/tiny-eagle", "suffix"]

# shape, options, what requests ask for
CASES: dict[str, tuple[Shape | None, dict[str, Any], list[SamplingParams]]] = {
    "plain": (NONE, {}, PARAMS),
    "chain": (CHAIN, {}, PARAMS),
    "dense": (TREE, {}, PARAMS),
    "dense, pages of 1": (TREE, {"page_size": 1}, PARAMS),
    "dense, by branch": (TREE, {"ancestry": "branch"}, PARAMS),
    "holey": (TREE, {"page_size": 4, "layout": "holey"}, PARAMS),
    "shared": (TREE, {"placement": "shared"}, PARAMS),
    "third head": (CHAIN, {"head": "tiny-eagle3"}, PARAMS),
    "block": (CHAIN, {"head": "tiny-block"}, PARAMS),
    "block tree": (TREE, {"head": "tiny-block", "page_size": 4, "layout": "holey"}, PARAMS),
    "small model": (CHAIN, {"head": "tiny-draft"}, PARAMS),
    "small model, tree": (TREE, {"head": "tiny-draft"}, PARAMS),
    "draft window": (TREE, {"draft_window": 16, "draft_sink": 4}, PARAMS),
    "chunks of prompts": (TREE, {"prefill_tokens": 8}, PARAMS),
    "by cost": (None, {"adaptive": "cost", "max_batch": 2}, PARAMS),
    "host tier": (CHAIN, {"host_bytes": 1 << 22}, PARAMS),
    "samples": (CHAIN, {}, SAMPLES),
}
EAGER = {
    "mixed": (CHAIN, {"mixed_chunks": True, "prefill_tokens": 16}, PARAMS),
    "mixed, tree": (TREE, {"mixed_chunks": True, "prefill_tokens": 16}, PARAMS),
    "penalties, chain": (CHAIN, {}, PENALTIES),
    "penalties, tree": (TREE, {}, PENALTIES),
    "ngram": (CHAIN, {"draft": "ngram"}, PARAMS),
    "suffix": (CHAIN, {"draft": "suffix"}, PARAMS),
    "several": (CHAIN, {"draft": SEVERAL}, PARAMS),
    "forms": (TREE, {}, FORMS),
}
SLICE = {  # the rest is for `make test-full`
    ("holey", "float32", "captured and overlapped"),
    ("small model, tree", "bfloat16", "captured and overlapped"),
    ("block tree", "bfloat16", "captured"),
    ("mixed, tree", "bfloat16", "eager"),
    ("penalties, tree", "float32", "overlapped"),
}
HOW = {
    "eager": {"graph_sizes": (), "overlap_depth": 0},
    "overlapped": {"graph_sizes": (), "overlap_depth": 1},
    "captured": {"graph_sizes": (1, 4), "overlap_depth": 0},
    "captured and overlapped": {"graph_sizes": (1, 4), "overlap_depth": 1},
}


@pytest.fixture(scope="module")
def layer_kv() -> dict[tuple[Any, ...], Any]:
    return Card().probe(resolve("specpool/tiny"), resolve("specpool/tiny-draft")).layer_kv


@pytest.fixture
def card(layer_kv) -> Iterator[Card]:
    card = Card()
    card.layer_kv.update(layer_kv)
    with card.running():
        yield card


def build(shape: Shape | None, **options: Any) -> Engine:
    common = {"device": "cuda", "busy_check": 0, "max_context_len": 120, "max_batch": 4}
    options = {**common, **options}
    if "draft" in options:
        return Engine.from_pretrained(shape=shape, **options)
    return make(shape, **options)


def run(engine: Engine, params: list[SamplingParams]) -> None:
    outputs = engine.generate(PROMPTS[:4], params)
    assert [output.error for output in outputs] == [None] * len(outputs)


def some(cases: dict[str, Any], how: list[str]) -> Any:
    return pytest.mark.parametrize(
        ("case", "dtype", "how"),
        [
            pytest.param(*at, marks=() if at in SLICE else pytest.mark.full)
            for at in ((c, d, h) for c in cases for d in ("bfloat16", "float32") for h in how)
        ],
    )


@pytest.mark.sample(1)
@some(CASES, [*HOW])
def test_an_engine_runs_on_a_card(case, dtype, how, card, caplog):
    """Law: nothing of a step is on the wrong device, waits for it, or cannot be captured."""
    caplog.set_level(logging.WARNING)
    shape, options, params = CASES[case]
    batch = options.get("max_batch", 4)
    sizes = {"captured": (1, batch), "captured and overlapped": (batch,)}.get(how, ())
    with build(shape, **{**HOW[how], **options, "dtype": dtype, "graph_sizes": sizes}) as engine:
        run(engine, params)
        stats = engine.stats()
    assert not caplog.records
    assert {"apply_table_deltas", "sample_tokens"} <= card.kernels.launches.keys()
    if sizes:
        assert stats.graphs.replay_ct > 0 == stats.graphs.eager_ct


@pytest.mark.sample(1)
@some(EAGER, ["eager", "overlapped"])
def test_rounds_that_no_graph_serves_run_on_a_card(case, dtype, how, card):
    shape, options, params = EAGER[case]
    with build(shape, **{**HOW[how], **options, "dtype": dtype}) as engine:
        run(engine, params)


@pytest.mark.parametrize(
    "how", [pytest.param("eager", marks=pytest.mark.full), "captured and overlapped"]
)
def test_a_session_runs_on_a_card(how, card):
    options = {"dtype": "bfloat16", "max_batch": 1, **HOW[how]}
    options["graph_sizes"] = options["graph_sizes"][:1]
    with build(TREE, **options) as engine, engine.open_session() as session:
        assert session.append(PROMPTS[0], GREEDY).output().error is None
        session.rewind(session.num_tokens - 3)
        assert session.append(PROMPTS[2], DRAWN).output().error is None


def state_cases():
    """Mixers with kernels and without; trees of those without make the host wait."""
    for family in recurrent_families.FAMILIES:
        has_kernels = family not in recurrent_families.WITHOUT_KERNELS
        cases = [(CHAIN, "eager"), (TREE if has_kernels else None, "overlapped")]
        for shape, how in cases:
            marks = () if (family, how) == ("bamba", "overlapped") else pytest.mark.full
            yield pytest.param(family, shape, how, marks=marks)


@pytest.mark.parametrize(("family", "shape", "how"), [*state_cases()])
def test_states_stay_on_a_card(family, shape, how):
    """Law: no step of recurrent layers is on the wrong device, or waits for it."""
    config = recurrent_families.make_config(family)
    if config is None:
        pytest.skip("not in this transformers")
    card = Card().probe(recurrent_families.make_model(config))
    has_kernels = family not in recurrent_families.WITHOUT_KERNELS
    options = {"draft": shape and "ngram", "shape": shape, "page_size": 4, "max_batch": 3}
    with card.running():
        with torch.device(DEVICE):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with Engine.from_pretrained(model.eval(), busy_check=0, **options, **HOW[how]) as engine:
            outputs = engine.generate([[5, 6, 7, 8] * 4, [9] * 5, [3, 4] * 10, [3, 4] * 11], GREEDY)
            num_cached = engine.ledger.cached_state_slots(0)
            # What is copied to the host in each step, beside its results.
            assert (engine.core.worker._context.rows._copy is None) == has_kernels
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert num_cached > 0
    assert (card.kernels.launches["convolve_lanes"] > 0) == has_kernels


def test_what_no_option_says_follows_from_the_card(card, caplog):
    caplog.set_level(logging.INFO, "specpool")
    how = {"shape": CHAIN, "draft": "specpool/tiny-eagle", "device": "cuda", "graph_sizes": ()}
    with Engine.from_pretrained(**how) as engine:
        assert (engine.config.max_batch, engine.config.overlap_depth) == (64, 1)
        assert (engine.ledger.max_batch, engine.ledger.overlap_depth) == (64, 1)
    (line,) = (text for text in caplog.messages if text.startswith("on cuda:0: "))
    assert line.startswith("on cuda:0: max_batch 64, overlap_depth 1, 50.4 GiB for KV at most")
    with Engine.from_pretrained(max_batch=3, overlap_depth=0, **how) as engine:
        assert (engine.ledger.max_batch, engine.ledger.overlap_depth) == (3, 0)


# --- what the card must find --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_tensor_made_on_the_host_is_found(how, card, monkeypatch):
    def positions(lanes: Lanes) -> torch.Tensor:
        offsets = torch.arange(lanes.widths if isinstance(lanes.widths, int) else 1)
        return (lanes.starts.unsqueeze(1) + offsets).view(-1)

    monkeypatch.setattr(Lanes, "positions", property(positions))
    assert "cuda:0, cpu" in error_of(lambda: build(CHAIN, dtype="bfloat16", **HOW[how]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("read", ["int", "a copy", "a mask"])
@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_hidden_read_is_found(how, read, card, monkeypatch):
    verify = draft_round.verify

    def reading(*args: Any) -> Any:
        verdict = verify(*args)
        match read:
            case "int":
                int(verdict.accept_len.max())
            case "a copy":
                verdict.accept_len.cpu()
            case "a mask":
                verdict.tokens[verdict.tokens > 0]
        return verdict

    monkeypatch.setattr(draft_round, "verify", reading)
    assert error_of(lambda: build(CHAIN, dtype="bfloat16", **HOW[how]))


def error_of(made: Callable[[], Engine]) -> str:
    """Return how a request ends."""
    with made() as engine:
        (output,) = engine.generate(PROMPTS[:1], GREEDY)
    assert output.finish_reason == "error"
    return output.error or ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a number of another type", "is packed as int64"),
        ("an array of another type", "a torch.int64 array was given"),
        ("a tensor of the host", "on cpu"),
        ("a column", r"\(4, 2\)"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_is_found(what, text, card):
    table = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
    places = [torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    number: Any = np.int32(4)
    match what:
        case "a number of another type":
            number = 4
        case "an array of another type":
            places[0] = places[0].long()
        case "a tensor of the host":
            places[2] = torch.zeros(3, dtype=torch.int32)
        case "a column":
            table = table[:, :2]
    with pytest.raises((AssertionError, ArgumentError), match=text):
        sizes = [number, np.int32(4)]
        launch.launch("apply_table_delta", (1,), (256,), [table, *sizes, *places, np.int32(3)])


# --- memory, which a fake tensor only adds up ---------------------------------------------------


@pytest.mark.parametrize("head_dim", [128, 96], ids=["in place", "gathered"])
def test_graphs_of_long_contexts_read_into_one_layer_of_the_pool(head_dim, card):
    """Law: 64 lanes of 131,072 tokens of an 8B model are read in place; other heads read into no
    more than one layer of the pool."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=head_dim,
        vocab_size=1000,
        max_position_embeddings=1 << 17,
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    card.layer_kv["llama", 2, 4096] = [LayerKV(8, head_dim, head_dim)] * 2
    how = {"graph_sizes": (64,), "max_batch": 64, "kv_bytes": 4 << 30, "busy_check": 0}
    with Engine.from_pretrained(model, **how) as engine:
        assert engine.max_context_len == 1 << 17
        graphs = engine.stats().graphs
        assert graphs.num_graphs == 8  # bounds from 1,024 on
        rooms = [sum(b.nbytes for b in f.buffers) for f in engine.cache._pinned.values()]
        launches = card.kernels.launches
    layer = sum(buffer.nbytes for buffer in (engine.cache.keys[0], engine.cache.values[0]))
    assert layer > 1 << 30
    if head_dim == 128:
        assert launches["attend_128"] >= 2 * 8 and launches["gather_kv"] == 0 == len(rooms)
    else:
        (room,) = rooms
        assert launches["attend_128"] == 0 < room < 1.13 * layer


def test_queries_read_pages_in_place(card):
    """Law: the rounds of a model with heads of 64 run our kernel, eagerly and captured."""
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    card.layer_kv["llama", 2, 256] = [LayerKV(2, 64, 64)] * 2
    for sizes in ((), (1, 4)):
        before = card.kernels.launches["attend_64"]
        with Engine.from_pretrained(model, graph_sizes=sizes, max_batch=4, busy_check=0) as engine:
            run(engine, PARAMS)
        assert card.kernels.launches["attend_64"] > before
