"""Real CUDA graphs under a whole engine; without a GPU `test_graphs.py` has a double of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graph_kit import CHAIN, NONE, PROMPTS, TREE, make
from lossless import Comparison, Reference
from specpool import SamplingParams
from specpool.assets import resolve
from specpool.kernels import launch
from specpool.models import TargetModel
from specpool.worker.graphs.capture import CudaCapture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = {"device": "cuda", "dtype": "float32"}
CASES = {
    "chain": (CHAIN, {}),
    "dense": (TREE, {"page_size": 1}),
    "dense, shared": (TREE, {"page_size": 16, "placement": "shared"}),
    "holey": (TREE, {"page_size": 4, "layout": "holey"}),
    "none": (NONE, {}),
}
LONG = SamplingParams(max_new_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """On the card: sums in another order part the logits by more than those of one CPU."""
    with TargetModel.from_pretrained(resolve("specpool/tiny"), **CUDA) as target:
        model = target.model
    return Reference(model)


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


@pytest.mark.parametrize("case", CASES)
def test_seeded_draws_repeat_cuda(case):
    """The same graphs, the same numbers: a draw depends on nothing that a replay would change."""
    shape, options = CASES[case]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.1, seed=9)
    with make(shape, **options, **CUDA) as engine:
        first, second = (engine.generate(PROMPTS[:1], params)[0] for _ in range(2))
        assert first.token_ids == second.token_ids and engine.stats().graphs.replay_ct
        assert first.error is None


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs the card for itself")
def test_their_memory_is_told_cuda():
    with make(TREE, **CUDA) as engine:
        graphs = engine.stats().graphs
        assert graphs.num_graphs == 2 * 3
        assert 0 < graphs.num_bytes < torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("case", CASES)
def test_a_hundred_rounds_allocate_nothing_cuda(case, monkeypatch):
    """Nothing is captured or compiled while requests run, either."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("while requests run")

    shape, options = CASES[case]
    long = SamplingParams(max_new_tokens=900, ignore_eos=True)
    with make(shape, **options, **CUDA, max_context_len=1000, busy_check=0) as engine:
        engine.generate(PROMPTS[:4], long)
        for name in ("CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, never)
        monkeypatch.setattr(launch, "_build", never)
        for prompt in PROMPTS[:4]:
            engine.submit(prompt, long)
        for _ in range(5):
            engine.turn()  # prompts
        allocated, replay = list[int](), torch.cuda.graphs.CUDAGraph.replay

        def counted(graph: Any) -> None:
            first = torch.cuda.memory_stats()["allocation.all.allocated"]
            replay(graph)
            allocated.append(torch.cuda.memory_stats()["allocation.all.allocated"] - first)

        monkeypatch.setattr(torch.cuda.graphs.CUDAGraph, "replay", counted)
        torch.cuda.synchronize()
        before, rounds = torch.cuda.memory_stats(), engine.stats().graphs.replay_ct
        for _ in range(100):
            engine.turn()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        assert engine.stats().graphs.replay_ct == rounds + 100
        waited = ("num_alloc_retries", "num_device_alloc", "num_ooms")
        for name in ("segment.all.allocated", "reserved_bytes.all.allocated", *waited):
            assert after.get(name) == before.get(name), name
        # A round's uploads take memory that is at hand; a replay takes none at all.
        assert len(allocated) >= 100 and not any(allocated)


@pytest.mark.parametrize("case", CASES)
def test_a_replay_never_waits_cuda(case, monkeypatch):
    """CUDA itself reports every call that would wait, the results' own event aside."""
    shape, options = CASES[case]
    with make(shape, overlap_depth=1, **options, **CUDA) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS[:4], LONG)]
        run = engine.core.worker.run

        def checked(steps: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(steps)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(engine.core.worker, "run", checked)
        assert [o.token_ids for o in engine.generate(PROMPTS[:4], LONG)] == expected


@pytest.mark.parametrize("half", [0, 1])
def test_memory_that_runs_out_within_a_capture_cuda(half, monkeypatch, caplog):
    """Fewer graphs, a warning with the bytes, serving goes on."""
    record, calls = CudaCapture.record, []

    def hungry(self: CudaCapture, work: Any, *, follows: bool) -> Any:
        calls.append(follows)

        def more() -> Iterator[Any]:
            for outcome in work():
                if not half:
                    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
                yield outcome
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

        return record(self, more if len(calls) == 3 else work, follows=follows)

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(CudaCapture, "record", hungry)
    # The largest first, of each size the chain's before the plain ones'.
    with make(CHAIN, graph_sizes=(1, 2, 4), **CUDA) as engine:
        graphs = engine.stats().graphs
        outputs = engine.generate(PROMPTS[:4], LONG)
    assert graphs.num_graphs == 2 + 0 + 2
    assert graphs.sizes == {CHAIN: (1, 4), NONE: (1, 4)}
    assert f"there are 4 of 6, with {graphs.num_bytes} bytes" in caplog.text
    assert all(output.error is None for output in outputs)
