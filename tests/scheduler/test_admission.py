"""Laws of `Admission`: what it remembers within a turn changes nobody's turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specpool.engine.scheduler
from lab.sim import Simulation, scenario
from specpool.engine.scheduler.admission import Admission

admit_all = Admission.admit


def test_the_scheduler_computes_with_no_page_size():
    """Law: only the core does; it says what rows need, hold and share."""
    folder = Path(specpool.engine.scheduler.__file__).parent
    names = {path.name for path in folder.glob("*.py") if "page_size" in path.read_text("utf-8")}
    assert not names


def admit_one_by_one(admission: Admission) -> None:
    """Admit as ever, but count all rows' pages again for each request."""
    state, config = admission._state, admission._state.config
    while True:
        num_running = len(state.running)
        state.config = replace(config, max_batch=min(num_running + 1, config.max_batch))
        try:
            admit_all(admission)
        finally:
            state.config = config
        if len(state.running) == num_running:
            return


# Seeds 59 and 80 differ if the pages are counted once although they are shared or an idle row's;
# many rows of 57 are retracted.
@pytest.mark.parametrize(
    "seeds",
    [
        (57, 59, 80),
        *(
            pytest.param(range(n, n + 5), marks=pytest.mark.full)
            for n in (51, 56, 61, 66, 80, 85, 100, 105)
        ),
    ],
    ids=str,
)
def test_pages_counted_once_a_turn_admit_the_same_requests(monkeypatch, seeds):
    num_waits = 0
    for seed in seeds:
        traces = []
        for admit in (admit_all, admit_one_by_one):
            with monkeypatch.context() as patch:
                patch.setattr(Admission, "admit", admit)
                simulation = Simulation(scenario(seed), 0, keeps_trace=True)
                simulation.run()
            traces.append(simulation.trace)
        assert traces[0] == traces[1]
        num_waits += simulation.tally.retractions
    assert num_waits > 5


def test_pages_that_rows_share_are_those_that_their_tables_say(monkeypatch):
    """The pages of a sink among them, which stay shared when the window has passed them."""
    count, num_sinks = Admission._shared_twice, 0

    def checked(admission, rows, num_shared):
        nonlocal num_sinks
        repeated, ledger = count(admission, rows, num_shared), admission._state.ledger
        for g, group in enumerate(ledger.groups):
            if not ledger.reclaimable_pages(g):
                states, pages = ledger.ownership_map(g)[0], ledger.page_table(g)[rows]
                is_shared = (pages > 0) & (states[pages] == 2)
                assert repeated[g] == is_shared.sum() - ledger.shared_pages(g)
                firsts = ledger.evicted_len(g)[rows] // group.page_size
                num_sinks += (is_shared & (np.arange(pages.shape[1]) < firsts[:, None])).sum()
        return repeated

    monkeypatch.setattr(Admission, "_shared_twice", checked)
    for seed in range(200):
        if (settings := scenario(seed).settings).sink and settings.prefix_cache:
            Simulation(scenario(seed), 0).run()
            if num_sinks > 20:
                return
    raise AssertionError(f"only {num_sinks} shared pages of sinks")
