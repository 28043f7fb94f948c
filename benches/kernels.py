"""Speed of the kernels beside a copy of the same bytes in the same run: `--device cuda` or `cpu`.

On a GPU (`make bench-gpu`) a figure is the device's time of one launch among several in a CUDA
graph. It is the median of turns that the kernel, the copy and an empty launch take in turn. "A
call" is a whole call from Python, back to back. Bytes read and written are added. Data smaller than
the L2 cache stays in it, the copy's data too. On a CPU the twins are measured beside torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benches.kernel_attention import BATCHES as ATTEND_BATCHES
from benches.kernel_attention import CONTEXTS, live_kv
from benches.kernel_cases import (
    MODELS,
    Case,
    Pool,
    Sizes,
    Tails,
    empty_launch,
    layer_cases,
    move_cases,
    sample_cases,
    state_cases,
    table_cases,
    tree_cases,
)
from benches.kernel_twins import HostSizes, keep_freed_memory, twin_results
from benches.record import Record
from specpool.cli.results import Result, interleaved, machine, report
from specpool.errors import SpecpoolError

PAGE_SIZES, BATCHES = (1, 16, 64), (1, 16, 64, 256)
TREE_US = 30.0  # build and verify of 256 trees with N = 64
COPY, EMPTY = "device copy", "empty launch"
FLASH = "a gather and torch's flash kernel"


@dataclass(frozen=True, slots=True)
class Launched(Result):
    """A launch; `limit` is the memory's bandwidth in GB/s, None where the driver hides it."""

    us: float
    num_bytes: int  # read and written
    limit: float | None


class Clock(Protocol):
    """How a device is timed."""

    def graph(self, run: Callable[[], object], num_bytes: int) -> Callable[[], float]:
        """What measures one launch among several, in microseconds."""

    def eager(self, run: Callable[[], object]) -> Callable[[], float]:
        """What measures one call from Python, in microseconds."""


