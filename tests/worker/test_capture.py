"""Laws of the capture: what is captured, what a replay checks, and what happens if capture fails.

The double of a capture (`graph_kit.py`) is held to be as strict as a graph here, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cuda_host
from capture_double import FakeCuda
from graph_kit import CHAIN, NONE, ONE, PARAMS, PROMPTS, SEVEN, TREE, HostCapture, graphs_run, make
from kernel_kit import backend
from specpool import Engine, SamplingParams, Shape
from specpool.engine.assembly.graph_plan import default_sizes, graph_sizes
from specpool.engine.attention import BACK_ENDS, back_end
from specpool.engine.config import EngineConfig
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.shapes import AdaptiveConfig
from specpool.engine.worker.graphs import graphs as round_graphs
from specpool.engine.worker.graphs.capture import (
    CudaCapture,
    capture_on,
    host_capture,
    is_out_of_memory,
)
from specpool.engine.worker.graphs.graphs import Graphs
from specpool.engine.worker.graphs.round_graph import RoundGraph
from specpool.engine.worker.results import Outcome
from specpool.engine.worker.worker import Worker
from specpool.errors import ConfigError, OrderError, ShapeError
from specpool.kernels import launch
from specpool.kernels.transfer import Download, no_transfers, overwrite, upload

pytestmark = pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())


# What a work returns: its outcome, and the function that launches the rest.
Halves = tuple[Outcome, Callable[[], None]]


def nothing() -> None:
    """The rest of a work that launches nothing more."""


# --- what a replay is checked for ---------------------------------------------------------------


class FakePlan(SimpleNamespace):
    """The part of a plan that a replay reads."""

    def __len__(self) -> int:
        return len(self.rows)


def plan_of(**changes: Any) -> FakePlan:
    lanes = {"rows": [1, 2], "lo": [5, 9], "hi": [8, 9], "allocated_after": [[32, 32]] * 2}
    arrays = {name: np.array(value, np.int32) for name, value in {**lanes, **changes}.items()}
    return FakePlan(**arrays)


BAD_PLANS = {
    "too many lanes": (
        {name: [1, 2, 3] for name in ("rows", "lo", "hi")} | {"allocated_after": [[32] * 3] * 2},
        "3 lanes in a graph of 2",
    ),
    "no lanes": ({"rows": [], "lo": [], "hi": []}, "0 lanes in a graph of 2"),
    "the padding's row": ({"rows": [1, 0]}, r"row of lane 1 must be in \[1, 20\], got 0"),
    "a row beyond": ({"rows": [21, 1]}, r"row of lane 0 must be in \[1, 20\], got 21"),
    "no position": ({"lo": [-1, 9]}, r"lo of lane 0 must be in \[0, 8\], got -1"),
    "bounds that cross": ({"lo": [5, 10]}, r"lo of lane 1 must be in \[0, 9\], got 10"),
    "a root beyond the reads": ({"hi": [8, 65]}, r"hi of lane 1 must be in \[9, 64\], got 65"),
    "too few slots for the nodes": (
        {"allocated_after": [[32, 12], [32, 32]]},
        "lane 1, row 2, writes up to slot 13 of group 0, where it has 12",
    ),
    "too few slots for the drafts": (
        {"allocated_after": [[32, 32], [16, 32]]},
        "lane 0, row 1, writes up to slot 17 of group 1, where it has 16",
    ),
}


@pytest.fixture(scope="module")
def graph_and_replays() -> tuple[RoundGraph, HostCapture]:
    """A graph of two lanes with roots at 64 at most, and its replays."""
    with pytest.MonkeyPatch.context() as patch, graphs_run() as capture:
        patch.setattr(round_graphs, "LEAST_BOUND", 64)
        with make(Shape.eagle(3, 3, 4), graph_sizes=(2,)) as engine:
            return engine.core.worker.graphs._sets[1, True].graph_for(2, 64), capture


@pytest.mark.parametrize("why", BAD_PLANS)
def test_a_plan_that_the_graph_cannot_serve_is_refused(graph_and_replays, why):
    """Host checks do not run on a replay, so the wrapper runs them with upper bounds."""
    graph, capture = graph_and_replays
    changes, text = BAD_PLANS[why]
    cells, replays = graph._buffer.cells.clone(), capture.replays
    with pytest.raises(ShapeError, match=text):
        graph.replay(plan_of(**changes), [])
    assert torch.equal(graph._buffer.cells, cells) and capture.replays == replays
    graph._check(plan_of())


def test_a_round_beside_another_step_is_not_replayed_alone():
    """In either order: a replay alone would lose the other step."""
    with graphs_run() as capture, make(CHAIN, graph_sizes=(1,)) as engine:
        request = SimpleNamespace(params=SamplingParams(), changes_logits=False, drafter=0)
        plan = plan_of(rows=[1], lo=[5], hi=[5], allocated_after=[[32], [32]])
        plan.shapes, plan.writes_draft = np.ones(1, np.int32), True
        step = SimpleNamespace(is_decode=True, plan=plan, requests=[request], nodes=None)
        graphs = engine.core.worker.graphs
        assert graphs.replay([step, SimpleNamespace(is_decode=False)], len) is None
        assert capture.replays == 0 and graphs.stats().eager_ct == 1
        with torch.inference_mode():
            assert graphs.replay([step], len) is not None and capture.replays == 1


# --- what a capture refuses, and the double with it ---------------------------------------------


def test_no_transfer_within_a_capture():
    """Each replay would repeat the transfer, from memory that is reused by then."""
    tensor, array = torch.zeros(3, dtype=torch.int32), np.zeros(3, np.int32)
    with no_transfers():
        with pytest.raises(OrderError, match="an upload of 2 arrays within the capture"):
            upload(tensor.device, array, array)
        with pytest.raises(OrderError, match="an upload within"), no_transfers():
            overwrite(tensor, array)
        with pytest.raises(OrderError, match="a download within"):
            Download(tensor)
    upload(tensor.device, array)
    overwrite(tensor, array)
    Download(tensor)


def test_a_capture_refuses_the_transfers_of_its_own_thread_alone():
    """Another engine serves meanwhile, in another thread."""
    cpu, array = torch.device("cpu"), np.zeros(3, np.int32)
    with no_transfers(), ThreadPoolExecutor(1) as other:
        assert len(other.submit(upload, cpu, array).result()) == 1
        with pytest.raises(OrderError, match="an upload of 1 arrays within the capture"):
            upload(cpu, array)

        def captures() -> None:
            with no_transfers(), pytest.raises(OrderError):
                upload(cpu, array)

        other.submit(captures).result()
        with pytest.raises(OrderError):
            upload(cpu, array)
    upload(cpu, array)


def test_a_download_is_of_its_time():
    """The next replay writes the tensor that this one's results are on their way from."""
    tensor = torch.zeros(2)
    download = Download(tensor)
    tensor.fill_(1)
    assert download.array().tolist() == [0, 0]


