"""Law: Ctrl-C at any line of any verb leaves no orphaned request or page, and a working engine."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assert_no_page_leaked
from interrupter import FILES, FOLDER, Interrupter
from scheduler_loop import put_ledger
from specpool import ConfigError, Engine, EngineConfig, SamplingParams
from specpool.engine.draft import NgramDrafter
from specpool.engine.output import Chunk
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.worker.results import PendingStep

PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)
TEXT = [72, 101, 108, 108, 111, 32] * 2


def test_the_files_that_are_walked_are_there():
    """If a file moved, its lines would not be walked, and every test here would pass."""
    assert [name for name in FILES if not Path(name).is_file()] == []


class Kept:
    """What the user of an engine holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sessions, self.pins, self.told = engine, [], [], {}

    def told_of(self, number: int, item: Any) -> None:
        if not isinstance(item, Chunk):
            self.told[number] = item

    def session(self) -> Any:
        session = self.engine.open_session()
        self.sessions.append(session)
        session.append(TEXT, PARAMS).output()
        return session

    def submit(self, number: int) -> int:
        return self.engine.submit([*TEXT, number], PARAMS, on_item=self.told_of)


def fork(kept):
    (session,) = kept.sessions
    kept.sessions.append(session.fork())


def close(kept):
    kept.sessions[0].close()


def rewind(kept):
    kept.sessions[0].rewind(9)


def append(kept):
    kept.sessions[0].append([65], PARAMS).output()


def submit_to_session(kept):
    kept.engine.submit([66], PARAMS, session=kept.sessions[0], on_item=kept.told_of)
    while kept.engine.turn():
        pass


def open_session(kept):
    kept.sessions.append(kept.engine.open_session())


def pin(kept):
    kept.pins.append(kept.engine.pin(TEXT))


def unpin(kept):
    kept.engine.unpin(kept.pins[0])


def submit(kept):
    kept.submit(1)


def abort(kept):
    for number in list(kept.engine.core._submitted)[::-1]:
        kept.engine.abort(number)


def turn(kept):
    kept.engine.turn()


def generate(kept):
    kept.engine.generate([TEXT], SamplingParams(max_new_tokens=4, n=2, seed=1, temperature=1.0))


def with_session(kept):
    kept.session()


def with_pin(kept):
    pin(kept)


def with_queue(kept):
    for number in range(3):
        kept.submit(number)
    kept.engine.turn()


def with_reload(kept):
    """An engine with a session whose KV is on the host: another request took its row."""
    kept.session()
    kept.engine.generate([TEXT], PARAMS)
    kept.session()


VERBS = {
    "fork": (with_session, fork),
    "close a session": (with_session, close),
    "rewind": (with_session, rewind),
    "append": (with_session, append),
    "append what is on the host": (with_reload, append),
    "close what is on the host": (with_reload, close),
    "submit to a session": (with_session, submit_to_session),
    "open": (len, open_session),
    "pin": (len, pin),
    "unpin": (with_pin, unpin),
    "submit": (with_queue, submit),
    "abort": (with_queue, abort),
    "turn": (with_queue, turn),
    "generate": (len, generate),
}


def kept_of(verb: str, engine: Engine) -> Kept:
    kept = Kept(engine)
    prepare = VERBS[verb][0]
    if prepare is not len:
        prepare(kept)
    return kept


def tidied(kept: Kept, where: str) -> None:
    """Give back what the user holds; then nothing may be left."""
    engine = kept.engine
    for _ in range(60):
        if not engine.turn():
            break
    else:
        raise AssertionError(f"turn never says that nothing is left: {where}, {engine.stats()}")
    assert not engine.core._mailbox and not engine.core._submitted, where
    for session in kept.sessions:
        session.close()
    assert not engine.core.scheduler.conversations.open, f"a session is nobody's: {where}"
    for pin in kept.pins:
        engine.unpin(pin)
    assert not len(engine.core.scheduler.pins), f"a pin is nobody's: {where}"
    assert not engine.ledger.prefixes, where
    host = engine.core.host
    if host is not None:
        host.check()
        assert not host.handles, f"KV on the host is nobody's: {where}"
    assert_no_page_leaked(engine)


