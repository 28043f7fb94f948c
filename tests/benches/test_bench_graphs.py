"""`benches/graphs.py`: it measures what it says; the double stands in for the graphs."""

from __future__ import annotations

import dataclasses
import json
import time
import types
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import cuda_host  # noqa: E402
import flashinfer_emulation  # noqa: E402
from benches import graphs as bench_graphs  # noqa: E402
from benches import llama  # noqa: E402
from device_kit import kernels_run  # noqa: E402
from graph_kit import graphs_run  # noqa: E402
from specpool import Engine, Shape  # noqa: E402
from specpool.engine.attention import BACK_ENDS  # noqa: E402
from specpool.engine.attention.flashinfer.backend import FlashInfer  # noqa: E402

TINY = llama.Llama(64, 4, 2, 16, 128, 2, 100)


def test_a_round_is_timed_with_its_graph_and_without(monkeypatch, tmp_path, capsys):
    if cuda_host.unavailable():
        pytest.skip(cuda_host.unavailable())
    shapes, measure = (Shape.none(), Shape.eagle(2, 1, 3)), bench_graphs.results

    def small(device, repeats):
        with graphs_run():
            yield from measure("cpu", repeats, shapes=shapes, batches=(2,), context=60)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_graphs, "results", small)
    monkeypatch.setattr(llama, "SMALL", TINY)
    prompts = partial(llama.prefill_results, sizes=TINY, length=20)
    decoding = partial(llama.decode_results, sizes=TINY, batch=3, length=20)
    monkeypatch.setattr(bench_graphs, "prefill_results", prompts)
    monkeypatch.setattr(bench_graphs, "decode_results", decoding)
    rounds = partial(llama.round_results, sizes=TINY, batches=(2,), length=20)
    monkeypatch.setattr(bench_graphs, "IDLE_BATCH", 4)
    monkeypatch.setattr(bench_graphs, "round_results", rounds)
    where = {"device": "No GPU", "date": "2000-01-01"}
    monkeypatch.setattr(bench_graphs, "cuda_machine", lambda device: where)
    assert bench_graphs.main(["--repeats", "1", "--json", "--write", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    path = tmp_path / "2000-01-01-no-gpu-graphs.json"
    assert json.loads(path.read_text()) == printed
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = {result["name"]: result for result in printed["results"]}
    for where in ("none, batch 2", "chain:2, batch 2"):
        one, memory = found[f"a round, {where}"], found[f"graphs, {where}"]
        assert one["unit"] == "us" and one["value"] > 0 < one["reference_value"]
        assert memory["reference"] == "KV" and 0 < memory["value"] < memory["reference_value"]
    idle = found["device idle between rounds, chain:3, batch 4, overlap"]
    assert idle["unit"] == "%" and 0 <= idle["value"] < 100 and idle["reference_value"] == 5
    prompt = found["a prompt of 20 tokens, 2 layers as of an 8B model"]
    assert prompt["reference"] == "transformers, sdpa" and prompt["value"] > 0
    assert found["a round, batch 3, 20 tokens"]["value"] > 0
    for shape in ("none", "chain:3"):
        assert found[f"a round of an 8B model, {shape}, batch 2, 20 tokens"]["value"] > 0
    assert len(found) == 10


def test_the_kv_that_decoding_moves_is_counted():
    """Rows of 52 tokens: four pages of 16 each are read, written and read again."""
    if cuda_host.unavailable():
        pytest.skip(cuda_host.unavailable())
    with kernels_run():
        moved, _ = llama.decode_results("cpu", 1, TINY, 3, 50)
    slot = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    assert (moved.value, moved.reference_value) == (3 * 3 * 64 * slot, 3 * 52 * slot)


def test_rounds_are_timed_when_every_prompt_is_over():
    """Prompts of more tokens than a step takes are computed in several."""
    with llama._decoding("cpu", 3, TINY, 9, 50) as engine:
        rounds = engine.stats().round_ct
        assert engine.stats().prefill_ct >= 3
        for _ in range(3):
            engine.turn()
        assert engine.stats().round_ct == rounds + 3


def test_rounds_by_flashinfer_are_timed_beside_torch(monkeypatch):
    """The emulation stands in; the embedded pair's heads of 32 would be refused."""
    kinds = list[str]()

    def start(device, dtype, layers, model_type):
        backend = FlashInfer(flashinfer_emulation, device)
        kinds.append(f"{layers[0].k_head_dim}")
        return types.SimpleNamespace(attend=backend.attend, recorder=backend.recorder)

    emulated = dataclasses.replace(BACK_ENDS["flashinfer"], start=start)
    monkeypatch.setitem(BACK_ENDS, "flashinfer", emulated)
    assert llama.SMALL.head_dim in (64, 128)
    monkeypatch.setattr(llama, "SMALL", TINY)
    shapes = (Shape.none(), Shape.eagle(2, 1, 3))
    with graphs_run():
        found = list(llama.attention_results("cpu", 2, shapes, (2,), bench_graphs.rounds_of))
    assert [result.name for result in found] == [
        "a round by flashinfer, none, batch 2, heads of 16",
        "a round by flashinfer, chain:2, batch 2, heads of 16",
    ]
    assert all(result.value > 0 < result.reference_value for result in found)
    assert kinds == ["16", "16"]


def test_the_device_idles_between_rounds_as_long_as_the_host_takes(monkeypatch):
    """Law: what passes between the end of a round and the next round's beginning is idle time."""
    with Engine.from_pretrained(max_context_len=256, max_batch=2, prefix_cache=False) as engine:
        quick = bench_graphs.idle_share(engine, 2, 20)
        schedule = engine.core.scheduler.schedule

        def slow():
            time.sleep(0.02)
            return schedule()

        monkeypatch.setattr(engine.core.scheduler, "schedule", slow)
        assert bench_graphs.idle_share(engine, 2, 20) > max(quick, 0.5)


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_graphs.main([]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1 and "no CUDA device" in out.err
