"""The differential proof on a toy: a stack of names, and another that is to answer alike."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import pytest

from specpool.plugins import notice, proof
from specpool.plugins.proof import Operation, Operations


class Stack:
    def __init__(self) -> None:
        self.names: list[int] = []

    def push(self, name: int) -> int:
        self.names.append(name)
        if name == 7:
            self.names.reverse()
        return len(self.names)

    def pop(self) -> int:
        return self.names.pop()

    def state(self) -> dict[str, Any]:
        return {"the size": len(self.names), "the names": sorted(self.names)}


class Case:
    name = "stack"

    def __init__(self, ours: type[Stack], names: range = range(6)) -> None:
        self.ours, self.names = ours, names

    def sides(self, rng: random.Random) -> tuple[Stack, Stack]:
        return Stack(), self.ours()

    def operations(self, rng: random.Random) -> Operations:
        size = 0
        for name in self.names:
            size = yield Operation("push", (name,))
        for _ in range(size + 1):
            yield Operation("pop", (), (IndexError,))


class SaysMore(Stack):
    def pop(self) -> int:
        try:
            return super().pop()
        except IndexError:
            raise LookError("no name") from None


class LookError(IndexError):
    pass


class OtherError(Stack):
    def pop(self) -> int:
        return self.names.pop() if self.names else next(iter(()))


class OtherAnswer(Stack):
    def push(self, name: int) -> int:
        return super().push(name) + (name == 3)


class OtherState(Stack):
    def push(self, name: int) -> int:
        return super().push(name - (name == 2))


class Unseen(Stack):
    def state(self) -> dict[str, Any]:
        return {"the size": self.names.size}  # type: ignore[attr-defined]


@pytest.mark.parametrize("ours", [Stack, SaysMore])
def test_what_answers_alike_is_accepted(ours: type[Stack]) -> None:
    assert proof.first_difference([Case(ours)], episodes=3) is None


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        (
            OtherAnswer,
            "stack, seed 5, operation 4, push(3): it: the engine's own gives 4, ours 5",
        ),
        (
            OtherState,
            "stack, seed 5, operation 3, push(2): the names[2]: the engine's own gives 2, ours 1",
        ),
        (
            OtherError,
            "stack, seed 5, operation 13, pop(): it: the engine's own gives IndexError: "
            "pop from empty list, ours StopIteration:",
        ),
        (
            Unseen,
            "stack, seed 5, after operation 1: AttributeError: 'list' object has no attribute "
            "'size'",
        ),
    ],
)
def test_the_first_operation_that_differs_is_named(ours: type[Stack], line: str) -> None:
    found = proof.first_difference([Case(Stack), Case(ours)], episodes=3, seed=5)
    assert found == line


def test_an_error_that_an_operation_may_not_raise_is_a_difference_though_both_raise_it() -> None:
    class Careless(Case):
        def operations(self, rng: random.Random) -> Operations:
            yield Operation("pop")

    line = proof.first_difference([Careless(Stack)], episodes=1)
    assert line is not None and line.startswith("stack, seed 0, operation 1, pop(): it: the engine")


def test_no_episode_begins_after_the_time_is_over() -> None:
    cases = [Case(Stack), Case(OtherAnswer)]
    assert proof.first_difference(cases, episodes=1, seconds=-1) == (
        "stack: not tried within -1 s of CPU"
    )


def test_statements_that_name_a_part_and_did_not_run_are_named() -> None:
    with proof.Reach([Stack.push, Stack.pop], {"names"}) as reach:
        assert proof.first_difference([Case(Stack)], episodes=1) is None
    first = Stack.push.__code__.co_firstlineno
    assert reach.unreached() == {"Stack.push": [first + 3]}
    with proof.Reach([Stack.push], {"names"}) as reach:
        assert proof.first_difference([Case(Stack, range(8))], episodes=1) is None
    assert reach.unreached() == {}
    with proof.Reach([Stack.push], {"others"}) as reach:
        pass
    assert reach.unreached() == {}
    with proof.Reach([Stack.push], {"names"}, unserved={"name"}) as reach:  # its `if` asks a name
        assert proof.first_difference([Case(Stack)], episodes=1) is None
    assert reach.unreached() == {}


def test_parameters_that_ours_does_not_take_are_named() -> None:
    def own(a: int, b: int = 0, *, c: int = 0) -> None: ...
    def ours(a: int, d: int) -> None: ...
    def takes_all(a: int, *rest: Any, **named: Any) -> None: ...

    assert proof.unknown_parameters(own, ours) == [
        "parameter 'b' is new", "parameter 'c' is new", "parameter 'd' is gone"
    ]  # fmt: skip
    assert proof.unknown_parameters(own, takes_all) == []
    assert proof.unknown_parameters(takes_all, ours) == []


def test_the_engines_log_is_silent_in_a_proof(caplog: pytest.LogCaptureFixture) -> None:
    class Chatters(Stack):
        def push(self, name: int) -> int:
            logging.getLogger("engine").error("a push")
            return super().push(name)

    assert proof.first_difference([Case(Chatters)], episodes=1) is None
    assert caplog.messages == []
    logging.getLogger("engine").error("after it")
    assert caplog.messages == ["after it"]


def test_a_line_each_period_and_the_metric_say_that_the_engines_own_code_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")

    def value(engine: str) -> float | None:
        labels = {"engine": engine}
        found: float | None = prometheus_client.REGISTRY.get_sample_value(notice.METRIC, labels)
        return found

    monkeypatch.setattr(notice, "PERIOD_SECONDS", 0.01)
    notice.ours_serves("a")
    assert (value("a"), value("b"), caplog.messages) == (1, None, [])
    notice.own_code_serves("b", "b's own serves", logging.getLogger("specpool.plugins.test"))
    assert (value("a"), value("b")) == (1, 0)
    deadline = time.monotonic() + 30
    while len(caplog.messages) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(notice, "PERIOD_SECONDS", 1e6)
    assert set(caplog.messages) == {"b's own serves"} and len(caplog.messages) >= 3
