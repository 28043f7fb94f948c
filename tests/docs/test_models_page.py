"""Law: docs/models.md says what the code does with the transformers that it was written with."""

from __future__ import annotations

import re

import pytest
import transformers

import survey
from paths import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text()
VERDICTS = ("runs", "refused", "not tried")


def page_rows() -> dict[str, tuple[str, str]]:
    """For each type of the page its verdict and its note."""
    rows = {}
    for verdict in VERDICTS:
        part = PAGE.split(f"## {verdict.capitalize()}\n")[1].split("\n## ")[0]
        for types, note in re.findall(r"^\| (`.+`) \| (.*) \|$", part, re.M):
            for name in re.findall(r"`([^`]+)`", types):
                assert name not in rows, f"{name} stands on the page twice"
                rows[name] = (verdict, note)
    return rows


ROWS = page_rows()
SAMPLE = (
    "bert",
    "bloom",
    "deepseek_v3",
    "deepseek_v32",
    "falcon",
    "gpt_oss",
    "gptj",
    "lfm2",
    "llama4_text",
    "mimo_v2_flash",
    "rwkv",
)


@pytest.fixture(autouse=True)
def same_transformers() -> None:
    """Another version of transformers has other models and other ways to build them."""
    (written,) = re.findall(r"with transformers (\S+):", PAGE)
    if transformers.__version__ != written:
        pytest.skip(f"the page was written with transformers {written}")


def test_the_page_has_every_type_and_none_differs() -> None:
    assert set(ROWS) == set(survey.TYPES)
    assert set(re.findall(r"^## (.+)$", PAGE, re.M)) == {name.capitalize() for name in VERDICTS}


def test_the_counts_are_those_of_the_tables() -> None:
    for verdict in VERDICTS:
        (count,) = re.findall(rf"^\| {verdict} \| (\d+) \|$", PAGE, re.M)
        assert int(count) == sum(row[0] == verdict for row in ROWS.values())


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in survey.TYPES],
)
def test_the_page_agrees_with_the_code(model_type: str) -> None:
    with survey.silence():
        row = survey.survey(model_type)
    assert (row.verdict, row.cell) == ROWS[model_type]
