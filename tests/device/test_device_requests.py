"""What a request may ask of a device beside an EAGLE head: drafters, processors, forms, moves.

Law: the text is that of plain decoding, on the host runner's device and on a GPU. But for drafters
that read the text and for forms, a step reads nothing of the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

import cuda_host
from device_kit import READS, forbidden, kernels_run, watched
from graph_kit import graphs_run
from specpool import Engine, Grammar, SamplingParams, Shape
from specpool._core import checksum
from specpool.engine.assets import corpus
from specpool.engine.models.eagle.plain import PlainStack
from specpool.engine.shapes import AdaptiveConfig, BudgetController
from specpool.kernels import launch

SMALL, HEAD, OTHER = "specpool/tiny-draft", "specpool/tiny-eagle", "specpool/tiny-eagle3"
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12)
PROMPTS = [p[:n] for p, n in zip(corpus.prompts(4), (17, 40, 9, 3), strict=True)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.1, top_p=0.95, seed=7)
PARAMS = {"greedy": GREEDY, "drawn": DRAWN}
# draft, shape, options
CASES: dict[str, tuple[Any, Shape | None, dict[str, Any]]] = {
    "model, chain": (SMALL, CHAIN, {"page_size": 16}),
    "model, chain D=1": (SMALL, CHAIN, {"page_size": 3, "overlap_depth": 1}),
    "model, dense": (SMALL, TREE, {"page_size": 16, "overlap_depth": 1}),
    "model, holey": (SMALL, TREE, {"page_size": 4, "layout": "holey"}),
    "head, dense": (HEAD, TREE, {"page_size": 4, "overlap_depth": 1}),
    "head, chain": (OTHER, CHAIN, {"page_size": 16, "overlap_depth": 1}),
    "several": ([SMALL, "ngram", HEAD, "suffix"], CHAIN, {"page_size": 4, "overlap_depth": 1}),
}
DEVICES = [
    pytest.param(
        "kernels",
        marks=pytest.mark.skipif(
            bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or ""
        ),
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            pytest.mark.full,  # so that a sample is of cases that run without a card
        ],
    ),
]
on_devices = pytest.mark.parametrize("where", DEVICES)
Build = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture
def build(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds engines on the device; on a GPU rounds are not captured."""

    def engine(case: str | None, **more: Any) -> Engine:
        draft, shape, options = CASES[case] if case else (None, None, {})
        device = {"device": "cuda", "graph_sizes": ()} if where == "cuda" else {}
        device |= {"max_batch": 8, "overlap_depth": 0}
        options = {"max_context_len": 128, "dtype": "float32", **device, **options, **more}
        return Engine.from_pretrained(draft=draft, shape=options.pop("shape", shape), **options)

    # A model drafts by its own modules, as on a GPU.
    monkeypatch.setattr(PlainStack, "from_model", classmethod(lambda cls, model: None))
    with kernels_run() if where == "kernels" else contextlib.nullcontext():
        yield engine


