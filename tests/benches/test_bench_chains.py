"""`python -m benches reserve --chains`: its figures are those of arithmetic, and of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import chains
from benches.__main__ import main
from benches.chains import BLOCK, HEAD, LLAMA, PAIRS, SINK, SMALL, WINDOW, Card

ROOT = Path(__file__).parents[2]


def bench(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "reserve", "--chains", *args])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def test_bytes_of_a_request_are_those_of_its_tokens_and_pages():
    """A peer keeps draft KV of every token, we of a window, a sink, the round and cut pages."""
    assert [layers.token_bytes for layers in (LLAMA, HEAD, SMALL, BLOCK)] == [
        32 * 2 * 8 * 128 * 2,
        2 * 8 * 128 * 2,
        16 * 2 * 8 * 64 * 2,
        5 * 2 * 8 * 128 * 2,
    ]
    for line in chains.lines(Card(80 << 30, 16, 0)):
        target, draft = line.pair.target.token_bytes, line.pair.draft.token_bytes
        reserve = 16 + 2 * line.pair.shape.num_draft_tokens + 16  # headroom, rounds, a cut page
        assert (
            0
            <= line.peer.request_bytes - line.live * (target + draft)
            <= reserve * (target + draft)
        )
        kept = line.ours.request_bytes - line.ceiling.request_bytes
        assert (WINDOW + SINK) * draft <= kept <= (WINDOW + SINK + 16 + reserve) * draft
        assert 1 < line.gain < line.ceiling_gain
        for counted in (line.peer, line.ours, line.ceiling):
            room = Card(80 << 30, 16, 0).kv_bytes(line.pair)
            # What prefill steps and spare windows take is at most a twentieth.
            assert 0.95 * room < (counted.num_requests + 1) * counted.request_bytes
            assert counted.num_requests * counted.request_bytes <= room


def test_a_window_gains_nine_tenths_of_what_is_possible(monkeypatch, capsys):
    code, out, err = bench(monkeypatch, capsys, "--page-size", "16", "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    goals = [result for result in results if result["reference"] == "target, at least"]
    assert len(goals) == 2 * len(PAIRS)
    assert all(result["ratio"] >= 1 for result in goals)
    value = {result["name"]: result["value"] for result in results}
    assert (
        value["Llama 8B, model of 1B, 3x1x4, 8,192 tokens: a peer's bytes of a request / ours"]
        > 1.2
    )


def test_the_table_has_every_pair(monkeypatch, capsys):
    code, out, err = bench(monkeypatch, capsys, "--memory", "48GiB")
    assert code == 0, err
    assert "48 GiB, P=64, D=1, draft window 512 + sink 4" in out
    assert all(pair.name in out for pair in PAIRS)


def test_the_figures_of_the_docs_are_those_of_the_file():
    file = ROOT / "benches/results/2026-11-27-reserve-chains.json"
    results = json.loads(file.read_text("utf-8"))["results"]
    page = " ".join((ROOT / "docs/engine.md").read_text("utf-8").split())
    gains = {}
    for pair, form in (
        (PAIRS[0], "{:.2f} times with an EAGLE-3 head ({} instead of {})"),
        (
            PAIRS[1],
            "{:.2f} times the bytes of one with a window of 512 + 4 and a draft model of 1B ({}",
        ),
        (PAIRS[2], "{:.2f} times with a block drafter of 5 layers ({} instead of {})"),
    ):
        name = f"{pair.name}, 8,192 tokens"
        (gain,) = [r for r in results if r["name"] == f"{name}: a peer's bytes of a request / ours"]
        at_once = f"{name}; draft window {WINDOW} + {SINK}: requests at once"
        (fit,) = [r for r in results if r["name"] == at_once]
        figure = form.format(gain["value"], fit["value"], fit["reference_value"])
        assert figure in page, figure
        gains[pair] = gain
    ceilings = [f"{gains[pair]['reference_value']:.2f}" for pair in (PAIRS[1], PAIRS[2], PAIRS[0])]
    assert "No draft KV at all would gain {}, {} and {} ".format(*ceilings) in page
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"a draft model of 1B gain {gains[PAIRS[1]]['value']:.2f} (" in readme


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trace"], "--trace and --chains count different things: give one of them"),
        (["--seed", "3", "--memory", "80GiB"], "only --trace takes --seed"),
        (["--layers", "8"], "--chains has pairs of its own: no --shape, --layers, --draft-layers"),
        (["--memory", "much"], "memory must be bytes, such as 80GiB"),
        (["--memory", "16GiB"], "memory 16 GiB holds no KV beside"),
        (["--memory", "20GiB"], "one row of 65536 tokens needs"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, message):
    code, out, err = bench(monkeypatch, capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
