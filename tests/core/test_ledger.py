"""The ledger through the binding: its interface, its laws and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from ledger_kit import (
    CHAIN,
    assert_all_back,
    end,
    extend,
    make,
    poke,
    prefill,
    refuses,
    start,
    state,
)
from specpool import (
    ConfigError,
    ContextEnd,
    CorruptState,
    DraftLag,
    Group,
    Ledger,
    NotReady,
    OrderError,
    OutOfPages,
    OutOfRows,
    PageStateError,
    RowOverflow,
    Shape,
    ShapeError,
    StalePlan,
)

# --- The interface ---


def test_views_are_live_read_only_and_outlive_the_ledger():
    ledger = make()
    table, resolved = ledger.page_table(0), ledger.resolved_len
    assert table.shape == (4, ledger.pages_per_row(0))
    assert table.dtype == resolved.dtype == np.int32
    assert ledger.epoch.dtype == np.uint64
    row = prefill(ledger, 6)
    assert resolved[row] == 6
    assert table[row, :3].tolist() == [1, 2, 0]
    assert np.shares_memory(table, ledger.page_table(0))
    assert not np.shares_memory(table, ledger.full_table(0))
    for view in (table, resolved, ledger.in_flight, ledger.epoch, ledger.allocated_len(0)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
    del ledger
    assert table[row, 0] == 1


def test_a_plan_owns_its_arrays():
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 6)
    plan = ledger.prepare_decode([row], [1])
    assert (plan.kind, plan.step, len(plan)) == ("decode", 2, 1)
    assert (plan.lo[0], plan.hi[0], plan.start[0], plan.new_len[0]) == (6, 6, 6, 6)
    assert plan.allocated_before.tolist() == [[8]]
    assert plan.allocated_after.tolist() == [[12]]
    ledger.launch(plan.step)
    second = ledger.prepare_decode([row], [0])
    assert (second.lo[0], second.hi[0]) == (7, 10)
    rows, epochs = plan.rows, plan.epochs
    del plan
    ledger.abort(row)
    assert rows.tolist() == [row]
    assert epochs.tolist() == [0]
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 5


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_of_int32_and_int64_and_lists(dtype):
    ledger = make()
    rows = np.array([ledger.admit(), ledger.admit()], dtype)
    plan = ledger.prepare_extend(np.repeat(rows, 2)[::2], np.array([5, 6], dtype))
    assert plan.new_len.tolist() == [5, 6]
    assert ledger.tokens_required(rows, [0, 1]).dtype == np.int64
    unaligned = np.frombuffer(b"\0" + rows.tobytes(), np.uint8)[1:].view(dtype)
    refuses(ledger, ShapeError, ledger.tokens_required, unaligned, [0, 1], match="not aligned")


@pytest.mark.parametrize(
    "rows",
    [
        np.array([1.0]),
        np.array([1], np.uint8),
        np.array([[1]], np.int32),
        np.array([1], ">i4"),
        np.array([True]),
        np.int32(1),
        np.array(1, np.int64),
        np.array([2**40]),
        [2**70],
        ["1"],
        "1",
        None,
        [1, 1],
        [0],
        [2],
        [-1],
        [4],
        [],
        np.zeros(0, np.int64),
        [1, 2, 3, 1],
    ],
    ids=repr,
)
def test_bad_rows_are_shape_errors(rows):
    ledger = make()
    prefill(ledger, 5)
    ones = [6] * (len(rows) if isinstance(rows, list) else 1)
    refuses(ledger, ShapeError, ledger.prepare_extend, rows, ones)
    refuses(ledger, ShapeError, ledger.prepare_decode, rows, ones)


def test_lengths_shapes_and_groups_out_of_range():
    ledger = make()
    row = prefill(ledger, 5)
    refuses(ledger, ShapeError, ledger.prepare_decode, [row], [0, 0], match="1 rows, 2 shapes")
    refuses(ledger, ShapeError, ledger.prepare_decode, [row], [2], match="shape 2 is not in 0..2")
    refuses(ledger, ShapeError, ledger.prepare_decode, [row], [-1], match="shape -1")
    refuses(ledger, ShapeError, ledger.tokens_required, [row], [2])
    refuses(ledger, ShapeError, ledger.prepare_extend, [row], [5], match="new_len 5 is not above")
    refuses(ledger, ShapeError, ledger.prepare_extend, [row], [-(2**31)])
    for call in (ledger.free_pages, ledger.page_table, ledger.row_width, ledger.allocated_len):
        for group in (1, -1, 2**80, "kv"):
            refuses(ledger, ShapeError, call, group)
    for call in (ledger.finish, ledger.abort, ledger.retract, lambda row: ledger.trim(row, 3)):
        for other in (0, -1, 2, 99, 2**80, None):
            refuses(ledger, ShapeError, call, other)
    for length in (-1, 2**80, 1.5):
        refuses(ledger, ShapeError, ledger.trim, row, length)
    for call in (ledger.launch, ledger.complete, ledger.cancel, ledger.take_delta):
        for step in (0, 9, -1, 2**80, "1"):
            refuses(ledger, OrderError, call, step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rows": 0}, "num_rows must be in"),
        ({"num_rows": 2**24 + 1}, r"num_rows must be in \[1, 16777216\]"),
        ({"num_rows": 10**30}, "64 bits"),
        ({"max_context_len": 1}, "max_context_len must be in"),
        ({"overlap_depth": -1}, "overlap_depth must be in"),
        ({"max_batch": 4}, r"max_batch must be in \[1, 3\], got 4"),
        ({"policy": "greedy"}, "'exact' or 'double_buffer', got 'greedy'"),
        ({"row_width": [64]}, "row_width must be at least 68 .* got 64"),
        ({"row_width": [70]}, "multiple of page_size 4, got 70"),
        ({"row_width": [68, 68]}, "row_width has 2 entries for 1 groups"),
    ],
)
def test_impossible_ledgers(options, message):
    group = Group("kv", page_size=4, num_pages=100, hosts_drafts=True)
    build = {"num_rows": 3, "max_context_len": 64, **options}
    with pytest.raises(ConfigError, match=message):
        Ledger([group], [CHAIN], **build)


def test_the_widest_batch_of_branches_stays_below_2_to_the_31():
    group = Group("kv", page_size=4, num_pages=100, hosts_drafts=True)
    build = {"num_rows": 2**24, "max_context_len": 64}
    message = r"max_batch 16777216 \* topk 2 \* row_width 68 is 2281701376, must be below 2\^31"
    with pytest.raises(ConfigError, match=message):
        Ledger([group], [Shape.eagle(2, 2, 4)], **build)
    Ledger([group], [Shape.eagle(2, 2, 4)], max_batch=8, **build)


def test_a_page_table_has_fewer_than_2_to_the_31_cells():
    group = Group("kv", page_size=1, num_pages=1000)
    with pytest.raises(ConfigError, match="page table of 16777216 \\+ 1 rows of 203 pages"):
        Ledger([group], [CHAIN], num_rows=2**24, max_context_len=200, max_batch=1)


def test_impossible_groups():
    for page_size in (0, -4, 2**32, 2**80):
        with pytest.raises(ConfigError):
            Group("kv", page_size=page_size, num_pages=4)
    with pytest.raises(ConfigError, match="num_pages must be at least 1, got 0"):
        Group("kv", page_size=4, num_pages=0)
    with pytest.raises(ConfigError, match=r"\(num_pages 2147483648 \+ 1\) \* page_size 1"):
        Group("kv", page_size=1, num_pages=2**31)
    with pytest.raises(ConfigError, match="'dense' or 'holey', got 'auto'"):
        Group("kv", page_size=4, num_pages=4, layout="auto")
    small = Group("kv", page_size=4, num_pages=15, hosts_drafts=True)
    with pytest.raises(ConfigError, match="at least 17, the pages of one row of 68 slots, got 15"):
        Ledger([small], [CHAIN], num_rows=1, max_context_len=64)
    with pytest.raises(ConfigError, match="two groups are called"):
        Ledger([small, small], [CHAIN], num_rows=1, max_context_len=20)
    with pytest.raises(ConfigError, match="at least one group"):
        Ledger([], [CHAIN], num_rows=1, max_context_len=20)


def test_the_widest_pool_is_built_without_being_touched():
    group = Group("kv", page_size=1, num_pages=2**31 - 2)
    ledger = Ledger([group], [CHAIN], num_rows=2, max_context_len=100)
    assert ledger.free_pages(0) == 2**31 - 2


def test_shape_0_is_always_first():
    assert make(CHAIN).shapes == [Shape.none(), CHAIN]
    assert make(CHAIN, Shape.none()).shapes == [Shape.none(), CHAIN]


def test_all_or_nothing_over_batch_and_groups():
    """A claim is checked in every group before any is touched (sgl#22406)."""
    large = Group("target", page_size=4, num_pages=100)
    small = Group("draft", page_size=4, num_pages=17, hosts_drafts=True)
    ledger = Ledger([large, small], [CHAIN], num_rows=3, max_context_len=64)
    rows = [ledger.admit() for _ in range(3)]
    error = refuses(ledger, OutOfPages, ledger.prepare_extend, rows, [24, 24, 24])
    assert (error.group, error.need, error.free, error.fenced) == ("draft", 18, 17, 0)
    plan = ledger.prepare_extend(rows, [24, 24, 20])
    ledger.launch(plan.step)
    assert ledger.free_pages(1) == 0
    error = refuses(ledger, OutOfPages, ledger.prepare_decode, rows, [1, 1, 1])
    assert (error.group, error.need, error.free) == ("draft", 3, 0)
    for row in rows:
        ledger.finish(row)
    ledger.complete(plan.step)
    assert_all_back(ledger)


# --- The verbs' refusals (the table of docs/contract.md, The ledger), each changing nothing ---


def test_decode_waits_for_a_root():
    ledger = make()
    row = ledger.admit()
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1], match="no root")
    plan = ledger.prepare_extend([row], [5])
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])
    ledger.launch(plan.step)
    ledger.prepare_decode([row], [1])