class Faulty:
    """Work with a fault that a real graph would keep silent about, or die of."""

    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0
        self.table = torch.arange(4)

    def __call__(self) -> tuple[Any, Callable[[], None]]:
        self.calls += 1
        taken = self.table[:3]
        match self.fault:
            case "reads the device":
                taken = taken + int(self.table.sum())
            case "selects by a mask":
                taken = self.table[self.table > 0]
            case "a number of the host":
                taken = taken * self.calls
            case "memory that moved":
                self.held = self.table
                self.table = self.table.clone()
            case "another way":
                taken = taken + 1 if self.calls > 1 else taken
            case "sizes that grow":
                taken = torch.zeros(self.calls, dtype=torch.int64)
        return SimpleNamespace(packed=taken.clone(), is_verify=False), nothing


@pytest.mark.parametrize("fault", ["reads the device", "selects by a mask"])
def test_the_double_refuses_to_wait(fault):
    with graphs_run() as capture, pytest.raises(AssertionError, match=r"waits|by a mask"):
        capture.record(Faulty(fault), follows=False)


@pytest.mark.parametrize(
    "fault", ["a number of the host", "memory that moved", "another way", "sizes that grow"]
)
def test_the_double_keeps_what_a_graph_keeps(fault):
    with graphs_run() as capture:
        recording = capture.record(Faulty(fault), follows=False)
        with pytest.raises(AssertionError, match=r"not the capture's|number of"):
            recording.decide()
        capture.record(Faulty("none"), follows=False).decide()


