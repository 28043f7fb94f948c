"""`BlockMachine`: a Hypothesis state machine that tests a scheduler with blocks of its own."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specpool import BlockPool
from specpool.testing.block_device import VOCABULARY, BlockDevice, answer
from specpool.testing.leaks import assert_no_page_leaked, blocks_in_use

_MOST_BLOCKS = 8  # of a text with its new tokens


class BlockScheduler(Protocol):
    """The interface of the scheduler under test: usually a few lines around your own class."""

    pool: BlockPool

    def submit(self, request: int, tokens: list[int], max_new_tokens: int) -> None:
        """Take a new request: a number, a text of one token or more, and at least one new token.

        With its new tokens it fits into the pool alone, maybe without room for drafts beyond them.
        """

    def abort(self, request: int) -> None:
        """End a request whose client is gone. It was submitted once, and may be over by now."""

    def step(self) -> bool:
        """Run one turn of the loop; return False when all is done."""


class BlockMachine(RuleBasedStateMachine):
    """A state machine that submits texts with common beginnings, and aborts them, at any time.

    After every rule the pool's audit must pass, and the `BlockDevice` checks every block that a
    forward reads. At the end the loop must come to rest within `max_turns` turns, with no block
    held or fenced (`assert_no_page_leaked`).

    Subclass it, override `make_scheduler`, and let pytest collect `YourMachine.TestCase`.
    """

    # (num_blocks, block_size) to run on; override it to fix what the scheduler needs.
    sizes: ClassVar[st.SearchStrategy[tuple[int, int]]] = st.tuples(
        st.integers(4, 40), st.sampled_from([1, 2, 4, 16])
    )
    # The most turns of the loop between the last request and rest.
    max_turns: ClassVar[int] = 20_000

    def make_scheduler(self, num_blocks: int, block_size: int, device: Any) -> BlockScheduler:
        """Return the scheduler under test, which must run its forwards on `device`."""
        raise NotImplementedError

    def make_device(self, num_blocks: int, block_size: int) -> Any:
        """Return the device for a pool; override it to give one of your own.

        The machine sets its `pool`, and calls nothing of it.
        """
        return BlockDevice(num_blocks, block_size)

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[int]] = []

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Build the device and the scheduler."""
        num_blocks, block_size = data.draw(self.sizes, label="num_blocks, block_size")
        self.most_tokens = min(num_blocks, _MOST_BLOCKS) * block_size
        device = self.make_device(num_blocks, block_size)
        self.scheduler = self.make_scheduler(num_blocks, block_size, device)
        device.pool = self.scheduler.pool

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Submit a text that begins as an earlier one with its answer, or is new."""
        max_prompt, request = self.most_tokens - 1, len(self.texts) + 1
        label = f"request {request} begins as"
        earlier = data.draw(st.sampled_from([[], *self.texts]), label=label)
        shared_len = data.draw(st.integers(0, min(len(earlier), max_prompt)), label="kept")
        new = st.lists(
            st.integers(0, VOCABULARY - 1),
            min_size=not shared_len,
            max_size=max_prompt - shared_len,
        )
        tokens = [*earlier[:shared_len], *data.draw(new, label="new tokens")]
        max_new_tokens = data.draw(st.integers(1, self.most_tokens - len(tokens)), label="max_new")
        self.texts.append([*tokens, *answer(tokens, max_new_tokens)])
        self.scheduler.submit(request, list(tokens), max_new_tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort any request that was ever submitted."""
        self.scheduler.abort(data.draw(st.integers(1, len(self.texts)), label="request"))

    @rule(turns=st.integers(1, 5))
    def step(self, turns: int) -> None:
        """Run a few turns of the loop."""
        for _ in range(turns):
            self.scheduler.step()

    @invariant()
    def audit(self) -> None:
        """Check every block."""
        self.scheduler.pool.check()

    def teardown(self) -> None:
        """Run the loop until it comes to rest, and check that everything was given back."""
        if sys.exc_info()[0] is not None or not hasattr(self, "scheduler"):
            return  # A rule has failed: its own error is the one to show.
        for _ in range(self.max_turns):
            if not self.scheduler.step():
                break
        else:
            lines = blocks_in_use(self.scheduler.pool) or ["no block is held: a request waits"]
            message = (
                f"not at rest after {self.max_turns} turns, with {self.scheduler.pool!r}. Each "
                "request fits into it alone, with its new tokens and no drafts behind them."
            )
            raise AssertionError("\n  ".join([message, *lines]))
        assert_no_page_leaked(self.scheduler.pool)
