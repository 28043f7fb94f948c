"""A ledger under random calls: those that can succeed, and any method with any arguments.

The law: a refused call leaves the state as it was, no call panics, the audit finds nothing, and
closing ends.
"""

from __future__ import annotations

from typing import Any

from border import REFUSALS, shape_of
from source import EDGES, STRANGERS, Source, array, spoiled

from specpool import Group, Ledger
from specpool._core import OP_BYTES
from specpool.testing import apply, decode_op

#: The methods that are called by name: every public one; `close` comes at the end.
METHODS = sorted(
    name
    for name in dir(Ledger)
    if not name.startswith("_") and callable(getattr(Ledger, name)) and name != "close"
)
MOST_CALLS = 60


def group_of(source: Source, at: int) -> Group:
    page_size, num_pages = 1 + source.below(4), 20 + source.below(60)
    hosts_drafts, layout = source.byte() % 2 == 1, source.pick(("dense", "holey"))
    window = 1 + source.below(12) if source.is_rare(6) else None
    return Group(
        f"g{at}",
        page_size=page_size,
        num_pages=num_pages,
        hosts_drafts=hosts_drafts,
        layout=layout,
        window=window,
        sink=0 if window is None else source.below(6),
    )


def ledger_of(source: Source) -> Ledger | None:
    groups = [group_of(source, at) for at in range(1 + source.below(2))]
    shapes = [shape_of(source) for _ in range(source.below(3))]
    try:
        return Ledger(
            groups,
            shapes,
            num_rows=1 + source.below(4),
            max_context_len=8 + source.below(30),
            overlap_depth=source.below(2),
            policy=source.pick(("exact", "double_buffer")),
            sessions=source.byte() % 2 == 1,
            page_fencing=source.byte() % 4 != 3,
        )
    except REFUSALS:
        return None


def arguments(source: Source) -> list[Any]:
    made: list[Any] = []
    for _ in range(source.below(4)):
        kind = source.below(8)
        if kind < 4:
            made.append(source.below(8))
        elif kind < 6:
            numbers = array(source, source.pick(("i4", "i8")), (source.below(5),), 6)
            made.append(spoiled(source, numbers) if source.is_rare(4) else numbers)
        else:
            made.append(source.pick((*EDGES, *STRANGERS)))
    return made


def one_input(data: bytes) -> int:
    """Run the calls that the bytes encode.

    Returns:
        How many were accepted.
    """
    source = Source(data)
    ledger, accepted = ledger_of(source), 0
    if ledger is None:
        return 0
    with ledger:
        for _ in range(MOST_CALLS):
            if source.is_empty:
                break
            state = ledger.state_hash()
            try:
                if source.is_rare(4):
                    getattr(ledger, source.pick(METHODS))(*arguments(source))
                else:
                    apply(ledger, decode_op(ledger, source.take(OP_BYTES), has_index=True))
                accepted += 1
            except REFUSALS:
                assert ledger.state_hash() == state, "a refused call has changed the ledger"
        ledger.check()
    return accepted