def test_reads_of_the_graphs_stay_in_their_place(monkeypatch):
    """A long prompt wants more room to read to: not the room that the graphs have."""

    def say() -> list:
        with graphs_run(), make(CHAIN, max_batch=2, graph_sizes=(1,)) as engine:
            first = engine.generate(PROMPTS[3], PARAMS[0])
            engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=50, ignore_eos=True))
            return [*first, *engine.generate(PROMPTS[3], PARAMS[0])]

    first, again = say()
    assert first.error is None and first.token_ids == again.token_ids
    monkeypatch.setattr(KVCache, "pin_reads", lambda self: None)
    assert "not the capture's" in say()[1].error


# --- what is captured, and what if that fails ---------------------------------------------------


def routed_sizes(engine: Engine) -> list[int]:
    """The graph sizes that decide in which range of the controller a batch belongs."""
    of_shapes = engine.core.scheduler.round_shapes.controller.graph_sizes_of_candidates()
    return sorted({size for sizes in of_shapes.values() for size in sizes})


def test_each_candidate_has_the_sizes_that_reach_it():
    config = AdaptiveConfig.from_dict(
        {
            "1": {"candidates": ["chain:7", "chain:3"]},
            "4": {"candidates": ["chain:3", "chain:1", "none"]},
        }
    )
    with (
        graphs_run() as capture,
        make(
            None, max_batch=8, adaptive=config, shapes=(TREE,), graph_sizes=(8, 1, 3, 4)
        ) as engine,
    ):
        graphs = engine.stats().graphs
        assert graphs.sizes == {
            SEVEN: (1, 3),
            CHAIN: (1, 3, 4, 8),
            ONE: (4, 8),
            TREE: (1, 3, 4, 8),  # for requests that ask for it
            NONE: (1, 3, 4, 8),  # for requests that opt out, at every size
        }
        assert graphs.num_graphs == capture.recordings == 2 + 4 + 2 + 4 + 4 + 2
        # A batch of 2 runs in the graph of 3: that is what decides where it belongs.
        assert routed_sizes(engine) == [1, 3, 4, 8]


@pytest.mark.parametrize(
    ("max_batch", "sizes", "count"),
    [
        (1, (1,), 1),
        (8, (1, 2, 4, 8), 4),
        (20, (1, 2, 4, 8, 16, 20), 6),
        (64, (1, 2, 4, *range(8, 65, 8)), 11),
        (70, (1, 2, 4, *range(8, 65, 8), 70), 12),
        (256, (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)), 23),
    ],
)
def test_the_sizes_that_are_captured_by_default(max_batch, sizes, count):
    assert default_sizes(max_batch) == sizes and len(sizes) == count


def test_by_default_a_cuda_device_has_graphs():
    with graphs_run(), make(CHAIN, max_batch=6) as engine:
        assert engine.stats().graphs.sizes == {CHAIN: (1, 2, 4, 6), NONE: (1, 2, 4, 6)}
    with launch.host_backend(backend("fast", "forward")), make(CHAIN, max_batch=6) as engine:
        assert engine.stats().graphs is None  # nothing captures here


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [-1, -4, -9, 1, 2, 5, 8])
def test_where_memory_runs_out_there_are_fewer_graphs(at, caplog):
    """Rounds of the other batch sizes run eagerly; smaller graphs are still tried."""
    with graphs_run(), make(CHAIN, graph_sizes=()) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
    caplog.set_level(logging.WARNING)
    adaptive = AdaptiveConfig.from_dict({"1": {"candidates": ["chain:3", "none"]}})
    with (
        graphs_run(lambda number: number == at) as capture,
        make(None, graph_sizes=(1, 2, 4), adaptive=adaptive) as engine,
    ):
        outputs = engine.generate(PROMPTS, PARAMS)
        graphs, routed = engine.stats().graphs, routed_sizes(engine)
    assert [o.token_ids for o in outputs] == expected
    assert graphs.num_graphs == capture.recordings < 9
    # Of each size three: the chain's, the plain ones' with draft KV and without.
    kept = {-1: 6, -4: 6, -9: 8, 1: 6, 2: 7, 5: 7, 8: 7}[at]
    assert graphs.num_graphs == kept
    sizes = sorted({size for of in graphs.sizes.values() for size in of})
    assert routed == sizes
    (record,) = caplog.records
    assert record.getMessage() == (
        f"out of memory while capturing CUDA graphs: there are {kept} of 9, with "
        f"{graphs.num_bytes} bytes, for batch sizes {sizes}; other rounds run eagerly"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("at", "num_graphs"), [(1, 10), (2, 11), (3, 10), (8, 11)])
