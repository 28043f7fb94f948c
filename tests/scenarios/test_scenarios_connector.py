"""Regression scenarios about a KV connector, which copies what the ledger's events name.

Numbers, laws and guards as in `test_scenarios_claims.py`.
"""

from __future__ import annotations

import pytest

from ledger_kit import end, make, start
from specpool import Ledger, OrderError


def prefilled(length: int, **options) -> tuple[Ledger, int]:
    ledger = make(**options)
    ledger.watch_kv()
    row = ledger.admit()
    plan = ledger.prepare_extend([row], [length])
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    return ledger, row


def test_scenario_49_a_rewind_across_a_page_edge_is_told():
    """The rewind frees a page of which the connector has a copy, and the next request takes it.

    Law: What was told is taken back before its page belongs to another row.
    """
    ledger, row = prefilled(10, num_pages=17)
    assert ledger.take_kv_events() == [("commit", row, 0, 0, 10)]
    page = ledger.full_table(0)[row, 2]
    assert ledger.trim(row, 6) == 6
    other = ledger.admit()
    plan = ledger.prepare_extend([other], [8])
    assert page in ledger.full_table(0)[other]
    assert ledger.take_kv_events() == [("rewind", row, 6)]
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    assert ledger.take_kv_events() == [("commit", other, 0, 0, 8)]
    ledger.finish(row)
    ledger.finish(other)
    assert ledger.take_kv_events() == [("rewind", row, 0), ("rewind", other, 0)]


def test_scenario_49_drafts_are_never_told():
    """A round writes its drafts behind the committed tokens, and most of them are rejected.

    Law: An event names verified KV only, once no step or copy can write it.
    """
    ledger, row = prefilled(10)
    assert ledger.take_kv_events() == [("commit", row, 0, 0, 10)]
    step = start(ledger, row)
    assert ledger.take_kv_events() == []
    ledger.resolve(step, [2])
    assert ledger.take_kv_events() == [], "the moves of the step may still run"
    ledger.complete(step)
    assert ledger.take_kv_events() == [("commit", row, 0, 10, 12)]
    assert ledger.take_kv_events() == []


def test_scenario_49_a_fork_is_told_once_its_tail_is_copied():
    """A fork shares a page and has a copy of the next one, which rides on a later step.

    Law: An event names verified KV only, once no step or copy can write it.
    """
    ledger, row = prefilled(6)
    child = ledger.fork(row)
    src, dst = ledger.full_table(0)[[row, child], 1]
    assert ledger.take_kv_events() == [("commit", row, 0, 0, 6), ("commit", child, 0, 0, 4)]
    end(ledger, start(ledger, row), 1)
    moved = ("move", child, 0, src, dst, 2)
    assert ledger.take_kv_events() == [moved, ("commit", row, 0, 6, 7), ("commit", child, 0, 4, 6)]


def test_scenario_49_a_window_that_moves_on_is_told():
    """A window group gives back pages behind the window while the request runs.

    Law: What was told is taken back before its page belongs to another row.
    """
    ledger, row = prefilled(10, window=6)
    assert ledger.take_kv_events() == [("commit", row, 0, 0, 10)]
    end(ledger, start(ledger, row), 4)
    end(ledger, start(ledger, row), 1)
    assert ledger.take_kv_events() == [("evict", row, 0, 0, 8), ("commit", row, 0, 10, 15)]


def test_events_need_watch_kv():
    with pytest.raises(OrderError, match="call watch_kv first"):
        make().take_kv_events()
