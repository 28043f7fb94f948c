"""The real ledger against the oracle and the fake device, over random operations.

`SPECPOOL_SOAK=N` runs N examples of 200 operations each instead of the few of CI.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lockstep import Lockstep
from specpool.testing import LedgerConfig, decode_op, ledger_configs, operation_codes

SOAK = int(os.environ.get("SPECPOOL_SOAK", "0"))
SETTINGS = settings(
    max_examples=SOAK or 150,
    stateful_step_count=200 if SOAK else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not SOAK,
    database=None,
)


class LedgerAgainstOracle(RuleBasedStateMachine):
    @initialize(config=ledger_configs(), seed=st.integers(0, 2**32 - 1))
    def start(self, config: LedgerConfig, seed: int) -> None:
        self.both = Lockstep(config, random.Random(seed).randrange)

    @rule(code=operation_codes(), runs=st.integers(0, 3))
    def operate(self, code: bytes, runs: int) -> None:
        self.both.apply(decode_op(self.both.ledger, code))
        for _ in range(runs):
            self.both.device.run_some()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.both.finish()


TestLedgerAgainstOracle = LedgerAgainstOracle.TestCase
TestLedgerAgainstOracle.settings = SETTINGS