def test_what_reads_too_far_leaves_room_for_what_reads_less(monkeypatch, at, num_graphs):
    """Law: many lanes that read far may find no memory, and as many that read less still do."""
    monkeypatch.setattr(round_graphs, "LEAST_BOUND", 64)  # 2 sizes, 3 bounds, 2 kinds
    full = graphs_run(lambda number: number == at)
    how = {"graph_sizes": (2, 4), "max_context_len": 200}
    with full as capture, make(CHAIN, **how) as engine:
        assert engine.stats().graphs.num_graphs == capture.recordings == num_graphs


def test_without_any_memory_serving_goes_on(caplog):
    with graphs_run(lambda number: number > 0), make(CHAIN, graph_sizes=(1, 2, 4)) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        stats = engine.stats()
    assert all(o.error is None for o in outputs)
    assert (stats.graphs.num_graphs, stats.graphs.num_bytes, stats.graphs.sizes) == (0, 0, {})
    assert stats.graphs.eager_ct == stats.round_ct
    assert "there are 0 of 6, with 0 bytes, for batch sizes []" in caplog.text


def test_a_fault_that_is_not_memorys_is_told(caplog):
    """A model that asks the device in its forward cannot be captured: it runs eagerly."""

    class Refusing(HostCapture):
        def record(self, work: Any, *, follows: bool) -> Any:
            if follows:
                raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
            return super().record(work, follows=follows)

    capture = Refusing()
    with graphs_run(), host_capture(lambda: capture), make(CHAIN, graph_sizes=(1, 2)) as engine:
        outputs = engine.generate(PROMPTS[:2], PARAMS[:2])
        assert set(engine.stats().graphs.sizes) == {NONE}
    assert all(o.error is None for o in outputs)
    (record,) = caplog.records
    assert record.getMessage() == (
        "rounds of chain:3 cannot be captured as CUDA graphs (operation not permitted when stream "
        "is capturing) and run eagerly"
    )


def test_a_warm_up_that_fails_leaves_its_rounds_eager(caplog):
    """For example, a drafter that keeps something by row does not know a warm-up's row."""

    class Failing(HostCapture):
        def warm_up(self, work: Any) -> None:
            raise KeyError(0)

    with graphs_run(), host_capture(Failing), make(CHAIN, graph_sizes=(1,)) as engine:
        outputs = engine.generate(PROMPTS[:2], PARAMS[:2])
        stats = engine.stats()
    assert all(o.error is None for o in outputs)
    assert stats.graphs.num_graphs == 0 and stats.graphs.eager_ct == stats.round_ct
    assert [record.getMessage() for record in caplog.records] == [
        f"rounds of {kind} cannot be captured as CUDA graphs (0) and run eagerly"
        for kind in ("chain:3", "none")
    ]