@pytest.fixture(scope="module")
def engines(target):
    """Engines with and without a host tier; they have one row, and one session keeps it."""
    options = {"max_context_len": 64, "page_size": 4, "max_sessions": 1, "max_batch": 1}
    options |= {"num_pages": 24, "busy_check": 2, "prefill_tokens": 8}
    return {
        "device": Engine(target, config=EngineConfig(**options)),
        "host": Engine(
            target,
            NgramDrafter(),
            config=EngineConfig(**options, host_bytes=1 << 22, offload="always", overlap_depth=1),
        ),
    }


def run(engine: Engine, verb: str, at: int | None, error: type[BaseException]) -> Interrupter:
    """The verb, hit at one line; then all is given back, and the engine serves the next."""
    kept = kept_of(verb, engine)
    expected = (error, ConfigError) if verb == "pin" else (error,)
    with Interrupter(at, error) as lines, contextlib.suppress(*expected):
        VERBS[verb][1](kept)
    tidied(kept, f"{verb} at line {at}, {lines.place}")
    return lines


# Each verb in both engines; in `make test` only in the one that its name speaks of.
CASES = [
    pytest.param(
        verb,
        where,
        marks=[] if ("on the host" in verb) == (where == "host") else [pytest.mark.full],
    )
    for verb in VERBS
    for where in ("device", "host")
]


