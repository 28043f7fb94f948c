"""`python -m lab ancestry`: exact ancestry beside SGLang's reading of a draft tree."""

from __future__ import annotations

import json

import pytest

from cli_kit import call


@pytest.mark.full
def test_exact_ancestry_pays_or_costs_nothing(capsys):
    """The accept length with the true ancestors is at least that of upstream's reading."""
    code, out, err = call(capsys, "lab", "ancestry", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["exact"]["accept_len"] >= result["branch"]["accept_len"] > 2