class CudaClock:
    """CUDA events round a replayed graph of launches; the wall clock round calls."""

    def graph(self, run: Callable[[], object], num_bytes: int) -> Callable[[], float]:
        """As `Clock` says."""
        count = max(2, min(20, (1 << 30) // max(num_bytes, 1)))
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                run()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def once() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / count

        return once

    def eager(self, run: Callable[[], object]) -> Callable[[], float]:
        """As `Clock` says."""
        return lambda: _wall_us(run, 50, torch.cuda.synchronize)


class HostClock:
    """The wall clock, for the tests: kernels of the host runner, each run once."""

    def graph(self, run: Callable[[], object], num_bytes: int) -> Callable[[], float]:
        """As `Clock` says."""
        return lambda: _wall_us(run, 1, warm=False)

    def eager(self, run: Callable[[], object]) -> Callable[[], float]:
        """As `Clock` says."""
        return lambda: _wall_us(run, 1, warm=False)


def _wall_us(
    run: Callable[[], object],
    count: int,
    wait: Callable[[], object] = lambda: None,
    *,
    warm: bool = True,
) -> float:
    if warm:
        run()
        wait()
    start = time.perf_counter_ns()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter_ns() - start) / 1e3 / count


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how kernels are timed."""

    device: torch.device
    clock: Clock
    limit: float | None  # GB/s
    repeats: int

    def launches(self, where: str, cases: Iterable[Case], batch: int) -> Iterator[Result]:
        """Each case beside a copy of its bytes; at batch 1 beside an empty launch too."""
        empty = empty_launch(self.device)
        for case in cases:
            half = 16 * -(-case.num_bytes // 32)
            target, source = torch.ones(2, half, dtype=torch.uint8, device=self.device)
            runs = [
                self.clock.graph(case.run, case.num_bytes),
                self.clock.graph(
                    lambda target=target, source=source: target.copy_(source), case.num_bytes
                ),
                self.clock.graph(empty.run, 0),
            ]
            us, copy_us, empty_us = interleaved(runs, self.repeats)
            per_us = case.num_bytes / 1e3, 2 * half / 1e3  # GB/s times us
            name, of_limit = f"{case.kernel}, {where}", (us, case.num_bytes, self.limit)
            yield Launched(name, per_us[0] / us, "GB/s", COPY, per_us[1] / copy_us, *of_limit)
            if batch == 1:
                yield Launched(f"{name}: a launch", us, "us", EMPTY, empty_us, *of_limit)
                calls = [self.clock.eager(case.run), self.clock.eager(empty.run)]
                us, empty_us = interleaved(calls, self.repeats)
                yield Result(f"{name}: a call", us, "us", f"{EMPTY}, eager", empty_us)
            del target, source, runs

    def tails(self, where: str, tails: Tails) -> Iterator[Result]:
        """One launch beside upstream's torch operations, both called from Python."""
        case = tails.case()
        calls = [self.clock.eager(case.run), self.clock.eager(tails.in_torch)]
        us, torch_us = interleaved(calls, self.repeats)
        name = f"duplicate_prefix_tail, {where}: a call"
        yield Result(name, us, "us", "upstream's torch operations", torch_us)


def device_results(
    bench: Bench,
    models: dict[str, Sizes],
    page_sizes: Sequence[int] = PAGE_SIZES,
    batches: Sequence[int] = BATCHES,
) -> Iterator[Result]:
    """Every kernel; moves for each model, what sees no KV for the first one's tree."""
    device, first = bench.device, next(iter(models.values()))
    for batch in batches:
        for p in page_sizes:
            where = f"P={p}, bs={batch}"
            for model, sizes in models.items():
                cases = move_cases(sizes, Pool(sizes, batch, p, device), p, batch, device)
                yield from bench.launches(f"{model}, {where}", cases, batch)
                del cases
            if p > 1:
                tails = Tails.drawn(first, p, batch, device)
                yield from bench.launches(f"a draft layer, {where}", [tails.case()], batch)
                yield from bench.tails(f"a draft layer, {where}", tails)
                del tails
            yield from bench.launches(where, table_cases(first, p, batch, device), batch)
        where = f"bs={batch}"
        for result in bench.launches(where, tree_cases(first, batch, device), batch):
            yield result
            is_timed = batch == max(batches) and result.unit == "GB/s"
            if is_timed and not result.name.startswith("select_topk"):
                name = f"{result.name}, N={first.nodes}"
                yield Result(name, result.us, "us", "target, at most", TREE_US)
        yield from bench.launches(where, layer_cases(first, batch, device), batch)
        yield from bench.launches(where, state_cases(first, batch, device), batch)
        yield from bench.launches(where, sample_cases(first, batch, device), batch)


def attention_results(
    bench: Bench,
    batches: tuple[int, ...] = ATTEND_BATCHES,
    contexts: tuple[int, ...] = CONTEXTS,
    *,
    has_flash: bool = True,
) -> Iterator[Result]:
    """Few queries over live KV, beside a copy of its bytes and beside a gather with flash."""
    for kv, batch, counts in live_kv(bench.device, batches, contexts):
        for count in counts:
            case, where = kv.case(count), f"{kv.context} tokens, bs={batch}"
            yield from bench.launches(where, [case], batch)
            if has_flash:
                both = (case.run, kv.by_flash(count))
                runs = [bench.clock.graph(run, case.num_bytes) for run in both]
                us, flash_us = interleaved(runs, bench.repeats)
                yield Result(f"{case.kernel}, {where}", us, "us", FLASH, flash_us)


def cuda_machine(device: torch.device) -> dict[str, Any]:
    """The machine with its driver, and the memory's bandwidth by its clock and width."""
    import cupy

    attributes = cupy.cuda.runtime.deviceGetAttribute
    kilohertz, bits, l2 = (attributes(which, device.index) for which in (36, 37, 38))
    limit = 2 * kilohertz * bits / 8 / 1e6 or None  # two transfers a clock
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    driver = "unknown"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    where = machine("cuda:0", torch.get_num_threads(), ("torch", "numpy"))
    cuda = {
        "driver": driver,
        "cuda": torch.version.cuda,
        "cupy": cupy.__version__,
        "memory_bandwidth_gb_s": limit,
        "l2_bytes": l2,
    }
    return where | cuda


def picture(where: dict[str, Any], results: Sequence[Result], path: Path) -> None:
    """Bandwidth over bytes, one drawing for each move and model, with the copy's and the limit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines: dict[tuple[str, str], dict[str, list[Launched]]] = {}
    for result in results:
        match = re.fullmatch(r"(\w+), (\w+), (P=\d+), bs=\d+", result.name)
        if match and isinstance(result, Launched) and result.unit == "GB/s":
            kernel, model, page = match.groups()
            lines.setdefault((kernel, model), {}).setdefault(page, []).append(result)
    columns = min(4, len(lines))
    figure, grid = pyplot.subplots(
        math.ceil(len(lines) / columns), columns, squeeze=False, sharey=True,
        figsize=(4 * columns, 3.2 * math.ceil(len(lines) / columns)), layout="constrained",
    )  # fmt: skip
    for axes, ((kernel, model), pages) in zip(grid.flat, sorted(lines.items()), strict=False):
        for color, (page, points) in enumerate(pages.items()):
            points = sorted(points, key=lambda point: point.num_bytes)
            at = [point.num_bytes for point in points]
            axes.plot(at, [p.value for p in points], f"C{color}o-", label=page)
            axes.plot(at, [p.reference_value for p in points], f"C{color}x:")
        if where.get("memory_bandwidth_gb_s"):
            axes.axhline(where["memory_bandwidth_gb_s"], color="gray", label="memory's limit")
        if where.get("l2_bytes"):
            axes.axvline(where["l2_bytes"], color="gray", linestyle=":", label="L2")
        axes.set(title=f"{kernel}, {model}", xscale="log", xlabel="bytes read and written")
    grid[0, 0].set_ylabel("GB/s (dotted: device copy)")
    grid[0, 0].legend()
    figure.suptitle(f"{where['device']}, {where['date']}")
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=15, help="turns of a median")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the results there")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_kernels: torch finds no CUDA device here: nothing to measure", file=sys.stderr)
        return 2
    try:
        if options.device == "cpu":
            torch.set_num_threads(1)
            keep_freed_memory()
            where = machine(packages=("torch", "numpy"))
            record = Record("kernels", where, options.write)
            for result in twin_results(HostSizes(), options.repeats):
                record.add(result)
        else:
            device = torch.device("cuda", 0)
            where = cuda_machine(device)
            limit = where["memory_bandwidth_gb_s"]
            bench = Bench(device, CudaClock(), limit, options.repeats)
            record = Record("kernels", where, options.write)
            for result in itertools.chain(device_results(bench, MODELS), attention_results(bench)):
                print(f"{result.name}: {result.value:.4g} {result.unit}", file=sys.stderr)
                record.add(result)
    except (SpecpoolError, ImportError) as error:
        print(f"bench_kernels: {error}", file=sys.stderr)
        return 2
    if record.path is not None:
        print(f"wrote {record.path}", file=sys.stderr)
        if any(isinstance(result, Launched) for result in record.results):
            try:
                picture(where, record.results, record.path.with_suffix(".png"))
            except ImportError as error:
                print(f"no picture: {error}", file=sys.stderr)
    limit = where.get("memory_bandwidth_gb_s")
    title = "bench kernels" + (f": the memory's limit is {limit:.0f} GB/s" if limit else "")
    report(title, where, record.results, json_only=options.json, plot=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
