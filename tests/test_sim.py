"""Laws of scheduler and ledger on a simulated device, and that each is found when broken."""

from __future__ import annotations

import bisect
import subprocess
import sys

import numpy as np
import pytest

from specpool.cli import main
from specpool.cli.sim import SEEDS
from specpool.request import Request
from specpool.scheduler import Scheduler
from specpool.sim import (
    Arrival,
    Scenario,
    Settings,
    Simulation,
    Tally,
    broken_law,
    scenario,
    shrink,
)
from specpool.sim.simulation import _Interrupted


def sim(monkeypatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["specpool", "sim", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_twenty_thousand_rounds_break_no_law(monkeypatch, capsys):
    assert sim(monkeypatch, "--rounds", "2e4", "--check", "2", "--seed", "4") == 0
    assert "20,000" in capsys.readouterr().out


def test_everything_happens():
    tally, seen = Tally(), set()
    for seed in range(60):
        simulation = Simulation(scenario(seed), 0)
        tally.add(simulation.run())
        settings = simulation.scenario.settings
        seen |= {*settings.page_sizes, settings.placement, settings.layout, settings.policy}
        seen |= {f"D={settings.overlap_depth}", f"reads {settings.reads_tokens}"}
        seen |= {fault.kind for fault in simulation.scenario.faults}
        if simulation.tally.retractions > simulation.tally.requests / 4:
            seen.add("everybody is retracted")
    assert seen >= {1, 3, 4, 16, 64, "split", "shared", "dense", "holey", "exact", "double_buffer"}
    assert seen >= {"D=0", "D=1", "reads True", "launch", "result", "not_finite", "interrupt"}
    assert "everybody is retracted" in seen
    assert min(tally.aborts, tally.device_errors, tally.retractions) > 10


def test_the_check_level_changes_nothing_that_happens():
    for seed in range(12):
        tallies = [Simulation(scenario(seed), check).run() for check in (0, 1, 2)]
        assert tallies[0] == tallies[1] == tallies[2]


def test_a_simulation_needs_no_torch():
    code = "import specpool.sim, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--check", "3"], "check must be an integer in [0, 2], got 3"),
        (["--rounds", "0"], "rounds must be a whole number in [1, 1e12], got 0"),
        (["--rounds", "nan"], "rounds must be a whole number in [1, 1e12], got nan"),
        (["--seed", "-1"], "seed must be an integer in [0, 2147483647], got -1"),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, says):
    assert sim(monkeypatch, *args) == 2
    assert capsys.readouterr().err == f"error: {says}\n"


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


# --- planted bugs: each is found ---


class Lying:
    """The ledger, but for what is overridden."""

    def __init__(self, ledger):
        self._ledger = ledger

    def __getattr__(self, name):
        return getattr(self._ledger, name)


def lie(patch, **methods) -> None:
    ledger = Settings.ledger
    kind = type("Lying", (Lying,), methods)
    patch.setattr(Settings, "ledger", lambda settings: kind(ledger(settings)))


def drop_a_retracted_request(patch):
    def requeue(self, request):
        self._running.remove(request)
        self._leave_row(request)
        self.num_retracted += 1

    patch.setattr(Scheduler, "_requeue", requeue)


def admit_the_last_first(patch):
    def submit(self, request):
        bisect.insort(self._waiting, request, key=lambda r: (-r.priority, -r.request_id))

    patch.setattr(Scheduler, "submit", submit)


def put_the_retracted_behind(patch):
    requeue = Scheduler._requeue

    def behind(self, request):
        requeue(self, request)
        self._waiting.remove(request)
        self._waiting.append(request)

    patch.setattr(Scheduler, "_requeue", behind)


def retract_the_first(patch):
    def make_room(self):
        victim = self._running[0]
        if len(self._running) > 1:
            self._before_release(victim)
            self._ledger.retract(victim.row)
            self._requeue(victim)

    patch.setattr(Scheduler, "_make_room", make_room)


def retract_without_draining(patch):
    schedule = Scheduler.schedule

    def hasty(self):
        steps = schedule(self)
        if not steps and self._in_flight and len(self._running) > 1 and self._is_starved:
            self._make_room()
        return steps

    patch.setattr(Scheduler, "schedule", hasty)


def keep_the_row_of_who_ended(patch):
    end = Scheduler._end

    def leaky(self, request, reason):
        if reason == "stop":
            request.finish_reason = reason
            self._running.remove(request)
            self._leave_row(request)
        else:
            end(self, request, reason)

    patch.setattr(Scheduler, "_end", leaky)


def give_tokens_to_dropped_lanes(patch):
    finish = Scheduler.finish

    def careless(self, step, result):
        dropped = [
            (request, tokens)
            for i, (request, tokens) in enumerate(zip(step.requests, result.tokens, strict=True))
            if self._ledger.epoch[step.plan.rows[i]] != step.plan.epochs[i]
        ]
        finish(self, step, result)
        for request, tokens in dropped:
            request.tokens += tokens

    patch.setattr(Scheduler, "finish", careless)


