"""Laws of adaptive drafting in an engine: switches change the speed and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lossless import Comparison, Reference
from scripted import Scripted
from specpool import Engine, RequestOutput, SamplingParams, Shape
from specpool.engine.assembly import calibration
from specpool.engine.assembly.calibration import Tour
from specpool.engine.assets import corpus
from specpool.engine.config import EngineConfig
from specpool.engine.shapes import AdaptiveConfig, CostController
from specpool.errors import ConfigError, DraftLag

NONE, ONE, SEVEN = Shape.none(), Shape.eagle(1, 1, 2), Shape.eagle(7, 1, 8)
TREE, WIDE = Shape.eagle(3, 4, 12), Shape.eagle(4, 8, 32)
HEAD = "specpool/tiny-eagle"
PROMPTS = corpus.prompts(8, 40)
PARAMS = SamplingParams(max_new_tokens=48, ignore_eos=True)


@pytest.fixture
def build(build) -> Callable[..., Engine]:
    """Builds engines that adapt, by a script if there is one."""

    def adapting(script: Scripted | None = None, *, draft: str = HEAD, **options: Any) -> Engine:
        if script is not None:
            options["adaptive"] = script.config()
        engine = build(draft, **{"max_context_len": 128, **options})
        if script is not None:
            script.take_over(engine)
        return engine

    return adapting


def check(reference: Reference, outputs: Sequence[RequestOutput]) -> None:
    comparison = Comparison()
    for output in outputs:
        assert output.error is None
        if output.token_ids != reference.text(output.prompt_ids, len(output.token_ids)):
            comparison.add(reference, output.prompt_ids, output.token_ids)


SCRIPTS = [
    pytest.param(HEAD, [SEVEN, ONE, SEVEN, NONE], {}, id="7 1 7 0"),
    pytest.param(HEAD, [SEVEN, ONE, SEVEN], {"page_size": 1}, id="7 1 7, page 1"),
    pytest.param(HEAD, [WIDE, ONE, TREE, NONE], {"layout": "holey"}, id="holey trees"),
    pytest.param(HEAD, [WIDE, SEVEN], {"placement": "shared", "page_size": 16}, id="shared"),
    pytest.param(HEAD, [SEVEN, NONE, TREE], {"mixed_chunks": True, "prefill_tokens": 9}, id="m"),
    pytest.param("ngram", [SEVEN, NONE, ONE], {}, id="n-gram"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["v1", "v2", "D = 1"])
@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize(("draft", "script", "options"), SCRIPTS)
def test_switches_in_the_middle_of_rounds_change_no_text(
    build, reference, draft, script, options, is_tight, worker
):
    """Drawn tokens too; in a tight pool requests are retracted between the switches."""
    depth = int(worker == "D = 1")
    options = {**options, "overlap_depth": depth, "worker": "v1" if worker == "v1" else "auto"}
    controller = Scripted(script, rounds=1 if depth else 2)
    if is_tight:
        ledger = build(controller, draft=draft, **options).ledger
        least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
        options |= {"num_pages": least + least // 2, "headroom": 0}
    engine = build(controller, draft=draft, **options)
    outputs = engine.generate(PROMPTS[:6], PARAMS)
    check(reference, outputs)
    stats = engine.stats()
    assert stats.adaptive.switch_ct > 4 and set(stats.adaptive.round_cts) == set(script)
    assert sum(stats.adaptive.round_cts.values()) == stats.round_ct
    # A chosen shape stays until a round has run with it, whatever delays that round.
    assert len(controller.given) - stats.round_ct in (0, 1)
    assert (stats.retracted_ct > 0) >= is_tight
    for group in stats.groups:
        assert group.used_pages == 0 and group.free_pages + group.cached_pages == group.num_pages
    drawn = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.9, seed=3)
    plain = engine.generate(PROMPTS[:2], drawn, shape=NONE)
    adaptive = engine.generate(PROMPTS[:2], drawn)
    assert [o.token_ids for o in adaptive] == [o.token_ids for o in plain]


@pytest.mark.parametrize("depth", [0, 1])
def test_results_carry_their_rounds_own_shape_and_batch_size(build, depth):
    """Under overlap the controller has switched before a round's results come."""
    script = Scripted([SEVEN, ONE, NONE, SEVEN])
    engine = build(script, overlap_depth=depth)
    engine.generate(
        PROMPTS[:3], [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (9, 30, 48)]
    )
    assert {size for _, size in script.given} == {1, 2, 3}
    steps = iter(script.given)
    for shape, batch_size, num_correct in script.told:
        assert (shape, batch_size) in steps  # in the order of the rounds
        assert len(num_correct) <= batch_size and max(num_correct) <= shape.num_steps
    assert {shape for shape, _ in script.timed} == {SEVEN, ONE, NONE}


