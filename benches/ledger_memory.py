"""Bytes of a ledger per page and per row, measured as the growth of a process of its own.

`python -m benches.ledger_memory ROWS COLUMNS` builds a ledger with ROWS rows of COLUMNS pages
each, gives every row all its pages, and prints the bytes that this added to the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from specpool._core import Group, Ledger, Shape

# (rows, columns): the second has more pages, the third more rows.
SIZES = ((20_000, 8), (20_000, 64), (200_000, 8))
BATCH = 1000


def bytes_per_page_and_row() -> tuple[float, float]:
    """(per page in use, its table cell included; per row besides its pages).

    Slopes between processes, so that what every process needs is not counted.
    """
    (rows, few), (_, many), (more_rows, _) = SIZES
    base, with_pages, with_rows = (_grown(*size) for size in SIZES)
    per_page = (with_pages - base) / (rows * (many - few))
    return per_page, (with_rows - base) / (more_rows - rows) - few * per_page


def _grown(num_rows: int, columns: int) -> int:
    command = [sys.executable, "-m", "benches.ledger_memory", str(num_rows), str(columns)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _resident() -> int:
    """Bytes of this process in memory; statm would be cheaper but lags behind."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("Rss:"))
    return int(kib) * 1024


def _fill(num_rows: int, columns: int, page_size: int = 16) -> Ledger:
    group = Group("kv", page_size=page_size, num_pages=num_rows * columns)
    length = columns * page_size  # without drafts a row is as wide as the context
    ledger = Ledger([group], [Shape.none()], num_rows=num_rows, max_context_len=length)
    for start in range(0, num_rows, BATCH):
        rows = np.array([ledger.admit() for _ in range(min(BATCH, num_rows - start))], np.int32)
        plan = ledger.prepare_extend(rows, np.full(len(rows), length, np.int32))
        ledger.launch(plan.step)
        ledger.take_delta(plan.step)
        ledger.ack_delta(plan.step)
        ledger.complete(plan.step)
    return ledger


if __name__ == "__main__":
    _fill(BATCH, 1)  # what the first use of anything costs
    before = _resident()
    ledger = _fill(int(sys.argv[1]), int(sys.argv[2]))
    assert ledger.free_pages(0) == 0
    print(_resident() - before)