@pytest.mark.usefixtures("short_calibration")
def test_what_a_controller_is_told_at_the_start_are_replays(monkeypatch):
    seen = []
    restart = Graphs.restart
    monkeypatch.setattr(Graphs, "restart", lambda self: (seen.append(self.stats()), restart(self)))
    with graphs_run(), make(None, adaptive="cost", max_batch=2, graph_sizes=(1, 2)) as engine:
        graphs = engine.stats().graphs
        assert (graphs.replay_ct, graphs.eager_ct) == (0, 0)
    (stats,) = seen
    assert stats.replay_ct >= 2 * 5 and stats.eager_ct == 0  # how often, its budget of time says


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"graph_sizes": 4}, "graph_sizes must be a tuple of batch sizes or None, got 4"),
        ({"graph_sizes": (1, 9)}, r"a size in graph_sizes must be an integer in \[1, 8\], got 9"),
        ({"graph_sizes": (0,)}, r"a size in graph_sizes must be an integer in \[1, 8\], got 0"),
        ({"graph_sizes": (2, "4")}, r"must be an integer in \[1, 8\], got '4'"),
        ({"graph_sizes": (2, True)}, r"must be an integer in \[1, 8\], got True"),
        ({"graph_sizes": [2, 4, 2]}, r"must be different batch sizes, got \[2, 4, 2\]"),
    ],
)
def test_sizes_that_cannot_be(options, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(max_batch=8, **options)


@pytest.mark.parametrize(
    ("runs_in_graphs", "keeps_state", "why"),
    [
        (False, False, "attention 'torch' plans each forward on the host"),
        (True, True, "the target has recurrent layers"),
    ],
)
def test_what_cannot_be_captured_has_no_graphs(runs_in_graphs, keeps_state, why):
    attention = dataclasses.replace(back_end("torch"), runs_in_graphs=runs_in_graphs)
    how = {"has_capture": True, "keeps_state": keeps_state}
    assert graph_sizes(EngineConfig(), attention, **how) == ()
    with pytest.raises(ConfigError, match=rf"^graph_sizes \[2\] cannot be captured: {why}"):
        graph_sizes(EngineConfig(graph_sizes=(2,)), attention, **how)
    assert graph_sizes(EngineConfig(graph_sizes=()), attention, **how) == ()
    assert all(each.runs_in_graphs for each in BACK_ENDS.values())


def test_torch_without_its_cache_has_no_pools_for_graphs(monkeypatch):
    """So the runs of compute-sanitizer are eager."""
    FakeCuda().install(monkeypatch)
    device = torch.device("cuda", 0)
    assert isinstance(capture_on(device), CudaCapture)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert capture_on(device) is None


def test_a_configuration_with_sizes_can_be_a_key():
    config = EngineConfig(graph_sizes=[4, 1])
    assert config.graph_sizes == (4, 1) and len({config, EngineConfig(graph_sizes=(4, 1))}) == 1


def test_graphs_that_are_asked_for_in_vain():
    with pytest.raises(ConfigError, match=r"^graph_sizes \[4, 1\] cannot .*: they need a CUDA dev"):
        Engine.from_pretrained(graph_sizes=[4, 1], max_context_len=64)
    Engine.from_pretrained(graph_sizes=(), max_context_len=64).close()


def test_what_torch_is_asked_to_capture(monkeypatch):
    """Two graphs of a round that drafts, one pool and one stream for all of them."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)

    def work() -> Halves:
        cuda.calls.append(f"decides on {len(cuda.streams)}")
        return outcome, lambda: cuda.calls.append("follows")

    capture.warm_up(work)
    on_the_side = ["decides on 1", "follows"]
    assert cuda.calls == ["side after current", *on_the_side, "current after side"]
    cuda.calls.clear()
    recording = capture.record(work, follows=True)
    first = ["begin graph 1", "end graph 1"]
    one, two = ["begin graph 2", "decides on 1", "end graph 2"], ["begin graph 3", "follows"]
    assert cuda.calls == [*first, "wait", "empty", *one, "wait", "empty", *two, "end graph 3"]
    cuda.calls.clear()
    recording.decide(), recording.follow()
    assert cuda.calls == ["replay graph 2", "replay graph 3"] and recording.outcome is outcome
    plain = capture.record(lambda: (outcome, nothing), follows=False)
    assert plain.follow is None and len(cuda.into) == 4
    assert len({(id(pool), id(stream)) for pool, stream in cuda.into[1:]}) == 1
    cuda.calls.clear()
    assert capture.used_bytes() == 700 and cuda.calls == ["wait", "empty"]


def test_long_contexts_are_warmed_up_at_both_ends_alone(monkeypatch):
    """At 131,072 tokens a kind and size has eight bounds, and a run at each would take seconds."""
    monkeypatch.setattr(round_graphs, "LEAST_BOUND", 16)
    warm_up, runs = HostCapture.warm_up, []
    monkeypatch.setattr(
        HostCapture, "warm_up", lambda self, work: (runs.append(work), warm_up(self, work))
    )
    with graphs_run() as capture, make(NONE, max_context_len=200, graph_sizes=(1, 4)):
        assert capture.recordings == 2 * 5  # 16, 32, 64, 128, 199
        assert len(runs) == 2 * 2


def test_torchs_warning_about_its_own_mode_is_no_error():
    """Tests on a GPU let CUDA report waits; torch warns at the first of them."""
    warnings.warn(
        "Synchronization debug mode is a prototype feature and does not yet detect all "
        "synchronizing operations (Triggered internally at ...)",
        stacklevel=1,
    )


@pytest.mark.parametrize("where", ["in the work", "at the end", "after the outcome"])
def test_a_capture_that_fails_harms_no_later_one(where, monkeypatch):
    """In torch's own `graph` the pool stays open and the capture's stream current."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)

    def work(fault: str = "") -> Halves:
        def launch_rest() -> None:
            cuda.is_invalid = fault != ""
            if fault == "after the outcome":
                raise ValueError("a wait")

        cuda.is_invalid = fault in ("in the work", "at the end")
        if fault == "in the work":
            raise ValueError("a wait")
        return outcome, launch_rest

    capture.record(work, follows=True)
    pools = []
    for _ in range(2):
        expected = "previous error" if where == "at the end" else "a wait"
        with pytest.raises((RuntimeError, ValueError), match=expected):
            capture.record(lambda: work(where), follows=True)
        assert not cuda.streams and not cuda.open_pools
        cuda.calls.clear()
        capture.record(work, follows=True)
        assert [call[:3] for call in cuda.calls if call[-1].isdigit()] == ["beg", "end"] * 2
        pools += [id(pool) for pool, _ in cuda.into[-2:]]
    assert pools[0] == pools[1] != pools[2] == pools[3]  # good graphs share one again


def test_the_pool_outlives_a_work_that_raises_in_the_first_capture(monkeypatch):
    """Its capture ends well, and its graph goes; torch refuses a pool whose graphs are all gone."""
    FakeCuda().install(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))

    def work(*, raises: bool) -> Halves:
        if raises:
            raise ValueError("not the device's fault")
        return Outcome(torch.zeros(1, 3, dtype=torch.int64), True), nothing

    for _ in range(2):
        with pytest.raises(ValueError, match="not the device's"):
            capture.record(lambda: work(raises=True), follows=False)
    capture.record(lambda: work(raises=False), follows=False)


