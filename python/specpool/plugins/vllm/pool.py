"""vLLM's block pool, on `specpool.BlockPool`.

Who holds a block, and which is given up next, is the core's. What a block holds stays vLLM's: its
managers look blocks up by hashes that chain over a text, its groups and its adapters. Imported by
the plug-in only, because it imports vLLM.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from specpool import BlockPool, OutOfPages, PageStateError, SpecpoolError
from specpool.plugins import record
from specpool.plugins.quarantine import Quarantine, take_free
from specpool.plugins.status import status_of
from specpool.plugins.vllm import request_names
from specpool.plugins.vllm.next_tokens import NextTokens

OwnBlockPool: Any = block_pool.BlockPool
_original_insert = OwnBlockPool._insert_block_hash
_original_remove = OwnBlockPool._remove_cached_block_hashes


class SpecpoolBlock(KVCacheBlock):  # type: ignore[misc] # no stubs
    """A block whose count of holders is the core's. Two blocks are equal if they are the same."""

    # Older releases of vLLM have no slot for the pool.
    __slots__ = () if "pool" in KVCacheBlock.__slots__ else ("pool",)
    pool: SpecpoolBlockPool | BlockQuarantine
    # vLLM's property of this name only reads the slot. The slot itself is read without a call.
    block_hash = KVCacheBlock._block_hash

    def __init__(self, block_id: int, pool: SpecpoolBlockPool) -> None:
        block: Any = self  # its slots are the base's, which has no types
        block.block_id, block.pool, block.is_null = block_id, pool, False
        block._block_hash = block._block_hash_num_tokens = None
        block.prev_free_block = block.next_free_block = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def ref_cnt(self) -> int:
        """How often the block is held. vLLM's managers change it, too."""
        return 0 if self.is_null else self.pool.core.refs(self.block_id)

    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        more = count - self.ref_cnt
        if more > 0:
            _hold(self.pool.core, [self] * more)
        elif more < 0:
            self.pool.free_blocks([self] * -more)


def _hold(core: BlockPool, blocks: Iterable[SpecpoolBlock], unpinned: Container[int] = ()) -> None:
    """Hold blocks once more, all of them or none; the null block is left out.

    Args:
        core: their pool.
        blocks: a block may be named several times.
        unpinned: blocks that were not given since they were unpinned: they hold what they held.

    Raises:
        PageStateError: a block is free, and what it held is forgotten.
    """
    ids, read, free = list[int](), list[int](), list[int]()
    for block in blocks:
        if block.is_null:
            continue
        if block._block_hash is None:
            state, _, tag = core.record_of(block.block_id)[:3]
            if state == "cached":  # it keeps its place
                if block.block_id not in unpinned:
                    refusal = f"hold of block {block.block_id}: nobody holds it, and what it held"
                    raise PageStateError(f"{refusal} is forgotten; last tag {tag or 'none'}")
                read.append(block.block_id)
            elif state == "free" and block.block_id in unpinned:  # others freed it since
                free.append(block.block_id)
                continue
        ids.append(block.block_id)
    core.hold(ids)
    if read:
        core.unkeep(read)  # its free is as usual
    for block_id in free:
        if core.refs(block_id):  # it is named twice
            core.hold(block_id)
        else:
            take_free(core, block_id, core.record_of(block_id)[2])


def _freed_at_the_last(blocks: list[int]) -> list[int]:
    """Return the ids in an order in which, of a repeated one, the last place counts."""
    last = list(dict.fromkeys(reversed(blocks)))
    more = Counter(blocks) - Counter(last)
    return [*reversed(last), *more.elements()]


