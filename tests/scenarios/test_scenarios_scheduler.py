"""Regression scenarios through the scheduler: what upstream engines lost, with requests that run.

Each test is named after its row in docs/failures.md and says which law it checks. If a guard can be
removed from outside, the same test also runs without it and must reach the failing state. Examples
are a ledger that reports a step as complete when it is launched, and a planted bug of the
scheduler. The ledger's own tests of these numbers are in the other `test_scenarios_*.py`.
"""

from __future__ import annotations

import re

import pytest

import reference
from lab.sim import (
    Arrival,
    BrokenLaw,
    Scenario,
    Settings,
    Simulation,
    Text,
    broken_law,
)
from scheduler_loop import Loop, arrival
from sim_plants import give_tokens_to_dropped_lanes, lie, retract_without_draining
from specpool import Engine, NotReady, OrderError, SamplingParams, ShapeError, StalePlan
from specpool.capacity.page_needs import PageNeeds
from specpool.engine.assets import corpus
from specpool.engine.scheduler.queues import Running
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step


def pages_of(loop: Loop, request: Request) -> set[int]:
    return set(loop.ledger.page_table(0)[request.row].tolist()) - {0}


@pytest.mark.parametrize("fenced", [True, False])
def test_scenario_23_a_row_waits_for_the_round_behind_its_end(fenced):
    """sgl#18803.

    Law: The next request gets the row when the round in flight is over, not when its results say
    that the request has ended.
    """
    loop = Loop(
        arrival(1, stop_at=5), arrival(2), fenced=fenced, num_pages=(20,), max_batch=1,
        overlap_depth=1,
    )  # fmt: skip
    first, second = loop.requests
    loop.turn()
    loop.turn()  # a round of the first one, its end not known yet
    loop.take()
    assert first.finish_reason == "stop" and len(loop.flying) == 1
    steps = loop.scheduler.schedule()
    assert (second.row != 0) == (not fenced)
    if fenced:
        assert not steps
        loop.run()


def start_over(fenced: bool, *, in_round: bool) -> tuple[bool, Loop]:
    """One ends, or is aborted, with a step in flight; whether the next one takes its pages."""
    loop = Loop(
        arrival(1, prompt_len=17, stop_at=17), arrival(2, prompt_len=17), fenced=fenced,
        num_pages=(8,), max_batch=2, overlap_depth=1, max_context_len=31,
    )  # fmt: skip
    first, second = loop.requests
    loop.turn()
    held = pages_of(loop, first)
    assert held and second.row == 0
    if in_round:
        loop.turn()
        held |= pages_of(loop, first)
        loop.take()
    else:
        loop.scheduler.abort(first)
    assert first.finish_reason and len(loop.flying) == 1
    loop.scheduler.schedule()
    return bool(second.row) and bool(pages_of(loop, second) & held), loop


def test_scenario_24_pages_wait_for_the_round_behind_an_end():
    """sgl#35049.

    Law: A page goes to another request only after every launched forward that may write it.
    """
    taken, loop = start_over(True, in_round=True)
    assert not taken and loop.ledger.fenced_pages(0) > 0
    loop.run()
    taken, _ = start_over(False, in_round=True)
    assert taken


def test_scenario_59_a_prefill_in_flight_fences_without_a_round():
    """Law: If a prefill is launched, an abort frees the pages when the prefill is complete."""
    taken, loop = start_over(True, in_round=False)
    assert not taken and loop.ledger.fenced_pages(0) > 0
    loop.run()
    taken, _ = start_over(False, in_round=False)
    assert taken


