"""What proves level `blocks`: operations on vLLM's block pool and on its KV cache manager.

The null block's count is not compared: it is not kept, as vLLM's own text says of it.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    resolve_block_hashes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from specpool.plugins import proof
from specpool.plugins.proof import Operation, Operations
from specpool.plugins.vllm import pool as plugin
from specpool.plugins.vllm import request_names

#: What `SpecpoolBlockPool` keeps in another way than vLLM's own pool.
REPLACED = frozenset(
    """free_block_queue ref_cnt prev_free_block next_free_block _block_hash set_block_hash
    reset_hash cached_block_hash_to_block cached_block_hashes_by_block blocks get_new_blocks
    touch free_blocks unpin_blocks _insert_block_hash _remove_cached_block_hashes
    _reuse_watchers""".split()
)
#: Seeds of each case.
EPISODES = 48
HASH_SIZE = 2
#: What a call raises if blocks lack, or if it names blocks that it must not.
_LACK, _WRONG = (ValueError,), (AssertionError,)


def difference(seconds: float = proof.SECONDS) -> str | None:
    """Return the first thing in which ours differs from vLLM's own pool, a line; None if nothing.

    It takes at most this many seconds of CPU.
    """
    engine_pool, ledger_pool = plugin.OwnBlockPool, plugin.SpecpoolBlockPool
    for name in vars(ledger_pool):
        function = vars(engine_pool).get(name)
        if inspect.isfunction(function):
            for unknown in proof.unknown_parameters(function, vars(ledger_pool)[name]):
                return f"BlockPool.{name}: {unknown}"
    functions = [part for part in vars(engine_pool).values() if inspect.isfunction(part)]
    return proof.difference(_cases(), functions, REPLACED, episodes=EPISODES, seconds=seconds)


def _cases() -> list[proof.Case]:
    return [BlockCase(), ManagerCase(), QueueCase()]


def longer_difference(times: int = 10) -> str | None:
    """Return the same of other seeds, that many times as long; for tests of the proof itself."""
    return proof.first_difference(_cases(), episodes=times * EPISODES, seed=EPISODES, seconds=1e9)


def requests(rng: random.Random) -> list[Any]:
    """Return requests whose texts begin alike, hashed block by block of `HASH_SIZE` tokens."""
    texts = [[0] * rng.randint(0, 8) + [rng.randint(0, 1) for _ in range(9)] for _ in range(4)]
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=text,
            sampling_params=SamplingParams(max_tokens=100),
            pooling_params=None,
            block_hasher=_new_hashes,
            cache_salt=rng.choice([None, "salt"]),
        )
        for index, text in enumerate(texts)
    ]


def _new_hashes(request: Any) -> list[bytes]:
    """Return the hashes of the blocks that a request has filled since it was hashed last."""
    tokens, known = list(request.all_token_ids), len(request.block_hashes)
    return [
        hashlib.sha256(repr((request.cache_salt, tokens[:end])).encode()).digest()
        for end in range((known + 1) * HASH_SIZE, len(tokens) + 1, HASH_SIZE)
    ]


def settings_of(function: Any, **wanted: Any) -> dict[str, Any]:
    """Return those settings that this release's function has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in wanted.items() if name in known}


class TriedPool(plugin.SpecpoolBlockPool):
    """Ours with wrong frees that raise, as vLLM's own do."""

    is_tried = True


