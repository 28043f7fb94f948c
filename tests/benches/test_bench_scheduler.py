"""`python -m benches scheduler` measures a batch at work; refusals are one line."""

from __future__ import annotations

import json

import pytest

from benches.__main__ import main
from benches.scheduler import HostLoad
from specpool import Shape


def bench(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "scheduler", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


def test_the_json_has_every_part(monkeypatch, capsys):
    args = ("--batch", "2", "--batch", "32", "--repeats", "1", "--json")
    code, out, _ = bench(monkeypatch, capsys, *args)
    results = {result["name"]: result for result in json.loads(out)["results"]}
    assert code == 0
    for rows in ("2 rows", "32 rows"):
        parts = [results[f"{rows}, {part}"]["value"] for part in ("schedule", "launch", "finish")]
        assert min(parts) > 0 and results[rows]["value"] > max(parts)
    assert results["32 rows"]["reference_value"] == 60.0


def test_the_table_says_what_the_targets_are(monkeypatch, capsys):
    code, out, _ = bench(monkeypatch, capsys, "--batch", "32", "--repeats", "1")
    assert code == 0 and "<= 60" in out


@pytest.mark.parametrize("depth", [0, 1])
def test_the_batch_stays_full(depth):
    load = HostLoad(4, Shape.eagle(3, 1, 4), depth, 16)
    lanes = []
    launch = load._device.launch

    def counting(step, texts, delta):
        lanes.append(len(step.requests) if step.is_decode else 0)
        launch(step, texts, delta)

    load._device.launch = counting
    for _ in range(600):
        load.turn()
    assert max(lanes) == 4
    assert sum(lanes) / 600 > 3.5
    assert len(load._texts) <= 8


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--batch", "0"], "--batch must be an integer in [1, 16384], got 0"),
        (["--depth", "2"], "--depth must be an integer in [0, 1], got 2"),
        (["--shape", "0"], "shape 0 drafts nothing: rounds without drafts cost less"),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, says):
    assert bench(monkeypatch, capsys, *args) == (2, "", f"error: {says}\n")