def test_scenario_25_the_device_is_one_verify_ahead_at_a_page_edge():
    """trt#16280, prompts around a page edge.

    Law: A round's plan has room for every root that the rounds before it may leave. The host's own
    length would not be enough.
    """
    num_beyond = 0
    for prompt_len in range(4 * 4 - 1, 4 * 4 + 5):
        one = arrival(1, prompt_len=prompt_len, max_len=32, shape=1, accept_rate=0.7)
        loop = Loop(one, shapes=((3, 1, 4),), num_pages=(20,), placement="shared", overlap_depth=1)
        while loop.scheduler.requests() or loop.flying:
            steps = loop.turn()
            while loop.flying and (not steps or len(loop.flying) > 1):
                plan, roots = loop.flying[0].plan, loop.take()
                if plan.kind == "decode":
                    assert plan.lo[0] <= roots[0] <= plan.hi[0]
                    ends = [reference.footprint(int(at), 4, 3, 1, 4) for at in (*roots, plan.lo[0])]
                    assert ends[0] <= plan.allocated_after[0][0]
                    num_beyond += ends[0] > reference.ceil_align(ends[1], 4)
        loop.is_clean()
    assert num_beyond > 3


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_26_late_results_are_dropped_by_epoch(monkeypatch, depth, num_steps):
    """vllm#47900, ends and aborts in each turn, in rows that are taken again at once.

    Law: Results for a row that was given back since are dropped, and no other results.
    """
    settings = Settings(
        page_sizes=(1,), num_pages=(60,), max_batch=3, max_context_len=40, overlap_depth=depth,
        shapes=((num_steps, 1, num_steps + 1),) if num_steps else (), is_late=True,
        placement="shared",
    )  # fmt: skip
    arrivals = tuple(
        Arrival(
            request_id=i, turn=i, prompt_len=i % 7 + 1, max_len=39, shape=min(num_steps, 1),
            abort_after=i % 5 + 1, stop_at=i % 7 + 3, accept_rate=0.5,
        )
        for i in range(1, 60)
    )  # fmt: skip
    scenarios = [Scenario(seed, settings, arrivals) for seed in range(4)]
    assert not any(map(broken_law, scenarios))
    give_tokens_to_dropped_lanes(monkeypatch)
    found = [law for law in map(broken_law, scenarios) if law]
    if (depth, num_steps) != (0, 0):  # there the one late token comes in the turn of the abort
        assert re.search("went on after|speaks otherwise|alone it would", found[0])


def test_scenario_27_a_forward_sees_its_own_tables(monkeypatch):
    """sgl#28034.

    Law: Each step's delta is applied in step order, after earlier forwards and before its own.
    Applied after its own forward, that forward reads and writes wrong slots.
    """
    prompts, params = corpus.prompts(3, 20), SamplingParams(max_new_tokens=20, ignore_eos=True)
    options = {"overlap_depth": 1, "max_context_len": 64, "page_size": 4, "draft": "ngram"}
    with Engine.from_pretrained(**options) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
        events: list[tuple[str, int]] = []
        apply, launch = engine.cache.apply_delta, engine.core.scheduler.launch
        run = engine.core.worker.run

        def noted(steps):
            events.extend(("forward", step.plan.step) for step in steps)
            return run(steps)

        with monkeypatch.context() as patch:
            patch.setattr(
                engine.core.scheduler,
                "launch",
                lambda step: (events.append(("launch", step.plan.step)), launch(step)),
            )
            patch.setattr(
                engine.cache, "apply_delta", lambda n: (events.append(("delta", n)), apply(n))
            )
            patch.setattr(engine.core.worker, "run", noted)
            engine.generate(prompts, params)
        steps = [n for what, n in events if what == "forward"]
        assert len(steps) > 10 and steps == sorted(steps)
        assert events == [(what, n) for n in steps for what in ("launch", "delta", "forward")]

        def behind(steps):
            pending = run(steps)
            for step in steps:
                apply(step.plan.step)
            return pending

        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, "apply_delta", lambda n: None)
            patch.setattr(engine.core.worker, "run", behind)
            wrong = [output.token_ids for output in engine.generate(prompts, params)]
        assert wrong != expected
        again = engine.generate(prompts, params)
        assert [output.token_ids for output in again] == expected


