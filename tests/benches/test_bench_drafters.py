"""`python -m benches drafters`: what it measures, and what it refuses."""

from __future__ import annotations

import json

import pytest

from benches import llama
from cli_kit import call


@pytest.mark.full
def test_each_drafter_stands_beside_transformers_on_the_same_target(capsys, monkeypatch):
    """Law: searches run on the toys and on a random model. Both sides write plain decoding's text,
    or the command fails."""
    sizes = llama.Llama(64, 2, 1, 32, 128, 2, 8_000)
    monkeypatch.setattr(llama, "Llama", lambda *_: sizes)
    options = ["--tokens", "8", "--prompt", "64", "--repeats", "1", "--json"]
    code, out, err = call(capsys, "benches", "drafters", *options)
    assert code == 0, err
    beside = [each for each in json.loads(out)["results"] if each["unit"] == "tokens / CPU s"]
    names = [each["name"].split(", chain")[0] for each in beside]
    large = "random model of 1M, prompts of 64: "
    assert names == ["small model", "ngram", "suffix", f"{large}ngram", f"{large}suffix"]
    assert all(each["value"] > 0 and each["reference_value"] > 0 for each in beside)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--steps", "17"], "steps must be an integer in [1, 16]"),
        (["--tokens", "7"], "tokens must be an integer in [8, 1024]"),
        (["--prompt", "-1"], "prompt must be an integer in [0, 16384]"),
        (["--repeats", "0"], "repeats must be an integer in [1,"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(capsys, options, why):
    code, _, err = call(capsys, "benches", "drafters", *options)
    assert code == 2 and why in err and len(err.splitlines()) == 1
