"""The plug-in on the real vLLM, on a CPU; `test_vllm.py` runs this file in a new process."""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from vllm import plugins
from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager
from vllm_plugin import SIZE, held, ours, with_plugin

from benches.vllm_setup import OWN_METHODS, OWN_POOL, admit, manager, request
from specpool import BlockPool, PageStateError
from specpool.plugins import drift, proof
from specpool.plugins.vllm import register, releases
from specpool.testing import assert_no_page_leaked

# Before the plug-in is loaded: afterwards vLLM's names are ours.
DRIFT = {level: releases.differences(level) for level in ("blocks", "speculative")}

__all__ = ["with_plugin"]


def test_vllm_loads_it_and_may_load_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_cache_coordinator.BlockPool is block_pool.BlockPool is ours()
    wrapped = KVCacheCoordinator.allocate_new_blocks
    monkeypatch.setenv("SPECPOOL_VLLM", "speculative")
    register()
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()
    assert KVCacheCoordinator.allocate_new_blocks is wrapped
    assert kv_cache_coordinator.BlockPool is ours()


class Pair:
    """Requests with common beginnings on two managers, vLLM's own and ours."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        window = rng.choice([None, None, 2 * SIZE])
        self.hashed = rng.choice([0, 1])  # vLLM's own hashes may cover the next token
        settings = {
            "window": window,
            "enable_caching": rng.random() < 0.8,
            "enable_kv_cache_events": True,
            "num_hash_lookahead_tokens": self.hashed,
        }
        self.num_blocks = rng.randint(6, 40)
        self.managers = [
            manager(cls, self.num_blocks, SIZE, **settings) for cls in (OWN_POOL, ours())
        ]
        self.rows: list[list[Any]] = []
        self.hits = self.evictions = self.ct = 0

    def come(self) -> None:
        rng = self.rng
        tokens = [0] * rng.randint(0, 4 * SIZE) + [rng.choice([0, 0, 7]) for _ in range(9)]
        salt = rng.choice([None, None, "a"])
        self.ct += 1
        row = [request(f"r{self.ct}", tokens, SIZE, self.hashed, cache_salt=salt) for _ in "ab"]
        got = [admit(m, r) for m, r in zip(self.managers, row, strict=True)]
        self.same(got)
        if got[0] is not None:
            self.hits += got[0][0] > 0
            self.rows.append(row)

    def grow(self) -> None:
        if not self.rows:
            return
        row = self.rng.choice(self.rows)
        drafts = self.rng.randint(0, 3)
        new = [
            managed.allocate_slots(r, 1 + drafts, num_lookahead_tokens=3)
            for managed, r in zip(self.managers, row, strict=True)
        ]
        self.same([None if n is None else n.get_block_ids() for n in new])
        if new[0] is None:
            return
        accepted = [self.rng.choice([0, 7]) for _ in range(self.rng.randint(1, 1 + drafts))]
        for r in row:
            r.append_output_token_ids(accepted)
            r.num_computed_tokens += len(accepted)

    def go(self) -> None:
        if self.rows:
            row = self.rows.pop(self.rng.randrange(len(self.rows)))
            for managed, r in zip(self.managers, row, strict=True):
                managed.free(r)

    def forget(self) -> None:
        """Some blocks are found no more, whoever holds them."""
        if self.rng.random() < 0.3:
            blocks = set(self.rng.sample(range(self.num_blocks), 2))
            for managed in self.managers:
                managed.evict_blocks(blocks)

    def same(self, pair: list[Any]) -> None:
        assert pair[0] == pair[1]

    def turn(self) -> None:
        self.rng.choice([self.come, self.come, self.grow, self.grow, self.go, self.forget])()
        own, mine = (managed.block_pool for managed in self.managers)
        self.same([p.get_num_free_blocks() for p in (own, mine)])
        self.same([p.get_usage() for p in (own, mine)])
        self.same([[b.ref_cnt for b in p.blocks] for p in (own, mine)])
        self.same([[b.block_hash for b in p.blocks] for p in (own, mine)])
        events = [managed.take_events() for managed in self.managers]
        self.same(events)
        self.evictions += sum(isinstance(each, block_pool.BlockRemoved) for each in events[1])
        order = [
            [b.block_id for b in p.free_block_queue.get_all_free_blocks()] for p in (own, mine)
        ]
        self.same(order)
        mine.core.check()
        kept = mine.core.index_size[0] - mine.core.num_cached
        assert kept == sum(b.block_hash is not None and b.ref_cnt > 0 for b in mine.blocks)


def test_random_requests_get_the_blocks_hits_and_evictions_of_vllms_own_pool() -> None:
    hits = evictions = 0
    for seed in range(60):
        pair = Pair(seed)
        for _ in range(120):
            pair.turn()
        pair.same([managed.reset_prefix_cache() for managed in pair.managers])
        while pair.rows:
            pair.go()
        pair.same([managed.reset_prefix_cache() for managed in pair.managers])
        assert len(pair.managers[1].block_pool.cached_block_hash_to_block) == 0
        assert_no_page_leaked(pair.managers[1].block_pool.core)
        hits, evictions = hits + pair.hits, evictions + pair.evictions
    assert hits > 500
    assert evictions > 500


def forgets_a_block(managed: Any) -> None:
    managed.evict_blocks({4})  # of the request that was freed last


def forgets_all(managed: Any) -> None:
    assert managed.reset_prefix_cache()


def forgets_what_is_read(managed: Any) -> None:
    new = managed.block_pool.get_new_blocks(2)
    managed.block_pool.cache_full_blocks(request("c", range(70, 79), SIZE), new, 0, 2, SIZE, 0)
    managed.block_pool.unpin_blocks(new, lambda block: None)
    managed.evict_blocks({new[0].block_id})


@pytest.mark.parametrize("forgets", [forgets_a_block, forgets_all, forgets_what_is_read])
def test_a_free_block_that_is_forgotten_keeps_its_place(forgets: Callable[[Any], None]) -> None:
    given = []
    for cls in (OWN_POOL, ours()):
        managed = manager(cls, 12, SIZE)
        for name, first in (("a", 0), ("b", 50)):
            wanted = request(name, range(first, first + 2 * SIZE + 1), SIZE)
            admit(managed, wanted)
            managed.free(wanted)
        forgets(managed)
        pool = managed.block_pool
        pool.free_blocks(pool.get_new_blocks(6))
        given.append([block.block_id for _ in range(11) for block in pool.get_new_blocks(1)])
    assert given[0] == given[1]


def test_a_free_block_that_is_forgotten_cannot_be_held() -> None:
    pool, blocks = held()
    pool.free_blocks(blocks[::-1])
    pool.touch(blocks[:2])
    pool.free_blocks(blocks[1::-1])
    pool.evict_blocks({blocks[0].block_id})
    before = pool.core.digest, pool.core.state_hash()
    for call in (
        lambda: pool.touch(blocks[:1]),
        lambda: pool.touch(blocks[1::-1]),
        lambda: setattr(blocks[0], "ref_cnt", 1),
    ):
        with pytest.raises(PageStateError, match="hold of block 1: nobody holds it, and "):
            call()
    assert (pool.core.digest, pool.core.state_hash()) == before


def test_blocks_that_are_still_read_go_last() -> None:
    pool, blocks = held()
    told: list[int] = []
    pool.unpin_blocks([blocks[2]], lambda block: told.append(block.block_id))
    pool.free_blocks(blocks[1::-1])
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert order == [4, 5, 6, 7, 3, 2, 1]
    assert [b.block_id for b in pool.free_block_queue.iter_blocks_after(pool.blocks[3])] == [2, 1]
    pool.get_new_blocks(4)
    assert told == []
    pool.get_new_blocks(1)
    assert told == [3]


def test_blocks_that_are_still_read_can_be_held_until_they_are_given() -> None:
    """HiSparse reads a page that it has unpinned, and holds it again for the next request."""
    orders = []
    for cls in (OWN_POOL, ours()):
        pool = cls(8, True, SIZE)
        first, read = pool.get_new_blocks(2)
        pool.unpin_blocks([read], lambda block: None)
        pool.touch([read, first])
        pool.touch([read])
        assert [block.ref_cnt for block in (first, read)] == [2, 2]
        pool.free_blocks([read, first, read, first])  # as usual: nothing is known of them
        orders.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
    assert orders[0] == orders[1]
    pool.unpin_blocks(pool.get_new_blocks(1), lambda block: None)
    pool.get_new_blocks(6)
    (last,) = pool.get_new_blocks(1)
    pool.free_blocks([last])
    with pytest.raises(PageStateError, match=f"block {last.block_id}: nobody holds it"):
        pool.touch([last])


def test_blocks_that_are_still_read_can_be_held_after_another_freed_them() -> None:
    """They wait among the free ones then, as vLLM's own do; a refusal changes nothing."""
    orders = []
    for cls in (OWN_POOL, ours()):
        pool = cls(8, True, SIZE)
        blocks = pool.get_new_blocks(4)
        pool.touch(blocks[1:2])
        pool.unpin_blocks(blocks[1:3], lambda block: None)
        pool.touch(blocks[2:3])
        pool.free_blocks(blocks[3:0:-1])  # 1 was held by another, 2 was held again
        if cls is not OWN_POOL:
            before = pool.core.state_hash()
            with pytest.raises(PageStateError, match="block 4: nobody holds it"):
                pool.touch([blocks[1], blocks[3]])
            assert pool.core.state_hash() == before
        pool.touch([blocks[2], blocks[0], blocks[2], blocks[1]])
        orders.append([block.ref_cnt for block in blocks])
        pool.free_blocks([blocks[2]])
        orders.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
    assert orders[:2] == orders[2:] == [[2, 1, 2, 0], [4, 5, 6, 7]]


