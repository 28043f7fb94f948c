"""flashinfer within graphs: one plan serves several rounds, and every round reads what it must.

The emulation copies a plan into buffers and reads them at each run, as the kernels do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cuda_host
import flashinfer_emulation
from flashinfer_kit import Pages, Rig, on_a_card
from graph_kit import CHAIN, NONE, PARAMS, PROMPTS, TREE, graphs_run, make
from specpool.engine.attention import BACK_ENDS, AttentionView, torch_backend
from specpool.engine.attention.flashinfer.backend import FlashInfer
from specpool.engine.attention.flashinfer.graphs import _Use, splits_no_lane
from specpool.engine.attention.lanes import Lanes, causal_view, last_view, own_view
from specpool.engine.attention.seq_lens import SeqLens

RIG = Rig(flashinfer_emulation, torch.device("cpu"), torch.float32, 8, 1e-5)
BOUND = 120
LANES = 3


def lanes_within(starts: list[int], widths: int) -> Lanes:
    """Lanes as those of a graph: the host knows no more than the bound."""
    on_device = torch.tensor(starts, dtype=torch.int32)
    rows = torch.arange(1, LANES + 1, dtype=torch.int32)
    hi = np.full(LANES, BOUND, np.int32)
    return Lanes(rows, SeqLens(on_device, np.zeros(LANES, np.int32), hi), widths)


def verify(pages: Pages, starts: list[int], rng: np.random.Generator):
    lanes = lanes_within(starts, 5)
    mask = torch.from_numpy(np.tril(rng.random((LANES, 5, 5)) < 0.5) | np.eye(5, dtype=bool))
    positions = torch.tensor(starts, dtype=torch.int32)[:, None] + mask.sum(2, dtype=torch.int32)
    slots = lanes.slots(pages, 0)  # type: ignore[arg-type]
    return own_view(pages, 0, lanes, slots, mask, positions, positions)  # type: ignore[arg-type]


VIEWS = {
    "verify": verify,
    "decode": lambda pages, starts, rng: causal_view(pages, 0, lanes_within(starts, 1)),
    "extend": lambda pages, starts, rng: causal_view(pages, 0, lanes_within(starts, 4)),
    "last": lambda pages, starts, rng: last_view(pages, 0, lanes_within(starts, 4)),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("kind", VIEWS)
def test_each_round_reads_what_torch_reads(kind, page_size, window):
    """Lengths move as they like between rounds; the host knows upper bounds alone."""
    rng = np.random.default_rng(page_size)
    pages = Pages(RIG, page_size, LANES, window=window)
    recorder = RIG.backend.recorder(BOUND)
    for number in range(6):
        starts = rng.integers(0, BOUND - 4, LANES).tolist()
        if number:
            recorder.plan(np.array(starts, np.int32) + rng.integers(0, 5, LANES).astype(np.int32))
        recorder.restart()
        view = VIEWS[kind](pages, starts, rng)
        q = torch.from_numpy(rng.standard_normal((view.num_queries, 4, 8))).float()
        k, v = (torch.from_numpy(rng.standard_normal((view.num_tokens, 2, 8))) for _ in range(2))
        outs = []
        for attend in (recorder.attend, torch_backend.attend):
            buffers = [buffer.clone() for buffer in pages.buffers]
            for _ in range(2):  # two layers share what the first has filled in
                out = attend(view, *buffers, q, k.float(), v.float(), scaling=0.3, window=window)
            outs.append(out)
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    assert len(recorder._uses) == 1


def recording(work: Callable[[], Tensor], rig: Rig) -> tuple[Tensor, Callable[[], object]]:
    """Run work once, then capture it; the result of replays and what replays.

    A CPU has no graphs: there the work runs again, into the same result.
    """
    if rig.device.type == "cpu":
        out = work()
        return out, lambda: out.copy_(work())
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = work()
    return out, graph.replay


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["decode", "extend", "verify"])
@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_replays_read_what_torch_reads(device, kind, page_size, window):
    """On a card a real CUDA graph is captured once; lengths and plans change between replays."""
    rig = RIG if device == "emulated" else on_a_card()
    rng = np.random.default_rng(page_size)
    pages = Pages(rig, page_size, LANES, window=window)
    width = {"decode": 1, "extend": 4, "verify": 5}[kind]
    lens, rows = (
        torch.arange(low, LANES + low, dtype=torch.int32, device=rig.device) for low in (9, 1)
    )
    tree = torch.from_numpy(np.tril(rng.random((LANES, 5, 5)) < 0.5) | np.eye(5, dtype=bool))
    tree = tree.to(rig.device)
    depths = tree.sum(2, dtype=torch.int32)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((LANES * width, heads, rig.head_dim)))
        .to(rig.device, rig.dtype)
        for heads in (4, 2, 2)
    )  # fmt: skip
    recorder = rig.backend.recorder(BOUND)

    def view() -> AttentionView:
        least = np.zeros(LANES, np.int32)
        lanes = Lanes(rows, SeqLens(lens, least, np.full(LANES, BOUND, np.int32)), width)
        if kind != "verify":
            return causal_view(pages, 0, lanes)  # type: ignore[arg-type]
        slots = lanes.slots(pages, 0)  # type: ignore[arg-type]
        positions = lens[:, None] + depths
        return own_view(pages, 0, lanes, slots, tree, positions, positions)  # type: ignore[arg-type]

    def work() -> Tensor:
        recorder.restart()
        return recorder.attend(view(), *pages.buffers, q, k, v, scaling=0.3, window=window)

    out, replay = recording(work, rig)
    for _ in range(6):
        starts = rng.integers(0, BOUND - 5, LANES)
        recorder.plan((starts + rng.integers(0, 5, LANES)).astype(np.int32))
        lens.copy_(torch.from_numpy(starts))
        replay()
        expected = torch_backend.attend(view(), *pages.buffers, q, k, v, scaling=0.3, window=window)
        torch.testing.assert_close(out, expected, atol=rig.tolerance, rtol=rig.tolerance)


class Counting:
    """A wrapper that counts its plans."""

    def __init__(self) -> None:
        self.counts, self.plans = np.zeros(2, np.int32), 0

    def plan(self, counts: np.ndarray) -> None:
        self.counts, self.plans = counts, self.plans + 1


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 8, 16, 64]),
    lens=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), min_size=1, max_size=8),
    reach=st.integers(1, 70),
)
def test_a_plan_holds_what_is_read_and_little_more(page_size, lens, reach):
    """Law: every lane's cells are planned for, in whole bytes of mask, with bounded waste."""
    unit = next(n for n in range(1, 9) if n * page_size % 8 == 0)
    columns = 4096 // page_size * unit + unit  # for 4,000 tokens and the reach
    wrapper = Counting()
    use = _Use(wrapper, page_size, columns, reach)  # type: ignore[arg-type]
    for pair in lens:
        hi = np.array(pair, np.int32)
        use.plan(hi)
        cells = wrapper.counts * page_size
        assert (cells >= hi + reach).all() and (cells % 8 == 0).all()
        assert (wrapper.counts <= columns).all()
        granule = unit * page_size
        most = hi + reach + 64 + granule
        assert cells.sum() <= 1.15 * most.sum()


