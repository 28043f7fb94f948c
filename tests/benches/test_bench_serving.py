"""`python -m benches serve` measures both sides of each figure, and refuses in one line."""

from __future__ import annotations

import json

import pytest

from cli_kit import call


@pytest.mark.full
def test_each_figure_has_both_sides(capsys):
    code, out, err = call(
        capsys,
        "benches",
        *("serve", "--streams", "2", "--tokens", "8", "--repeats", "1", "--flood", "200", "--json"),
    )
    assert code == 0, err
    results = json.loads(out)["results"]
    assert len(results) == 13
    for result in results:
        # So small a flood may be answered as fast as it comes: nothing waits or is refused then.
        assert result["value"] > 0 or result["unit"] == "requests", result
        assert result["reference_value"] > 0, result
        assert result["ratio"] == result["value"] / result["reference_value"]
    references = {result["reference"] for result in results}
    assert {"Engine.generate in one call", "Engine.stream", "engine in a thread"} <= references


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--streams", "0"], "--streams must be an integer in [1, 256], got 0"),
        (["--tokens", "1"], "--tokens must be an integer in [2, 1024], got 1"),
        (["--repeats", "0"], "--repeats must be an integer in [1, 1024], got 0"),
        (["--flood", "9"], "--flood must be an integer in [10, 65536], got 9"),
        (["--plot", "/no/such/x.png"], "there is no folder"),
    ],
)
def test_a_bad_option_is_one_line(capsys, args, says):
    code, out, err = call(capsys, "benches", "serve", *args)
    assert (code, out) == (2, "") and says in err and len(err.splitlines()) == 1
