"""`python -m benches plain`: decoding without drafts, and prefill, beside transformers on a CPU.

The models are random Llamas and the embedded one. Their texts do not matter, but both sides must
write the same. `plain_runs` measures; options are checked before it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches.plain_rows import SIZES, Row
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import check_plot, draw, machine
from specpool.errors import ConfigError


def plain(
    *,
    sizes: Sequence[str],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    num_requests: int,
    repeats: int,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: the texts differ.
    """
    for size in sizes:
        if size not in SIZES:
            raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {size!r:.40}")
    for name, values in (("batch", batch_sizes), ("context", contexts), ("prompt", prompts)):
        for value in values:
            check_int(name, value, 1, 1 << 15)
    check_int("requests", num_requests, 0, 1 << 10)
    check_int("repeats", repeats, 1, 1 << 10)
    check_int("threads", threads, 1, 1 << 10)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    from benches.plain_runs import rows_of

    rows: list[Row] = []
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        for size in progress.track(sizes, description="measuring"):
            rows += rows_of(size, batch_sizes, contexts, prompts, num_requests, repeats)
    where = machine(threads=threads, packages=("torch", "transformers"))
    if json:
        import json as encoder

        results = [asdict(row) | {"ratio": row.ratio} for row in rows]
        print(encoder.dumps({"machine": where, "results": results}, indent=1))
    else:
        console = Console()
        Console(width=max(console.width, 128)).print(_table(rows))
    if plot is not None:
        draw("bench plain", rows, plot)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="bench plain", caption="medians; least and greatest ratio of all turns")
    table.add_column("")
    for column in ("value", "unit", "transformers", "ratio", "least", "most", "by CPU time"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (row.ratio, row.least_ratio, row.most_ratio, row.cpu_ratio)
        shown = (f"{row.value:.4g}", row.unit, f"{row.reference_value:.4g}")
        table.add_row(row.name, *shown, *(f"{number:.2f}" for number in numbers))
    return table
