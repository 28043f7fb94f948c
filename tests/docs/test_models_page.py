"""Law: docs/models.md says what the code does with the transformers that it was written with."""

from __future__ import annotations

import re

import pytest
import transformers

import survey
from paths import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text()
LINES = {name: line for line, name in re.findall(r"^(\| `([^`]+)` \| `.*\|)$", PAGE, re.M)}
SAMPLE = (
    "bert",
    "bloom",
    "deepseek_v3",
    "deepseek_v32",
    "falcon",
    "gpt_oss",
    "gptj",
    "kimi_linear",
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
    assert set(LINES) == set(survey.TYPES)
    verdicts = {line.split("|")[3].strip() for line in LINES.values()}
    assert verdicts == {"runs", "refused", "not tried"}


def test_the_counts_are_those_of_the_lines() -> None:
    for verdict in ("runs", "refused", "not tried"):
        (count,) = re.findall(rf"^\| {verdict} \| (\d+) \|$", PAGE, re.M)
        assert int(count) == sum(f"| {verdict} |" in line for line in LINES.values())


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in survey.TYPES],
)
def test_the_page_agrees_with_the_code(model_type: str) -> None:
    with survey.silence():
        row = survey.survey(model_type)
    assert row.line() == LINES[model_type]
