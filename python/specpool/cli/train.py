"""`specpool train`: shows a training, and prints what the head is worth."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specpool.cli.generate.interrupt import Interrupt
from specpool.cli.options import checks
from specpool.engine.models.files.checkpoint import read_config
from specpool.engine.models.files.names import find_model
from specpool.errors import ConfigError
from specpool.train.config import TrainConfig
from specpool.train.state import check_folder
from specpool.train.texts import read_rows

if TYPE_CHECKING:
    from specpool.train.training import TrainReport

# Seconds between two lines where there is no terminal to draw a bar on.
_LINE_SECONDS = 30.0


def run(config: TrainConfig, *, threads: int, as_json: bool) -> None:
    """Run the command.

    Raises:
        ConfigError: an option, the data or the target cannot work.
    """
    checks.check_place(device=config.device, threads=threads, dtype=config.dtype)
    checks.check_models(config.target, ())
    check_folder(config.out, resume=config.resume)
    _check_raw(config.target)
    rows = read_rows(config.data)
    checks.start_torch(threads)
    from specpool.train.training import train

    console = Console(stderr=True, highlight=False)
    interrupt = Interrupt()
    with interrupt.handled(), _ProgressDisplay.opened(console, interrupt) as watcher:
        report = train(config, rows, watcher)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        for line in lines_of(report):
            print(line)
    if not report.finished:
        raise SystemExit(130)


def _check_raw(target: str) -> None:
    """Refuse a quantized target by its file alone."""
    folder = find_model(target)
    if folder is not None and read_config(folder).get("quantization_config"):
        raise ConfigError(
            f"target: {target} is quantized (quantization_config): train on the model that it was "
            "made of"
        )


class _ProgressDisplay:
    """A watcher that draws a bar, or writes a line now and then where there is no terminal."""

    def __init__(self, console: Console, interrupt: Interrupt, progress: Progress) -> None:
        self._console, self._interrupt, self._progress = console, interrupt, progress
        self._task_id: TaskID | None = None
        self._task_name, self._total, self._next_line = "", 1.0, 0.0

    @classmethod
    @contextmanager
    def opened(cls, console: Console, interrupt: Interrupt) -> Iterator[_ProgressDisplay]:
        """Show what happens within the block."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        off = not console.is_terminal
        with Progress(*columns, transient=True, console=console, disable=off) as progress:
            yield cls(console, interrupt, progress)

    @property
    def stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._interrupt.is_requested

    def begin(self, task: str, total: float) -> None:
        """Show a part of the work that begins."""
        if self._task_id is not None:
            self._progress.remove_task(self._task_id)
        self._task_name, self._total = task, total
        self._task_id = self._progress.add_task(task, total=total, note="")
        if not self._console.is_terminal:
            self._console.print(task)
            self._next_line = time.monotonic() + _LINE_SECONDS

    def advance(self, num_done: float, note: str) -> None:
        """Show how far it is."""
        assert self._task_id is not None
        self._progress.update(self._task_id, completed=num_done, note=note)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._console.print(f"{self._task_name}: {num_done / self._total:.0%} {note}".rstrip())
            self._next_line = time.monotonic() + _LINE_SECONDS


def lines_of(report: TrainReport) -> Iterator[str]:
    """Yield the lines that tell of a training."""
    if report.num_left_out:
        yield f"{report.num_left_out} rows left out: their prompts leave no room for an answer"
    yield (
        f"{report.num_parameters / 1e6:.1f}M parameters, {report.steps} steps, "
        f"{report.epochs:.2f} passes over {report.num_texts} texts, {report.seconds / 60:.1f} min "
        f"({report.cpu_seconds / 60:.1f} min of CPU time)"
    )
    if report.held_out is None or report.accept_lens is None:
        yield f"stopped; a checkpoint is in {report.out}; the same command with --resume goes on"
        return
    figures = report.held_out
    yield f"on {report.num_held_out} held-out texts:"
    yield f"  target: loss {figures.target_loss:.3f} nats a token"
    shares = " ".join(f"{share:.1%}" for share in figures.agreement)
    yield f"  head: loss {figures.head_loss:.3f} nats against the target's distribution"
    yield f"  head: agrees with the target's likeliest token in draft 1, 2, ...: {shares}"
    lens = ", ".join(f"{name} {length:.2f}" for name, length in report.accept_lens.items())
    yield f"  accept length, chain of 3, greedy, bonus included: {lens}"
    yield f"use it: {report.command}"