def test_who_opts_out_or_has_a_cap_keeps_it(build, reference):
    script = Scripted([SEVEN, WIDE])
    engine = build(script, shapes=(ONE,))
    params = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, max_draft_steps=cap)
        for cap in (None, 0, 4, None, None)
    ]
    outputs = engine.generate(PROMPTS[:3], params[:3])
    check(reference, outputs)
    free, plain, capped = outputs
    assert max(free.accept_lens) > 5 and set(plain.accept_lens) == {1}
    assert 3 <= max(capped.accept_lens) <= 5  # whatever was chosen, it had the tree of 4 steps
    own = engine.generate(PROMPTS[:2], params[3:], shape=[ONE, NONE])
    check(reference, own)
    assert max(own[0].accept_lens) == 2 and set(own[1].accept_lens) == {1}
    with pytest.raises(ConfigError, match=r"prompt 0 asks for .*num_steps=1.*, and for 0 steps"):
        engine.generate(PROMPTS[0], params[1], shape=ONE)
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_a_cap_holds_without_a_controller(build):
    engine = build(shape=SEVEN, shapes=(ONE,))
    for cap, most in ((None, 8), (7, 8), (6, 2), (0, 1)):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, max_draft_steps=cap)
        (output,) = engine.generate(PROMPTS[0], params)
        assert max(output.accept_lens) == most


@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
def test_scenarios_9_and_10_switches_with_a_round_in_flight(build, reference, policy):
    """Scenarios 9 and 10: down from 7 to 1, and up again, with the other round in flight.

    Law: a round never needs a negative number of pages; only a trim or its end takes pages from a
    row; the reserve covers the round in flight at its old width and the next at the new width.
    """
    script = Scripted([SEVEN, ONE], rounds=1)
    engine = build(script, overlap_depth=1, page_size=1, policy=policy)
    ledger, prepared, held = engine.ledger, [], {}
    scheduler = engine.core.scheduler

    def decoding(*chosen: Any) -> Any:
        rows = [r.row for r in scheduler.requests() if r.row and not r.finish_reason]
        for row in rows:
            epoch = int(ledger.epoch[row])
            before = held.get((row, epoch), 0)
            held[row, epoch] = int(ledger.allocated_len(0)[row])
            assert held[row, epoch] >= before
        if rows:
            assert (ledger.tokens_required(rows, [1] * len(rows)) >= 0).all()
        step = decode(*chosen)
        if step is not None:
            plan = step.plan
            most = np.array([ledger.shapes[s].max_accept_len for s in plan.shapes])
            prepared.append(plan.shapes[0])
            assert (ledger.allocated_len(0)[plan.rows] >= plan.hi + most).all()
            spread = plan.hi - plan.lo
            if len(prepared) > 1 and spread.any():
                before = ledger.shapes[prepared[-2]].max_accept_len
                assert spread.max() == before - 1  # scenario 53: the round's before own width
        return step

    decode, scheduler._decode = scheduler._decode, decoding
    check(reference, engine.generate(PROMPTS[:3], PARAMS))
    assert len({*prepared}) == 2


