"""Sequences that chance meets too rarely, run on the ledger, the oracle and the fake device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep import Lockstep
from specpool import Group, Shape
from specpool.testing import DeviceFault, LedgerConfig

FULL = LedgerConfig(
    (Group("kv", page_size=4, num_pages=40, hosts_drafts=True),),
    (Shape.eagle(2, 1, 3),),
    num_rows=4,
    max_context_len=32,
    overlap_depth=1,
)


def windowed(page_size: int, window: int) -> LedgerConfig:
    group = Group("kv", page_size=page_size, num_pages=40, hosts_drafts=True, window=window)
    return replace(FULL, groups=(group,), sessions=True)


def prepare(both: Lockstep, row: int, length: int) -> int:
    return both.apply(("prepare_extend", {"rows": [row], "new_lens": [length]})).step


def extend(both: Lockstep, row: int, length: int) -> None:
    step = prepare(both, row, length)
    both.apply(("launch", {"step": step}))
    both.apply(("complete", {"step": step}))


def prefilled(both: Lockstep, length: int) -> int:
    row = both.apply(("admit", {}))
    extend(both, row, length)
    return row


@pytest.mark.parametrize("length", [None, 0, 1, -1])
def test_without_a_prefix_a_row_starts_with_no_token(length):
    """Both take no length and 0, and refuse any other."""
    both = Lockstep(FULL)
    assert (both.apply(("admit", {"length": length})) == 1) == (length in (None, 0))
    both.finish()


def test_a_cancel_puts_its_copies_before_those_that_came_since():
    both = Lockstep(FULL)
    row, other = prefilled(both, 6), prefilled(both, 7)
    first = both.apply(("fork", {"row": row}))
    step = prepare(both, other, 9)
    both.apply(("fork", {"row": row}))
    both.apply(("cancel", {"step": step}))
    plan = both.apply(("prepare_extend", {"rows": [first], "new_lens": [9]}))
    assert len(plan.page_copies) == 2
    both.apply(("launch", {"step": plan.step}))
    both.finish()


def test_abandon_spares_a_row_that_came_after_the_one_its_copy_went_to():
    both = Lockstep(FULL)
    row, other = prefilled(both, 6), prefilled(both, 7)
    fork = both.apply(("fork", {"row": row}))
    step = prepare(both, other, 9)
    both.apply(("finish", {"row": fork}))
    assert both.apply(("admit", {})) == fork
    both.apply(("launch", {"step": step}))
    both.apply(("abandon", {"step": step}))
    assert both.ledger.is_live(fork)
    assert not both.ledger.is_live(other)
    both.finish()


def test_abandon_takes_the_row_that_its_copy_went_to():
    """Scenario 74."""
    both = Lockstep(FULL)
    row, other = prefilled(both, 6), prefilled(both, 7)
    fork = both.apply(("fork", {"row": row}))
    step = prepare(both, other, 9)
    both.apply(("launch", {"step": step}))
    behind = prepare(both, fork, 8)
    both.apply(("launch", {"step": behind}))
    both.apply(("abandon", {"step": step}))
    assert not both.ledger.is_live(fork)
    assert both.ledger.is_live(row)
    both.finish()


def test_a_copy_without_its_row_is_dropped():
    """Scenario 73: the row is retracted, its page goes to another row, the next step prepared."""
    both = Lockstep(FULL)
    row, other = prefilled(both, 6), prefilled(both, 7)
    fork = both.apply(("fork", {"row": row}))
    page = both.ledger.full_table(0)[fork, 1]
    both.apply(("retract", {"row": fork}))
    plan = both.apply(("prepare_extend", {"rows": [other], "new_lens": [12]}))
    assert plan.page_copies.size == 0
    assert page in both.ledger.full_table(0)[other]
    both.finish()


def test_a_copy_that_is_launched_holds_its_pages_though_its_row_is_gone():
    both = Lockstep(FULL)
    row, other = prefilled(both, 6), prefilled(both, 7)
    both.apply(("fork", {"row": row}))
    step = prepare(both, other, 8)
    both.apply(("launch", {"step": step}))
    for gone in (row, 3):
        both.apply(("finish", {"row": gone}))
    assert both.ledger.fenced_pages(0) == 3  # The copy's two, and the one that was shared.
    both.apply(("complete", {"step": step}))
    assert both.ledger.fenced_pages(0) == 0
    both.finish()


def test_a_shared_page_waits_for_the_latest_fence_of_all_who_held_it():
    """Scenario 71: the last holder's own fence is older."""
    both = Lockstep(FULL)
    row = prefilled(both, 8)
    fork = both.apply(("fork", {"row": row}))
    older = prepare(both, fork, 9)
    both.apply(("launch", {"step": older}))
    newer = prepare(both, row, 9)
    both.apply(("launch", {"step": newer}))
    both.apply(("finish", {"row": row}))
    both.apply(("finish", {"row": fork}))
    both.apply(("complete", {"step": older}))
    assert both.ledger.fenced_pages(0) == 3  # The two that were shared, and the row's last.
    both.apply(("complete", {"step": newer}))
    assert both.ledger.fenced_pages(0) == 0
    both.finish()


