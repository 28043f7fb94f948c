"""Laws of the synchronous worker, v1: the text of v2, with reserved slots for one round only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lossless import Comparison
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step, StepResult
from workload import HEADS, SEEDS, Workload, run_mixed


class SlotWatch:
    """Looks, after each round, at what the rows that go on still hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rounds = 0
        take_over = Scheduler.take_over

        def watched(scheduler: Scheduler, step: Step, result: StepResult) -> None:
            take_over(scheduler, step, result)
            if step.is_decode:
                self.num_rounds += 1
                self.look(scheduler, [r.row for r in step.requests if r.row])

        monkeypatch.setattr(Scheduler, "take_over", watched)

    @staticmethod
    def look(scheduler: Scheduler, rows: list[int]) -> None:
        ledger = scheduler.state.ledger
        for g, group in enumerate(ledger.groups):
            P = group.page_size
            held = -(-ledger.resolved_len[rows] // P) * P
            np.testing.assert_array_equal(ledger.allocated_len(g)[rows], held)


@pytest.fixture
def slots(monkeypatch) -> SlotWatch:
    return SlotWatch(monkeypatch)


def at(work: Workload, worker: str) -> Workload:
    work.options |= {"overlap_depth": 0, "worker": worker, "busy_check": 2}
    return work


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(20), *SEEDS[40:100]])
def test_random_workloads_on_v1_speak_as_alone(seed, target, heads, reference, slots):
    """With retractions, aborts, chunks, mixed chunks, and shapes of many kinds."""
    work = at(Workload(seed), "v1")
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in work.news]
    engine = work.tight(target, heads)
    if work.shape is None:
        outputs = engine.generate(work.prompts, params)
    else:
        outputs = run_mixed(engine, work, params)
    comparison = Comparison()
    for prompt, output, n in zip(work.prompts, outputs, work.news, strict=True):
        if output is not None:
            assert output.finish_reason == "length" and len(output.token_ids) == n, output.error
            comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    assert slots.num_rounds


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(8), *SEEDS[40:60]])
def test_v1_and_v2_say_the_same_when_sampling(seed, target, heads):
    """Same pages, same requests, same draws: tokens and their log probabilities are equal."""
    texts = []
    for worker in ("v1", "v2"):
        work = at(Workload(seed), worker)
        params = [
            SamplingParams(max_new_tokens=n, ignore_eos=True, temperature=0.9, seed=i, logprobs=2)
            for i, n in enumerate(work.news)
        ]
        outputs = work.tight(target, heads).generate(work.prompts, params)
        texts.append([output.token_ids for output in outputs])
        chosen = [[each.logprob for each in output.logprobs] for output in outputs]
        texts[-1].append([round(value, 3) for row in chosen for value in row])
    assert texts[0] == texts[1]


