"""Regression scenarios about the prefix index: what it holds stays what was indexed.

Numbers, laws and guards as in `test_scenarios_claims.py`; the device as in
`test_scenarios_sharing.py`.
"""

from __future__ import annotations

from fake_device import Device, tokens
from ledger_kit import assert_all_back, end, make, prefill, refuses, start
from specpool import Group, Ledger, NotReady, Shape, ShapeError


def test_scenario_20_a_cut_into_an_indexed_page_makes_the_index_forget():
    """sgl#7725, below the tail that the index holds beside the row.

    Law: What a row may write over after a cut is in the index no more.
    """
    ledger = make(num_rows=3)
    device = Device(ledger)
    row = ledger.admit()
    device.extend(row, 7, mark=1)
    device.run()
    text = list(range(7))
    assert ledger.index(row, text) == 7
    assert ledger.trim(row, 5) == 5
    device.extend(row, 8, mark=2)
    device.run()
    other = ledger.admit_cached([*text, 99])
    device.extend(other, 8, mark=3)
    device.run()
    assert device.read(row) == tokens((1, 0, 5), (2, 5, 8))
    assert device.read(other) == tokens((1, 0, 5), (3, 5, 8))
    ledger.check()


def test_scenario_39_no_more_than_what_is_resolved_is_indexed():
    """sgl#35694.

    Law: Tokens whose KV is not final, or that the row does not have, are refused.
    """
    ledger = make()
    row = prefill(ledger, 5)
    refuses(ledger, ShapeError, ledger.index, row, list(range(6)), match="between 1 and 5")
    step = start(ledger, row)
    ledger.resolve(step, [3])
    refuses(ledger, NotReady, ledger.index, row, list(range(8)), match="is not complete")
    ledger.complete(step)
    assert ledger.index(row, list(range(8))) == 8
    step = start(ledger, row)
    end(ledger, step, 4)
    assert ledger.index(row, list(range(12))) == 12
    assert ledger.match_prefix(list(range(20)))[0] == 12


def test_scenario_42_a_page_is_in_one_entry():
    """sgl#36457.

    Law: A page of any group is in the index once, so nobody gives it back twice.
    """
    pools = {"page_size": 4, "num_pages": 30}
    groups = [Group("full", **pools), Group("window", window=6, **pools)]
    ledger = Ledger(groups, [Shape.none()], num_rows=4, max_context_len=40)
    row = ledger.admit()
    for length in (7, 13, 20):
        plan = ledger.prepare_extend([row], [length])
        ledger.launch(plan.step)
        ledger.complete(plan.step)
        assert ledger.index(row, list(range(length))) == length
    assert ledger.index(row, list(range(20)), b"other") == 0
    twin = ledger.fork(row)
    assert ledger.index(twin, [*range(19), 99]) == 16  # its last page is in another entry
    for group in range(2):
        pages = [p for *_, own in ledger.index_entries() for p in own[group].tolist() if p]
        assert len(pages) == len({*pages})
    ledger.check()
    ledger.finish(row), ledger.finish(twin)
    ledger.forget()
    assert_all_back(ledger)


def test_scenario_87_what_a_round_behind_a_failed_one_may_write_is_not_given_away():
    """Found by random operations with failures.

    Law: With three rounds in flight the last may start at its lo, if the second fails; by then the
    first can have moved r beyond that lo.
    """
    ledger = make(page_size=1, overlap_depth=2)
    row, text = prefill(ledger, 4), list(range(8))
    first, second = start(ledger, row), start(ledger, row)
    last = ledger.prepare_decode([row], [1])
    ledger.launch(last.step)
    end(ledger, first, 3)
    assert (ledger.resolved_len[row], last.lo[0]) == (7, 6)
    refuses(ledger, NotReady, ledger.index, row, text[:7], match="is not complete")
    refuses(ledger, NotReady, ledger.pin_prefix, row, 7, match="is not complete")
    refuses(ledger, NotReady, ledger.lend, row, 0, 7, match="is not complete")
    assert ledger.index(row, text[:6]) == 6
    end(ledger, second, 1)  # now the last one starts at r
    assert ledger.index(row, text[:8]) == 8
