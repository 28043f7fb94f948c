"""Decode rounds as graphs: the same texts and KV, and nothing that a capture would have frozen.

The device is the host runner here, and graphs are `HostCapture`'s: a replay has to be its capture
launch by launch. On a GPU `make test-gpu` runs the real ones (`test_device_graphs.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import cuda_host
import eagle_checkpoints
from families import make_model
from graph_kit import CHAIN, NONE, ONE, PARAMS, PROMPTS, SEVEN, TREE, graphs_run, make
from scripted import Scripted
from specpool import Engine, SamplingParams, Shape
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.worker.graphs import graphs as round_graphs
from specpool.engine.worker.graphs.round_graph import RoundGraph
from window_kit import VOCAB, config_of

pytestmark = pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())


class Ended:
    """Records what each request's row held when it was given back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv: dict[int, tuple[int, list[torch.Tensor]]] = {}
        reclaim = engine.core.scheduler._reclaim
        self._release, reclaim._before_release = reclaim._before_release, self._note

    def _note(self, request: Any) -> None:
        ledger, cache, row = self.engine.ledger, self.engine.cache, request.row
        length = int(ledger.resolved_len[row])
        found = []
        for layer, group in enumerate(cache.layer_groups):
            is_draft = layer >= len(self.engine.target.layer_kv)
            until = int(ledger.drafted_len[row]) if is_draft else length
            positions = np.arange(ledger.evicted_len(group)[row], until)
            size = cache.page_sizes[group]
            slots = ledger.page_table(group)[row][positions // size] * size + positions % size
            index = torch.from_numpy(slots.astype(np.int64))
            found += [buffer[layer][index].clone() for buffer in (cache.keys, cache.values)]
        self.kv[request.request_id] = length, found
        self._release(request)

    def assert_same(self, other: Ended) -> None:
        assert self.kv.keys() == other.kv.keys()
        for number, (length, kv) in self.kv.items():
            wanted, expected = other.kv[number]
            assert length == wanted
            for one, two in zip(kv, expected, strict=True):
                assert torch.allclose(one, two, atol=1e-4), (one - two).abs().max()


def runs(
    build: Any, prompts: list = PROMPTS, params: Any = PARAMS, *, sizes: tuple = (1, 2, 4)
) -> Any:
    """Off and on; returns the engine's numbers with graphs."""
    with graphs_run() as capture, build(graph_sizes=()) as engine:
        off = Ended(engine)
        expected = engine.generate(prompts, params)
        assert engine.stats().graphs is None and not capture.recordings
    with graphs_run() as capture, build(graph_sizes=sizes) as engine:
        on = Ended(engine)
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
    assert [o.error for o in outputs] == [o.error for o in expected] == [None] * len(prompts)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.accept_lens for o in outputs] == [o.accept_lens for o in expected]
    on.assert_same(off)
    graphs = stats.graphs
    assert graphs.replay_ct + graphs.eager_ct == stats.round_ct
    assert (
        graphs.num_graphs == capture.recordings and graphs.num_bytes == capture.used_bytes() - 1000
    )
    return stats


