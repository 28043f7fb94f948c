"""The real ledger against the oracle and the fake device, over random operations.

`SPECPOOL_SOAK=N pytest tests/core/test_stateful.py` runs N examples of 200 operations each.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lockstep import SETTINGS, SOAK, Lockstep
from specpool.testing import LedgerConfig, decode_op, ledger_configs, operation_codes

# What a run must have met, or it proves little: every verb done, and these refusals.
VERBS = (
    "admit fork pin_prefix release_prefix prepare_extend prepare_decode launch resolve complete "
    "cancel abandon trim end_turn retract finish abort take_delta ack_delta lend release_lent "
    "export import_row"
).split()
RARE = ["rebind", "admit_lent"]
REFUSALS = {
    ("fork", "NotReady"),
    ("pin_prefix", "NotReady"),
    ("prepare_extend", "OutOfPages"),
    ("prepare_decode", "OutOfPages"),
    ("prepare_decode", "DraftLag"),
    ("resolve", "OrderError"),
    ("launch", "OrderError"),
    ("cancel", "OrderError"),
    ("complete", "OrderError"),
    ("abandon", "OrderError"),
    ("end_turn", "ConfigError"),
    ("lend", "NotReady"),
    ("rebind", "NotReady"),
    ("release_lent", "PageStateError"),
    ("export", "NotReady"),
    ("import_row", "OutOfPages"),
}


class LedgerAgainstOracle(RuleBasedStateMachine):
    """The operations, the snapshots, and the device in between."""

    # Operations of all examples, by (verb, outcome).
    counts: ClassVar[Counter[tuple[str, str]]] = Counter()

    @initialize(config=ledger_configs(), seed=st.integers(0, 2**32 - 1))
    def start(self, config: LedgerConfig, seed: int) -> None:
        self.both = Lockstep(config, random.Random(seed).randrange)

    @rule(codes=st.lists(operation_codes(), min_size=1, max_size=5), runs=st.integers(0, 3))
    def operate(self, codes: list[bytes], runs: int) -> None:
        for code in codes:
            self.both.apply(decode_op(self.both.ledger, code, has_loans=True, has_moves=True))
            for _ in range(runs):
                self.both.device.run_some()

    @rule(restores=st.booleans())
    def snapshot(self, restores: bool) -> None:
        self.both.restore() if restores else self.both.snapshot()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.both.finish()
            self.counts.update(self.both.counts)


def test_the_ledger_agrees_with_the_oracle():
    LedgerAgainstOracle.counts.clear()
    examples = settings(SETTINGS, max_examples=SOAK or 300)
    run_state_machine_as_test(LedgerAgainstOracle, settings=examples)
    counts = LedgerAgainstOracle.counts
    done = sum(count for (_, outcome), count in counts.items() if outcome == "ok")
    print(f"{done} of {counts.total()} operations succeeded: {sorted(counts.items())}")
    # The draws depend on which modules the process has loaded, so leave room.
    assert min(counts[verb, "ok"] for verb in VERBS) >= 10
    assert min(counts[verb, "ok"] for verb in RARE) >= 5
    assert REFUSALS <= counts.keys()
    assert done > counts.total() / 2
