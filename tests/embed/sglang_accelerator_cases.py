"""The plug-in where KV lies on an accelerator; `test_sglang.py` runs this in a new process.

The accelerator is that of `sglang_accelerator`: it is not there, but what it holds is read by
kernels alone, and each wait for it is counted. SGLang's scheduler loop runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sglang_accelerator import DEVICE, Accelerator, OnDevice, on_host
from sglang_grid import grid, parts
from sglang_loop import Loop, Outcome, Setup, run, run_once
from sglang_rows_cases import BUSY, audited

from specpool.plugins.sglang import allocator, row_tree
from specpool.plugins.sglang.book import Book

LEVELS = ("off", "pages", "reserve", "rows")
SETUPS = parts(grid([(3, 1, 4), (3, 4, 8)], (False,)), quick=4, full=12)
#: All levels on all set-ups. A quick run has each level and each quick set-up once.
LEVELS_ON_SETUPS = [
    pytest.param(
        level,
        *setup.values,
        id=f"{level}-{setup.id}",
        marks=[*setup.marks, *([pytest.mark.full] if (first + second) % len(LEVELS) else [])],
    )
    for first, level in enumerate(LEVELS)
    for second, setup in enumerate(SETUPS)
]
TIGHT = replace(BUSY, device=DEVICE.type)
#: More slots than all requests take: no page is used twice.
ROOMY = replace(TIGHT, num_tokens=1 << 14)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def mirrored(loop: Loop) -> None:
    """Audit the ledger, and the mirror by the table of the accelerator."""
    audited(loop)
    book, run_batch = loop.req_to_token_pool.book, loop.run_batch

    def audit(batch: Any, **options: Any) -> Any:
        table = on_host(loop.req_to_token_pool.req_to_token)
        for req in batch.reqs:
            row, held = req.kv.req_pool_idx, req.kv.kv_allocated_len
            assert (book.mirror[row, :held] == table[row, :held]).all(), req.rid
        return run_batch(batch, **options)

    loop.run_batch = audit


def ours(outcome: Outcome) -> dict[str, int]:
    """The waits, and copies that may wait, that the plug-in makes."""
    counts = outcome.waits + outcome.pageable
    return {site: count for site, count in counts.items() if site.startswith("plugins/sglang/")}


def expected_waits(setup: Setup, outcome: Outcome) -> int:
    """SGLang's own: a result for each forward, and lengths for each round or another result."""
    return outcome.forwards + (outcome.decodes if setup.overlap else outcome.forwards)


@pytest.mark.parametrize("setup", SETUPS)
def test_level_rows_waits_no_more_than_sglangs_own(setup: Setup) -> None:
    setup = replace(setup, device=DEVICE.type)
    own = run_once(setup)
    assert own.waits.total() == expected_waits(setup, own)
    assert not [site for site in own.waits if site.startswith("test")]  # each has its place
    outcome = run_once(replace(setup, level="rows"), prepare=mirrored)
    assert not outcome.error, outcome.error
    assert (outcome.leaks, outcome.texts) == ([], outcome.expected)
    assert ours(outcome) == {}
    assert set(outcome.waits) <= set(own.waits)
    assert outcome.waits.total() == expected_waits(setup, outcome)


@pytest.mark.parametrize(("level", "setup"), LEVELS_ON_SETUPS)
def test_a_level_does_as_on_a_cpu(level: str, setup: Setup) -> None:
    here_audit, there_audit = (audited, mirrored) if level == "rows" else (None, None)
    here = run_once(replace(setup, level=level), prepare=here_audit)
    there = run_once(replace(setup, level=level, device=DEVICE.type), prepare=there_audit)
    assert not there.error, there.error
    for name in ("texts", "forwards", "retracted", "slots_ahead", "leaks", "seen"):
        assert getattr(there, name) == getattr(here, name), name
    assert len(there.faults) == len(here.faults)


@pytest.mark.parametrize("level", ["pages", "reserve"])
def test_a_page_on_its_way_is_waited_for_only_if_no_other_is_free(level: str) -> None:
    outcome = run_once(replace(ROOMY, level=level))
    assert (outcome.error, outcome.faults, ours(outcome)) == ("", [], {})
    outcome = run_once(replace(TIGHT, level=level))
    assert (outcome.error, outcome.faults) == ("", [])
    assert set(ours(outcome)) == {"plugins/sglang/frees.py:oldest: an event"}