CASES = {
    "chain": (CHAIN, {}),
    "chain of 7": (SEVEN, {"head": "tiny-eagle3", "page_size": 1}),
    "chain, shared": (CHAIN, {"page_size": 4, "placement": "shared"}),
    "dense": (TREE, {"page_size": 16}),
    "dense, by branch": (Shape.eagle(3, 4, 8), {"page_size": 1, "ancestry": "branch"}),
    "dense, shared": (TREE, {"head": "tiny-eagle3", "page_size": 4, "placement": "shared"}),
    "holey": (TREE, {"page_size": 4, "layout": "holey"}),
    "holey, by branch": (
        Shape.eagle(3, 8, 20),
        {"head": "tiny-eagle3", "page_size": 16, "layout": "holey", "ancestry": "branch"},
    ),
    "fewer nodes than steps": (Shape.eagle(5, 2, 4), {"page_size": 4, "layout": "holey"}),
    "block": (SEVEN, {"head": "tiny-block", "page_size": 3}),
    "block tree": (TREE, {"head": "tiny-block", "page_size": 4, "layout": "holey"}),
    "none": (NONE, {"page_size": 4}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_text_and_the_kv_are_the_same(case, depth):
    shape, options = CASES[case]
    stats = runs(lambda **more: make(shape, overlap_depth=depth, **options, **more))
    assert stats.graphs.replay_ct > 4 and stats.graphs.eager_ct == 0


def random_case(seed: int) -> tuple[dict[str, Any], list, list, tuple[int, ...]]:
    rng = random.Random(seed)
    num_steps, topk = rng.randint(1, 5), rng.choice([1, 1, 2, 3, 5])
    most = 1 + topk + (num_steps - 1) * topk * topk
    num_nodes = num_steps + 1 if topk == 1 else rng.randint(2, min(most, 14))
    options = {
        "shape": Shape.eagle(num_steps, topk, num_nodes),
        "head": rng.choice(["tiny-block", "tiny-eagle", "tiny-eagle3"]),
        "page_size": rng.choice([1, 4, 16]),
        "layout": rng.choice(["dense", "holey"]),
        "placement": rng.choice(["split", "shared"]),
        "ancestry": rng.choice(["exact", "exact", "branch"]),
        "overlap_depth": rng.randint(0, 1),
        "policy": rng.choice(["exact", "double_buffer"]),
        "prefill_tokens": rng.choice([7, 1024]),
        "max_batch": rng.randint(2, 5),
    }
    if rng.random() < 0.3:
        options["host_bytes"] = 1 << 22
    sizes = sorted(rng.sample(range(1, options["max_batch"] + 1), 2))
    count = rng.randint(2, 6)
    prompts = [PROMPTS[i % 6][: rng.randint(2, 40)] for i in range(count)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randint(1, 24),
            temperature=rng.choice([0, 0, 0.8, 1.2]),
            seed=rng.randint(0, 99),
        )
        for _ in range(count)
    ]
    return options, prompts, params, tuple(sizes)


def tight(options: dict[str, Any]) -> dict[str, Any]:
    """The same in a pool where rows have to give way."""
    with contextlib.closing(make(**options)) as engine:
        ledger = engine.ledger
        least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
    return {**options, "num_pages": least + least // 8, "headroom": 0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed >= 12)) for seed in range(100)]
)
def test_random_shapes_and_batches(seed, monkeypatch):
    monkeypatch.setattr(round_graphs, "LEAST_BOUND", random.Random(seed).choice([16, 40, 1024]))
    options, prompts, params, sizes = random_case(seed)
    if seed % 3 == 0:
        options = tight({**options, "max_context_len": 100})
    stats = runs(lambda **more: make(**{**options, **more}), prompts, params, sizes=sizes)
    assert stats.graphs.sizes[options["shape"]] == sizes


def test_a_round_takes_the_least_graph_that_holds_it(monkeypatch):
    """It chooses by batch size and by how far the roots can be: a graph's reads do not grow."""
    monkeypatch.setattr(round_graphs, "LEAST_BOUND", 16)
    taken = []
    replay = RoundGraph.replay

    def noted(self, plan, requests):
        taken.append((len(plan), self.size, int(plan.hi.max()), self.bound))
        return replay(self, plan, requests)

    monkeypatch.setattr(RoundGraph, "replay", noted)
    params = [
        SamplingParams(max_new_tokens=n, ignore_eos=True, temperature=1.0, seed=n)
        for n in (50, 24, 9, 5)
    ]
    short = [p[:3] for p in PROMPTS[:4]]
    runs(lambda **more: make(CHAIN, max_context_len=60, **more), short, params)
    assert {bound for *_, bound in taken} == {16, 32, 59}
    assert {(lanes, size) for lanes, size, *_ in taken} == {(1, 1), (2, 2), (3, 4), (4, 4)}
    for _, _, most, bound in taken:
        assert bound / 2 < most <= bound or most <= bound == 16


class Made(TorchDispatchMode):
    """Counts the operations whose result is new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            self.names[func.overloadpacket.__name__] += (
                result.untyped_storage().data_ptr() not in given
            )
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, TREE, NONE], ids=["chain", "tree", "none"])
def test_a_replay_allocates_nothing(shape, depth, monkeypatch):
    """Beside the graph: one copy of the lanes, and one of the results, to memory of the host.

    `test_device_graphs.py` asks a card's own allocator, for a hundred rounds.
    """
    replay, modes, replays = RoundGraph.replay, [], [0]

    def counted(self: Any, *args: Any) -> Any:
        replays[0] += 1
        for half in ("_decide", "_follow"):
            run = getattr(self, half)
            if run is not None and not hasattr(run, "is_plain"):

                def plain(run: Any = run) -> None:
                    with _disable_current_modes():
                        run()

                plain.is_plain = True  # type: ignore[attr-defined]
                setattr(self, half, plain)
        with Made() as mode:
            modes.append(mode.names)
            return replay(self, *args)

    monkeypatch.setattr(RoundGraph, "replay", counted)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=2)
    with graphs_run(), make(shape, overlap_depth=depth, graph_sizes=(1, 2)) as engine:
        engine.generate([PROMPTS[0][:5], PROMPTS[1][:9]], params)
    made = sum(modes, Counter())
    # On a card the clone is a copy to pinned memory, which torch keeps.
    assert +made == Counter(clone=replays[0]) and replays[0] > 5


# --- what runs beside and between ---------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("shape", "options"), [CASES["chain"], CASES["holey"], CASES["dense"]])
def test_whoever_gives_way_comes_back_to_the_same_text(shape, options, depth):
    options = tight({"shape": shape, "max_context_len": 96, "overlap_depth": depth, **options})
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True)] * 4
    short = [p[:20] for p in PROMPTS[:4]]
    stats = runs(lambda **more: make(**options, **more), short, params, sizes=(4,))
    assert stats.retracted_ct and stats.graphs.replay_ct


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["v1", "v2", "D = 1"])
@pytest.mark.parametrize(
    "script", [[SEVEN, ONE, SEVEN, NONE], [TREE, ONE, NONE, Shape.eagle(3, 4, 12)]]
)
def test_switches_of_a_controller(script, worker):
    """7 - 1 - 7 - 0, also with rounds in flight: each replays its own shape's graph."""
    depth = int(worker == "D = 1")
    more = {"overlap_depth": depth, "worker": "v1" if worker == "v1" else "auto", "page_size": 4}

    def build(**options: Any) -> Engine:
        controller = Scripted(script)
        engine = make(None, adaptive=controller.config(), **more, **options)
        controller.take_over(engine)
        return engine

    stats = runs(build, sizes=(4,))
    assert stats.adaptive.switch_ct > 4 and set(stats.graphs.sizes) == set(script)
    assert stats.graphs.eager_ct == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("shape", "options"), [CASES["chain"], CASES["holey"], CASES["none"]])
