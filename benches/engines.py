"""What the benches of the plug-ins share: where an engine lies, and the time of one call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specpool.checks import check_int
from specpool.cli.results import check_plot
from specpool.errors import ConfigError

Run = Callable[[], float]

ENGINES = Path(__file__).parent.parent / ".engines"


def load(name: str, title: str, path: Path | None, *, repeats: int, plot: Path | None) -> None:
    """Make an engine's package importable.

    Raises:
        ConfigError: there is none, or an option cannot work.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    if plot is not None:
        check_plot(plot)
    path = path or ENGINES / name
    if not (path / name).is_dir():
        raise ConfigError(f"--path: {path} has no {title}: `make engines`")
    sys.path.insert(0, str(path))


def timed(call: Callable[[], Any], undo: Callable[[Any], None], num_calls: int) -> Run:
    """Return a run that returns microseconds of `call`; `undo` gets what it gave, off the clock."""

    def run() -> float:
        spent = 0
        for _ in range(num_calls):
            start = time.perf_counter_ns()
            given = call()
            spent += time.perf_counter_ns() - start
            undo(given)
        return spent / num_calls / 1e3

    return run


def freed(take: Callable[[], Any], free: Callable[[Any], None], num_calls: int) -> Run:
    """Return a run that returns microseconds of `free`; `take` is off the clock."""

    def run() -> float:
        spent = 0
        for _ in range(num_calls):
            given = take()
            start = time.perf_counter_ns()
            free(given)
            spent += time.perf_counter_ns() - start
        return spent / num_calls / 1e3

    return run
