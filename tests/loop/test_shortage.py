"""Law: if the ledger lacks memory for a step, only the requests of that step end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conftest import assert_no_page_leaked
from scheduler_loop import put_ledger
from specpool import Engine, SamplingParams, Shape
from specpool.errors import OutOfMemory

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = [[72, 101, 108, 108, 111, 32, number] for number in range(4)]
ERROR = OutOfMemory("no memory for rows: 9 entries of 4 bytes", 36)


class ShortLedger:
    """Refuses calls of one verb as the core does: before anything is changed."""

    def __init__(
        self, ledger: Any, verb: str, refuses: Callable[[], bool], error: MemoryError
    ) -> None:
        self._ledger, self._verb, self._refuses, self._error = ledger, verb, refuses, error
        self.num_refused = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ledger, name)
        if name != self._verb:
            return value

        def call(*args: Any, **options: Any) -> Any:
            if self._refuses():
                self.num_refused += 1
                assert self.num_refused < 100, "it never ends"
                raise self._error
            return value(*args, **options)

        return call


@pytest.fixture
def engine(build: Callable[..., Engine], overlap: int) -> Engine:
    return build(
        "ngram",
        Shape.eagle(2, 1, 3),
        max_batch=3,
        max_sessions=1,
        overlap_depth=overlap,
        prefix_cache=False,
    )


@pytest.fixture(params=[0, 1], ids=["sync", "overlap"])
def overlap(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def short(
    engine: Engine, verb: str, refuses: Callable[[], bool], error: MemoryError = ERROR
) -> ShortLedger:
    ledger = ShortLedger(engine.ledger, verb, refuses, error)
    put_ledger(engine.core.scheduler, ledger)
    return ledger


def submitted(engine: Engine, prompts: list[list[int]], told: dict[int, Any]) -> list[int]:
    def tell(number: int, item: Any) -> None:
        if hasattr(item, "finish_reason"):
            told[number] = item

    return [engine.submit(prompt, PARAMS, on_item=tell) for prompt in prompts]


def check(told: dict[int, Any], numbers: list[int], wanted: list[Any], ended: set[int]) -> None:
    for index, number in enumerate(numbers):
        output = told[number]
        if index in ended:
            assert output.finish_reason == "error", index
            assert output.error == f"a step was not prepared: OutOfMemory: {ERROR}"
        else:
            assert (output.finish_reason, output.error) == ("length", None), index
            assert output.token_ids == wanted[index].token_ids


def ran(engine: Engine, verb: str) -> tuple[dict[int, Any], list[int], ShortLedger]:
    """Two requests decode when two more come; the next call of the verb is refused."""
    told: dict[int, Any] = {}
    is_short = False

    def refuses() -> bool:
        nonlocal is_short
        was_short, is_short = is_short, False
        return was_short

    ledger = short(engine, verb, refuses)
    numbers = submitted(engine, PROMPTS[:2], told)
    for _ in range(3):
        engine.turn()
    numbers += submitted(engine, PROMPTS[2:], told)
    is_short = True
    while engine.turn():
        pass
    return told, numbers, ledger


# The fourth waits for a row; the first two decode while the third is prefilled.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("verb", "ended"), [("prepare_extend", {2}), ("prepare_decode", {0, 1}), ("admit", set())]
)
def test_a_shortage_ends_the_requests_of_the_step_alone(
    engine: Engine, verb: str, ended: set[int]
) -> None:
    wanted = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    told, numbers, ledger = ran(engine, verb)
    assert ledger.num_refused == 1
    check(told, numbers, wanted, ended)
    assert_no_page_leaked(engine)


@pytest.mark.sample(3)
@pytest.mark.parametrize("verb", ["prepare_extend", "prepare_decode", "admit"])
def test_a_shortage_without_end_ends_all_and_the_engine_goes_on(engine: Engine, verb: str) -> None:
    wanted = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    is_short = True
    ledger = short(engine, verb, lambda: is_short)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert ledger.num_refused >= 2
    check(dict(enumerate(outputs)), [0, 1, 2, 3], wanted, {0, 1, 2, 3})
    assert_no_page_leaked(engine)
    is_short = False
    outputs = engine.generate(PROMPTS, PARAMS)
    check(dict(enumerate(outputs)), [0, 1, 2, 3], wanted, set())


def test_a_shortage_at_an_admission_ends_its_request_alone(engine: Engine) -> None:
    """Otherwise the next turns would meet it for ever; others go on once there is memory."""
    wanted = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS[:2]]
    told: dict[int, Any] = {}
    is_short = True
    short(engine, "admit", lambda: is_short, MemoryError("numpy has none"))
    numbers = submitted(engine, PROMPTS[:1], told)
    while engine.turn():
        pass
    (output,) = told.values()
    assert output.finish_reason == "error"
    assert output.error == "the request failed: MemoryError: numpy has none"
    is_short = False
    told.clear()
    numbers = submitted(engine, PROMPTS[:2], told)
    while engine.turn():
        pass
    check(told, numbers, wanted, set())
    assert_no_page_leaked(engine)


def test_samples_that_cannot_be_forked_run_by_themselves(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=8, n=3, seed=1, temperature=1.0, ignore_eos=True)
    wanted = engine.generate([PROMPTS[0]], params)
    ledger = short(engine, "fork", lambda: True)
    outputs = engine.generate([PROMPTS[0]], params)
    assert ledger.num_refused == 2
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]


@pytest.mark.parametrize("verb", ["prepare_extend", "admit"])
def test_samples_of_who_ends_for_lack_of_memory_run_by_themselves(
    engine: Engine, verb: str
) -> None:
    """More wait after that end than before, though nothing was prepared."""
    params = SamplingParams(max_new_tokens=8, n=3, seed=1, temperature=1.0, ignore_eos=True)
    wanted = engine.generate([PROMPTS[0]], params)
    ledger = short(engine, verb, lambda: ledger.num_refused == 0)
    outputs = engine.generate([PROMPTS[0]], params)
    assert ledger.num_refused == 1
    check(dict(enumerate(outputs)), [0, 1, 2], wanted, {0})
    assert_no_page_leaked(engine)


def test_a_shortage_that_ends_who_has_samples_is_not_raised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended the first sample, although the number of samples is as before."""
    params = SamplingParams(max_new_tokens=8, n=2, seed=1, temperature=1.0, ignore_eos=True)
    wanted = engine.generate([PROMPTS[0]], params)
    num_failed = 0
    schedule = engine.core.scheduler.schedule

    def without_memory() -> Any:
        nonlocal num_failed
        steps = schedule()
        num_failed += 1
        if num_failed == 1:
            raise MemoryError("numpy has none")
        return steps

    monkeypatch.setattr(engine.core.scheduler, "schedule", without_memory)
    outputs = engine.generate([PROMPTS[0]], params)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error == "a step was stopped: MemoryError: numpy has none"
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("length", wanted[1].token_ids)
    assert_no_page_leaked(engine)


