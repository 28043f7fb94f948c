"""Laws of scheduler and ledger on a simulated device; each law is seen to fail if broken."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys

import pytest

import session_plants
import sim_plants
from cli_kit import call
from lab.counts import SEEDS
from lab.sim import (
    Arrival,
    Fault,
    Scenario,
    Settings,
    Simulation,
    Tally,
    broken_law,
    scenario,
    shrink,
)
from lab.sim.simulation import _Interrupted
from sim_plants import give_tokens_to_dropped_lanes, lie, overlook_stop_tokens


@pytest.mark.parametrize(
    ("rounds", "shown"),
    [("3e3", "3,000"), pytest.param("2e4", "20,000", marks=pytest.mark.full)],
)
def test_thousands_of_rounds_break_no_law(capsys, rounds, shown):
    code, out, _ = call(capsys, "lab", "sim", "--rounds", rounds, "--check", "2", "--seed", "4")
    assert code == 0 and shown in out


def test_a_hundred_turns_of_sessions_break_no_law(capsys):
    code, out, _ = call(capsys, "lab", "sim", "--turns", "100", "--seed", "3")
    assert code == 0
    turns = re.search(r"turns\s+│\s+([\d,]+)", out)
    assert turns and int(turns[1].replace(",", "")) >= 100


@pytest.mark.full
def test_everything_happens():
    tally, seen = Tally(), set()
    wanted = {1, 3, 4, 16, 64, "split", "shared", "dense", "holey", "exact", "double_buffer"}
    wanted |= {"D=0", "D=1", "reads True", "launch", "result", "not_finite", "interrupt"}
    wanted |= {"everybody is retracted", "window", "ema", "dice", "forgets", "salt"}
    wanted |= {"sink False", "sink True"}  # of a group of its own, of the draft group
    for seed in range(60):  # as many as it takes
        counts = [
            *(tally.aborts, tally.device_errors, tally.retractions),
            *(tally.forks, tally.pins, tally.dropped_pins, tally.stop_strings),
            *(tally.turns, tally.rewinds, tally.dropped_sessions),
            *(tally.offloads, tally.reloads),
            *(tally.reused // 100, tally.evictions, tally.switches // 10),
        ]
        rare = tally.session_forks, tally.failed_copies
        if seen >= wanted and min(counts) > 10 and all(rare):
            return
        simulation = Simulation(scenario(seed), 0)
        tally.add(simulation.run())
        settings = simulation.scenario.settings
        seen |= {*settings.page_sizes, settings.placement, settings.layout, settings.policy}
        seen |= {f"D={settings.overlap_depth}", f"reads {settings.reads_tokens}"}
        seen |= {"window"} if settings.window else set()
        seen |= {f"sink {settings.drafts_slide}"} if settings.sink else set()
        seen |= {"forgets"} if settings.forgets else set()
        seen |= {"salt"} if any(arrival.salt for arrival in simulation.scenario.arrivals) else set()
        seen.add(settings.adapts)
        seen |= {fault.kind for fault in simulation.scenario.faults}
        if simulation.tally.retractions > simulation.tally.requests / 4:
            seen.add("everybody is retracted")
    raise AssertionError((wanted - seen, tally))


@pytest.mark.parametrize(
    "seeds", [[5, 8], pytest.param([*range(5), 6, 7, *range(9, 12)], marks=pytest.mark.full)]
)
def test_the_check_level_changes_nothing_that_happens(seeds):
    for seed in seeds:
        tallies = [Simulation(scenario(seed), check).run() for check in (0, 1, 2)]
        assert tallies[0] == tallies[1] == tallies[2]


def test_a_simulation_needs_no_torch():
    code = "import lab.sim, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--check", "3"], "--check must be an integer in [0, 2], got 3"),
        (["--rounds", "0"], "--rounds must be a whole number in [1, 1e12], got 0"),
        (["--rounds", "nan"], "--rounds must be a whole number in [1, 1e12], got nan"),
        (["--turns", "0.5"], "--turns must be a whole number in [1, 1e12], got 0.5"),
        (["--seed", "-1"], "--seed must be an integer in [0, 2147483647], got -1"),
        (["--ranks", "65"], "--ranks must be an integer in [2, 64], got 65"),
        (["--ranks", "2", "--turns", "9"], "--turns runs one process: leave --ranks out"),
        (["--ranks", "2", "--check", "1"], "--ranks checks all laws: leave --check out"),
    ],
)
def test_a_bad_option_is_one_line(capsys, args, says):
    code, _, err = call(capsys, "lab", "sim", *args)
    assert (code, err) == (2, f"error: {says}\n")


# --- bugs that the simulation has found, as it shrank them ---


def test_pages_kept_for_a_row_that_ended_are_for_those_who_wait():
    settings = Settings(
        page_sizes=(4, 4),
        num_pages=(12, 19),
        layout="holey",
        shapes=((5, 8, 32),),
        overlap_depth=1,
        max_batch=7,
        prefill_tokens=1024,
        max_context_len=8,
    )
    arrivals = (
        Arrival(request_id=127, turn=0, prompt_len=3, max_len=8, shape=1, accept_rate=0.5),
        Arrival(request_id=128, turn=1, prompt_len=4, max_len=5, accept_rate=1.0),
        Arrival(request_id=150, turn=186, prompt_len=1, max_len=2, accept_rate=0.5),
    )
    assert broken_law(Scenario(0, settings, arrivals)) is None


TIGHT = Scenario(  # rounds of 7 and 8 starve beside each other
    0,
    Settings(
        page_sizes=(3,),
        num_pages=(36,),
        placement="shared",
        layout="holey",
        shapes=((5, 8, 32), (7, 1, 8)),
        page_fencing=False,
        max_batch=3,
        prefill_tokens=5,
        max_context_len=40,
    ),
    (
        Arrival(request_id=3, turn=0, prompt_len=4, max_len=13, accept_rate=0.5),
        Arrival(request_id=6, turn=0, prompt_len=14, max_len=28, shape=2),
        Arrival(request_id=7, turn=0, prompt_len=4, max_len=14, shape=1),
        Arrival(request_id=8, turn=0, prompt_len=2, max_len=7, accept_rate=0.5),
    ),
)


def test_a_retracted_request_does_not_take_back_what_it_was_retracted_for():
    assert broken_law(TIGHT) is None


def test_a_page_that_waits_to_be_copied_is_not_room_for_another_request():
    settings = Settings(
        page_sizes=(4,), num_pages=(3,), max_context_len=8, overlap_depth=1, prefix_cache=True
    )
    arrivals = (
        Arrival(request_id=26, turn=0, prompt_len=4, max_len=5, origins=((3, 3),)),
        Arrival(request_id=27, turn=0, prompt_len=7, max_len=8, origins=((3, 1),)),
        Arrival(request_id=28, turn=0, prompt_len=3, max_len=4, origins=((3, 3),)),
    )
    assert broken_law(Scenario(0, settings, arrivals)) is None


def test_a_pin_gives_way_before_a_hit_is_given_up():
    settings = Settings(
        page_sizes=(16,), num_pages=(9,), max_context_len=100, prefill_tokens=32, prefix_cache=True
    )
    arrivals = (
        Arrival(request_id=15, turn=0, prompt_len=94, max_len=95, is_pin=True),
        Arrival(request_id=17, turn=0, prompt_len=60, max_len=61, origins=((3, 60),), is_pin=True),
        Arrival(request_id=18, turn=0, prompt_len=88, max_len=89, origins=((3, 86),)),
    )
    assert broken_law(Scenario(0, settings, arrivals)) is None


def test_an_interrupt_right_behind_a_retraction_leaks_nothing(monkeypatch):
    interrupts = []

    def retract(self, row):
        self._ledger.retract(row)
        if not interrupts:
            interrupts.append(row)
            raise _Interrupted

    lie(monkeypatch, retract=retract)
    assert broken_law(TIGHT) is None
    assert interrupts


@pytest.mark.parametrize("drafts_slide", [False, True])
def test_a_sink_that_is_not_kept_is_found(monkeypatch, drafts_slide):
    """The device reads the sink; a ledger that gives its pages up breaks a law."""
    settings = {
        "page_sizes": (4, 4),
        "num_pages": (20, 20),
        "shapes": ((3, 1, 4),) if drafts_slide else (),
        "window": 5,
        "sink": 3,
        "drafts_slide": drafts_slide,
    }
    request = Arrival(request_id=1, turn=0, prompt_len=9, max_len=30, shape=int(drafts_slide))
    assert broken_law(small(request, **settings)) is None
    ledger = Settings.ledger
    monkeypatch.setattr(Settings, "ledger", lambda s: ledger(dataclasses.replace(s, sink=0)))
    group = "group1: position 0 has no page"
    assert group in str(broken_law(small(request, **settings)))


def small(*arrivals: Arrival, **settings) -> Scenario:
    """Pools with pages for two rows."""
    options = {"page_sizes": (4,), "num_pages": (20,), "max_batch": 3, "max_context_len": 40}
    return Scenario(0, Settings(**{**options, **settings}), arrivals)


def sample(first: Arrival, request_id: int, **changes) -> Arrival:
    origins = (*first.origins, (first.request_id, first.prompt_len))
    changes = {"sample_of": first.request_id, "origins": origins, **changes}
    return dataclasses.replace(first, request_id=request_id, **changes)


FIRST = Arrival(request_id=1, turn=0, prompt_len=9, max_len=20)


@pytest.mark.parametrize("num_pages", [12, 20])
@pytest.mark.parametrize("prefill_tokens", [1, 4, 8, 64])
@pytest.mark.parametrize("depth", [0, 1])
def test_samples_of_a_prompt_share_it_however_it_is_chunked(depth, prefill_tokens, num_pages):
    samples = [sample(FIRST, i, stop_at=9 + i) for i in (2, 3)]
    options = {"overlap_depth": depth, "prefill_tokens": prefill_tokens, "num_pages": (num_pages,)}
    tally = Simulation(small(FIRST, *samples, **options)).run()
    assert tally.forks == 2 and tally.tokens == 11 + 3 + 4


def test_a_sample_that_was_aborted_is_not_forked():
    gone = sample(FIRST, 2, abort_after=2)
    assert broken_law(small(FIRST, gone, prefill_tokens=1)) is None


PIN = Arrival(request_id=1, turn=0, prompt_len=8, max_len=9, is_pin=True)


@pytest.mark.parametrize("prompt_len", [3, 8, 9, 12])
@pytest.mark.parametrize("depth", [0, 1])
def test_samples_of_a_prompt_that_is_pinned(depth, prompt_len):
    """The pin has all but the last token, so no prefill of the first sample ends before it."""
    origins = ((1, min(prompt_len, 8)),)
    first = Arrival(request_id=2, turn=9, prompt_len=prompt_len, max_len=20, origins=origins)
    tally = Simulation(small(PIN, first, sample(first, 3), overlap_depth=depth)).run()
    assert tally.pins == 1 and tally.forks == (prompt_len > 9)


def test_a_pool_full_of_pins_makes_room_for_who_waits():
    """No request runs, and the only candidate has no page for the copy of its pin's tail."""
    pins = [dataclasses.replace(PIN, request_id=i, turn=9 * i, prompt_len=4) for i in (1, 2)]
    pins = [dataclasses.replace(pin, max_len=5) for pin in pins]
    late = Arrival(request_id=3, turn=30, prompt_len=4, max_len=6, origins=((1, 4),))
    tight = {"num_pages": (2,), "max_batch": 2, "max_context_len": 8}
    assert Simulation(small(*pins, late, **tight)).run().dropped_pins == 2


