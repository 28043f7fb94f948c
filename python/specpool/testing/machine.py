"""`LedgerMachine`: a Hypothesis state machine that tests your own scheduler."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specpool import Ledger
from specpool.testing.device import FakeDevice
from specpool.testing.leaks import assert_no_page_leaked, still_out
from specpool.testing.strategies import LedgerConfig, ledger_configs


class SchedulerUnderTest(Protocol):
    """The interface of the scheduler under test: usually a few lines around your own class."""

    def submit(self, request: int, prompt: Any, max_new_tokens: int, /) -> None:
        """Take a new request; prompt and new tokens fit into `max_context_len`.

        Args:
            request: its number.
            prompt: how many tokens it has; with `LedgerMachine.tokens` a list of them.
            max_new_tokens: at least 1.
        """

    def abort(self, request: int) -> None:
        """End a request whose client is gone. It was submitted once, and may be over by now."""

    def step(self) -> bool:
        """Run one turn of the loop; return False when all is done and every step is complete."""


class Device(Protocol):
    """What the machine calls of a device: the scheduler under test calls the rest."""

    def check_complete(self) -> None:
        """Raise an `AssertionError` if a step that is complete in the ledger has not run here."""


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
    # The tokens of prompts; if None, `submit` gets the length of each prompt. With few tokens, such
    # as `st.integers(0, 6)`, prompts that begin alike part again soon.
    tokens: ClassVar[st.SearchStrategy[int] | None] = None
    # The most turns of the loop between the last request and rest.
    max_turns: ClassVar[int] = 500

    def make_scheduler(self, ledger: Ledger, device: Any) -> SchedulerUnderTest:
        """Return the scheduler under test, which must run its forwards on `device`."""
        raise NotImplementedError

    def make_device(self, ledger: Ledger, choose: Callable[[int], int]) -> Device:
        """Return the device for a ledger; override it to give one of your own.

        `choose(n)` returns a number in `range(n)`. Hypothesis has drawn its seed.
        """
        return FakeDevice(ledger, choose=choose)

    def kept_prefixes(self) -> Iterable[int]:
        """Return the pinned prefixes that the scheduler keeps on purpose, as a prefix cache does.

        Asked when the loop has come to rest; their pages do not count as leaked.
        """
        return ()

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.prompts: list[list[int]] = []  # of each request, if they have tokens

    @initialize(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def start(self, data: st.DataObject, seed: int) -> None:
        """Build the ledger, the device and the scheduler."""
        config = data.draw(self.configs, label="config")
        self.ledger = config.build()
        self.device = self.make_device(self.ledger, random.Random(seed).randrange)
        self.scheduler = self.make_scheduler(self.ledger, self.device)

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Submit a request that fits the context."""
        context = self.ledger.max_context_len
        prompt_len = data.draw(st.integers(1, context - 1), label="prompt_len")
        max_new_tokens = data.draw(st.integers(1, context - prompt_len), label="max_new_tokens")
        self.requests += 1
        if self.tokens is None:
            self.scheduler.submit(self.requests, prompt_len, max_new_tokens)
            return
        beginning = data.draw(st.sampled_from([[], *self.prompts]), label="it begins as")[
            :prompt_len
        ]
        size = prompt_len - len(beginning)
        new = data.draw(st.lists(self.tokens, min_size=size, max_size=size), label="new tokens")
        self.prompts.append([*beginning, *new])
        self.scheduler.submit(self.requests, [*beginning, *new], max_new_tokens)

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