def test_a_block_that_another_holds_still_is_freed_by_it_as_usual() -> None:
    from specpool.plugins.vllm import pool_proof

    pool = block_pool.BlockPool(8, True, 4)
    blocks = pool.get_new_blocks(3)
    pool.touch([blocks[1]])
    pool.unpin_blocks([blocks[1]], lambda block: None)
    pool.free_blocks([blocks[1]])
    assert pool.get_new_blocks(1) == [blocks[1]]  # before the others: nothing is known of it
    assert pool_proof.longer_difference(times=4) is None


def test_a_log_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_VLLM_RECORD", str(tmp_path / "blocks"))
    pool, blocks = held()
    pool.free_blocks(blocks[::-1])
    pool.core.close()
    (log,) = tmp_path.iterdir()
    again, _, end = BlockPool.replay(log)
    assert (again.state_hash(), again.digest, end) == (
        pool.core.state_hash(),
        pool.core.digest,
        "closed",
    )


def test_a_pool_of_the_null_block_alone() -> None:
    pool = ours()(1, True, SIZE)
    assert (pool.get_num_free_blocks(), pool.get_usage()) == (0, 0)
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)


def test_this_vllm_is_known() -> None:
    assert DRIFT == {"blocks": [], "speculative": []}


def test_what_takes_the_place_of_a_call_has_its_parameters_and_defaults() -> None:
    """They are those of this release, by name."""
    from specpool.plugins.vllm import request_names

    own, mine = (
        inspect.signature(function, follow_wrapped=False)
        for function in (OWN_METHODS["allocate_new_blocks"], request_names.allocate_new_blocks)
    )
    assert [(p.name, p.kind, p.default) for p in mine.parameters.values()] == [
        (p.name, p.kind, p.default) for p in own.parameters.values()
    ]