# Llama-style EAGLE-1 with a tree of eight branches on pages of four.
TREE_ON_PAGES = EngineConfig(
    shape=Shape.eagle(3, 8, 24), page_size=4, worker="v1", max_batch=4, max_context_len=160
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dense", "holey"])
@pytest.mark.parametrize("placement", ["split", "shared"])
def test_eagle1_on_pages_of_4_with_8_branches_runs_on_v1(
    target, heads, reference, slots, layout, placement
):
    """The pool has too few pages for all, so rows are retracted."""
    config = dataclasses.replace(TREE_ON_PAGES, layout=layout, placement=placement, headroom=0)
    drafter = EagleDrafter(heads["specpool/tiny-eagle"])
    with_room = Engine(target, drafter, config=config)
    ledger = with_room.ledger
    least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
    config = dataclasses.replace(config, num_pages=least + 4)
    engine = Engine(target, EagleDrafter(drafter.head), config=config)
    prompts = corpus.prompts(4, 21)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    comparison = Comparison()
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert len(output.token_ids) == 60, output.error
        comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    assert engine.core.scheduler.num_retracted and slots.num_rounds


def test_without_its_trim_a_row_keeps_what_a_round_reserved(target, heads, slots):
    """The guard of the test above."""
    engine = Engine(target, EagleDrafter(heads["specpool/tiny-eagle"]), config=TREE_ON_PAGES)
    scheduler = engine.core.scheduler
    state = scheduler.state
    state.config = dataclasses.replace(state.config, trims_rounds=False)
    with pytest.raises(AssertionError, match="not equal"):
        engine.generate(corpus.prompts(1, 21), SamplingParams(max_new_tokens=20))


def test_v1_holds_less_between_rounds(target, heads):
    held = {}
    for worker in ("v1", "v2"):
        config = dataclasses.replace(TREE_ON_PAGES, worker=worker)
        engine = Engine(target, EagleDrafter(heads["specpool/tiny-eagle"]), config=config)
        engine.submit(corpus.prompts(1, 21)[0], SamplingParams(max_new_tokens=50))
        for _ in range(8):
            engine.turn()
        (row,) = [request.row for request in engine.core.scheduler.requests()]
        r, ledger = int(engine.ledger.resolved_len[row]), engine.ledger
        held[worker] = [int(ledger.allocated_len(g)[row]) - r for g in range(2)]
        while engine.turn():
            pass
    assert all(less < 4 <= more for less, more in zip(held["v1"], held["v2"], strict=True))


def test_forks_pins_and_abort_on_v1(target, heads, reference):
    """A row that shares pages gives back only what is its own."""
    config = dataclasses.replace(TREE_ON_PAGES, busy_check=2, max_batch=6)
    engine = Engine(target, EagleDrafter(heads["specpool/tiny-eagle"]), config=config)
    prompt = corpus.prompts(1, 38)[0]
    pin = engine.pin(prompt[:20])
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, n=3)
    gone = engine.submit(prompt, SamplingParams(max_new_tokens=40))
    for _ in range(3):
        engine.turn()
    engine.abort(gone)
    for output in engine.generate([prompt], params):
        assert output.token_ids == reference.text(prompt, 40)
    engine.unpin(pin)


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", [None, *HEADS])
@pytest.mark.parametrize("host_bytes", [0, 1 << 22])
def test_conversations_on_v1(target, heads, reference, slots, draft, host_bytes):
    """Side by side in few pages: turns are retracted, one is given up, one is cut."""
    drafter = draft and EagleDrafter(heads[draft])
    shape = TREE_ON_PAGES.shape if draft else None
    config = dataclasses.replace(
        TREE_ON_PAGES,
        shape=shape,
        busy_check=2,
        headroom=0,
        max_context_len=136,
        num_pages=44,
        host_bytes=host_bytes,
    )
    engine = Engine(target, drafter or None, config=config)
    texts = corpus.prompts(6, 12)
    said: list[list[int]] = [[], [], []]
    sessions = [engine.open_session() for _ in said]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    for turn in range(3):
        turns = [session.append(texts[turn + i], params) for i, session in enumerate(sessions)]
        if turn == 1:
            next(turns[0])
            turns[0].close()
        for i, each in enumerate(turns):
            if (turn, i) == (1, 0):
                continue
            output = each.output()
            said[i] += texts[turn + i]
            assert output.token_ids == reference.text(said[i], 30), output.error
            said[i] += output.token_ids
        assert [session.tokens for session in sessions] == said
        sessions[1].rewind(len(said[1]) - 9)
        del said[1][-9:]
    assert engine.core.scheduler.num_retracted and slots.num_rounds
    for session in sessions:
        session.close()


def test_v1_is_synchronous():
    with pytest.raises(ConfigError, match="'v1' is synchronous: it needs overlap_depth 0, got 1"):
        EngineConfig(worker="v1", overlap_depth=1)
    with pytest.raises(ConfigError, match="worker must be one of auto, v1, v2, got 'v3'"):
        EngineConfig(worker="v3")
