"""`shrunk`: makes a case smaller while it breaks the same law at the same place.

A fault that is not known stays so: other faults may break the same law at the same place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lab.engines.case import Case, Verb
from lab.engines.device import Finding

#: Numbers of a verb that are made smaller.
SHORTENED = ("length", "shared", "most", "salt", "adapter", "priority", "stem", "samples")


def shrunk(
    case: Case,
    finding: Finding,
    run: Callable[[Case], list[Finding]],
    fault_of: Callable[[Case, Finding], object],
    plain: Mapping[str, Any],
    seconds: float = 60.0,
) -> tuple[Case, Finding]:
    """Return a smaller case and its finding, which is like `finding`.

    Args:
        case: a case whose first finding is `finding`.
        finding: what must stay broken.
        run: runs a case.
        fault_of: returns the known fault that explains a finding, if any, which must stay the same.
        plain: for settings, the values that a reader expects; tried one by one.
        seconds: the most that it may take.
    """
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller and time.monotonic() < deadline:
        smaller = False
        for simpler in _simpler(case, plain):
            if time.monotonic() > deadline:
                break
            found = run(simpler)
            if (
                found
                and found[0].is_like(finding)
                and fault_of(simpler, found[0]) == fault_of(case, finding)
            ):
                case, finding, smaller = simpler, found[0], True
                break
    return case, finding


def _simpler(case: Case, plain: Mapping[str, Any]) -> Iterator[Case]:
    """Yield cases with less in them, the smallest first."""
    verbs = case.verbs
    size = len(verbs)
    while size:
        for start in range(0, len(verbs), size):
            yield dataclasses.replace(case, verbs=verbs[:start] + verbs[start + size :])
        size //= 2
    for name, value in plain.items():
        if name in case.settings and case.settings[name] != value:
            yield dataclasses.replace(case, settings=case.settings | {name: value})
    for at, verb in enumerate(verbs):
        for simpler in _shorter(verb):
            yield dataclasses.replace(
                case,
                verbs=tuple(
                    sorted((*verbs[:at], simpler, *verbs[at + 1 :]), key=lambda verb: verb.turn)
                ),
            )


def _shorter(verb: Verb) -> Iterator[Verb]:
    for name in SHORTENED:
        value = verb.given.get(name, 0)
        least = 1 if name in ("length", "most", "samples") else 0
        for smaller in (least, value // 2, value - 1):
            if least <= smaller < value:
                given = verb.given | {name: smaller}
                if "shared" in given:
                    given["shared"] = min(given["shared"], given["length"])
                yield dataclasses.replace(verb, given=given)
    for turn in (1, verb.turn // 2, verb.turn - 1):
        if 1 <= turn < verb.turn:
            yield dataclasses.replace(verb, turn=turn)
