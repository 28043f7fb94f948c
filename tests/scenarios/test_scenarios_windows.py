"""Regression scenarios about window groups: what is evicted, and what a cut brings back.

Numbers, laws and guards as in `test_scenarios_claims.py`.
"""

from __future__ import annotations

import pytest

from ledger_kit import CHAIN, assert_all_back, end, extend, make, prefill, refuses, start, state
from specpool import Group, Ledger, NotReady


def assert_window_held(ledger: Ledger, row: int, group: int) -> None:
    """Every column of the row's window is in the table, and none below e."""
    spec, table = ledger.groups[group], ledger.page_table(group)[row]
    evicted = int(ledger.evicted_len(group)[row])
    first = max(0, int(ledger.resolved_len[row]) - spec.window + 1)
    assert evicted <= first
    columns = range(
        evicted // spec.page_size, int(ledger.allocated_len(group)[row]) // spec.page_size
    )
    assert all(table[column] for column in columns)
    assert not table[: evicted // spec.page_size].any()


@pytest.mark.parametrize("overshoot", range(8))
def test_scenario_33_a_turn_ends_with_overshoot(overshoot):
    """sgl#22897, in overlap.

    Law: `end_turn` cuts r, a and e; a trim to the checkpoint brings the window back.
    """
    groups = [
        Group("full", page_size=4, num_pages=40, hosts_drafts=True),
        Group("window", page_size=1, num_pages=90, window=8),
    ]
    ledger = Ledger(groups, [CHAIN], num_rows=2, max_context_len=80, overlap_depth=1, sessions=True)
    row = ledger.admit()
    extend(ledger, row, 30)
    flying = [start(ledger, row), start(ledger, row)]
    for step in flying:
        end(ledger, step, 4)
    target = 38 - overshoot
    assert ledger.end_turn(row, target) == target
    assert ledger.resolved_len[row] == target
    assert ledger.allocated_len(0)[row] == -(-target // 4) * 4
    assert ledger.allocated_len(1)[row] == target
    assert_window_held(ledger, row, 1)

    for length in (target + 10, target + 20):
        extend(ledger, row, length)
    assert ledger.evicted_len(1)[row] == target + 3
    assert ledger.trim(row, target) == target  # The turn is aborted: back to the checkpoint.
    assert ledger.evicted_len(1)[row] <= target - 7
    assert_window_held(ledger, row, 1)
    extend(ledger, row, target + 1)
    end(ledger, start(ledger, row), 1)
    ledger.check()
    ledger.finish(row)
    assert_all_back(ledger)


@pytest.mark.parametrize(("page_size", "length"), [(1, 3511), (8, 3511)])
def test_scenario_55_a_rewind_below_a_window_goes_further_back(page_size, length):
    """w=512, e=3000, rewind to 1000.

    Law: A cut goes to a length whose window is held, and returns that length.
    """
    ledger = make(page_size=page_size, window=512, context=4096, num_rows=1)
    row = prefill(ledger, length)
    plan = ledger.prepare_extend([row], [length + 4])
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    assert ledger.evicted_len(0)[row] == 3000
    assert ledger.trim(row, length + 2) == length + 2
    assert ledger.trim(row, 1000) == 0
    assert (ledger.resolved_len[row], ledger.evicted_len(0)[row]) == (0, 0)
    extend(ledger, row, 5)
    ledger.finish(row)
    assert_all_back(ledger)


@pytest.mark.parametrize("shares", ["pin", "fork"])
def test_a_checkpoints_own_pages_come_back_below_shared_ones(shares):
    """Found by `make soak`: the audit took the cut row for corrupt.

    Law: a pin or fork shares only what the window holds. Pages that a checkpoint keeps below the
    window are the row's own, also below p, after a cut has brought them back.
    """
    ledger = make(window=9, page_size=4, sessions=True, max_context_len=24)
    row = ledger.admit()
    extend(ledger, row, 1)
    ledger.end_turn(row, 1)
    extend(ledger, row, 12)
    extend(ledger, row, 13)
    assert ledger.evicted_len(0)[row] == 4
    other = ledger.pin_prefix(row, 12) if shares == "pin" else ledger.fork(row)
    assert ledger.end_turn(row, 4) == 4
    assert (ledger.protected_len(0)[row], ledger.evicted_len(0)[row]) == (4, 0)
    ledger.check()
    extend(ledger, row, 9)
    ledger.check()
    ledger.finish(row)
    ledger.release_prefix(other) if shares == "pin" else ledger.finish(other)
    ledger.check()


def test_scenario_67_cancelled_extends_leave_the_window_held():
    """w=4, extend 8 -> 16 -> 20.

    Law: A row has at most one unlaunched extend, and its cancel finds the window held.
    """
    ledger = make(page_size=1, window=4)
    row = prefill(ledger, 8)
    plan = ledger.prepare_extend([row], [16])
    refuses(ledger, NotReady, ledger.prepare_extend, [row], [20], match="not launched")
    assert_window_held(ledger, row, 0)
    ledger.cancel(plan.step)
    assert ledger.resolved_len[row] == 8
    assert_window_held(ledger, row, 0)
    assert ledger.trim(row, 8) == 8
    extend(ledger, row, 9)
    ledger.finish(row)
    assert_all_back(ledger)


def test_scenario_67_a_round_behind_an_extend_keeps_the_extends_window():
    """A decode behind an unlaunched extend.

    Law: Evictions use r before an extend that is not launched.
    """
    ledger = make(page_size=1, window=4)
    row = prefill(ledger, 8)
    behind = [ledger.prepare_extend([row], [16]).step, ledger.prepare_decode([row], [1]).step]
    assert ledger.evicted_len(0)[row] <= 8 - 4 + 1
    for step in reversed(behind):
        ledger.cancel(step)
    assert ledger.resolved_len[row] == 8
    assert_window_held(ledger, row, 0)
    ledger.finish(row)
    assert_all_back(ledger)


def test_scenario_67_cancel_restores_a_full_group_whole():
    """Law: A cancel without evictions restores the state hash."""
    ledger = make()
    row = prefill(ledger, 8)
    before = state(ledger)
    plan = ledger.prepare_extend([row], [16])
    ledger.cancel(plan.step)
    assert state(ledger) == before


def test_scenario_76_a_cut_into_a_page_that_is_gone_goes_further_back():
    """w=1, P=2, r=1.

    Law: A cut to a length inside a page needs that page.
    """
    ledger = make(page_size=2, window=1)
    row = prefill(ledger, 4)
    extend(ledger, row, 6)
    assert ledger.evicted_len(0)[row] == 4
    assert ledger.trim(row, 5) == 5
    assert ledger.trim(row, 1) == 0
    extend(ledger, row, 3)
    assert ledger.page_table(0)[row, :2].all()
    ledger.check()


def evicted_to_8() -> tuple[Ledger, int]:
    """w=4, P=2: a row of 20 tokens that holds the slots from 8 on."""
    ledger = make(page_size=2, window=4)
    row = prefill(ledger, 12)
    extend(ledger, row, 20)
    assert ledger.evicted_len(0)[row] == 8
    return ledger, row


def test_scenario_76_a_prefix_without_its_window_is_not_pinned():
    """Law: A prefix is pinned only if the window below its end is held."""
    ledger, row = evicted_to_8()
    refuses(ledger, NotReady, ledger.pin_prefix, row, 8, match="needs the slots from 4 on")
    prefix = ledger.pin_prefix(row, 12)
    assert ledger.prefix_len(prefix) == 12
    assert_window_held(ledger, ledger.admit(prefix=prefix), 0)


def test_scenario_76_no_row_starts_on_a_prefix_whose_window_is_gone():
    """Law: A row is admitted only on a prefix that holds the window below its length."""
    ledger, row = evicted_to_8()
    prefix = ledger.pin_prefix(row, 20)
    refuses(ledger, NotReady, ledger.admit, prefix=prefix, length=8, match="from 4 on")
    for length in (12, 13, 20):
        assert_window_held(ledger, ledger.admit(prefix=prefix, length=length), 0)
        if length == 13:
            ledger.finish(3)
    ledger.check()


def test_scenario_76_a_row_on_a_prefix_or_a_fork_has_no_root_yet():
    """Law: A row can have no round before an extend has launched, also after admit and fork."""
    ledger = make()
    row = prefill(ledger, 8)
    prefix = ledger.pin_prefix(row, 8)
    for new in (ledger.admit(prefix=prefix), ledger.fork(row)):
        refuses(ledger, NotReady, ledger.prepare_decode, [new], [1], match="no root")
        extend(ledger, new, 9)
        end(ledger, start(ledger, new), 1)
