"""Law: whatever is done to an engine, in whatever order, and whatever fails in it: every request
ends once, texts are the model's own, nothing leaks, and `close` ends.

`SPECPOOL_LIVES=N pytest tests/engine/test_lives.py` runs N lives with seeds of their own.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from conftest import assert_no_page_leaked
from interrupter import Interrupter
from lossless import Comparison, Reference
from scheduler_loop import put_ledger
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.models import TargetModel
from specpool.engine.output import Chunk
from specpool.errors import OutOfMemory, SpecpoolError
from window_kit import open_targets, reference_of

LIVES = int(os.environ.get("SPECPOOL_LIVES", "0"))
SEEDS = [[seed] for seed in range(2000, 2000 + LIVES)] or [
    [1002],
    *(pytest.param(range(at, at + 2), marks=pytest.mark.full) for at in range(1000, 1008, 2)),
]
SHAPES = {"chain": Shape.eagle(3, 1, 4), "tree": Shape.eagle(3, 2, 6), "none": None}
VERBS = ["prepare_extend", "prepare_decode", "admit", "fork", "pin_prefix", "take_delta"]
#: What a life does, and how often.
OPS = {
    "turn": 12,
    "submit": 6,
    "abort": 1,
    "open": 1,
    "append": 5,
    "fork": 1,
    "rewind": 1,
    "close_session": 1,
    "pin": 1,
    "unpin": 1,
    "generate": 1,
    "stream": 1,
}


class InjectedError(Exception):
    """The error that a forward or a drafter raises here."""


@pytest.fixture(scope="module")
def windowed() -> Iterator[dict[str, Any]]:
    with open_targets() as targets:
        yield targets


class Life:
    """An engine, what its user holds, and what has been promised of it."""

    def __init__(self, seed: int, target: Any, heads: Any, windowed: Any, plain: Reference) -> None:
        self.rng = rng = random.Random(seed)
        self.reference, self.comparison = plain, Comparison()
        drafters: list[Any] = ["ngram", None]
        if rng.random() < 0.3:
            family = rng.choice(["mistral", "gemma2"])
            target, self.reference = windowed[family], reference_of(family)
        else:
            drafters += list(heads)
        self.draft = rng.choice(drafters)
        drafter = NgramDrafter() if self.draft == "ngram" else None
        if self.draft in heads:
            drafter = EagleDrafter(heads[self.draft])
        shape = SHAPES[rng.choice(["chain", "tree"])] if self.draft else None
        worker = rng.choice(["v1", "v2"])
        page_size = rng.choice([1, 4, 16])
        is_tight = seed % 2 == 0  # one row and a bit for many: someone has to give way
        self.config = EngineConfig(
            shape=shape,
            worker=worker,
            overlap_depth=rng.choice([0, 1]) if worker == "v2" else 0,
            page_size=page_size,
            max_context_len=96,
            max_batch=rng.choice([4, 8] if is_tight else [1, 4, 8]),
            num_pages=-(-rng.choice([112] if is_tight else [128, 192]) // page_size),
            prefill_tokens=rng.choice([5, 64]),
            headroom=0,
            max_sessions=rng.choice([0, 1, 3]),
            host_bytes=rng.choice([0, 1 << 20]),
            offload="always",
            placement=rng.choice(["split", "shared"]),
            mixed_chunks=rng.random() < 0.3,
            busy_check=rng.choice([0, 2]),
        )
        self.engine = Engine(target, drafter, config=self.config)
        self.numbers: dict[int, list[int]] = {}  # prompts of what was submitted
        self.told: dict[int, Any] = {}
        self.sessions: list[Any] = []
        self.pins: list[Any] = []
        self.fault: Callable[[str], BaseException | None] = lambda call: None
        self.sampled: list[tuple[list[int], SamplingParams, list[int]]] = []
        self.num_faults = self.num_whole = 0
        for owner, name in ((target, "forward"), (drafter, "propose")):
            if owner is not None:
                setattr(owner, name, self._failing(getattr(owner, name), name))
        self._target, self._owners = target, [(target, "forward")]
        ledger = _Ledger(self.engine.ledger, self)
        put_ledger(self.engine.core.scheduler, ledger)
        self.engine.core.loop.busy_check._ledger = ledger

    def _failing(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            self.meet(name)
            return call(*args, **options)

        return failing

    def meet(self, call: str) -> None:
        error = self.fault(call)
        if error is not None:
            self.num_faults += 1
            raise error

    def restore(self) -> None:
        for owner, name in self._owners:
            delattr(owner, name)

    # --- what a user does ------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        start = self.rng.choice([[72, 101, 108, 108, 111, 32] * 3, [84, 104, 101, 32], [65] * 20])
        return [*start[: self.rng.randint(1, len(start))], self.rng.randrange(40, 43)]

    def params(self, n: int = 1) -> SamplingParams:
        rng = self.rng
        drawn = {"temperature": 1.0, "seed": rng.randrange(9)} if rng.random() < 0.3 else {}
        max_new_tokens = rng.choice([1, 40, 60, 60])
        return SamplingParams(max_new_tokens=max_new_tokens, n=n, ignore_eos=True, **drawn)

    def judge(self, prompt: list[int], output: Any) -> None:
        """Text that was given out before a failure must also be the model's own."""
        if output.params.temperature:
            params = replace(output.params, seed=output.seed, n=1)
            self.sampled.append((prompt, params, output.token_ids))
        elif output.token_ids:
            self.comparison.add(self.reference, prompt, output.token_ids)
        if output.finish_reason == "length":
            self.num_whole += 1
            assert output.error is None
        else:
            assert output.finish_reason in ("abort", "error"), output

    def tell(self, number: int, item: Any) -> None:
        if not isinstance(item, Chunk):
            assert number not in self.told, "told twice"
            self.told[number] = item
            self.judge(self.numbers[number], item)

    def submit(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            prompt, priority = self.prompt(), self.rng.choice([0, 0, 1])
            number = self.engine.submit(prompt, self.params(), priority=priority, on_item=self.tell)
            self.numbers[number] = prompt

    def append(self) -> None:
        if not self.sessions:
            return
        session = self.rng.choice(self.sessions)
        before, prompt = session.tokens, self.prompt()[:4]
        if self.rng.random() < 0.5:
            number = self.engine.submit(prompt, self.params(), session=session, on_item=self.tell)
            self.numbers[number] = before + prompt
            return
        output = session.append(prompt, self.params()).output()
        self.judge(before + prompt, output)
        said = [*before, *prompt, *output.token_ids]
        assert session.tokens == (said if output.finish_reason == "length" else before)

    def turn(self) -> None:
        self.engine.turn()

    def abort(self) -> None:
        self.engine.abort(self.rng.choice(list(self.numbers) or [1]))

    def open(self) -> None:
        self.sessions.append(self.engine.open_session())

    def fork(self) -> None:
        if self.sessions:
            session = self.rng.choice(self.sessions)
            self.sessions.append(session.fork())
            assert self.sessions[-1].tokens == session.tokens

    def rewind(self) -> None:
        if self.sessions:
            session = self.rng.choice(self.sessions)
            session.rewind(self.rng.randint(0, session.num_tokens))

    def close_session(self) -> None:
        if self.sessions:
            self.rng.choice(self.sessions).close()

    def pin(self) -> None:
        self.pins.append(self.engine.pin([*self.prompt(), *[65] * 16]))

    def unpin(self) -> None:
        if self.pins:
            self.engine.unpin(self.rng.choice(self.pins))

    def generate(self) -> None:
        prompts = [self.prompt() for _ in range(self.rng.randint(1, 3))]
        params = self.params(n=self.rng.choice([1, 1, 3]))
        outputs = self.engine.generate(prompts, params, progress=False)
        assert len(outputs) == params.n * len(prompts)
        for output in outputs:
            self.judge(prompts[output.index], output)

    def stream(self) -> None:
        """Left before its end."""
        with contextlib.closing(self.engine.stream([self.prompt()], self.params())) as stream:
            next(stream)

    # --- what goes wrong -------------------------------------------------------------------------

    def draw_fault(self) -> contextlib.AbstractContextManager[Any]:
        """Plant at most one fault while the returned manager is open."""
        rng, kind = self.rng, self.rng.randrange(8)
        if kind < 4:
            return contextlib.nullcontext()
        if kind < 6:
            error = rng.choice([KeyboardInterrupt, MemoryError])
            return Interrupter(rng.randint(1, rng.choice([60, 600])), error)
        call = rng.choice(["forward", "propose", *VERBS])
        error = OutOfMemory("no memory for rows: 9 entries of 4 bytes", 36)
        if call in ("forward", "propose"):
            errors = [InjectedError("broken"), MemoryError("no memory"), KeyboardInterrupt()]
            error = rng.choice(errors)
        left = [rng.randint(1, 2)]

        def fault(met: str) -> BaseException | None:
            left[0] -= met == call
            return error if met == call and not left[0] else None

        self.fault = fault
        return contextlib.nullcontext()

    def step(self) -> None:
        verb = self.rng.choices(list(OPS), list(OPS.values()))[0]
        asked = set(self.engine.core._submitted)
        try:
            with self.draw_fault() as lines:
                getattr(self, verb)()
        except (ConfigError, InjectedError, MemoryError, KeyboardInterrupt, SpecpoolError) as error:
            if not isinstance(error, ConfigError):
                assert lines is not None or self.num_faults, error
            # If the caller never got the number, `submit` has taken the request back.
            for number in set(self.engine.core._submitted) - asked - set(self.numbers):
                raise AssertionError(f"request {number} has no owner") from error
        finally:
            self.fault = lambda call: None
        self.engine.ledger.check()

    def end(self, *, tidily: bool) -> None:
        engine = self.engine
        if tidily:
            for session in self.sessions:
                session.close()
            for turn in range(600):
                if not engine.turn():
                    break
                assert turn < 500, "it never ends"
            for pin in self.pins:
                engine.unpin(pin)
            assert set(self.told) >= {n for n in self.numbers if n not in engine.core._submitted}
            assert not engine.core._submitted
            assert not engine.core.scheduler.conversations.open
            assert_no_page_leaked(engine)
        self.num_retracted = engine.core.scheduler.num_retracted
        self.num_retracted_turns = sum(s._conversation.retraction_ct for s in self.sessions)
        engine.close()
        assert engine.ledger.closed and not engine.core.scheduler.requests()
        assert engine.core.host is None or not engine.core.host.handles
        assert_no_page_leaked(engine)

    def compare_samples(self) -> None:
        """What was drawn is what an engine that nobody disturbs draws with the same seed."""
        if not self.sampled:
            return
        config = EngineConfig(max_context_len=96)
        with Engine(self._target, config=config) as calm:
            prompts, params, given = zip(*self.sampled, strict=True)
            for output, tokens in zip(calm.generate([*prompts], [*params]), given, strict=True):
                assert output.token_ids[: len(tokens)] == tokens, output.prompt_ids


class _Ledger:
    """The ledger, whose verbs may lack memory."""

    def __init__(self, ledger: Any, life: Life) -> None:
        self._ledger, self._life = ledger, life

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ledger, name)
        return self._life._failing(value, name) if name in VERBS else value


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_lives_of_engines(
    seeds: list[int],
    target: Any,
    heads: Any,
    windowed: Any,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TargetModel, "close", lambda self: None)  # the next life has it too
    num_whole = num_faults = num_retracted = num_retracted_turns = 0
    for seed in seeds:
        life = Life(seed, target, heads, windowed, reference)
        try:
            for _ in range(40):
                life.step()
            life.end(tidily=seed % 3 != 0)
        except BaseException:
            print(seed, life.config, life.draft)
            raise
        finally:
            life.restore()
        life.comparison.finish()
        life.compare_samples()
        num_whole += life.num_whole
        num_faults += life.num_faults
        num_retracted += life.num_retracted
        num_retracted_turns += life.num_retracted_turns
    print("retracted turns of sessions:", num_retracted_turns)
    counts = num_whole, num_faults, num_retracted
    assert LIVES or all(counts), counts  # else they prove little
