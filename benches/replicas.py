"""`python -m benches replicas`: a router's choices, and what fleets lose by deaths.

The choices are timed; what a fleet loses is counted in the simulation, whose times are simulated.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lab.fleet.fleet import Fleet
from lab.fleet.settings import FleetSettings
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, interleaved, machine, report
from specpool.serve.replicas.routing import Routing, owner_of

T = TypeVar("T")

#: Choices of one timed run.
_CHOICES = 2000
#: Sessions of each replica, for the table that a router would need without owners in the ids.
_SESSIONS = 100


def replicas(
    *, numbers: Sequence[int], fleet: int, repeats: int, json: bool, plot: Path | None
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        FleetLaw: a law does not hold.
    """
    for number in numbers:
        check_int("replicas", number, 2, 100_000)
    check_int("fleet", fleet, 2, 10_000)
    check_int("repeats", repeats, 1, 1 << 16)
    if plot is not None:
        check_plot(plot)
    results = [result for number in numbers for result in _router(number, repeats)]
    results += _losses(fleet)
    report("bench replicas", machine(), results, json_only=json, plot=plot)


def _router(number: int, repeats: int) -> list[Result]:
    """Time the choices of a router that knows so many replicas."""
    rng = random.Random(0)
    tags = [f"{i:08x}" for i in range(number)]
    idents = [f"{rng.choice(tags)}.{rng.getrandbits(128):032x}" for _ in range(_CHOICES)]
    hints = [f"hint {i}" for i in range(_CHOICES)]
    routing, size = _size_of(lambda: _knowing(tags))
    table, table_size = _size_of(
        lambda: {
            f"{tag}.{rng.getrandbits(128):032x}": tag for tag in tags for _ in range(_SESSIONS)
        }
    )
    table |= {ident: ident[:8] for ident in idents}

    def owners() -> None:
        for ident in idents:
            owner = owner_of(ident)
            assert owner is not None and routing.knows(owner) == "here"

    def looked_up() -> None:
        for ident in idents:
            assert table[ident]

    def hinted() -> None:
        for hint in hints:
            routing.hinted(hint, _idle)

    def spread() -> None:
        for _ in hints:
            routing.spread()

    def changed() -> None:
        routing.update([*tags[1:], "another"])
        routing.update(tags)

    def anew() -> None:
        _knowing(tags)
        _knowing(tags)

    seconds = interleaved([_timed(run) for run in (owners, looked_up, hinted, spread)], repeats)
    owner, look_up, hint, free = (1e6 * duration / _CHOICES for duration in seconds)
    change, fresh = interleaved([_timed(changed), _timed(anew)], min(repeats, 3))
    name, sessions = f"{number:,} replicas", f"a table of {number * _SESSIONS:,} sessions"
    return [
        Result(f"{name}: find a session's owner", owner, "us", sessions, look_up),
        Result(f"{name}: follow a hint", hint, "us", "two at random", free),
        Result(f"{name}: one leaves, one comes", 5e2 * change, "ms", "made anew", 5e2 * fresh),
        Result(f"{name}: a router's memory", size / 1e6, "MB", sessions, table_size / 1e6),
    ]


def _losses(number: int) -> list[Result]:
    """Count what fleets lose: by deaths alone, and by lists that come late."""
    calm = FleetSettings(
        seed=1,
        num_replicas=number,
        num_proxies=10,
        num_clients=4 * number,
        turns_each=4,
        think_seconds=5.0,
        deaths=1.0,
        start_seconds=10.0,
    )
    healthy = Fleet(replace(calm, deaths=0.0)).run()
    dead = Fleet(calm).run()
    late = Fleet(replace(calm, list_delay=3.0)).run()
    name = f"{number:,} replicas, {4 * number:,} clients"
    per_replica = calm.num_clients / 2 / number
    return [
        Result(
            f"{name}, {dead.deaths} deaths: sessions lost by a death",
            dead.lost_sessions / dead.deaths,
            "sessions",
            "sessions of a replica",
            per_replica,
        ),
        Result(
            f"{name}: sessions that any death touched",
            100 * dead.lost_sessions / (calm.num_clients / 2),
            "%",
            "replicas that died",
            100 * dead.deaths / number,
        ),
        Result(
            f"{name}: requests for a turn or text",
            dead.attempts / (dead.turns + dead.texts),
            "requests",
            "without deaths",
            healthy.attempts / (healthy.turns + healthy.texts),
        ),
        Result(
            f"{name}, lists up to 3 s late: sessions lost without need",
            late.needless,
            "sessions",
            "turns",
            late.turns,
        ),
    ]


def _knowing(tags: Sequence[str]) -> Routing:
    routing = Routing(0)
    routing.update(tags)
    return routing


def _idle(tag: str) -> int:
    return 0


def _timed(run: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def _size_of(build: Callable[[], T]) -> tuple[T, int]:
    tracemalloc.start()
    built = build()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return built, size