def test_pages_needed_refuses_what_no_round_can_start_from():
    ledger = make(context=10)
    assert ledger.pages_needed(3, 9, 1).tolist() == [4]  # 9 + 4 slots on pages of 4
    for lo, hi in ((-1, 3), (4, 3), (3, 10)):
        match = rf"roots \[{lo}, {hi}\] must be a range inside \[0, 10\)"
        refuses(ledger, ShapeError, ledger.pages_needed, lo, hi, 1, match=match)
    for shape in (-1, 2):
        refuses(ledger, ShapeError, ledger.pages_needed, 3, 9, shape, match=f"shape {shape} is not")
    for at, name in enumerate(("lo", "hi", "shape")):
        for bad in (2**31, 2**80, 1.5, "3", None):
            arguments = [3, 9, 1]
            arguments[at] = bad
            refuses(
                ledger,
                ShapeError,
                ledger.pages_needed,
                *arguments,
                match=f"{name} must be an int32",
            )


def test_context_end_lists_every_row():
    ledger = make(context=10)
    rows = [prefill(ledger, length) for length in (10, 9, 10)]
    error = refuses(ledger, ContextEnd, ledger.prepare_decode, rows, [1, 1, 1])
    assert error.rows == [rows[0], rows[2]]
    error = refuses(ledger, ContextEnd, ledger.prepare_extend, [rows[1]], [11])
    assert error.rows == [rows[1]]
    end(ledger, start(ledger, rows[1]), 4)
    assert ledger.resolved_len[rows[1]] == 13