class PoolSide:
    """A block pool. Blocks are named by their ids, requests by their index."""

    def __init__(self, pool: Any, requests: Sequence[Any]) -> None:
        self.pool, self.requests = pool, requests
        self.reused: list[int] = []
        #: How often each hash and group was stored less how often it was removed, by the events;
        #: None after a call that was refused in its middle, and without events.
        self.stored: Counter[Any] | None = Counter() if pool.enable_kv_cache_events else None

    def _blocks(self, ids: Sequence[int]) -> list[Any]:
        return [self.pool.blocks[block] for block in ids]

    def get_new_blocks(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def get_all_free_blocks(self) -> list[int]:
        return self.get_new_blocks(self.pool.get_num_free_blocks())

    def touch(self, ids: Sequence[int]) -> None:
        self.pool.touch(self._blocks(ids))

    def free_blocks(self, ids: Sequence[int]) -> None:
        self.pool.free_blocks(iter(self._blocks(ids)))

    def free_blocks_of_two(self, ids: Sequence[int]) -> list[int]:
        """Free blocks of this pool and of another in a call; return the other's free ones."""
        foreign = type(self.pool)(3, True, HASH_SIZE)
        self.pool.free_blocks([*self._blocks(ids), *foreign.get_new_blocks(2)])
        return [block.block_id for block in foreign.free_block_queue.get_all_free_blocks()]

    def change_ref_cnt(self, block: int, more: int) -> None:
        self.pool.blocks[block].ref_cnt += more

    def cache_full_blocks(
        self, request: int, ids: Sequence[int], first: int, end: int, size: int, *rest: Any
    ) -> None:
        blocks = self._blocks(ids)
        try:
            self.pool.cache_full_blocks(self.requests[request], blocks, first, end, size, *rest)
        except AssertionError:
            self.stored = None
            raise
        group, mask = (*rest, None)[:2]
        expected = resolve_block_hashes(self.requests[request].block_hashes, HASH_SIZE, size)
        keys = []
        for index in range(first, end):
            if not blocks[index].is_null and (mask is None or mask[index - first]):
                keys.append(expected[index])
                key = make_block_hash_with_group_id(expected[index], group)
                assert key in self._hashes(blocks[index]), f"block {ids[index]} has not its hash"
        if first < end and self.pool.enable_kv_cache_events:
            event = self.pool.kv_event_queue[-1]
            self._check_event(event, request, keys, range(first, end), size)
            assert event.group_idx == group, "an event has another group"
            parent = maybe_convert_block_hash(expected[first - 1]) if first else None
            assert event.parent_block_hash == parent, "an event has another parent"

    def cache_partial_block(
        self, request: int, block: int, num_tokens: int, size: int, named: dict[str, Any]
    ) -> Any:
        where = self.pool.blocks[block], num_tokens, 0, size
        try:
            return self.pool.cache_partial_block(self.requests[request], *where, **named)
        except AssertionError:
            self.stored = None
            raise

    def move_block_hashes(self, source: int, target: int) -> None:
        self.pool.move_block_hashes(*self._blocks([source, target]))

    def get_cached_block(self, request: int, index: int, groups: list[int]) -> list[int] | None:
        key = self.requests[request].block_hashes[index]
        blocks = self.pool.get_cached_block(key, groups)
        return None if blocks is None else [block.block_id for block in blocks]

    def is_block_writable(self, block: int) -> bool:
        is_writable: bool = self.pool.is_block_writable(self.pool.blocks[block])
        return is_writable

    def emit_cached_block_events(self, request: int, count: int) -> Any:
        before = self.take_events()
        self.pool.emit_cached_block_events(self.requests[request], count, HASH_SIZE, 0)
        events = self.pool.take_events()
        assert len(events) == (self.pool.enable_kv_cache_events and count > 0)
        for event in events:
            keys = self.requests[request].block_hashes[:count]
            self._check_event(event, request, keys, range(count), HASH_SIZE)
        return before, events

    def _check_event(
        self, event: Any, request: int, keys: Sequence[Any], blocks: range, size: int
    ) -> None:
        """Raise if an event does not say these hashes, and the tokens of these blocks."""
        tokens = list(self.requests[request].all_token_ids)
        assert event.block_hashes == [maybe_convert_block_hash(key) for key in keys]
        assert event.token_ids == tokens[blocks.start * size : blocks.stop * size]
        assert event.block_size == size, "an event has another block size"
        assert event.extra_keys is None or len(event.extra_keys) == len(keys)
        is_first = blocks.start == 0
        assert (event.parent_block_hash is None) == is_first, "an event has another parent"

    def unpin_blocks(self, ids: Sequence[int]) -> None:
        blocks = self._blocks(ids)
        self.pool.unpin_blocks(blocks, lambda block: self.reused.append(block.block_id))

    def touch_unpinned(self) -> list[int]:
        """Hold all blocks that were not given since they were unpinned; return them."""
        ids = sorted(self.pool._reuse_watchers)
        self.touch(ids)
        return ids

    def evict_blocks(self, ids: Sequence[int]) -> None:
        self.pool.evict_blocks(set(ids))

    def reset_prefix_cache(self) -> bool:
        is_held = self.pool.get_num_free_blocks() < len(self.pool.blocks) - 1
        is_reset: bool = self.pool.reset_prefix_cache()
        assert is_reset is not is_held, f"{is_reset=} though {is_held=}"
        if is_reset:
            assert not getattr(self.pool, "_reuse_watchers", None), "a reader is not told"
            collector = self.pool.metrics_collector
            assert collector is None or not collector.block_metrics, "metrics are not reset"
        return is_reset

    def take_events(self) -> Any:
        events = self.pool.take_events()
        stored = self.stored
        if stored is None:
            return events
        for event in events:
            if isinstance(event, AllBlocksCleared):
                stored.clear()
                continue
            more = 1 if isinstance(event, BlockStored) else -1
            for key in event.block_hashes:
                stored[key, event.group_idx] += more
        return events

    def _hashes(self, block: Any) -> list[Any]:
        further = self.pool.cached_block_hashes_by_block.get(block.block_id, ())
        return [key for key in (block.block_hash, *further) if key is not None]

    def check(self) -> None:
        """Raise if vLLM's index does not know each block by its hashes, or events do not say it."""
        index, holders = self.pool.cached_block_hash_to_block, defaultdict(set)
        for block in self.pool.blocks:
            for key in self._hashes(block):
                holders[key].add(block.block_id)
        assert len(index) == len(holders), f"{len(index)} hashes are known, {len(holders)} kept"
        for key, ids in holders.items():
            assert index.get_one_block(key).block_id in ids, f"a hash of blocks {ids} finds another"
            assert all(index.contain(key, block) for block in ids), f"no hash of blocks {ids}"
        if self.stored is not None and not self.pool.kv_event_queue:
            counts = {
                (maybe_convert_block_hash(get_block_hash(key)), get_group_id(key)): len(ids)
                for key, ids in holders.items()
            }
            heard = {key: count for key, count in self.stored.items() if count}
            assert heard == counts, f"events stored {len(heard)} hashes, {len(counts)} are kept"

    def state(self) -> dict[str, Any]:
        pool = self.pool
        queue = pool.free_block_queue
        order = [block.block_id for block in queue.get_all_free_blocks()]
        cursors = None, *[pool.blocks[block] for block in order[:1]]
        walks = [
            [block.block_id for block in queue.iter_blocks_after(cursor)] for cursor in cursors
        ]
        collector = pool.metrics_collector
        if isinstance(pool, plugin.SpecpoolBlockPool):
            pool.core.check()
        else:
            self.check()
        return {
            "the number of free blocks": (pool.get_num_free_blocks(), queue.num_free_blocks),
            "the usage": pool.get_usage(),
            "the holders of blocks": [block.ref_cnt for block in pool.blocks[1:]],
            "the null block": (pool.null_block.block_id, pool.null_block.is_null),
            "the hashes of blocks": [
                (block.block_hash, block.block_hash_num_tokens) for block in pool.blocks
            ],
            "further hashes of blocks": pool.cached_block_hashes_by_block,
            "the number of known hashes": len(pool.cached_block_hash_to_block),
            "the order of free blocks": order,
            "the order from its begin, and from behind its first block": walks,
            "blocks that were read and are given again": sorted(self.reused),
            "the metrics": collector and sorted(collector.block_metrics),
        }


class BlockCase:
    """A pool of a few blocks, and all calls that vLLM's managers and connectors make."""

    name = "block pool"

    def sides(self, rng: random.Random) -> tuple[PoolSide, PoolSide]:
        known = requests(rng)
        self.is_caching, self.num_blocks = rng.random() < 0.8, rng.choice([1, 4, 9, 14])
        settings = settings_of(
            plugin.OwnBlockPool,
            enable_kv_cache_events=rng.random() < 0.7,
            num_hash_lookahead_tokens=rng.choice([0, 0, 1]),
        )
        is_measured = rng.random() < 0.7

        def side(cls: Any) -> PoolSide:
            collector = KVCacheMetricsCollector(1.0) if is_measured else None
            made = cls(
                self.num_blocks, self.is_caching, HASH_SIZE, metrics_collector=collector, **settings
            )
            return PoolSide(made, known)

        self.hash_counts = [len(request.block_hashes) for request in known]
        return side(plugin.OwnBlockPool), side(TriedPool)

    def operations(self, rng: random.Random) -> Operations:
        held: list[SimpleNamespace] = []
        kinds = [self._come, self._come, self._go, self._go, self._partial, self._odd]
        kinds += [self._partial, self._odd]
        for _ in range(36):
            yield from rng.choice(kinds)(rng, held)
        for row in held:
            yield Operation("free_blocks", (row.ids[::-1],))
        if self.is_caching:
            yield Operation("evict_blocks", (rng.sample(range(self.num_blocks), 1),))
            yield from self._two_hashes()
        yield Operation("take_events")
        if rng.random() < 0.5:
            yield Operation("reset_prefix_cache")
            yield Operation("get_cached_block", (0, 0, [0]))
        yield Operation("get_all_free_blocks")
        yield Operation("take_events")

    def _come(self, rng: random.Random, held: list[SimpleNamespace]) -> Operations:
        """A request holds its hit and new blocks, and caches them, at one of two block sizes."""
        request = rng.randrange(len(self.hash_counts))
        size, group = rng.choice([(HASH_SIZE, 0), (HASH_SIZE, 0), (2 * HASH_SIZE, 1)])
        count = self.hash_counts[request] * HASH_SIZE // size
        hits: list[int] = []
        for index in range(count if group == 0 and self.is_caching else 0):
            hit = yield Operation("get_cached_block", (request, index, [0]))
            if hit is None:
                break
            hits += hit
        hits = hits[: rng.randint(0, len(hits))]
        if hits:
            yield Operation("touch", ([0, *hits] if rng.random() < 0.2 else hits,))
        new = yield Operation("get_new_blocks", (rng.randint(0, max(1, count - len(hits))),), _LACK)
        if isinstance(new, proof.Raised):
            if hits:
                yield Operation("free_blocks", (hits[::-1],))
            return
        row = SimpleNamespace(ids=hits + new, request=request)
        held.append(row)
        end = rng.randint(0, min(count, len(row.ids)))
        if not self.is_caching or end <= len(hits):
            return
        rest: tuple[Any, ...] = (group,)
        ids = row.ids
        if rng.random() < 0.3 and "block_mask" in settings_of(
            plugin.OwnBlockPool.cache_full_blocks, block_mask=None
        ):
            mask = [rng.random() < 0.7 for _ in range(len(hits), end)]
            rest = group, mask
        elif rng.random() < 0.2:
            ids = [*row.ids[:-1], 0]  # what a window has passed is the null block
        yield Operation("cache_full_blocks", (request, ids, len(hits), end, size, *rest))

    def _go(self, rng: random.Random, held: list[SimpleNamespace]) -> Operations:
        if not held:
            return
        row = held.pop(rng.randrange(len(held)))
        ids = row.ids[::-1]
        cut = rng.randint(0, len(ids))
        kind = rng.random()
        if kind < 0.2 and hasattr(plugin.OwnBlockPool, "unpin_blocks"):
            yield Operation("unpin_blocks", (ids[:cut],))
            if rng.random() < 0.5:  # a reader gets them back
                yield Operation("touch", (ids[:cut],))
                cut = 0
        elif kind < 0.4:
            yield Operation("free_blocks", ([*ids[:cut], 0],))
        elif kind < 0.5 and "pool" in KVCacheBlock.__slots__:
            yield Operation("free_blocks_of_two", (ids[:cut],))
        else:
            yield Operation("free_blocks", (ids[:cut],))
        yield Operation("free_blocks", (ids[cut:],))

    def _partial(self, rng: random.Random, held: list[SimpleNamespace]) -> Operations:
        """A block is found by a part of what it holds, or its hashes go to another block."""
        if not held or not self.is_caching:
            return
        row = rng.choice(held)
        if not row.ids:
            return
        block = rng.choice(row.ids)
        if rng.random() < 0.6:
            new = yield Operation("get_new_blocks", (1,), _LACK)
            if isinstance(new, proof.Raised):
                return
            held.append(SimpleNamespace(ids=new, request=row.request))
            if rng.random() < 0.5:
                yield Operation("move_block_hashes", (block, new[0]), _WRONG)
            else:  # half a block, then all of it
                for count in (1, 1, 2)[: rng.choice([1, 3])]:
                    half = row.request, new[0], count * HASH_SIZE, 2 * HASH_SIZE, dict[str, Any]()
                    yield Operation("cache_partial_block", half, _WRONG)
                whole = row.request, new, 0, 1, 2 * HASH_SIZE, 0
                yield Operation("cache_full_blocks", whole, _WRONG)
            return
        num_tokens = HASH_SIZE * rng.randint(1, self.hash_counts[row.request])
        named = settings_of(
            plugin.OwnBlockPool.cache_partial_block, replace_existing_hashes=rng.random() < 0.3
        )
        part = row.request, rng.choice([block, block, 0]), num_tokens, 2 * HASH_SIZE, named
        yield Operation("cache_partial_block", part, _WRONG)

    def _two_hashes(self) -> Operations:
        """A free block is found by two parts, of which one is noted twice: a reset forgets both."""
        new = yield Operation("get_new_blocks", (1,), _LACK)
        if isinstance(new, proof.Raised):
            return
        for count in (3, 1, 1):
            part = 0, new[0], count * HASH_SIZE, 2 * HASH_SIZE, dict[str, Any]()
            yield Operation("cache_partial_block", part)
        yield Operation("free_blocks", (new,))

    def _odd(self, rng: random.Random, held: list[SimpleNamespace]) -> Operations:
        """Calls that are rare, or wrong."""
        held_ids = [block for row in held for block in row.ids]
        kind = rng.randrange(9)
        if kind == 0:
            yield Operation("get_new_blocks", (self.num_blocks,), _LACK)  # the null block is none
        elif kind == 1:
            yield Operation("evict_blocks", ([self.num_blocks],), _WRONG)
        elif kind == 2:
            yield Operation("reset_prefix_cache" if held_ids else "take_events")
        elif kind == 3 and self.is_caching:
            yield Operation("evict_blocks", (rng.sample(range(self.num_blocks), 1),))
        elif kind == 4 and held_ids:
            block = rng.choice(held_ids)
            for more in (1, 1, -2):
                yield Operation("change_ref_cnt", (block, more))
            row = held.pop(rng.randrange(len(held)))
            for block in row.ids:
                yield Operation("change_ref_cnt", (block, 1))
            yield Operation("free_blocks", (rng.sample(2 * row.ids, 2 * len(row.ids)),))
        elif kind == 5:
            yield Operation("emit_cached_block_events", (0, self.hash_counts[0]))
        elif kind == 6 and hasattr(plugin.OwnBlockPool, "is_block_writable"):
            yield Operation("is_block_writable", (rng.randrange(self.num_blocks),))
        elif kind == 7 and held_ids and self.is_caching:
            row = rng.choice(held)
            end = min(len(row.ids), self.hash_counts[row.request])
            again = row.request, row.ids, 0, end, HASH_SIZE, 0
            yield Operation("cache_full_blocks", again, _WRONG)
        elif kind == 8 and hasattr(plugin.OwnBlockPool, "unpin_blocks"):
            ids = yield Operation("touch_unpinned")
            held.append(SimpleNamespace(ids=ids, request=0))


class QueueSide:
    """vLLM's queue of free blocks, by the ids of its blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block) for block in range(num_blocks)]
        self.queue = FreeKVCacheBlockQueue(self.blocks)

    def call(self, name: str, ids: list[int], count: int) -> list[int]:
        blocks = [self.blocks[block] for block in ids]
        if name in ("append", "remove"):
            blocks = blocks[0]
        result = getattr(self.queue, name)(*([blocks] if ids else []), *([count] if count else []))
        if isinstance(result, list):
            return [block.block_id for block in result]
        return [] if result is None else [result.block_id]

    def state(self) -> dict[str, Any]:
        order = [block.block_id for block in self.queue.get_all_free_blocks()]
        return {"the order": order, "the number": self.queue.num_free_blocks}


class PlainQueue:
    """The same by a list."""

    def __init__(self, num_blocks: int) -> None:
        self.order = list(range(num_blocks))

    def call(self, name: str, ids: list[int], count: int) -> list[int]:
        if name == "popleft" and not self.order:
            raise ValueError
        if name in ("popleft", "popleft_n"):
            first, self.order = self.order[: count or 1], self.order[count or 1 :]
            return first
        if name == "remove":
            self.order.remove(ids[0])
        elif name == "prepend_n":
            self.order[:0] = ids
        else:
            self.order += ids
        return []

    def state(self) -> dict[str, Any]:
        return {"the order": self.order, "the number": len(self.order)}


class QueueCase:
    """vLLM's queue does what its names say: ours keeps the order in another way."""

    name = "queue of free blocks"

    def sides(self, rng: random.Random) -> tuple[QueueSide, PlainQueue]:
        self.num_blocks = rng.choice([0, 1, 2, 7])
        return QueueSide(self.num_blocks), PlainQueue(self.num_blocks)

    def operations(self, rng: random.Random) -> Operations:
        free, taken = list(range(self.num_blocks)), list[int]()
        for _ in range(30):
            pop, put = rng.choice(["popleft", "popleft_n"]), rng.choice(["append_n", "prepend_n"])
            kind = rng.random()
            if kind < 0.4 and hasattr(FreeKVCacheBlockQueue, pop):
                count = rng.randint(1, max(1, len(free))) if pop == "popleft_n" else 0
                if count <= len(free):
                    new = yield Operation("call", (pop, [], count), _LACK)
                    taken += [] if isinstance(new, proof.Raised) else new
            elif kind < 0.6 and free:
                taken.append(rng.choice(free))
                yield Operation("call", ("remove", taken[-1:], 0))
            elif kind < 0.7 and taken:
                yield Operation("call", ("append", [taken.pop()], 0))
            elif taken and hasattr(FreeKVCacheBlockQueue, put):
                rng.shuffle(taken)
                cut = rng.randint(0, len(taken) - 1)
                ids, taken = taken[cut:], taken[:cut]
                yield Operation("call", (put, ids, 0))
            free = [block for block in range(self.num_blocks) if block not in taken]


class ManagerSide(PoolSide):
    """vLLM's KV cache manager on a pool."""

    def __init__(self, managed: Any, requests: Sequence[Any]) -> None:
        super().__init__(managed.block_pool, requests)
        self.managed = managed

    def admit(self, index: int) -> Any:
        """Look a request's hit up and give it blocks, as vLLM's scheduler does."""
        request = self.requests[index]
        blocks, known = self.managed.get_computed_blocks(request)[:2]
        new = self.managed.allocate_slots(request, request.num_tokens - known, known, blocks)
        if new is None:
            return None
        request.num_computed_tokens = request.num_tokens
        return known, self.managed.get_block_ids(request.request_id)

    def grow(self, index: int, drafts: int, tokens: list[int]) -> Any:
        request = self.requests[index]
        new = self.managed.allocate_slots(request, 1 + drafts, num_lookahead_tokens=drafts)
        if new is None:
            return None
        request.append_output_token_ids(tokens)
        request.num_computed_tokens += len(tokens)
        return new.get_block_ids()

    def free(self, index: int) -> None:
        request = self.requests[index]
        self.managed.free(request)
        request.num_computed_tokens = 0  # as after a preemption


class ManagerCase:
    """Requests with common beginnings on a manager: full attention, or a window beside it."""

    name = "KV cache manager"

    def sides(self, rng: random.Random) -> tuple[ManagerSide, ManagerSide]:
        seed = rng.random()
        window = rng.choice([None, None, 4])
        settings = settings_of(
            KVCacheManager,
            scheduler_block_size=HASH_SIZE,
            hash_block_size=HASH_SIZE,
            enable_caching=rng.random() < 0.8,
            enable_kv_cache_events=True,
            num_hash_lookahead_tokens=0,
        )
        num_blocks = rng.randint(4, 24)
        sides = []
        for cls in (plugin.OwnBlockPool, TriedPool):
            known = requests(random.Random(seed))  # a manager changes them: each side has its own
            sides.append(ManagerSide(manager(cls, num_blocks, window, settings), known))
        return sides[0], sides[1]

    def operations(self, rng: random.Random) -> Operations:
        running: list[int] = []
        waiting = list(range(4))
        for _ in range(24):
            kind = rng.random()
            if waiting and (kind < 0.4 or not running):
                index = rng.choice(waiting)
                if (yield Operation("admit", (index,))) is not None:
                    waiting.remove(index)
                    running.append(index)
            elif running and kind < 0.75:
                drafts = rng.randint(0, 3)
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 1 + drafts))]
                yield Operation("grow", (rng.choice(running), drafts, tokens))
            elif running:
                index = running.pop(rng.randrange(len(running)))
                waiting.append(index)
                yield Operation("free", (index,))
        yield Operation("take_events")
        for index in running:
            yield Operation("free", (index,))
        yield Operation("reset_prefix_cache")
        yield Operation("get_all_free_blocks")


def manager(cls: type, num_blocks: int, window: int | None, settings: dict[str, Any]) -> Any:
    """Return vLLM's manager of KV blocks on a class of block pools, with what goes with ours."""
    groups = [KVCacheGroupSpec([name], spec) for name, spec in _specs(window)]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    before, kv_cache_coordinator.BlockPool = kv_cache_coordinator.BlockPool, cls
    try:
        managed = KVCacheManager(config, max_model_len=1 << 10, **settings)
    finally:
        kv_cache_coordinator.BlockPool = before
    if cls is TriedPool:
        coordinator = managed.coordinator
        for name in ("allocate_new_blocks", "allocate_new_computed_blocks"):
            setattr(coordinator, name, MethodType(getattr(request_names, name), coordinator))
    return managed


def _specs(window: int | None) -> Iterator[tuple[str, Any]]:
    sizes: dict[str, Any] = {
        "block_size": HASH_SIZE,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    yield "full", FullAttentionSpec(**sizes)
    if window:
        yield "near", SlidingWindowSpec(**sizes, sliding_window=window)
