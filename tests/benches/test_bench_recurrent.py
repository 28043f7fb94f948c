"""`python -m benches recurrent`: what it compares."""

from __future__ import annotations

import pytest

from benches import recurrent

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
