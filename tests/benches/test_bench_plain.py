"""`python -m benches plain`: what it prints, and what it refuses."""

from __future__ import annotations

import itertools
import json

import pytest

pytest.importorskip("transformers")

from benches import plain_runs
from benches.__main__ import main
from specpool.engine.engine import Engine


def bench(monkeypatch, capsys, options: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "plain", *options.split()])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


# Transformers' continuous batching takes most of a minute to start.
@pytest.mark.parametrize("requests", [0, pytest.param(4, marks=pytest.mark.full)])
def test_every_figure_stands_beside_transformers(monkeypatch, capsys, requests) -> None:
    options = "--size tiny --batch 2 --context 40 --prompt 90 --repeats 1 --json --requests"
    code, out, err = bench(monkeypatch, capsys, f"{options} {requests}")
    assert (code, err) == (0, "")
    found = json.loads(out)
    names = [row["name"] for row in found["results"]]
    assert names[:4] == [
        "tiny: decoding, batch 2, 40 tokens, fresh pages",
        "tiny: decoding, batch 2, 40 tokens, used pages",
        "tiny: decoding, batch 2, 20 to 40 tokens, used pages",
        "tiny: prefill of 90 tokens, used pages",
    ]
    assert {row["reference"] for row in found["results"]} <= {
        "transformers generate",
        "transformers continuous batching",
    }
    for row in found["results"]:
        assert row["ratio"] == pytest.approx(row["value"] / row["reference_value"])
        assert 0 < row["least_ratio"] <= row["most_ratio"] and row["cpu_ratio"] > 0


def test_used_pages_lie_in_no_order() -> None:
    with Engine.from_pretrained(max_batch=4, max_context_len=128, num_pages=64) as engine:
        plain_runs._scatter(engine)
        ledger = engine.ledger
        assert ledger.free_pages(0) == 64
        row = ledger.admit()
        step = ledger.prepare_extend([row], [128]).step
        pages = ledger.full_table(0)[row].tolist()
        ledger.cancel(step)
        ledger.abort(row)
    steps = [after - before for before, after in itertools.pairwise(pages)]
    assert len(pages) == 8 and sum(abs(step) != 1 for step in steps) >= 4


def test_both_sides_read_as_much_in_each_turn() -> None:
    model = plain_runs._model("tiny")
    prompts = plain_runs._tokens(2, 20, model.config.vocab_size)
    theirs = plain_runs._Cached(model, prompts)
    with plain_runs._engine(plain_runs._model("tiny"), 2, 60) as engine:
        ours = plain_runs._Running(engine, prompts, 30)
        for _ in range(3):
            (length,) = set(engine.ledger.resolved_len[1:3].tolist())
            assert theirs._cache.get_seq_length() + 1 == length
            ours.window()
            theirs.window()
        ours.stop()


@pytest.mark.parametrize(
    "options", ["--size 7b", "--batch 0", "--context 0", "--prompt 0", "--repeats 0"]
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, options: str) -> None:
    code, out, err = bench(monkeypatch, capsys, options)
    assert (code, out) == (2, "") and "must be" in err
