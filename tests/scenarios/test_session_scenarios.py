"""Regression scenarios about sessions, each on the simulated device or on the shipped pair.

Numbers, laws and guards as in `test_scenarios_claims.py`. Guards are taken away by the planted bugs
of `session_plants.py`, or by a patch in the test.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lab.sim import Arrival, Fault, Scenario, Settings, Simulation, broken_law
from lossless import Comparison, Reference
from session_plants import (
    PLANTS,
    forget_the_last_token,
    give_the_checkpoint_back_with_the_turn,
    keep_a_row_that_runs,
    keep_the_overshoot,
    resume_behind_what_was_rewound,
    retract_before_a_session_is_dropped,
    take_a_partial_turn_for_a_checkpoint,
    trust_a_row_that_was_abandoned,
)
from specpool import Engine, NotReady, RequestOutput, SamplingParams, Session, Shape, SpecpoolError
from specpool.engine.assets import corpus, resolve
from specpool.engine.attention.lanes import Lanes
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter
from specpool.engine.loop.loop import Loop
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models import EagleHead
from specpool.engine.scheduler import request
from specpool.engine.scheduler.conversations import Conversations
from specpool.engine.worker.draft_round import DraftRound
from specpool.engine.worker.row_state import RowState

HEADS = {"eagle": "specpool/tiny-eagle", "eagle3": "specpool/tiny-eagle3"}
PROMPTS = corpus.prompts(6, 60)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


# --- on the simulated device ---


def says(number: int, new: int, most: int, *, session: int = 1, **options) -> Arrival:
    """A turn: `new` tokens, and at most `most` in answer."""
    options = {"turn": 0, "accept_rate": 1.0, **options}
    return Arrival(
        request_id=number, prompt_len=new, max_len=new + most, session=session, **options
    )


def alone(number: int, prompt_len: int, max_len: int, **options) -> Arrival:
    options = {"turn": 0, **options}
    return Arrival(request_id=number, prompt_len=prompt_len, max_len=max_len, **options)


def scene(*arrivals: Arrival, faults: tuple[Fault, ...] = (), **settings) -> Scenario:
    options = {"page_sizes": (4,), "num_pages": (24,), "max_batch": 3, "max_sessions": 3}
    return Scenario(0, Settings(**{"max_context_len": 48, **options, **settings}), arrivals, faults)


def holds(monkeypatch, plant, scenarios: list[Scenario]) -> list[Simulation]:
    """The law holds in all of them; with the bug planted, one of them at least breaks it."""
    simulations = []
    for scenario in scenarios:
        simulations.append(Simulation(scenario))
        simulations[-1].run()
    plant(monkeypatch)
    found = next(filter(None, map(broken_law, scenarios)))
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        raise AssertionError(found)
    return simulations


def test_scenario_29_a_round_under_a_pool_full_of_sessions(monkeypatch):
    """atlas#1114.

    Law: Pages of idle sessions are taken before a request waits or is retracted.
    """
    full = scene(
        says(1, 30, 10, pause=500),
        says(2, 30, 10, session=2, turn=60, pause=500),
        alone(3, 4, 46, turn=120),
        says(4, 2, 2),
        says(5, 2, 2, session=2),
        num_pages=(22,),
    )
    (simulation,) = holds(monkeypatch, retract_before_a_session_is_dropped, [full])
    assert simulation.tally.dropped_sessions and not simulation.tally.retractions


@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_32_a_session_resumes_behind_its_prefix(monkeypatch, depth):
    """sgl#22862.

    Law: Slots past the kept prefix are freed before anything new is written.
    """
    turns = [says(1, 20, 9), says(2, 3, 9, rewind=0.3), says(3, 9, 12, rewind=0.7)]
    options = {"shapes": ((3, 1, 4),), "overlap_depth": depth}
    holds(monkeypatch, resume_behind_what_was_rewound, [scene(*turns, **options)])


def test_scenario_33_a_turn_ends_with_overshoot(monkeypatch):
    """sgl#22897, sgl#22900: 0 to 7 tokens beyond the end.

    Law: A session keeps the KV of the tokens that its client has, and no other.
    """
    scenarios = [
        scene(
            says(1, 5, 2 + most, shape=1),
            says(2, 3, 9, shape=1),
            shapes=((7, 1, 8),),
            overlap_depth=depth,
        )
        for depth in (0, 1)
        for most in range(8)
    ]
    holds(monkeypatch, keep_the_overshoot, scenarios)


@pytest.mark.parametrize(
    "plant", [take_a_partial_turn_for_a_checkpoint, give_the_checkpoint_back_with_the_turn]
)
def test_scenario_34_a_turn_is_aborted(monkeypatch, plant):
    """sgl#22273, #22790, #40252: before its first step, in its prefill, in its rounds.

    Law: An abort goes back to the end of the last turn, with exactly its tokens and KV.
    """
    scenarios = [
        scene(
            says(1, 9, 6, shape=1),
            says(2, 20, 9, shape=1, abort_after=after),
            says(3, 2, 3, shape=1),
            alone(4, 3, 40),
            shapes=((3, 1, 4),),
            overlap_depth=depth,
            prefill_tokens=8,
        )
        for depth in (0, 1)
        for after in range(7)
    ]
    simulations = holds(monkeypatch, plant, scenarios)
    assert sum(simulation.tally.aborts for simulation in simulations) > 7


@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_35_a_turn_is_retracted(monkeypatch, depth):
    """sgl#40252.

    Law: A partial turn is not a checkpoint: the turn runs again from the end of the last one.
    """
    tight = [
        scene(
            alone(1, 4, 44),
            says(2, 6, 3),
            says(3, 2, 30, abort_after=after),
            says(4, 1, 2),
            num_pages=(14,),
            max_batch=2,
            overlap_depth=depth,
        )
        for after in (30, 36, 42, 48, 99)
    ]
    simulations = holds(monkeypatch, take_a_partial_turn_for_a_checkpoint, tight)
    assert simulations[-1].tally.retractions and simulations[-1].tally.turns == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_scenario_36_a_row_is_one_owners(monkeypatch, depth):
    """sgl#22753.

    Law: A row belongs to its session or to its turn, never to both, also after abort and
    retraction.
    """
    turns = [says(1, 9, 6), says(2, 3, 20, abort_after=4), says(3, 2, 3)]
    other = scene(*turns, alone(4, 3, 40), num_pages=(14,), overlap_depth=depth)
    holds(monkeypatch, keep_a_row_that_runs, [other])


def test_scenario_37_a_turn_ends_with_a_round_in_flight(monkeypatch):
    """sgl#22651: exactly at max_new, in overlap.

    Law: The next turn's prefix is the prompt and the tokens that the client got.
    """
    scenarios = [
        scene(says(1, 5, most), says(2, 1, 4), alone(3, 2, 30), overlap_depth=1)
        for most in range(1, 6)
    ]
    holds(monkeypatch, forget_the_last_token, scenarios)


def test_scenario_69_a_round_fails_that_wrote_a_kept_root(monkeypatch):
    """Law: A session keeps no token that was never written."""
    turns = [says(1, 5, 7, stop_at=6, pause=6), says(2, 3, 6)]
    late = scene(*turns, alone(3, 3, 30), faults=(Fault(3, "result"),), overlap_depth=1)
    holds(monkeypatch, trust_a_row_that_was_abandoned, [late])


# --- on the shipped pair ---


@pytest.fixture(scope="module")
def heads(target) -> dict[str, EagleHead]:
    return {
        n: EagleDrafter.from_pretrained(resolve(path), target).head for n, path in HEADS.items()
    }


def build(target, head: EagleHead | None = None, **options) -> Engine:
    options = {"max_context_len": 512, "page_size": 4, "busy_check": 2, **options}
    drafter = None if head is None else EagleDrafter(head)
    return Engine(target, drafter, config=EngineConfig(**options))


def speaks_as_alone(reference: Reference, outputs: list[RequestOutput]) -> None:
    comparison = Comparison()
    for output in outputs:
        assert output.error is None and output.finish_reason != "abort"
        comparison.add(reference, output.prompt_ids, output.token_ids)


def test_scenario_54_a_turn_is_cut_with_a_round_in_flight(target, heads, reference, monkeypatch):
    """Law: The device's length is set in stream order before the row's next forward."""

    def talk() -> list[RequestOutput]:
        outputs = []
        with_rounds = build(target, heads["eagle"], overlap_depth=1, prefill_tokens=16)
        with with_rounds.open_session() as session:
            outputs.append(session.append(PROMPTS[0], PARAMS).output())
            for i in range(1, 4):
                turn = session.append(PROMPTS[i], PARAMS)
                for _ in range(i):
                    next(turn)
                turn.close()
                outputs.append(session.append(PROMPTS[i][:5], PARAMS).output())
        return outputs

    speaks_as_alone(reference, talk())
    put = RowState.put

    def put_rounds_alone(self, lanes, seq_lens, root_tokens):
        known = self.seq_lens.index_select(0, lanes.index)
        is_reset = isinstance(lanes.widths, int) or not known.any()
        put(self, lanes, seq_lens if is_reset else known, root_tokens)

    def lanes_as_on_device(self, rows, lo, hi):
        on_device = torch.from_numpy(rows.copy())
        return Lanes(on_device, SeqLens(self.seq_lens.index_select(0, on_device), lo, hi), 1)

    monkeypatch.setattr(RowState, "put", put_rounds_alone)
    monkeypatch.setattr(RowState, "lanes", lanes_as_on_device)
    with pytest.raises((AssertionError, SpecpoolError)):
        speaks_as_alone(reference, talk())


def test_scenario_56_a_fork_with_a_round_in_flight(target, reference, monkeypatch):
    """Law: A fork is refused while a step may still write."""
    engine = build(target, overlap_depth=1, prefix_cache=False)
    params = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(259)))
    stops = engine.open_session()
    other = engine.submit(PROMPTS[1], PARAMS)
    turn = stops.append(PROMPTS[0], params)  # its first token ends it: a round is in flight
    while stops.is_busy:
        engine.turn()
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "drain", lambda self: None)
        with pytest.raises(NotReady):
            engine.ledger.fork(stops._conversation.row)
        early = stops.fork()
        assert early.append([5], PARAMS).output().num_reused == 0  # it shares nothing
        early.close()
    copy = stops.fork()
    engine.abort(other)
    turn.close()
    outputs = [each.append(PROMPTS[2][:3], PARAMS).output() for each in (stops, copy)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].num_reused >= len(PROMPTS[0]) - 1
    speaks_as_alone(reference, outputs)
    stops.close(), copy.close()


@pytest.mark.parametrize("length", [61, 63, 64])
def test_scenario_56_the_parent_rewrites_the_page_of_a_fork(target, reference, monkeypatch, length):
    """Law: A partly filled page is copied at once, so the child's bytes do not change."""

    def texts() -> list[RequestOutput]:
        engine = build(target, page_size=16, prefix_cache=False)
        parent = engine.open_session()
        parent.append((PROMPTS[0] + PROMPTS[1])[: length - 4], PARAMS).output()
        parent.rewind(length)
        child = parent.fork()
        parent.rewind(length - 9)
        outputs = [parent.append(PROMPTS[2], PARAMS).output()]
        outputs.append(child.append(PROMPTS[3][:1], PARAMS).output())
        parent.close(), child.close()
        return outputs

    speaks_as_alone(reference, texts())
    if length % 16:
        monkeypatch.setattr(KVCache, "copy_pages", lambda self, copies: None)
        with pytest.raises(AssertionError):
            speaks_as_alone(reference, texts())


