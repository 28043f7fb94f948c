"""Regression scenarios about shared pages and the copies of their tails.

Numbers, laws and guards as in `test_scenarios_claims.py`. The device of `fake_device.py` remembers
who wrote each slot, so a page in wrong hands shows in what a row reads.
"""

from __future__ import annotations

import pytest

from fake_device import Device, tokens
from ledger_kit import assert_all_back, end, make, refuses, start
from specpool import Ledger, NotReady, PageStateError, ShapeError


def running(length: int, **options) -> tuple[Ledger, Device, int]:
    """A row of `length` tokens of mark 1 on pages of 4, all complete."""
    ledger = make(num_rows=4, **options)
    device = Device(ledger)
    row = ledger.admit()
    device.extend(row, length, mark=1)
    device.run()
    return ledger, device, row


def test_scenario_56_no_fork_with_a_round_in_flight():
    """The round would write the shared page.

    Law: A fork is refused while a step of the row is in flight.
    """
    ledger, _, parent = running(8)
    step = start(ledger, parent)
    refuses(ledger, NotReady, ledger.fork, parent, match="in flight")
    ledger.resolve(step, [1])
    refuses(ledger, NotReady, ledger.fork, parent, match="not complete")
    ledger.complete(step)
    child = ledger.fork(parent)
    assert ledger.protected_len(0)[[parent, child]].tolist() == [8, 8]


@pytest.mark.parametrize(("cut", "kept"), [(6, 4), (8, 8), (9, 9)])
def test_scenario_56_a_rewind_into_shared_pages_leaves_the_child_alone(cut, kept):
    """Fork at `r % P != 0`.

    Law: A cut below `protected_len` goes to a page edge, so no shared page is written.
    """
    ledger, device, parent = running(10)
    child = ledger.fork(parent)
    assert ledger.trim(parent, cut) == kept
    device.extend(parent, 12, mark=2)
    device.run()
    assert device.read(child) == tokens((1, 0, 10))
    assert device.read(parent) == tokens((1, 0, kept), (2, kept, 12))
    ledger.finish(parent)
    device.extend(child, 13, mark=3)
    device.run()
    assert device.read(child) == tokens((1, 0, 10), (3, 10, 13))
    ledger.finish(child)
    assert_all_back(ledger)


def test_scenario_70_no_fork_while_an_old_round_still_writes():
    """`end_turn` dropped the round, the device runs it still.

    Law: A fork is refused until the row's last launched step is complete.
    """
    ledger, _, row = running(10)
    step = start(ledger, row)
    assert ledger.end_turn(row, 11) == 11
    assert ledger.in_flight[row] == 0
    refuses(ledger, NotReady, ledger.fork, row, match=f"step {step} is not complete")
    end(ledger, step, 1)
    ledger.fork(row)


@pytest.mark.parametrize("first", ["child", "parent", "other"])
def test_scenario_72_a_tail_is_copied_before_any_later_forward(first):
    """Law: The next step prepared carries a waiting copy, whatever rows the step has."""
    ledger, device, parent = running(10)
    other = ledger.admit()
    child = ledger.fork(parent)
    if first == "parent":  # It rewrites the tail that the copy reads.
        assert ledger.trim(parent, 9) == 9
        device.extend(parent, 12, mark=2)
    elif first == "other":
        device.extend(other, 5, mark=4)
        ledger.trim(parent, 9)
        device.extend(parent, 12, mark=2)
    step = device.extend(child, 11, mark=3)
    device.run()
    assert device.seen[step, child] == tokens((1, 0, 10))
    assert device.read(child) == tokens((1, 0, 10), (3, 10, 11))


def test_scenario_73_a_copy_never_writes_a_page_of_someone_else():
    """Retract the row that a tail is for.

    Law: A copy holds both its pages, or it is dropped.
    """
    ledger, device, row = running(10)
    prefix = ledger.pin_prefix(row, 8)
    gone = ledger.admit(prefix=prefix, length=6)
    tail = int(ledger.page_table(0)[gone, 1])
    ledger.retract(gone)
    other = ledger.admit()
    plan = ledger.prepare_extend([other], [5])
    for _, _, dst, _ in plan.page_copies.tolist():
        assert ledger.page_record(0, dst)[0] == "fenced"
    device.launch(plan, mark=2)
    assert ledger.page_record(0, tail)[:2] in (("owned", other), ("free", gone))
    device.run()
    assert device.read(other) == tokens((2, 0, 5))


def test_scenario_73_both_pages_of_a_copy_wait_for_its_step():
    """The copy rides on another row's step.

    Law: The pages of a copy are not handed out before its step is complete.
    """
    ledger, device, parent = running(10)
    other = ledger.admit()
    child = ledger.fork(parent)
    source, target = (int(ledger.page_table(0)[row, 2]) for row in (parent, child))
    plan = ledger.prepare_extend([other], [5])
    assert plan.page_copies.tolist() == [[0, source, target, 2]]
    ledger.finish(parent)
    ledger.finish(child)
    for launched in (False, True):
        if launched:
            device.launch(plan, mark=2)
        assert [ledger.page_record(0, page)[0] for page in (source, target)] == ["fenced"] * 2
    device.run()
    assert [ledger.page_record(0, page)[0] for page in (source, target)] == ["free"] * 2
    ledger.finish(other)
    assert_all_back(ledger)


