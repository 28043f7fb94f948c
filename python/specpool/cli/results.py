"""The output of benchmarks: the machine, and results beside references of the same run."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rich.console import Console
from rich.table import Table

from specpool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Result:
    """One figure and the reference that it is compared with."""

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float

    @property
    def ratio(self) -> float:
        """The value divided by the reference's value."""
        return self.value / self.reference_value


def machine(
    device: str = "cpu", threads: int = 1, packages: Sequence[str] = ("numpy",)
) -> dict[str, Any]:
    """Describe the machine: date, processor, device, and the versions of `packages`."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    if device.startswith("cuda"):
        import torch

        device = torch.cuda.get_device_name(device)
    return {
        "date": date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def interleaved(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median of each run over `repeats` rounds, each of which runs all of them.

    Interleaving spreads noise over all runs alike. The order is shuffled after each round, so that
    the effect of one run on the next is spread too.
    """
    values: list[list[float]] = [[] for _ in runs]
    turns, order = list(zip(values, runs, strict=True)), random.Random(0)
    for _ in range(repeats):
        for figures, run in turns:
            figures.append(run())
        order.shuffle(turns)
    return [statistics.median(figures) for figures in values]


def report(
    title: str,
    setup: dict[str, Any],
    results: Sequence[Result],
    *,
    json_only: bool,
    plot: Path | None,
) -> None:
    """Print the results as JSON or as a table; draw them if asked."""
    if json_only:
        print_json(setup, results)
    else:
        table = Table(title=title)
        for column in ("", "value", "unit", "reference", "its value", "ratio"):
            table.add_column(
                column, justify="left" if column in ("", "unit", "reference") else "right"
            )
        for r in results:
            table.add_row(
                r.name,
                f"{r.value:.4g}",
                r.unit,
                r.reference,
                f"{r.reference_value:.4g}",
                f"{r.ratio:.2f}",
            )
        # Wide enough for all columns, also if the output is not a terminal.
        console = Console()
        Console(width=max(console.width, 128)).print(table)
    if plot is not None:
        draw(title, results, plot)


def print_json(setup: dict[str, Any], results: Sequence[Result]) -> None:
    """Print the machine and the results as one JSON object."""
    print(as_json(setup, results))


def as_json(setup: dict[str, Any], results: Sequence[Result]) -> str:
    """Return the machine and the results as one JSON object."""
    rows = [asdict(result) | {"ratio": result.ratio} for result in results]
    return json.dumps({"machine": setup, "results": rows}, indent=1)


def check_file(path: Path, subject: str) -> None:
    """Check that a file can be written, as far as its name shows; `subject` names it in errors.

    Raises:
        ConfigError: there is no such folder, the path is a folder, or a name is too long.
    """
    if not os.path.isdir(path.parent):  # unlike path.is_dir(), no error for a name too long
        raise ConfigError(f"cannot write {subject}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise ConfigError(f"cannot write {subject}: it is a folder")
    try:
        # A file of a run is often written beside its place first, under a longer name.
        NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"cannot write {subject}: {error.strerror or error}") from None


def check_out(path: Path, *, force: bool) -> None:
    """Check that a file of `--out` can be written.

    Raises:
        ConfigError: it cannot (`check_file`), or it exists and `force` is not set.
    """
    check_file(path, str(path))
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: give --force to write over it")


def check_plot(path: Path) -> None:
    """Check that a picture can be written, before minutes of measuring.

    Raises:
        ConfigError: matplotlib or the folder is missing, the path is a folder, or the format is not
            supported.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'specpool[plot]'") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    check_file(path, f"the picture {path}")
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"cannot write the picture {path}: the formats are {', '.join(sorted(formats))}"
        )


def draw(title: str, results: Sequence[Result], path: Path) -> None:
    """Draw results of one unit as bars beside their references.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.6 * len(results)), layout="constrained")
    places = range(len(results))
    axes.barh([p + 0.2 for p in places], [r.value for r in results], 0.4, label="value")
    axes.barh(
        [p - 0.2 for p in places], [r.reference_value for r in results], 0.4, label="reference"
    )
    axes.set_yticks(
        list(places), [f"{r.name}\nbeside {r.reference}: {r.ratio:.2f}" for r in results]
    )
    axes.invert_yaxis()
    axes.set_xlabel(results[0].unit)
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from None
    pyplot.close(figure)
