"""Wrong frees by the real vLLM's classes: what the pool does with their blocks, and what it says.

`test_vllm.py` runs this file in a new process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm_plugin import SIZE, held, ours, with_plugin

from benches.vllm_setup import OWN_POOL, admit, manager, request
from specpool import PageStateError
from specpool.plugins import status
from specpool.record import blocks as block_log

__all__ = ["with_plugin"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of reports; no wrong free was counted yet."""
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    monkeypatch.setattr(status, "_statuses", {})
    return tmp_path


def double_free(pool: Any, blocks: list[Any]) -> None:
    pool.free_blocks(blocks)
    pool.free_blocks(blocks[2:])


def twice_in_a_call(pool: Any, blocks: list[Any]) -> None:
    pool.free_blocks([blocks[0], blocks[2], blocks[2]])


def count_below_zero(pool: Any, blocks: list[Any]) -> None:
    blocks[2].ref_cnt -= 2


def unpin_of_a_free_block(pool: Any, blocks: list[Any]) -> None:
    pool.free_blocks(blocks[2:])
    pool.unpin_blocks([*blocks[1:], blocks[2]], lambda block: None)


def cache_of_a_free_block(pool: Any, blocks: list[Any]) -> None:
    pool.free_blocks(blocks[2:])
    pool.cache_full_blocks(request("r", range(12), SIZE), blocks, 2, 3, SIZE, 0)


def foreign_free(pool: Any, blocks: list[Any]) -> None:
    pool.free_blocks([blocks[0], KVCacheBlock(2)])


def cache_of_a_foreign_block(pool: Any, blocks: list[Any]) -> None:
    pool.cache_full_blocks(request("x", range(8), SIZE), [KVCacheBlock(2)], 0, 1, SIZE, 0)


def free_of_another_pool(pool: Any, blocks: list[Any]) -> None:
    pool.free_blocks([manager(ours(), 8, SIZE).block_pool.blocks[1]])


def hold_of_a_free_block(pool: Any, blocks: list[Any]) -> None:
    pool.touch([blocks[0], pool.blocks[7]])


Fault = Callable[[Any, list[Any]], None]
# Block 3 goes into quarantine.
OF_BLOCK_3: list[Fault] = [
    double_free,
    twice_in_a_call,
    count_below_zero,
    unpin_of_a_free_block,
    cache_of_a_free_block,
]
OF_NO_BLOCK: list[Fault] = [foreign_free, cache_of_a_foreign_block]