def test_scenario_28_a_retraction_frees_enough_for_the_real_next_round(monkeypatch):
    """sgl#14939, K=8 and pools of a few pages more than a row; the victims are small.

    Law: Retraction goes on until the next round has its pages; one request may not suffice.
    """
    calls: list[int] = []
    schedule, make_room = Scheduler.schedule, Reclaim.make_room

    def counted(self):
        calls.append(0)
        return schedule(self)

    def room(self):
        calls[-1] += 1
        make_room(self)

    monkeypatch.setattr(Scheduler, "schedule", counted)
    monkeypatch.setattr(Reclaim, "make_room", room)
    for more in range(9):
        settings = Settings(
            page_sizes=(16,), num_pages=(26 + more,), placement="shared", layout="holey",
            shapes=((5, 8, 32),), max_batch=8, max_context_len=100, overlap_depth=1,
        )  # fmt: skip
        big = [arrival(i, prompt_len=17, max_len=99, shape=1) for i in (1, 2)]
        small = [arrival(i, prompt_len=3, max_len=60) for i in range(3, 9)]
        assert broken_law(Scenario(28, settings, (*big, *small))) is None
    assert max(calls) >= 2


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_30_a_step_that_is_not_launched_is_taken_back(guarded):
    """IBM/tgi#96.

    Law: A cancel restores ledger and requests, so the second attempt equals the first.
    """
    loop = Loop(arrival(1, prompt_len=9), num_pages=(20,), prefill_tokens=6)
    (request,) = loop.requests
    for start, end in ((0, 6), (6, 9)):
        (step,) = loop.scheduler.schedule()
        before = loop.ledger.free_pages(0)
        if guarded:
            loop.scheduler.cancel(step)
        else:
            loop.ledger.cancel(step.plan.step)
            loop.scheduler.state.in_flight -= 1
        assert loop.ledger.free_pages(0) > before
        assert (loop.ledger.resolved_len[1], loop.ledger.steps()) == (start, [])
        if not guarded:
            break
        assert request.prefilled_len == start
        (again,) = loop.turn()
        assert again.plan.new_len.tolist() == step.plan.new_len.tolist() == [end]
        assert loop.ledger.free_pages(0) == before
        loop.take()
    if guarded:
        loop.run()
    else:  # it begins where the ledger is, and so is longer than a chunk may be
        with pytest.raises(ShapeError, match="an extend from 0 to 9 is longer than max_chunk 6"):
            loop.turn()


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_31_a_round_may_need_several_pages(monkeypatch, guarded):
    """ATOM#250, P=4 and N=9.

    Law: Admission counts how many pages every row's next round needs.
    """
    if not guarded:
        needs = PageNeeds.pages_by_shape
        monkeypatch.setattr(PageNeeds, "pages_by_shape", lambda self, *of: needs(self, *of) * 0 + 1)
    settings = Settings(
        page_sizes=(4,), num_pages=(13,), placement="shared", layout="dense",
        shapes=((8, 1, 9),), max_batch=6, max_context_len=20,
    )  # fmt: skip
    arrivals = tuple(arrival(i, prompt_len=4, max_len=8, shape=1) for i in range(1, 7))
    simulation = Simulation(Scenario(31, settings, arrivals))
    assert (simulation.run().retractions == 0) == guarded


def crowd(depth: int = 1) -> Scenario:
    """Rounds that starve beside each other, with one in flight."""
    settings = Settings(
        page_sizes=(4,), num_pages=(18,), placement="shared", layout="dense", is_late=True,
        shapes=((7, 1, 8),), overlap_depth=depth, max_batch=5, max_context_len=40,
    )  # fmt: skip
    arrivals = (arrival(i, prompt_len=7, max_len=36, shape=1, accept_rate=0.5) for i in range(1, 6))
    return Scenario(51, settings, tuple(arrivals))


def test_scenario_51_only_one_victim_goes_where_its_pages_are_fenced(monkeypatch):
    """vllm#49674.

    Law: What is in flight is drained before a request is retracted, so the pages of one victim are
    free at once and the next request stays.
    """
    guarded = Simulation(crowd()).run().retractions
    assert guarded > 0
    retract_without_draining(monkeypatch)
    found = broken_law(crowd())
    assert found is not None and "retracted while results are still to come" in found
    assert Simulation(crowd(), check=0).run().retractions > guarded


def two_steps(loop: Loop) -> list[Step]:
    """A round of the first request and a prefill of the second, prepared and not launched."""
    loop.turn()
    loop.take()
    late = arrival(2)
    loop.requests.append(late.request())
    loop.texts[2] = Text(late)
    loop.scheduler.submit(loop.requests[1])
    steps = loop.scheduler.schedule()
    assert [step.plan.kind for step in steps] == ["extend", "decode"]
    return steps


@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_52_a_stale_plan_is_never_launched(depth):
    """Prepare with a row, abort its request, launch.

    Law: A stale plan is never launched, because its pages may belong to another request.
    """
    loop = Loop(arrival(1), num_pages=(20,), overlap_depth=depth)
    prefill, decode = two_steps(loop)
    loop.launch(prefill)
    first, second = loop.requests
    named = pages_of(loop, first)
    loop.scheduler.abort(first)
    assert {loop.ledger.page_record(0, page)[0] for page in named} == {"free"}
    with pytest.raises(StalePlan):
        loop.scheduler.launch(decode)
    loop.scheduler.cancel(decode)
    loop.run()
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_61_a_failed_forward_takes_its_requests_and_no_other(depth, guarded):
    """Law: A failed step is abandoned: its requests end, its rows come back, others go on."""
    loop = Loop(arrival(1), num_pages=(20,), overlap_depth=depth)
    for step in two_steps(loop):
        loop.launch(step)
    first, second = loop.requests
    if guarded:
        loop.fail()
        assert second.error == "a step failed: RuntimeError: gone"
        loop.run()
        assert (first.finish_reason, len(first.tokens)) == ("length", 20)
        return
    step = loop.flying.popleft()  # dropped without notice
    loop.device.fail(step.plan.step)
    with pytest.raises(AssertionError):
        loop.run()
    assert second.tokens != loop.texts[2].tokens[: len(second.tokens)]


