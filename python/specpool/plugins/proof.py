"""A differential proof: an engine's own code and ours do the same operations and answer alike.

A level has cases. A case makes two sides, the engine's own and ours, and names operations one by
one from the answers of the engine's side. Each operation is done on both sides; the answers, and
what can be seen of the two sides afterwards, must be the same. `first_difference` names the first
operation where they are not. `Reach` tells which statements of the engine no operation ran, so
that code that a release adds is not accepted unseen.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import logging
import random
import sys
import textwrap
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

#: CPU seconds of this thread that all cases of a level may take.
SECONDS = 3.0
#: What is left out of a long value in a message.
MAX_CHARACTERS = 160


class Operation(NamedTuple):
    """A method of a side, and its arguments: plain values, which both sides understand.

    Only `errors` may be raised: an engine that raises anything else is not what ours was made for,
    even if ours does the same.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    errors: tuple[type[Exception], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


#: Each yield receives the answer of the engine's own side.
Operations = Generator[Operation, Any, None]


class Side(Protocol):
    """The engine's own code or ours; the operations are its methods and return plain values."""

    def state(self) -> dict[str, Any]:
        """Return what can be seen of it, by name, as plain values."""


class Case(Protocol):
    """A kind of sides, and the operations that try them."""

    name: str

    def sides(self, rng: random.Random) -> tuple[Any, Any]:
        """Return the engine's own side and ours, alike at first."""

    def operations(self, rng: random.Random) -> Operations:
        """Yield what to do next, and receive the answer of the engine's side."""


class Raised(NamedTuple):
    """An operation's answer if it raised."""

    error: type[Exception]
    text: str

    def __str__(self) -> str:
        return self.text


def first_difference(
    cases: Sequence[Case], *, episodes: int, seed: int = 0, seconds: float = SECONDS
) -> str | None:
    """Return the first operation that differs, in a line; None if all operations agree.

    Args:
        cases: each is tried once for each seed.
        episodes: how many seeds.
        seed: the first one.
        seconds: CPU seconds. Beyond them no episode begins; each case must have had one by then.
    """
    with _silence():
        return _first_difference(cases, range(seed, seed + episodes), seconds)


def difference(
    cases: Sequence[Case],
    functions: Iterable[Callable[..., Any]],
    names: Container[str],
    unserved: Container[str] = (),
    *,
    episodes: int,
    seconds: float = SECONDS,
) -> str | None:
    """Return the first operation that differs, or a statement that none ran; None if there is none.

    Args:
        cases: as in `first_difference`.
        functions: as in `Reach`.
        names: likewise.
        unserved: likewise.
        episodes: as in `first_difference`.
        seconds: likewise.
    """
    with Reach(functions, names, unserved) as reach:
        line = first_difference(cases, episodes=episodes, seconds=seconds)
    if line is None:
        for name, lines in reach.unreached().items():
            return f"{name}: no operation of the proof runs its line {lines[0]}"
    return line


def _first_difference(cases: Sequence[Case], seeds: range, seconds: float) -> str | None:
    end = time.thread_time() + seconds
    for number in seeds:
        for case in cases:
            if time.thread_time() > end:
                if number > seeds[0]:
                    return None
                return f"{case.name}: not tried within {seconds:g} s of CPU"
            line = _difference(case, number)
            if line is not None:
                return f"{case.name}, seed {number}, {line}"
    return None


def _difference(case: Case, seed: int) -> str | None:
    rng = random.Random(f"{case.name} {seed}")
    sides = case.sides(rng)
    number = 0
    operations = case.operations(rng)
    try:
        operation = next(operations, None)
        while operation is not None:
            number += 1
            answers = [_answer(side, operation) for side in sides]
            if not _is_same(*answers) or _is_unknown(answers[0], operation):
                return f"operation {number}, {operation}: " + _both("it", *answers)
            states = [side.state() for side in sides]
            for name, value in states[0].items():
                if not _is_same(value, states[1][name]):
                    here = f"operation {number}, {operation}: "
                    return here + _both(name, value, states[1][name])
            try:
                operation = operations.send(answers[0])
            except StopIteration:
                operation = None
    except Exception as error:  # a side that cannot be looked at is not the same
        return f"after operation {number}: {_error(error)}"
    return None


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the engine's own log of what it is tried with to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _answer(side: Any, operation: Operation) -> Any:
    try:
        return getattr(side, operation.name)(*operation.arguments)
    except Exception as error:
        return Raised(type(error), _error(error))


def _is_same(own: Any, ours: Any) -> bool:
    if isinstance(own, Raised) and isinstance(ours, Raised):
        return issubclass(ours.error, own.error)  # ours may say more about it
    return bool(own == ours)


def _is_unknown(answer: Any, operation: Operation) -> bool:
    return isinstance(answer, Raised) and not issubclass(answer.error, operation.errors)


def _both(name: str, own: Any, ours: Any) -> str:
    answers = own, ours
    if isinstance(own, list) and isinstance(ours, list):  # the first item that differs says most
        pairs = itertools.zip_longest(own, ours, fillvalue="nothing")
        unequal = (index for index, (first, second) in enumerate(pairs) if first != second)
        index = next(unequal, None)
        if index is not None and max(len(own), len(ours)) > 1:
            answers = tuple([*values, "nothing"][index] for values in answers)
            name = f"{name}[{index}]"
    values = [_short(value) for value in answers]
    return f"{name}: the engine's own gives {values[0]}, ours {values[1]}"


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Raised) else repr(value)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "..."


