"""`BlockDevice`: runs forwards on blocks whose cells record which text they were written for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specpool import BlockPool
from specpool.arrays import Int64
from specpool.testing.device import DeviceFault

VOCABULARY = 7  # few tokens, so that texts begin alike and part again


def answer(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """Return the next tokens of a text, as forwards on a `BlockDevice` compute them."""
    text, text_hash = list(tokens), _hash_of(tokens)
    for _ in range(num_tokens):
        text.append(_next_token(text_hash))
        text_hash = _extended_hash(text_hash, text[-1])
    return text[len(tokens) :]


def _extended_hash(text_hash: int, token: int) -> int:
    """Return the hash of a text, by that of the text before its last token; never 0."""
    return hash((text_hash, token)) | 1


def _hash_of(tokens: Sequence[int]) -> int:
    text_hash = 1
    for token in tokens:
        text_hash = _extended_hash(text_hash, token)
    return text_hash


def _next_token(text_hash: int) -> int:
    return text_hash // 2 % VOCABULARY


class BlockDevice:
    """Runs forwards on blocks whose cells record which text they were written for.

    KV depends on all tokens before it. So a cell records a hash of the text up to its token, and a
    forward that reads a block of another text, or one that was written over, is found at once.

    Attributes:
        pool: the blocks' pool; None if not known. With it the device refuses to write a block that
            other requests may read. `BlockMachine` sets it.
    """

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0) -> None:
        """Create a device with nothing written.

        Args:
            num_blocks: blocks of the pool.
            block_size: tokens of a block.
            first_id: id of the first block.
        """
        self._block_size, self._first_id = block_size, first_id
        self.pool: BlockPool | None = None
        self._cells: Int64 = np.zeros((num_blocks, block_size), np.int64)  # 0 means never written

    def forward(self, tokens: Sequence[int], blocks: Sequence[int], start: int) -> int:
        """Compute the KV of `tokens[start:]`, reading all before them; return the next token.

        Args:
            tokens: the text from its beginning; its last token's forward gives the next token.
            blocks: the blocks of the text, in its order; those behind it are not looked at.
            start: how many tokens have KV already.

        Returns:
            the next token: equal texts have equal ones.

        Raises:
            DeviceFault: there is no token to compute; a position has no block; a block that is read
                holds another text; or one that is written is known to the pool's index, or held
                more than once.
        """
        if start >= len(tokens):
            raise DeviceFault(
                f"a forward of {len(tokens)} tokens that all have KV: the last one's gives the "
                "next token, so match with limit=len(tokens) - 1"
            )
        self._check_writes(tokens, blocks, start)
        text_hash = 1
        for position, token in enumerate(tokens):
            text_hash = _extended_hash(text_hash, token)
            column, offset = divmod(position, self._block_size)
            if column >= len(blocks):
                raise DeviceFault(f"position {position} has no block: the text has {len(blocks)}")
            cell = self._cells[blocks[column] - self._first_id]
            if position >= start:
                cell[offset] = text_hash
            elif cell[offset] != text_hash:
                content = "another text" if cell[offset] else "nothing"
                raise DeviceFault(
                    f"a forward of {len(tokens)} tokens reads position {position} in block "
                    f"{blocks[column]}, which holds {content} there"
                )
        return _next_token(text_hash)

    def _check_writes(self, tokens: Sequence[int], blocks: Sequence[int], start: int) -> None:
        if self.pool is None:
            return
        last = (len(tokens) - 1) // self._block_size
        for block in blocks[start // self._block_size : last + 1]:
            state, refs, tag, _, _ = self.pool.record_of(int(block))
            if state == "shared":
                raise DeviceFault(
                    f"a forward writes positions from {start} on, into block {block}, which is "
                    f"read-only: held {refs} times, last tag {tag!r}; `put` has noted what it "
                    "holds, or others hold it too"
                )