@pytest.mark.parametrize("num_lines", [5, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize(("verb", "where"), CASES)
def test_ctrl_c_at_every_line_of_a_verb(engines, verb, where, num_lines):
    engine = engines[where]
    text = engine.generate([TEXT], PARAMS)[0].token_ids
    total = run(engine, verb, None, KeyboardInterrupt).count
    assert total > 3, "no line was walked"
    for at in range(1, total + 1, max(total // num_lines, 1)):  # spread over all
        run(engine, verb, at, KeyboardInterrupt)
    assert engine.generate([TEXT], PARAMS)[0].token_ids == text
    assert_no_page_leaked(engine)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 4])
def test_ctrl_c_at_every_line_of_the_news_loses_no_output(engines, step):
    engine = engines["device"]
    text = engine.generate([TEXT], PARAMS)[0].token_ids
    at, total = 0, 1
    while at <= total:
        told = []
        engine.submit(TEXT, PARAMS, on_item=lambda number, item, told=told: told.append(item))
        with (
            Interrupter(at or None, files=(str(FOLDER / "engine" / "output.py"),)) as lines,
            contextlib.suppress(KeyboardInterrupt),
        ):
            while engine.turn():
                pass
        for turn in range(20):
            if not engine.turn():
                break
            assert turn < 10, f"turn never says that nothing is left: {lines.place}"
        outputs = [item for item in told if not isinstance(item, Chunk)]
        assert [output.token_ids for output in outputs] == [text], lines.place
        total = max(total, lines.count) if not at else total
        at += step if at else 1
    assert total > 20
    assert_no_page_leaked(engine)


def ask(kept):
    kept.submit(1)


def begin(kept):
    kept.sessions[0].append([65], PARAMS)


@pytest.mark.parametrize(("prepare", "call"), [(len, ask), (with_session, begin)])
def test_ctrl_c_at_every_line_of_an_order_takes_it_back(engines, prepare, call):
    """This includes the line behind the release of the lock: the order would be lost."""
    engine, files = engines["device"], (str(FOLDER / "engine" / "engine.py"),)
    files += (str(FOLDER / "engine" / "session.py"), str(FOLDER / "engine" / "core.py"))
    at, total = 0, 1
    while at <= total:
        kept = Kept(engine)
        if prepare is not len:
            prepare(kept)
        with Interrupter(at or None, files=files) as lines, contextlib.suppress(KeyboardInterrupt):
            call(kept)
        assert bool(engine.core.scheduler.requests()) == (not at), lines.place
        assert bool(engine.core._submitted) == (not at and call is ask), lines.place
        tidied(kept, lines.place)
        total = max(total, lines.count) if not at else total
        at += 1
    assert total > 10


def test_who_was_over_when_ctrl_c_came_has_no_error(engines, monkeypatch):
    engine, end, reasons = engines["device"], Reclaim.end, []
    (wanted,) = engine.generate([[*TEXT, 1]], PARAMS)

    def late(self, request, reason):
        reasons.append(reason)
        if len(reasons) == 1:
            raise KeyboardInterrupt
        end(self, request, reason)

    monkeypatch.setattr(Reclaim, "end", late)
    kept = Kept(engine)
    number = kept.submit(1)
    with pytest.raises(KeyboardInterrupt):
        while engine.turn():
            pass
    tidied(kept, "an end")
    output = kept.told[number]
    assert (output.finish_reason, output.error) == ("length", None)
    assert output.token_ids == wanted.token_ids and reasons[:2] == ["length", "length"]


#: A request ends with its step, or alone if the memory was wanted for it alone.
FAILED_FOR_MEMORY = (
    "(a step failed|a step was stopped|the request failed|the tokenizer cannot decode the output)"
    ": MemoryError: at "
)


@pytest.mark.parametrize("where", ["device", "host"])
def test_no_memory_at_a_line_of_a_turn_ends_requests_with_the_reason(engines, where):
    """The turn returns, the running requests end with the reason, and the waiting ones go on."""
    engine = engines[where]
    kept = kept_of("turn", engine)
    with Interrupter(None) as lines:
        kept.engine.turn()
    tidied(kept, "no memory")
    inside = 0
    for at in range(1, lines.count, max(lines.count // 12, 1)):
        kept = kept_of("turn", engine)
        with Interrupter(at, MemoryError) as hit, contextlib.suppress(MemoryError):
            kept.engine.turn()
        tidied(kept, f"no memory at {hit.place}")
        outputs = kept.told.values()
        assert len(kept.told) == 3 and {o.finish_reason for o in outputs} <= {"length", "error"}
        failed = [output for output in outputs if output.finish_reason == "error"]
        assert len(failed) <= 1, hit.place
        for output in failed:
            inside += 1
            assert re.match(FAILED_FOR_MEMORY, output.error), output.error
    assert inside > 3


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 3 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
@pytest.mark.parametrize(
    "owner", ["prepare_decode", "prepare_extend", "resolve", "complete", "run", "result"]
)
def test_whoever_lacks_memory_in_a_step_the_engine_goes_on(engines, monkeypatch, owner, error):
    engine = engines["device"]
    (wanted,) = engine.generate([TEXT], PARAMS)
    calls = []

    class Ledger:
        def __getattr__(self, name):
            value = getattr(engine.ledger, name)
            return failing(value) if name == owner else value

    def failing(call):
        def fail_once(*args, **options):
            calls.append(args)
            if len(calls) == 1:
                raise error
            return call(*args, **options)

        return fail_once

    with monkeypatch.context() as patch:
        if owner == "run":
            patch.setattr(engine.core.worker, "run", failing(engine.core.worker.run))
        elif owner == "result":
            result = PendingStep.result
            patch.setattr(PendingStep, "result", lambda self: failing(result)(self))
        else:
            put_ledger(engine.core.scheduler, Ledger())
        outputs = engine.generate([TEXT] * 2, PARAMS)  # the second waits for the row
    put_ledger(engine.core.scheduler, engine.ledger)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error.endswith(f"{type(error).__name__}: {error}")
    assert outputs[1].token_ids == wanted.token_ids
    assert_no_page_leaked(engine)


@pytest.mark.parametrize("num_lines", [5, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_close_that_ctrl_c_hits_is_done_by_the_next(target, where, num_lines):
    options = {"max_context_len": 64, "page_size": 4, "max_sessions": 1, "max_batch": 1}
    host = {"host_bytes": 1 << 22, "offload": "always"} if where == "host" else {}
    at, total = 0, 1
    while at < total:
        engine = Engine(target, config=EngineConfig(**options, **host))
        kept = Kept(engine)
        with_reload(kept)
        pin(kept)
        for number in range(3):
            kept.submit(number)
        engine.turn()
        close_target, engine.target.close = engine.target.close, lambda: None
        try:
            with Interrupter(at or None) as lines, contextlib.suppress(KeyboardInterrupt):
                engine.close()
            engine.close()
        finally:
            engine.target.close = close_target
        assert engine.ledger.closed and not engine.core.scheduler.requests(), lines.place
        assert not engine.core.scheduler.conversations.open and not len(engine.core.scheduler.pins)
        assert engine.core.host is None or not engine.core.host.handles, lines.place
        assert_no_page_leaked(engine)
        total = max(total, lines.count) if not at else total
        at += max(total // num_lines, 1)