def test_a_round_behind_an_extend_not_launched_evicts_nothing_that_the_extend_reads():
    """Scenario 67 through a round: both are cancelled, the window of the old length is held."""
    both = Lockstep(windowed(page_size=1, window=2))
    row = prefilled(both, 4)
    first = prepare(both, row, 8)
    second = both.apply(("prepare_decode", {"rows": [row], "shapes": [0]})).step
    assert both.ledger.evicted_len(0)[row] == 3
    both.apply(("cancel", {"step": second}))
    both.apply(("cancel", {"step": first}))
    extend(both, row, 5)
    both.finish()


@pytest.mark.parametrize("cut", range(13))
@pytest.mark.parametrize(("page_size", "window"), [(2, 1), (1, 1), (2, 4), (3, 4), (4, 3)])
def test_every_cut_of_a_session_ends_where_its_window_is_held(page_size, window, cut):
    both = Lockstep(windowed(page_size, window))
    row = prefilled(both, 5)
    assert both.apply(("end_turn", {"row": row, "length": 5})) == 5
    for length in (10, 12, 13):
        extend(both, row, length)
    kept = both.apply(("trim", {"row": row, "length": cut}))
    assert kept == 5 if cut == 5 else kept <= cut
    extend(both, row, kept + 1)  # Reads the window.
    both.finish()


def test_the_turn_after_a_checkpoint_ends_above_it():
    """The old checkpoint's pages, outside the table since, are given back at the next end_turn."""
    both = Lockstep(windowed(page_size=2, window=3))
    row = prefilled(both, 5)
    for length in (5, 12):
        both.apply(("end_turn", {"row": row, "length": length}))
        for longer in (length + 3, length + 6, length + 7):
            extend(both, row, longer)
    assert both.apply(("trim", {"row": row, "length": 12})) == 12
    assert both.apply(("trim", {"row": row, "length": 5})) == 0
    both.finish()


def test_a_stale_step_keeps_no_page_from_being_pinned():
    """A stale step can never be launched, so it writes nothing."""
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    first = both.apply(("prepare_decode", {"rows": [row], "shapes": [1]})).step
    both.apply(("launch", {"step": first}))
    stale = both.apply(("prepare_decode", {"rows": [row], "shapes": [1]})).step
    both.apply(("resolve", {"step": first, "accept_lens": [2]}))
    both.apply(("complete", {"step": first}))
    both.apply(("trim", {"row": row, "length": 8}))
    assert both.apply(("pin_prefix", {"row": row, "length": 8})) == 1
    both.apply(("cancel", {"step": stale}))
    both.finish()