def test_scenario_10_a_retraction_between_switches_gives_everything_back(build, reference):
    """Scenario 10: 1 -> 7 while a narrow round is in flight, then a retraction.

    Law: the pool is whole again, and nothing that was reserved for either width is lost.
    """
    script = Scripted([ONE, SEVEN])
    options = {"overlap_depth": 1, "page_size": 4, "headroom": 0}
    ledger = build(script, **options).ledger
    least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
    engine = build(script, num_pages=least + 2, **options)
    check(reference, engine.generate(PROMPTS[:5], PARAMS))
    assert engine.stats().retracted_ct > 2
    engine.ledger.check()


def test_scenario_11_plain_rounds_leave_no_draft_lag(build, reference, monkeypatch):
    """Scenario 11: shape 0 for 20 rounds, then drafting. Law: adaptive rows keep draft KV.

    If a plain round of such rows wrote none, the ledger would refuse the first draft.
    """
    script = Scripted([NONE] * 20 + [SEVEN] * 3)
    engine = build(script)
    check(reference, engine.generate(PROMPTS[:2], PARAMS))
    assert engine.stats().adaptive.switch_ct >= 2
    engine = build(Scripted([NONE] * 20 + [SEVEN] * 3))
    prepare = type(engine.ledger).prepare_decode

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine.ledger, name)

        def prepare_decode(self, rows, shapes, *, writes_draft):
            return prepare(engine.ledger, rows, shapes, writes_draft=bool(shapes.any()))

    monkeypatch.setattr(engine.core.scheduler.state, "ledger", Plain())
    with pytest.raises(DraftLag):
        engine.generate(PROMPTS[:2], PARAMS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["ema", "cost"])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_engines_own_policies_change_no_text(build, reference, policy, depth):
    engine = build(adaptive=policy, overlap_depth=depth, max_batch=4)
    check(reference, engine.generate(PROMPTS, PARAMS))
    stats = engine.stats()
    assert stats.adaptive.round_cts and stats.finding_ct == 0
    # The rounds that are measured at the start belong to no request.
    assert stats.finished_ct == len(PROMPTS) and stats.aborted_ct == 0


def test_what_cannot_adapt_is_said_at_the_start(target, build, tmp_path):
    with pytest.raises(ConfigError, match=r"drafts, but there is no draft model"):
        Engine(target, config=EngineConfig(adaptive="ema"))
    with pytest.raises(ConfigError, match="initial shape chain:2 is in no range; the ranges have"):
        build(shape=Shape.eagle(2, 1, 3), adaptive="ema")
    with pytest.raises(ConfigError, match="adaptive must be 'ema', 'cost', 'budget', the path of"):
        EngineConfig(adaptive=3)
    path = tmp_path / "adaptive.json"
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: No such file"):
        EngineConfig(adaptive=str(path))
    path.write_text('{"1": {"candidates": ["chain:x"]}}')
    with pytest.raises(ConfigError, match=f"{path}: \"1\": .*'chain:x'"):
        EngineConfig(adaptive=path)
    wide = AdaptiveConfig.from_dict({"1": {"candidates": ["none", "tree:7x8x64"]}})
    with pytest.raises(ConfigError, match="at least 32, the pages of one row of 128 slots, got 20"):
        build(adaptive=wide, max_context_len=64, num_pages=20)


def test_a_round_that_failed_took_no_time(build, monkeypatch):
    """A round that fails at once must not look like the fastest shape."""
    script = Scripted([NONE, SEVEN], rounds=3)
    engine = build(script)
    propose = engine.drafter.propose

    def failing(lanes, shape, *args):
        if shape == SEVEN:
            raise RuntimeError("out of memory")
        return propose(lanes, shape, *args)

    monkeypatch.setattr(engine.drafter, "propose", failing)
    outputs = engine.generate(PROMPTS[:4], PARAMS)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert (SEVEN, 4) in script.given and {shape for shape, _ in script.timed} == {NONE}


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_rows", [1.3, 2.2, 6])
def test_the_start_measures_the_batch_sizes_that_it_tells(build, monkeypatch, num_rows):
    """In a tight pool rows are retracted on the way: rounds of fewer lanes are another size's."""
    ran: Counter[int] = Counter()
    told: Counter[int] = Counter()
    note, take = Tour.on_round_seconds, CostController.on_round_seconds

    def noting(self, shape, batch_size, seconds):
        ran[batch_size] += 1
        note(self, shape, batch_size, seconds)

    def taking(self, shape, batch_size, seconds):
        told[batch_size] += 1
        take(self, shape, batch_size, seconds)

    monkeypatch.setattr(Tour, "on_round_seconds", noting)
    monkeypatch.setattr(CostController, "on_round_seconds", taking)
    options = {"max_batch": 6, "headroom": 0}
    least = build(**options).ledger.pages_per_row(0)
    build(num_pages=int(least * num_rows), adaptive="cost", **options)
    assert told and all(told[size] <= ran[size] for size in told)


