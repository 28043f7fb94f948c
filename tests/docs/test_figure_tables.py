"""The tables of figures in the docs of the engines are those of the newest records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from figure_tables import PAGES, Record, parts, path_of, share, times
from ledger_table import written


@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds_the_newest_records_figures(page: str) -> None:
    """`python tests/kits/figure_tables.py --write` after a new record."""
    text = path_of(page).read_text(encoding="utf-8")
    assert written(text, parts(page)) == text


def test_the_newest_record_counts(tmp_path: Path) -> None:
    for date, value in (("2026-01-02", 3.0), ("2025-12-31", 1.0)):
        result = {"name": "call", "value": value, "reference_value": 6.0}
        record = {"machine": {}, "results": [result]}
        (tmp_path / f"{date}-cpu-mine.json").write_text(json.dumps(record))
        (tmp_path / f"{date}-cpu-mine-other.json").write_text("no record of this name")
    record = Record("cpu-mine", tmp_path)
    assert (record.path.name, record.ratio("call")) == ("2026-01-02-cpu-mine.json", 0.5)
    assert (record.ratio("call", "call"), share(0.5), times(0.5), times(0.05)) == (
        0.5, "0.50", "2.0", "20"
    )  # fmt: skip