def test_scenario_74_abandon_takes_the_row_whose_tail_was_lost():
    """Another row's failed step carried the copy.

    Law: A row whose tail was lost is retracted; a row is not forked before its copy is done.
    """
    ledger, device, parent = running(10)
    other = ledger.admit()
    child = ledger.fork(parent)
    refuses(ledger, NotReady, ledger.fork, child, match="copy of page")
    failed = device.extend(other, 5, mark=2)
    refuses(ledger, NotReady, ledger.fork, child)
    refuses(ledger, NotReady, ledger.pin_prefix, child, 8, match="copy of page")
    device.queue.clear()  # The forward raised.
    ledger.abandon(failed)
    assert [ledger.is_live(row) for row in (parent, child, other)] == [True, False, False]
    ledger.complete(failed)
    assert device.read(parent) == tokens((1, 0, 10))
    ledger.finish(parent)
    assert_all_back(ledger)


def lent(length: int, **options) -> tuple[Ledger, Device, int, list[int]]:
    """A row of `length` tokens of mark 1, whose whole pages a cache outside holds too."""
    ledger, device, row = running(length, **options)
    ledger.lend(row, 0, length // 4 * 4)
    return ledger, device, row, ledger.page_table(0)[row, : length // 4].tolist()


def test_scenario_78_a_lent_page_goes_back_once():
    """The engine's own tree gives a page up twice, in one call or in two.

    Law: A cache outside gives each lent page up once; a refused call gives up none.
    """
    ledger, _, row, pages = lent(10)
    ledger.finish(row)
    refuses(ledger, ShapeError, ledger.release_lent, 0, [*pages, pages[0]], match="named twice")
    ledger.release_lent(0, pages)
    refuses(ledger, PageStateError, ledger.release_lent, 0, pages, match="not lent")
    refuses(ledger, PageStateError, ledger.admit_lent, pages, 8, match="not lent")
    assert_all_back(ledger)


def test_scenario_78_a_page_that_the_tree_gives_up_stays_with_its_rows():
    """The tree evicts what a row began on, and the row goes on.

    Law: A lent page is read-only and lives as long as a row or the cache outside holds it.
    """
    ledger, device, row, pages = lent(10)
    hit = ledger.admit_lent(pages, 8)
    ledger.finish(row)
    ledger.release_lent(0, pages)
    device.extend(hit, 12, mark=2)
    device.run()
    other = ledger.admit()
    device.extend(other, 16, mark=3)
    device.run()
    assert device.read(hit) == tokens((1, 0, 8), (2, 8, 12))
    assert ledger.trim(hit, 6) == 4


def test_scenario_78_only_final_pages_are_lent():
    """A round in flight would still write the page.

    Law: A page is lent once its tokens are resolved and every step that writes it is complete.
    """
    ledger, _, row = running(7)
    step = start(ledger, row)
    ledger.resolve(step, [1])
    refuses(ledger, NotReady, ledger.lend, row, 0, 8, match="is not complete")
    ledger.complete(step)
    ledger.lend(row, 0, 8)


def test_scenario_78_duplicates_wait_for_the_round_that_reads_them():
    """A row is bound to the tree's pages while a round of it reads its own.

    Law: The pages that a rebind gives back wait for the row's last launched step.
    """
    ledger, _, _, pages = lent(10)
    row = ledger.admit()
    plan = ledger.prepare_extend([row], [10])
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    step = start(ledger, row)
    ledger.rebind(row, 0, 8, pages)
    assert ledger.fenced_pages(0) == 2
    end(ledger, step, 1)
    assert ledger.fenced_pages(0) == 0


def test_scenario_79_what_leaves_stays_until_it_has_arrived():
    """A sender still reads a row's pages while others take what is free.

    Law: An export holds every page of its row, the last one too, and a row comes back on them.
    """
    ledger, device, row = running(10)
    export = ledger.export(row)
    assert not ledger.is_live(row) and ledger.prefix_len(export) == 10
    assert len(ledger.prefix_pages(export, 0)[1]) == 3
    other = ledger.admit()
    device.extend(other, 16, mark=2)
    device.run()
    back = ledger.admit(prefix=export)
    device.extend(back, 12, mark=3)
    device.run()
    assert device.read(back) == tokens((1, 0, 10), (3, 10, 12))
    ledger.release_prefix(export)
    ledger.finish(other)
    ledger.finish(back)
    assert_all_back(ledger)


def test_scenario_79_no_row_leaves_with_a_round_in_flight():
    """The round would write the page that is being sent.

    Law: An export is refused while a step of the row is in flight.
    """
    ledger, _, row = running(7)
    step = start(ledger, row)
    refuses(ledger, NotReady, ledger.export, row, match="in flight")
    ledger.resolve(step, [1])
    refuses(ledger, NotReady, ledger.export, row, match="is not complete")
    ledger.complete(step)
    ledger.export(row)


def test_scenario_79_what_comes_has_pages_of_its_own():
    """A row that arrives is written while the pages of others are read.

    Law: An import takes free pages for all of its tokens, or nothing.
    """
    ledger, _, row = running(10)
    export = ledger.export(row)
    came = ledger.import_row(10, 10)
    held = set(ledger.page_table(0)[came].tolist()) - {0}
    assert len(held) == 3 and held.isdisjoint(ledger.prefix_pages(export, 0)[1].tolist())
    ledger.abort(came)
    ledger.release_prefix(export)
    assert_all_back(ledger)
