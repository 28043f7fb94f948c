"""`shrink`: makes a scenario that breaks a law smaller while it still breaks one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lab.sim.arrivals import Arrival
from lab.sim.simulation import Simulation
from lab.sim.source import Scenario

TRACE_LINES = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken law.

    Attributes:
        scenario: the scenario that broke it.
        message: the error's type and message.
        shrunk: a smaller scenario that breaks a law too.
        trace: the last events of the shrunk one.
    """

    scenario: Scenario
    message: str
    shrunk: Scenario
    trace: list[str]

    def __str__(self) -> str:
        lines = [f"BROKEN with seed {self.scenario.seed}: {self.message}", "shrunk to"]
        lines += [f"  {self.shrunk.settings}"]
        lines += [f"  {event}" for event in (*self.shrunk.arrivals, *self.shrunk.faults)]
        return "\n".join([*lines, "which goes", *(f"  {line}" for line in self.trace)])


def broken_law(scenario: Scenario, check: int = 2, most_rounds: int | None = None) -> str | None:
    """Simulate the scenario; return the type and message of its error, or None."""
    try:
        Simulation(scenario, check).run(most_rounds)
    except Exception as error:  # any error is a failure
        return f"{type(error).__name__}: {error}"
    return None


def shrink(
    scenario: Scenario,
    message: str,
    *,
    check: int = 2,
    seconds: float = 10.0,
    breaks: Callable[[Scenario, int], str | None] = broken_law,
) -> Failure:
    """Remove requests, faults and aborts while a law stays broken, for at most `seconds`."""
    original, last = scenario, message
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller and time.monotonic() < deadline:
        smaller = False
        for simpler in _simpler(scenario):
            if time.monotonic() >= deadline:
                break
            broken = breaks(simpler, check)
            if broken is not None:
                scenario, last, smaller = simpler, broken, True
                break
    simulation = Simulation(scenario, check, keeps_trace=True)
    try:
        simulation.run()
    except Exception as error:
        last = f"{type(error).__name__}: {error}"
    trace = [*simulation.trace[-TRACE_LINES:], last]
    return Failure(original, message, scenario, trace)


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with less in them, the smallest first."""
    arrivals, faults = scenario.arrivals, scenario.faults
    if faults:
        yield replace(scenario, faults=())
    size = len(arrivals) // 2
    while size:
        for start in range(0, len(arrivals), size):
            yield replace(scenario, arrivals=arrivals[:start] + arrivals[start + size :])
        size //= 2
    for i in range(len(faults)):
        yield replace(scenario, faults=faults[:i] + faults[i + 1 :])
    if scenario.settings.is_late:
        yield replace(scenario, settings=replace(scenario.settings, is_late=False))
    for i, arrival in enumerate(arrivals):
        for plainer in _plainer(arrival):
            yield replace(scenario, arrivals=(*arrivals[:i], plainer, *arrivals[i + 1 :]))
    if arrivals and arrivals[0].turn:
        first = arrivals[0].turn
        moved = tuple(replace(arrival, turn=arrival.turn - first) for arrival in arrivals)
        yield replace(scenario, arrivals=moved)


def _plainer(arrival: Arrival) -> Iterator[Arrival]:
    """Yield variants of a request without abort, stop, priority, drafts, or half its output."""
    plain: dict[str, object] = {"abort_after": None, "stop_at": None, "priority": 0, "shape": 0}
    plain |= {
        "stop_text": None,
        "unpin_after": None,
        "sample_of": None,
        "origins": (),
        "is_pin": False,
        "jump": None,
        "adapts": False,
        "most_steps": None,
    }
    for name, value in plain.items():
        if getattr(arrival, name) != value:
            yield replace(arrival, **{name: value})  # type: ignore[arg-type]
    half = (arrival.max_len - arrival.prompt_len) // 2
    if half:
        yield replace(arrival, max_len=arrival.max_len - half)
