"""Regression scenarios about claims: what a step needs, and that it takes that or nothing.

Each test is named after its row in docs/failures.md and says which law it checks; `guards.py`
removes that law's guard and requires the test to fail. `sgl#N` is sgl-project/sglang, `trt#N`
NVIDIA/TensorRT-LLM, `jax#N` sgl-project/sglang-jax.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import reference
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
    Group,
    Ledger,
    OutOfPages,
    RowOverflow,
    Shape,
    ShapeError,
    _core,
)


@pytest.mark.parametrize(
    ("prompt", "accept_lens", "committed", "allocated"),
    [(100, (1, 4, 2, 3, 1), 128, 128), (112, (4, 4, 4, 1, 1), 128, 192)],
)
def test_scenario_01_a_finish_frees_all_that_is_allocated(
    prompt, accept_lens, committed, allocated
):
    """jax#1147.

    Law: A release gives back everything allocated, not only what is committed.
    """
    ledger = make(page_size=64, context=256)
    row = prefill(ledger, prompt)
    for accept_len in accept_lens:
        end(ledger, start(ledger, row), accept_len)
    assert reference.ceil_align(int(ledger.resolved_len[row]), 64) == committed
    assert ledger.allocated_len(0)[row] == allocated
    ledger.finish(row)
    assert_all_back(ledger)


def test_scenario_03_allocated_is_always_whole_pages():
    """sgl#31616, 200 rounds with retracts at random.

    Law: `allocated_len` is always a multiple of P.
    """
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
    """sgl#26972.

    Law: The row has room for every claim up to the last token; a narrower row is refused.
    """
    shape = Shape.eagle(5, 8, 60)
    ledger = make(shape, page_size=64, context=2048, num_rows=2, layout="holey")
    width = ledger.row_width(0)
    with pytest.raises(ConfigError, match=f"at least {width} .* got {width - 64}"):
        Ledger(ledger.groups, [shape], num_rows=2, max_context_len=2048, row_width=[width - 64])
    row, neighbour = prefill(ledger, 1900), prefill(ledger, 10)
    pages = ledger.full_table(0)[neighbour].tolist()
    widest = 0
    while ledger.resolved_len[row] < 2048:
        end(ledger, start(ledger, row), 1)
        widest = max(widest, int(ledger.allocated_len(0)[row]))
    assert widest == width
    assert ledger.full_table(0)[neighbour].tolist() == pages
    refuses(ledger, ContextEnd, ledger.prepare_decode, [row], [1])
    ledger.finish(row)
    ledger.finish(neighbour)
    assert_all_back(ledger)


def test_scenario_04_a_claim_past_the_row_raises_before_any_mutation():
    """sgl#26972.

    Law: A claim past the row width raises before any change, with row, need and width.
    """
    ledger = make()
    row = prefill(ledger, 9)
    pages, free = ledger.full_table(0).tolist(), ledger.free_pages(0)
    poke(ledger.allocated_len(0), (row,), 72)
    with pytest.raises(RowOverflow) as caught:
        ledger.prepare_decode([row], [1])
    assert (caught.value.row, caught.value.need, caught.value.width) == (row, 13, 68)
    assert (ledger.full_table(0).tolist(), ledger.free_pages(0)) == (pages, free)
    assert (ledger.in_flight[row], ledger.steps()) == (0, [])


@pytest.mark.parametrize(("policy", "width"), [("exact", 121), ("double_buffer", 134)])
def test_scenario_05_pages_of_one_reach_the_context_end_under_overlap(policy, width):
    """sgl#33579, a reserve of 2N in a headroom of 4 + N.

    Law: The row width derives from the reserve, at every page size and policy.
    """
    tree = (4, 4, 17)
    assert _core.sizing_row_headroom(page_size=1, num_steps=4, topk=4, num_draft_tokens=17) == 21
    ledger = make(
        Shape.eagle(*tree), page_size=1, context=100, num_rows=1, overlap_depth=1, policy=policy
    )
    assert ledger.row_width(0) == width
    row = prefill(ledger, 90)
    flying = [start(ledger, row)]
    while True:
        try:
            flying.append(start(ledger, row))
        except ContextEnd:
            break
        ledger.resolve(flying.pop(0), [1])
    assert ledger.resolved_len[row] == 100
    ledger.finish(row)
    ledger.complete(flying[-1])
    assert_all_back(ledger)


def test_scenario_06_headroom_uses_the_allocators_page():
    """sgl#35424, a kernel's page of 64 beside an allocator's of 64 * 2.

    Law: A group's reserve and row width use that group's page size.
    """
    tree = (3, 4, 8)
    groups = [
        Group("kernel", page_size=64, num_pages=100, hosts_drafts=True, layout="holey"),
        Group("allocator", page_size=128, num_pages=100, hosts_drafts=True, layout="holey"),
    ]
    ledger = Ledger(groups, [Shape.eagle(*tree)], num_rows=1, max_context_len=300)
    for at, P in enumerate((64, 128)):
        needs = [reference.footprint(s, P, *tree) for s in range(1, 300)]
        assert ledger.row_width(at) == reference.ceil_align(max(needs), P)
    row = prefill(ledger, 200)
    while ledger.resolved_len[row] < 300:
        step = start(ledger, row)
        for at, P in enumerate((64, 128)):
            last = reference.footprint(int(ledger.resolved_len[row]), P, *tree) - 1
            assert ledger.page_table(at)[row, last // P] != 0
        end(ledger, step, 1)
    ledger.finish(row)
    assert_all_back(ledger)


def test_scenario_08_committed_beyond_allocated_is_refused_at_the_claim():
    """sgl#27731.

    Law: `r + k <= a`, checked at each claim, naming the request and both numbers.
    """
    ledger = make()
    row = prefill(ledger, 8, tag="request-7")
    poke(ledger.resolved_len, (row,), 9)
    poke(ledger.drafted_len, (row,), 9)
    before = state(ledger)
    with pytest.raises(CorruptState, match=r"request-7.*kv_committed_len 9 > allocated_len 8"):
        ledger.prepare_decode([row], [1])
    assert state(ledger) == before


@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
def test_scenario_09_a_narrower_shape_takes_nothing_and_gives_nothing_back(policy):
    """sgl#23336, depth 7 -> 1 in overlap.

    Law: An estimate is never negative, and only cuts make `a` smaller.
    """
    wide, narrow = Shape.eagle(7, 1, 8), Shape.eagle(1, 1, 2)
    ledger = make(wide, narrow, page_size=1, overlap_depth=2, policy=policy)
    row = prefill(ledger, 10)
    first = start(ledger, row, shape=1)
    start(ledger, row, shape=1)
    ledger.resolve(first, [1])
    held, hi = int(ledger.allocated_len(0)[row]), 11 + wide.max_accept_len
    assert ledger.in_flight[row] == 1  # C lags by one result.
    assert hi + 2 < held  # The narrow round needs less than the row holds.
    estimate = int(ledger.tokens_required([row], [2])[0])
    assert estimate == (0 if policy == "exact" else 12 + 3 * 8 - held)
    start(ledger, row, shape=2)
    assert ledger.allocated_len(0)[row] == held + estimate
    ledger.check()


def test_scenario_10_a_wider_shape_reckons_with_the_narrow_round_in_flight():
    """sgl#24055.

    Law: The reserve covers the old shape in flight and the new shape behind it.
    """
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


@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
@pytest.mark.parametrize("layout", ["dense", "holey"])
def test_scenario_25_the_reserve_covers_the_device_one_verify_ahead(layout, policy):
    """trt#16280, prompts around a page edge.

    Law: Every slot that the device may write, from any root in `[lo, hi]`, has a page.
    """
    S, K, N = 3, 2, 6
    for length in range(4 * 4 - 1, 4 * 4 + N + 1):
        ledger = make(Shape(S, K, N), layout=layout, overlap_depth=1, policy=policy)
        row = prefill(ledger, length)
        start(ledger, row)
        plan = ledger.prepare_decode([row], [1])
        for root in range(length + 1, length + S + 2):
            assert plan.lo[0] <= root <= plan.hi[0]
            last = reference.footprint(root, 4, S, K, N, layout=layout) - 1
            assert ledger.page_table(0)[row, last // 4] != 0


def overlapped(prompt: int, num_pages: int | None = None) -> tuple[Ledger, list[int], int]:
    """Three rows whose next round is prepared over one in flight: ledger, rows, the step."""
    shape = Shape.eagle(5, 8, 64)
    ledger = make(
        shape,
        page_size=64,
        num_pages=num_pages,
        context=512,
        layout="holey",
        overlap_depth=1,
    )
    rows = [prefill(ledger, prompt + at) for at in range(3)]
    return ledger, rows, start(ledger, *rows)


def test_scenario_28_a_retract_frees_enough_for_the_real_next_reserve():
    """sgl#14939, K=8 P=64, one page short.

    Law: `tokens_required` equals what the next `prepare_decode` takes.
    """
    short = 0
    for prompt in range(112, 124):
        ledger, rows, _ = overlapped(prompt)
        needed = int(ledger.tokens_required(rows, [1] * 3)[0]) // 64
        if needed == 0:
            continue
        short += 1
        used = ledger.groups[0].num_pages - ledger.free_pages(0)
        ledger, rows, step = overlapped(prompt, num_pages=used + needed - 1)
        error = refuses(ledger, OutOfPages, ledger.prepare_decode, rows, [1] * 3)
        assert (error.need, error.free) == (needed, needed - 1)
        ledger.retract(rows.pop())
        ledger.complete(step)
        estimate, free = int(ledger.tokens_required(rows, [1] * 2)[0]), ledger.free_pages(0)
        assert estimate <= 64 * free
        ledger.prepare_decode(rows, [1] * 2)
        assert 64 * (free - ledger.free_pages(0)) == estimate
    assert short


def test_scenario_30_an_exception_between_claim_and_launch_is_rolled_back():
    """IBM/tgi#96.

    Law: A cancel restores the state, so the second attempt takes the same pages.
    """
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 14)
    start(ledger, row)
    other = ledger.admit()
    for prepare in (
        lambda: ledger.prepare_decode([row], [1]),
        lambda: ledger.prepare_extend([other], [30]),
    ):
        before, free = state(ledger), ledger.free_pages(0)
        plan = prepare()
        assert ledger.free_pages(0) < free
        first = ledger.full_table(0).tolist()
        ledger.cancel(plan.step)
        assert state(ledger) == before
        plan = prepare()
        assert ledger.full_table(0).tolist() == first
        ledger.launch(plan.step)
    ledger.check()


def test_scenario_31_growth_over_several_pages_in_one_step():
    """ATOM#250.

    Law: A claim counts how many pages it needs, not only whether it needs one.
    """
    ledger = make(Shape.eagle(8, 1, 9))
    row = prefill(ledger, 4)
    assert ledger.tokens_required([row], [1]).tolist() == [12]
    start(ledger, row)
    assert ledger.allocated_len(0)[row] == 16
    assert np.count_nonzero(ledger.page_table(0)[row]) == 4


def test_scenario_53_each_round_in_flight_counts_with_its_own_shape():
    """r=1, a round of A=2 in flight, then shape 0.

    Law: `hi` sums each round's own A.
    """
    ledger = make(Shape.eagle(1, 1, 2), page_size=1, overlap_depth=1)
    row = prefill(ledger, 1)
    start(ledger, row)
    plan = ledger.prepare_decode([row], [0])
    assert (plan.lo[0], plan.hi[0]) == (2, 3)
    assert ledger.allocated_len(0)[row] == 4


def test_scenario_58_fewer_nodes_than_depth_bound_the_accept_len():
    """S=2, K=2, N=2.

    Law: `A = min(S + 1, N)`; a longer result is an error.
    """
    shape = Shape(2, 2, 2)
    assert shape.max_accept_len == 2
    ledger = make(shape, page_size=1)
    row = prefill(ledger, 3)
    step = start(ledger, row)
    refuses(ledger, ShapeError, ledger.resolve, step, [3], match=r"\[1, 2\], got 3")
    ledger.resolve(step, [2])


def pool_with(free: int) -> tuple[Ledger, int, int, list[int]]:
    """Two groups, `free` pages left in the second: ledger, a row of 10, a prefix, fillers."""
    groups = [
        Group("target", page_size=4, num_pages=200),
        Group("draft", page_size=4, num_pages=40, hosts_drafts=True),
    ]
    ledger = Ledger(groups, [CHAIN, Shape.eagle(16, 1, 17)], num_rows=6, max_context_len=64)
    row = prefill(ledger, 10)
    prefix = ledger.pin_prefix(row, 8)
    fillers = []
    while (rest := ledger.free_pages(1) - free) > 0:
        fillers.append(prefill(ledger, 4 * min(rest, 16)))
    return ledger, row, prefix, fillers


VERBS = {
    "prepare_extend": (6, lambda ledger, row, prefix: ledger.prepare_extend([row], [34])),
    "prepare_decode": (4, lambda ledger, row, prefix: ledger.prepare_decode([row], [2])),
    "admit": (1, lambda ledger, row, prefix: ledger.admit(prefix=prefix, length=6)),
    "fork": (1, lambda ledger, row, prefix: ledger.fork(row)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_scenario_62_out_of_pages_at_the_nth_page_changes_nothing(verb):
    """Law: A claim is checked in every group before any is touched."""
    need, call = VERBS[verb]
    for free in range(need):
        ledger, row, prefix, fillers = pool_with(free)
        error = refuses(ledger, OutOfPages, call, ledger, row, prefix)
        assert (error.group, error.need, error.free) == ("draft", need, free)
        for filler in fillers:
            ledger.finish(filler)
        call(ledger, row, prefix)
        ledger.check()
    ledger, row, prefix, fillers = pool_with(need)
    call(ledger, row, prefix)
    assert ledger.free_pages(1) == 0
    ledger.check()


def test_scenario_62_a_refused_call_evicts_nothing():
    """Law: Pages that a call would evict count as free to it; a refused call evicts nothing."""
    groups = [
        Group("window", page_size=4, num_pages=20, window=4),
        Group("full", page_size=4, num_pages=17, hosts_drafts=True),
    ]
    ledger = Ledger(groups, [CHAIN], num_rows=2, max_context_len=64)
    row, filler = prefill(ledger, 16), prefill(ledger, 44)
    error = refuses(ledger, OutOfPages, ledger.prepare_extend, [row], [32])
    assert (error.group, error.need, error.free) == ("full", 4, 2)
    assert ledger.evicted_len(0)[row] == 0
    ledger.finish(filler)
    extend(ledger, row, 32)
    assert ledger.evicted_len(0)[row] == 12


def test_scenario_77_an_extend_counts_what_the_row_holds():
    """Pages of a round are still held.

    Law: An extend takes `max(0, ceil(new_len / P) - a / P)` pages.
    """
    ledger = make()
    row = prefill(ledger, 6)
    end(ledger, start(ledger, row), 1)
    assert (ledger.resolved_len[row], ledger.allocated_len(0)[row]) == (7, 12)
    free = ledger.free_pages(0)
    plan = ledger.prepare_extend([row], [12])
    assert plan.allocated_before.tolist() == plan.allocated_after.tolist() == [[12]]
    assert ledger.free_pages(0) == free
    ledger.launch(plan.step)
    extend(ledger, row, 13)
    assert ledger.free_pages(0) == free - 1