def test_sessions_go_on_over_their_turns(shape, options, depth):
    def say(sizes: tuple[int, ...]) -> tuple[list, Any]:
        with graphs_run(), make(shape, graph_sizes=sizes, overlap_depth=depth, **options) as engine:
            sessions, said = [engine.open_session() for _ in range(3)], []
            for turn in range(3):
                turns = [
                    session.append(prompt[: 9 + turn], PARAMS[3])
                    for session, prompt in zip(sessions, PROMPTS, strict=False)
                ]
                outputs = [turn.output() for turn in turns]
                said += [(o.token_ids, o.accept_lens) for o in outputs]
                sessions[0].rewind(sessions[0].num_tokens - 3)
            return said, engine.stats().graphs

    (expected, _), (said, graphs) = say(()), say((1, 4))
    assert said == expected and graphs.replay_ct and not graphs.eager_ct


def test_samples_forks_and_pins():
    def say(sizes: tuple[int, ...]) -> list:
        with graphs_run(), make(TREE, page_size=4, graph_sizes=sizes) as engine:
            pin = engine.pin(PROMPTS[1][:30])
            params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, n=3)
            outputs = engine.generate([PROMPTS[1], PROMPTS[0]], params)
            engine.unpin(pin)
            return [(o.token_ids, o.accept_lens) for o in outputs]

    assert say((2, 4)) == say(())


