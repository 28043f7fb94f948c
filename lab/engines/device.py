"""`LateDevice`: a device without a GPU whose slots hold content keys, and on which time passes.

A launched step runs later than the host's next calls: it reads and writes the slots of the rows
that it was launched with, and finds what they hold when it runs. Steps run in the order of their
launch. A late writer, such as a transfer of a KV connector, is in no such order.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from lab.engines.content import Keys

#: In the place of a law: the engine was not made with the settings of a case, and nothing ran.
SETUP = "setup"
#: The key of a slot that nobody has written.
UNWRITTEN = 0


@dataclasses.dataclass(frozen=True)
class Finding:
    """A broken law: `law` and `where` say which and at which function, `text` has the numbers."""

    law: str
    where: str
    text: str

    def is_like(self, other: Finding) -> bool:
        """Return whether both are the same law at the same place."""
        return (self.law, self.where) == (other.law, other.where)


class SlotMemory:
    """The keys of one model's slots, int64 [num_blocks, block_size]."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.name = name
        self.keys: Keys = np.full((num_blocks, block_size), UNWRITTEN, np.int64)

    def at(self, blocks: Iterable[int], block_size: int) -> Keys:
        """Return the keys in a row of blocks, of which the first `block_size` slots are used."""
        return self.keys[list(blocks), :block_size].reshape(-1)


@dataclasses.dataclass
class LaunchedStep:
    """A forward that is launched: the blocks that it may touch, and what it does when it runs."""

    blocks: frozenset[int]
    work: Callable[[], None]
    has_run: bool = False


@dataclasses.dataclass
class LateWrite:
    """A write outside the stream: keys for `slots` (block, offset), under way until it lands."""

    writer: str
    memory: SlotMemory
    slots: list[tuple[int, int]]
    keys: Keys
    has_landed: bool = False

    @property
    def blocks(self) -> set[int]:
        """The blocks that it writes."""
        return {block for block, _ in self.slots}


class LateDevice:
    """Memories, the steps that are launched and have not run, and the faults that were seen."""

    def __init__(self) -> None:
        self.memories: dict[str, SlotMemory] = {}
        self.queue: deque[LaunchedStep] = deque()
        self.findings: list[Finding] = []
        #: What a loop knows of a block, which the texts of findings say.
        self.notes: dict[int, str] = {}

    def add(self, memory: SlotMemory) -> SlotMemory:
        """Add the memory of a model."""
        self.memories[memory.name] = memory
        return memory

    def fault(self, law: str, where: str, text: str) -> None:
        """Note a broken law."""
        self.findings.append(Finding(law, where, text))

    def note(self, blocks: Iterable[int]) -> str:
        """Return what is noted of every one of these blocks, or nothing."""
        notes = {self.notes.get(block, "") for block in blocks}
        return notes.pop() if len(notes) == 1 else ""

    def launch(self, step: LaunchedStep) -> LaunchedStep:
        """Launch a step behind the others; nothing of it happens yet."""
        self.queue.append(step)
        return step

    def run_through(self, step: LaunchedStep) -> None:
        """Let time pass until a step has run."""
        while not step.has_run:
            first = self.queue.popleft()
            first.work()
            first.has_run = True

    def start_late(self, write: LateWrite) -> LateWrite:
        """Start a write that waits for no step: no launched step may touch its blocks."""
        for step in self.queue:
            shared = sorted(step.blocks & write.blocks)
            if shared:
                self.fault(
                    "order",
                    "late write",
                    f"{write.writer} starts to write blocks {shared}, which a step that is "
                    "launched and has not run still uses",
                )
        return write

    def land(self, write: LateWrite, owned: set[int]) -> None:
        """Let a late write arrive; `owned` are the blocks that its request holds now."""
        foreign = sorted(write.blocks - owned)
        if foreign:
            self.fault(
                "order",
                "landing",
                f"the transfer for {write.writer} lands in blocks {foreign}, which it does not "
                "hold any more",
            )
        for (block, offset), key in zip(write.slots, write.keys, strict=True):
            write.memory.keys[block, offset] = key
        write.has_landed = True

    def write(self, memory: SlotMemory, row: list[int], size: int, begin: int, keys: Keys) -> None:
        """Write keys at positions `begin` on of a row whose blocks have `size` slots."""
        for position, key in enumerate(keys.tolist(), begin):
            memory.keys[row[position // size], position % size] = key

    def read(
        self, memory: SlotMemory, row: list[int], size: int, begin: int, keys: Keys, reader: str
    ) -> None:
        """Read positions `begin` on of a row, which must hold `keys`; else law L3 is broken."""
        at = np.arange(begin, begin + len(keys))
        blocks = np.array(row, np.int64)[at // size]
        held = memory.keys[blocks, at % size]
        wrong = np.flatnonzero(held != keys)
        if len(wrong):
            first = int(wrong[0])
            why = "nobody wrote" if held[first] == UNWRITTEN else "holds other content"
            why += self.note(blocks[wrong].tolist())
            self.fault(
                "content",
                f"{memory.name} read",
                f"{reader} reads {len(wrong)} of {len(keys)} slots of {memory.name} wrongly; the "
                f"first is position {int(at[first])}, block {int(blocks[first])}, which {why}",
            )
