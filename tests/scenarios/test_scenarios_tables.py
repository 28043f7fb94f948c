"""Regression scenarios about page tables and their deltas.

Numbers, laws and guards as in `test_scenarios_claims.py`.
"""

from __future__ import annotations

import numpy as np

from ledger_kit import CHAIN, assert_all_back, extend, make, prefill, refuses
from specpool import Group, Ledger, OrderError


def test_scenario_07_a_row_never_shows_an_earlier_owners_pages():
    """sgl#35401.

    Law: Table cells at or beyond `a / P` are 0.
    """
    ledger = make(page_size=16, num_rows=1)
    ledger.finish(prefill(ledger, 64))
    row = prefill(ledger, 17)
    assert np.count_nonzero(ledger.page_table(0)[row]) == 2
    ledger.trim(row, 3)
    assert np.count_nonzero(ledger.page_table(0)[row]) == 1
    extend(ledger, row, 17)
    assert np.count_nonzero(ledger.page_table(0)[row]) == 2


def windowed(w: int, P: int, **options) -> Ledger:
    """A full group and a window group of the same page size."""
    groups = [
        Group("full", page_size=P, num_pages=60, hosts_drafts=True),
        Group("window", page_size=P, num_pages=40, window=w),
    ]
    return Ledger(groups, [CHAIN], num_rows=3, max_context_len=64, **options)


def test_scenario_40_a_recycled_page_leaves_no_mapping_behind():
    """sgl#25805.

    Law: An evicted page leaves the table, and is never freed for its old owner again.
    """
    ledger = windowed(4, 4)
    one, two = ledger.admit(), ledger.admit()
    ledger.launch(ledger.prepare_extend([one], [8]).step)
    gone = int(ledger.page_table(1)[one, 0])
    extend(ledger, one, 16)  # The page waits for the first extend, so it is not taken here.
    extend(ledger, two, 8)
    assert gone in ledger.page_table(1)[two]
    assert ledger.page_table(1)[one, 0] == 0
    assert ledger.evicted_len(1)[one] == 4
    ledger.finish(one)
    assert ledger.page_record(1, gone)[:2] == ("owned", two)
    ledger.finish(two)
    assert_all_back(ledger)


def test_scenario_41_the_page_that_was_queued_is_the_page_freed():
    """sgl#36135: queue a free, replace the mapping, flush.

    Law: A fence keeps pages, not cells of the table.
    """
    ledger = windowed(8, 4)
    row = ledger.admit()
    extend(ledger, row, 8)
    first = ledger.prepare_extend([row], [16]).step
    ledger.launch(first)
    queued = int(ledger.page_table(1)[row, 3])
    assert ledger.trim(row, 12) == 12
    second = ledger.prepare_extend([row], [16])
    replaced = int(ledger.page_table(1)[row, 3])
    assert queued != replaced
    waiting = {page for page in range(1, 41) if ledger.page_record(1, page)[0] == "fenced"}
    assert queued in waiting
    free = ledger.free_pages(1)
    ledger.complete(first)
    assert {ledger.page_record(1, page)[0] for page in waiting} == {"free"}
    assert ledger.free_pages(1) == free + len(waiting)
    assert ledger.page_record(1, replaced)[:2] == ("owned", row)
    ledger.launch(second.step)
    ledger.complete(second.step)
    ledger.finish(row)
    assert_all_back(ledger)


def apply(delta, table: np.ndarray) -> None:
    rows, columns, pages = delta
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == len(rows)
    table[rows, columns] = pages


def test_scenario_57_one_entry_a_cell_and_no_delta_is_lost():
    """A row is finished and admitted anew.

    Law: A delta has one entry per cell, its last value, until it is acknowledged.
    """
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
    ledger.cancel(step)  # A launch that failed.
    step = ledger.prepare_extend([row], [9]).step
    ledger.launch(step)
    apply(ledger.take_delta(step)[0], device)
    assert (device == ledger.page_table(0)).all()
    ledger.ack_delta(step)
    refuses(ledger, OrderError, ledger.ack_delta, step)
    assert [array.size for array in ledger.take_delta(step)[0]] == [0, 0, 0]


def test_scenario_68_an_acknowledgement_drops_only_what_it_delivered():
    """A cell goes page -> 0 -> the same page.

    Law: `ack_delta` drops only entries that have not changed since the take.
    """
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