def test_depth_counts_rounds_in_flight():
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 5)
    first, _second = start(ledger, row), start(ledger, row)
    refuses(ledger, OrderError, ledger.prepare_decode, [row], [1], match="2 rounds in flight")
    ledger.resolve(first, [1])
    start(ledger, row)


def test_resolve_refuses_what_is_out_of_order_or_range():
    ledger = make(overlap_depth=1)
    row, other = prefill(ledger, 5), prefill(ledger, 5)
    first = ledger.prepare_decode([row], [1]).step
    refuses(ledger, OrderError, ledger.resolve, first, [1], match="not launched")
    ledger.launch(first)
    second = start(ledger, row)
    beside = start(ledger, other)
    refuses(ledger, OrderError, ledger.resolve, second, [1], match=f"oldest .* step {first}")
    for bad in ([0], [5], [-1]):
        refuses(ledger, ShapeError, ledger.resolve, first, bad, match=r"\[1, 4\]")
    refuses(ledger, ShapeError, ledger.resolve, first, [1, 1], match="1 lanes, 2 accept_lens")
    ledger.resolve(beside, [1])
    ledger.resolve(first, [4])
    refuses(ledger, OrderError, ledger.resolve, first, [4], match="already resolved")
    ledger.resolve(second, [1])
    plan = ledger.prepare_extend([row], [20])
    ledger.launch(plan.step)
    refuses(ledger, OrderError, ledger.resolve, plan.step, [1], match="nothing to resolve")
    ledger.complete(plan.step)
    refuses(ledger, OrderError, ledger.resolve, second, [1], match="no such step")


