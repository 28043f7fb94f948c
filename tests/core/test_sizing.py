"""Sizing through the binding, compared with SGLang's own figures and plain enumeration."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest

import reference
from paths import VECTORS
from specpool import ConfigError, Group, Ledger, Shape, _core


def sizing_cases() -> list[dict]:
    return json.loads((VECTORS / "sizing.json").read_text())["cases"]


def tree(case: dict) -> dict[str, int]:
    return {name: case[name] for name in ("page_size", "num_steps", "topk", "num_draft_tokens")}


def test_every_recorded_case_of_sglang():
    cases = sizing_cases()
    assert cases
    for case in cases:
        window = _core.sizing_alloc_len_per_decode(**tree(case))
        assert window == case["alloc_len_per_decode"], case
        assert _core.sizing_row_headroom(**tree(case)) == case["row_headroom"], case
        reserve = _core.sizing_need_double_buffer(lo=0, alloc_len=window, overlap_depth=1)
        assert reserve == case["reserve_per_decode"], case
        following = [
            _core.sizing_next_allocated(
                allocated=allocated, need=committed + reserve, page_size=case["page_size"]
            )
            for committed, allocated in zip(case["committed"], case["allocated"], strict=True)
        ]
        assert following == case["next_allocated"], case
        assert sum(following) - sum(case["allocated"]) == case["tokens_required"], case


def history(
    committed: int, allocated: int, window: int, P: int, most: int
) -> tuple[int, int] | None:
    """A prefill length and an accept_len that leave a row with these two lengths, if any do."""
    if allocated == reference.ceil_align(committed, P):
        return committed, 0
    for accept_len in range(1, most + 1):
        start = committed - accept_len
        if start > 0 and reference.ceil_align(start + 2 * window, P) == allocated:
            return start, accept_len
    return None


def test_recorded_rows_through_a_real_ledger():
    """Rows whose recorded state one prefill or one round can bring about, in SGLang's setting."""
    rows_run = 0
    for case in sizing_cases():
        P = case["page_size"]
        shape = Shape(case["num_steps"], case["topk"], case["num_draft_tokens"])
        window, context = case["alloc_len_per_decode"], max(case["committed"]) + 100
        width = _core.sizing_row_width(
            [shape], page_size=P, max_context_len=context, overlap_depth=1, policy="double_buffer"
        )
        wanted = []
        for i, (committed, allocated) in enumerate(
            zip(case["committed"], case["allocated"], strict=True)
        ):
            found = history(committed, allocated, window, P, shape.max_accept_len)
            if found:
                wanted.append((i, *found))
        if not wanted:
            continue
        group = Group(
            "kv",
            page_size=P,
            num_pages=len(wanted) * width // P,
            hosts_drafts=True,
            layout="holey",
        )
        ledger = Ledger(
            [group],
            [shape],
            num_rows=len(wanted),
            max_context_len=context,
            overlap_depth=1,
            policy="double_buffer",
        )
        rows = np.array([ledger.admit() for _ in wanted], np.int32)
        plan = ledger.prepare_extend(rows, [start for _, start, _ in wanted])
        ledger.launch(plan.step)
        ran = [(row, accept) for row, (_, _, accept) in zip(rows, wanted, strict=True) if accept]
        if ran:
            plan = ledger.prepare_decode([row for row, _ in ran], [1] * len(ran))
            ledger.launch(plan.step)
            ledger.resolve(plan.step, [accept for _, accept in ran])
        places = [i for i, _, _ in wanted]
        assert ledger.kv_committed_len[rows].tolist() == [case["committed"][i] for i in places]
        assert ledger.allocated_len(0)[rows].tolist() == [case["allocated"][i] for i in places]
        following = [case["next_allocated"][i] for i in places]
        taken = sum(following) - sum(case["allocated"][i] for i in places)
        shapes = np.ones(len(rows), np.int32)
        assert ledger.tokens_required(rows, shapes).tolist() == [taken]
        free = ledger.free_pages(0)
        plan = ledger.prepare_decode(rows, shapes)
        assert plan.allocated_after[0].tolist() == following
        assert (free - ledger.free_pages(0)) * P == taken
        ledger.check()
        rows_run += len(rows)
    if "SPECPOOL_VECTORS" not in os.environ:
        assert rows_run >= 300


def test_exact_need_equals_enumeration():
    for P, S, K, N in itertools.product([1, 2, 3, 4, 16], [0, 1, 3, 5], [1, 2, 4], [1, 4, 9]):
        for hosts_drafts, layout in [(False, "dense"), (True, "dense"), (True, "holey")]:
            options = {"hosts_drafts": hosts_drafts, "layout": layout}
            for lo, span in itertools.product([0, 1, P - 1, P, 2 * P + 1], [0, 1, P, 2 * P + 1]):
                found = _core.sizing_need_exact(
                    lo=lo,
                    hi=lo + span,
                    page_size=P,
                    num_steps=S,
                    topk=K,
                    num_draft_tokens=N,
                    **options,
                )
                wanted = reference.need_exact(lo, lo + span, P, S, K, N, **options)
                assert found == wanted, (P, S, K, N, lo, span, options)


