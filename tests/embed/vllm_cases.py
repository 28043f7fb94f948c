"""The plug-in on the real vLLM, on a CPU; `test_vllm.py` runs this file in a new process."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
from vllm import plugins
from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm_plugin import SIZE, held, ours, with_plugin

from benches.vllm_setup import OWN_POOL, admit, manager, request
from specpool import BlockPool
from specpool.plugins import drift
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
        num_blocks = rng.randint(6, 40)
        self.managers = [manager(cls, num_blocks, SIZE, **settings) for cls in (OWN_POOL, ours())]
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
        """Blocks of running requests are found no more; free ones are a test of their own."""
        if self.rows and self.rng.random() < 0.3:
            blocks = {b for b in self.managers[0].get_block_ids(self.rows[0][0].request_id)[0] if b}
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
        kept = mine.core.index_size[0]
        assert kept == sum(b.block_hash is not None for b in mine.blocks)


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
        assert pair.managers[1].block_pool.core.index_size[0] == 0
        assert_no_page_leaked(pair.managers[1].block_pool.core)
        hits, evictions = hits + pair.hits, evictions + pair.evictions
    assert hits > 500
    assert evictions > 500


def test_a_free_block_that_is_forgotten_is_given_before_those_that_are_known() -> None:
    lost = []
    for cls in (OWN_POOL, ours()):
        managed = manager(cls, 8, SIZE)
        for name, first in (("a", 0), ("b", 50)):
            wanted = request(name, range(first, first + 2 * SIZE + 1), SIZE)
            admit(managed, wanted)
            managed.free(wanted)
        managed.evict_blocks({4})  # known, and of the request that was freed last
        managed.block_pool.get_new_blocks(4)
        hits = [admit(managed, request(f"{n}2", range(n, n + 6), SIZE)) for n in (0, 50)]
        lost.append(sum(2 * SIZE - (hit[0] if hit else 0) for hit in hits))
    assert lost[1] <= lost[0]


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


def test_what_wraps_a_call_has_its_parameters_and_defaults() -> None:
    """It names them one by one."""
    from specpool.plugins.vllm import speculative

    own = inspect.signature(speculative.own_allocate_slots).parameters.values()
    mine = inspect.signature(speculative._allocate_slots, follow_wrapped=False).parameters.values()
    assert [(p.kind, p.default) for p in mine] == [(p.kind, p.default) for p in own]
    assert [p.name for p in mine][1:] == [p.name for p in own][1:]


def test_a_change_of_vllm_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "BlockPool", OWN_POOL)

    def touch(self: Any, blocks: Any, why: str) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(OWN_POOL, "touch", touch)
        (line,) = releases.differences()
        assert "touch has the parameters (self, blocks, why), known are (self, blocks)" in line
    monkeypatch.setattr(block_pool, "BlockPool", type("Changed", (OWN_POOL,), {}))
    (line,) = releases.differences()
    assert "has the text" in line
    assert releases.differences(bodies=False) == []


def test_a_file_is_read_as_the_module_would_be() -> None:
    for target in ("BlockPool", "BlockPool.touch", "BlockHashToBlockMap"):
        name = f"vllm.v1.core.block_pool:{target}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_pool, "BlockPool", OWN_POOL)
            assert drift.file_digest(name) == drift.text_digest(name)
    assert drift.file_digest("vllm.v1.core.block_pool:No").startswith("unreadable: ")
    assert drift.file_digest("vllm.no.such:No").startswith("unreadable: ")