@pytest.mark.parametrize("method", ["_allocate_known", "_allocate_unknown"])
def test_a_request_is_named_where_its_blocks_are_taken(method: str) -> None:
    """Also in a release whose method has another text: there vLLM's is wrapped."""
    from specpool.plugins.vllm import request_names

    ids = []
    for cls in (OWN_POOL, ours()):
        managed = manager(cls, 8, SIZE)
        coordinator = managed.coordinator
        if cls is not OWN_POOL:
            function = getattr(request_names, method)
            coordinator.allocate_new_blocks = MethodType(function, coordinator)
        ids.append(admit(managed, request("r", range(2 * SIZE), SIZE)))
    assert ids[0] == ids[1] == [0, 1, 2]
    assert [managed.block_pool.core.record_of(block)[2] for block in (1, 2)] == ["r", "r"]


def test_no_call_of_a_round_is_wrapped() -> None:
    """Nor is any of a manager that keeps notes of what follows its blocks."""
    managed = manager(ours(), 8, SIZE, use_eagle=True)
    assert managed.block_pool.next_tokens is not None
    (single,) = managed.coordinator.single_type_managers
    for owner, names in (
        (managed, "allocate_slots create_kv_cache_blocks"),
        (managed.coordinator, "get_num_blocks_to_allocate remove_skipped_blocks cache_blocks"),
        (single, "get_num_blocks_to_allocate allocate_new_blocks cache_blocks"),
    ):
        for name in names.split():
            assert getattr(owner, name).__code__.co_filename == inspect.getfile(type(owner)), name


def test_blocks_are_taken_for_a_request_as_vllms_coordinator_takes_them() -> None:
    """Each group gets them, one with cross attention for its encoder's tokens; and all are named.

    The second name is of blocks that a KV connector fills.
    """
    cross = object.__new__(CrossAttentionManager)
    taken = list[Any]()
    managers = [SimpleNamespace(), cross, SimpleNamespace()]
    for index, single in enumerate(managers):
        single.allocate_new_blocks = lambda *args, i=index: taken.append((i, *args)) or [i]
    for method in (OWN_METHODS["allocate_new_blocks"], KVCacheCoordinator.allocate_new_blocks):
        stand_in = SimpleNamespace(block_pool=SimpleNamespace(), single_type_managers=managers)
        assert method(stand_in, "r", 9, 7, 3) == ([0], [1], [2])
    assert taken[:3] == taken[3:] == [(0, "r", 9, 7), (1, "r", 3, 7), (2, "r", 9, 7)]
    managed = manager(ours(), 40, SIZE)
    for name, settings in (("a", {}), ("b", {"num_external_computed_tokens": 2 * SIZE})):
        managed.allocate_slots(request(name, range(3 * SIZE), SIZE), 1, **settings)
        (ids,) = managed.get_block_ids(name)
        assert {managed.block_pool.core.record_of(block)[2] for block in ids} == {name}
    assert len(ids) == 3