def test_a_pin_without_memory_is_one_error_and_hurts_nobody(engine: Engine) -> None:
    (wanted,) = engine.generate([PROMPTS[0]], PARAMS)
    told: dict[int, Any] = {}
    ledger = short(engine, "pin_prefix", lambda: True)
    numbers = submitted(engine, PROMPTS[:1], told)
    engine.turn()
    with pytest.raises(Exception, match="cannot be pinned: no memory for rows") as caught:
        engine.pin(PROMPTS[1])
    assert ledger.num_refused == 1 and type(caught.value).__name__ == "ConfigError"
    while engine.turn():
        pass
    check(told, numbers, [wanted], set())
    assert_no_page_leaked(engine)


def test_a_session_that_cannot_be_forked_keeps_its_words_and_hurts_nobody(engine: Engine) -> None:
    (wanted,) = engine.generate([PROMPTS[0]], PARAMS)
    session = engine.open_session()
    session.append(PROMPTS[1], PARAMS).output()
    told: dict[int, Any] = {}
    ledger = short(engine, "fork", lambda: True)
    numbers = submitted(engine, PROMPTS[:1], told)
    engine.turn()
    with session, session.fork() as copy:
        assert ledger.num_refused == 1
        assert copy.append([33], PARAMS).output().token_ids == (
            session.append([33], PARAMS).output().token_ids
        )
    while engine.turn():
        pass
    check(told, numbers, [wanted], set())
    assert_no_page_leaked(engine)