def _error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CHARACTERS]


class Reach:
    """Which statements of some functions ran while it was entered, of those that name a part.

    Args:
        functions: the engine's.
        names: what ours replaces. A statement that names nothing of it does the same on both
            sides, if both sides run it.
        unserved: what a level does not serve. The body of an `if` whose test names some of it is
            left out.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        names: Container[str],
        unserved: Container[str] = (),
    ) -> None:
        self._statements: dict[CodeType, tuple[str, list[range]]] = {}
        self._left: dict[CodeType, set[int]] = {}
        for function in functions:
            code = function.__code__
            statements = list(_statements(function, names, unserved))
            self._statements[code] = function.__qualname__, statements
            self._left[code] = {line for lines in statements for line in lines}

    def __enter__(self) -> Reach:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        left = self._left.get(frame.f_code)
        if not left:
            return None

        def line(frame: FrameType, event: str, _: Any) -> Any:
            left.discard(frame.f_lineno)
            return line

        return line

    def unreached(self) -> dict[str, list[int]]:
        """Return for each function the first lines of statements that did not run."""
        lines = {}
        for code, (name, statements) in self._statements.items():
            left = self._left[code]
            missing = [span.start for span in statements if left.issuperset(span)]
            if missing:
                lines[name] = missing
        return lines


def names_of(node: ast.AST | Callable[..., Any]) -> set[str]:
    """Return the names and attributes that a part of a program, or a function, refers to."""
    if not isinstance(node, ast.AST):
        node = ast.parse(textwrap.dedent(inspect.getsource(node)))
    return {_name(part) for part in ast.walk(node)}


def _statements(
    function: Callable[..., Any], names: Container[str], unserved: Container[str]
) -> Iterator[range]:
    """Yield the lines of each statement with one of the names; of a compound one, of its head."""
    source, first = inspect.getsourcelines(function)
    (tree,) = ast.parse(textwrap.dedent("".join(source))).body
    left_out = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and any(name in unserved for name in names_of(node.test))
        for child in node.body
        for part in ast.walk(child)
    }
    for node in ast.walk(tree):
        if node is tree or id(node) in left_out or not isinstance(node, ast.stmt):
            continue
        if isinstance(node, ast.Raise | ast.Assert):
            continue
        body: list[ast.stmt] = getattr(node, "body", [])
        inner = {id(part) for child in body for part in ast.walk(child)}
        inner |= {id(part) for child in getattr(node, "orelse", []) for part in ast.walk(child)}
        if any(_name(part) in names for part in ast.walk(node) if id(part) not in inner):
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            yield range(first + node.lineno - 1, first + end)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def unlike_method(own: type, ours: type) -> str | None:
    """Return the first method of an engine's class that ours lacks, or takes otherwise; or None.

    A private one that ours lacks is left out: only the engine's own class calls it.
    """
    for name in dir(own):
        function = inspect.getattr_static(own, name)
        if not inspect.isfunction(function):
            continue
        replacement = inspect.getattr_static(ours, name, None)
        if replacement is None and not name.startswith("_"):
            return f"{own.__name__}.{name}: ours has no such method"
        if replacement not in (None, function):
            for unknown in unknown_parameters(function, replacement):
                return f"{own.__name__}.{name}: {unknown}"
    return None


def unknown_parameters(own: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    """Return which of the engine's parameters ours does not take, and which it needs besides."""
    theirs, known = (inspect.signature(function).parameters for function in (own, ours))
    kinds = {parameter.kind for parameter in known.values()}
    any_parameters = any(part.kind is part.VAR_POSITIONAL for part in theirs.values())
    lines = []
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        lines = [
            f"parameter {name!r} is new"
            for name, parameter in theirs.items()
            if name not in known
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    for name, parameter in known.items():
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and name not in theirs and not any_parameters:
            lines.append(f"parameter {name!r} is gone")
    return lines
