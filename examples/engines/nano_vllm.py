"""nano-vllm's `BlockManager` on `specpool.BlockPool`: its scheduler runs on it unchanged.

Put this file beside `nanovllm/engine/scheduler.py` and import `BlockManager` from here. Blocks that
are found hold equal tokens, not equal hashes; freeing a block twice is an error at that call.
"""

from __future__ import annotations

from typing import Protocol

from specpool import BlockPool


class Sequence(Protocol):
    """What the manager reads and writes of nano-vllm's `Sequence`."""

    token_ids: list[int]
    num_tokens: int
    num_cached_tokens: int
    num_scheduled_tokens: int
    block_table: list[int]


class BlockManager:
    """The interface of nano-vllm's own class."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Create a pool of `num_blocks` blocks of `block_size` tokens."""
        self.pool, self.block_size = BlockPool(num_blocks, block_size), block_size

    def can_allocate(self, seq: Sequence) -> int:
        """Return how many blocks of the prompt are found, or -1 if the rest does not fit."""
        num_blocks = -(-seq.num_tokens // self.block_size)
        self._hit = self.pool.match(seq.token_ids, limit=(num_blocks - 1) * self.block_size)
        return len(self._hit) if self.pool.fits(num_blocks - len(self._hit), self._hit) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Give the sequence its blocks; `can_allocate` was asked for it just before."""
        num_blocks, hit = -(-seq.num_tokens // self.block_size), self._hit[:num_cached_blocks]
        new = self.pool.take(num_blocks - num_cached_blocks, hit)
        seq.block_table = hit.tolist() + new.tolist()
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def deallocate(self, seq: Sequence) -> None:
        """Give all blocks of the sequence back."""
        self.pool.drop(seq.block_table)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Sequence) -> bool:
        """Return whether there is room for the token that the next forward computes."""
        return seq.num_tokens <= len(seq.block_table) * self.block_size or self.pool.fits(1)

    def may_append(self, seq: Sequence) -> None:
        """Give the sequence one more block if it needs one."""
        if seq.num_tokens > len(seq.block_table) * self.block_size:
            seq.block_table += self.pool.take(1).tolist()

    def hash_blocks(self, seq: Sequence) -> None:
        """Note what the blocks hold that a forward has just filled."""
        size, end = self.block_size, seq.num_cached_tokens + seq.num_scheduled_tokens
        if end % size < seq.num_scheduled_tokens:
            tokens = seq.token_ids if end == seq.num_tokens else seq.token_ids[:end]
            self.pool.put(tokens, seq.block_table, seq.num_cached_tokens // size)