# --- what others have stumbled over, by its name ---


def several_turns(session: Session, *, num_turns: int, new: int, seed: int = 0, **params) -> list:
    rng = random.Random(seed)
    text = [token for prompt in corpus.prompts(6, 60) for token in prompt]
    own = SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **params})
    return [
        session.append(text[(at := rng.randint(0, 100)) : at + new], own).output()
        for _ in range(num_turns)
    ]


def test_several_turns_with_pages_of_512(target, heads, reference, monkeypatch):
    """KV is kept by tokens, not by pages, and overshoot is not kept."""

    def talk() -> list[RequestOutput]:
        engine = build(
            target,
            heads["eagle"],
            shape=Shape.eagle(7, 1, 8),
            page_size=512,
            max_context_len=1024,
            overlap_depth=1,
        )
        with engine.open_session() as session:
            return several_turns(session, num_turns=8, new=9, max_new_tokens=24)

    outputs = talk()
    assert all(b.num_reused >= len(a.prompt_ids) for a, b in itertools.pairwise(outputs))
    speaks_as_alone(reference, outputs)
    keep = Conversations.keep
    monkeypatch.setattr(Conversations, "keep", lambda self, c, row, n: keep(self, c, row, 512))
    monkeypatch.setattr(request, "common_len", lambda a, b: len(b))
    with pytest.raises((AssertionError, SpecpoolError)):
        speaks_as_alone(reference, talk())


