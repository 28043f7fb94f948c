"""Laws of `Admission`: what it remembers within a turn changes nobody's turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specpool.scheduler.admission import Admission
from specpool.sim import Simulation, scenario

admit_all = Admission.admit


def admit_one_by_one(admission: Admission) -> None:
    """Admit as ever, but count all rows' pages again for each request."""
    config = admission._config
    while True:
        num_running = len(admission._running)
        admission._config = replace(config, max_batch=min(num_running + 1, config.max_batch))
        try:
            admit_all(admission)
        finally:
            admission._config = config
        if len(admission._running) == num_running:
            return


# Seeds 59 and 80 differ if the pages are counted once although they are shared or an idle row's.
@pytest.mark.parametrize("first", [50, pytest.param(80, marks=pytest.mark.full)])
def test_pages_counted_once_a_turn_admit_the_same_requests(monkeypatch, first):
    num_waits = 0
    for seed in range(first, first + 30):
        traces = []
        for admit in (admit_all, admit_one_by_one):
            with monkeypatch.context() as patch:
                patch.setattr(Admission, "admit", admit)
                simulation = Simulation(scenario(seed), 0, keeps_trace=True)
                simulation.run()
            traces.append(simulation.trace)
        assert traces[0] == traces[1]
        num_waits += simulation.tally.retractions
    assert num_waits > 20
