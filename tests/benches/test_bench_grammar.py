"""`python -m benches grammar`: what it counts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import grammar
from cli_kit import call


def test_forced_spans_bring_rounds(capsys, monkeypatch):
    """Law: with long keys a round gives 1.3 times the tokens at least, and the same text."""
    cases = [case for case in grammar._cases() if case.name == "EAGLE-3 chain 3x1x4"]
    monkeypatch.setattr(grammar, "_cases", lambda: iter(cases))
    # The large vocabulary is trained on a few files.
    few_files = {"stdlib": str(Path(json.__file__).parent)}
    monkeypatch.setattr(grammar.sysconfig, "get_paths", lambda: few_files)
    code, out, err = call(
        capsys, "benches", "grammar", "--vocab", "400", "--repeats", "1", "--json"
    )
    assert code == 0, err
    results = {result["name"]: result for result in json.loads(out)["results"]}
    assert results["EAGLE-3 chain 3x1x4: tokens a round"]["ratio"] >= 1.3
    assert 0 < results["EAGLE-3 chain 3x1x4: masks' share of the time"]["value"] < 100
    for size in ("259", "400"):
        assert results[f"mask of a node, {size} tokens"]["value"] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--repeats", "0"], "repeats must be an integer in [1,"),
        (["--vocab", "5"], "vocab must be an integer in [300,"),
        (["--threads", "0"], "threads must be an integer in [1,"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(capsys, options, why):
    code, _, err = call(capsys, "benches", "grammar", *options)
    assert code == 2 and why in err and len(err.splitlines()) == 1