@pytest.mark.parametrize("cut", range(12))
def test_a_cut_below_a_pinned_prefix_ends_at_a_page_edge(cut):
    both = Lockstep(FULL)
    row = prefilled(both, 11)
    both.apply(("pin_prefix", {"row": row, "length": 8}))
    kept = both.apply(("trim", {"row": row, "length": cut}))
    assert kept == cut if cut >= 8 else kept == cut // 4 * 4
    extend(both, row, kept + 1)  # Writes no page of the prefix.
    both.finish()


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_cut_that_counts_two_roots_asks_both_rounds_for_draft_kv(first, second):
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    for writes in (first, second):
        lanes = {"rows": [row], "shapes": [0], "writes_draft": writes}
        both.apply(("launch", {"step": both.apply(("prepare_decode", lanes)).step}))
    assert both.apply(("trim", {"row": row, "length": 9})) == 8
    assert both.ledger.drafted_len[row] == (8 if first and second else 6)
    both.finish()


def test_a_prefix_passes_its_draft_cursor_on():
    both = Lockstep(FULL)
    row = prefilled(both, 5)
    lanes = {"rows": [row], "new_lens": [9], "writes_draft": False}
    step = both.apply(("prepare_extend", lanes)).step
    both.apply(("launch", {"step": step}))
    both.apply(("complete", {"step": step}))
    both.apply(("pin_prefix", {"row": row, "length": 9}))
    rows = [both.apply(("admit", {"prefix": 1, "length": length})) for length in (8, 3)]
    assert both.ledger.drafted_len[rows].tolist() == [5, 3]
    both.finish()


def test_evicting_a_page_that_another_row_holds_frees_nothing():
    """Both refuse with no page free; evicted by its last holder, it counts."""
    both = Lockstep(windowed(page_size=1, window=2))
    row = prefilled(both, 4)
    fork = both.apply(("fork", {"row": row}))
    prefilled(both, 32)
    prefilled(both, both.ledger.free_pages(0))
    assert both.ledger.free_pages(0) == 0
    assert both.apply(("prepare_extend", {"rows": [row], "new_lens": [5]})) is None
    lanes = {"rows": [row, fork], "new_lens": [5, 5]}
    assert both.apply(("prepare_extend", lanes)) is not None
    both.finish()


def test_a_snapshot_keeps_copies_that_wait():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    fork = both.apply(("fork", {"row": row}))
    both.snapshot()
    both.apply(("finish", {"row": fork}))
    extend(both, row, 11)
    both.apply(("ack_delta", {"step": max(both.oracle.launched)}))
    both.restore()
    extend(both, fork, 9)
    extend(both, row, 8)
    both.finish()


def test_the_device_sees_a_page_that_two_rows_write():
    """The lockstep's own alarm: a page in two tables cannot stay unseen."""
    both = Lockstep(FULL)
    row, other = prefilled(both, 6), prefilled(both, 6)
    both.apply(("ack_delta", {"step": max(both.oracle.launched)}))
    both.device._tables[0][other] = both.device._tables[0][row]
    with pytest.raises(DeviceFault, match="row 2: target KV at position 0"):
        extend(both, other, 7)


def test_a_page_that_came_back_is_not_the_one_that_was_copied_to():
    """On one stream a dropped page is free at once, and may come back for the same column."""
    both = Lockstep(replace(FULL, page_fencing=False))
    parent = prefilled(both, 8)
    both.apply(("pin_prefix", {"row": parent, "length": 8}))
    row = both.apply(("admit", {"prefix": 1, "length": 6}))
    page = both.ledger.full_table(0)[row, 1]
    for length in (7, 9):
        both.apply(("launch", {"step": prepare(both, row, length)}))
        both.apply(("trim", {"row": row, "length": 4}))
    both.apply(("launch", {"step": prepare(both, row, 9)}))
    assert both.ledger.full_table(0)[row, 1] == page
    both.apply(("pin_prefix", {"row": row, "length": 4}))
    both.finish()