def test_what_cannot_be_captured_at_all_leaves_torch_as_it_was(monkeypatch, caplog):
    """Law: where every kind of round fails, the process goes on with all that torch can do."""
    cuda = FakeCuda()
    with graphs_run():
        cuda.install(monkeypatch)
        decide = Worker.decide

        def waiting(self: Worker, *args: Any) -> Halves:
            def launch_rest() -> None:
                follow()
                cuda.is_invalid = bool(cuda.open_pools)

            cuda.is_invalid = bool(cuda.open_pools)
            outcome, follow = decide(self, *args)
            return outcome, launch_rest

        monkeypatch.setattr(Worker, "decide", waiting)
        device = torch.device("cuda", 0)
        with (
            host_capture(lambda: CudaCapture(device)),
            make(CHAIN, graph_sizes=(1, 2)) as engine,
        ):
            outputs = engine.generate(PROMPTS[:2], PARAMS[:2])
            assert engine.stats().graphs.num_graphs == 0
        gc.collect()
    assert [output.error for output in outputs] == [None] * 2
    assert [record.getMessage()[:15] for record in caplog.records] == [
        "rounds of chain",
        "rounds of none ",
    ]
    assert cuda.host_filters and not cuda.open_pools
    cuda.draw()
    cuda.pin()