def test_a_fork_whose_copy_holds_the_last_page_begins_anew():
    """The copy rides on the fork's own next step, which needs the page that the copy holds."""
    says = Arrival(request_id=1, turn=0, prompt_len=1, max_len=2, session=8, pause=10)
    fork = dataclasses.replace(
        says, request_id=2, turn=2, prompt_len=3, max_len=4, session=13, fork_of=8
    )
    later = dataclasses.replace(says, request_id=10, turn=8, pause=1)
    tight = {"num_pages": (2,), "max_sessions": 16, "max_context_len": 8}
    tally = Simulation(small(says, fork, later, policy="double_buffer", **tight)).run()
    assert tally.session_forks == 1 and tally.retractions == 1 and tally.turns == 3


def test_a_retracted_fork_at_its_checkpoint_gives_its_pages_back():
    """Otherwise it would return at once, and the one before it would never find a page."""
    found = scenario(7 * SEEDS + 1659, talks_only=True)
    assert broken_law(found) is None


VERBS = ["admit", "fork", "pin_prefix", "release_prefix", "finish", "abort", "launch", "resolve"]


@pytest.mark.parametrize("verb", [*VERBS, "retract", "prepare_extend", "prepare_decode"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_at_a_shared_row_leaks_nothing(monkeypatch, verb, is_done):
    """Before or after any of the ledger's verbs."""
    calls, last = [], 1 if verb == "retract" else 2

    def interrupted(self, *args, **options):
        calls.append(verb)
        if len(calls) == last and not is_done:
            raise _Interrupted
        result = getattr(self._ledger, verb)(*args, **options)
        if len(calls) == last:
            raise _Interrupted
        return result

    pins = [dataclasses.replace(PIN, request_id=i, turn=i, unpin_after=30) for i in (1, 2)]
    first = Arrival(request_id=3, turn=12, prompt_len=12, max_len=40, origins=((1, 8),))
    samples = [sample(first, 4), sample(first, 5, abort_after=5)]
    others = [dataclasses.replace(first, request_id=i, abort_after=i) for i in (6, 7)]
    lie(monkeypatch, **{verb: interrupted})
    found = broken_law(small(*pins, first, *samples, *others, num_pages=(11,), max_batch=5))
    assert found is None
    assert len(calls) >= last


# A session between two turns while a step fails that its row was in, and while Ctrl-C comes.
SAYS = Arrival(request_id=1, turn=0, prompt_len=5, max_len=12, stop_at=6, session=1, pause=6)
FAULTY = [
    dataclasses.replace(
        small(
            SAYS,
            Arrival(request_id=2, turn=0, prompt_len=3, max_len=9, session=1),
            Arrival(request_id=3, turn=0, prompt_len=3, max_len=30),
            overlap_depth=1,
            max_sessions=2,
        ),
        faults=(fault,),
    )
    for fault in (Fault(3, "result"), Fault(6, "interrupt"))
]


# Two rows do not fit to their ends: the second one waits on the host, and is given up there.
ON_HOST = small(
    Arrival(request_id=1, turn=0, prompt_len=4, max_len=40),
    Arrival(request_id=2, turn=0, prompt_len=4, max_len=40, abort_after=30),
    num_pages=(11,),
    host_pages=(20,),
)


def test_a_request_that_waits_on_the_host_is_aborted():
    tally = Simulation(ON_HOST).run()
    assert (tally.offloads, tally.reloads, tally.aborts) == (1, 0, 1)


@pytest.mark.parametrize("faulty", FAULTY)
def test_a_fault_between_turns_takes_no_more_than_its_own(faulty):
    simulation = Simulation(faulty, keeps_trace=True)
    tally = simulation.run()
    assert tally.turns == 2
    lost = faulty.faults[0].kind == "result"  # the step wrote the root that the session kept
    assert tally.dropped_sessions == lost


# --- planted bugs: each is found ---

PLANTS = sim_plants.PLANTS | session_plants.PLANTS


#: Hundreds of scenarios pass before one shows it.
SLOW = {"take_the_shortest_pin", "take_a_pin_for_what_it_is_not"}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, marks=[pytest.mark.full] * (plant.__name__ in SLOW), id=plant.__name__)
        for plant in PLANTS
    ],
)
def test_a_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    scenarios = itertools.chain([TIGHT, ON_HOST, *FAULTY], map(scenario, range(400)))
    found = next(filter(None, map(broken_law, scenarios)))
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        raise AssertionError(found)


def test_what_is_found_is_printed_and_shrunk(monkeypatch, capsys):
    overlook_stop_tokens(monkeypatch)
    code, out, _ = call(capsys, "lab", "sim", "--seed", "3")
    assert code == 1
    found = re.search(r"BROKEN with seed (\d+)", out)
    assert found and int(found[1]) // SEEDS == 3
    assert out.count("Arrival(") == 1


def test_shrinking_keeps_a_broken_law_and_takes_away_the_rest(monkeypatch):
    give_tokens_to_dropped_lanes(monkeypatch)
    seed, message = next(
        (seed, found) for seed in range(100) if (found := broken_law(scenario(seed)))
    )
    failure = shrink(scenario(seed), message, seconds=5)
    assert len(failure.shrunk.arrivals) <= 2
    assert broken_law(failure.shrunk) == failure.trace[-1]
    assert "went on after its end" in str(failure)


def test_shrinking_has_its_time(monkeypatch):
    found = scenario(0)
    failure = shrink(found, "a law", seconds=0.0)
    assert failure.shrunk == found
