"""`python -m benches recurrent` and `beside`: what they compare, and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benches import beside, recurrent
from specpool.errors import ConfigError

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
LAYERS = {"layer_types": ["conv", "full_attention"]}


@pytest.fixture
def small(monkeypatch):
    """A family of tiny models, and short texts."""
    monkeypatch.setattr(recurrent, "_COMMON", recurrent._COMMON | SMALL)
    monkeypatch.setitem(recurrent.FAMILIES, "lfm2", ("Lfm2Config", LAYERS))
    monkeypatch.setattr(recurrent, "NUM_TOKENS", 16)


def test_a_chain_is_beside_both_references_at_each_batch(small):
    results = list(recurrent.results_of("lfm2", [1, 2], repeats=1))
    assert [r.reference for r in results] == ["worker v1", "plain"] * 2
    assert [r.name.split(", ")[1] for r in results] == ["batch 1"] * 2 + ["batch 2"] * 2
    assert all(float(r.name.rsplit(" ", 1)[1]) > 2 for r in results)  # tokens a round
    assert all(r.value > 0 < r.reference_value for r in results)


def test_both_sides_of_a_pair_run_in_their_checkouts(monkeypatch):
    monkeypatch.setattr(beside, "STARTS", 1)
    lines = list(beside.results_of("a ledger's step", beside.HERE, Path(sys.executable), 2))
    assert [line.unit for line in lines] == ["CPU ms a turn"] + ["times"] * 3
    assert all(line.ratio > 0 for line in lines)


def test_a_side_that_ends_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="process ended"):
        list(beside.results_of("a ledger's step", tmp_path, Path(sys.executable), 2))
    with pytest.raises(ConfigError, match="not there"):
        beside.beside(checkout=tmp_path, pairs=2, json=False, plot=None)
