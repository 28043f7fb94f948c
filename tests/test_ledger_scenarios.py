"""Failures that real engines had, by their number in the regression list: each test proves a guard.

`sgl#N` is sgl-project/sglang, `vllm#N` vllm-project/vllm, `trt#N` NVIDIA/TensorRT-LLM. Scenarios 4
and 8 have tests beside the audit in Rust too, which can plant what no public call can.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import reference
from ledger_kit import assert_all_back, end, extend, make, prefill, refuses, start, state
from specpool import (
    ConfigError,
    ContextEnd,
    Ledger,
    NotReady,
    OrderError,
    OutOfPages,
    OutOfRows,
    Shape,
    ShapeError,
    StalePlan,
)


def test_scenario_01_paged_rounds_leave_no_page_behind():
    """jax#1147: a finish frees all that is allocated, not only what is committed."""
    ledger = make(page_size=64, context=256)
    row = prefill(ledger, 100)
    for accept_len in (1, 4, 2, 3, 1):
        end(ledger, start(ledger, row), accept_len)
    assert ledger.allocated_len(0)[row] > reference.ceil_align(ledger.resolved_len[row], 64) - 64
    ledger.finish(row)
    assert_all_back(ledger)


def test_scenario_02_a_late_result_after_retract_is_dropped():
    """sgl#11970: the row's epoch moved, its lane is not read, nothing is freed twice."""
    ledger = make(page_size=1, overlap_depth=1)
    row = prefill(ledger, 7)
    step = start(ledger, row)
    ledger.retract(row)
    ledger.resolve(step, [-5])
    ledger.complete(step)
    assert_all_back(ledger)
    refuses(ledger, OrderError, ledger.resolve, step, [1])


def test_scenario_03_allocated_is_always_whole_pages():
    """sgl#31616: 200 rounds, retracts at random."""
    rng = random.Random(3)
    ledger = make(page_size=32, context=900, num_rows=1, overlap_depth=1)
    row = prefill(ledger, 33)
    for accept_len in (1, 3, 2, 4) * 50:
        step = start(ledger, row)
        assert ledger.allocated_len(0)[row] % 32 == 0
        if rng.random() < 0.05:
            ledger.retract(row)
            end(ledger, step, accept_len)
            row = prefill(ledger, 33)
        else:
            end(ledger, step, accept_len)
    ledger.finish(row)
    assert_all_back(ledger)


def test_scenario_04_generation_to_the_context_end():
    """sgl#26972: the row holds every claim up to the last token; a narrower row is refused."""
    shape = Shape.eagle(5, 8, 60)
    ledger = make(shape, page_size=64, context=2048, num_rows=2, layout="holey")
    width = ledger.row_width(0)
    with pytest.raises(ConfigError, match=f"at least {width} .* got {width - 64}"):
        Ledger(ledger.groups, [shape], num_rows=2, max_context_len=2048, row_width=[width - 64])
    row, neighbour = prefill(ledger, 1900), prefill(ledger, 10)
    pages = ledger.full_table(0)[neighbour].tolist()
    while ledger.resolved_len[row] < 2048:
        end(ledger, start(ledger, row), 1)
        assert ledger.allocated_len(0)[row] <= width
    assert ledger.full_table(0)[neighbour].tolist() == pages
    refuses(ledger, ContextEnd, ledger.prepare_decode, [row], [1])
    ledger.finish(row)
    ledger.finish(neighbour)
    assert_all_back(ledger)


def test_scenario_05_pages_of_one_reach_the_context_end_under_overlap():
    """sgl#33579: the row's width has no gate on the page size."""
    ledger = make(Shape.eagle(4, 4, 17), page_size=1, context=100, num_rows=1, overlap_depth=1)
    row = prefill(ledger, 90)
    flying = [start(ledger, row)]
    while True:
        try:
            flying.append(start(ledger, row))
        except ContextEnd:
            break
        ledger.resolve(flying.pop(0), [5])
    assert ledger.resolved_len[row] >= 100
    ledger.finish(row)
    ledger.complete(flying[-1])
    assert_all_back(ledger)


def test_scenario_07_a_row_never_shows_an_earlier_owners_pages():
    """sgl#35401: cells behind the allocated pages are 0."""
    ledger = make(page_size=16, num_rows=1)
    ledger.finish(prefill(ledger, 32))
    row = prefill(ledger, 17)
    ledger.trim(row, 3)
    assert np.count_nonzero(ledger.page_table(0)[row]) == 1
    extend(ledger, row, 17)
    assert np.count_nonzero(ledger.page_table(0)[row]) == 2


