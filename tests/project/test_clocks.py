"""No test fails because the machine is busy: none asserts how long something took."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import ROOT

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
#: Tests that do assert it, and why.
EXCEPTIONS = {
    "test_half_open_connections_are_closed": "load can only lengthen what it asks for at least",
    "test_a_rank_that_ends_while_it_loads_ends_the_start": "less than ranks wait for each other",
    "test_a_new_length_costs_no_plan_cuda": "a median on a card, which no other test shares",
    "test_a_killed_replica_takes_only_its_own_with_it": "a cluster of Ray recovers within a minute",
}


def _reads_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLOCKS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
    )


def _is_duration(node: ast.AST, durations: set[str]) -> bool:
    """Whether an expression has a difference of clock readings in it, or a name for one."""
    return any(
        (isinstance(part, ast.Name) and part.id in durations)
        or (
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Sub)
            and any(map(_reads_clock, ast.walk(part)))
        )
        for part in ast.walk(node)
    )


def _named(node: ast.AST, durations: set[str]) -> Iterator[str]:
    """The names that a statement gives to durations, or to lists of them."""
    if isinstance(node, ast.Assign | ast.AugAssign) and _is_duration(node.value, durations):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend", "insert")
        and isinstance(node.func.value, ast.Name)
        and any(_is_duration(argument, durations) for argument in node.args)
    ):
        yield node.func.value.id


def timed_assertions(source: str) -> list[tuple[str, int]]:
    """Return (function or class, line) of each assertion on a duration.

    A deadline is none of them: `assert time.monotonic() < end` ends what would wait for ever.
    """
    lines = []
    for scope in ast.parse(source).body if "time." in source else ():
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        durations: set[str] = set()
        while True:
            names = {name for node in ast.walk(scope) for name in _named(node, durations)}
            if names <= durations:
                break
            durations |= names
        lines += [
            (scope.name, node.lineno)
            for node in ast.walk(scope)
            if isinstance(node, ast.Assert) and _is_duration(node.test, durations)
        ]
    return lines


def test_no_test_asserts_how_long_something_took() -> None:
    assertions = {
        (name, f"{path.relative_to(ROOT)}:{line}")
        for path in sorted(Path(ROOT, "tests").rglob("*.py"))
        for name, line in timed_assertions(path.read_text("utf-8"))
    }
    assert {where for name, where in assertions if name not in EXCEPTIONS} == set()
    assert EXCEPTIONS.keys() == {name for name, _ in assertions}


@pytest.mark.parametrize(
    ("lines", "is_timed"),
    [
        (["start = time.monotonic()", "assert time.monotonic() - start < 5"], True),
        (["took = time.perf_counter() - start", "assert took < limit"], True),
        (["took.append(time.perf_counter_ns() - start)", "assert max(took) < 1"], True),
        (["took = time.time() - start", "ratio = took / other", "assert ratio < 2"], True),
        (["end = time.monotonic() + 60", "assert time.monotonic() < end"], False),
        (["start = time.thread_time()", "assert time.thread_time() - start < other"], False),
        (["took = time.monotonic() - start", "print(took)", "assert answers"], False),
    ],
)
def test_a_duration_is_found_by_whatever_name(lines: list[str], is_timed: bool) -> None:
    source = "def test():\n" + "".join(f"    {line}\n" for line in lines)
    assert bool(timed_assertions(source)) == is_timed