def test_the_start_stops_measuring_when_rounds_take_long(build, monkeypatch):
    """On a large model only the smallest batch is measured, each shape often enough to count."""
    told: Counter[tuple[Shape, int]] = Counter()
    take = CostController.on_round_seconds

    def taking(self, shape, batch_size, seconds):
        told[shape, batch_size] += 1
        take(self, shape, batch_size, seconds)

    monkeypatch.setattr(CostController, "on_round_seconds", taking)
    options = {"max_batch": 6, "adaptive": "cost"}
    build(**options)
    assert {size for _, size in told} == {1, 2, 4, 6}
    told.clear()
    monkeypatch.setattr(calibration, "_MOST_SECONDS", 0.0)
    build(**options)
    assert {size for _, size in told} == {1} and set(told.values()) == {calibration.TOLD}


@pytest.mark.parametrize(("kind", "depth"), [("cpu", 1), ("cuda", 0), ("cuda", 1)])
def test_a_turns_seconds_are_of_the_round_that_the_device_ran(build, monkeypatch, kind, depth):
    """Law: under overlap it is the round before, also where that was alone of its shape."""
    script = Scripted([SEVEN, ONE, NONE, SEVEN])
    engine = build(script, overlap_depth=depth)
    loop = engine.core.loop
    seen, turns = [], []
    monkeypatch.setattr(
        loop.scheduler.round_shapes, "observe", lambda choice, *others: seen.append(choice)
    )
    observe = loop._observe_round

    def observing(before, steps, seconds):
        turns.append(steps[0].choice if len(steps) == 1 else None)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "_cache", SimpleNamespace(device=SimpleNamespace(type=kind)))
            observe(before, steps, seconds)

    monkeypatch.setattr(loop, "_observe_round", observing)
    engine.generate(PROMPTS[0], PARAMS)
    if kind == "cuda" and depth:
        turns = [before for before, turn in pairwise(turns) if turn is not None]
    assert seen == [choice for choice in turns if choice is not None] and len(seen) > 6


def test_behind_a_round_that_failed_no_older_rounds_seconds_are_told(build, monkeypatch):
    """Law: on a device under overlap, a turn reports the round in flight, and no prefill."""
    script = Scripted([SEVEN])
    engine = build(script, overlap_depth=1)
    loop, propose = engine.core.loop, engine.drafter.propose
    told = []  # turns whose seconds were reported
    observe = loop._observe_round

    def observing(*args):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "_cache", SimpleNamespace(device=SimpleNamespace(type="cuda")))
            observe(*args)

    monkeypatch.setattr(loop, "_observe_round", observing)
    monkeypatch.setattr(
        loop.scheduler.round_shapes, "observe", lambda *args: told.append(loop._turns)
    )
    engine.submit(PROMPTS[0], PARAMS)
    for _ in range(5):
        engine.turn()
    assert told[-1] == loop._turns  # its rounds run alone
    engine.submit(PROMPTS[1], PARAMS)

    def failing(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.drafter, "propose", failing)
    engine.turn()  # the first one's round fails, the second one's prompt runs
    failed = loop._turns
    monkeypatch.setattr(engine.drafter, "propose", propose)
    engine.turn()
    engine.turn()
    assert [turn for turn in told if turn >= failed] == [failed + 2]
    while engine.turn():
        pass
