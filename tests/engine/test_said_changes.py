"""Law: where an engine does otherwise than its options or a config say, one line says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specpool import Engine
from specpool.engine.assets import resolve


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_positions_beyond_a_heads_own_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="specpool")
    head = Path(shutil.copytree(resolve("specpool/tiny-eagle3"), tmp_path / "head"))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    text = f"draft head {head} was made for 32 positions, a sequence may have"
    Engine.from_pretrained(draft=str(head), max_context_len=32).close()
    assert said(caplog, text) == 0
    Engine.from_pretrained(draft=str(head), max_context_len=100).close()
    assert said(caplog, f"{text} 100 tokens") == 1