def test_scenario_09_a_narrower_shape_takes_nothing_and_gives_nothing_back():
    """sgl#23336: the estimate is never negative, allocated shrinks only through a cut."""
    wide, narrow = Shape.eagle(7, 1, 8), Shape.eagle(1, 1, 2)
    for policy in ("exact", "double_buffer"):
        ledger = make(wide, narrow, page_size=1, overlap_depth=1, policy=policy)
        row = prefill(ledger, 10)
        start(ledger, row, shape=1)
        held = int(ledger.allocated_len(0)[row])
        assert ledger.tokens_required([row], [2])[0] >= 0
        start(ledger, row, shape=0)
        assert ledger.allocated_len(0)[row] >= held


def test_scenario_10_a_wider_shape_reckons_with_the_narrow_round_in_flight():
    """sgl#24055: the reserve covers the old width in flight and the new one behind it."""
    narrow, wide = Shape.eagle(1, 1, 2), Shape.eagle(7, 1, 8)
    ledger = make(narrow, wide, page_size=1, overlap_depth=1)
    row = prefill(ledger, 10)
    first = start(ledger, row, shape=1)
    plan = ledger.prepare_decode([row], [2])
    assert (plan.lo[0], plan.hi[0]) == (11, 12)
    assert ledger.allocated_len(0)[row] == 12 + 8
    ledger.launch(plan.step)
    ledger.retract(row)
    ledger.resolve(first, [2])
    ledger.resolve(plan.step, [8])
    ledger.complete(plan.step)
    assert_all_back(ledger)


def test_scenario_23_a_row_is_not_reused_before_its_fence():
    """sgl#18803."""
    ledger = make(num_rows=1)
    row = prefill(ledger, 5)
    step = start(ledger, row)
    ledger.finish(row)
    error = refuses(ledger, OutOfRows, ledger.admit)
    assert error.fenced == 1
    ledger.complete(step)
    assert ledger.admit() == row


def test_scenario_24_a_page_is_not_reused_before_its_fence():
    """sgl#35049, and with no round in flight: a late prefill still writes."""
    ledger = make(num_pages=17)
    row, other = ledger.admit(), ledger.admit()
    step = ledger.prepare_extend([row], [60]).step
    ledger.launch(step)
    ledger.finish(row)
    assert (ledger.free_pages(0), ledger.fenced_pages(0)) == (2, 15)
    assert ledger.page_record(0, 1) == ("fenced", row, step, "finish")
    error = refuses(ledger, OutOfPages, ledger.prepare_extend, [other], [60])
    assert (error.need, error.free, error.fenced) == (15, 2, 15)
    ledger.complete(step)
    ledger.prepare_extend([other], [60])