EAGER = {
    "a prefill in the same forward": (CHAIN, {"mixed_chunks": True, "prefill_tokens": 5}, {}),
    "log probabilities": (CHAIN, {}, {"logprobs": 2}),
    "penalties": (CHAIN, {}, {"presence_penalty": 1.5}),
    "more lanes than any graph has": (CHAIN, {"graph_sizes": (1,)}, {}),
    "lanes of several shapes": (SEVEN, {"shapes": (ONE,)}, {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("why", EAGER)
def test_what_has_no_graph_runs_eagerly_and_is_counted(why):
    shape, options, how = EAGER[why]
    params = [
        SamplingParams(max_new_tokens=16 + 6 * i, ignore_eos=True, **(how if i < 2 else {}))
        for i in range(4)
    ]
    shapes = [SEVEN, ONE, SEVEN, SEVEN] if why == "lanes of several shapes" else None
    found = []
    for sizes in ((), (1, 2, 4)):
        with graphs_run(), make(shape, **{"graph_sizes": sizes, **options}) as engine:
            outputs = engine.generate(PROMPTS[:4], params, shape=shapes)
            found.append([(o.token_ids, o.accept_lens) for o in outputs])
            stats = engine.stats()
    assert found[0] == found[1]
    graphs = stats.graphs
    assert graphs.eager_ct > 0 < graphs.replay_ct
    assert graphs.eager_ct + graphs.replay_ct == stats.round_ct


def test_a_drafter_that_reads_the_text_drafts_eagerly():
    """Only its plain rounds have graphs."""
    with (
        graphs_run(),
        Engine.from_pretrained(draft="ngram", max_context_len=200, graph_sizes=(1, 2, 4)) as engine,
    ):
        outputs = engine.generate(PROMPTS, PARAMS)
        plain = engine.generate(PROMPTS, PARAMS, shape=NONE)
        graphs = engine.stats().graphs
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert set(graphs.sizes) == {NONE} and graphs.replay_ct > 5 < graphs.eager_ct


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["chain", "dense", "holey", "none"])
def test_a_row_with_nan_fails_alone(case, monkeypatch):
    """The NaN does not reach the sink, which every padded lane reads."""
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    shape, options = CASES[case]
    with graphs_run(), make(shape, graph_sizes=(4,), **options) as engine:
        expected = engine.generate(PROMPTS[:3], params)
        replay, rounds = RoundGraph.replay, []

        def spoiling(self: RoundGraph, plan: Any, requests: Any) -> Any:
            rounds.append(plan)
            if len(rounds) == 3:
                page = engine.ledger.page_table(0)[requests[0].row, 0]
                engine.cache.keys[0][page * engine.cache.page_sizes[0]] = torch.nan
            return replay(self, plan, requests)

        monkeypatch.setattr(RoundGraph, "replay", spoiling)
        first, *others = engine.generate(PROMPTS[:3], params)
        again = engine.generate(PROMPTS[:3], params)
    assert first.finish_reason == "error" and "not finite" in first.error
    for outputs, wanted in ((others, expected[1:]), (again, expected)):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
        assert [o.accept_lens for o in outputs] == [o.accept_lens for o in wanted]


def device_state(engine: Engine) -> dict[str, torch.Tensor]:
    """All that rounds hand on by row, the greatest of it first; the page tables."""
    worker, drafter = engine.core.worker, engine.drafter
    owners = {"rows": worker._context.rows, "drafter": drafter}
    found = {
        f"{name}.{key}": value
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if isinstance(value, torch.Tensor) and len(value) == engine.ledger.num_rows + 1
    }
    assert {"rows.seq_lens", "rows.root_tokens", "rows._seeds", "drafter._hidden"} <= set(found)
    return found | {f"table {g}": table for g, table in enumerate(engine.cache.tables)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["chain", "dense", "holey", "dense, shared"])
def test_padded_lanes_disturb_nobody(case, monkeypatch):
    """Scenario 22: a batch padded in a graph; sgl#13740, sgl#34613.

    Law: padded lanes move nothing and write the sink alone.
    """
    shape, options = CASES[case]
    with graphs_run(), make(shape, graph_sizes=(4,), **options) as engine:
        expected = engine.generate(PROMPTS[:1], PARAMS[2])
        ledger, cache, replay, rounds = engine.ledger, engine.cache, RoundGraph.replay, []

        def watched(self: RoundGraph, plan: Any, requests: Any) -> Any:
            others = np.setdiff1d(np.arange(1, ledger.num_rows + 1), plan.rows)
            before = {name: value.clone() for name, value in device_state(engine).items()}
            kv = [buffer.clone() for buffer in (*cache.keys, *cache.values)]
            pending = replay(self, plan, requests)
            for name, value in device_state(engine).items():
                assert torch.equal(value[others], before[name][others]), name
            groups = cache.layer_groups * 2
            for buffer, old, group in zip((*cache.keys, *cache.values), kv, groups, strict=True):
                mine = np.unique(ledger.page_table(group)[plan.rows])  # the sink among them
                of_others = np.setdiff1d(np.arange(ledger.groups[group].num_pages + 1), mine)
                size = cache.page_sizes[group]
                pages = [b.view(len(b) // size, -1)[of_others] for b in (buffer, old)]
                assert torch.equal(*pages)
            rounds.append(len(plan))
            return pending

        engine.forget_prefixes()  # its KV is written over
        for buffer in (*cache.keys, *cache.values):  # what others have left, in the sink too
            buffer.normal_()
        for name, value in device_state(engine).items():
            if not name.startswith("table"):
                value.fill_(3)
        monkeypatch.setattr(RoundGraph, "replay", watched)
        outputs = engine.generate(PROMPTS[:1], PARAMS[2])
    assert rounds and set(rounds) == {1}
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.accept_lens for o in outputs] == [o.accept_lens for o in expected]


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_are_read_alone(family, page_size, depth, monkeypatch):
    """A graph reads as many pages of a window group as a window can lie on, however long a row."""
    read = []
    window_pages = KVCache.window_pages

    def noted(self: KVCache, group: int, *args: Any) -> Any:
        pages, origins = window_pages(self, group, *args)
        num_cells = self.windows[group] - 1 + args[-1]
        most = max((first + num_cells - 1) // page_size + 1 for first in range(page_size))
        read.append(pages.shape[1] == most)
        return pages, origins

    monkeypatch.setattr(KVCache, "window_pages", noted)
    model = make_model(config_of(family, 8, 512))

    def build(**options: Any) -> Engine:
        how = {"page_size": page_size, "overlap_depth": depth, "max_batch": 4, **options}
        return Engine.from_pretrained(model, max_context_len=120, **how)

    params = [dataclasses.replace(each, max_new_tokens=40) for each in PARAMS[:3]]
    stats = runs(build, PROMPTS[:3], params, sizes=(4,))
    assert stats.graphs.eager_ct == 0 and read and all(read)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize(("shape", "layout"), [((3, 1, 4), "dense"), ((3, 2, 6), "holey")])
def test_drafts_beside_windows(monkeypatch, tmp_path, family, shape, layout):
    monkeypatch.setattr(eagle_checkpoints, "H", 64)
    monkeypatch.setattr(eagle_checkpoints, "VOCAB", VOCAB)
    layer_state = partial(eagle_checkpoints.layer_state, h=64)
    monkeypatch.setattr(eagle_checkpoints, "layer_state", layer_state)
    config = eagle_checkpoints.base_config(max_position_embeddings=512, sliding_window=5)
    state = eagle_checkpoints.eagle_state()
    folder = eagle_checkpoints.write(tmp_path / "head", config, state)
    model = make_model(config_of(family, 8, 512))

    def build(**options: Any) -> Engine:
        how = {"layout": layout, "page_size": 4, "overlap_depth": 1, "max_batch": 4, **options}
        return Engine.from_pretrained(
            model, draft=folder, shape=Shape(*shape), max_context_len=120, **how
        )

    stats = runs(build, PROMPTS[:3], PARAMS[:3], sizes=(4,))
    assert stats.graphs.eager_ct == 0 < stats.graphs.replay_ct
