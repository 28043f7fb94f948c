"""The laws, each an object that looks at an `EngineView` after a turn and when nothing is left.

A law yields one line for each fault that it sees. Laws that are seen when something happens (one
owner, content of a read, order) are in `accounts` and `device`. A new law is a class here, and a
line in `LAWS`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lab.engines.accounts import Accounts
from lab.engines.content import Keys, Text

#: What the law of progress says where no block is held.
ALL_FREE = "every block is free"
#: Turns in a row in which nothing runs although something waits, after which nothing will.
IDLE_TURNS = 60


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a request by the engine's own numbers."""

    known: int  # prompt and what was said
    computed: int
    in_flight: int  # tokens of launched steps whose results the host does not have
    placeholders: int


@dataclasses.dataclass(frozen=True)
class Extent:
    """Tokens of a row by the engine's own numbers, each an end counted from the row's begin."""

    shared: int  # slots that the cache owns
    committed: int
    allocated: int
    width: int


@dataclasses.dataclass(frozen=True)
class CachedEntry:
    """An entry of a cache: the block that it names, what that holds, and what the key promises."""

    name: str
    block: int
    held: Keys
    promised: Keys
    note: str = ""  # what is known of the block


@dataclasses.dataclass
class RequestView:
    """What a client asked for and has got."""

    text: Text
    most: int  # tokens that it may say
    said: list[int] = dataclasses.field(default_factory=list)
    is_finished: bool = False
    is_aborted: bool = False


@dataclasses.dataclass
class EngineView:
    """An engine between two turns, in terms that no engine owns.

    `rows` has for each request its blocks of each group, without sinks; `mirrored` the same as the
    worker has them; `others` counts the holders of blocks that are in no row. `entries` is None
    while a step is launched, whose writes are yet to come.
    """

    accounts: Accounts
    free: Sequence[int]
    num_free: int
    rows: Mapping[str, Sequence[Sequence[int]]]
    lengths: Mapping[str, Lengths]
    requests: Mapping[str, RequestView]
    mirrored: Mapping[str, Sequence[Sequence[int]]] = dataclasses.field(default_factory=dict)
    others: Counter[int] = dataclasses.field(default_factory=Counter)
    entries: Sequence[CachedEntry] | None = None
    extents: Mapping[str, Extent] = dataclasses.field(default_factory=dict)
    #: For each node of a tree, the locks that it counts, and those of holders that live.
    locks: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    num_waiting: int = 0
    idle_turns: int = 0


class Law:
    """What is looked at after every turn and at rest.

    `name` is the law of a finding; `rule`, what must hold, is in reports.
    """

    name = ""
    rule = ""

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Yield what is broken between two turns."""
        yield from ()

    def at_rest(self, view: EngineView) -> Iterator[str]:
        """Yield what is broken when no request is left."""
        yield from ()


class Conservation(Law):
    """L1: free and held blocks are all blocks; the free counter is the length of the list."""

    name = "conservation"
    rule = "every block is free or held, and all come back"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Compare the free list with the own accounts."""
        free, held = set(view.free), view.accounts.held()
        if view.num_free != len(view.free) or len(free) != len(view.free):
            yield (
                f"the counter says {view.num_free} free blocks, the list has {len(view.free)}, "
                f"{len(free)} of them different"
            )
        if free & held:
            yield f"blocks {sorted(free & held)} are in the free list and held"
        lost = view.accounts.blocks - free - held
        if lost:
            yield f"blocks {sorted(lost)} are neither free nor held"

    def at_rest(self, view: EngineView) -> Iterator[str]:
        """Everything came back."""
        held = view.accounts.held()
        if held:
            yield f"no request is left, and blocks {sorted(held)} are held"


class Rows(Law):
    """L2, L5: a block has as many holders as rows name it; the worker has the engine's rows."""

    name = "rows"
    rule = "a block has as many holders as rows name it"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Compare holders with rows, and rows with the worker's."""
        named = Counter(block for row in view.rows.values() for part in row for block in part)
        named += view.others
        for block in sorted(set(named) | view.accounts.held()):
            count = view.accounts.holders[block]
            if named[block] != count:
                yield f"block {block} has {count} holders, and {named[block]} rows name it"
        for name, row in view.mirrored.items():
            if [list(part) for part in row] != [list(part) for part in view.rows[name]]:
                yield f"the worker's row of {name} is {row}, the engine's {view.rows[name]}"


class LengthsLaw(Law):
    """L6: what is computed is known or in flight, and lies in its row; nothing is negative."""

    name = "lengths"
    rule = "what is computed is known or in flight, and lies in the request's row"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Check the numbers of each request."""
        for name, lengths in view.lengths.items():
            if lengths.placeholders < 0 or lengths.computed < 0:
                yield f"{name} has {lengths}: a length is negative"
            if not lengths.in_flight and lengths.computed >= lengths.known:
                yield (
                    f"{name} has {lengths.computed} tokens computed of {lengths.known} known "
                    "ones, and nothing is in flight"
                )
        for name, extent in view.extents.items():
            ends = (0, extent.shared, extent.committed, extent.allocated, extent.width)
            if list(ends) != sorted(ends):
                yield f"{name} has {extent}: an end is behind the next one"


class CacheTruth(Law):
    """L4: each entry of the cache names a block that holds the content of its key."""

    name = "cache truth"
    rule = "a cached entry holds the content that its key names"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Audit every entry, if no write is yet to come."""
        for entry in view.entries or ():
            if not (entry.held == entry.promised).all():
                yield (
                    f"the entry of {entry.name} names block {entry.block}, which holds other KV"
                    f"{entry.note}"
                )


class Said(Law):
    """L7: every request says what it would say alone."""

    name = "text"
    rule = "every request says what it would say alone"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Compare what was said with the text."""
        for name, request in view.requests.items():
            wanted = request.text.answer(request.most)
            if request.said != wanted[: len(request.said)]:
                pairs = enumerate(zip(request.said, wanted, strict=False))
                at = next((at for at, (said, right) in pairs if said != right), len(wanted))
                yield f"{name} says {request.said[at:]} as token {at}; alone it says {wanted[at:]}"
            elif request.is_finished and not request.is_aborted and len(request.said) < len(wanted):
                yield f"{name} ends after {len(request.said)} tokens; alone it says {len(wanted)}"


class Progress(Law):
    """L7: if something waits, something runs within `IDLE_TURNS` turns."""

    name = "progress"
    rule = "if something waits and fits, something runs"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Count idle turns."""
        if view.idle_turns >= IDLE_TURNS:
            free = f"{len(view.free)} blocks are free"
            if len(view.free) == len(view.accounts.blocks):
                free = ALL_FREE
            yield (
                f"{view.num_waiting} requests wait, {free}, and nothing ran for "
                f"{view.idle_turns} turns"
            )


class Locks(Law):
    """L8: a node of a tree has the locks of those who live; none when nobody is left."""

    name = "locks"
    rule = "a node of a tree has exactly the locks of those who live"

    def at_turn(self, view: EngineView) -> Iterator[str]:
        """Compare the locks with those who hold them."""
        for name, (counted, living) in view.locks.items():
            if counted != living:
                yield f"{name} counts {counted} locks, and {living} are held"

    def at_rest(self, view: EngineView) -> Iterator[str]:
        """Count the locks."""
        locked = {name: counted for name, (counted, _) in view.locks.items() if counted}
        if locked:
            yield f"no request is left, and these have locks: {locked}"


LAWS: tuple[Law, ...] = (
    Conservation(),
    Rows(),
    LengthsLaw(),
    CacheTruth(),
    Said(),
    Progress(),
    Locks(),
)
