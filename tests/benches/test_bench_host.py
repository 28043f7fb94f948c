"""`python -m benches host` measures both ways, and refuses what cannot work in one line."""

from __future__ import annotations

import json

import pytest

from benches.__main__ import main
from specpool.engine.memory.host.copies import HostMemory


def bench(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "host", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


def test_the_json_has_both_ways_beside_a_prefill(monkeypatch, capsys):
    args = ("--tokens", "40", "--tokens", "300", "--repeats", "2", "--json")
    code, out, err = bench(monkeypatch, capsys, *args)
    assert code == 0, err
    results = {result["name"]: result for result in json.loads(out)["results"]}
    for tokens in (40, 300):
        back = results[f"{tokens} tokens: back from the host"]
        both = results[f"{tokens} tokens: to the host and back"]
        assert 0 < back["value"] < both["value"]
        assert back["reference_value"] == both["reference_value"] > 0
        assert back["ratio"] == back["value"] / back["reference_value"]


def test_without_a_drafter_as_a_table(monkeypatch, capsys):
    code, out, err = bench(
        monkeypatch, capsys, "--draft", "none", "--tokens", "30", "--repeats", "1"
    )
    assert code == 0, err
    assert "30 tokens: back from the host" in out and "prefilled again" in out


def test_what_does_not_come_back_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(HostMemory, "load", lambda self, *args: None)
    code, out, err = bench(monkeypatch, capsys, "--tokens", "200", "--repeats", "1")
    assert (code, out) == (2, "")
    assert "prefill and reload give different tokens" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tokens", "0"], "--tokens must be an integer in [1, 1048576], got 0"),
        (["--repeats", "0"], "--repeats must be an integer in [1, 65536], got 0"),
        (
            ["--tokens", "2047"],
            "2047 tokens and two more do not fit the model's 2048 positions",
        ),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, says):
    assert bench(monkeypatch, capsys, *args) == (2, "", f"error: {says}\n")