class FreeOrder:
    """The free blocks as vLLM reads its queue of them: the block that is taken next comes first."""

    def __init__(self, core: BlockPool, blocks: Sequence[SpecpoolBlock]) -> None:
        self._core, self._blocks = core, blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones among them. O(1)."""
        return self._core.available()

    def get_all_free_blocks(self) -> list[SpecpoolBlock]:
        """Return them in the order in which they are given. O(blocks)."""
        blocks = self._blocks
        return [blocks[block] for block in self._core.preview().tolist()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[SpecpoolBlock]:
        """Yield those behind `cursor`, or all. O(blocks)."""
        free = self.get_all_free_blocks()
        yield from free if cursor is None else free[free.index(cursor) + 1 :]


class BlockQuarantine(Quarantine):
    """The pool of the blocks that are in quarantine, so that no free misses it."""

    def free_blocks(self, ordered_blocks: Iterable[SpecpoolBlock]) -> None:
        """Note a free of blocks that are in quarantine."""
        self.drop([block.block_id for block in ordered_blocks])


class SpecpoolBlockPool(OwnBlockPool):  # type: ignore[misc] # no stubs
    """Takes the place of `BlockPool`. Block 0 is vLLM's null block, which the core does not have.

    `core` is the pool: `core.taken()`, `core.record_of(block)`, `core.digest`.
    """

    #: Whether a proof tries the class: then wrong frees raise, and no log is written.
    is_tried = False
    # Of the base, which has no types.
    enable_caching: bool
    num_gpu_blocks: int
    metrics_collector: Any
    _reuse_watchers: dict[int, Callable[[Any], None]]

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_gpu_blocks, *args, **kwargs)
        if not hasattr(self, "_reuse_watchers"):  # before vLLM 0.33
            self._reuse_watchers = {}
        log = None if self.is_tried else record.log_path("SPECPOOL_VLLM_RECORD")
        self.core = _new_core(num_gpu_blocks, log)
        # Without a frame of Python: each round asks several times for each request.
        self.get_num_free_blocks: Callable[[], int] = self.core.available
        self.blocks = [SpecpoolBlock(block, self) for block in range(num_gpu_blocks)]
        self.null_block: Any = self.blocks[0]
        # By the core's ids. Beside the null block alone the core has a block that nobody gets.
        self._given: list[Any] = self.blocks if num_gpu_blocks > 1 else [*self.blocks, None]
        self.null_block.is_null = True
        self.free_block_queue = FreeOrder(self.core, self.blocks)
        # The request that blocks are taken for, in errors and records.
        self.tag: str | None = None
        # None unless `speculative` keeps them.
        self.next_tokens: NextTokens | None = None
        # Hashes that an event says were stored though their block was refused.
        self._uncached: list[Any] = []
        # None if a wrong free raises.
        self.quarantine: BlockQuarantine | None = None
        if not self.is_tried and os.environ.get("SPECPOOL_VLLM_FAULTS") != "raise":
            self.quarantine = BlockQuarantine(
                status_of("vllm"), self.core, log, enter=self._shut, leave=self._open
            )

    # What vLLM takes and frees.

    def get_new_blocks(self, num_blocks: int) -> list[SpecpoolBlock]:
        """Take blocks; free ones first, then the least recently used cached ones.

        Raises:
            ValueError: there are not enough.
        """
        try:
            new = self.core.take(num_blocks, None, self.tag, self._given)
        except OutOfPages:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool") from None
        if self._reuse_watchers:
            self._notify_reuse(new)
        collector = self.metrics_collector
        if collector and self.enable_caching:
            for block in new:
                collector.on_block_evicted(block)
        for block in new:
            if block._block_hash is not None:  # the core gave it up
                removed = _original_remove(self, block)
                if self.enable_kv_cache_events:
                    self._emit_block_removed_events(removed)
                if self.next_tokens is not None:
                    self.next_tokens.forget(block.block_id)
        if collector:
            for block in new:
                collector.on_block_allocated(block)
        return new

    def touch(self, blocks: Sequence[SpecpoolBlock]) -> None:
        """Hold blocks once more, all of them or none.

        Raises:
            PageStateError: a block is free, and nobody knows what it holds.
        """
        if len(blocks) == 1 and blocks[0]._block_hash is not None:
            self.core.hold(blocks[0].block_id)  # a comprehension would take half of the call's time
        else:
            ids = [block.block_id for block in blocks if block._block_hash is not None]
            if len(ids) < len(blocks):
                _hold(self.core, blocks, self._reuse_watchers)
            else:
                self.core.hold(ids)
        if self.metrics_collector:
            for block in blocks:
                if not block.is_null:
                    self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[SpecpoolBlock]) -> None:
        """Let go of blocks; the first one is given up first.

        A block that is held less often than it is named goes into quarantine, and the rest of the
        call is done. If `SPECPOOL_VLLM_FAULTS` is raise, the call changes nothing.

        Raises:
            PageStateError: a block is held less often than it is named.
            ForeignBlockError: a block is of no pool.
        """
        hashed, unhashed = [], []
        foreign: list[Any] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.pool is not self:
                foreign.append(block)
            elif block._block_hash is not None and self.enable_caching:
                hashed.append(block.block_id)
            else:
                unhashed.append(block.block_id)
        if foreign:
            foreign = self._owned(foreign)
        # The core lets go of the last one first, and gives first what became free last.
        if len(unhashed) > 1 and len(set(unhashed)) < len(unhashed):
            unhashed = _freed_at_the_last(unhashed)
        if hashed:
            hashed.reverse()
            unhashed += hashed
        self._drop(unhashed)
        if foreign:  # the usual call does not pay for the loop
            for pool in dict.fromkeys(block.pool for block in foreign):
                pool.free_blocks([block for block in foreign if block.pool is pool])

    def _drop(self, blocks: list[int]) -> None:
        """Let go of blocks of which none is in quarantine, the last one first."""
        try:
            self.core.drop(blocks)
        except PageStateError:
            if self.quarantine is None:
                raise
            self.quarantine.drop(blocks)

    def _owned(self, blocks: list[Any]) -> list[Any]:
        """Return the blocks that have a pool.

        Raises:
            ForeignBlockError: there are others, and wrong frees raise.
        """
        named = ", ".join(str(block.block_id) for block in blocks if block.pool is None)
        if named:
            self._refuse(f"free of blocks {named}: they are of no pool")
        return [block for block in blocks if block.pool is not None]

    def _refuse(self, refusal: str) -> None:
        if self.quarantine is None:
            raise ForeignBlockError(refusal)
        self.quarantine.note(refusal)

    def _shut(self, block_id: int) -> None:
        """Forget what a block holds that is in quarantine, and send its frees there."""
        block: Any = self.blocks[block_id]
        self._emit_block_removed_events(self._forget(block))
        assert self.quarantine is not None
        block.pool = self.quarantine
        if self._reuse_watchers:  # a reader may free it when it is told
            self._notify_reuse([block])

    def _open(self, block_id: int) -> None:
        block: Any = self.blocks[block_id]
        block.pool = self

    def unpin_blocks(
        self, blocks: Iterable[SpecpoolBlock], on_reuse: Callable[[Any], None]
    ) -> None:
        """Let go of blocks that are still read until they are given again.

        One that is another pool's, or in quarantine, is freed there, and its reader told at once.

        Raises:
            PageStateError, ForeignBlockError: as `free_blocks`.
        """
        blocks = list(blocks)
        foreign = [block for block in blocks if block.pool is not self]
        if foreign:
            self.free_blocks(foreign)
        held = [block.block_id for block in blocks if block.pool is self]
        try:
            self._keep_held(held)  # so that free blocks go before them
            self._drop([block for block in reversed(held) if self.blocks[block].pool is self])
        finally:
            for block in blocks:  # whoever else holds it frees it as usual
                if block.pool is self and block.ref_cnt and block._block_hash is None:
                    self.core.unkeep([block.block_id])
        for block in {id(block): block for block in blocks}.values():
            if block.pool is self:
                self._reuse_watchers[block.block_id] = on_reuse
            else:
                on_reuse(block)

    # What blocks hold: vLLM's index, and whether the core caches them.

    def _insert_block_hash(
        self, block_hash_with_group_id: Any, block: SpecpoolBlock, num_tokens: int | None
    ) -> None:
        """Note what a block holds; vLLM's methods that cache blocks call this for each.

        A block that is not held goes into quarantine, unless `SPECPOOL_VLLM_FAULTS` is raise.

        Raises:
            PageStateError: the block is not held.
            ForeignBlockError: the block is not this pool's.
        """
        if block.pool is not self:
            self._refuse(f"cache of block {block.block_id}: it is not of this pool")
            self._uncached.append(block_hash_with_group_id)
            return
        try:
            self.core.keep(block.block_id)
        except PageStateError as error:
            self._freed_too_early(block.block_id, error)
            self._uncached.append(block_hash_with_group_id)
            return
        if block._block_hash is None:  # so no key leads to it: vLLM would ask its index
            block._block_hash, block._block_hash_num_tokens = block_hash_with_group_id, num_tokens
            self.cached_block_hash_to_block.insert(block_hash_with_group_id, block)
        else:
            _original_insert(self, block_hash_with_group_id, block, num_tokens)

    def take_events(self) -> list[Any]:
        """Take all events; behind them those that take back what was said of refused blocks."""
        uncached, self._uncached = self._uncached, []
        self._emit_block_removed_events(uncached)
        events: list[Any] = super().take_events()
        return events

    def _freed_too_early(self, block: int, error: PageStateError) -> None:
        if self.quarantine is None:
            raise error
        self.quarantine.put_in(block, str(error))

    def _keep_held(self, blocks: list[int]) -> None:
        """Keep blocks; one that nobody holds was freed too early, and goes into quarantine."""
        for block in dict.fromkeys(blocks):
            try:
                self.core.keep(block)
            except PageStateError as error:
                self._freed_too_early(block, error)

    def _remove_cached_block_hashes(self, block: SpecpoolBlock) -> list[Any]:
        # A free one keeps its place, as in vLLM's queue: the core has it cached until it is given.
        if block.ref_cnt:
            self.core.unkeep([block.block_id])
        return self._forget(block)

    def _forget(self, block: SpecpoolBlock) -> list[Any]:
        if self.next_tokens is not None:
            self.next_tokens.forget(block.block_id)
        removed: list[Any] = _original_remove(self, block)
        return removed

    def reset_prefix_cache(self) -> bool:
        """Forget what all blocks hold, if none is held; return whether. They keep their places.

        Blocks in quarantine come out then, because no request is left that could touch them.
        """
        quarantine = self.quarantine
        if quarantine is not None and len(quarantine.unheld()) == len(self.core.taken()):
            quarantine.release()
        if not super().reset_prefix_cache():
            return False
        if self.next_tokens is not None:
            self.next_tokens.clear()
        return True


class ForeignBlockError(SpecpoolError, ValueError):
    """A block that is not the pool's was to be freed or cached."""


def install() -> None:
    """Put the class in the place of vLLM's, and name requests in errors."""
    for module in (block_pool, kv_cache_coordinator):
        module.BlockPool = SpecpoolBlockPool
    if "pool" not in KVCacheBlock.__slots__:
        KVCacheBlock.pool = None  # blocks of no pool, before vLLM 0.32
    request_names.install()


def _new_core(num_gpu_blocks: int, log: str | None) -> BlockPool:
    core = BlockPool(max(1, num_gpu_blocks - 1), 1, first_id=1, record=log)
    if log:
        record.close_at_exit(core)
    if num_gpu_blocks == 1:  # vLLM's null block alone: nothing can be taken
        core.take(1, tag="no block")
    return core
