"""`HostTexts`: keeps the KV of texts on the host, below the ledger's prefix index.

A text is kept in blocks of whole pages of every group. A block is known by its salt and all tokens
up to its end, so texts with the same beginning share blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import lcm

import numpy as np

from specpool._core import Ledger
from specpool.arrays import Int32
from specpool.engine.memory.host.handle import Block, Copies, Handle
from specpool.engine.memory.host.pages import HostPages, Pages

# (pages of each group, tokens, seconds per token) -> whether copying the pages beats a prefill of
# the tokens.
Worth = Callable[[Sequence[int], int, float], bool]


class HostTexts:
    """The blocks on the host, those unused the longest first.

    Attributes:
        is_on: whether texts are kept. They are not for a model with windows: a row that has left
            pages of a window behind could not be brought back as a whole. Nor are they for one with
            recurrent states, which are here for whole rows alone.
        block_len: tokens of a block.
        eviction_ct: blocks that gave way to others.
        failed_ct: copies to the host that failed.
    """

    def __init__(
        self,
        ledger: Ledger,
        copies: Copies,
        pages: Sequence[HostPages],
        numbers: Iterator[int],
        is_worth: Worth,
    ) -> None:
        """Start empty.

        Args:
            ledger: the ledger of the rows.
            copies: copies their pages.
            pages: the host pages of each group, which blocks take and give back.
            numbers: gives owner numbers among the host pages.
            is_worth: says whether copies pay.
        """
        self._ledger, self._copies, self._pages = ledger, copies, pages
        self._numbers, self._is_worth_copying = numbers, is_worth
        self._sizes = [group.page_size for group in ledger.groups]
        self.is_on = all(group.window is None for group in ledger.groups) and not ledger.states
        self.block_len = lcm(*self._sizes)
        self.eviction_ct = self.failed_ct = 0
        self._blocks: dict[bytes, Block] = {}
        self._leaving: list[Block] = []  # dropped, but a reload still copies from them

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    @property
    def pages_per_block(self) -> list[int]:
        """Pages of each group that a block takes."""
        return [self.block_len // size for size in self._sizes]

    def keys(self, tokens: Int32, salt: bytes) -> Iterator[bytes]:
        """Yield the key of each whole block of the tokens. Cost: a hash of each block."""
        key = hashlib.blake2b(salt, digest_size=16).digest()
        for end in range(self.block_len, len(tokens) + 1, self.block_len):
            block = np.ascontiguousarray(tokens[end - self.block_len : end])
            key = hashlib.blake2b(key + block.tobytes(), digest_size=16).digest()
            yield key

    def save(self, row: int, tokens: Int32, salt: bytes, token_seconds: float) -> int:
        """Copy the KV of a row's first tokens to the host, if that pays, for later requests.

        Nothing may be in flight that writes these tokens. Only whole blocks are kept, and of those
        only what is not here yet. Texts that were unused the longest give way. The row stays.

        Args:
            row: the row.
            tokens: its tokens, [n].
            salt: the salt of the text.
            token_seconds: seconds of prefill per token.

        Returns:
            The number of tokens that were copied: 0 also if the copy failed.
        """
        if not self.is_on:
            return 0
        keys = list(self.keys(tokens, salt))
        num_drafted = int(self._ledger.drafted_len[row]) // self.block_len
        missing = self._missing(keys, num_drafted)
        num_tokens = len(missing) * self.block_len
        if not self._is_worth_copying(self._pages_of(len(missing)), num_tokens, token_seconds):
            return 0
        while not self.make_room(self._pages_of(len(missing)), keys):
            missing.pop()
        if not missing:
            return 0
        blocks = []
        for at in missing:
            number = next(self._numbers)
            taken = zip(self._pages, self.pages_per_block, strict=True)
            pages = tuple(pool.take(n, number) for pool, n in taken)
            blocks.append(Block(number, keys[at], salt, pages, at < num_drafted))
        moves = []
        for g, n in enumerate(self.pages_per_block):
            columns = np.concatenate([np.arange(at * n, (at + 1) * n) for at in missing])
            moves.append((self._ledger.page_table(g)[row, columns], _pages(blocks, g)))
        try:
            self._copies.save(moves)
        except BaseException as error:
            self.failed_ct += 1
            for block in blocks:
                self._free(block)
            if isinstance(error, Exception):
                return 0
            raise
        for block in blocks:
            self.discard([block])
            self._blocks[block.key] = block
        return len(missing) * self.block_len

    def lend(
        self, tokens: Int32, salt: bytes, start: int, token_seconds: float, *, needs_draft: bool
    ) -> Handle | None:
        """See `HostTier.lend`, which also records the handle."""
        if not self._blocks:
            return None
        blocks = self._find(tokens, salt, start, needs_draft=needs_draft)
        first = start // self.block_len
        length = min((first + len(blocks)) * self.block_len, len(tokens) - 1)
        num_pages = self._pages_of(len(blocks))
        if length <= start or not self._is_worth_copying(num_pages, length - start, token_seconds):
            return None
        undrafted = next((i for i, block in enumerate(blocks) if not block.has_draft), len(blocks))
        for block in blocks:
            block.users += 1
        return Handle(
            number=next(self._numbers),
            tag=None,
            length=length,
            drafted_len=min((first + undrafted) * self.block_len, length) if undrafted else 0,
            last_start=0,
            columns=tuple(first * n for n in self.pages_per_block),
            pages=tuple(_pages(blocks, g) for g in range(len(self._sizes))),
            blocks=tuple(blocks),
        )

    def make_room(self, num_pages: Sequence[int], keeps: Sequence[bytes] = ()) -> bool:
        """Drop the blocks unused the longest, but not `keeps`, until each group has free pages.

        Returns:
            Whether each group has `num_pages` free pages; if not, nothing was dropped.
        """
        lacking = [max(n - g.num_free, 0) for n, g in zip(num_pages, self._pages, strict=True)]
        if not self.is_on:
            return not any(lacking)
        need = max(-(-n // size) for n, size in zip(lacking, self.pages_per_block, strict=True))
        if not need:
            return True
        keys_kept = set(keeps)
        spare = (
            key for key, block in self._blocks.items() if not block.users and key not in keys_kept
        )
        dropped = list(islice(spare, need))
        if len(dropped) < need:
            return False
        for key in dropped:
            self._drop(key)
            self.eviction_ct += 1
        return True

    def discard(self, blocks: Iterable[Block]) -> None:
        """Drop what is kept under the keys of these blocks."""
        for block in blocks:
            if block.key in self._blocks:
                self._drop(block.key)

    def forget(self, salt: bytes | None = None) -> None:
        """Drop all texts, or those of one salt. What a reload copies stays until it is over."""
        for key, block in list(self._blocks.items()):
            if salt in (None, block.salt):
                self._drop(key)

    def release(self, blocks: Sequence[Block]) -> None:
        """Note that a reload from these blocks is over."""
        for block in blocks:
            block.users -= 1
            if not block.users and block in self._leaving:
                self._leaving.remove(block)
                self._free(block)

    def held(self, group: int) -> dict[int, Pages]:
        """Return block number -> its pages of a group."""
        blocks = (*self._blocks.values(), *self._leaving)
        return {block.number: block.pages[group] for block in blocks}

    def recover(self, lent: Iterable[Sequence[Block]]) -> None:
        """Count the users again, after Ctrl-C at any point: `lent` are the reloads' blocks."""
        blocks = [*self._blocks.values(), *self._leaving]
        for block in blocks:
            block.users = 0
        for block in (block for lent_blocks in lent for block in lent_blocks):
            block.users += 1
        self._leaving = [block for block in self._leaving if block.users]

    def _find(self, tokens: Int32, salt: bytes, start: int, *, needs_draft: bool) -> list[Block]:
        """Return the blocks that go on from `start` tokens, the first of them around `start`."""
        blocks = []
        for key in islice(self.keys(tokens, salt), start // self.block_len, None):
            block = self._blocks.get(key)
            if block is None or (needs_draft and not block.has_draft):
                break
            blocks.append(block)
        return blocks

    def _missing(self, keys: Sequence[bytes], num_drafted: int) -> list[int]:
        """Return which of a text's blocks are not here, and mark the others as used.

        The first `num_drafted` blocks of the text have draft KV. A block here without it is missing
        too.
        """
        missing = []
        for at in reversed(range(len(keys))):  # what is behind gives way first
            block = self._blocks.pop(keys[at], None)
            if block is not None:
                self._blocks[keys[at]] = block
            if block is None or (at < num_drafted and not block.has_draft and not block.users):
                missing.append(at)
        return missing[::-1]

    def _pages_of(self, num_blocks: int) -> list[int]:
        """Return the pages of each group that `num_blocks` blocks take."""
        return [num_blocks * n for n in self.pages_per_block]

    def _drop(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        if block.users:
            self._leaving.append(block)
        else:
            self._free(block)

    def _free(self, block: Block) -> None:
        for pool, pages in zip(self._pages, block.pages, strict=True):
            pool.give_back(pages)


def _pages(blocks: Sequence[Block], group: int) -> Pages:
    """Return the host pages of a group that these blocks take, one block after the other."""
    return np.concatenate([block.pages[group] for block in blocks])
