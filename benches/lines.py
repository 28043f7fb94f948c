"""`Line`: a figure of a benchmark beside its target, and the table of such lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from specpool.cli.results import Result


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A figure and its target."""

    result: Result
    min_ratio: float | None = None  # for the ratio of the result
    max_value: float | None = None  # for its value

    @property
    def target(self) -> str:
        """The target as the table shows it."""
        if self.min_ratio is not None:
            met = self.result.ratio >= self.min_ratio
            return f">= {self.min_ratio:g} {'met' if met else '[bold]missed[/bold]'}"
        if self.max_value is not None:
            met = self.result.value <= self.max_value
            return f"<= {self.max_value:g} {'met' if met else '[bold]missed[/bold]'}"
        return ""

    def results(self) -> list[Result]:
        """The figure, and its ratio beside what it should be."""
        result = self.result
        if self.min_ratio is None:
            return [result]
        name = f"{result.name}, of {result.reference}"
        return [result, Result(name, result.ratio, "times", "target, at least", self.min_ratio)]


def table_of(title: str, caption: str, lines: Sequence[Line]) -> Table:
    """Return a table with a row for each line; a name is shown once if the next row repeats it."""
    table = Table(title=title, caption=caption)
    for column in ("", "value", "unit", "reference", "its value", "ratio", "target"):
        right = column in ("value", "its value", "ratio")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    before = ""
    for line in lines:
        r = line.result
        table.add_row(
            r.name if r.name != before else "",
            f"{r.value:.4g}",
            r.unit,
            r.reference,
            f"{r.reference_value:.4g}",
            f"{r.ratio:.3g}",
            line.target,
        )
        before = r.name
    return table
