"""The room that graphs read pages into: what can be live, not lanes times the longest row.

The device is the host runner and its graphs, with doubles of torch's fused kernels.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import cuda_host
from fused_kit import use_doubles
from graph_kit import CHAIN, NONE, PARAMS, PROMPTS, TREE, HostCapture, graphs_run, make
from specpool import Engine, SamplingParams, Shape
from specpool.engine.worker.graphs import graphs as round_graphs
from specpool.engine.worker.graphs.capture import host_capture

pytestmark = pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())

CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "plain": (NONE, {"page_size": 4}),
    "chain": (CHAIN, {"page_size": 16}),
    "chain, one round ahead": (CHAIN, {"page_size": 1, "overlap_depth": 1}),
    "small model": (CHAIN, {"page_size": 4, "head": "tiny-draft"}),
    "dense": (TREE, {"page_size": 4}),
    "dense, shared": (TREE, {"page_size": 16, "placement": "shared"}),
    "holey": (TREE, {"page_size": 4, "layout": "holey"}),
}


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch) -> None:
    monkeypatch.setattr(round_graphs, "LEAST_BOUND", 64)
    use_doubles(monkeypatch)


def build(shape: Shape, **options: Any) -> Engine:
    how = {"dtype": "bfloat16", "graph_sizes": (1, 4), "max_batch": 4, "busy_check": 0}
    return make(shape, **{**how, **options})


def rooms(engine: Engine) -> dict[tuple[int, ...], int]:
    """How many pages the graphs have room for, by what a page holds."""
    return {widths: fields.num_slots for widths, fields in engine.cache._pinned.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_live_pages_are_read_side_by_side(case):
    """Law: with graphs and without, the texts are the same, while lanes come and go."""
    shape, options = CASES[case]
    texts = []
    for sizes in ((), (1, 4)):
        with graphs_run(), build(shape, graph_sizes=sizes, **options) as engine:
            outputs = engine.generate(PROMPTS, PARAMS)
            texts.append([(output.token_ids, output.accept_lens) for output in outputs])
            assert [output.error for output in outputs] == [None] * len(PROMPTS)
            stats = engine.stats()
    assert texts[0] == texts[1]
    assert stats.graphs.replay_ct == stats.round_ct > 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_the_room_is_of_the_pool_whatever_the_bound(case, monkeypatch):
    """Law: graphs read into one layer of the pool at most, a tree's branches into one for each."""
    monkeypatch.setattr(round_graphs, "LEAST_BOUND", 1024)
    shape, options = CASES[case]
    found = []
    for context in (300, 620):
        num_pages = 660 // options["page_size"]
        how = {"num_pages": num_pages, **options, "max_context_len": context}
        with graphs_run(), build(shape, **how) as engine:
            groups = engine.ledger.groups
            found.append(rooms(engine))
    most = max(group.num_pages + 4 * -(-64 // group.page_size) for group in groups)
    branches = shape.topk if options.get("layout") == "holey" else 1
    assert found[0] and all(room <= branches * most * 9 // 8 for room in found[0].values())
    assert found[1] == found[0]


# Pages of 1 for 60 tokens and what a round writes; pages of 4, with a tail for each branch.
FULL = {
    "plain": (NONE, {"page_size": 1, "num_pages": 60}),
    "chain": (CHAIN, {"page_size": 1, "num_pages": 63}),
    "holey": (TREE, {"page_size": 4, "num_pages": 22, "layout": "holey"}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", FULL)
def test_a_row_that_fills_the_pool_stands_beside_unused_lanes(case):
    """Law: unused lanes read at the sink, and there is room for that beside the whole pool.

    Each branch of a tree reads the row's pages once more.
    """
    shape, options = FULL[case]
    how = {"max_context_len": 60, "prefix_cache": False, **options}
    params, texts = SamplingParams(max_new_tokens=60, ignore_eos=True), []
    for sizes in ((), (4,)):
        with graphs_run(), build(shape, **how, graph_sizes=sizes) as engine:
            (output,) = engine.generate([PROMPTS[0]], params)
            texts.append((output.token_ids, output.accept_lens))
            stats = engine.stats()
    assert texts[0] == texts[1] and len(PROMPTS[0]) + len(texts[0][0]) == 60
    assert stats.graphs.eager_ct == 0 < stats.graphs.replay_ct


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [NONE, CHAIN], ids=["none", "chain"])
def test_rows_that_share_more_than_there_is_run_eagerly(shape):
    """A page that four rows share is read four times, and there is no room for that."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5, n=4)
    texts = []
    how = {"page_size": 4, "max_context_len": 200}
    for num_pages in (80, 400):
        with graphs_run(), build(shape, num_pages=num_pages, **how) as engine:
            outputs = engine.generate([(PROMPTS[1] * 4)[:150]], params)
            texts.append([(output.token_ids, output.accept_lens) for output in outputs])
            graphs = engine.stats().graphs
            assert (graphs.eager_ct > 0) == (num_pages == 80)
    assert texts[0] == texts[1]


def test_a_warm_up_that_fails_leaves_no_room_behind(caplog):
    """Law: the graphs that are left keep the room that they need, and no more."""

    class Full(HostCapture):
        def warm_up(self, work: Any) -> None:
            super().warm_up(work)
            if self._warm == 1:  # the largest: its room is there already
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    caplog.set_level(logging.WARNING)
    how = {"page_size": 4, "num_pages": 500, "max_context_len": 250}
    with graphs_run(), host_capture(Full), build(NONE, **how) as engine:
        assert engine.stats().graphs.sizes == {NONE: (1, 4)}  # four lanes, with shorter reads
        left = rooms(engine)
        (output,) = engine.generate(PROMPTS[:1], PARAMS[:1])
        assert output.error is None
    with graphs_run(), build(NONE, **how) as engine:
        whole = rooms(engine)
    assert sum(left.values()) < sum(whole.values())