@contextlib.contextmanager
def unread(engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block a step that reads the device, or waits for it, fails."""
    with monkeypatch.context() as patch:
        worker, running, steps = engine.core.worker, [False], [0]
        if where == "cuda":
            run = worker.run

            def checked(launched: Any) -> Any:
                steps[0] += 1
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return run(launched)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            patch.setattr(worker, "run", checked)
        else:
            for name in READS:
                patch.setattr(torch.Tensor, name, forbidden(name, running))
            patch.setattr(worker, "run", watched(worker.run, running, steps))
        yield
    assert steps[0] > 4


def texts(engine: Engine, params: Any) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, params)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    assert [pool.used_pages for pool in engine.pool_stats()] == [0] * len(engine.pool_stats())
    return [output.token_ids for output in outputs]


def load(engine: Engine, params: Any) -> None:
    """Run all that a request runs: what is loaded once is loaded then."""
    several = params if isinstance(params, list) else [params] * len(PROMPTS)
    texts(engine, [dataclasses.replace(each, max_new_tokens=3) for each in several])
    engine.forget_prefixes()


def count(accept_lens: list[list[int]]) -> int:
    return sum(map(len, accept_lens))


def plain(build: Build, params: Any) -> list[list[int]]:
    with build(None) as engine:
        return texts(engine, params)


@pytest.mark.sample(1)
@on_devices
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("model")])
def test_a_small_model_drafts_on_a_device(case, kind, where, build, monkeypatch):
    """The host does not know which chains were accepted as a whole; their last cell is written.

    So the drafts are those of a CPU, where the host knows it.
    """
    expected = plain(build, PARAMS[kind])
    with launch.host_backend(None), build(case, device="cpu", graph_sizes=None) as engine:
        drafted = [output.accept_lens for output in engine.generate(PROMPTS, PARAMS[kind])]
    with build(case) as engine:
        load(engine, PARAMS[kind])
        with unread(engine, where, monkeypatch):
            outputs = engine.generate(PROMPTS, PARAMS[kind])
    assert [output.token_ids for output in outputs] == expected
    found = [output.accept_lens for output in outputs]
    assert max(map(max, found)) == 1 + CASES[case][1].num_steps
    # On a card a near-tie of two candidates may go either way.
    assert found == drafted if where == "kernels" else abs(count(found) - count(drafted)) < 4


@pytest.mark.sample(1)
@pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or "")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("case", ["model, chain", "model, dense", "model, holey"])
def test_the_rounds_of_a_small_model_are_captured(case, depth, monkeypatch):
    monkeypatch.setattr(PlainStack, "from_model", classmethod(lambda cls, model: None))
    draft, shape, options = CASES[case]
    options = options | {"max_context_len": 128, "overlap_depth": depth}
    with Engine.from_pretrained(max_context_len=128) as engine:
        expected = texts(engine, [GREEDY, DRAWN, GREEDY, DRAWN])
    with (
        graphs_run(),
        Engine.from_pretrained(draft=draft, shape=shape, graph_sizes=(1, 4), **options) as engine,
    ):
        assert texts(engine, [GREEDY, DRAWN, GREEDY, DRAWN]) == expected
        stats = engine.stats()
        assert stats.graphs.replay_ct == stats.round_ct > 4 and not stats.graphs.eager_ct


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["model, chain", "model, dense", "model, holey"])
def test_the_rounds_of_a_small_model_are_replayed_cuda(case):
    draft, shape, options = CASES[case]
    device = {"device": "cuda", "dtype": "float32", "max_context_len": 128, "max_batch": 8}
    with Engine.from_pretrained(**device, graph_sizes=()) as engine:
        expected = texts(engine, [GREEDY, DRAWN, GREEDY, DRAWN])
    with Engine.from_pretrained(
        draft=draft, shape=shape, graph_sizes=(1, 4), **device, **options
    ) as engine:
        assert texts(engine, [GREEDY, DRAWN, GREEDY, DRAWN]) == expected
        assert engine.stats().graphs.replay_ct and not engine.stats().graphs.eager_ct


NAMES = ["none", "chain:1", "chain:3", "tree:3x4x16", "tree:2x2x5"]
BUDGET = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": NAMES}})


@pytest.mark.sample(1)
@on_devices
@pytest.mark.usefixtures("short_calibration")
@pytest.mark.parametrize("layout", ["dense", "holey"])
@pytest.mark.parametrize("draft", [HEAD, SMALL])
def test_parts_draft_side_by_side_on_a_device(draft, layout, where, build, monkeypatch):
    """Lanes of one round have unlike shapes: their trees are drafted and verified together."""

    def each_another(self: Any, rows: Any, shapes: Any, spare: object = None) -> Any:
        picks = np.arange(len(rows)) % shapes.shape[1]
        chosen = np.asarray(shapes[np.arange(len(rows)), picks], np.int32)
        self._open = rows, chosen, 0
        return chosen

    monkeypatch.setattr(BudgetController, "choose", each_another)
    params = [GREEDY, DRAWN, GREEDY, DRAWN]
    expected = plain(build, params)
    options = {"adaptive": BUDGET, "layout": layout, "max_batch": 4, "shape": None}
    case = "head, dense" if draft == HEAD else "model, chain"
    with build(case, **options) as engine:
        drafter: Any = engine.drafter
        parts, propose = [], drafter.propose_parts
        monkeypatch.setattr(
            drafter, "propose_parts", lambda of: (parts.append(len(of)), propose(of))[1]
        )
        load(engine, params)
        with unread(engine, where, monkeypatch):
            outputs = engine.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == expected and max(parts) > 1


@pytest.mark.sample(1)
@on_devices
@pytest.mark.parametrize("kind", PARAMS)
def test_each_lane_has_its_own_drafter(kind, where, build):
    """Trees of the host and of the device meet in one round."""
    names = [SMALL, "ngram", HEAD, "suffix"]
    expected = plain(build, PARAMS[kind])
    with build("several") as engine:
        params = [dataclasses.replace(PARAMS[kind], drafter=name) for name in names]
        assert texts(engine, params) == expected


@pytest.mark.sample(1)
@on_devices
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ["head, dense", "head, chain", "model, holey"])
def test_processors_on_a_device(case, seed, where, build, monkeypatch):
    """Bias, penalties and min-p at every node; a step waits for nothing."""
    rng, params = random.Random(seed), []
    for base in (GREEDY, DRAWN, DRAWN, GREEDY):
        fields = {
            "repetition_penalty": rng.choice([1, 1.3, 0.8]),
            "presence_penalty": rng.choice([0, 1.5, -0.7]),
            "frequency_penalty": rng.choice([0, 0.9, -0.4]),
            "logit_bias": {t: rng.uniform(-8, 4) for t in rng.sample(range(97, 123), 3)},
        }
        if base is DRAWN:
            fields["min_p"] = rng.choice([0, 0.05])
        params.append(dataclasses.replace(base, **fields) if rng.random() < 0.8 else base)
    expected = plain(build, params)
    with build(case) as engine:
        load(engine, params)
        with unread(engine, where, monkeypatch):
            outputs = engine.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == expected


# A tiny model ends nothing by itself: make quotes, brackets and the end likelier than commas.
ENDS = {34: 9.0, 125: 7.0, 93: 7.0, 44: -5.0, 257: 12.0}


@pytest.mark.sample(1)
@on_devices
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("case", ["head, dense", "model, chain D=1"])
def test_forms_on_a_device(case, kind, where, build):
    """The masks of all nodes go to the device in one upload; others are left alone."""
    pytest.importorskip("llguidance")
    base = dataclasses.replace(PARAMS[kind], max_new_tokens=60, ignore_eos=False, logit_bias=ENDS)
    forms = [
        Grammar.choice(["yes", "no", "not at all", "not at all the same"]),
        Grammar.json_object(),
        Grammar.regex(r"(ab|cd){1,12}"),
        None,
    ]
    params = [dataclasses.replace(base, structured=form) for form in forms]
    expected = plain(build, params)
    with build(case, forced_steps=6) as engine:
        assert texts(engine, params) == expected


@pytest.mark.sample(1)
@on_devices
@pytest.mark.parametrize("case", ["head, dense", "model, chain", "head, chain"])
def test_a_session_moves_between_devices(case, where, build):
    """Its pages leave the device, and reach the other one, by the kernels."""
    params = dataclasses.replace(GREEDY, max_new_tokens=12)
    with build(case) as one, build(case) as two:
        for engine in (one, two):
            engine._moves._pages._host = []  # a cache on a CPU would read its memory
        with one.open_session() as stays:
            wanted = [stays.append(PROMPTS[at], params).output().token_ids for at in range(2)]
        session = one.open_session()
        assert session.append(PROMPTS[0], params).output().token_ids == wanted[0]
        with one.export(session) as export:
            num_held, moved = session.num_tokens, two.import_row(export.image())
            export.arrived()
        second = moved.append(PROMPTS[1], params).output()
        assert second.token_ids == wanted[1] and second.num_reused >= num_held - 2
        moved.close()


@on_devices
def test_pages_leave_a_device_byte_by_byte(where, build):
    """Runs of one page and of many, in any order, against torch's own indexing."""
    with build("head, dense") as engine:
        pages = engine._moves._pages
        pages._host = []
        for group, buffers in enumerate(pages._buffers):
            for buffer in buffers:
                buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
            for ids in ([3], [5, 2, 9, 1], [*range(1, 20)]):
                numbers = np.array(ids, np.int32)
                out = np.zeros(len(ids) * pages.page_bytes[group], np.uint8)
                found = pages.read(group, numbers, out)
                want = torch.cat([b[torch.tensor(ids)].cpu().reshape(-1) for b in buffers])
                assert np.array_equal(out, want.numpy()) and found == checksum(out)
                assert pages.write(group, numbers[::-1].copy(), out) == found
                back = np.zeros_like(out)
                assert pages.read(group, numbers[::-1].copy(), back) == found
                assert np.array_equal(back, out)
