"""`Handle`: the KV of one row on the host; and `Copies`, the interface of what copies its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpool.engine.memory.host.pages import Pages

#: For each group: device pages, and as many host pages.
Moves = Sequence[tuple[npt.NDArray[np.int32], Pages]]


class Copies(Protocol):
    """The part that copies pages to the host and back, in the order of the forwards.

    A state group counts as one more group, whose pages are its slots.

    Attributes:
        num_pages: host pages of each group.
        page_bytes: bytes of a page of each group.
    """

    num_pages: list[int]
    page_bytes: list[int]

    def save(self, moves: Moves) -> None:
        """Copy pages of the device to host pages."""

    def load(self, moves: Moves) -> None:
        """Copy host pages to pages of the device."""

    def seconds(self, num_pages: Sequence[int]) -> float:
        """Estimate the seconds to copy `num_pages` of each group to the host and back."""


@dataclass(slots=True, eq=False)
class Block:
    """The KV of one block of a text; or a recurrent state, with the KV behind the last whole block.

    Attributes:
        number: its owner number among the host pages.
        key: what it is found by.
        salt: the salt of its text.
        pages: for each group, the host pages; then that of the state slot, if there are states.
        has_draft: whether it has valid draft KV.
        users: reloads that are copying from it; until they are over it stays.
        before: of a state, the key of the block that its tail follows; None if it is no state.
        tail: of a state, its tokens behind that block.
    """

    number: int
    key: bytes
    salt: bytes
    pages: tuple[Pages, ...]
    has_draft: bool
    users: int = 0
    before: bytes | None = None
    tail: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """The KV of one row on the host; valid until it is dropped, trimmed or reloaded.

    Attributes:
        number: the handle's number, from 1.
        tag: the tag of the row that it came from.
        length: tokens; the `resolved_len` of the row after a reload. Of a row with a recurrent
            state, the tokens that its state has.
        drafted_len: positions below it have valid draft KV.
        last_start: the earliest start of a reload's last extend. An extend from there evicts all
            pages that are not on the host.
        columns: for each group, the first column of the page table that is held, besides those of
            a sink.
        pages: for each group, the host pages from that column on; then that of the state slot, if
            there are states.
        blocks: of a lent handle, the blocks that the pages belong to; empty if they are its own.
    """

    number: int
    tag: str | None
    length: int
    drafted_len: int
    last_start: int
    columns: tuple[int, ...]
    pages: tuple[Pages, ...]
    blocks: tuple[Block, ...] = ()

    @property
    def is_lent(self) -> bool:
        """Whether it brings back a text, whose pages stay on the host."""
        return bool(self.blocks)
