"""`python -m benches scheduler`: the host's time for a round of scheduler and ledger.

The simulated device gives the results; its own time does not count. A turn has three parts:
`schedule`; `launch`, with the table delta that goes to the device; `finish`. New requests come as
others end, so most turns of a large batch also admit and prefill some. Each batch is measured a
second time with the prefix cache on: no prompt hits, but texts are indexed and pages evicted.
Figures are medians over turns. If growth is linear, a row costs as much in a large batch as in a
small one.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.sim import Arrival, Settings, SimDevice, Text
from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, draw, machine, print_json
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step
from specpool.engine.shape_names import parse_shape
from specpool.errors import ConfigError

BATCHES = (1, 32, 256, 1024)
PARTS = ("schedule", "launch", "finish", "all")

# The project's targets: microseconds a round, by batch.
MOST_US = {32: 60.0, 256: 300.0}

PROMPT, OUTPUT = (64, 512), (128, 384)  # tokens of a request, at least and at most


class HostLoad:
    """A batch at work on the simulated device, its parts timed."""

    def __init__(
        self,
        batch: int,
        shape: Shape,
        overlap_depth: int,
        page_size: int,
        *,
        prefix_cache: bool = False,
    ) -> None:
        settings = Settings(
            page_sizes=(page_size, page_size),
            num_pages=(0, 0),
            shapes=((shape.num_steps, shape.topk, shape.num_draft_tokens),),
            overlap_depth=overlap_depth,
            max_batch=batch,
            prefill_tokens=1 << 14,
            max_context_len=PROMPT[1] + OUTPUT[1],
        )
        pages = tuple((batch + 1) * pages for pages in settings.pages_per_row())
        self._settings = settings = replace(settings, num_pages=pages)
        self._rng = random.Random(0)
        self._ledger = settings.ledger()
        self._device = SimDevice(self._ledger, settings, self._rng, has_memory=False)
        self._scheduler = Scheduler(
            self._ledger,
            SchedulerConfig(
                max_batch=batch,
                prefill_tokens=settings.prefill_tokens,
                keeps_draft_kv=True,
                prefix_cache=prefix_cache,
            ),
        )
        self._ids = itertools.count(1)
        self._texts: dict[int, Text] = {}
        self._flying: deque[list[Step]] = deque()
        self._batch = batch
        self._refill()

    def _refill(self) -> None:
        """As many requests as rows run or wait."""
        scheduler = self._scheduler
        while scheduler.num_running + scheduler.num_waiting < self._batch:
            request_id, prompt_len = next(self._ids), self._rng.randint(*PROMPT)
            arrival = Arrival(
                request_id=request_id,
                turn=0,
                prompt_len=prompt_len,
                max_len=prompt_len + self._rng.randint(*OUTPUT),
                shape=1,
                accept_rate=0.7,
            )
            self._texts[request_id] = Text(arrival)
            scheduler.submit(arrival.request())

    def turn(self) -> tuple[float, float, float]:
        """Microseconds of schedule, launch and finish in one turn."""
        now = time.perf_counter_ns
        start = now()
        steps = self._scheduler.schedule()
        schedule = now() - start
        launch = finish = 0
        for step in steps:
            number = step.plan.step
            start = now()
            self._scheduler.launch(step)
            delta = self._ledger.take_delta(number)
            self._ledger.ack_delta(number)
            launch += now() - start
            self._device.launch(step, [self._texts[r.request_id] for r in step.requests], delta)
        self._flying.append(steps)
        while len(self._flying) > self._settings.overlap_depth or (self._flying and not steps):
            for step in self._flying.popleft():
                result = self._device.result(step.plan)
                start = now()
                self._scheduler.take_over(step, result)
                finish += now() - start
                for request in step.requests:
                    if request.finish_reason is not None:
                        self._texts.pop(request.request_id, None)
        self._refill()
        return schedule / 1e3, launch / 1e3, finish / 1e3


def measured(load: HostLoad, warm_up: int, num_turns: int) -> list[float]:
    """Medians of schedule, launch, finish and their sum, in microseconds."""
    for _ in range(warm_up):
        load.turn()
    turns = [load.turn() for _ in range(num_turns)]
    parts = [statistics.median(part) for part in zip(*turns, strict=True)]
    return [*parts, statistics.median(sum(turn) for turn in turns)]


def scheduler(
    *,
    batch_sizes: Sequence[int],
    shape: str,
    page_size: int,
    overlap_depth: int,
    repeats: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    check_int("overlap_depth", overlap_depth, 0, 1)
    check_int("page_size", page_size, 1, 1 << 12)
    for batch in batch_sizes:
        check_int("batch", batch, 1, 1 << 14)
    parsed = parse_shape("--shape", shape)
    if parsed == Shape.none():
        raise ConfigError(f"shape {shape} drafts nothing: rounds without drafts cost less")
    if plot is not None:
        check_plot(plot)
    loads = {
        (batch, is_cached): HostLoad(
            batch, parsed, overlap_depth, page_size, prefix_cache=is_cached
        )
        for batch in batch_sizes
        for is_cached in (False, True)
    }
    rounds: dict[tuple[int, bool], list[list[float]]] = {which: [] for which in loads}
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        for repeat in progress.track(range(repeats), description="measuring"):
            for (batch, is_cached), load in loads.items():
                # The first requests come all at once: wait until they are of mixed ages.
                warm_up = 2 if repeat else 200
                num_turns = max(40, 2_000 // (1 + batch // 16))
                rounds[batch, is_cached].append(measured(load, warm_up, num_turns))
    medians = {
        which: [statistics.median(part) for part in zip(*figures, strict=True)]
        for which, figures in rounds.items()
    }
    us = {batch: medians[batch, False] for batch in batch_sizes}
    cached_us = {batch: medians[batch, True][-1] for batch in batch_sizes}
    if json:
        print_json(machine(), _results(us, cached_us))
    else:
        title = f"bench scheduler: {shape}, P={page_size}, D={overlap_depth}, repeats {repeats}"
        Console().print(_table(title, us, cached_us))
    if plot is not None:
        draw("bench scheduler", _results(us, cached_us), plot)


def _results(us: dict[int, list[float]], cached_us: dict[int, float]) -> list[Result]:
    results = []
    for batch, parts in us.items():
        for name, value in zip(PARTS[:-1], parts, strict=False):
            results.append(Result(f"{batch} rows, {name}", value, "us/round", "all", parts[-1]))
        if batch in MOST_US:
            where = ("target, at most", MOST_US[batch])
        else:
            where = ("all", parts[-1])
        results.append(Result(f"{batch} rows", parts[-1], "us/round", *where))
        name = f"{batch} rows, prefix cache"
        results.append(Result(name, cached_us[batch], "us/round", "without", parts[-1]))
    return results


def _table(title: str, us: dict[int, list[float]], cached_us: dict[int, float]) -> Table:
    table = Table(title=title, caption="microseconds of a round, medians")
    for column in ("rows", *PARTS, "a row", "target", "met", "prefix cache"):
        table.add_column(column, justify="right")
    for batch, parts in us.items():
        limit = MOST_US.get(batch)
        table.add_row(
            f"{batch:,}",
            *(f"{part:,.1f}" for part in parts),
            f"{parts[-1] / batch:.2f}",
            "" if limit is None else f"<= {limit:g}",
            "" if limit is None else "yes" if parts[-1] <= limit else "[bold]no[/bold]",
            f"{cached_us[batch]:,.1f}",
        )
    return table
