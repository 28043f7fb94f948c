"""`pytest --benchmark-only benches/test_ledger.py`: a decode step of a batch, ours and plain.

The calls and the load are those of `python -m benches ledger`; here each step is one round of
pytest-benchmark, so that runs can be saved and compared (`--benchmark-autosave`,
`--benchmark-compare`).
"""

from __future__ import annotations

import time

import pytest

from benches.ledger import BATCHES, SETTINGS
from benches.ledger_load import LedgerLoad, PlainLoad, Setting

# Seconds for each.
BUDGET = 0.5


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("side", ["ledger", "plain"])
@pytest.mark.parametrize(("name", "page_size", "shape"), SETTINGS, ids=["tree", "chain"])
def test_step(benchmark, name, page_size, shape, side, batch):
    setting = Setting(name, page_size, shape)
    if side == "ledger":
        load = LedgerLoad(setting, batch, setting.ledger(batch))
    else:
        load = PlainLoad(setting, batch)
    start = time.perf_counter()
    load.step()
    rounds = int(BUDGET / (time.perf_counter() - start))
    benchmark.group = f"{name}, {batch} rows"
    benchmark.pedantic(load.step, setup=load.refill, rounds=min(max(rounds, 10), 2000))
