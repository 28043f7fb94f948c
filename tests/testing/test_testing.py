"""`specpool.testing` finds what it says it finds; the example of `docs/testing.md` runs."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from ledger_kit import CHAIN, make, prefill
from paths import ROOT
from specpool import ConfigError, Group, Ledger, OutOfPages, Shape, SpecpoolError
from specpool.testing import (
    DeviceFault,
    FakeDevice,
    LedgerConfig,
    LedgerMachine,
    accept_lens,
    apply,
    assert_no_page_leaked,
    decode_op,
    ledger_configs,
    no_page_leaks,  # noqa: F401 - a fixture
    operation_sequences,
)
from specpool.testing import device as module

DOC = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
QUICK = settings(
    max_examples=100,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),
)
#: For what a machine must find: nobody reads the smallest case.
FOUND = settings(QUICK, phases=(Phase.generate,))
FEW = settings(QUICK, max_examples=30)


# --- The documented example ---


@pytest.fixture(scope="module")
def example() -> dict:
    names: dict = {"__name__": "example"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        for code in re.findall(r"```python\n(.*?)```", DOC, re.DOTALL):
            exec(compile(code, "docs/testing.md", "exec", dont_inherit=True), names)
    return names


def machine_of(example, scheduler: type, device: type = FakeDevice) -> type[LedgerMachine]:
    class Machine(example["LoopMachine"]):
        def make_device(self, ledger, choose):
            return device(ledger, choose=choose)

        def make_scheduler(self, ledger, device):
            return scheduler(ledger, device)

    return Machine


def test_the_documented_machine_passes_the_documented_scheduler(example):
    """On every kind of ledger, and the requests meet hits, retractions and steps in flight."""
    seen = set()

    class Observed(example["Scheduler"]):
        def step(self):
            is_busy = super().step()
            facts = {
                "a hit": self.num_reused,
                "a retraction": self.num_retractions,
                "a round in flight": self.ledger.in_flight.any(),
            }
            seen.update(fact for fact, number in facts.items() if number)
            return is_busy

    assert example["TestLoop"].settings == example["QUICK"]  # what pytest would run it with
    run_state_machine_as_test(machine_of(example, Observed), settings=FEW)
    assert seen == {"a hit", "a retraction", "a round in flight"}


@pytest.mark.full
def test_the_documented_scheduler_passes_thousands_of_runs(example):
    many = settings(QUICK, max_examples=2000)
    run_state_machine_as_test(example["LoopMachine"], settings=many)


def test_the_documented_machine_finds_the_planted_leak(example):
    quick = settings(example["QUICK"], derandomize=True, database=None, phases=FOUND.phases)
    with pytest.raises(AssertionError, match=r"owned, row \d \(request \d\)"):
        run_state_machine_as_test(example["LeakMachine"], settings=quick)


def _planted(example) -> dict[str, tuple[type, type, str]]:
    """The mistakes that the page lists: a scheduler, a device, and what the machine reports."""
    Scheduler = example["Scheduler"]

    class EndsAtLaunch(Scheduler):
        def launch(self, prepare, batch, values):
            is_launched = super().launch(prepare, batch, values)
            for request in list(batch if is_launched else []):
                if self.ledger.kv_committed_len[request.row] >= request.end:
                    self.release(request, self.ledger.finish)
            return is_launched

    class CompletesAtLaunch(Scheduler):
        def launch(self, prepare, batch, values):
            is_launched = super().launch(prepare, batch, values)
            if is_launched:
                self.ledger.complete(self.flying[-1][1].step)
            return is_launched

    class NeverCompletesPrefills(Scheduler):
        def take_results(self):
            if self.flying[0][1].kind == "decode":
                return super().take_results()
            self.device.finish(self.flying.popleft()[1].step)

    class NoDelta(FakeDevice):
        def apply_delta(self, delta):
            pass

    class IndexesUncomputedTokens(Scheduler):
        def release(self, request, verb):
            self.ledger.index(request.row, request.tokens)
            self.running.remove(request)
            verb(request.row)

    class IndexesAnotherText(Scheduler):
        def release(self, request, verb):
            self.ledger.index(request.row, [0, *request.tokens][: self.final_len(request)])
            self.running.remove(request)
            verb(request.row)

    class RetractsAtOnce(Scheduler):
        def make_room(self):
            self.release(self.running[-1], self.ledger.retract)

    class KeepsTheRow(Scheduler):
        def start(self, request):
            if self.ledger.free_pages(0) == 0:
                self.ledger.admit()
                return False
            return super().start(request)

    unread = "is not complete, got"
    return {
        "release before results": (EndsAtLaunch, FakeDevice, unread),
        "complete before it has run": (CompletesAtLaunch, FakeDevice, "true root|KV at position"),
        "no complete": (NeverCompletesPrefills, FakeDevice, f"not at rest|{unread}"),
        "delta not taken": (Scheduler, NoDelta, "has no page in group"),
        "index of uncomputed tokens": (
            IndexesUncomputedTokens,
            FakeDevice,
            "(tokens|complete), got",
        ),
        "index of another text": (IndexesAnotherText, FakeDevice, "target KV at position"),
        "retract while steps are in flight": (RetractsAtOnce, FakeDevice, unread),
        "a row that found no pages stays": (KeepsTheRow, FakeDevice, "rows are out|not at rest"),
    }


PLANTED = (
    "release before results",
    "complete before it has run",
    "no complete",
    "delta not taken",
    "index of uncomputed tokens",
    "index of another text",
    "retract while steps are in flight",
    "a row that found no pages stays",
)


@pytest.mark.parametrize("mistake", PLANTED)
def test_the_documented_machine_finds_each_mistake_that_the_page_lists(example, mistake):
    scheduler, device, report = _planted(example)[mistake]
    generate = settings(FOUND, max_examples=500)
    with pytest.raises((AssertionError, SpecpoolError), match=report):
        run_state_machine_as_test(machine_of(example, scheduler, device), settings=generate)


def test_one_row_at_a_time_in_a_tight_pool_comes_to_rest(example):
    """The last admitted row gives way, not the row of the round."""
    group = Group("kv", page_size=2, num_pages=6, hosts_drafts=True)
    ledger = Ledger([group], [Shape(1, 1, 2)], num_rows=3, max_context_len=8, max_batch=1)
    scheduler = example["Scheduler"](ledger, FakeDevice(ledger))
    for number in (1, 2, 3):
        scheduler.submit(number, [number] * 3, 5)
    turns = 0
    while scheduler.step():
        turns += 1
        assert turns < 100, (scheduler.running, scheduler.waiting)
    assert_no_page_leaked(ledger)


def test_a_request_alone_without_room_for_the_copy_of_its_hit_starts_without_the_hit(example):
    group = Group("kv", page_size=4, num_pages=2, hosts_drafts=True)
    ledger = Ledger([group], [Shape(1, 1, 2)], num_rows=1, max_context_len=7)
    scheduler = example["Scheduler"](ledger, FakeDevice(ledger))
    scheduler.submit(1, [0, 1, 2, 3, 4, 5], 1)
    scheduler.submit(2, [0, 9, 9, 9, 9, 9], 1)
    turns = 0
    while scheduler.step():
        turns += 1
        assert turns < 20, scheduler.waiting
    assert_no_page_leaked(ledger)


def test_a_scheduler_that_never_comes_to_rest_is_found(example):
    class Stuck(example["Scheduler"]):
        def step(self):
            super().step()
            return True

    class Machine(machine_of(example, Stuck)):
        max_turns = 50

    with pytest.raises(AssertionError, match="not at rest after 50 turns"):
        run_state_machine_as_test(Machine, settings=FOUND)


def test_prompts_with_tokens_begin_alike_and_run_on_a_device_of_ones_own(example):
    """The documented machine; each prompt has the tokens of its strategy, and fits."""
    prompts, devices = [], []  # of each run

    class Scheduler(example["Scheduler"]):
        def submit(self, number, prompt, max_new_tokens):
            assert 1 <= len(prompt) and set(prompt) <= {0, 1, 2, 3, 4, 5, 6}
            assert len(prompt) + max_new_tokens <= self.ledger.max_context_len
            prompts[-1].append(prompt)
            super().submit(number, prompt, max_new_tokens)

    class Machine(example["NamedMachine"]):
        def make_scheduler(self, ledger, device):
            assert type(device) is example["NamedDevice"]
            devices.append(device)
            prompts.append([])
            return Scheduler(ledger, device)

    run_state_machine_as_test(Machine, settings=FEW)
    assert any(hasattr(device, "launched") for device in devices)
    pairs = [pair for texts in prompts for pair in itertools.combinations(texts, 2)]
    assert any(
        first != second and first[:2] == second[:2] for first, second in pairs if len(first) > 2
    )


def test_without_tokens_the_machine_submits_lengths(example):
    class Scheduler(example["Scheduler"]):
        def submit(self, number, prompt_len, max_new_tokens):
            super().submit(number, [0] * prompt_len, max_new_tokens)

    class Machine(machine_of(example, Scheduler)):
        tokens = None

    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=20))


def test_the_machine_asks_a_device_of_ones_own_whether_all_has_run(example):
    class Lazy(FakeDevice):
        def check_complete(self):
            raise AssertionError("step 7 has not run on my device")

    with pytest.raises(AssertionError, match="step 7 has not run on my device"):
        run_state_machine_as_test(machine_of(example, example["Scheduler"], Lazy), settings=FOUND)


def test_a_scheduler_that_never_uses_the_device_is_found(example):
    class NoDevice(FakeDevice):
        """Answers, and has launched nothing."""

        def __init__(self, ledger, choose):
            super().__init__(ledger, choose=choose)
            self.lanes = {}

        def launch(self, plan):
            self.lanes[plan.step] = len(plan)

        def accept_lens(self, step):
            return [1] * self.lanes[step]

        def finish(self, step):
            pass

        def tokens(self, row):
            return [0] * 1000

    message = r"step 1 was launched on the ledger, not on the device: call device\.launch\(plan\)"
    with pytest.raises(AssertionError, match=message):
        machine = machine_of(example, example["Scheduler"], NoDevice)
        run_state_machine_as_test(machine, settings=FOUND)


def test_steps_that_were_cancelled_need_no_device(example):
    class Canceller(example["Scheduler"]):
        def launch(self, prepare, batch, values):
            try:
                self.ledger.cancel(prepare([request.row for request in batch], values).step)
            except OutOfPages:
                return False
            return super().launch(prepare, batch, values)

    run_state_machine_as_test(machine_of(example, Canceller), settings=FEW)


def test_a_machine_without_a_scheduler_says_so():
    with pytest.raises(NotImplementedError):
        run_state_machine_as_test(LedgerMachine, settings=QUICK)


def test_importing_specpool_needs_no_test_library():
    code = "import sys, specpool; sys.exit(bool({'hypothesis', 'pytest'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Leaks ---


def test_the_report_names_page_owner_and_step():
    ledger = make(num_pages=51)
    prefill(ledger, 9, tag="request-7")
    with pytest.raises(AssertionError) as caught:
        assert_no_page_leaked(ledger)
    report = str(caught.value)
    assert "group kv: 3 of 51 pages are not free, 0 of them fenced" in report
    assert "page 2: owned, row 1 (request-7), taken by step 1, last prepare_extend" in report
    assert "1 of 3 rows are out" in report


def test_prefixes_fences_and_steps_are_leaks_too():
    ledger = make()
    row = prefill(ledger, 9)
    ledger.pin_prefix(row, 8)
    step = ledger.prepare_decode([row], [1]).step
    ledger.launch(step)
    ledger.finish(row)
    with pytest.raises(AssertionError) as caught:
        assert_no_page_leaked(ledger)
    for part in ("prefix 1 is not released", f"step {step} (decode) is launched", "fenced, "):
        assert part in str(caught.value)
    ledger.release_prefix(1)
    ledger.resolve(step, [1])
    ledger.complete(step)
    assert_no_page_leaked(ledger)


def test_a_prefix_that_is_kept_on_purpose_is_no_leak():
    ledger = make()
    row = prefill(ledger, 9)
    prefix = ledger.pin_prefix(row, 8)
    with pytest.raises(AssertionError, match="rows are out"):
        assert_no_page_leaked(ledger, kept_prefixes=[prefix])
    ledger.finish(row)
    with pytest.raises(AssertionError, match=rf"prefix {prefix} is not released: .* kept_prefixes"):
        assert_no_page_leaked(ledger)
    assert_no_page_leaked(ledger, kept_prefixes=[prefix])


def test_a_page_that_leaks_beside_a_kept_prefix_is_found():
    ledger = make()
    row, other = prefill(ledger, 9), prefill(ledger, 5, tag="lost")
    prefix = ledger.pin_prefix(row, 8)
    ledger.finish(row)
    with pytest.raises(AssertionError, match=rf"row {other} \(lost\)"):
        assert_no_page_leaked(ledger, kept_prefixes=[prefix])


def test_a_prefix_that_should_have_been_kept_is_missed():
    ledger = make()
    row = prefill(ledger, 9)
    prefix = ledger.pin_prefix(row, 8)
    ledger.finish(row)
    ledger.release_prefix(prefix)
    with pytest.raises(AssertionError, match=rf"prefix {prefix} was to be kept, and is gone"):
        assert_no_page_leaked(ledger, kept_prefixes=[prefix])


def test_the_fixture_knows_what_is_kept(no_page_leaks):  # noqa: F811
    ledger = make()
    row = prefill(ledger, 9)
    no_page_leaks.keep(ledger, ledger.pin_prefix(row, 8))
    ledger.finish(row)


def test_a_machine_knows_what_its_scheduler_keeps(example):
    class Keeper(example["Scheduler"]):
        """Keeps the first prompt that fills a page, as a prefix cache would."""

        prefix = None

        def step(self):
            is_busy = super().step()
            if self.prefix is None:
                for row in [request.row for request in self.running]:
                    if self.ledger.resolved_len[row] >= 16 and not self.ledger.in_flight[row]:
                        self.prefix = self.ledger.pin_prefix(row, 16)
                        break
            return is_busy

    class Forgetful(example["LoopMachine"]):
        # Room for the prefix beside both rows.
        group = Group("kv", page_size=4, num_pages=60, hosts_drafts=True)
        configs = st.just(LedgerConfig((group,), (CHAIN,), num_rows=2, max_context_len=40))

        def make_scheduler(self, ledger, device):
            return Keeper(ledger, device)

    class Machine(Forgetful):
        def kept_prefixes(self):
            return [] if self.scheduler.prefix is None else [self.scheduler.prefix]

    few = settings(FOUND, max_examples=20)
    with pytest.raises(AssertionError, match="is not released"):
        run_state_machine_as_test(Forgetful, settings=few)
    run_state_machine_as_test(Machine, settings=few)


def test_the_fixture_sees_every_ledger_of_its_test(no_page_leaks):  # noqa: F811
    first, second = make(), make()
    assert no_page_leaks == [first, second]
    second.finish(prefill(second, 5))


def test_the_fixture_fails_a_test_that_leaks(pytester):
    pytester.makepyfile(
        """
        from specpool import BlockPool, Group, Ledger, Shape

        def make():
            group = Group("kv", page_size=4, num_pages=8)
            return Ledger([group], [Shape.none()], num_rows=1, max_context_len=16)

        def test_leaks(no_page_leaks):
            ledger = make()
            ledger.launch(ledger.prepare_extend([ledger.admit("one")], [5]).step)

        def test_gives_back(no_page_leaks):
            ledger = make()
            ledger.finish(ledger.admit())

        def test_does_not_ask():
            make().admit()

        def test_leaks_blocks(no_page_leaks):
            BlockPool(8, 4).take(2, tag="two")

        def test_drops_blocks(no_page_leaks):
            pool = BlockPool(8, 4)
            assert no_page_leaks.pools == [pool] and no_page_leaks == []
            pool.drop(pool.take(2))
        """
    )
    result = pytester.runpytest_subprocess("-p", "specpool.testing.leaks", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, errors=2)
    result.stdout.fnmatch_lines(["*group kv: 2 of 8 pages are not free*", "*row 1 (one)*"])
    result.stdout.fnmatch_lines(["*2 of 8 blocks are not free*", "*held 1 times, last tag 'two'*"])


# --- The device ---


def launch(ledger: Ledger, device: FakeDevice, plan) -> int:
    ledger.launch(plan.step)
    device.launch(plan)
    return plan.step


def crowded(**options) -> tuple[Ledger, FakeDevice, int, int]:
    """Two rows, one of them with a prefill that has been launched but has not run."""
    ledger = make(num_rows=2, num_pages=17, **options)
    device = FakeDevice(ledger, in_order=False)
    row, other = ledger.admit(), ledger.admit()
    late = launch(ledger, device, ledger.prepare_extend([row], [40]))
    return ledger, device, late, other


def overrun(ledger: Ledger, device: FakeDevice, late: int, other: int) -> None:
    """The other row gets pages that the late prefill still writes, and then reads them."""
    step = launch(ledger, device, ledger.prepare_extend([other], [40]))
    device.accept_lens(step)
    device.finish(late)
    device.finish(launch(ledger, device, ledger.prepare_decode([other], [1])))


def test_without_page_fencing_several_streams_meet_foreign_tokens():
    ledger, device, late, other = crowded(page_fencing=False)
    ledger.finish(1)
    with pytest.raises(DeviceFault, match=r"row 2: target KV at position .* not of token"):
        overrun(ledger, device, late, other)


def test_a_complete_before_its_time_is_found():
    ledger, device, late, other = crowded()
    ledger.finish(1)
    ledger.complete(late)  # The device has not finished it.
    with pytest.raises(DeviceFault, match=r"row 2: target KV at position .* not of token"):
        overrun(ledger, device, late, other)


def test_a_wrong_result_is_found():
    ledger = make()
    device = FakeDevice(ledger)
    row = ledger.admit()
    launch(ledger, device, ledger.prepare_extend([row], [6]))
    step = launch(ledger, device, ledger.prepare_decode([row], [1]))
    accepted = device.accept_lens(step, wish=[2])
    assert accepted == [2]
    ledger.resolve(step, [3])
    step = launch(ledger, device, ledger.prepare_decode([row], [1]))
    with pytest.raises(DeviceFault, match=r"true root 8 is not in \[9, 9\]"):
        device.finish(step)


def test_draft_kv_that_was_not_written_is_found():
    """If the ledger is told that draft KV was written, a drafting round reads missing KV."""
    ledger = make(draft_kv=True)
    device = FakeDevice(ledger)
    row = ledger.admit()
    plan = ledger.prepare_extend([row], [6])
    launch(ledger, device, plan)
    device.finish(plan.step)
    device._draft[0].clear()
    with pytest.raises(DeviceFault, match=r"draft KV at position 0, .* is of nothing"):
        device.finish(launch(ledger, device, ledger.prepare_decode([row], [1])))


def test_a_forgotten_page_copy_is_found():
    ledger = make()
    device = FakeDevice(ledger)
    row = ledger.admit()
    step = launch(ledger, device, ledger.prepare_extend([row], [6]))
    device.finish(step)
    ledger.complete(step)
    fork = ledger.fork(row)
    device.begin(fork, device.tokens(row))
    ledger.cancel(ledger.prepare_extend([fork], [9]).step)
    plan = ledger.prepare_extend([fork], [9])
    assert plan.page_copies.tolist() == [[0, 2, 3, 2]]
    ledger.launch(plan.step)
    device.launch(plan)
    del device._queue[0]
    with pytest.raises(DeviceFault, match=r"row 2: target KV at position 4, .* is of nothing"):
        device.finish(plan.step)


def prefill_on(ledger: Ledger, device: FakeDevice, row: int, length: int) -> int:
    step = launch(ledger, device, ledger.prepare_extend([row], [length]))
    device.finish(step)
    ledger.complete(step)
    return step


def serve_on(ledger: Ledger, device: FakeDevice, row: int, rounds: int) -> None:
    """Rounds that are over; the row is as long as before."""
    for _ in range(rounds):
        step = launch(ledger, device, ledger.prepare_decode([row], [1]))
        ledger.resolve(step, device.accept_lens(step))
        device.finish(step)
        ledger.complete(step)
        ledger.trim(row, 5)
        prefill_on(ledger, device, row, 6)


SUNK = Group("kv", page_size=2, num_pages=20, window=3, sink=2)


def test_a_forward_that_lacks_its_sink_is_found():
    """The device reads the sink of the groups that it is told; this ledger keeps none."""
    bare = Group("kv", page_size=2, num_pages=20, window=3)
    ledger = Ledger([bare], [], num_rows=1, max_context_len=20)

    class Forgetful:
        groups = (SUNK,)

        def __getattr__(self, name):
            return getattr(ledger, name)

    device = FakeDevice(Forgetful())
    row = ledger.admit()
    prefill_on(ledger, device, row, 6)
    with pytest.raises(DeviceFault, match="position 0"):
        prefill_on(ledger, device, row, 9)


def test_a_row_whose_sink_was_written_over_is_found():
    ledger = Ledger([SUNK], [], num_rows=1, max_context_len=20)
    device, row = FakeDevice(ledger), ledger.admit()
    for length in (6, 9):
        prefill_on(ledger, device, row, length)
    device.check_row(row, 9)
    device._target[0][int(ledger.page_table(0)[row, 0]) * 2] = 7
    with pytest.raises(DeviceFault, match="position 0"):
        device.check_row(row, 9)


def test_the_device_forgets_a_step_that_is_over():
    ledger = make()
    device = FakeDevice(ledger)
    row = ledger.admit()
    prefill_on(ledger, device, row, 6)
    filters = [tracemalloc.Filter(True, module.__file__)]  # other threads may take memory too

    def taken() -> int:
        traces = tracemalloc.take_snapshot().filter_traces(filters)
        return sum(statistic.size for statistic in traces.statistics("filename"))

    tracemalloc.start()
    serve_on(ledger, device, row, 20)
    before = taken()
    serve_on(ledger, device, row, 200)
    after = taken()
    tracemalloc.stop()
    assert before > 0
    assert after - before < 40_000  # Of 400 steps, whose records are more than 500 bytes each.


def test_a_step_that_is_complete_before_its_forward_has_run_is_found():
    ledger = make()
    device = FakeDevice(ledger)
    row = ledger.admit()
    step = launch(ledger, device, ledger.prepare_extend([row], [6]))
    device.check_complete()
    ledger.complete(step)
    with pytest.raises(DeviceFault, match=r"its forward has not run: call device\.finish\(step\)"):
        device.check_complete()
    device.finish(step)
    device.check_complete()
    ledger.cancel(ledger.prepare_decode([row], [1]).step)
    failed = launch(ledger, device, ledger.prepare_decode([row], [1]))
    device.fail(failed)
    ledger.abandon(failed)
    ledger.complete(failed)
    device.check_complete()


def test_results_can_be_asked_for_until_the_ledger_has_them():
    """They can be asked for twice, and after the device has finished; then the step is over."""
    ledger = make(overlap_depth=1)
    device = FakeDevice(ledger)
    row = ledger.admit()
    launch(ledger, device, ledger.prepare_extend([row], [6]))
    step = launch(ledger, device, ledger.prepare_decode([row], [1]))
    device.finish(step)
    ledger.complete(step)
    after = launch(ledger, device, ledger.prepare_decode([row], [1]))
    accepted = device.accept_lens(step)
    assert accepted == device.accept_lens(step)
    ledger.resolve(step, accepted)
    device.finish(after)
    ledger.complete(after)
    ledger.resolve(after, device.accept_lens(after))
    launch(ledger, device, ledger.prepare_decode([row], [1]))
    for over in (step, after):
        with pytest.raises(DeviceFault, match=f"step {over} is not one of those in flight"):
            device.accept_lens(over)


@pytest.mark.parametrize("call", ["accept_lens", "finish", "fail"])
def test_a_step_that_the_device_never_saw_is_named(call):
    ledger = make()
    device = FakeDevice(ledger)
    row = ledger.admit()
    late = launch(ledger, device, ledger.prepare_extend([row], [6]))
    with pytest.raises(DeviceFault, match="step 7 was not launched on this device"):
        getattr(device, call)(7)
    device.finish(late)
    device.finish(late)


# --- Strategies ---

GROUP_FACTS = ("page_size", "num_pages", "hosts_drafts", "layout", "window", "sink")


@settings(QUICK, max_examples=200)
@given(config=ledger_configs(), codes=operation_sequences(max_size=20), has_index=st.booleans())
def test_every_config_can_be_built_and_operated_on(
    config: LedgerConfig, codes: list[bytes], has_index: bool
):
    ledger = config.build()
    for code in codes:
        operation = decode_op(ledger, code, has_index=has_index)
        assert operation == decode_op(ledger, code, has_index=has_index)
        assert has_index or operation[0] not in ("index", "admit_cached", "forget")
        try:
            apply(ledger, operation)
        except SpecpoolError:
            pass
        ledger.check()


@settings(QUICK, max_examples=20)
@given(config=ledger_configs(max_shapes=0))
def test_a_ledger_may_have_no_drafting_shape(config: LedgerConfig):
    assert config.shapes == ()
    assert config.build().shapes == [Shape.none()]


@pytest.mark.parametrize("name", ["max_shapes", "max_rows", "max_groups", "max_context_len"])
def test_a_limit_that_cannot_be_is_named(name):
    with pytest.raises(ConfigError, match=rf"{name} must be .*got -1"):
        ledger_configs(**{name: -1})


def test_pools_are_tight_enough_to_run_out():
    """Among small ledgers many cannot hold all their rows at once."""
    tight = 0

    @settings(QUICK, max_examples=100)
    @given(ledger_configs())
    def count(config: LedgerConfig) -> None:
        nonlocal tight
        ledger = config.build()
        tight += any(
            group.num_pages < config.num_rows * ledger.pages_per_row(at)
            for at, group in enumerate(config.groups)
        )

    count()
    assert tight > 30


@settings(QUICK, max_examples=100)
@given(st.data())
def test_without_spare_pages_a_pool_is_the_smallest_there_is(data: st.DataObject):
    config = data.draw(ledger_configs(max_groups=1, spare_pages=0))
    config.build()
    (group,) = config.groups
    smaller = {name: getattr(group, name) for name in GROUP_FACTS} | {
        "num_pages": group.num_pages - 1
    }
    with pytest.raises(ConfigError, match="num_pages must be at least"):
        replace(config, groups=(Group(group.name, **smaller),)).build()


def test_drawing_a_config_records_nothing(tmp_path, monkeypatch):
    """SPECPOOL_RECORD is for the ledgers that the user's test builds."""
    monkeypatch.setenv("SPECPOOL_RECORD", str(tmp_path / "log"))

    @settings(QUICK, max_examples=20)
    @given(ledger_configs())
    def draw(config: LedgerConfig) -> None:
        assert config.groups

    draw()
    assert list(tmp_path.iterdir()) == []


