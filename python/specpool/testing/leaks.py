"""`assert_no_page_leaked` checks one ledger or pool; `no_page_leaks` checks all of a test.

To use it as a pytest plug-in, put `pytest_plugins = ["specpool.testing.leaks"]` into a
`conftest.py`, or import `no_page_leaks` there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import pytest

from specpool import BlockPool, Ledger

_AT_REST = (0, 4)  # free and cached, as `Ledger.ownership_map` numbers them
_Made = TypeVar("_Made", Ledger, BlockPool)
_MAX_PAGES = 8  # the most that a report names


def assert_no_page_leaked(ledger: Ledger | BlockPool, *, kept_prefixes: Iterable[int] = ()) -> None:
    """Check that every page is free or cached, every row is back, and the audit agrees.

    Args:
        ledger: a ledger, or a block pool, with nothing left to do.
        kept_prefixes: pinned prefixes that are kept on purpose, as a prefix cache does. Their pages
            do not count as leaked.

    Raises:
        AssertionError: something leaked. The message lists the pages that are not free, with their
            owner, the step that took them and the last verb; the steps, rows and prefixes that are
            left; and kept prefixes that are gone.
        CorruptState: the audit found a broken invariant.
    """
    if isinstance(ledger, BlockPool):
        report = blocks_in_use(ledger)
    else:
        report = still_out(ledger, kept_prefixes)
    if report:
        raise AssertionError("pages leaked:\n  " + "\n  ".join(report))
    ledger.check()


def still_out(ledger: Ledger, kept_prefixes: Iterable[int] = ()) -> list[str]:
    """Return a line for each page, row, prefix and step that a ledger at rest must not have.

    Prefixes in `kept_prefixes` may stay, with their pages.
    """
    report = []
    kept_ids, pinned = set(kept_prefixes), set(ledger.prefixes)
    for index, group in enumerate(ledger.groups):
        missing = group.num_pages - ledger.free_pages(index) - ledger.cached_pages(index)
        if missing > (ledger.pinned_pages(index) if kept_ids else 0):
            report.append(
                f"group {group.name}: {missing} of {group.num_pages} pages are not free, "
                f"{ledger.fenced_pages(index)} of them fenced"
            )
            report += _pages_in_use(ledger, index)
    for index, states in enumerate(ledger.states):
        at_rest = ledger.free_state_slots(index) + ledger.cached_state_slots(index)
        if out := states.num_slots - at_rest:
            report.append(
                f"state group {states.name}: {out} of {states.num_slots} slots are not free, "
                f"{ledger.fenced_state_slots(index)} of them fenced"
            )
    if ledger.num_free_rows != ledger.num_rows:
        report.append(f"{ledger.num_rows - ledger.num_free_rows} of {ledger.num_rows} rows are out")
    report += [
        f"prefix {prefix} is not released: call release_prefix, or name it in kept_prefixes"
        for prefix in sorted(pinned - kept_ids)
    ]
    for index, group in enumerate(ledger.groups):
        if lent := ledger.lent_pages(index).tolist():
            report.append(f"group {group.name}: {len(lent)} pages are lent: call release_lent")
    report += [
        f"prefix {prefix} was to be kept, and is gone" for prefix in sorted(kept_ids - pinned)
    ]
    report += [f"step {step} ({kind}) is {stage}" for step, kind, stage in ledger.steps()]
    return report


def _pages_in_use(ledger: Ledger, group: int) -> list[str]:
    states, _, _ = ledger.ownership_map(group)
    pages = [page for page, state in enumerate(states.tolist()) if page and state not in _AT_REST]
    lines = []
    for page in pages[:_MAX_PAGES]:
        state, owner, birth_step, last_verb = ledger.page_record(group, page)
        tag = ledger.tag(owner) if owner else None
        holder = f"row {owner}" + (f" ({tag})" if tag else "")
        lines.append(
            f"  page {page}: {state}, {holder}, taken by step {birth_step}, last {last_verb}"
        )
    if len(pages) > _MAX_PAGES:
        lines.append(f"  and {len(pages) - _MAX_PAGES} more")
    return lines


def blocks_in_use(pool: BlockPool) -> list[str]:
    """Return a line for each block that is held or fenced, with its last tag."""
    blocks = pool.taken().tolist()
    lines = [f"{len(blocks)} of {pool.num_blocks} blocks are not free"] if blocks else []
    for block in blocks[:_MAX_PAGES]:
        state, refs, tag, fence, last_verb = pool.record_of(block)
        holder = f"fenced behind step {fence}" if state == "fenced" else f"held {refs} times"
        lines.append(f"  block {block}: {holder}, last tag {tag!r}, last verb {last_verb}")
    if len(blocks) > _MAX_PAGES:
        lines.append(f"  and {len(blocks) - _MAX_PAGES} more")
    return lines


class MadeLedgers(list[Ledger]):
    """The ledgers that a test has made, and the prefixes that it keeps on purpose.

    Attributes:
        pools: the block pools that it has made.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.pools: list[BlockPool] = []
        self._kept_prefixes: list[tuple[Ledger, int]] = []

    def keep(self, ledger: Ledger, prefix: int) -> None:
        """Allow this pinned prefix to stay after the test."""
        self._kept_prefixes.append((ledger, prefix))

    def kept_prefixes(self, ledger: Ledger) -> list[int]:
        """Return the prefixes of this ledger that stay."""
        return [prefix for owner, prefix in self._kept_prefixes if owner is ledger]


@pytest.fixture
def no_page_leaks() -> Iterator[MadeLedgers]:
    """Check `assert_no_page_leaked` after the test, for every `Ledger` and `BlockPool` made in it.

    Yields:
        The ledgers made so far, and in `pools` the block pools. `keep(ledger, prefix)` says which
        pinned prefixes stay.
    """
    ledgers = MadeLedgers()
    with _noting(Ledger, ledgers), _noting(BlockPool, ledgers.pools):
        yield ledgers
    for ledger in ledgers:
        assert_no_page_leaked(ledger, kept_prefixes=ledgers.kept_prefixes(ledger))
    for pool in ledgers.pools:
        assert_no_page_leaked(pool)


@contextlib.contextmanager
def _noting(cls: type[_Made], instances: list[_Made]) -> Iterator[None]:
    """Append every new instance of `cls` to `instances`."""

    def record(self: _Made, *args: Any, **kwargs: Any) -> None:
        instances.append(self)

    # The classes define only `__new__`, so `record` can take the place of `__init__`.
    outer = vars(cls).get("__init__")
    setattr(cls, "__init__", record)  # noqa: B010 - mypy cannot know
    try:
        yield
    finally:
        if outer is None:
            delattr(cls, "__init__")
        else:
            setattr(cls, "__init__", outer)  # noqa: B010