def frees_in_another_order(own: Any) -> Any:
    return lambda self, ordered_blocks: own.free_blocks(self, list(ordered_blocks)[::-1])


def takes_the_newest(own: Any) -> Any:
    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        if 0 < num_blocks < self.get_num_free_blocks():
            self.free_block_queue.append(self.free_block_queue.popleft())
        return own.get_new_blocks(self, num_blocks)

    return get_new_blocks


def raises_another_error(own: Any) -> Any:
    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        if num_blocks > self.get_num_free_blocks():
            raise KeyError(num_blocks)
        return own.get_new_blocks(self, num_blocks)

    return get_new_blocks


def says_no_more_events(own: Any) -> Any:
    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        count = len(self.kv_event_queue)
        new = own.get_new_blocks(self, num_blocks)
        del self.kv_event_queue[count:]
        return new

    return get_new_blocks


def keeps_the_watchers(own: Any) -> Any:
    def reset_prefix_cache(self: Any) -> bool:
        watchers = dict(self._reuse_watchers)
        self._reuse_watchers.clear()
        is_reset: bool = own.reset_prefix_cache(self)
        self._reuse_watchers.update(watchers)
        return is_reset

    return reset_prefix_cache


#: The first operation that differs, and in what.
PLANTS = [
    (takes_the_newest, "get_new_blocks", r"get_new_blocks\(\d+\): it.*: the engine's own gives "),
    (raises_another_error, "get_new_blocks", "gives KeyError: .*, ours ValueError: "),
    (says_no_more_events, "get_new_blocks", r"BlockRemoved|events stored \d+ hashes, \d+ are kept"),
    (frees_in_another_order, "free_blocks", r"free(_blocks)?\(.*\): the order of free blocks"),
    (keeps_the_watchers, "reset_prefix_cache", "AssertionError: a reader is not told"),
]


@pytest.mark.parametrize(("plant", "name", "expected"), PLANTS)
def test_the_proof_names_the_first_operation_that_differs(
    plant: Callable[..., Any], name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SimpleNamespace(**{name: vars(OWN_POOL)[name]})
    monkeypatch.setattr(OWN_POOL, name, plant(own))
    (line,) = releases.differences()
    assert re.search(expected, line), line


def test_a_new_parameter_or_an_unseen_way_to_change_the_pool_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touch = OWN_POOL.touch
    with monkeypatch.context() as patch:
        patch.setattr(OWN_POOL, "touch", lambda self, blocks, why=None: touch(self, blocks))
        assert releases.differences() == ["BlockPool.touch: parameter 'why' is new"]

    def steal(self: Any) -> Any:
        return self.free_block_queue.popleft()

    def count(self: Any) -> int:
        return len(self.kv_event_queue)

    monkeypatch.setattr(OWN_POOL, "count", count, raising=False)
    assert releases.differences() == []
    monkeypatch.setattr(OWN_POOL, "steal", steal, raising=False)
    (line,) = releases.differences()
    assert re.fullmatch(r".*steal: no operation of the proof runs its line \d+", line)


def test_a_wrong_free_in_the_proof_raises_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specpool.plugins.vllm import pool_proof

    monkeypatch.setenv("SPECPOOL_VLLM_RECORD", str(tmp_path / "log"))
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    _, side = pool_proof.BlockCase().sides(random.Random(0))
    with pytest.raises(PageStateError):
        side.change_ref_cnt(side.get_new_blocks(1)[0], -2)
    assert not list(tmp_path.iterdir())


def test_the_proof_takes_less_than_three_seconds_of_cpu() -> None:
    """It stops by itself; here all of its operations fit."""
    from specpool.plugins.vllm import pool_proof

    start = time.thread_time()
    assert pool_proof.difference() is None
    assert time.thread_time() - start < proof.SECONDS


def test_a_file_is_read_as_the_module_would_be() -> None:
    for target in ("BlockPool", "BlockPool.touch", "BlockHashToBlockMap"):
        name = f"vllm.v1.core.block_pool:{target}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_pool, "BlockPool", OWN_POOL)
            assert drift.file_digest(name) == drift.text_digest(name)
    assert drift.file_digest("vllm.v1.core.block_pool:No").startswith("unreadable: ")
    assert drift.file_digest("vllm.no.such:No").startswith("unreadable: ")