def test_accept_lens_are_those_of_the_shapes():
    shapes = [Shape.none(), CHAIN, Shape(2, 2, 2)]
    seen = set()

    @settings(QUICK, max_examples=200)
    @given(accept_lens(shapes))
    def collect(lens: list[int]) -> None:
        seen.add(tuple(lens))

    collect()
    assert {lens[0] for lens in seen} == {1}
    assert {lens[1] for lens in seen} == {1, 2, 3, 4}
    assert {lens[2] for lens in seen} == {1, 2}


def test_a_config_builds_what_it_says():
    group = Group("kv", page_size=4, num_pages=40)
    config = LedgerConfig((group,), (CHAIN,), num_rows=2, max_context_len=20, overlap_depth=1)
    ledger = config.build(digest=True)
    assert (ledger.groups, ledger.num_rows, ledger.overlap_depth) == ([group], 2, 1)
    assert ledger.digest is not None


def test_the_device_runs_in_any_order_that_streams_allow():
    """Seeds differ in which of two rows' forwards runs first."""
    first = set()
    for seed in range(20):
        ledger = make()
        device = FakeDevice(ledger, choose=random.Random(seed).randrange)
        rows = [ledger.admit(), ledger.admit()]
        for row in rows:
            launch(ledger, device, ledger.prepare_extend([row], [6]))
        device.run_some()
        first |= {row for row in rows if device.tokens(row)}
    assert first == set(rows)
