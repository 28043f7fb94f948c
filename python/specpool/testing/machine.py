"""A Hypothesis state machine into which an embedder plugs their own scheduler."""

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
    """What `LedgerMachine` drives: usually a few lines around the embedder's own class."""

    def submit(self, request: int, prompt_len: int, max_new_tokens: int) -> None:
        """A new request. `prompt_len + max_new_tokens <= max_context_len`."""

    def abort(self, request: int) -> None:
        """The client is gone. The request was submitted once, and may be over by now."""

    def step(self) -> bool:
        """One turn of the loop; False when nothing is left to do and every step is complete."""


class LedgerMachine(RuleBasedStateMachine):
    """Submits and aborts requests at any time, turns the loop, and checks the ledger.

    After every rule the ledger's audit must pass. At the end the loop must come to rest within
    `max_turns` turns, no page, row or prefix may be left (`assert_no_page_leaked`), and every step
    must have run on the `FakeDevice` (`check_complete`), where forwards must find their own tokens.

    Subclass it, override `make_scheduler`, and let pytest collect `YourMachine.TestCase`.
    """

    # Ledgers to run on; override to pin what the scheduler supports.
    configs: ClassVar[st.SearchStrategy[LedgerConfig]] = ledger_configs()
    # Turns of the loop in which it must come to rest once no request comes any more.
    max_turns: ClassVar[int] = 500

    def make_scheduler(self, ledger: Ledger, device: FakeDevice) -> Scheduler:
        """The scheduler under test, which runs its forwards on `device`."""
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
        """Builds the ledger, the device and the scheduler."""
        config = data.draw(self.configs, label="config")
        self.ledger = config.build()
        self.device = FakeDevice(self.ledger, choose=random.Random(seed).randrange)
        self.scheduler = self.make_scheduler(self.ledger, self.device)

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """A request that fits the context."""
        context = self.ledger.max_context_len
        prompt_len = data.draw(st.integers(1, context - 1), label="prompt_len")
        max_new_tokens = data.draw(st.integers(1, context - prompt_len), label="max_new_tokens")
        self.requests += 1
        self.scheduler.submit(self.requests, prompt_len, max_new_tokens)

    @precondition(lambda self: self.requests > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any request that ever came."""
        self.scheduler.abort(data.draw(st.integers(1, self.requests), label="request"))

    @rule(turns=st.integers(1, 5))
    def step(self, turns: int) -> None:
        """A few turns of the loop."""
        for _ in range(turns):
            self.scheduler.step()

    @invariant()
    def audit(self) -> None:
        """Every page and every row is accounted for."""
        self.ledger.check()

    def teardown(self) -> None:
        """The loop comes to rest, and everything is given back."""
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
