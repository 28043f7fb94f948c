"""`python -m benches draft-windows`: what it trains and measures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches.draft_windows import DRAFTERS, LEAST_SHARE, check_variety, long_text
from cli_kit import call
from specpool.errors import CorruptState

SMALL = ["--length", "64", "--target-minutes", "0.001", "--draft-minutes", "0.001"]
SHORT = ["--prompts", "1", "--prompt", "192", "--tokens", "12"]


@pytest.mark.full
def test_each_drafter_is_measured_with_windows_and_without(capsys, tmp_path):
    """Law: kept models are trained once, and the figures of two runs are the same."""
    options = [*SMALL, *SHORT, "--keep", str(tmp_path), "--json"]
    code, out, err = call(capsys, "benches", "draft-windows", *options)
    assert code == 0, err
    results = json.loads(out)["results"]
    assert [result["name"].split(",")[0] for result in results] == [
        drafter.name for drafter in DRAFTERS for _ in range(9)
    ]
    lens = [result for result in results if result["unit"] == "tokens a round"]
    assert len(lens) == 9 and all(1 <= result["value"] <= 8 for result in lens)
    shares = [result for result in results if result["name"].endswith("share of the accept length")]
    assert [result["reference_value"] for result in shares] == [LEAST_SHARE, LEAST_SHARE, 1.0] * 3
    # The text is shorter than the window of 512.
    assert all(result["value"] == 1 for result in shares[::3])
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/model.safetensors")}
    code, again, err = call(capsys, "benches", "draft-windows", *options)
    assert code == 0, err
    assert json.loads(again)["results"] == results
    assert trained == {path: path.stat().st_mtime_ns for path in trained} and len(trained) == 4


def test_a_long_text_repeats_lines_of_its_last_1800_bytes():
    text = long_text(3, 20_000)
    assert len(text) == 20_000 and text.startswith(long_text(3, 900))
    lines, at, num_repeated = text.splitlines(keepends=True)[:-1], 0, 0
    for line in lines:
        num_repeated += len(line) > 20 and line in text[max(0, at - 1900) : at]
        at += len(line)
    assert 0.1 < num_repeated / len(lines) < 0.25


def test_the_figures_of_the_docs_are_those_of_the_file():
    root = Path(__file__).parents[2]
    file = root / "benches/results/2026-11-27-cpu-draft-windows.json"
    value = {r["name"]: r["value"] for r in json.loads(file.read_text("utf-8"))["results"]}
    name = "small model, 3x1x4, texts of 1600 + 440, draft window of"
    share, control = (
        value[f"{name} {window}: share of the accept length"]
        for window in ("512, sink of 4", "8, sink of 2")
    )
    error = value[f"{name} 512, sink of 4: standard error of the share"]
    page = " ".join((root / "docs/engine.md").read_text("utf-8").split())
    assert f"no loss ({share:.2f} of the accept length with a small model" in page
    assert f"standard error {error:.2f}); one of 8 + 2 keeps {control:.2f}." in page


def test_texts_that_loop_are_refused():
    """Law: a window that holds a whole loop is no evidence."""
    loop = list(b"def get_score(item):\n    return 1\n" * 8)
    with pytest.raises(CorruptState, match="the texts loop: 3 of 17 lines are different"):
        check_variety([loop])
    check_variety([list(long_text(7, 900)), list(long_text(8, 900))])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--length", "31"], "length must be an integer in [32, 2048]"),
        (["--prompts", "0"], "prompts must be an integer in [1, 1024]"),
        (
            ["--prompt", "2000", "--tokens", "41"],
            "prompt + tokens must be at most 2040, got 2000 + 41",
        ),
        (["--target-minutes", "0"], "target-minutes must be above 0, got 0"),
        (["--draft-minutes", "nan"], "draft-minutes must be above 0, got nan"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(capsys, options, why):
    code, _, err = call(capsys, "benches", "draft-windows", *options)
    assert code == 2 and why in err and len(err.splitlines()) == 1
