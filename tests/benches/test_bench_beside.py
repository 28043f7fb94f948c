"""`python -m benches beside`: two checkouts in one process, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import specpool
from benches import beside
from benches.beside import Turn, pairs_of
from paths import ROOT
from specpool.errors import ConfigError


@pytest.mark.parametrize("start", [0, 1])
def test_each_side_has_its_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    """Law: also those that a turn imports late; ours are back behind each turn."""
    for name in ("benches", "python/specpool"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("SECONDS = 2.0")

    def load() -> Turn:
        import specpool as package

        def turn() -> float:
            import benches

            assert sys.modules["specpool"] is package
            assert getattr(benches, "SECONDS", 3.0) == getattr(package, "SECONDS", 3.0)
            return float(getattr(package, "SECONDS", 3.0))

        return turn

    paths, modules = sys.path[:], dict(sys.modules)
    monkeypatch.setitem(beside.LOADS, "seconds", (load, 1))
    assert pairs_of("seconds", tmp_path, start) == [(3.0, 2.0)] * beside.PAIRS
    assert sys.modules["specpool"] is specpool and sys.path == paths
    assert {name: sys.modules[name] for name in modules} == modules


def test_a_load_has_a_figure_and_its_error() -> None:
    results = list(beside.results_of("a ledger's step", ROOT, 2))
    assert [result.unit for result in results] == ["CPU ms a turn", "times", "times"]
    assert all(result.value > 0 for result in results)


def test_a_checkout_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none"):
        beside.beside(checkout=tmp_path, starts=2, json=False, plot=None)
