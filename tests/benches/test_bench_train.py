"""`python -m benches train`: heads of two kinds of targets beside prompt lookup."""

from __future__ import annotations

import json

import pytest

from benches import train
from cli_kit import call
from specpool.engine.assets.corpus import corpus

SMALL = ["--hidden-size", "64", "--layers", "2", "--target-minutes", "0.005", "--epochs", "0.04"]


@pytest.mark.full
def test_each_kind_of_target_gets_a_head_that_is_measured(capsys, monkeypatch, tmp_path):
    """Law: a kept target is trained once."""
    monkeypatch.setattr(train, "corpus", lambda seed, num_bytes: corpus(seed, num_bytes // 40))
    options = [*SMALL, "--keep", str(tmp_path), "--json"]
    code, out, err = call(capsys, "benches", "train", *options)
    assert code == 0, err
    names = {result["name"].split(":")[0] for result in json.loads(out)["results"]}
    assert names == {"qwen3, 0M", "gemma3, 0M"}
    lens = [each for each in json.loads(out)["results"] if each["unit"] == "tokens/round"]
    assert len(lens) == 4 and all(1 <= each["value"] <= 4 for each in lens)
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/model.safetensors")}
    monkeypatch.setattr(train, "_results", lambda *_: [])
    code, _, err = call(capsys, "benches", "train", *options)
    assert code == 0, err
    assert trained == {path: path.stat().st_mtime_ns for path in trained} and len(trained) == 2


@pytest.mark.full
@pytest.mark.timeout(4000)
def test_a_head_for_a_model_of_24_million_is_worth_it(capsys):
    """Law: within 15 minutes of two cores it accepts 2 tokens of a round, and more than lookup."""
    code, out, err = call(capsys, "benches", "train", "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    compared = [each for each in results if each["unit"] == "tokens/round"]
    assert len(compared) == 4 and all(each["ratio"] >= 1 for each in compared)
    spent = [each for each in results if each["reference"] == "15 minutes of 2 cores"]
    assert len(spent) == 2 and all(each["ratio"] <= 1 for each in spent)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--kind", "bert"], "kind must be one of qwen3, gemma3"),
        (["--hidden-size", "100"], "hidden-size must be a multiple of 64"),
        (["--layers", "1"], "layers must be an integer in [2, 64]"),
        (["--target-minutes", "0"], "target-minutes must be above 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(capsys, options, why):
    code, _, err = call(capsys, "benches", "train", *options)
    assert code == 2 and why in err and len(err.splitlines()) == 1
