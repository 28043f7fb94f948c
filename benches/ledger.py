"""`python -m benches ledger`: a decode step of a batch, beside plain Python bookkeeping.

A step is every call that an engine makes: tokens_required, prepare_decode, launch, take_delta,
ack_delta, resolve, complete, with NumPy arrays. Figures are medians of medians; the two sides take
turns in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches.ledger_load import LedgerLoad, Load, PlainLoad, Setting
from benches.ledger_memory import bytes_per_page_and_row
from specpool._core import Ledger, Shape
from specpool.capacity.group_sizes import Placement
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, draw, interleaved, machine, print_json
from specpool.errors import ConfigError

SETTINGS = (
    ("tree 5/8/64, P=64", 64, Shape.eagle(5, 8, 64)),
    ("chain S=4, P=16", 16, Shape.eagle(4, 1, 5)),
)
BATCHES = (1, 32, 256, 1024, 4096)
PLAIN = "plain Python"

# The project's targets: microseconds a step, by batch; and the rest.
MOST_US = {1: 4.0, 32: 6.0, 256: 12.0, 1024: 40.0}
LEAST_SPEEDUP = {256: 30.0}
MOST_PER_ROW_GROWTH = 1.1  # from 256 to 4,096 rows: "flat"
MOST_POOL_GROWTH = 1.1  # from a thousand pages to a million: "no more"
MOST_RECORDING = 1.3

POOLS = (1_000, 1_000_000)
POOL_BATCH = 16
# Rows of the pool comparison, and their context: enough to have used every page once.
POOL_ROWS, POOL_CONTEXT = 2_048, 32_768


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that must not exceed its limit."""

    name: str
    value: float
    unit: str
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it stays within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def result(self) -> Result:
        """The figure as the JSON has it."""
        reference = "target, at least" if self.at_least else "target, at most"
        return Result(self.name, self.value, self.unit, reference, self.limit)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one part of the benchmark."""

    results: list[Result]
    targets: list[Target]


def ledger(
    *,
    batch_sizes: Sequence[int],
    repeats: int,
    overlap_depth: int,
    placement: Placement,
    layout: str,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    check_int("overlap_depth", overlap_depth, 0, 16)
    for batch in batch_sizes:
        check_int("batch", batch, 1, 1 << 16)
    if layout not in ("dense", "holey"):
        raise ConfigError(f"layout must be dense or holey, got {layout!r}")
    if plot is not None:
        check_plot(plot)
    settings = [
        Setting(name, page_size, shape, overlap_depth, placement, layout)  # type: ignore[arg-type]
        for name, page_size, shape in SETTINGS
    ]
    parts: list[Callable[[], Report]] = [
        *(partial(_steps, setting, batch_sizes, repeats) for setting in settings),
        *(partial(_recording, setting, repeats) for setting in settings),
        partial(_pools, settings[0], repeats),
        _memory,
    ]
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        reports = [part() for part in progress.track(parts, description="measuring")]
    results = [result for report in reports for result in report.results]
    targets = [target for report in reports for target in report.targets]
    if json:
        print_json(machine(), results + [target.result for target in targets])
    else:
        console = Console()
        console = Console(width=max(console.width, 128))
        title = f"bench ledger: D={overlap_depth}, {placement} group, {layout}, repeats {repeats}"
        console.print(_result_table(title, results))
        console.print(_target_table(targets))
    if plot is not None:
        draw("bench ledger", [result for result in results if result.reference == PLAIN], plot)


def _median_us(load: Load, num_steps: int) -> float:
    """Median of so many steps, in microseconds; ended requests are replaced in between."""
    taken = []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        load.step()
        taken.append(time.perf_counter_ns() - start)
        load.refill()
    return statistics.median(taken) / 1e3


def _num_steps(batch: int) -> int:
    return max(20, 2_000 // (1 + batch // 16))


def _steps(setting: Setting, batch_sizes: Sequence[int], repeats: int) -> Report:
    results, targets = [], []
    us: dict[int, float] = {}
    for batch in batch_sizes:
        loads: list[Load] = [
            LedgerLoad(setting, batch, setting.ledger(batch)),
            PlainLoad(setting, batch),
        ]
        num_steps = _num_steps(batch)
        ours, plain = interleaved([partial(_median_us, load, num_steps) for load in loads], repeats)
        us[batch] = ours
        name = f"{setting.name}, {batch} rows"
        results.append(Result(name, ours, "us/step", PLAIN, plain))
        if batch in MOST_US:
            targets.append(Target(name, ours, "us/step", MOST_US[batch]))
        if batch in LEAST_SPEEDUP:
            name = f"{name}: times faster than plain Python"
            targets.append(Target(name, plain / ours, "x", LEAST_SPEEDUP[batch], at_least=True))
    if 256 in us and 4096 in us:
        per_row = {batch: us[batch] * 1e3 / batch for batch in (256, 4096)}
        name = f"{setting.name}, a row among 4096"
        results.append(Result(name, per_row[4096], "ns/row", "among 256", per_row[256]))
        growth = per_row[4096] / per_row[256]
        targets.append(Target(f"{name} over 256", growth, "x", MOST_PER_ROW_GROWTH))
    return Report(results, targets)


def _recording(setting: Setting, repeats: int) -> Report:
    """Steps with an event log, and so with the digest, beside steps without."""
    results, targets = [], []
    with TemporaryDirectory() as folder:
        for batch in (1, 256, 1024):
            log = Path(folder) / f"{batch}.log"
            recorded = setting.ledger(batch, record=log)
            loads = [LedgerLoad(setting, batch, made) for made in (recorded, setting.ledger(batch))]
            num_steps = _num_steps(batch)
            on, off = interleaved([partial(_median_us, load, num_steps) for load in loads], repeats)
            recorded.close()
            name = f"{setting.name}, {batch} rows, recorded"
            results.append(Result(name, on, "us/step", "not recorded", off))
            targets.append(Target(f"{name} over not", on / off, "x", MOST_RECORDING))
    return Report(results, targets)


def _pools(setting: Setting, repeats: int) -> Report:
    """Measure a pool of a million pages, all of which were in use and came back in disorder."""
    loads = [
        LedgerLoad(setting, POOL_BATCH, _used_ledger(setting, num_pages)) for num_pages in POOLS
    ]
    num_steps = _num_steps(POOL_BATCH)
    small, large = interleaved([partial(_median_us, load, num_steps) for load in loads], repeats)
    name = f"{setting.name}, {POOL_BATCH} rows, a pool of {POOLS[1]:,} pages"
    result = Result(name, large, "us/step", f"a pool of {POOLS[0]:,}", small)
    return Report(
        [result], [Target(f"{name} over {POOLS[0]:,}", result.ratio, "x", MOST_POOL_GROWTH)]
    )


def _used_ledger(setting: Setting, num_pages: int) -> Ledger:
    made = setting.ledger(
        POOL_BATCH,
        num_pages,
        num_rows=POOL_ROWS,
        max_context_len=POOL_CONTEXT,
        max_batch=POOL_BATCH,
    )
    rows = []
    length = min(POOL_CONTEXT, num_pages * setting.page_size)
    while made.num_free_rows and made.free_pages(0) * setting.page_size >= length:
        row = made.admit()
        plan = made.prepare_extend([row], [length])
        made.launch(plan.step)
        made.take_delta(plan.step)
        made.ack_delta(plan.step)
        made.complete(plan.step)
        rows.append(row)
    for row in rows[::2] + rows[1::2]:
        made.finish(row)
    return made


def _memory() -> Report:
    per_page, per_row = bytes_per_page_and_row()
    # Keys and values of 16 slots in 32 layers of 8 heads of 128, two bytes each.
    kv = 16 * 32 * 2 * 8 * 128 * 2
    return Report(
        [
            Result("a page in use and its table cell", per_page, "bytes", "KV of 8B, P=16", kv),
            Result("a row besides its pages", per_row, "bytes", "a page in use", per_page),
        ],
        [],
    )


def _result_table(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=title)
    for column in ("", "value", "unit", "beside", "its value", "ratio"):
        justify = "left" if column in ("", "unit", "beside") else "right"
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for r in results:
        numbers = f"{r.value:,.4g}", f"{r.reference_value:,.4g}", f"{r.ratio:.3g}"
        table.add_row(r.name, numbers[0], r.unit, r.reference, *numbers[1:])
    return table


def _target_table(targets: Sequence[Target]) -> Table:
    table = Table(title="targets")
    for column in ("", "value", "target", "met"):
        table.add_column(column, justify="right" if column in ("value", "target") else "left")
    for target in targets:
        sign = ">=" if target.at_least else "<="
        met = "yes" if target.met else "[bold]no[/bold]"
        limit = f"{sign} {target.limit:g} {target.unit}"
        table.add_row(target.name, f"{target.value:.4g} {target.unit}", limit, met)
    return table
