"""vLLM's block pool, on `specpool.BlockPool`.

Who holds a block, and which is given up next, is the core's. What a block holds stays vLLM's: its
managers look blocks up by hashes that chain over a text, its groups and its adapters. Imported by
the plug-in only, because it imports vLLM.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from specpool import BlockPool, OutOfPages, SpecpoolError
from specpool.plugins import record

_log = logging.getLogger("specpool.plugins.vllm")

OwnBlockPool: Any = block_pool.BlockPool
_original_insert = OwnBlockPool._insert_block_hash
_original_cache = OwnBlockPool.cache_full_blocks
own_allocate_slots: Any = KVCacheManager.allocate_slots


class SpecpoolBlock(KVCacheBlock):  # type: ignore[misc] # no stubs
    """A block whose count of holders is the core's. Two blocks are equal if they are the same."""

    # Older releases of vLLM have no slot for the pool.
    __slots__ = () if "pool" in KVCacheBlock.__slots__ else ("pool",)
    pool: SpecpoolBlockPool
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
            self.pool.core.take(0, hold=[self.block_id] * more)
        elif more < 0:
            self.pool.core.drop([self.block_id] * -more)


class FreeOrder:
    """The free blocks as vLLM reads its queue of them: the block that is taken next comes first."""

    def __init__(self, core: BlockPool, blocks: Sequence[SpecpoolBlock]) -> None:
        self._core, self._blocks = core, blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones among them. O(1)."""
        return self._core.num_free + self._core.num_cached

    def get_all_free_blocks(self) -> list[SpecpoolBlock]:
        """Return them in the order in which they are given. O(blocks)."""
        blocks = self._blocks
        return [blocks[block] for block in self._core.preview().tolist()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[SpecpoolBlock]:
        """Yield those behind `cursor`, or all. O(blocks)."""
        free = self.get_all_free_blocks()
        yield from free if cursor is None else free[free.index(cursor) + 1 :]


class SpecpoolBlockPool(OwnBlockPool):  # type: ignore[misc] # no stubs
    """Takes the place of `BlockPool`. Block 0 is vLLM's null block, which the core does not have.

    `core` is the pool: `core.taken()`, `core.record_of(block)`, `core.digest`.
    """

    # Of the base, which has no types.
    enable_caching: bool
    num_gpu_blocks: int
    metrics_collector: Any
    _reuse_watchers: dict[int, Callable[[Any], None]]

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_gpu_blocks, *args, **kwargs)
        if not hasattr(self, "_reuse_watchers"):  # before vLLM 0.33
            self._reuse_watchers = {}
        self.core = _new_core(num_gpu_blocks)
        self.blocks = [SpecpoolBlock(block, self) for block in range(num_gpu_blocks)]
        self.null_block: Any = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeOrder(self.core, self.blocks)
        # The request that blocks are taken for, in errors and records.
        self.tag: str | None = None
        # For each cached block the token behind it, or a mark until there is one; None unless
        # `speculative` keeps them.
        self.next_tokens: dict[int, int | tuple[int, int]] | None = None
        # The text whose hit is looked up, if a last block can be proved.
        self.reading: Sequence[int] | None = None
        self._logs_faults = os.environ.get("SPECPOOL_VLLM_FAULTS") == "log"
        # Blocks of a call of `cache_full_blocks`, to be kept at once.
        self._new: list[int] | None = None

    # What vLLM takes and frees.

    def get_num_free_blocks(self) -> int:
        """Return how many blocks can be taken, cached ones among them. O(1)."""
        core = self.core
        return core.num_free + core.num_cached

    def get_new_blocks(self, num_blocks: int) -> list[SpecpoolBlock]:
        """Take blocks; free ones first, then the least recently used cached ones.

        Raises:
            ValueError: there are not enough.
        """
        try:
            ids = self.core.take(num_blocks, None, self.tag).tolist()
        except OutOfPages:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool") from None
        blocks = self.blocks
        new = [blocks[block] for block in ids]
        if self._reuse_watchers:
            self._notify_reuse(new)
        collector = self.metrics_collector
        if collector and self.enable_caching:
            for block in new:
                collector.on_block_evicted(block)
        for block in new:
            if block._block_hash is not None:  # the core gave it up
                self._emit_block_removed_events(self._forget(block))
        if collector:
            for block in new:
                collector.on_block_allocated(block)
        return new

    def touch(self, blocks: Sequence[SpecpoolBlock]) -> None:
        """Hold blocks once more, all of them or none.

        Raises:
            PageStateError: a block is free, and nobody knows what it holds.
        """
        self.core.take(0, [block.block_id for block in blocks if not block.is_null])
        if self.metrics_collector:
            for block in blocks:
                if not block.is_null:
                    self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[SpecpoolBlock]) -> None:
        """Let go of blocks; the first one is given up first. A refused call changes nothing.

        Raises:
            PageStateError: a block is held less often than it is named, unless
                `SPECPOOL_VLLM_FAULTS` is log: then it is left out.
        """
        hashed, unhashed = [], []
        foreign: dict[Any, list[Any]] = {}
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.pool is not self:
                foreign.setdefault(block.pool, []).append(block)
            elif block._block_hash is not None and self.enable_caching:
                hashed.append(block.block_id)
            else:
                unhashed.append(block.block_id)
        if None in foreign:
            named = ", ".join(str(block.block_id) for block in foreign[None])
            raise ForeignBlockError(f"free of blocks {named}: they are of no pool")
        # The core lets go of the last one first, and gives first what became free last.
        self._drop(unhashed + hashed[::-1])
        for pool, blocks in foreign.items():
            pool.free_blocks(blocks)

    def _drop(self, blocks: list[int]) -> None:
        try:
            self.core.drop(blocks)
        except SpecpoolError:
            if not self._logs_faults:
                raise
            for block in reversed(blocks):
                try:
                    self.core.drop([block])
                except SpecpoolError as error:
                    _log.error("specpool: left out: %s", error)

    def unpin_blocks(
        self, blocks: Iterable[SpecpoolBlock], on_reuse: Callable[[Any], None]
    ) -> None:
        """Let go of blocks that are still read until they are given again."""
        ids = [block.block_id for block in blocks]
        self.core.keep(ids)  # so that free blocks go before them
        self.core.drop(ids[::-1])
        self._reuse_watchers.update(dict.fromkeys(ids, on_reuse))

    # What blocks hold: vLLM's index, and whether the core caches them.

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[SpecpoolBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Note what a request's blocks hold: `blocks[num_cached_blocks:num_full_blocks]`.

        Raises:
            PageStateError: a block is not held.
        """
        first, end = num_cached_blocks, num_full_blocks
        new: list[int] = []
        self._new = new
        try:
            _original_cache(self, request, blocks, first, end, block_size, *rest, **named)
        finally:
            self._new = None
            self.core.keep(new)
        if self.next_tokens is not None:
            self.note_next(request, blocks, first, end, block_size)

    def note_next(self, request: Any, blocks: Any, first: int, end: int, block_size: int) -> None:
        """Note the tokens behind blocks `first` to `end` of a request; see `speculative`."""

    def note_allocation(self, request: Any, num_new_computed: int, num_external: int) -> None:
        """Note what is known before a request gets blocks; see `speculative`."""

    def _insert_block_hash(
        self, block_hash_with_group_id: Any, block: SpecpoolBlock, *rest: Any, **named: Any
    ) -> None:
        if block.pool is not self:
            raise ForeignBlockError(f"cache of block {block.block_id}: it is not of this pool")
        new, is_new = self._new, block._block_hash is None
        _original_insert(self, block_hash_with_group_id, block, *rest, **named)
        if new is not None:
            new.append(block.block_id)
        elif is_new:
            self.core.keep([block.block_id])

    def _remove_cached_block_hashes(self, block: SpecpoolBlock) -> list[Any]:
        if not block.is_null:
            self.core.unkeep([block.block_id])
        return self._forget(block)

    def _forget(self, block: SpecpoolBlock) -> list[Any]:
        if self.next_tokens is not None:
            self.next_tokens.pop(block.block_id, None)
        removed: list[Any] = super()._remove_cached_block_hashes(block)
        return removed

    def reset_prefix_cache(self) -> bool:
        """Forget what all blocks hold, if none is held; return whether."""
        if not super().reset_prefix_cache():
            return False
        self.core.forget()
        if self.next_tokens is not None:
            self.next_tokens.clear()
        return True


