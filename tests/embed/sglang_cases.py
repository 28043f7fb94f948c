"""The plug-in on the real SGLang, on a CPU; `test_sglang.py` runs this file in a new process."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import paged, token
from sglang.srt.plugins import load_plugins

from specpool import BlockPool
from specpool.plugins import proof, status
from specpool.plugins.sglang import allocator, drift, pages_proof

# Not names of this module: the plug-in loader rebinds those in every module.
OWN = {"paged": paged.PagedTokenToKVPoolAllocator, "token": token.TokenToKVPoolAllocator}
SETTINGS = (torch.float16, "cpu", None, False)
PAGE_SIZES = [2, 3, 16, 64]


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECPOOL_SGLANG", "pages")
        load_plugins()


def test_the_entry_point_puts_both_classes_in_place() -> None:
    import sglang.srt.mem_cache.allocator as package

    assert paged.PagedTokenToKVPoolAllocator is allocator.SpecpoolPagedAllocator
    assert package.TokenToKVPoolAllocator is allocator.SpecpoolTokenAllocator
    # A class of SGLang's that changes the lists of its base keeps that base.
    from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator

    assert OWN["paged"] in PageInterleavePoolAllocator.__mro__


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def grow(pool: Any, row: torch.Tensor, to: int, by_decode: bool) -> torch.Tensor | None:
    """Return the row's new slots; `row` are those it has."""
    last = row[-1:] if len(row) else lens(-1)
    if by_decode:
        return pool.alloc_decode(lens(to), lens(to), last)
    prefix = lens(len(row))
    return pool.alloc_extend(prefix, prefix, lens(to), lens(to), last, to - len(row))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_calls_free_and_give_as_many_as_sglangs_own(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    size = page_size * 24
    own = OWN["paged"](size, page_size, *SETTINGS)
    ours = allocator.SpecpoolPagedAllocator(size, page_size, *SETTINGS)
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    in_group = False
    for _ in range(150):
        verb = rng.randrange(7)
        if verb == 0:
            rows.append((lens(), lens()))
        elif verb in (1, 2) and rows and not in_group:
            at = rng.randrange(len(rows))
            to = len(rows[at][0]) + (1 if verb == 1 else rng.randint(1, 3 * page_size))
            new = [
                grow(pool, row, to, verb == 1)
                for pool, row in zip((own, ours), rows[at], strict=True)
            ]
            assert (new[0] is None) == (new[1] is None)
            if new[0] is not None:
                rows[at] = tuple(torch.cat(pair) for pair in zip(rows[at], new, strict=True))
        elif verb == 3 and rows:
            for pool, row in zip((own, ours), rows.pop(rng.randrange(len(rows))), strict=True):
                pool.free_segment(row, start_pos=0)
        elif verb == 4 and rows:
            at = rng.randrange(len(rows))
            keep = len(rows[at][0]) // page_size // 2 * page_size
            for pool, row in zip((own, ours), rows[at], strict=True):
                pool.free(row[keep:])
            rows[at] = tuple(row[:keep] for row in rows[at])
        elif verb == 5:
            for pool in (own, ours):
                pool.free_group_end() if in_group else pool.free_group_begin()
            in_group = not in_group
        elif not in_group:
            count = rng.randint(0, 3) * page_size
            new = [pool.alloc(count) for pool in (own, ours)]
            assert (new[0] is None) == (new[1] is None)
            if count and new[0] is not None:
                rows.append((new[0], new[1]))
        if not in_group:
            assert own.available_size() == ours.available_size()
            check_rows(ours, [row for _, row in rows], page_size)


def check_rows(pool: Any, rows: list[torch.Tensor], page_size: int) -> None:
    """Every slot has one owner, lies at its offset, and its page is neither free nor page 0."""
    pages = [row // page_size for row in rows]
    for row in rows:
        assert torch.equal(row % page_size, torch.arange(len(row)) % page_size)
        for start in range(0, len(row), page_size):
            assert len((row[start : start + page_size] // page_size).unique()) == 1
    held = torch.cat([page.unique() for page in pages]) if pages else lens()
    assert len(held.unique()) == len(held)
    assert 0 not in held.tolist()
    assert pool.pool.taken().tolist() == sorted(held.tolist())
    assert sorted(held.tolist() + pool.get_all_free_pages().tolist()) == list(
        range(1, pool.num_pages + 1)
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_batch_gets_the_slots_that_sglangs_own_gives_from_the_same_pages(page_size: int) -> None:
    rng = random.Random(page_size)
    for _ in range(50):
        lanes = rng.randint(1, 40)
        prefix = [rng.randint(0, 3 * page_size) for _ in range(lanes)]
        seq = [n + rng.choice([0, 1, rng.randint(0, 4 * page_size)]) for n in prefix]
        last = [1_000_000 * page_size + n - 1 if n else -1 for n in prefix]
        own = OWN["paged"](page_size * 400, page_size, *SETTINGS)
        ours = allocator.SpecpoolPagedAllocator(page_size * 400, page_size, *SETTINGS)
        args = [torch.tensor(ints) for ints in (prefix, prefix, seq, seq, last)]
        count = sum(seq) - sum(prefix)
        assert torch.equal(own.alloc_extend(*args, count), ours.alloc_extend(*args, count))
        step = [torch.tensor([n + 1 for n in prefix])] * 2 + [args[-1]]
        assert torch.equal(own.alloc_decode(*step), ours.alloc_decode(*step))
        assert own.available_size() == ours.available_size()


def double_free(pool: Any) -> None:
    row = pool.alloc(2 * pool.page_size)
    pool.free(row)
    pool.free(row)


def foreign_free(pool: Any) -> None:
    pool.free(lens(pool.size + 5 * pool.page_size))


def padding_free(pool: Any) -> None:
    pool.free(lens(0))


def one_page_twice(pool: Any) -> None:
    pool.alloc(pool.page_size)
    pool.free_page_ids(lens(1, 1))


def one_slot_twice(pool: Any) -> None:
    row = pool.alloc(pool.page_size)
    if pool.page_size > 1:  # there SGLang gives all slots of a page
        pool.free(row)
        row = row[:1]
    pool.free(torch.cat((row, row)))


def free_after_clear(pool: Any) -> None:
    row = pool.alloc(pool.page_size)
    pool.clear()
    pool.free(row)


def both_of(page_size: int) -> tuple[Any, Any]:
    """Return SGLang's own allocator of 64 pages, and ours."""
    if page_size == 1:
        own, ours = OWN["token"], allocator.SpecpoolTokenAllocator
        return own(64, *SETTINGS), ours(64, *SETTINGS)
    sizes = 64 * page_size, page_size
    return OWN["paged"](*sizes, *SETTINGS), allocator.SpecpoolPagedAllocator(*sizes, *SETTINGS)


# Each with the pages that go into quarantine.
FAULTS: dict[Callable[[Any], None], set[int]] = {
    double_free: {1, 2},
    foreign_free: set(),
    padding_free: set(),
    one_page_twice: {1},
    one_slot_twice: {1},
    free_after_clear: {1},
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_page_that_is_freed_wrongly_is_kept_from_everybody(
    fault: Callable[[Any], None],
    page_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    monkeypatch.setattr(status, "_statuses", {})
    _, pool = both_of(page_size)
    fault(pool)
    shut = set(pool.quarantine.blocks)
    assert shut == FAULTS[fault]
    assert caplog.messages and "sglang_cases.py:" in caplog.messages[0]
    assert len(list(tmp_path.glob("sglang-*.log"))) == len(caplog.messages)
    pool.pool.check()
    assert set(pool.pool.taken().tolist()) == shut
    assert pool.available_size() + len(shut) * page_size == pool.size
    assert shut.isdisjoint(pool.get_all_free_pages().tolist())
    rest = pool.alloc(pool.available_size())
    assert shut.isdisjoint((rest // page_size).tolist())
    for page in shut:  # once more
        pool.free_page_ids(lens(page))
    pool.free(rest)
    assert set(pool.pool.taken().tolist()) == shut
    pool.clear()
    assert (pool.quarantine.blocks, pool.available_size()) == ({}, pool.size)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_free_can_raise(
    fault: Callable[[Any], None], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_FAULTS", "raise")
    own, pool = both_of(page_size)
    with pytest.raises(AssertionError, match=r"block|\d") as caught:
        fault(pool)
    assert isinstance(caught.value, allocator.AllocatorError)
    pool.pool.check()
    free = pool.available_size()
    assert free // page_size == 64 - len(pool.pool.taken())
    fault(own)  # SGLang's own is silent


def test_a_refused_free_names_the_page_and_the_call_that_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_FAULTS", "raise")
    pool = allocator.SpecpoolPagedAllocator(64, 4, *SETTINGS)
    row = pool.alloc(4)
    pool.free(row)
    said = r"block 1: .*; taken by alloc, call 1; freed by call 2$"
    with pytest.raises(allocator.AllocatorError, match=said):
        pool.free(row)
    with pytest.raises(allocator.AllocatorError, match=r"block 9: .*; no call took it$"):
        pool.free(lens(36))


def test_a_group_keeps_what_it_was_told() -> None:
    pool = allocator.SpecpoolPagedAllocator(64, 4, *SETTINGS)
    row = pool.alloc(24)
    ids, rest = lens(1, 2), row[8:16].clone()
    pool.free_group_begin()
    pool.free_page_ids(ids)
    pool.free(rest)
    pool.free(row[12:20])  # a page of two frees of a group counts once, as SGLang's own has it
    ids[:], rest[:] = 9, 99  # the caller uses its tensors again
    assert pool.available_size() == 40
    pool.free_group_end()
    assert pool.pool.taken().tolist() == [6]


def test_sizes_that_fit_no_page() -> None:
    pool = allocator.SpecpoolPagedAllocator(64, 4, *SETTINGS)
    with pytest.raises(
        allocator.AllocatorError, match="alloc of 6 tokens: not a multiple of the page size 4"
    ):
        pool.alloc(6)
    with pytest.raises(allocator.AllocatorError, match="segment start 3 is not page-aligned"):
        pool.free_segment(lens(4, 5), start_pos=3)
    with pytest.raises(
        allocator.AllocatorError, match=r"alloc_extend of 3 tokens: from \[4\] to \[2\]"
    ):
        pool.alloc_extend(lens(4), lens(4), lens(2), lens(2), lens(7), 3)
    with pytest.raises(allocator.AllocatorError, match=r"from \[4, 4\] to \[2, 8\]"):
        pool.alloc_extend(*(lens(4, 4),) * 2, *(lens(2, 8),) * 2, lens(7, 11), 2)
    assert pool.available_size() == 64
    empty = allocator.SpecpoolPagedAllocator(3, 4, *SETTINGS)
    assert (empty.available_size(), empty.alloc(4), len(empty.alloc(0))) == (0, None, 0)
    with pytest.raises(allocator.AllocatorError, match="the pool has no page"):
        empty.free(lens(4))


def test_nothing_begins_anew_inside_a_group_of_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_FAULTS", "raise")
    pool = allocator.SpecpoolPagedAllocator(64, 4, *SETTINGS)
    row = pool.alloc(8)
    pool.free_group_begin()
    pool.free(row)
    for verb in (pool.clear, partial(pool.resize, SimpleNamespace(max_total_num_tokens=32))):
        with pytest.raises(allocator.AllocatorError, match="inside a group of frees"):
            verb()
    with pytest.raises(allocator.AllocatorError, match="resize to 3 tokens: a page has 4"):
        pool.resize(SimpleNamespace(max_total_num_tokens=3))
    with pytest.raises(allocator.AllocatorError, match="alloc: "):
        pool.alloc(-4)
    assert (pool.size, pool.available_size()) == (64, 56)
    pool.free_group_end()
    assert pool.available_size() == 64
    pool.resize(SimpleNamespace(max_total_num_tokens=32))
    assert (pool.size, pool.available_size()) == (32, 32)
    with pytest.raises(allocator.AllocatorError, match="no call took it"):
        pool.free(row)


def test_a_log_of_each_pool_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_RECORD", str(tmp_path / "pages"))
    pool = allocator.SpecpoolPagedAllocator(64, 4, *SETTINGS)
    row = pool.alloc(16)
    pool.free(row[:8])
    before = pool.pool.state_hash()
    pool.clear()  # begins another log
    logs = sorted(tmp_path.iterdir())
    assert len(logs) == 2
    again, _, end = BlockPool.replay(logs[0])
    assert (again.state_hash(), end) == (before, "closed")


class SlowDevice:
    """Stands for `torch.cuda`: an event is done only when someone waits for it."""

    waits = 0

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            SlowDevice.waits += 1


def slow_pool(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> Any:
    """Return an allocator whose frees take the way of an accelerator's, over CPU tensors."""
    empty = torch.empty
    monkeypatch.setattr(torch, "get_device_module", lambda device: SlowDevice)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    pool = allocator.SpecpoolPagedAllocator(num_pages * 4, 4, *SETTINGS)

    def give(pages: torch.Tensor) -> None:
        pool.frees.start(pages)
        pool._land(0 if pool.is_strict else allocator.MOST_COPIES)

    monkeypatch.setattr(pool, "_give", give)
    SlowDevice.waits = 0
    return pool


def test_frees_on_their_way_count_as_free_and_are_waited_for_only_when_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = slow_pool(monkeypatch, 8)
    row = pool.alloc(24)
    pool.free(row)
    assert (pool.available_size(), pool.pool.num_free, SlowDevice.waits) == (32, 2, 0)
    assert len(pool.alloc(8)) == 8
    assert SlowDevice.waits == 0
    assert len(pool.alloc(4)) == 4
    assert SlowDevice.waits == 1
    assert pool.alloc(24) is None
    pool.pool.check()


def test_only_the_oldest_frees_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = slow_pool(monkeypatch, 8)
    row = pool.alloc(32)
    for start in range(0, 32, 8):
        pool.free(row[start : start + 8])
    assert len(pool.alloc(12)) == 12
    assert (SlowDevice.waits, pool.available_size()) == (2, 20)
    pool.pool.check()


def test_few_copies_are_on_their_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_FAULTS", "raise")
    pool = slow_pool(monkeypatch, 200)
    rows = [pool.alloc(4) for _ in range(150)]
    for row in rows:
        pool.free(row)
    assert SlowDevice.waits == 150 - allocator.MOST_COPIES
    assert pool.available_size() == 800
    pool.free(rows[0])  # a double free is seen when it has landed
    with pytest.raises(allocator.AllocatorError, match="block"):
        pool.get_all_free_pages()


def test_clear_forgets_frees_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = slow_pool(monkeypatch, 8)
    pool.free(pool.alloc(24))
    pool.clear()
    assert (pool.available_size(), pool.pool.num_free) == (32, 8)


def test_this_sglang_is_accepted_within_three_seconds_of_cpu() -> None:
    start = time.thread_time()
    assert drift.differences() == []
    assert time.thread_time() - start < proof.SECONDS


def frees_a_page_twice(own: Any) -> Any:
    def free(self: Any, free_index: torch.Tensor) -> None:
        if self.free_group is None and len(free_index):
            self._release_page_ids(free_index // self.page_size)
        else:
            own(self, free_index)

    return free


def keeps_a_page(own: Any) -> Any:
    def alloc(self: Any, need_size: int) -> Any:
        return own(self, need_size) if need_size < self.available_size() else None

    return alloc


def gives_a_held_page(own: Any) -> Any:
    def alloc_decode(self: Any, *args: Any) -> Any:
        before = self.free_pages
        new = own(self, *args)
        self.free_pages = before
        return new

    return alloc_decode


def forgets_a_group(own: Any) -> Any:
    def free_group_end(self: Any) -> None:
        self.free_page_ids_group = []
        own(self)

    return free_group_end


def resizes_no_pages(own: Any) -> Any:
    def resize(self: Any, config: Any) -> None:
        self.size = config.max_total_num_tokens
        self.clear()

    return resize


PLANTS = [
    (frees_a_page_twice, "free", r"free\w*\(.*\): the free tokens: the engine's own gives \d+"),
    (keeps_a_page, "alloc", r"alloc\(\d+\): it: the engine's own gives None, ours \["),
    (gives_a_held_page, "alloc_decode", r"alloc_decode\(.*\): the free tokens: "),
    (forgets_a_group, "free_group_end", r"free_group_end\(\): the free tokens: "),
    (resizes_no_pages, "resize", r"resize\(\d+\): the free tokens: the engine's own gives \d+"),
]


@pytest.mark.parametrize(("plant", "name", "expected"), PLANTS)
def test_the_proof_names_the_first_operation_that_differs(
    plant: Callable[[Any], Any], name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OWN["paged"], name, plant(getattr(OWN["paged"], name)))
    (line,) = drift.differences()
    assert re.match(r"PagedTokenToKVPoolAllocator, seed \d+, operation \d+, " + expected, line), (
        line
    )


def test_a_new_parameter_or_method_of_sglangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: Any, free_index: Any, why: str) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(OWN["paged"], "free", free)
        assert drift.differences() == ["PagedTokenToKVPoolAllocator.free: parameter 'why' is new"]

    def steal(self: Any) -> Any:
        return self.free_pages[:1]

    monkeypatch.setattr(OWN["token"], "steal", steal, raising=False)
    assert drift.differences() == ["TokenToKVPoolAllocator.steal: ours has no such method"]


def test_a_wrong_free_in_the_proof_raises_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_SGLANG_RECORD", str(tmp_path / "log"))
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    for kind in OWN:
        _, side = pages_proof.AllocatorCase(kind).sides(random.Random(0))
        with pytest.raises(allocator.AllocatorError):
            side.allocator.free(torch.tensor([side.page_size]))
    assert not list(tmp_path.iterdir())