def test_scenario_25_the_reserve_covers_the_device_one_verify_ahead():
    """trt#16280: prompts around a page edge; every slot that the device may write is mapped."""
    S, K, N = 3, 2, 6
    for layout in ("dense", "holey"):
        for length in range(4 * 4 - 1, 4 * 4 + N + 1):
            ledger = make(Shape(S, K, N), layout=layout, overlap_depth=1)
            row = prefill(ledger, length)
            start(ledger, row)
            plan = ledger.prepare_decode([row], [1])
            for root in range(length + 1, length + S + 2):
                assert plan.lo[0] <= root <= plan.hi[0]
                last = reference.footprint(root, 4, S, K, N, layout=layout) - 1
                assert ledger.page_table(0)[row, last // 4] != 0


def test_scenario_31_growth_over_several_pages_in_one_step():
    """ATOM#250: the claim counts pages, it is no boolean."""
    ledger = make(Shape.eagle(8, 1, 9))
    row = prefill(ledger, 4)
    assert ledger.tokens_required([row], [1]).tolist() == [12]
    start(ledger, row)
    assert ledger.allocated_len(0)[row] == 16


def test_scenario_51_a_fenced_victim_comes_back_by_draining():
    """vllm#49674: fenced pages are counted apart, so nobody retracts a second victim."""
    ledger = make(num_rows=2, num_pages=17)
    keep, victim = prefill(ledger, 31), prefill(ledger, 31)
    step = start(ledger, victim)
    error = refuses(ledger, OutOfPages, ledger.prepare_decode, [keep], [1])
    assert (error.need, error.free, error.fenced) == (1, 0, 0)
    ledger.retract(victim)
    error = refuses(ledger, OutOfPages, ledger.prepare_decode, [keep], [1])
    assert (error.need, error.free, error.fenced) == (1, 0, 9)
    end(ledger, step, 1)
    end(ledger, start(ledger, keep), 1)
    ledger.finish(keep)
    assert_all_back(ledger)


def test_scenario_52_a_stale_plan_is_never_launched():
    ledger = make(num_pages=17)
    row = prefill(ledger, 20)
    plan = ledger.prepare_decode([row], [1])
    ledger.retract(row)
    error = refuses(ledger, StalePlan, ledger.launch, plan.step)
    assert (error.step, error.row) == (plan.step, row)
    owner = ledger.admit()
    refuses(
        ledger, NotReady, ledger.prepare_extend, [owner], [5], match=f"step {plan.step} is stale"
    )
    ledger.cancel(plan.step)
    extend(ledger, owner, 60)
    ledger.finish(owner)
    assert_all_back(ledger)


def test_scenario_53_each_round_in_flight_counts_with_its_own_shape():
    """r=1, a round of A=2 in flight, then shape 0: the device may write position 3."""
    ledger = make(Shape.eagle(1, 1, 2), page_size=1, overlap_depth=1)
    row = prefill(ledger, 1)
    start(ledger, row)
    plan = ledger.prepare_decode([row], [0])
    assert (plan.lo[0], plan.hi[0]) == (2, 3)
    assert ledger.allocated_len(0)[row] == 4


def test_scenario_54_trim_counts_the_roots_that_launched_rounds_wrote():
    ledger = make(overlap_depth=2)
    row = prefill(ledger, 10)
    launched, second = start(ledger, row), start(ledger, row)
    waiting = ledger.prepare_decode([row], [1])
    assert ledger.trim(row, 99) == 12
    assert (ledger.resolved_len[row], ledger.in_flight[row]) == (12, 0)
    ledger.check()
    refuses(ledger, StalePlan, ledger.launch, waiting.step)
    ledger.cancel(waiting.step)
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])
    ledger.resolve(launched, [4])
    ledger.resolve(second, [4])
    assert ledger.resolved_len[row] == 12
    extend(ledger, row, 13)
    start(ledger, row)


def test_scenario_54_trim_does_not_count_an_unlaunched_extend():
    ledger = make()
    row = prefill(ledger, 10)
    plan = ledger.prepare_extend([row], [30])
    assert ledger.trim(row, 99) == 10
    ledger.cancel(plan.step)
    assert (ledger.resolved_len[row], ledger.allocated_len(0)[row]) == (10, 12)
    ledger.check()


def apply(delta, table: np.ndarray) -> None:
    rows, columns, pages = delta
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == len(rows)
    table[rows, columns] = pages


def test_scenario_57_one_entry_a_cell_and_no_delta_is_lost():
    ledger = make(num_rows=1)
    device = ledger.full_table(0)
    row = prefill(ledger, 5)
    ledger.finish(row)
    assert ledger.admit() == row
    step = ledger.prepare_extend([row], [5]).step
    first, again = ledger.take_delta(step)[0], ledger.take_delta(step)[0]
    assert [array.tolist() for array in first] == [array.tolist() for array in again]
    apply(first, device)
    assert (device == ledger.page_table(0)).all()
    ledger.cancel(step)
    step = ledger.prepare_extend([row], [9]).step
    ledger.launch(step)
    apply(ledger.take_delta(step)[0], device)
    assert (device == ledger.page_table(0)).all()
    ledger.ack_delta(step)
    refuses(ledger, OrderError, ledger.ack_delta, step)
    assert [array.size for array in ledger.take_delta(step)[0]] == [0, 0, 0]


def test_scenario_58_fewer_nodes_than_depth_bound_the_accept_len():
    shape = Shape(2, 2, 2)
    assert shape.max_accept_len == 2
    ledger = make(shape, page_size=1)
    row = prefill(ledger, 3)
    step = start(ledger, row)
    refuses(ledger, ShapeError, ledger.resolve, step, [3], match=r"\[1, 2\], got 3")
    ledger.resolve(step, [2])


def test_scenario_59_a_late_prefill_fences_without_a_round():
    ledger = make(num_rows=2, num_pages=17)
    row, other = ledger.admit(), ledger.admit()
    step = ledger.prepare_extend([row], [40]).step
    ledger.launch(step)
    ledger.trim(row, 4)
    assert ledger.fenced_pages(0) == 9
    refuses(ledger, OutOfPages, ledger.prepare_extend, [other], [40])
    ledger.complete(step)
    ledger.prepare_extend([other], [40])


