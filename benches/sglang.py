"""`python -m benches sglang`: the plug-in's allocators beside SGLang's own, on a CPU.

Both get the same calls in turns: a decode step in which no row, or every row, crosses a page's
edge, and the growth of every row by what a round of EAGLE reserves. A call's time is that of the
allocator alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, interleaved, machine, report
from specpool.errors import ConfigError

ENGINE = Path(__file__).parent.parent / ".engines" / "sglang"
ROWS, PAGE_SIZES, RESERVE = (1, 32, 256, 1024), (1, 16, 64), 64


def _timed(
    alloc: Callable[[], torch.Tensor], free: Callable[[torch.Tensor], None]
) -> Callable[[], float]:
    """Return a run that returns microseconds of `alloc`; what it gave is freed, off the clock."""

    def run(num_calls: int = 40) -> float:
        spent = 0
        for _ in range(num_calls):
            start = time.perf_counter_ns()
            new = alloc()
            spent += time.perf_counter_ns() - start
            free(new)
        return spent / num_calls / 1e3

    return run


def _freed(
    alloc: Callable[[], torch.Tensor], free: Callable[[torch.Tensor], None]
) -> Callable[[], float]:
    """Return a run that returns microseconds of `free`."""

    def run(num_calls: int = 40) -> float:
        spent = 0
        for _ in range(num_calls):
            new = alloc()
            start = time.perf_counter_ns()
            free(new)
            spent += time.perf_counter_ns() - start
        return spent / num_calls / 1e3

    return run


def _cases(pool: Any, rows: int, page_size: int) -> dict[str, Callable[[], float]]:
    """Return the runs of one allocator, by name."""
    if page_size == 1:
        calls = (lambda: pool.alloc(rows)), pool.free
        return {"decode": _timed(*calls), "free": _freed(*calls)}
    length = 10 * page_size
    held = pool.alloc(rows * length).reshape(rows, length)

    def decode(at: int) -> Callable[[], torch.Tensor]:
        lens, last = torch.full((rows,), at + 1), held[:, at - 1].contiguous()

        def call() -> torch.Tensor:
            new: torch.Tensor = pool.alloc_decode(lens, lens, last)
            return new

        return call

    before, after = torch.full((rows,), length), torch.full((rows,), length + RESERVE)
    last = held[:, -1].contiguous()

    def grow() -> torch.Tensor:
        new: torch.Tensor = pool.alloc_extend(before, before, after, after, last, rows * RESERVE)
        return new

    def keep(slots: torch.Tensor) -> None:
        pass

    def free(slots: torch.Tensor) -> None:
        pool.free_page_ids(slots // page_size)

    def free_grown(slots: torch.Tensor) -> None:
        pool.free_segment(slots, start_pos=length)

    return {
        "decode within pages": _timed(decode(length - 1), keep),
        "decode across an edge": _timed(decode(length), free),
        f"reserve of {RESERVE}": _timed(grow, free_grown),
        "free of a segment": _freed(grow, free_grown),
    }


def sglang(path: Path | None, *, repeats: int, json: bool, plot: Path | None) -> None:
    """Measure, and print what each call takes on both sides.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    if plot is not None:
        check_plot(plot)
    path = path or ENGINE
    if not (path / "sglang").is_dir():
        raise ConfigError(f"--path: {path} has no SGLang: `make engines`")
    sys.path.insert(0, str(path))
    from sglang.srt.mem_cache.allocator import paged, token

    from specpool.plugins.sglang import allocator

    results = []
    for page_size in PAGE_SIZES:
        for rows in ROWS:
            size = (rows * (10 * page_size + RESERVE) // page_size + 1) * page_size
            fixed = (torch.float16, "cpu", None, False)
            if page_size == 1:
                pools = [
                    allocator.SpecpoolTokenAllocator(size, *fixed),
                    token.TokenToKVPoolAllocator(size, *fixed),
                ]
            else:
                pools = [
                    allocator.SpecpoolPagedAllocator(size, page_size, *fixed),
                    paged.PagedTokenToKVPoolAllocator(size, page_size, *fixed),
                ]
            ours, theirs = (_cases(pool, rows, page_size) for pool in pools)
            for name, run in ours.items():
                value, reference = interleaved([run, theirs[name]], repeats)
                title = f"P={page_size}, {rows} rows: {name}"
                results.append(Result(title, value, "us", "SGLang's own", reference))
    where = machine(threads=torch.get_num_threads(), packages=("torch", "sglang"))
    report("bench sglang", where, results, json_only=json, plot=plot)