def no_publish(loop: Loop) -> None:
    Book.publish = lambda *_: None


def no_tail(loop: Loop) -> None:
    """The cells behind a prefill's text are not copied."""
    own, publish = Book.extend, Book.publish

    def extend(book: Any, *arguments: Any) -> Any:
        Book.publish = lambda *_: None
        try:
            return own(book, *arguments)
        finally:
            Book.publish = publish

    Book.extend = extend


def table_on_device(loop: Loop) -> None:
    """A checkpoint reads the table on the device."""
    pool = loop.req_to_token_pool
    pool.book.host_table = pool.req_to_token


def waits_for_each(loop: Loop) -> None:
    def upload(ints: Any, device: Any) -> torch.Tensor:
        return torch.from_numpy(ints).to(device)

    for module in (allocator, row_tree, __import__("specpool.plugins.sglang.book", fromlist="x")):
        module.upload = upload


def prefix_on_host(loop: Loop) -> None:
    cache = type(loop.tree_cache)
    cache.prefix_device_indices = cache.prefix_device_indices.__wrapped__


BROKEN = [no_publish, no_tail, table_on_device, waits_for_each, prefix_on_host]
REST = [pytest.param(fault, marks=pytest.mark.full) for fault in BROKEN[2:]]


@pytest.mark.parametrize("fault", [*BROKEN[:2], *REST])
def test_the_laws_fail_without_one_guard(fault: Callable[[Loop], None]) -> None:
    def prepare(loop: Loop) -> None:
        mirrored(loop)
        fault(loop)

    setup = replace(TIGHT, level="rows")
    kept = run_once(setup, prepare=mirrored)
    assert (kept.error, kept.faults, ours(kept)) == ("", [], {})
    outcome = run(setup, prepare=prepare, seconds=20)
    assert outcome.error or outcome.faults or outcome.leaks or ours(outcome)


def test_a_free_of_slots_on_the_device_is_refused_unread() -> None:
    def prepare(loop: Loop) -> None:
        pages, before = loop.token_to_kv_pool_allocator, loop.outcome.waits.total()
        slots = torch.zeros(16, dtype=torch.int64, device=DEVICE)
        state = pages.book.ledger.state_hash()
        for free in (
            lambda: pages.free(slots),
            lambda: pages.free_page_ids(slots),
            lambda: pages.free_segment(slots, start_pos=0),
        ):
            with pytest.raises(allocator.AllocatorError, match="16 slots or pages on cuda:0"):
                free()
        assert (pages.book.ledger.state_hash(), loop.outcome.waits.total()) == (state, before)

    outcome = run(replace(TIGHT, level="rows", num_requests=1), prepare=prepare)
    assert not outcome.error, outcome.error


def test_the_accelerator_counts_waits_and_keeps_its_memory_apart() -> None:
    with Accelerator() as accelerator:
        there = torch.arange(4, device=DEVICE)
        assert isinstance(there, OnDevice) and there.device == DEVICE and not there.is_cpu
        assert isinstance(there + 1, OnDevice) and not accelerator.waits
        here = torch.arange(4)
        waits: list[Callable[[], Any]] = [
            there.tolist, there.cpu, there[0].item, there.sum().__bool__, there.nonzero,
            lambda: there.to("cpu"), lambda: here.to(DEVICE), lambda: there[there > 1],
            lambda: there[here], lambda: torch.tensor([1], device=DEVICE),
            lambda: there.__setitem__(slice(0, 4), here), lambda: here.copy_(there),
            lambda: torch.unique(there), lambda: int(there[1]),
        ]  # fmt: skip
        for number, wait in enumerate(waits, start=1):
            wait()
            assert accelerator.waits.total() == number, number
        for fault, error in (
            (there.numpy, TypeError),
            (lambda: np.asarray(there), TypeError),
            (lambda: torch.cat((here, there)), RuntimeError),
            (lambda: here[there], RuntimeError),
        ):
            with pytest.raises(error):
                fault()
        here.pin_memory().to(DEVICE, non_blocking=True)
        assert not accelerator.pageable
        here.to(DEVICE, non_blocking=True)
        assert accelerator.pageable.total() == 1
        with accelerator.kernel():
            assert there.tolist() == [0, 1, 2, 3]
        assert accelerator.waits.total() == len(waits)
