"""`python -m benches beside CHECKOUT`: what a change cost, in pairs with another checkout.

The ledger's step, the scheduler's round and plain decoding run by this checkout's package and by
the other's, each with the benches of its own. Both are in one process and have the same names:
whose turn it is has its modules in `sys.modules`. Turns are short and alternate, so that whatever
else runs on the machine slows both alike. Time is the process's CPU time.

Equal code differs by some per cent all the same, by where code and numbers lie in memory. So new
processes begin again and again. Each gives a ratio, the median of its pairs; the figure is the mean
of these, with its standard error.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, machine, report
from specpool.errors import ConfigError

#: What each checkout has of its own. Models of transformers find attention by a name, which each
#: package registers.
PACKAGES = ("benches", "lab", "specpool", "transformers")
PAIRS = 10  # of each process

Turn = Callable[[], float]  # returns its CPU seconds
Load = Callable[[], Turn]


class Checkout:
    """The packages of another checkout."""

    def __init__(self, checkout: Path) -> None:
        self._paths = [str(checkout), str(checkout / "python")]
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Let `import` find the other checkout's packages."""
        ours, paths = _taken(), sys.path[:]
        sys.modules.update(self._modules)
        sys.path[:0] = self._paths
        try:
            yield
        finally:
            self._modules = _taken()
            sys.modules.update(ours)
            sys.path[:] = paths

    def start(self, load: Load) -> Turn:
        """Build a load there."""
        with self.imported():
            turn = load()

        def timed() -> float:
            with self.imported():
                return turn()

        return timed


def _taken() -> dict[str, ModuleType]:
    """Take the modules of `PACKAGES` out of `sys.modules`."""
    names = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    return {name: sys.modules.pop(name) for name in names}


def ledger_step() -> Turn:
    """64 rows with chains of 3 on a ledger alone."""
    from benches.ledger_load import LedgerLoad, Setting
    from specpool._core import Shape

    setting = Setting("", 16, Shape.eagle(3, 1, 4), overlap_depth=1)
    load = LedgerLoad(setting, 64, setting.ledger(64))

    def turn() -> float:
        seconds = 0.0
        for _ in range(300):
            start = time.process_time()
            load.step()
            seconds += time.process_time() - start
            load.refill()
        return seconds

    return turn


def scheduler_round() -> Turn:
    """32 rows with chains of 3; the simulated device does not count."""
    from benches.scheduler import HostLoad
    from specpool._core import Shape

    load = HostLoad(32, Shape.eagle(3, 1, 4), 1, 16)
    for _ in range(200):
        load.turn()

    def turn() -> float:
        clock, time.perf_counter_ns = time.perf_counter_ns, time.process_time_ns  # of `HostLoad`
        try:
            return sum(sum(load.turn()) for _ in range(30)) / 1e6
        finally:
            time.perf_counter_ns = clock

    return turn


def plain_decode() -> Turn:
    """Texts of a random Llama of 25 million parameters, in batches of 4."""
    import torch

    from benches.plain_runs import _model, _tokens
    from specpool.engine.engine import Engine
    from specpool.engine.sampling_params import SamplingParams

    torch.set_num_threads(1)
    engine = Engine.from_pretrained(
        _model("25m"), max_batch=4, max_context_len=128, prefix_cache=False
    )
    prompts = _tokens(4, 16, 8192)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)

    def turn() -> float:
        start = time.process_time()
        engine.generate(prompts, params)
        return time.process_time() - start

    return turn


#: Each load, and how many processes it has for each of the option's: what starts in a second has
#: more.
LOADS: dict[str, tuple[Load, int]] = {
    "a ledger's step": (ledger_step, 8),
    "a scheduler's round": (scheduler_round, 4),
    "plain decoding": (plain_decode, 1),
}


def beside(*, checkout: Path, starts: int, json: bool, plot: Path | None) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("starts", starts, 2, 1 << 16)
    if plot is not None:
        check_plot(plot)
    checkout = checkout.resolve()
    if not [*checkout.glob("python/specpool/_core.*.so")]:
        raise ConfigError(f"checkout needs an installed package, and {checkout} has none")
    results = [
        result
        for name, (_, times) in LOADS.items()
        for result in results_of(name, checkout, starts * times)
    ]
    where = machine(threads=1, packages=("torch", "transformers"))
    report("bench beside", where, results, json_only=json, plot=plot)


def results_of(name: str, checkout: Path, starts: int) -> Iterator[Result]:
    """Measure one load in this many processes."""
    spawn = get_context("spawn")  # a fork has its code at the addresses of its parent
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        started = [*pool.map(partial(pairs_of, name, checkout), range(starts))]
    pairs = [pair for start_pairs in started for pair in start_pairs]
    ours, theirs = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    yield Result(name, ours, "CPU ms a turn", "the other checkout", theirs)
    ratios = [
        statistics.median(our / their for our, their in start_pairs) for start_pairs in started
    ]
    mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / math.sqrt(starts)
    yield Result(f"{name}: mean ratio of {starts} starts", mean, "times", "equal", 1.0)
    yield Result(f"{name}: standard error of the mean", error, "times", "the mean", mean)


def pairs_of(name: str, checkout: Path, start: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of `PAIRS` turns on either side.

    Every second start builds, and begins with, the other side.
    """
    (load, _), packages = LOADS[name], Checkout(checkout)
    if start % 2:
        theirs, ours = packages.start(load), load()
    else:
        ours, theirs = load(), packages.start(load)
    ours(), theirs()
    pairs = []
    for number in range(start, start + PAIRS):
        if number % 2:
            pairs.append((theirs(), ours())[::-1])
        else:
            pairs.append((ours(), theirs()))
    return pairs