def test_complete_covers_older_steps_and_needs_a_launch():
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 5)
    first, second = start(ledger, row), start(ledger, row)
    third = ledger.prepare_extend([prefill(ledger, 5)], [9]).step
    refuses(ledger, OrderError, ledger.complete, third, match="not launched")
    ledger.complete(second)
    ledger.complete(first)
    ledger.finish(row)
    assert ledger.fenced_pages(0) == 0


def test_complete_refuses_a_cancelled_step_also_below_what_is_complete():
    ledger = make()
    row, other = prefill(ledger, 5), prefill(ledger, 5)
    launched, cancelled = {1, 2}, set()
    for _ in range(3):  # Each turn cancels two steps, newest first, and one prepared behind them.
        first = ledger.prepare_decode([row], [1]).step
        second = ledger.prepare_decode([other], [1]).step
        ledger.cancel(second)
        third = ledger.prepare_decode([other], [1]).step
        for step in (third, first):
            ledger.cancel(step)
        cancelled |= {first, second, third}
        step = start(ledger, row)
        end(ledger, step, 1)
        launched.add(step)
    for step in sorted(launched | cancelled):
        if step in launched:
            ledger.complete(step)
        else:
            refuses(ledger, OrderError, ledger.complete, step, match="it was cancelled")


def test_cancel_restores_and_only_the_newest():
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 5)
    before = state(ledger)
    plan = ledger.prepare_decode([row], [1])
    newer = ledger.prepare_decode([row], [0], writes_draft=False)
    refuses(ledger, OrderError, ledger.cancel, plan.step, match=f"newest .* is {newer.step}")
    ledger.cancel(newer.step)
    ledger.cancel(plan.step)
    assert state(ledger) == before
    extending = ledger.prepare_extend([row], [30])
    ledger.cancel(extending.step)
    assert state(ledger) == before
    step = start(ledger, row)
    refuses(ledger, OrderError, ledger.cancel, step)
    assert step > extending.step


def test_a_cancel_after_an_older_round_resolved_keeps_its_tokens():
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 5)
    first = start(ledger, row)
    newer = ledger.prepare_decode([row], [1])
    ledger.resolve(first, [3])
    ledger.cancel(newer.step)
    assert (ledger.resolved_len[row], ledger.in_flight[row]) == (8, 0)
    ledger.check()


def test_one_unlaunched_extend_a_row():
    ledger = make()
    row = prefill(ledger, 5)
    ledger.prepare_extend([row], [9])
    refuses(ledger, NotReady, ledger.prepare_extend, [row], [12], match="not launched")


def test_trim_cuts_every_length_and_frees_the_tail():
    ledger = make()
    row = prefill(ledger, 14)
    end(ledger, start(ledger, row), 4)
    assert ledger.allocated_len(0)[row] == 20
    assert ledger.trim(row, 9) == 9
    assert (ledger.resolved_len[row], ledger.drafted_len[row], ledger.epoch[row]) == (9, 9, 1)
    assert ledger.allocated_len(0)[row] == 12
    assert ledger.page_table(0)[row].tolist() == [1, 2, 3] + [0] * (ledger.pages_per_row(0) - 3)
    assert ledger.trim(row, 100) == 9
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])
    extend(ledger, row, 10)
    end(ledger, start(ledger, row), 1)
    assert ledger.trim(row, 0) == 0
    ledger.finish(row)
    assert_all_back(ledger)


def test_admit_runs_out_of_rows():
    ledger = make(num_rows=1)
    row = ledger.admit()
    error = refuses(ledger, OutOfRows, ledger.admit)
    assert (error.num_rows, error.fenced) == (1, 0)
    ledger.finish(row)
    assert ledger.admit() == row
    assert ledger.epoch[row] == 1


def test_a_released_row_reads_zero():
    ledger = make()
    row = prefill(ledger, 9)
    step = start(ledger, row)
    ledger.retract(row)
    for lengths in (ledger.resolved_len, ledger.in_flight, ledger.drafted_len):
        assert lengths[row] == 0
    assert ledger.kv_committed_len[row] == ledger.allocated_len(0)[row] == 0
    end(ledger, step, 99)
    assert_all_back(ledger)


# --- Draft cursor ---