def test_scenario_63_steps_are_launched_in_their_order():
    """A prefill and a round of one turn, the round first.

    Law: A launch out of order is refused before anything is enqueued.
    """
    loop = Loop(arrival(1), num_pages=(20,))
    prefill, decode = two_steps(loop)
    state = loop.ledger.state_hash()
    with pytest.raises(OrderError, match=f"next step to launch is {prefill.plan.step}"):
        loop.scheduler.launch(decode)
    assert loop.ledger.state_hash() == state
    loop.launch(prefill)
    loop.launch(decode)
    with pytest.raises(BrokenLaw, match="is taken over before"):
        loop.device.result(decode.plan)
    loop.run()


def test_scenario_64_a_round_that_is_never_launched_fences_nothing():
    """Law: A step that was never launched fences nothing, and blocks no other step."""
    loop = Loop(arrival(1), num_pages=(20,))
    loop.turn()
    loop.take()
    (decode,) = loop.scheduler.schedule()
    loop.scheduler.abort(loop.requests[0])
    assert (loop.ledger.free_pages(0), loop.ledger.fenced_pages(0)) == (20, 0)
    loop.scheduler.submit(arrival(2).request())
    with pytest.raises(NotReady, match="stale"):  # not before it is cancelled
        loop.scheduler.schedule()
    loop.scheduler.cancel(decode)
    loop.requests = loop.scheduler.requests()
    loop.texts[2] = Text(arrival(2))
    loop.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_65_a_stale_step_is_cancelled_and_blocks_nobody(depth):
    """Of two steps of a turn the first goes stale.

    Law: The newest step is cancelled first, then the stale one; the other request goes on.
    """
    loop = Loop(arrival(1), num_pages=(20,), overlap_depth=depth)
    prefill, decode = two_steps(loop)
    first, second = loop.requests
    loop.scheduler.abort(second)
    for step, error in ((prefill, StalePlan), (decode, OrderError)):
        with pytest.raises(error):
            loop.scheduler.launch(step)
    with pytest.raises(OrderError):
        loop.scheduler.cancel(prefill)
    loop.scheduler.cancel(decode)
    loop.scheduler.cancel(prefill)
    loop.run()
    assert (first.finish_reason, len(first.tokens)) == ("length", 20)


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_66_no_chunk_over_a_round_in_flight(monkeypatch, guarded):
    """Long prompts in chunks, two steps in flight.

    Law: A row decodes after its last chunk has launched; no chunk while a round is in flight.
    """
    chunks: list[int] = []

    def prepare_extend(self, rows, new_lens, **options):
        chunks.append(int(self._ledger.in_flight[rows].max()))
        return self._ledger.prepare_extend(rows, new_lens, **options)

    lie(monkeypatch, prepare_extend=prepare_extend)
    if not guarded:
        start = Running.start

        def hasty(self, request, row, prefilled_len):
            start(self, request, row, prefilled_len)
            self.limits[row] = request.max_len

        monkeypatch.setattr(Running, "start", hasty)
    settings = Settings(
        page_sizes=(4,), num_pages=(40,), overlap_depth=1, prefill_tokens=4, max_context_len=40
    )
    arrivals = tuple(arrival(i, prompt_len=21, max_len=30) for i in (1, 2, 3))
    found = broken_law(Scenario(66, settings, arrivals))
    assert len(chunks) > 5 or not guarded
    if guarded:
        assert found is None and max(chunks) == 0
    else:
        assert found is not None and "NotReady" in found


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_69_a_round_behind_a_failed_one_becomes_no_text(monkeypatch, guarded):
    """Two rounds in flight, the first fails; the second counted on its root.

    Law: The request ends with the tokens from before the failure; no later result adds any.
    """
    if not guarded:
        give_tokens_to_dropped_lanes(monkeypatch)
    loop = Loop(
        arrival(1, shape=1, accept_rate=0.9), shapes=((3, 1, 4),), num_pages=(20,),
        placement="shared", overlap_depth=1,
    )  # fmt: skip
    (request,) = loop.requests
    loop.turn()
    loop.turn()
    loop.take()
    loop.turn()
    assert [step.plan.kind for step in loop.flying] == ["decode", "decode"]
    had = list(request.tokens)
    loop.fail()
    assert request.finish_reason == "error"
    loop.take()
    assert (request.tokens == had) == guarded
    loop.is_clean()
