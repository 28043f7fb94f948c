"""`BlockDevice` and `BlockMachine`: test a scheduler that keeps its own rows on a `BlockPool`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specpool import BlockPool
from specpool.arrays import Int64
from specpool.testing.device import DeviceFault
from specpool.testing.leaks import assert_no_page_leaked

_MOST_BLOCKS = 8  # of a text with its new tokens
_VOCABULARY = 7  # few tokens, so that texts begin alike and part again


class BlockDevice:
    """Runs forwards on blocks whose cells record which text they were written for.

    KV depends on all tokens before it. So a cell records a hash of the text up to its token, and a
    forward that reads a block of another text, or one that was written over, is found at once.
    """

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0) -> None:
        """Create a device with nothing written.

        Args:
            num_blocks: blocks of the pool.
            block_size: tokens of a block.
            first_id: id of the first block.
        """
        self._block_size, self._first_id = block_size, first_id
        self._cells: Int64 = np.zeros((num_blocks, block_size), np.int64)  # 0 = never written

    def forward(self, tokens: Sequence[int], blocks: Sequence[int], start: int) -> int:
        """Compute the KV of `tokens[start:]`, reading all before them; return the next token.

        Args:
            tokens: the text from its beginning; its last token's forward gives the next token.
            blocks: the blocks of the text, in its order; those behind it are not looked at.
            start: how many tokens have KV already.

        Returns:
            the next token: equal texts have equal ones.

        Raises:
            DeviceFault: a position has no block; or a block that is read holds another text.
        """
        known = 1
        for position, token in enumerate(tokens):
            known = hash((known, token)) | 1
            column, offset = divmod(position, self._block_size)
            if column >= len(blocks):
                raise DeviceFault(f"position {position} has no block: the text has {len(blocks)}")
            cell = self._cells[blocks[column] - self._first_id]
            if position >= start:
                cell[offset] = known
            elif cell[offset] != known:
                what = "another text" if cell[offset] else "nothing"
                raise DeviceFault(
                    f"a forward of {len(tokens)} tokens reads position {position} in block "
                    f"{blocks[column]}, which holds {what} there"
                )
        return known // 2 % _VOCABULARY


class BlockScheduler(Protocol):
    """The interface of the scheduler under test: usually a few lines around your own class."""

    pool: BlockPool

    def submit(self, request: int, tokens: list[int], max_new_tokens: int) -> None:
        """Take a new request; with its new tokens it fits into the pool alone."""

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

    def make_scheduler(
        self, num_blocks: int, block_size: int, device: BlockDevice
    ) -> BlockScheduler:
        """Return the scheduler under test, which must run its forwards on `device`."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[int]] = []

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Build the device and the scheduler."""
        num_blocks, block_size = data.draw(self.sizes, label="num_blocks, block_size")
        self.most_tokens = min(num_blocks, _MOST_BLOCKS) * block_size
        device = BlockDevice(num_blocks, block_size)
        self.scheduler = self.make_scheduler(num_blocks, block_size, device)

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Submit a text that begins as an earlier one, or is new."""
        most = self.most_tokens - 1
        known = data.draw(st.sampled_from([[], *self.texts]), label="begins as")
        kept = data.draw(st.integers(0, min(len(known), most)), label="kept")
        new = st.lists(st.integers(0, _VOCABULARY - 1), min_size=not kept, max_size=most - kept)
        tokens = [*known[:kept], *data.draw(new, label="new tokens")]
        max_new_tokens = data.draw(st.integers(1, self.most_tokens - len(tokens)), label="max_new")
        self.texts.append(tokens)
        self.scheduler.submit(len(self.texts), list(tokens), max_new_tokens)

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
            raise AssertionError(f"not at rest after {self.max_turns} turns")
        assert_no_page_leaked(self.scheduler.pool)
