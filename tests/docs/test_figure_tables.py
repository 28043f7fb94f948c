"""The tables of figures in the docs of the engines are those of the newest records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from figure_tables import PAGES, RESULTS, Record, parts, path_of, share, times
from ledger_table import written


@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds_the_newest_records_figures(page: str) -> None:
    """`python tests/kits/figure_tables.py --write` after a new record."""
    text = path_of(page).read_text(encoding="utf-8")
    assert written(text, parts(page)) == text


def test_each_mutant_that_a_proof_at_load_accepts_has_its_reason() -> None:
    """The page's counts are those of the records, and a line of its names each mutant."""
    page = sorted(RESULTS.glob("*-engine-mutants.md"))[-1].read_text(encoding="utf-8")
    records = [
        json.loads(sorted(RESULTS.glob(f"*-mutants-{engine}.json"))[-1].read_text(encoding="utf-8"))
        for engine in ("vllm", "sglang", "sglang-reserve", "sglang-rows")
    ]
    tried, accepted, late = (
        " | ".join(str(text) for text in texts)
        for texts in zip(
            *(
                (
                    f"{record['tried']} of {record['mutants']}",
                    len(record["accepted"]),
                    record["told apart"],
                )
                for record in records
            ),
            strict=True,
        )
    )
    assert f"| mutants | {tried} |" in page
    assert f"| accepted | {accepted} |" in page
    assert f"| of these told apart by a proof ten times as long | {late} |" in page
    for mutant in (mutant for record in records for mutant in record["accepted"]):
        name = mutant["target"].rpartition(":")[2].rpartition(".")[2]
        (line,) = re.findall(r"^line (\d+): ", mutant["text"])
        named = re.findall(rf"`(?:\w+\.)?{name}`([^`|]*)", page)
        assert any(line in re.findall(r"\d+", lines) for lines in named), mutant


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
