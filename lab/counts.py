"""What the commands of simulations share: checks of their options, and the table of a tally."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table

from specpool.errors import ConfigError

# A scenario's seed is the command's seed * SEEDS + the scenario's number.
SEEDS = 1 << 32


def check_count(name: str, count: float) -> None:
    """Raise `ConfigError` unless `count` is a whole number in [1, 1e12]; it may be a float."""
    if not count >= 1 or count > 1e12 or count != int(count):
        raise ConfigError(f"{name} must be a whole number in [1, 1e12], got {count:g}")


def counts_table(title: str, tally: Any) -> Table:
    """Return a table with a line for each field of `tally`, a dataclass of integers."""
    table = Table(title=title)
    table.add_column("")
    table.add_column("", justify="right")
    for field in fields(tally):
        table.add_row(field.name.replace("_", " "), f"{getattr(tally, field.name):,}")
    return table


def print_findings(table: Table, failure: object | None) -> None:
    """Print the table with the number of findings, 0 or 1, then the failure if there is one."""
    table.add_row("findings", "0" if failure is None else "[bold]1[/bold]")
    console = Console(highlight=False)
    console.print(table)
    if failure is not None:
        console.print(str(failure), markup=False, soft_wrap=True)
