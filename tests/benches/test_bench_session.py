"""`python -m benches session` measures with a session and without, and refuses in one line."""

from __future__ import annotations

import json

import pytest

from cli_kit import call
from specpool import Session

SMALL = ("benches", "session", "--history", "200", "--new", "8", "--repeats", "2")


def test_the_json_has_seconds_and_tokens_of_both(capsys):
    code, out, err = call(capsys, *SMALL, "--new", "40", "--json")
    assert code == 0, err
    results = {result["name"]: result for result in json.loads(out)["results"]}
    assert len(results) == 4
    for new in (8, 40):
        name = f"{new} new tokens on 200, without a session"
        seconds, tokens = results[f"{name}: time to first token"], results[f"{name}: computed"]
        assert seconds["unit"] == "ms" and seconds["value"] > 0 and seconds["reference_value"] > 0
        assert seconds["ratio"] == seconds["value"] / seconds["reference_value"]
        assert tokens["value"] == 200 + new
        assert new <= tokens["reference_value"] <= new + 1  # the answer's last token has no KV


def test_without_a_drafter_as_a_table(capsys, tmp_path):
    plot = tmp_path / "bars.svg"
    code, out, err = call(capsys, *SMALL, "--draft", "none", "--plot", str(plot))
    assert code == 0, err
    assert "8 new tokens on 200, without a session: time to first token" in out
    assert "computed" not in plot.read_text()


def test_another_answer_is_an_error(capsys, monkeypatch):
    append = Session.append
    monkeypatch.setattr(
        Session, "append", lambda self, prompt, params: append(self, prompt[:-1], params)
    )
    code, out, err = call(capsys, *SMALL)
    assert (code, out) == (2, "")
    assert "the turn says [" in err and "the same prompt [" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--history", "16"], "--history must be an integer in [17, 1048576], got 16"),
        (["--new", "0"], "--new must be an integer in [1, 1048576], got 0"),
        (["--repeats", "0"], "--repeats must be an integer in [1, 65536], got 0"),
        (
            ["--history", "2000", "--new", "40"],
            "a history of 2000 tokens, 40 new ones and an answer of 16 do not fit the model's 2048 "
            "positions",
        ),
    ],
)
def test_a_bad_option_is_one_line(capsys, args, says):
    assert call(capsys, "benches", "session", *args) == (2, "", f"error: {says}\n")
