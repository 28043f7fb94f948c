"""`Accounts`: who holds each block of a pool, counted beside the engine's own counters.

The engine's calls that take, share and give back blocks are wrapped, so its own counts are never
trusted. A block that is handed out while somebody holds it, and one that is given back by nobody,
break the law of one owner when it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lab.engines.device import LateDevice


class Accounts:
    """Holders of each block; `sinks` are blocks that everybody may name, such as block 0."""

    def __init__(self, device: LateDevice, num_blocks: int, sinks: Iterable[int] = (0,)) -> None:
        self.device = device
        self.sinks = frozenset(sinks)
        self.blocks = frozenset(range(num_blocks)) - self.sinks
        self.holders: Counter[int] = Counter()

    def take(self, blocks: Iterable[int]) -> None:
        """Blocks are handed out as new."""
        for block in blocks:
            if block in self.sinks or self.holders[block]:
                self._fault("take", block, "is handed out as new")
            self.holders[block] += 1

    def share(self, blocks: Iterable[int]) -> None:
        """Blocks get one more holder."""
        self.holders.update(block for block in blocks if block not in self.sinks)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks lose a holder."""
        for block in blocks:
            if block in self.sinks:
                continue
            if not self.holders[block]:
                self._fault("free", block, "is freed")
            else:
                self.holders[block] -= 1

    def held(self) -> set[int]:
        """Return the blocks that somebody holds."""
        return {block for block, count in self.holders.items() if count}

    def _fault(self, where: str, block: int, what: str) -> None:
        self.device.fault(
            "one owner", where, f"block {block} {what} while it has {self.holders[block]} holders"
        )
