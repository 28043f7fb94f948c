"""Set-ups of SGLang's loop, those that are enough for a quick run, and known ends of runs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
from sglang_loop import STUCK, Outcome, Setup, Shape

#: Slots of the pool that make SGLang's own retract, for pages of 1 to 16 slots.
NUM_TOKENS: dict[Shape | None, int] = {None: 420, (3, 1, 4): 420, (3, 4, 8): 900}
FIELDS = ("page_size", "shape", "cache", "overlap", "num_sessions", "mixed")
#: How SGLang's own memory ends some runs, and why.
OWN_ENDS = {
    STUCK: "SGLang itself: sessions hold the slots that the head of the queue waits for",
    "Prefill out of memory": "SGLang itself: a prefill finds no slots, likely a further chunk",
}


def grid(shapes: Sequence[Shape | None], mixed: Sequence[bool]) -> list[Setup]:
    """Return a set-up for each combination of page size, shape and switches."""
    return [
        Setup(
            **dict(zip(FIELDS, values, strict=True)),
            num_tokens=NUM_TOKENS[values[1]] * (4 if values[0] == 64 else 1),
            num_requests=12,
            seed=seed,
        )
        for seed, values in enumerate(
            itertools.product((1, 3, 16, 64), shapes, (True, False), (True, False), (0, 2), mixed)
        )
    ]


def name(setup: Setup) -> str:
    """Return what a test of it is called."""
    parts = [f"P{setup.page_size}", "plain" if setup.shape is None else str(setup.shape)]
    parts += [field for field in FIELDS[2:] if getattr(setup, field)]
    return "-".join(parts)


def _kinds(setup: Setup, size: int) -> set[Any]:
    """Return the values of its fields, or all pairs of them."""
    return set(itertools.combinations([(f, getattr(setup, f)) for f in FIELDS], size))


def parts(setups: list[Setup], quick: int, full: int) -> list[Any]:
    """Return parameters of a test: `quick` set-ups, and `full` in all, the rest marked.

    Each next one has the most values of fields that none before it had, then the most pairs.
    `SGLANG_LOOP_SETUPS=0` takes them all, without a mark.

    Raises:
        ValueError: a value of a field is in none of the quick ones.
    """
    if os.environ.get("SGLANG_LOOP_SETUPS") == "0":
        return [pytest.param(setup, id=name(setup)) for setup in setups]
    seen: list[set[Any]] = [set(), set()]
    left, taken = list(setups), []
    while len(taken) < full:
        best = max(left, key=lambda s: [len(_kinds(s, n + 1) - seen[n]) for n in (0, 1)])
        left.remove(best)
        marks = [pytest.mark.full] if len(taken) >= quick else []
        taken.append(pytest.param(best, id=name(best), marks=marks))
        for size in (1, 2):
            seen[size - 1] |= _kinds(best, size)
        if len(taken) == quick and (lost := [s for s in left if _kinds(s, 1) - seen[0]]):
            raise ValueError(f"{quick} set-ups lack what {dataclasses.asdict(lost[0])} has")
    return taken


def own_end(outcome: Outcome) -> str:
    """Why SGLang's own memory ended the run; "" if it did not."""
    return next((why for text, why in OWN_ENDS.items() if text in outcome.error), "")
