"""Real CUDA graphs under a whole engine; `test_graphs.py` has a double of them."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graph_kit
from card_kit import CARDS, Card, HostCard, count_replays
from graph_kit import CHAIN, NONE, PROMPTS, TREE
from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import resolve
from specpool.engine.models import TargetModel
from specpool.kernels import launch

on_cards = pytest.mark.parametrize("card", CARDS)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = Card.options
CASES = {
    "chain": (CHAIN, {}),
    "dense": (TREE, {"page_size": 1}),
    "dense, shared": (TREE, {"page_size": 16, "placement": "shared"}),
    "holey": (TREE, {"page_size": 4, "layout": "holey"}),
    "none": (NONE, {}),
}


def make(shape: Shape | None, **options: Any) -> Engine:
    """An engine that holds what `long` asks for."""
    return graph_kit.make(
        shape, **({"max_context_len": 200} if "device" in options else {}) | options
    )


def long(card: Any) -> SamplingParams:
    """Tokens for many rounds; kernels on a CPU take their time."""
    return SamplingParams(max_new_tokens=40 if isinstance(card, HostCard) else 150, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """On the card: sums in another order part the logits by more than those of one CPU."""
    with TargetModel.from_pretrained(resolve("specpool/tiny"), **CUDA) as target:
        model = target.model
    return Reference(model)


@on_cuda
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (4,)])
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_transformers_own_cuda(case, sizes, depth, reference):
    shape, options = CASES[case]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (60, 40, 25, 10)]
    with make(shape, overlap_depth=depth, graph_sizes=sizes, **options, **CUDA) as engine:
        outputs = engine.generate(PROMPTS[:4], params)
        stats = engine.stats()
    comparison = Comparison()
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    assert stats.graphs.replay_ct == stats.round_ct and stats.graphs.eager_ct == 0


@on_cuda
@pytest.mark.parametrize("case", CASES)
def test_seeded_draws_repeat_cuda(case):
    """The same graphs, the same numbers: a draw depends on nothing that a replay would change."""
    shape, options = CASES[case]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.1, seed=9)
    with make(shape, **options, **CUDA) as engine:
        first, second = (engine.generate(PROMPTS[:1], params)[0] for _ in range(2))
        assert first.token_ids == second.token_ids and engine.stats().graphs.replay_ct
        assert first.error is None


@on_cuda
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs the card for itself")
def test_their_memory_is_told_cuda():
    with make(TREE, **CUDA) as engine:
        graphs = engine.stats().graphs
        assert graphs.num_graphs == 2 * 3
        assert 0 < graphs.num_bytes < torch.cuda.get_device_properties(0).total_memory


# --- what counts calls, over the double too -----------------------------------------------------


@pytest.mark.sample(1)
@on_cards
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_rounds_allocate_nothing(case, card, monkeypatch):
    """Nothing is captured or compiled while requests run, either."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("while requests run")

    shape, options = CASES[case]
    params = SamplingParams(max_new_tokens=900, ignore_eos=True)
    allocated = count_replays(card, monkeypatch, card.num_allocations)
    how = {**options, **card.options, "max_context_len": 1000, "busy_check": 0}
    with card.running(), make(shape, **how) as engine:
        if isinstance(card, HostCard):
            params = dataclasses.replace(params, max_new_tokens=100)
        else:
            engine.generate(PROMPTS[:4], params)  # what is loaded once is loaded
        for name in ("CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, never)
        monkeypatch.setattr(launch, "_build", never)
        for prompt in PROMPTS[:4]:
            engine.submit(prompt, params)
        for _ in range(5):
            engine.turn()  # prompts
        allocated.clear()
        before, rounds = card.memory_stats(), engine.stats().graphs.replay_ct
        for _ in range(card.num_rounds):
            engine.turn()
        after = card.memory_stats()
        assert engine.stats().graphs.replay_ct == rounds + card.num_rounds
        waited = ("num_alloc_retries", "num_device_alloc", "num_ooms")
        for name in ("segment.all.allocated", "reserved_bytes.all.allocated", *waited):
            assert after.get(name) == before.get(name), name
        # A round's uploads take memory that is at hand; a replay takes none at all.
        assert len(allocated) >= card.num_rounds and not any(allocated)


@pytest.mark.sample(1)
@on_cards
@pytest.mark.parametrize("case", CASES)
def test_a_replay_never_waits(case, card, monkeypatch):
    """A wait is an error of CUDA's own, the one for the results' event aside."""
    shape, options = CASES[case]
    with card.running(), make(shape, overlap_depth=1, **options, **card.options) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS[:4], long(card))]
        run, steps = engine.core.worker.run, [0]

        def checked(launched: Any) -> Any:
            steps[0] += 1
            with card.refusing_waits():
                return run(launched)

        monkeypatch.setattr(engine.core.worker, "run", checked)
        assert [o.token_ids for o in engine.generate(PROMPTS[:4], long(card))] == expected
        assert steps[0] > 4


@pytest.mark.sample(1)
@on_cards
@pytest.mark.parametrize("half", [0, 1])
def test_memory_that_runs_out_within_a_capture(half, card, monkeypatch, caplog):
    """Fewer graphs, a warning with the bytes, serving goes on."""
    record, calls = card.capture.record, []

    def hungry(self: Any, work: Any, *, follows: bool) -> Any:
        calls.append(follows)

        def more() -> Iterator[Any]:
            for outcome in work():
                if not half:
                    card.run_out()
                yield outcome
            card.run_out()

        return record(self, more if len(calls) == 3 else work, follows=follows)

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(card.capture, "record", hungry)
    # The largest first, of each size the chain's before the plain ones'.
    with card.running(), make(CHAIN, graph_sizes=(1, 2, 4), **card.options) as engine:
        graphs = engine.stats().graphs
        outputs = engine.generate(PROMPTS[:4], long(card))
    assert graphs.num_graphs == 2 + 0 + 2
    assert graphs.sizes == {CHAIN: (1, 4), NONE: (1, 4)}
    assert f"there are 4 of 6, with {graphs.num_bytes} bytes" in caplog.text
    assert all(output.error is None for output in outputs)
