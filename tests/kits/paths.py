"""Where the repository's files are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Figures recorded from other engines; another folder of them can be given.
VECTORS = Path(os.environ.get("SPECPOOL_VECTORS", TESTS / "vectors"))
