"""`Record`: the figures of one run in a file that is whole after each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specpool.cli.results import Result, as_json


class Record:
    """The figures of one run, written as they come: a run that is stopped keeps what it measured.

    Attributes:
        where: the machine.
        results: the figures so far.
        path: the JSON file, named after the date, the device and the bench; None means no file.
    """

    def __init__(self, bench: str, where: dict[str, Any], folder: Path | None) -> None:
        """Start without figures; `folder` is None if nothing is to be written."""
        self.where, self.results = where, list[Result]()
        device = re.sub(r"[^a-z0-9]+", "-", where["device"].lower()).strip("-")
        self.path = None if folder is None else folder / f"{where['date']}-{device}-{bench}.json"

    def add(self, result: Result) -> None:
        """Add a figure, and write the file anew. A reader never sees half of it."""
        self.results.append(result)
        if self.path is not None:
            half = self.path.with_suffix(".half")
            half.write_text(as_json(self.where, self.results) + "\n")
            half.replace(self.path)
