"""`python -m lab fleet`: simulates fleets of replicas with proxies and clients."""

from __future__ import annotations

import time

from lab.counts import SEEDS, check_count, counts_table, print_findings
from lab.fleet.client import FleetTally
from lab.fleet.fleet import Fleet
from lab.fleet.settings import fleet_settings, update_settings
from specpool.checks import check_int


def fleet(*, seed: int, num_replicas: int, turns: float) -> bool:
    """Simulate fleets of replicas until `turns` turns have ended, and print a table.

    Fleets with all kinds of faults take turns with fleets that are updated twice.

    Returns:
        Whether every law held.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("seed", seed, 0, (1 << 31) - 1)
    check_int("replicas", num_replicas, 1, 10_000)
    check_count("turns", turns)
    tally, failure, started = FleetTally(), None, time.perf_counter()
    while tally.turns < turns and failure is None:
        make = update_settings if tally.scenarios % 2 else fleet_settings
        settings = make(seed * SEEDS + tally.scenarios, num_replicas)
        simulated = Fleet(settings)
        try:
            simulated.run()
        except Exception as error:
            failure = (
                f"{type(error).__name__}: {error}\n"
                f"Fleet({make.__name__}({settings.seed}, {num_replicas})).run()"
            )
        tally.add(simulated.tally)
    table = counts_table(f"fleet: seed {seed}, {num_replicas} replicas", tally)
    table.add_row("seconds", f"{time.perf_counter() - started:,.1f}")
    print_findings(table, failure)
    return failure is None
