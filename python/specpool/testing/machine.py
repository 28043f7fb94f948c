"""`LedgerMachine`: a Hypothesis state machine that tests your own scheduler."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specpool import Ledger
from specpool.testing.device import FakeDevice
from specpool.testing.leaks import assert_no_page_leaked, still_out
from specpool.testing.strategies import LedgerConfig, ledger_configs


class Scheduler(Protocol):
    """The interface of the scheduler under test: usually a few lines around your own class."""

    def submit(self, request: int, prompt_len: int, max_new_tokens: int) -> None:
        """Take a new request; `prompt_len + max_new_tokens <= max_context_len`."""

    def abort(self, request: int) -> None:
        """End a request whose client is gone. It was submitted once, and may be over by now."""

    def step(self) -> bool:
        """Run one turn of the loop; return False when all is done and every step is complete."""


class LedgerMachine(RuleBasedStateMachine):
    """A state machine that submits and aborts requests at any time, and checks the ledger.

    After every rule the ledger's audit must pass. At the end the loop must come to rest within
    `max_turns` turns, no page, row or prefix may be left (`assert_no_page_leaked`), and every step
    must have run on the `FakeDevice` (`check_complete`), which checks the tokens that forwards
    read.

    Subclass it, override `make_scheduler`, and let pytest collect `YourMachine.TestCase`.
    """

    # The ledgers to run on; override it to fix the options that the scheduler needs.
    configs: ClassVar[st.SearchStrategy[LedgerConfig]] = ledger_configs()
    # The most turns of the loop between the last request and rest.
    max_turns: ClassVar[int] = 500

    def make_scheduler(self, ledger: Ledger, device: FakeDevice) -> Scheduler:
        """Return the scheduler under test, which must run its forwards on `device`."""
        raise NotImplementedError

    def kept_prefixes(self) -> Iterable[int]:
        """Return the pinned prefixes that the scheduler keeps on purpose, as a prefix cache does.

        Asked when the loop has come to rest; their pages do not count as leaked.
        """
        return ()

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    @initialize(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def start(self, data: st.DataObject, seed: int) -> None:
        """Build the ledger, the device and the scheduler."""
        config = data.draw(self.configs, label="config")
        self.ledger = config.build()
        self.device = FakeDevice(self.ledger, choose=random.Random(seed).randrange)
        self.scheduler = self.make_scheduler(self.ledger, self.device)

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Submit a request that fits the context."""
        context = self.ledger.max_context_len
        prompt_len = data.draw(st.integers(1, context - 1), label="prompt_len")
        max_new_tokens = data.draw(st.integers(1, context - prompt_len), label="max_new_tokens")
        self.requests += 1
        self.scheduler.submit(self.requests, prompt_len, max_new_tokens)

    @precondition(lambda self: self.requests > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort any request that was ever submitted."""
        self.scheduler.abort(data.draw(st.integers(1, self.requests), label="request"))

    @rule(turns=st.integers(1, 5))
    def step(self, turns: int) -> None:
        """Run a few turns of the loop."""
        for _ in range(turns):
            self.scheduler.step()

    @invariant()
    def audit(self) -> None:
        """Check every page and every row."""
        self.ledger.check()

    def teardown(self) -> None:
        """Run the loop until it comes to rest, and check that everything was given back."""
        if sys.exc_info()[0] is not None or not hasattr(self, "scheduler"):
            return  # A rule has failed: its own error is the one to show.
        for _ in range(self.max_turns):
            if not self.scheduler.step():
                break
        else:
            out = "\n  ".join(still_out(self.ledger, self.kept_prefixes()))
            raise AssertionError(f"not at rest after {self.max_turns} turns:\n  {out}")
        assert_no_page_leaked(self.ledger, kept_prefixes=self.kept_prefixes())
        self.device.check_complete()
