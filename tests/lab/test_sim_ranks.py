"""Simulated ranks: no law breaks without a bug, and bugs of one rank are found."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from cli_kit import call
from lab.sim.broken_law import BrokenLaw
from lab.sim.ranks import FAULTS, RanksSimulation, RanksTally, SimRank
from specpool.engine.ranks.journal import RankJournal
from specpool.errors import CorruptState, RankError

SEEDS = 12


@pytest.mark.parametrize("first", range(0, SEEDS, 4))
def test_ranks_never_part_in_silence(first: int) -> None:
    tally = RanksTally()
    for seed in range(first, first + 4):
        tally.add(RanksSimulation(seed, turns=80).run())
    assert tally.rank_rounds > 500
    assert tally.requests > 30


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_of_a_record_stops_its_rank_alone(kind: Any) -> None:
    simulation = RanksSimulation(3, turns=40)
    simulation.fault = kind, 2, 11
    simulation.run()
    first, second, third, fourth = simulation.ranks
    assert isinstance(third.stopped, RankError)
    assert second.stopped is None and fourth.stopped is None
    assert second.states == first.states


def test_the_command_simulates_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "lab", "sim", "--ranks", "3", "--rounds", "500")
    assert code == 0 and "sim: seed 0, 3 ranks" in out


# --- bugs of one rank, each found as an error at the next record after it shows -------------------


def _on_rank_2(plant: Callable[[SimRank], None]) -> Callable[[SimRank], None]:
    return lambda rank: plant(rank) if rank.rank == 2 else None


def skip_an_abort(rank: SimRank) -> None:
    rank.follower._calls["abort"] = lambda number: None


def skip_a_close(rank: SimRank) -> None:
    rank.follower._calls["close"] = lambda number: None


def cut_one_token_less(rank: SimRank) -> None:
    cut = rank.follower._calls["cut"]
    rank.follower._calls["cut"] = lambda number, length: cut(number, max(length - 1, 0))


def forget_no_text(rank: SimRank) -> None:
    rank.follower._calls["forget"] = lambda salt: None


def admit_by_its_own_clock(rank: SimRank) -> None:
    admit = rank.scheduler._admission.admit
    rank.scheduler._admission.admit = (  # type: ignore[method-assign]
        lambda: admit() if rank.seconds % 1 < 0.8 else None
    )


def retract_another(rank: SimRank) -> None:
    make_room, state = rank.scheduler._reclaim.make_room, rank.scheduler.state

    def with_the_first() -> None:
        running = state.running
        state.running = _Reversed(running)  # type: ignore[assignment]
        make_room()
        state.running = running

    rank.scheduler._reclaim.make_room = with_the_first  # type: ignore[method-assign]


class _Reversed:
    def __init__(self, running: Any) -> None:
        self._running = running

    @property
    def requests(self) -> dict[int, Any]:
        return dict(reversed(self._running.requests.items()))

    def __len__(self) -> int:
        return len(self._running)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running, name)


def chunk_by_its_own_length(rank: SimRank) -> None:
    state = rank.scheduler.state
    half = max(state.config.prefill_tokens // 2, 1)
    state.config = dataclasses.replace(state.config, prefill_tokens=half)


def order_by_chance(rank: SimRank) -> None:
    count = itertools.count()
    submit = rank.scheduler.submit

    def by_chance(request: Any) -> None:
        request.priority = next(count) % 3
        submit(request)

    rank.scheduler.submit = by_chance  # type: ignore[method-assign]


def draw_another_token(rank: SimRank) -> None:
    result, count = rank.journal.result, itertools.count(1)

    def other(step: int, given: Any) -> None:
        if next(count) % 20 == 0 and given.tokens and given.tokens[0]:
            given.tokens[0][-1] ^= 1
        result(step, given)

    rank.journal.result = other  # type: ignore[method-assign]


def release_a_fence_early(rank: SimRank) -> None:
    take_over = rank.scheduler.take_over

    def twice(step: Any, result: Any) -> None:
        take_over(step, result)
        row = step.plan.rows[0]
        if rank.seconds % 1 < 0.2 and rank.ledger.is_live(int(row)):
            rank.ledger.trim(int(row), int(rank.ledger.resolved_len[row]))

    rank.scheduler.take_over = twice  # type: ignore[method-assign]


def choose_by_its_own_clock(rank: SimRank) -> None:
    tell = rank.journal.set_time
    rank.follower._calls["time"] = lambda now, seconds: tell(rank.seconds, seconds)


def measure_by_its_own_clock(rank: SimRank) -> None:
    tell = rank.journal.set_time
    rank.follower._calls["time"] = lambda now, seconds: tell(
        now, [each for _, each in rank.journal._measured]
    )


PLANTS = [
    skip_an_abort,
    skip_a_close,
    cut_one_token_less,
    forget_no_text,
    admit_by_its_own_clock,
    retract_another,
    chunk_by_its_own_length,
    order_by_chance,
    draw_another_token,
    release_a_fence_early,
    choose_by_its_own_clock,
    measure_by_its_own_clock,
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_bug_of_one_rank_is_found(plant: Callable[[SimRank], None]) -> None:
    for seed in range(40):
        simulation = RanksSimulation(seed, 3, turns=60, plant=_on_rank_2(plant))
        simulation.fault = None
        with contextlib.suppress(BrokenLaw):  # rank 2 stops without a fault of its records
            simulation.run()
        _, second, third = simulation.ranks
        assert second.stopped is None
        if third.stopped is not None:
            assert isinstance(third.stopped, CorruptState | RankError)
            first = simulation.ranks[0]
            # At the record before the last one that it has applied, it was where rank 0 was.
            last = len(third.states) - 1
            assert third.states[: max(last - 1, 0)] == first.states[: max(last - 1, 0)]
            return
    raise AssertionError("not found in 40 scenarios")


def test_without_the_comparison_the_law_finds_the_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankJournal, "_compare", lambda self, record: None)
    found = []
    for seed in range(20):
        try:
            RanksSimulation(seed, 3, turns=60, plant=_on_rank_2(skip_an_abort)).run()
        except BrokenLaw as error:
            found.append(str(error))
    assert any("has parted from rank 0" in each for each in found)


def test_the_scheduler_has_no_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock skew: ranks whose `perf_counter` differ still agree, because times decide nothing."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock) * 7919 % 1009))
    RanksSimulation(5, turns=60).run()
