"""`Layout`: what an engine's rows are made of; a row moves only between equal layouts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from specpool._core import Ledger


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The pages of one group.

    Attributes:
        name: the group's name.
        page_size: slots per page.
        page_bytes: bytes of one page in all layers of the group.
        window: keys that a query sees; None means all.
        sink: first tokens that a query sees beside its window.
    """

    name: str
    page_size: int
    page_bytes: int
    window: int | None
    sink: int = 0

    def columns(self, length: int) -> list[int]:
        """Return the columns that a row of `length` tokens needs to go on."""
        start = 0 if self.window is None else max(length - self.window + 1, 0) // self.page_size
        sinks = min(start, -(-self.sink // self.page_size))
        return [*range(sinks), *range(start, -(-length // self.page_size))]


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of an engine, and what computed their KV.

    Attributes:
        model: identifies the models, their weights and dtype: see `Engine.layout`.
        max_context_len: the most tokens of a row.
        groups: in the ledger's order.
        state_bytes: bytes of a state slot; 0 without recurrent layers.
    """

    model: str
    max_context_len: int
    groups: tuple[GroupLayout, ...]
    state_bytes: int = 0

    @classmethod
    def from_ledger(cls, ledger: Ledger, page_bytes: Sequence[int], model: str) -> Layout:
        """Describe a ledger's rows.

        Args:
            ledger: has the rows.
            page_bytes: bytes of a page of each group, then those of a slot of each state group.
            model: identifies the models.
        """
        sizes = iter(page_bytes)
        groups = [
            GroupLayout(g.name, g.page_size, next(sizes), g.window, g.sink) for g in ledger.groups
        ]
        state_bytes = [next(sizes) for _ in ledger.states]
        return cls(model, ledger.max_context_len, tuple(groups), sum(state_bytes))

    @property
    def key(self) -> str:
        """A hash of all but `max_context_len`, 32 hexadecimal digits."""
        parts: list[object] = [self.model]
        for g in self.groups:
            sink = [g.sink] if g.sink else []
            parts.append([g.name, g.page_size, g.page_bytes, g.window, *sink])
        if self.state_bytes:
            parts.append(self.state_bytes)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each group; the state slot counts as the page of one more group."""
        slot = [self.state_bytes] if self.state_bytes else []
        return [*(group.page_bytes for group in self.groups), *slot]

    def num_pages(self, length: int) -> list[int]:
        """Return the pages that a row of `length` tokens takes along, as many as `page_bytes`."""
        slot = [int(length > 0)] if self.state_bytes else []
        return [*(len(group.columns(length)) for group in self.groups), *slot]