def forget_a_resolve(patch):
    lie(patch, resolve=lambda self, step, lens: step % 16 and self._ledger.resolve(step, lens))


def resolve_one_token_alone(patch):
    lie(patch, resolve=lambda self, step, lens: self._ledger.resolve(step, np.ones_like(lens)))


def hand_pages_out_early(patch):
    def launch(self, step):
        self._ledger.launch(step)
        self._ledger.complete(step)

    lie(patch, launch=launch, complete=lambda self, step: None)


def lose_a_table_delta(patch):
    def take_delta(self, step):
        delta = self._ledger.take_delta(step)
        return delta if step % 8 else [tuple(part[:0] for part in group) for group in delta]

    lie(patch, take_delta=take_delta)


def end_everybody_at_a_fault(patch):
    fail = Scheduler.fail

    def broad(self, step, error):
        fail(self, step, error)
        for request in list(self._running):
            self._end(request, "error")

    patch.setattr(Scheduler, "fail", broad)


def forget_the_text_at_retraction(patch):
    requeue = Scheduler._requeue

    def forgetful(self, request):
        del request.tokens[request.prompt_len :]
        requeue(self, request)

    patch.setattr(Scheduler, "_requeue", forgetful)


def say_a_token_twice(patch):
    append = Request.append

    def stammer(self, tokens, *options):
        append(self, tokens * 2 if len(tokens) > 3 else tokens, *options)

    patch.setattr(Request, "append", stammer)


def overlook_stop_tokens(patch):
    append = Request.append

    def deaf(self, tokens, *options):
        self.stop_ids = frozenset()
        append(self, tokens, *options)

    patch.setattr(Request, "append", deaf)


def draft_from_old_tokens(patch):
    init = Scheduler.__init__

    def blind(self, ledger, *, reads_tokens, **options):
        init(self, ledger, reads_tokens=False, **options)

    patch.setattr(Scheduler, "__init__", blind)


def run_too_many(patch):
    init = Scheduler.__init__

    def greedy(self, ledger, *, max_batch, **options):
        init(self, ledger, max_batch=max_batch, **options)
        self._prefill_tokens += 1

    patch.setattr(Scheduler, "__init__", greedy)


def leave_a_row_out(patch):
    decode = Scheduler._decode

    def unfair(self):
        row = self._running[-1].row if self._running else 0
        kept, self._limits[row] = self._limits[row], 0
        step = decode(self)
        self._limits[row] = kept
        return step

    patch.setattr(Scheduler, "_decode", unfair)


def admit_again_before_whom_it_made_room_for(patch):
    requeue = Scheduler._requeue

    def hurried(self, request):
        requeue(self, request)
        self._is_starved = False

    patch.setattr(Scheduler, "_requeue", hurried)


def keep_pages_for_nobody(patch):
    def schedule(self):
        while True:
            if not self._is_starved:
                self._admit()
            steps = [step for step in (self._prefill(), self._decode()) if step is not None]
            self._in_flight += len(steps)
            if steps or self._in_flight or not self._running:
                return steps
            self._make_room()

    patch.setattr(Scheduler, "schedule", schedule)


PLANTS = {
    drop_a_retracted_request: "have not ended",
    admit_the_last_first: "was admitted before request",
    put_the_retracted_behind: "was admitted before request .*, retracted [1-9]",
    retract_the_first: "is retracted, not request",
    retract_without_draining: "retracted while results are still to come",
    keep_the_row_of_who_ended: "pages free, .* fenced, .* held by running|leak|livelock",
    give_tokens_to_dropped_lanes: "went on after its end",
    forget_a_resolve: "OrderError|left out|livelock|not all in",
    resolve_one_token_alone: "the true roots .* are not all in|livelock",
    hand_pages_out_early: "position .* slot .* holds|OrderError|not written",
    lose_a_table_delta: "has no page|holds|not written",
    end_everybody_at_a_fault: "by error",
    forget_the_text_at_retraction: "had .* tokens, and has",
    say_a_token_twice: "speaks otherwise than alone",
    overlook_stop_tokens: "speaks otherwise|alone it would after .* by stop",
    draft_from_old_tokens: "drafts from .* tokens",
    run_too_many: "prefills .* tokens",
    leave_a_row_out: "left out|livelock|kv_exhausted",
    admit_again_before_whom_it_made_room_for: "has a row again",
    keep_pages_for_nobody: "livelock|retracted, though|kv_exhausted",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    found = next(filter(None, (broken_law(scenario(seed)) for seed in range(400))))
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        raise AssertionError(found)


def test_what_is_found_is_printed_and_shrunk(monkeypatch, capsys):
    overlook_stop_tokens(monkeypatch)
    assert sim(monkeypatch, "--seed", "3") == 1
    out = capsys.readouterr().out
    assert f"BROKEN with seed {3 * SEEDS}" in out.replace("\n", "")
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
