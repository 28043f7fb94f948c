"""What the benches of the plug-ins share: where an engine lies, and the time of one call."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from specpool.checks import check_int
from specpool.cli.results import check_plot
from specpool.errors import ConfigError

Run = Callable[[], float]

ROOT = Path(__file__).parent.parent
ENGINES = ROOT / ".engines"


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
    os.environ.setdefault("SPECPOOL_STATUS", "off")  # no engine serves


def clock_ns() -> float:
    """Return the median nanoseconds between two readings of the thread's clock."""
    read = time.thread_time_ns
    return statistics.median(-(read() - read()) for _ in range(99))


def timed(call: Callable[[], Any], undo: Callable[[Any], None], num_calls: int) -> Run:
    """Return a run that returns microseconds of `call`; `undo` gets what it gave, off the clock.

    It is time on the CPU, without what the clock takes: what else the machine does, while a call
    waits for it, does not count.
    """

    def run() -> float:
        spent, clock = 0, clock_ns()
        for _ in range(num_calls):
            start = time.thread_time_ns()
            given = call()
            spent += time.thread_time_ns() - start
            undo(given)
        return (spent / num_calls - clock) / 1e3

    return run


def freed(take: Callable[[], Any], free: Callable[[Any], None], num_calls: int) -> Run:
    """Return a run that returns microseconds of `free` as `timed` does; `take` is off the clock."""

    def run() -> float:
        spent, clock = 0, clock_ns()
        for _ in range(num_calls):
            given = take()
            start = time.thread_time_ns()
            free(given)
            spent += time.thread_time_ns() - start
        return (spent / num_calls - clock) / 1e3

    return run


def example(name: str) -> ModuleType:
    """Import a file of `examples/engines`, named without its `.py`.

    Raises:
        ConfigError: there is none.
    """
    path = ROOT / "examples" / "engines" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in_packages(path: Path, *names: str) -> None:
    """Let modules of packages below `path` be imported without the packages' own `__init__`."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(path.joinpath(*name.split(".")))]
        sys.modules[name] = module