@pytest.mark.parametrize("fault", [*OF_BLOCK_3, *OF_NO_BLOCK, free_of_another_pool])
def test_a_wrong_free_can_raise(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_VLLM_FAULTS", "raise")
    pool, blocks = held()
    with pytest.raises((PageStateError, ValueError), match=r"blocks? \d"):
        fault(pool, blocks)
    pool.core.check()


@pytest.mark.parametrize("name", ["quarantine", "raise"])
def test_a_hold_of_a_block_that_holds_nothing_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_VLLM_FAULTS", name)
    pool, blocks = held()
    before = pool.core.state_hash()
    with pytest.raises(PageStateError, match="take of block 7: nobody holds it"):
        hold_of_a_free_block(pool, blocks)
    assert pool.core.state_hash() == before


@pytest.mark.parametrize("fault", [double_free, twice_in_a_call, hold_of_a_free_block])
def test_vllms_own_pool_is_silent(fault: Fault) -> None:
    managed = manager(OWN_POOL, 8, SIZE)
    admit(managed, request("r", range(11), SIZE))
    fault(managed.block_pool, managed.get_blocks("r").blocks[0])


@pytest.mark.parametrize("fault", OF_BLOCK_3)
def test_a_block_that_is_freed_wrongly_is_kept_from_everybody(
    fault: Fault, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pool, blocks = held()
    fault(pool, blocks)
    assert list(pool.quarantine.blocks) == [3]
    (line,) = caplog.messages
    names = [
        " of block 3: nobody holds it",
        "owned by request r",
        f"{__name__}.py:",
        fault.__name__,
    ]
    assert all(name in line for name in names), line
    pool.core.check()

    # The rest of the call is done, and the pool adds up.
    held_now = [block.block_id for block in blocks if block.ref_cnt and block.block_id != 3]
    assert pool.core.taken().tolist() == sorted([*held_now, 3])
    assert pool.get_num_free_blocks() + len(held_now) + 1 == 7
    pool.free_blocks([pool.blocks[3]])  # a third time
    assert list(pool.quarantine.blocks) == [3]
    rest = pool.get_new_blocks(pool.get_num_free_blocks())
    assert 3 not in [block.block_id for block in rest]

    # Nobody holds a block: a reset lets it out.
    assert not pool.reset_prefix_cache()
    pool.free_blocks([*rest, *(pool.blocks[block] for block in held_now)])
    assert pool.reset_prefix_cache()
    assert (pool.quarantine.blocks, pool.get_num_free_blocks()) == ({}, 7)
    assert pool.core.record_of(3)[0] == "free"  # it is given before those that hold something
    pool.free_blocks(pool.get_new_blocks(7))

    report, _ = sorted(folder.glob("vllm-*.log"))
    block_log.show(report, at=None)
    shown = capsys.readouterr().out
    assert "3  held 1 times, last verb take  # wrong free: " in shown
    assert all(name in shown for name in names)


def test_who_reads_a_block_that_goes_into_quarantine_is_told() -> None:
    """As HiSparse reads what it has unpinned. What the block held is not found again."""
    pool, blocks = held(64)
    notified: list[int] = []
    pool.unpin_blocks(blocks[2:], lambda block: notified.append(block.block_id))
    pool.free_blocks(blocks[2:])
    assert notified == [3]
    pool.unpin_blocks([blocks[1], blocks[1]], lambda block: notified.append(block.block_id))
    assert notified == [3, 2] == list(pool.quarantine.blocks)
    assert pool._reuse_watchers == {}


def test_who_reads_a_block_that_is_in_quarantine_already_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, and it is said: the block may be given again without a further word."""
    pool, blocks = held(64)
    double_free(pool, blocks)
    notified: list[int] = []
    pool.unpin_blocks([blocks[2]] * 2, lambda block: notified.append(block.block_id))
    assert notified == [3] == list(pool.quarantine.blocks)
    assert pool._reuse_watchers == {}
    assert "drop of block 3: it is in quarantine" in caplog.text
    pool.core.check()


def test_who_is_told_of_a_block_in_quarantine_can_free_it_wrongly_too() -> None:
    pool, blocks = held(64)
    pool.unpin_blocks(blocks[2:], lambda block: pool.free_blocks([block]))
    pool.free_blocks(blocks[2:])
    assert pool.core.taken().tolist() == [1, 2, 3]
    assert list(pool.quarantine.blocks) == [3]


@pytest.mark.parametrize("name", ["quarantine", "raise"])
def test_an_unpin_of_another_pools_block_is_a_free_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This pool cannot tell when it is given again, so its reader is told at once."""
    monkeypatch.setenv("SPECPOOL_VLLM_FAULTS", name)
    pool, _ = held()
    foreign_pool, foreign = held()
    notified: list[Any] = []
    before = pool.core.state_hash()
    pool.unpin_blocks(foreign[1:], notified.append)
    assert foreign_pool.core.taken().tolist() == [1]
    assert notified == foreign[1:]
    assert (pool.core.state_hash(), pool._reuse_watchers) == (before, {})


@pytest.mark.parametrize("wrong", [[0, 1, 2, 2], [2, 1, 3], [1, KVCacheBlock(2)]])
def test_after_an_unpin_that_raises_the_frees_are_as_usual(
    wrong: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a request by their places, of which the last is free; or a block of no pool."""
    monkeypatch.setenv("SPECPOOL_VLLM_FAULTS", "raise")
    pool, blocks = held()
    pool.evict_blocks({2, 3})
    known = [*blocks, pool.blocks[7]]
    named = [known[block] if isinstance(block, int) else block for block in wrong]
    with pytest.raises((PageStateError, ValueError), match=r"blocks? \d"):
        pool.unpin_blocks(named, lambda block: None)
    assert (pool.core.taken().tolist(), pool._reuse_watchers) == ([1, 2, 3], {})
    pool.free_blocks(blocks)
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert order == [2, 3, 4, 5, 6, 7, 1]


def test_a_block_in_quarantine_that_is_held_stays_there_until_it_is_freed() -> None:
    """As a connector holds what it copies away, for a request that believes to hold it."""
    pool, blocks = held(64)
    double_free(pool, blocks)
    pool.touch([blocks[2], pool.null_block])
    blocks[2].ref_cnt += 1
    assert not pool.reset_prefix_cache()
    for block in [*pool.get_new_blocks(4)] * 2:  # one of 16 may stay: three
        pool.free_blocks([block])
    assert 3 in pool.quarantine.blocks and len(pool.quarantine.blocks) == 3
    assert blocks[2] not in pool.get_new_blocks(pool.get_num_free_blocks())
    pool.free_blocks([blocks[2], blocks[2]])
    assert pool.core.refs(3) == 1
    pool.free_blocks([block for block in pool.blocks[1:] if block.pool is pool])
    assert pool.reset_prefix_cache()
    assert pool.core.taken().tolist() == []


def test_blocks_in_quarantine_that_are_all_held_are_more_than_usual() -> None:
    pool, blocks = held()
    for block in blocks:
        pool.free_blocks([block])
        pool.free_blocks([block])
        pool.touch([block])
    assert list(pool.quarantine.blocks) == [1, 2, 3]
    pool.free_blocks(blocks)
    last = pool.get_new_blocks(1) * 2
    pool.free_blocks(last)
    assert list(pool.quarantine.blocks) == [last[0].block_id]


@pytest.mark.parametrize("fault", OF_NO_BLOCK)
def test_a_block_of_no_pool_is_left_out_and_said(
    fault: Fault, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool, blocks = held()
    fault(pool, blocks)
    assert pool.quarantine.blocks == {}
    (report,) = folder.glob("vllm-*.log")
    block_log.show(report, at=None)
    shown = capsys.readouterr().out
    assert "wrong free: " in shown and f"{__name__}.py:" in shown
    pool.core.check()


@pytest.mark.parametrize("fault", [cache_of_a_free_block, cache_of_a_foreign_block])
def test_events_take_back_what_they_said_of_a_block_that_is_not_cached(fault: Fault) -> None:
    from specpool.plugins.vllm.pool_proof import PoolSide

    pool, blocks = held(enable_kv_cache_events=True)
    fault(pool, blocks)
    side = PoolSide(pool, [])
    side.take_events()
    side.check()
    assert side.stored is not None and side.stored.total() == 2
    assert pool.take_events() == []


def test_a_free_of_another_pool_is_that_pools_wrong_free() -> None:
    pool, _ = held()
    other = manager(ours(), 40, SIZE).block_pool
    pool.free_blocks([other.blocks[1]])
    assert (pool.quarantine.blocks, list(other.quarantine.blocks)) == ({}, [1])


def test_a_report_has_the_calls_before_it_if_they_are_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECPOOL_VLLM_RECORD", str(folder / "blocks"))
    pool, blocks = held()
    double_free(pool, blocks)
    (report,) = folder.glob("vllm-*.log")
    block_log.replay(report, quiet=False)
    shown = capsys.readouterr().out
    assert "take(3) -> [1, 2, 3]  # r" in shown
    assert "take(1) -> [3]  # wrong free: drop of block 3" in shown


def test_a_request_that_is_freed_twice_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """By vLLM's own manager, whose list of the request's blocks was not emptied."""
    managed = manager(ours(), 200, SIZE)
    rng, rows, ct = random.Random(3), [], 0
    for turn in range(400):
        if rng.random() < 0.6:
            tokens = [rng.choice([0, 0, 7]) for _ in range(rng.randint(1, 30))]
            wanted = request(f"r{turn}", tokens, SIZE)
            if admit(managed, wanted) is not None:
                rows.append(wanted)
        elif rows:
            wanted = rows.pop(rng.randrange(len(rows)))
            blocks = list(managed.get_blocks(wanted.request_id).blocks[0])
            managed.free(wanted)
            if rng.random() < 0.03:
                (single,) = managed.coordinator.single_type_managers
                # As far as the second free takes no other request's hold, which nobody can see.
                single.req_to_blocks[wanted.request_id] = [b for b in blocks if not b.ref_cnt]
                ct += len(single.req_to_blocks[wanted.request_id])
                managed.free(wanted)
        core, quarantine = managed.block_pool.core, managed.block_pool.quarantine
        held_now = {
            b.block_id for row in rows for b in managed.get_blocks(row.request_id).blocks[0]
        }
        assert held_now.isdisjoint(quarantine.blocks)
        assert core.taken().tolist() == sorted([*held_now, *quarantine.blocks])
        core.check()
    assert ct > 12 == len(quarantine.blocks)  # one of 16
    assert "single_type_kv_cache_manager.py:" in caplog.text
    assert KVCacheManager.free.__name__ in caplog.text
