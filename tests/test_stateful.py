"""The real ledger against the oracle and the fake device, over random operations.

`SPECPOOL_SOAK=N pytest tests/test_stateful.py` runs N examples of 200 operations each.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lockstep import Lockstep
from specpool.testing import LedgerConfig, decode_op, ledger_configs, operation_codes

SOAK = int(os.environ.get("SPECPOOL_SOAK", "0"))
SETTINGS = settings(
    max_examples=SOAK or 200,
    stateful_step_count=200 if SOAK else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not SOAK,
    database=None,
    print_blob=bool(SOAK),
)

# Operations of every kind that the machines have run, by (verb, outcome).
COUNTS: dict[tuple[str, str], int] = {}


class LedgerAgainstOracle(RuleBasedStateMachine):
    @initialize(config=ledger_configs(), seed=st.integers(0, 2**32 - 1))
    def start(self, config: LedgerConfig, seed: int) -> None:
        self.both = Lockstep(config, random.Random(seed).randrange)

    @rule(codes=st.lists(operation_codes(), min_size=1, max_size=5), runs=st.integers(0, 3))
    def operate(self, codes: list[bytes], runs: int) -> None:
        for code in codes:
            self.both.apply(decode_op(self.both.ledger, code))
            for _ in range(runs):
                self.both.device.run_some()

    @rule(restores=st.booleans())
    def snapshot(self, restores: bool) -> None:
        self.both.restore() if restores else self.both.snapshot()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.both.finish()
            for outcome, count in self.both.counts.items():
                COUNTS[outcome] = COUNTS.get(outcome, 0) + count


def test_the_ledger_agrees_with_the_oracle():
    COUNTS.clear()
    run_state_machine_as_test(LedgerAgainstOracle, settings=SETTINGS)
    print(f"{sum(COUNTS.values())} operations: {COUNTS}")
