"""`python -m benches beside CHECKOUT`: what a change cost, in pairs with another checkout.

The ledger's step, the scheduler's round and plain decoding run in two processes, one by this
checkout's package and one by the other's, each with the benches of its own. The processes take
turns of a fraction of a second, now one first and now the other. Time is a process's CPU time.
Equal code takes some per cent longer in one process than in another: its memory lies elsewhere.
So new processes begin again and again, and each start has a ratio, the median of its pairs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benches.beside_process import LOADS
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, machine, report
from specpool.errors import ConfigError

HERE = Path(__file__).parents[1]
STARTS = 12  # of each side's process; the pairs are shared out among them


class Side:
    """A process that runs one load of a checkout, a turn when asked."""

    def __init__(self, checkout: Path, python: Path, load: str) -> None:
        script = Path(__file__).with_name("beside_process.py").read_text(encoding="utf-8")
        self._process = subprocess.Popen(
            [python, "-c", script, load],  # so imports begin at the folder where it runs
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> float:
        """Return the CPU seconds of a turn.

        Raises:
            ConfigError: the process ended; it has written why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(file=self._process.stdin, flush=True)
            return float(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise ConfigError("a checkout's process ended, see its error above") from None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def beside(*, checkout: Path, pairs: int, json: bool, plot: Path | None) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work, or a process ended.
    """
    check_int("pairs", pairs, 2, 1 << 16)
    if plot is not None:
        check_plot(plot)
    python = checkout.resolve() / ".venv/bin/python"
    if not python.exists():
        raise ConfigError(f"checkout needs an installed package, and {python} is not there")
    results = [r for load in LOADS for r in results_of(load, checkout.resolve(), python, pairs)]
    where = machine(threads=1, packages=("torch", "transformers"))
    report("bench beside", where, results, json_only=json, plot=plot)


def results_of(load: str, checkout: Path, python: Path, pairs: int) -> Iterator[Result]:
    """Measure one load in at least this many pairs."""
    seconds: tuple[list[float], list[float]] = ([], [])
    ratios: list[float] = []  # of each start
    for _ in range(STARTS):
        started = _pairs(load, checkout, python, -(-pairs // STARTS))
        for side, ended in zip(seconds, zip(*started, strict=True), strict=True):
            side.extend(ended)
        ratios.append(statistics.median(ours / theirs for ours, theirs in started))
    ours, theirs = (statistics.median(side) * 1e3 for side in seconds)
    yield Result(load, ours, "CPU ms a turn", "the other checkout", theirs)
    for name, ratio in (
        ("least", min(ratios)),
        ("median", statistics.median(ratios)),
        ("greatest", max(ratios)),
    ):
        yield Result(f"{load}: {name} ratio of {STARTS} starts", ratio, "times", "equal", 1.0)


def _pairs(load: str, checkout: Path, python: Path, num_pairs: int) -> list[tuple[float, float]]:
    """Start both sides; return the CPU seconds of each pair after a first that does not count."""
    with ExitStack() as stack:
        ours, theirs = Side(HERE, Path(sys.executable), load), Side(checkout, python, load)
        stack.callback(ours.close)
        stack.callback(theirs.close)
        pairs = []
        for number in range(num_pairs + 1):
            if number % 2:
                pairs.append((ours.turn(), theirs.turn()))
            else:
                pairs.append((theirs.turn(), ours.turn())[::-1])
        return pairs[1:]