def test_draft_lag_from_prepare_on_until_caught_up():
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 5)
    step = start(ledger, row, shape=0, writes_draft=False)
    error = refuses(ledger, DraftLag, ledger.prepare_decode, [row], [1])
    assert (error.row, error.drafted) == (row, 5)
    end(ledger, step, 1)
    assert (ledger.resolved_len[row], ledger.drafted_len[row]) == (6, 5)
    refuses(ledger, DraftLag, ledger.prepare_decode, [row], [1])
    end(ledger, start(ledger, row, shape=0), 1)
    assert ledger.drafted_len[row] == 5
    assert ledger.trim(row, 5) == 5
    extend(ledger, row, 7)
    assert ledger.drafted_len[row] == 7
    start(ledger, row)


def test_shape_0_rounds_that_write_draft_kv_keep_drafting_open():
    ledger = make()
    row = prefill(ledger, 5)
    for _ in range(20):
        end(ledger, start(ledger, row, shape=0), 1)
    assert ledger.drafted_len[row] == 25
    start(ledger, row)


def test_an_extend_moves_the_cursor_only_from_its_own_end():
    ledger = make()
    row = ledger.admit()
    ledger.launch(ledger.prepare_extend([row], [5], writes_draft=False).step)
    assert ledger.drafted_len[row] == 0
    ledger.launch(ledger.prepare_extend([row], [8]).step)
    assert ledger.drafted_len[row] == 0


@pytest.mark.parametrize("writes_draft", [True, False])
def test_a_cut_that_counts_roots_moves_the_cursor_if_they_were_drafted(writes_draft):
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 5)
    start(ledger, row, shape=0, writes_draft=writes_draft)
    assert ledger.trim(row, 9) == 6
    assert ledger.drafted_len[row] == (6 if writes_draft else 5)


def test_without_draft_kv_nothing_lags():
    ledger = make(draft_kv=False)
    row = prefill(ledger, 5)
    end(ledger, start(ledger, row, shape=0, writes_draft=False), 1)
    start(ledger, row)


# --- The audit ---


def test_the_audit_reports_what_is_broken():
    ledger = make()
    row = prefill(ledger, 9, tag="request-7")
    poke(ledger.page_table(0), (row, 1), 40)
    with pytest.raises(CorruptState, match=r"column 1 of group kv is page 40, .* free") as caught:
        ledger.check()
    assert "request-7" in str(caught.value)
    leaked = "page 2 of group kv: 0 holders and 0 copies, the pool counts 1 and 0"
    assert leaked in str(caught.value)
    with pytest.raises(PageStateError, match="page 40 of group kv is free") as refused:
        ledger.finish(row)
    assert (refused.value.page, refused.value.state) == (40, "free")
    assert ledger.resolved_len[row] == 9


# --- What errors state ---


def states(error: Exception, **expected) -> None:
    """The attributes are these, and the message holds the same values."""
    assert vars(error) == expected
    for value in expected.values():
        assert str(value) in str(error)


def test_errors_state_their_numbers_as_attributes():
    ledger = make(num_rows=2, num_pages=17)
    row, other = prefill(ledger, 40), prefill(ledger, 20, tag="request-7")
    step = start(ledger, other)
    ledger.trim(other, 9)
    error = refuses(ledger, OutOfPages, ledger.prepare_extend, [row], [64])
    states(error, group="kv", need=6, free=1, cached=0, fenced=3, reclaimable=0)
    error = refuses(ledger, OutOfRows, ledger.admit)
    states(error, num_rows=2, fenced=0)
    error = refuses(ledger, ContextEnd, ledger.prepare_extend, [row], [65])
    states(error, rows=[row])
    end(ledger, step, 1)
    end(ledger, start(ledger, row, shape=0, writes_draft=False), 1)
    error = refuses(ledger, DraftLag, ledger.prepare_decode, [row], [1])
    states(error, row=row, drafted=40, resolved=41)
    stale = ledger.prepare_decode([row], [0]).step
    ledger.trim(row, 30)
    error = refuses(ledger, StalePlan, ledger.launch, stale)
    states(error, step=stale, row=row)
    ledger.cancel(stale)
    poke(ledger.page_table(0), (row, 1), 17)
    with pytest.raises(PageStateError) as caught:
        ledger.finish(row)
    states(caught.value, page=17, state="free", owner=caught.value.owner)


def test_a_row_overflow_states_its_numbers():
    ledger = make()
    row = prefill(ledger, 9)
    poke(ledger.allocated_len(0), (row,), 72)  # No public call can bring it about.
    with pytest.raises(RowOverflow) as caught:
        ledger.prepare_decode([row], [1])
    states(caught.value, group="kv", row=row, need=13, width=68)
