"""`BlockDevice`: runs forwards on blocks whose cells record which text they were written for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specpool.arrays import Int64
from specpool.testing.device import DeviceFault

VOCABULARY = 7  # few tokens, so that texts begin alike and part again


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
        return known // 2 % VOCABULARY
