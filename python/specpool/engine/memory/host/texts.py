"""`HostTexts`: keeps the KV of texts on the host, below the ledger's prefix index.

A text is kept in blocks of whole pages of every group. A block is known by its salt and all tokens
up to its end, so texts with the same beginning share blocks. A recurrent state may end at any
token: it is kept with the KV of its tokens behind the last whole block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
            pages of a window behind could not be brought back as a whole.
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
        self.is_on = all(group.window is None for group in ledger.groups)
        self.block_len = lcm(*self._sizes)
        self.eviction_ct = self.failed_ct = 0
        self._blocks: dict[bytes, Block] = {}
        self._states: dict[bytes, list[Block]] = {}  # those of `_blocks`, by `before`
        self._leaving: list[Block] = []  # dropped, but a reload still copies from them

    def __len__(self) -> int:
        """Return the number of blocks, without states."""
        return len(self._blocks) - sum(map(len, self._states.values()))

    @property
    def pages_per_block(self) -> list[int]:
        """Pages of each group that a block takes."""
        return [self.block_len // size for size in self._sizes]

    def keys(self, tokens: Int32, salt: bytes) -> Iterator[bytes]:
        """Yield the key of each whole block of the tokens. Cost: a hash of each block."""
        key = _first_key(salt)
        for end in range(self.block_len, len(tokens) + 1, self.block_len):
            block = np.ascontiguousarray(tokens[end - self.block_len : end])
            key = hashlib.blake2b(key + block.tobytes(), digest_size=16).digest()
            yield key

    def save(self, row: int, tokens: Int32, salt: bytes, token_seconds: float) -> int:
        """Copy the KV of a row's first tokens to the host, if that pays, for later requests.

        Nothing may be in flight that writes these tokens. Only whole blocks are kept, and the
        states that the index has of the tokens; and of those only what is not here yet. Texts that
        were unused the longest give way. The row stays.

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
        drafted_len = int(self._ledger.drafted_len[row])
        num_drafted = drafted_len // self.block_len
        missing = self._missing(keys, num_drafted)
        states = self._missing_states(tokens, salt, keys, drafted_len)
        num_tokens = len(missing) * self.block_len
        if states and not missing:  # they save the prefill of what is here already
            num_tokens = max(state.length for state in states)
        num_pages = self._pages_of(len(missing), states)
        if not self._is_worth_copying(num_pages, num_tokens, token_seconds):
            return 0
        keeps = [*keys, *(state.key for state in states)]
        while states and not self.make_room(self._pages_of(0, states), keeps):
            states.pop()
        while not self.make_room(self._pages_of(len(missing), states), keeps):
            if missing:
                cut = missing.pop() * self.block_len
                states = [state for state in states if state.length < cut + self.block_len]
            else:
                states.pop()
        blocks, columns = [], []  # of each block, for each group
        for at in missing:
            of_block = [range(at * n, (at + 1) * n) for n in self.pages_per_block]
            columns.append(of_block)
            taken = [len(range_) for range_ in of_block] + [0] * len(self._ledger.states)
            blocks.append(self._take(taken, keys[at], salt, has_draft=at < num_drafted))
        for state in states:
            columns.append(state.columns(self._sizes, self.block_len))
            taken = [*map(len, columns[-1]), 1]
            has_draft = not state.tail or state.length <= drafted_len
            block = self._take(taken, state.key, salt, has_draft=has_draft)
            block.before, block.tail = state.before, state.tail
            blocks.append(block)
        if not blocks:
            return 0
        moves = []
        for g in range(len(self._sizes)):
            of_group = np.concatenate([np.array(of_block[g], np.int64) for of_block in columns])
            moves.append((self._ledger.page_table(g)[row, of_group], _pages(blocks, g)))
        if self._ledger.states:
            slots = np.array([state.slot for state in states], np.int32)
            moves.append((slots, _pages(blocks, len(self._sizes))))
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
            if block.before is not None:
                self._states.setdefault(block.before, []).append(block)
        return len(missing) * self.block_len

    def lend(
        self, tokens: Int32, salt: bytes, start: int, token_seconds: float, *, needs_draft: bool
    ) -> Handle | None:
        """See `HostTier.lend`, which also records the handle."""
        if not self._blocks:
            return None
        if self._ledger.states:
            return self._lend_state(tokens, salt, start, token_seconds, needs_draft=needs_draft)
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

    def _lend_state(
        self, tokens: Int32, salt: bytes, start: int, token_seconds: float, *, needs_draft: bool
    ) -> Handle | None:
        """Return a handle of the longest state of these tokens, if it has more than `start`."""
        blocks = self._find(tokens, salt, 0, needs_draft=needs_draft)
        for num_blocks in reversed(range(len(blocks) + 1)):
            before = blocks[num_blocks - 1].key if num_blocks else _first_key(salt)
            first = num_blocks * self.block_len
            if first >= len(tokens):
                continue
            rest = np.ascontiguousarray(tokens[first : len(tokens) - 1]).tobytes()
            serving = [
                state
                for state in self._states.get(before, ())
                if rest.startswith(state.tail) and (state.has_draft or not needs_draft)
            ]
            if serving:
                break
        else:
            return None
        state = max(serving, key=lambda state: len(state.tail))
        length = first + len(state.tail) // tokens.itemsize
        used = [*blocks[:num_blocks], state]
        num_pages = [sum(len(block.pages[g]) for block in used) for g in range(len(state.pages))]
        if length <= start or not self._is_worth_copying(num_pages, length - start, token_seconds):
            return None
        undrafted = next((i for i, block in enumerate(used) if not block.has_draft), len(used))
        for block in used:
            block.users += 1
        return Handle(
            number=next(self._numbers),
            tag=None,
            length=length,
            drafted_len=min(undrafted * self.block_len, length),
            last_start=0,
            columns=(0,) * len(self._sizes),
            pages=tuple(_pages(used, g) for g in range(len(state.pages))),
            blocks=tuple(used),
        )

    def make_room(self, num_pages: Sequence[int], keeps: Sequence[bytes] = ()) -> bool:
        """Drop the blocks unused the longest, but not `keeps`, until each group has free pages.

        Of a group that has enough, nothing is dropped.

        Returns:
            Whether each group has `num_pages` free pages; if not, nothing was dropped.
        """
        lacking = [n - g.num_free for n, g in zip(num_pages, self._pages, strict=True)]
        keys_kept, dropped = set(keeps), []
        spare = (
            block for key, block in self._blocks.items() if not block.users and key not in keys_kept
        )
        while max(lacking) > 0:
            block = next(spare, None)
            if block is None:
                return False
            sizes = [len(pages) for pages in block.pages]
            if any(n > 0 and size for n, size in zip(lacking, sizes, strict=True)):
                lacking = [n - size for n, size in zip(lacking, sizes, strict=True)]
                dropped.append(block.key)
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
        self._states = {}
        for block in self._blocks.values():
            if block.before is not None:
                self._states.setdefault(block.before, []).append(block)

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

    def _missing_states(
        self, tokens: Int32, salt: bytes, keys: Sequence[bytes], drafted_len: int
    ) -> list[_State]:
        """Return the states of the tokens in the index that are not here, the longest first.

        The others are marked as used. The row has `drafted_len` tokens with draft KV. A state here
        whose tail is without is missing too.
        """
        missing: list[_State] = []
        limit = len(tokens) if self._ledger.states else 0
        while limit:
            slot, length = self._ledger.match_state(tokens, salt, limit=limit)
            if not slot:
                break
            num_blocks, limit = length // self.block_len, length - 1
            before = keys[num_blocks - 1] if num_blocks else _first_key(salt)
            behind = tokens[num_blocks * self.block_len : length]
            tail = np.ascontiguousarray(behind).tobytes()
            key = hashlib.blake2b(before + tail, digest_size=16, person=b"state").digest()
            state = _State(slot, length, key, before, tail)
            block = self._blocks.pop(key, None)
            if block is not None:
                self._blocks[key] = block
            if block is None or (length <= drafted_len and not block.has_draft and not block.users):
                missing.append(state)
        return missing

    def _pages_of(self, num_blocks: int, states: Sequence[_State] = ()) -> list[int]:
        """Return the pages of each group that `num_blocks` blocks and some states take."""
        num_pages = [num_blocks * n for n in self.pages_per_block]
        for state in states:
            for g, columns in enumerate(state.columns(self._sizes, self.block_len)):
                num_pages[g] += len(columns)
        return [*num_pages, *(len(states) for _ in self._ledger.states)]

    def _take(self, num_pages: Sequence[int], key: bytes, salt: bytes, *, has_draft: bool) -> Block:
        """Return a new block on `num_pages` free pages of each group."""
        number = next(self._numbers)
        taken = zip(self._pages, num_pages, strict=True)
        return Block(number, key, salt, tuple(p.take(n, number) for p, n in taken), has_draft)

    def _drop(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        if block.before is not None:
            siblings = self._states[block.before]
            siblings.remove(block)
            if not siblings:
                del self._states[block.before]
        if block.users:
            self._leaving.append(block)
        else:
            self._free(block)

    def _free(self, block: Block) -> None:
        for pool, pages in zip(self._pages, block.pages, strict=True):
            pool.give_back(pages)


@dataclass(frozen=True, slots=True)
class _State:
    """A state of a text, on the device; its key, and the rest as in `Block`."""

    slot: int
    length: int
    key: bytes
    before: bytes
    tail: bytes

    def columns(self, page_sizes: Sequence[int], block_len: int) -> list[range]:
        """Return, for each group, the columns of its tokens behind the last whole block."""
        first = self.length // block_len * block_len
        return [range(first // size, -(-self.length // size)) for size in page_sizes]


def _first_key(salt: bytes) -> bytes:
    """Return the key before the first block."""
    return hashlib.blake2b(salt, digest_size=16).digest()


def _pages(blocks: Sequence[Block], group: int) -> Pages:
    """Return the host pages of a group that these blocks take, one block after the other."""
    return np.concatenate([block.pages[group] for block in blocks])
