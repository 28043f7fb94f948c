"""Blocks that an engine freed wrongly: nobody gets them until the pool is reset.

A request may still write a block that is freed twice, so the block is kept out, and the engine goes
on. The pool's core holds it once, under a tag that says why: free, used and quarantined blocks are
all there are.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specpool import BlockPool, PageStateError, ShapeError
from specpool.plugins.status import EngineStatus
from specpool.plugins.wrong_free import WrongFree

#: One block of so many may be in quarantine; then the first one that nobody holds there comes out
#: again, or an engine that frees wrongly all the time would have no block left.
SHARE = 16
#: Bytes of an event log that a report takes over.
MOST_LOG_BYTES = 64 << 20


class Quarantine:
    """The wrongly freed blocks of one pool. `blocks` has each with its tag, the first one first."""

    def __init__(
        self,
        status: EngineStatus,
        core: BlockPool,
        log: str | None,
        *,
        owner_of: Callable[[int], str | None] | None = None,
        freer_of: Callable[[int], str | None] = lambda block: None,
        enter: Callable[[int], None] = lambda block: None,
        leave: Callable[[int], None] = lambda block: None,
    ) -> None:
        """Begin without a block.

        Args:
            status: gets the wrong frees.
            core: the pool.
            log: the path of its event log, if it has one.
            owner_of: returns the request that took a block last; by default the pool's tag.
            freer_of: returns the request that frees a block now; by default, and for None, the one
                that the engine's frames name.
            enter: called with a block that was just put in.
            leave: called with a block that comes out.
        """
        self.core, self.blocks = core, dict[int, str]()
        self._owner_of = owner_of or (lambda block: core.record_of(block)[2])
        self._freer_of = freer_of
        self._status, self._log, self._enter, self._leave = status, log, enter, leave
        status.watch(self)

    def drop(
        self, blocks: Sequence[int], explained: Callable[[str], str] = lambda refusal: refusal
    ) -> list[int]:
        """Let go of blocks, the last one first; put those in that are freed wrongly.

        Args:
            blocks: their ids.
            explained: adds to a refusal what the caller knows of its block.

        Returns:
            the blocks that were freed.
        """
        freed = []
        for block in reversed(blocks):
            if block in self.blocks and self.core.refs(block) == 1:
                self.note(f"drop of block {block}: it is in quarantine")
                continue
            try:
                self.core.drop([block])
                freed.append(block)
            except PageStateError as error:
                self.put_in(block, explained(str(error)))
            except ShapeError as error:
                self.note(explained(str(error)))
        return freed

    def has_any(self, blocks: npt.NDArray[np.int64]) -> bool:
        """Return whether one of the blocks is in."""
        return not self.blocks.keys().isdisjoint(blocks.tolist())

    def unheld(self) -> list[int]:
        """Return the blocks that nobody has held since they were put in, the first one first."""
        return [block for block in self.blocks if self.core.refs(block) == 1]

    def put_in(self, block: int, refusal: str) -> None:
        """Keep a block that nobody holds from everybody. O(free blocks)."""
        wrong = WrongFree.seen(refusal, self._owner_of(block), self._freer_of(block))
        max_blocks = max(1, self.core.num_blocks // SHARE)
        while len(self.blocks) >= max_blocks and (unheld := self.unheld()):
            self._take_out(unheld[0])
        self.core.unkeep([block])
        take_free(self.core, block, wrong.tag)
        self.blocks[block] = wrong.tag
        self._enter(block)
        self._report(wrong)

    def note(self, refusal: str) -> None:
        """Note a wrong free that puts no block in: it is none of the pool's, or is in already."""
        wrong = WrongFree.seen(refusal, None)
        self.core.take(0, None, wrong.tag)
        self._report(wrong)

    def release(self) -> None:
        """Let all blocks out."""
        for block in list(self.blocks):
            self._take_out(block)

    def _take_out(self, block: int) -> None:
        del self.blocks[block]
        self.core.drop([block])
        self._leave(block)

    def _report(self, wrong: WrongFree) -> None:
        self._status.note(wrong, self._write)

    def _write(self, path: str, wrong: WrongFree) -> None:
        """Write the event log up to this call; without one, or if it is long, the pool's state."""
        if self._log and os.path.exists(self._log):
            self.core.sync()
            if os.path.getsize(self._log) <= MOST_LOG_BYTES:
                shutil.copyfile(self._log, path)
                return
        state = copy_of(self.core, path)
        state.take(0, None, wrong.tag)
        state.close()


def take_free(core: BlockPool, block: int, tag: str | None) -> None:
    """Take one certain free block; the others keep their order and their tags. O(free blocks)."""
    order = core.preview(core.num_free).tolist()
    before = order[: order.index(block)]
    for run_tag, run in itertools.groupby(before, lambda block: core.record_of(block)[2]):
        core.take(len(list(run)), None, run_tag)
    core.take(1, None, tag)
    core.drop(before)


def copy_of(core: BlockPool, record: str) -> BlockPool:
    """Return a pool with the same blocks free, cached and held, whose log has nothing before that.

    It is for pools that their engine keeps the index of. Cost: O(num_blocks).

    Raises:
        RecordError: the log cannot be written.
    """
    copy = BlockPool(
        core.num_blocks,
        core.block_size,
        first_id=core.first_id,
        caching=core.caching,
        record=record,
    )
    order, num_free = core.preview().tolist(), core.num_free
    lines = [core.record_of(core.first_id + at) for at in range(core.num_blocks)]
    used = [at for at, line in enumerate(lines) if line[0] != "free"]
    begin = 0
    while begin <= max(used, default=-1):  # blocks in a row with one tag in one call
        end = begin
        while end <= used[-1] and lines[end][2] == lines[begin][2]:
            end += 1
        copy.take(end - begin, None, lines[begin][2])
        begin = end
    ids = range(core.first_id, core.first_id + begin)
    copy.take(0, [b for b in ids for _ in range(lines[b - core.first_id][1] - 1)])
    cached = order[num_free:]
    known = [b for b in ids if lines[b - core.first_id][:2] == ("shared", 1)]
    copy.keep([*cached, *known])
    copy.drop([block for block in order[:num_free] if block in ids] + cached[::-1])
    return copy