def test_row_width_suffices_and_is_minimal():
    trees = [(3, 1, 4), (2, 4, 9), (0, 1, 1)]
    shapes = [Shape(*tree) for tree in trees]
    for P, D, L, layout in itertools.product(
        [1, 3, 4, 16], [0, 1, 2], [2, 9, 18], ["dense", "holey"]
    ):
        found = _core.sizing_row_width(
            shapes, page_size=P, max_context_len=L, overlap_depth=D, layout=layout
        )
        claims = {
            reference.ceil_align(reference.need_exact(lo, hi, P, *tree, layout=layout), P)
            for lo, hi in reference.reachable(trees, L, D)
            for tree in trees
        }
        assert found == max(claims), (P, D, L, layout)


@pytest.mark.parametrize("bad", [0, -1, 2**31 + 1, 2**63, 10**30, "16", 1.5, None])
def test_bad_numbers_are_config_errors(bad):
    numbers = {"page_size": bad, "num_steps": 3, "topk": 2, "num_draft_tokens": 4}
    for call in (_core.sizing_alloc_len_per_decode, _core.sizing_row_headroom):
        with pytest.raises(ConfigError, match=str(bad) if bad is not None else "None"):
            call(**numbers)
    with pytest.raises(ConfigError):
        _core.sizing_next_allocated(allocated=0, need=1, page_size=bad)
    with pytest.raises(ConfigError):
        _core.sizing_row_width([Shape.none()], page_size=bad, max_context_len=10)


def test_products_are_checked_not_wrapped():
    with pytest.raises(ConfigError, match="2\\^60"):
        _core.sizing_need_double_buffer(lo=0, alloc_len=2**62, overlap_depth=1)
    with pytest.raises(ConfigError, match="hi must be"):
        _core.sizing_need_exact(
            lo=0, hi=2**60, page_size=1, num_steps=1, topk=1, num_draft_tokens=2
        )
    with pytest.raises(ConfigError, match="lo must be in \\[0, 5\\], got 6"):
        _core.sizing_need_exact(lo=6, hi=5, page_size=1, num_steps=1, topk=1, num_draft_tokens=2)


def test_scenario_05_headroom_of_pages_of_one_has_no_gate():
    """sgl#33579: N=17 on pages of one needs 21 slots beyond the context."""
    found = _core.sizing_row_headroom(page_size=1, num_steps=3, topk=4, num_draft_tokens=17)
    assert found == 21


def test_scenario_06_the_allocators_page_counts():
    """sgl#35424: pages of 64 on two ranks are pages of 128 to the allocator and its headroom."""
    tree = {"num_steps": 5, "topk": 8, "num_draft_tokens": 32}
    wide = _core.sizing_row_headroom(page_size=128, **tree)
    assert wide == 2 * reference.alloc_len(128, 5, 8, 32) + 127
    assert wide > _core.sizing_row_headroom(page_size=64, **tree)


@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_needed_is_a_ledgers(policy, page_size):
    """The same answer without a ledger, in groups of every kind."""
    shapes, context = [Shape.none(), Shape(3, 1, 4), Shape(2, 3, 9)], 40
    kinds = [(False, "dense"), (True, "dense"), (True, "holey")]
    options = {"overlap_depth": 1, "policy": policy}
    groups = [
        Group(f"{i}", page_size=page_size, num_pages=999, hosts_drafts=hosts, layout=layout)
        for i, (hosts, layout) in enumerate(kinds)
    ]
    ledger = Ledger(groups, shapes, num_rows=1, max_context_len=context, **options)
    for lo, hi, shape in itertools.product(range(context), range(context), range(len(shapes))):
        if lo > hi:
            continue
        found = [
            _core.sizing_pages_needed(
                shapes,
                shape,
                lo=lo,
                hi=hi,
                page_size=page_size,
                hosts_drafts=hosts,
                layout=layout,
                **options,
            )
            for hosts, layout in kinds
        ]
        assert found == ledger.pages_needed(lo, hi, shape).tolist()


def test_pages_needed_refuses_what_is_out_of_range():
    shapes, roots = [Shape.none()], {"lo": 3, "hi": 5, "page_size": 4}
    for shape in (-1, 1, 1 << 70):
        with pytest.raises(ConfigError):
            _core.sizing_pages_needed(shapes, shape, **roots)
    for bad in ({"lo": 6}, {"lo": -1}, {"hi": 1 << 49}, {"page_size": 0}, {"policy": "both"}):
        with pytest.raises(ConfigError):
            _core.sizing_pages_needed(shapes, 0, **roots | bad)
