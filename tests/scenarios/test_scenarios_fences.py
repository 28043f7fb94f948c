"""Regression scenarios about fences: nothing is handed out while a launched step may touch it.

Numbers, laws and guards as in `test_scenarios_claims.py`.
"""

from __future__ import annotations

from ledger_kit import assert_all_back, end, extend, make, prefill, refuses, start
from specpool import Ledger, OutOfPages, OutOfRows


def test_scenario_23_a_row_is_not_reused_before_its_fence():
    """sgl#18803.

    Law: A row becomes free when its last launched step is complete.
    """
    ledger = make(num_rows=1)
    row = prefill(ledger, 5)
    step = start(ledger, row)
    ledger.finish(row)
    error = refuses(ledger, OutOfRows, ledger.admit)
    assert error.fenced == 1
    ledger.complete(step)
    assert ledger.admit() == row


def test_scenario_24_a_page_is_not_reused_before_its_fence():
    """sgl#35049.

    Law: A page becomes free when the last launched step of its row is complete.
    """
    ledger = make(num_pages=17)
    row, other = prefill(ledger, 52), ledger.admit()
    step = start(ledger, row)
    ledger.finish(row)
    assert (ledger.free_pages(0), ledger.fenced_pages(0)) == (3, 14)
    assert ledger.page_record(0, 1) == ("fenced", row, 1, "finish")
    error = refuses(ledger, OutOfPages, ledger.prepare_extend, [other], [60])
    assert (error.need, error.free, error.fenced) == (15, 3, 14)
    ledger.complete(step)
    ledger.prepare_extend([other], [60])


def drive(ledger: Ledger, rows: list[int], flying: int) -> list[int]:
    """A scheduler that keeps the progress law: one more round of all but the last; its victims."""
    victims = []
    while True:
        try:
            ledger.prepare_decode(rows[:1], [1])
            return victims
        except OutOfPages as error:
            if error.fenced:
                ledger.complete(flying)
            else:
                victims.append(rows.pop())
                ledger.retract(victims[-1])


def test_scenario_51_a_fenced_victim_comes_back_by_draining():
    """vllm#49674.

    Law: Fenced pages are counted separately, so that only one row is retracted.
    """
    ledger = make(num_rows=3, num_pages=17)
    rows = [prefill(ledger, 31), prefill(ledger, 4), prefill(ledger, 28)]
    flying = start(ledger, rows[2])
    error = refuses(ledger, OutOfPages, ledger.prepare_decode, rows[:1], [1])
    assert (error.need, error.free, error.fenced) == (1, 0, 0)
    assert drive(ledger, rows, flying) == [3]
    assert rows == [1, 2]


def test_scenario_59_a_late_prefill_fences_without_a_round():
    """Several streams.

    Law: The fence is the last launched step that the row took part in, whatever k is.
    """
    ledger = make(num_rows=2, num_pages=17)
    row, other = ledger.admit(), ledger.admit()
    step = ledger.prepare_extend([row], [40]).step
    ledger.launch(step)
    assert ledger.in_flight[row] == 0
    ledger.trim(row, 4)
    assert ledger.fenced_pages(0) == 9
    refuses(ledger, OutOfPages, ledger.prepare_extend, [other], [40])
    ledger.complete(step)
    ledger.prepare_extend([other], [40])


def test_scenario_64_a_round_never_launched_fences_nothing():
    """Law: A step that was never launched fences nothing."""
    ledger = make()
    row = prefill(ledger, 5)
    plan = ledger.prepare_decode([row], [1])
    ledger.abort(row)
    assert ledger.fenced_pages(0) == 0
    ledger.cancel(plan.step)
    assert_all_back(ledger)


def test_scenario_71_a_shared_page_waits_for_every_holder():
    """Law: A page keeps the latest fence of everyone who held it."""
    for late_first in (True, False):
        ledger = make()
        parent = prefill(ledger, 8)
        child = ledger.fork(parent)
        step = ledger.prepare_extend([child], [12]).step
        ledger.launch(step)  # It reads the shared pages.
        late, other = (child, parent) if late_first else (parent, child)
        ledger.finish(late)
        ledger.finish(other)
        for page in (1, 2):
            assert ledger.page_record(0, page)[0] == "fenced"
        assert ledger.fenced_pages(0) == 3
        ledger.complete(step)
        assert_all_back(ledger)


def test_scenario_77_a_cancelled_page_is_free_at_once():
    """Its row has a launched step that is not complete.

    Law: Pages that a cancel gives back have no fence.
    """
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 8)
    start(ledger, row)
    free = ledger.free_pages(0)
    plan = ledger.prepare_decode([row], [1])
    assert ledger.free_pages(0) < free
    ledger.cancel(plan.step)
    assert (ledger.free_pages(0), ledger.fenced_pages(0)) == (free, 0)


def test_scenario_23_rows_wait_where_pages_need_not():
    """One stream.

    Law: `page_fencing=False` frees pages at once; rows wait in any case.
    """
    ledger = make(num_rows=1, page_fencing=False)
    row = prefill(ledger, 9)
    step = start(ledger, row)
    ledger.finish(row)
    assert (ledger.fenced_pages(0), ledger.free_pages(0)) == (0, ledger.groups[0].num_pages)
    refuses(ledger, OutOfRows, ledger.admit)
    end(ledger, step, 1)
    extend(ledger, ledger.admit(), 5)
