"""`python -m benches nodes`: what it prints, and that its drafter is right as often as it says."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from benches.__main__ import main
from benches.known_text import guesses


def bench(monkeypatch, capsys, options: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "nodes", *options.split()])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


def test_a_guess_is_right_as_often_as_it_says() -> None:
    """Law: of the tokens said to be right with p, the share p is; the first ones at the rate."""
    texts = np.random.default_rng(1).integers(0, 50, (2, 20_000))
    rates = (0.9, 0.3)
    made = guesses(texts, rates, 4, 50, lambda p: p)
    ids, p = made.ids.numpy(), made.p.numpy()
    assert (np.sort(ids, axis=2)[..., 1:] != np.sort(ids, axis=2)[..., :-1]).all()
    assert (p[..., 1:] <= p[..., :-1]).all()
    right = ids == texts[..., None]
    assert (right.any(axis=2).mean(axis=1) > np.array(rates)).all()
    for low in np.arange(0, 1, 0.1):
        said = (p >= low) & (p < low + 0.1)
        assert right[said].mean() == pytest.approx(p[said].mean(), abs=0.03)


@pytest.mark.parametrize("kind", ["chains", pytest.param("trees", marks=pytest.mark.full)])
def test_all_ways_stand_beside_all_nodes(monkeypatch, capsys, kind) -> None:
    """The command raises if a text is not plain decoding's."""
    options = f"--size tiny --batch 2 --kind {kind} --says honest --context 64 --tokens 24"
    code, out, err = bench(monkeypatch, capsys, f"{options} --repeats 1 --json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["results"]
    found = {row["name"]: row for row in rows}
    name = f"tiny, 2 rows, {kind}, honest drafter"
    assert found[f"{name}, fixed: levels that were not drafted"]["value"] > 0
    for way in ("all nodes", "fixed", "budget", "budget, auto"):
        assert found[f"{name}, {way}"]["value"] > 0
    beside = [row["reference"] for row in rows if row["name"] == f"{name}, budget"]
    assert beside[:2] == ["plain", "cost"] and beside[-1].startswith("best shape, ")
    read = found[f"{name}, budget, auto: nodes that the target read"]
    assert 0 < read["ratio"] <= 1


def test_bad_options_are_refused_at_once(monkeypatch, capsys) -> None:
    for options, message in (
        ("--size 7b", "size must be one of tiny, 25m, 125m, got '7b'"),
        ("--kind lists", "kind must be one of chains, trees, got 'lists'"),
        ("--batch 0", "batch"),
    ):
        code, _, err = bench(monkeypatch, capsys, options)
        assert code != 0
        assert message in " ".join(err.split())