def test_long_prompts_with_pages_of_256(target, heads, reference, monkeypatch):
    """In chunks that end inside pages; two sessions at once, and one that is retracted."""

    def talk(busy_check: int) -> list[RequestOutput]:
        engine = build(
            target,
            heads["eagle3"],
            page_size=256,
            max_context_len=512,
            prefill_tokens=100,
            num_pages=3,
            headroom=0,
            max_sessions=1,
            busy_check=busy_check,
        )
        text = [token for prompt in corpus.prompts(9, 60) for token in prompt]
        outputs: list[RequestOutput] = []
        sessions = [engine.open_session() for _ in range(2)]
        for i, session in enumerate(sessions):
            engine.submit(
                text[i : i + 240],
                SamplingParams(max_new_tokens=40, ignore_eos=True),
                session=session,
                on_item=lambda _, item: (
                    outputs.append(item) if isinstance(item, RequestOutput) else None
                ),
            )
        while engine.turn():
            pass
        assert engine.stats().retracted_ct > 0
        outputs += [each.append(text[9:49], PARAMS).output() for each in sessions]
        for session in sessions:
            session.close()
        return outputs

    speaks_as_alone(reference, talk(2))
    delta = KVCache.apply_delta

    def lose_second_columns(self, step):
        delta(self, step)
        for table in self.tables:
            table[:, 1] = table[:, 0]

    monkeypatch.setattr(KVCache, "apply_delta", lose_second_columns)
    with pytest.raises(AssertionError):
        speaks_as_alone(reference, talk(0))


@pytest.mark.parametrize("layout", ["dense", "holey"])
def test_eagle_3_with_pages_of_64_and_8_branches(target, heads, reference, monkeypatch, layout):
    """P > 1 with K > 1 is not routed to another worker."""

    def talk() -> list[RequestOutput]:
        engine = build(
            target,
            heads["eagle3"],
            shape=Shape.eagle(3, 8, 24),
            page_size=64,
            layout=layout,
            overlap_depth=1,
        )
        with engine.open_session() as session:
            return several_turns(session, num_turns=4, new=30)

    outputs = talk()
    speaks_as_alone(reference, outputs)
    assert sum(o.accept_len for o in outputs) / len(outputs) > 1.2
    monkeypatch.setattr(DraftRound, "_compact", lambda self, part, verdict: None)
    with pytest.raises(AssertionError):
        speaks_as_alone(reference, talk())