def test_no_garbage_is_collected_until_the_last_of_two_captures_has_ended(monkeypatch):
    """Two engines are built in two threads: the first one's end does not start the collector."""
    FakeCuda().install(monkeypatch)
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)
    captures = [CudaCapture(torch.device("cuda", 0)) for _ in range(2)]
    begun, ended, seen = threading.Event(), threading.Event(), []

    def first() -> Halves:
        assert begun.wait(60)  # the second has begun, too
        return outcome, nothing

    def second() -> Halves:
        begun.set()
        assert ended.wait(60)  # the first has ended
        seen.append(gc.isenabled())
        return outcome, nothing

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(captures[0].record, first, follows=False)
        two = threads.submit(captures[1].record, second, follows=False)
        one.result(60)
        ended.set()
        two.result(60)
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_captures_in_inference_mode_leave_those_of_others_alone(fails, monkeypatch):
    """torch writes what its first graph has made at each later capture."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)

    def work() -> Halves:
        cuda.is_invalid = fails
        return outcome, nothing

    recordings = []
    with torch.inference_mode(), contextlib.suppress(RuntimeError):
        recordings.append(capture.record(work, follows=False))
    assert len(recordings) == 1 - fails  # they live
    other = torch.cuda.CUDAGraph()
    other.capture_begin()  # as `torch.cuda.graph` does, outside of inference mode
    other.capture_end()


def test_another_thread_may_allocate_while_one_captures(monkeypatch):
    """In CUDA's own mode each call of another thread that allocates fails, and the capture too."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)
    CudaCapture(torch.device("cuda", 0)).record(lambda: (outcome, nothing), follows=False)
    assert cuda.modes == {"thread_local"}


def test_dead_tensors_are_freed_before_each_capture(monkeypatch):
    """What a cycle of references holds would stay in the graphs' pool, which would grow."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capture, alive = CudaCapture(torch.device("cuda", 0)), []
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)

    def work() -> Halves:
        assert [dead() for dead in alive] == [None] * len(alive)
        held: list[Any] = [torch.zeros(1)]
        held.append(held)
        alive.append(weakref.ref(held[0]))
        return outcome, nothing

    old: list[Any] = [torch.zeros(1)]
    old.append(old)
    alive.append(weakref.ref(old[0]))
    gc.collect()  # what lives now is looked at rarely
    del old
    gc.disable()
    try:
        for _ in range(3):
            capture.record(work, follows=False)
    finally:
        gc.enable()
    assert len(alive) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_within_a_capture(fails, monkeypatch):
    """A dead engine's pinned memory is freed by a call that CUDA forbids there."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    capture, seen = CudaCapture(torch.device("cuda", 0)), []

    def work() -> Halves:
        def launch_rest() -> None:
            seen.append(gc.isenabled())
            if fails:
                raise ValueError("a wait")

        seen.append(gc.isenabled())
        return Outcome(torch.zeros(1, 3, dtype=torch.int64), True), launch_rest

    with pytest.raises(ValueError, match="a wait") if fails else contextlib.nullcontext():
        capture.record(work, follows=True)
    assert seen == [False, False] and gc.isenabled()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            capture.record(work, follows=True)
        assert not gc.isenabled()  # whoever turned it off wants it off
    finally:
        gc.enable()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "total", "text"),
    [
        (49, 1000, "49 of 1000 bytes are left, and prompts need 50"),
        (50, 1000, None),
        (2 * GIB - 1, 80 * GIB, f"bytes are left, and prompts need {2 * GIB}"),
        (2 * GIB, 80 * GIB, None),
    ],
)
def test_graphs_leave_some_memory_alone(free, total, text, monkeypatch):
    """Law: what prompts need does not grow with the card, so 5 % of a large one are too much."""
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    outcome = Outcome(torch.zeros(1, 3, dtype=torch.int64), True)
    capture = CudaCapture(torch.device("cuda", 0))
    with pytest.raises(torch.OutOfMemoryError, match=text) if text else contextlib.nullcontext():
        capture.record(lambda: (outcome, nothing), follows=False)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("operation not permitted when stream is capturing"), False),
        (ValueError("a text that is out of memory"), False),
        (None, False),
    ],
)
def test_whose_memory_it_is_does_not_matter(error, is_memory):
    assert is_out_of_memory(error) == is_memory


def test_memory_that_ran_out_is_found_behind_the_captures_own_fault():
    error = RuntimeError("capture was invalidated")
    assert not is_out_of_memory(error)
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise error
    except RuntimeError:
        assert is_out_of_memory(error)