class ForeignBlockError(SpecpoolError, ValueError):
    """A block that is not the pool's was to be freed or cached."""


def install() -> None:
    """Put the class in the place of vLLM's, and name requests in errors."""
    for module in (block_pool, kv_cache_coordinator):
        module.BlockPool = SpecpoolBlockPool
    # Of managers and pools that were made before, and of pools that are vLLM's own.
    KVCacheManager.spare_lookahead, OwnBlockPool.next_tokens = 0, None
    if "pool" not in KVCacheBlock.__slots__:
        KVCacheBlock.pool = None  # blocks of no pool, before vLLM 0.32
    KVCacheManager.allocate_slots = allocate_slots


def _noting(original: Any) -> Any:
    """Return vLLM's `allocate_slots` with notes of the request, and of what it need not reserve.

    The wrapper has the parameters of this release, named one by one, because `*args, **kwargs`
    would cost a tenth of vLLM's call. The two conditions are those of level `speculative`.
    """
    signature = inspect.signature(original)
    bare = [
        parameter.replace(annotation=parameter.empty, default=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    names = [
        f"{part.name}={part.name}" if part.kind is part.KEYWORD_ONLY else part.name for part in bare
    ]
    source = f"""
def allocate_slots{inspect.Signature(bare)}:
    pool = self.block_pool
    pool.tag = request.request_id
    if num_lookahead_tokens:
        num_lookahead_tokens -= self.spare_lookahead
    if pool.next_tokens is not None:
        pool.note_allocation(request, num_new_computed_tokens, num_external_computed_tokens)
    return original({", ".join(names)})
"""
    parts: dict[str, Any] = {"original": original}
    exec(source, parts)
    wrapper = functools.wraps(original)(parts["allocate_slots"])
    wrapper.__defaults__, wrapper.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return wrapper


allocate_slots: Any = _noting(own_allocate_slots)


def _new_core(num_gpu_blocks: int) -> BlockPool:
    path = record.log_path("SPECPOOL_VLLM_RECORD")
    core = BlockPool(max(1, num_gpu_blocks - 1), 1, first_id=1, record=path)
    if path:
        record.close_at_exit(core)
    if num_gpu_blocks == 1:  # vLLM's null block alone: nothing can be taken
        core.take(1, tag="no block")
    return core
