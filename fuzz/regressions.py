"""Hostile calls that no short input can make.

    python fuzz/regressions.py NAME

Many of them once ended the process, hung it, or wrote half of their output. Each must answer or
raise one of `REFUSALS`, within 2 GiB and some seconds; `tests/project/test_fuzz.py` runs them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from border import REFUSALS
from run import limit_memory

from specpool import Group, Ledger, Shape, _core

I32, I64 = np.int32, np.int64


def ones(count: int) -> np.ndarray:
    return np.ones(count, I32)


def scatter() -> None:
    first, second = np.zeros((1, 4, 2), np.uint8), np.zeros((1, 4, 2), np.uint8)
    values = [np.full((1, 1, 2), 7, np.uint8)] * 2
    second.flags.writeable = False
    try:
        _core.scatter_slots([(first, [2]), (second, [2])], np.array([3]), values)
    finally:
        assert not first.any(), "the first buffer was written before the second was refused"


def aliases() -> None:
    """The table's own memory as the rows to write: the first write changes the second row."""
    memory = bytearray(48)
    table = np.frombuffer(memory, I32).reshape(3, 4)
    rows = np.frombuffer(memory, I32, count=2, offset=16)
    rows[:] = (1, 2)
    before = bytes(memory)
    try:
        _core.apply_table_delta(table, rows, np.array([1, 0], I32), np.array([77, 88], I32))
    finally:
        assert bytes(memory) == before


def many_rows() -> None:
    """Audits and snapshots of a large ledger until memory is short: the ledger stays as it was."""
    group = Group("kv", page_size=1, num_pages=2**22, hosts_drafts=True)
    ledger = Ledger([group], [Shape.eagle(1, 1, 2)], num_rows=2**18, max_context_len=64)
    state, snapshots = ledger.state_hash(), []
    try:
        ledger.audit()
        for _ in range(64):
            snapshots.append(ledger.snapshot())
    finally:
        assert ledger.state_hash() == state


HUGE = 1 << 29
CASES: dict[str, Callable[[], object]] = {
    "build_tree of 2^40 lanes of nothing": lambda: _core.build_tree(
        np.zeros((2**40, 0), I64), np.zeros((2**40, 0), I64), topk=1
    ),
    "advance_ancestors of 2^38 lanes of nothing": lambda: _core.advance_ancestors(
        np.zeros((0, 2**38, 2**20), I32), np.zeros((0, 2**38), I32), 0
    ),
    "slot_ranges of a page of 2^29 slots": lambda: _core.slot_ranges(
        np.ones((2, 1), I32), HUGE, ones(1), np.zeros(1, I32), np.array([HUGE], I32)
    ),
    "attention_mask of 2^31 columns": lambda: _core.attention_mask(ones(4), ones(4), 2**31 - 1),
    "attention_bias of 2^31 columns": lambda: _core.attention_bias(ones(4), ones(4), 2**31 - 1),
    "page_csr of 2^12 rows of 2^19 pages": lambda: _core.page_csr(
        np.ones((2, 2**19), I32), 1, ones(2**12), np.full(2**12, 2**19, I32)
    ),
    "prefix_tail_moves of 2^15 branches": lambda: _core.prefix_tail_moves(
        np.ones((2, 2**20), I32),
        2**15,
        ones(1),
        np.array([2**15 - 1], I32),
        num_steps=1,
        topk=2**15,
    ),
    "draft_write_positions of 2^20 branches": lambda: _core.draft_write_positions(
        ones(1), num_steps=2**20, topk=2**20, page_size=1, layout="dense"
    ),
    "move_slots of 2^40 times nothing": lambda: _core.move_slots(
        [(np.zeros((2**40, 0, 0), np.uint8), [0])], np.zeros(0, I64), np.zeros(0, I64)
    ),
    "scatter_slots whose second buffer is refused": scatter,
    "apply_table_delta onto its own pages": aliases,
    "snapshots of 2^18 rows until memory is short": many_rows,
}


def main() -> None:
    limit_memory()
    try:
        CASES[sys.argv[1]]()
    except REFUSALS as error:
        print(f"refused: {type(error).__name__}: {error}"[:300])
    else:
        print("done")


if __name__ == "__main__":
    main()
