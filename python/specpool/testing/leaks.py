"""The proof that no page leaked: a check of one ledger, and a pytest fixture for all of a test's.

A pytest plug-in: `pytest_plugins = ["specpool.testing.leaks"]` in a `conftest.py`, or import
`no_page_leaks` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specpool import Ledger

# Pages that a report names before it is cut.
_MAX_PAGES = 8


def assert_no_page_leaked(ledger: Ledger) -> None:
    """Every page of every group is free, every row is back, and the audit agrees.

    Raises:
        AssertionError: names the pages that are not free, with their owner, the step that took
            them and the last verb, and the steps, rows and prefixes that are not over.
        CorruptState: the audit found a broken invariant.
    """
    report = still_out(ledger)
    if report:
        raise AssertionError("pages leaked:\n  " + "\n  ".join(report))
    ledger.check()


def still_out(ledger: Ledger) -> list[str]:
    """A line for everything that a ledger at rest does not have: pages, rows, prefixes, steps."""
    report = []
    for at, group in enumerate(ledger.groups):
        missing = group.num_pages - ledger.free_pages(at)
        if missing:
            report.append(
                f"group {group.name}: {missing} of {group.num_pages} pages are not free, "
                f"{ledger.fenced_pages(at)} of them fenced"
            )
            report += _pages_in_use(ledger, at)
    if ledger.num_free_rows != ledger.num_rows:
        report.append(f"{ledger.num_rows - ledger.num_free_rows} of {ledger.num_rows} rows are out")
    if ledger.prefixes:
        report.append(f"prefixes {ledger.prefixes} are not released")
    report += [f"step {step} ({kind}) is {stage}" for step, kind, stage in ledger.steps()]
    return report


def _pages_in_use(ledger: Ledger, group: int) -> list[str]:
    states, _, _ = ledger.ownership_map(group)
    pages = [page for page, state in enumerate(states.tolist()) if page and state]
    lines = []
    for page in pages[:_MAX_PAGES]:
        state, owner, birth_step, last_verb = ledger.page_record(group, page)
        tag = ledger.tag(owner) if owner else None
        who = f"row {owner}" + (f" ({tag})" if tag else "")
        lines.append(f"  page {page}: {state}, {who}, taken by step {birth_step}, last {last_verb}")
    if len(pages) > _MAX_PAGES:
        lines.append(f"  and {len(pages) - _MAX_PAGES} more")
    return lines


@pytest.fixture
def no_page_leaks() -> Iterator[list[Ledger]]:
    """After the test, `assert_no_page_leaked` holds for every `Ledger` that was made in it.

    Yields:
        The ledgers made so far.
    """
    made: list[Ledger] = []

    def record(self: Ledger, *args: Any, **kwargs: Any) -> None:
        made.append(self)

    # `Ledger` has `__new__` alone, so its `__init__` is free to look on.
    outer = vars(Ledger).get("__init__")
    setattr(Ledger, "__init__", record)  # noqa: B010 - mypy cannot know
    try:
        yield made
    finally:
        if outer is None:
            delattr(Ledger, "__init__")
        else:
            setattr(Ledger, "__init__", outer)  # noqa: B010
    for ledger in made:
        assert_no_page_leaked(ledger)