def test_a_plan_serves_many_rounds():
    """16 lanes of 1,500 tokens that take 3 a round: 7 plans in 100 rounds, 4 % more reads."""
    wrapper = Counting()
    wrapper.counts = np.zeros(16, np.int32)
    use, hi, read = _Use(wrapper, 16, 200, 8), np.full(16, 1500, np.int32), []  # type: ignore[arg-type]
    for _ in range(100):
        use.plan(hi)
        read.append(wrapper.counts.sum() * 16 / hi.sum())
        hi += 3
    assert wrapper.plans <= 7 and np.mean(read) <= 1.04


def test_a_short_plan_of_long_reads_is_made_anew():
    """A graph with a lower bound cannot fill in as many columns as were planned for."""
    wrapper = Counting()
    _Use(wrapper, 4, 100, 4).plan(np.array([300, 300], np.int32))  # type: ignore[arg-type]
    short = _Use(wrapper, 4, 20, 4)  # type: ignore[arg-type]
    short.plan(np.array([70, 70], np.int32))
    assert wrapper.plans == 2 and wrapper.counts.max() <= 20


def test_lanes_are_split_where_they_are_few():
    assert not splits_no_lane(1, 5, 32, 8) and splits_no_lane(64, 5, 32, 8)


CASES = {
    "plain": (NONE, {}),
    "chain, one round ahead": (CHAIN, {"overlap_depth": 1}),
    "tree": (TREE, {"page_size": 4}),
    "holey": (TREE, {"page_size": 4, "layout": "holey"}),
    "shared": (TREE, {"page_size": 1, "placement": "shared"}),
    "small model": (CHAIN, {"head": "tiny-draft", "page_size": 4}),
}


@pytest.mark.sample(1)
@pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())
@pytest.mark.parametrize("case", CASES)
def test_a_replay_says_what_torch_says(case, monkeypatch):
    """Rounds are replayed while prompts come and go, and plans are made for few of them."""
    shape, options = CASES[case]
    with make(shape, max_batch=2, **options) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS[:3], PARAMS[:3])]
    started = []

    def start(device, dtype, layers, model_type):
        started.append(FlashInfer(flashinfer_emulation, device))
        return started[0]

    double = dataclasses.replace(BACK_ENDS["flashinfer"], start=start)
    monkeypatch.setitem(BACK_ENDS, "flashinfer", double)
    options = {"graph_sizes": (1, 2), "max_batch": 2, "attention": "flashinfer", **options}
    with graphs_run(), make(shape, **options) as engine:
        wrappers = [each._library_wrapper for each in started[0]._in_graphs.values()]
        before = sum(wrapper.num_plans for wrapper in wrappers)
        outputs = engine.generate(PROMPTS[:3], PARAMS[:3])
        graphs = engine.stats().graphs
    assert [output.error for output in outputs] == [None] * 3
    assert [output.token_ids for output in outputs] == expected
    assert graphs.replay_ct > graphs.eager_ct and wrappers
    plans = sum(wrapper.num_plans for wrapper in wrappers) - before
    assert plans <= 0.5 * graphs.replay_ct * len(wrappers)