def test_scenario_62_out_of_pages_at_the_nth_page_changes_nothing():
    for free in range(6):
        ledger = make(num_pages=30)
        fillers = [prefill(ledger, 64), prefill(ledger, 4 * (14 - free))]
        row = ledger.admit()
        error = refuses(ledger, OutOfPages, ledger.prepare_extend, [row], [24])
        assert (error.need, error.free) == (6, free)
        for filler in fillers:
            ledger.finish(filler)
        extend(ledger, row, 24)
        ledger.finish(row)
        assert_all_back(ledger)


def test_scenario_63_launch_in_step_order_only():
    ledger = make()
    row, other = prefill(ledger, 5), prefill(ledger, 5)
    first = ledger.prepare_decode([row], [1]).step
    second = ledger.prepare_decode([other], [1]).step
    refuses(ledger, OrderError, ledger.launch, second, match=f"next step to launch is {first}")
    ledger.launch(first)
    ledger.launch(second)
    refuses(ledger, OrderError, ledger.launch, second)


def test_scenario_64_a_round_never_launched_fences_nothing():
    ledger = make()
    row = prefill(ledger, 5)
    plan = ledger.prepare_decode([row], [1])
    ledger.abort(row)
    assert ledger.fenced_pages(0) == 0
    ledger.cancel(plan.step)
    assert_all_back(ledger)


def test_scenario_65_a_stale_step_is_cancelled_and_blocks_nobody():
    ledger = make(overlap_depth=1)
    gone, stays = prefill(ledger, 5), prefill(ledger, 6)
    before = ledger.allocated_len(0)[stays]
    stale = ledger.prepare_decode([gone, stays], [1, 1]).step
    behind = ledger.prepare_decode([stays], [1]).step
    ledger.abort(gone)
    refuses(ledger, StalePlan, ledger.launch, stale)
    refuses(ledger, OrderError, ledger.launch, behind)
    refuses(ledger, OrderError, ledger.cancel, stale)
    refuses(ledger, NotReady, ledger.prepare_decode, [stays], [1])
    ledger.cancel(behind)
    refuses(ledger, NotReady, ledger.prepare_decode, [stays], [1])
    ledger.cancel(stale)
    assert (ledger.in_flight[stays], ledger.allocated_len(0)[stays]) == (0, before)
    ledger.check()
    end(ledger, start(ledger, stays), 2)
    ledger.finish(stays)
    assert_all_back(ledger)


def test_scenario_66_no_extend_over_a_round_in_flight():
    ledger = make()
    row = prefill(ledger, 10)
    step = start(ledger, row)
    refuses(ledger, NotReady, ledger.prepare_extend, [row], [14], match="1 rounds in flight")
    end(ledger, step, 3)
    extend(ledger, row, 14)


def test_scenario_67_at_most_one_unlaunched_extend_and_cancel_restores_it():
    ledger = make()
    row = prefill(ledger, 8)
    before = state(ledger)
    plan = ledger.prepare_extend([row], [16])
    refuses(ledger, NotReady, ledger.prepare_extend, [row], [20])
    ledger.cancel(plan.step)
    assert state(ledger) == before


def test_scenario_68_an_acknowledgement_drops_only_what_it_delivered():
    """A cell goes page -> 0 -> the same page between a take and its acknowledgement."""
    ledger = make()
    row, other = prefill(ledger, 4), prefill(ledger, 1)
    device = ledger.full_table(0)
    older = ledger.prepare_extend([row], [5]).step
    page = ledger.page_table(0)[row, 1]
    apply(ledger.take_delta(older)[0], device)
    ledger.cancel(older)
    newer = ledger.prepare_decode([other], [0]).step
    apply(ledger.take_delta(newer)[0], device)
    assert device[row, 1] == 0
    last = ledger.prepare_extend([row], [5]).step
    assert ledger.page_table(0)[row, 1] == page
    ledger.ack_delta(older)
    apply(ledger.take_delta(last)[0], device)
    assert device[row, 1] == page
    assert (device == ledger.page_table(0)).all()


def test_scenario_77_a_cancel_gives_pages_back_at_once_and_an_extend_counts_what_is_held():
    ledger = make()
    row = prefill(ledger, 6)
    start(ledger, row)
    free = ledger.free_pages(0)
    other = ledger.admit()
    plan = ledger.prepare_extend([other], [30])
    ledger.cancel(plan.step)
    assert (ledger.free_pages(0), ledger.fenced_pages(0)) == (free, 0)
    fresh = make()
    row = prefill(fresh, 6)
    end(fresh, start(fresh, row), 1)
    assert fresh.allocated_len(0)[row] == 12
    free = fresh.free_pages(0)
    fresh.prepare_extend([row], [12])
    assert fresh.free_pages(0) == free
