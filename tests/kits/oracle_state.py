"""What the oracle of the ledger remembers, what can be seen of it, and the contract's arithmetic.

Pages are objects; the number that the real pool gave one is told from outside, never predicted.
Nothing is counted along the way: a page is free when a search finds nobody who refers to it and no
fence stands, so counts cannot drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import reference


class Refused(Exception):  # noqa: N818 - the contract's word
    """The model refuses the call; `kind` is the name of specpool's exception, `numbers` its own."""

    def __init__(self, kind: str, **numbers: Any) -> None:
        super().__init__(kind, numbers)
        self.kind, self.numbers = kind, numbers


@dataclass(frozen=True)
class Group:
    """What `specpool.Group` says of one."""

    name: str
    page_size: int
    num_pages: int
    hosts_drafts: bool
    layout: str
    window: int | None
    sink: int


@dataclass(eq=False)
class Page:
    """A page that is not free."""

    group: int
    number: int = 0  # The pool's number; 0 until the ledger has shown it.
    fence: int = 0  # Latest launched step of everyone who dropped it.
    shared: bool = False  # Once shared, shared until free.


@dataclass
class Part:
    """A row's share of one group. Lengths in slots."""

    table: dict[int, Page] = field(default_factory=dict)  # By column.
    kept: dict[int, Page] = field(default_factory=dict)  # The checkpoint's columns.
    allocated: int = 0
    protected: int = 0
    evicted: int = 0


@dataclass
class Round:
    step: int
    most: int  # A of its shape.
    writes_draft: bool
    launched: bool = False


@dataclass(eq=False)
class Row:
    """One residency: the same row number may come back later as another object."""

    number: int
    parts: list[Part]
    resolved: int = 0
    drafted: int = 0
    rounds: list[Round] = field(default_factory=list)  # Oldest first.
    has_root: bool = False
    extend_from: int | None = None  # Length before the extend that is not launched.
    last_launched: int = 0
    idle: bool = False
    checkpoint: int | None = None  # Its length.

    @property
    def lo(self) -> int:
        return self.resolved + len(self.rounds)

    @property
    def hi(self) -> int:
        return self.resolved + sum(round.most for round in self.rounds)

    @property
    def reads_from(self) -> int:
        """The least position from which a step that is not launched, or comes, may start."""
        return self.resolved if self.extend_from is None else self.extend_from

    @property
    def written(self) -> int:
        if self.extend_from is not None:
            return self.extend_from
        return self.resolved + sum(round.launched for round in self.rounds)

    def pages(self) -> set[Page]:
        return {page for part in self.parts for page in (*part.table.values(), *part.kept.values())}


@dataclass(eq=False)
class Prefix:
    length: int
    drafted: int
    tables: list[dict[int, Page]]
    evicted: list[int]

    def pages(self) -> set[Page]:
        return {page for table in self.tables for page in table.values()}


@dataclass(eq=False)
class Copy:
    """The first `tokens` slots of `src` go to `dst`, a page of `row`."""

    group: int
    src: Page
    dst: Page
    tokens: int
    row: Row
    start: int  # The position that they begin at.

    @property
    def stands(self) -> bool:
        return self.dst in self.row.pages()


@dataclass
class Lane:
    row: Row
    epoch: int
    shape: int
    lo: int
    hi: int
    # Before the step:
    resolved: int
    drafted: int
    allocated: list[int]
    idle: bool


@dataclass
class Step:
    number: int
    kind: str
    lanes: list[Lane]
    writes_draft: bool
    copies: list[Copy]
    launched: bool = False
    resolved: bool = False
    abandoned: bool = False
    evicted: bool = False  # Its prepare gave pages back below a window.


INDEX = "the prefix index"


#: By page, as `State.holders` returns them.
Holders = dict[Page, list[Row | Prefix | str | None]]


def others(holders: Sequence[Row | Prefix | str | None]) -> list[Row | Prefix | str | None]:
    """The holders of a page without the prefix index."""
    return [holder for holder in holders if holder is not INDEX]


class State:
    """Everything that a ledger knows. It takes the arguments of `specpool.Ledger`."""

    def __init__(
        self,
        groups: Sequence[Any],
        shapes: Sequence[Any],
        *,
        num_rows: int,
        max_context_len: int,
        max_batch: int | None = None,
        overlap_depth: int = 0,
        policy: str = "exact",
        draft_kv: bool = True,
        max_chunk: int | None = None,
        sessions: bool = False,
        page_fencing: bool = True,
    ) -> None:
        facts = fields(Group)
        self.groups = [
            Group(**{fact.name: getattr(it, fact.name) for fact in facts}) for it in groups
        ]
        trees = [(shape.num_steps, shape.topk, shape.num_draft_tokens) for shape in shapes]
        self.shapes = [(0, 1, 1)] + [tree for tree in trees if tree != (0, 1, 1)]
        self.num_rows, self.context = num_rows, max_context_len
        self.max_batch = max_batch or num_rows
        self.max_chunk = max_chunk or 1 << 31
        self.depth, self.policy, self.draft_kv = overlap_depth, policy, draft_kv
        self.sessions, self.page_fencing = sessions, page_fencing
        self._all = range(len(self.groups))
        self.rows: dict[int, Row] = {}
        self.epochs = [0] * (num_rows + 1)
        self.fenced_rows: dict[int, int] = {}  # Number -> the step it waits for.
        self.prefixes: dict[int, Prefix] = {}
        self.next_prefix = 1
        self.lent: dict[Page, bool] = {}  # Held outside -> whether with draft KV.
        self.indexed: set[Page] = set()  # Held by the prefix index.
        self.pages: list[Page] = []  # All that are not free.
        self.pending: list[Copy] = []
        self.steps: list[Step] = []
        self.next_step = 1
        self.launched: set[int] = set()
        self.takes: set[int] = set()  # Steps whose table delta was taken and not acknowledged.
        self.completed = 0

    # --- What is seen from outside ---

    def holders(self) -> Holders:
        """Who holds each page; None is a cache outside, `INDEX` the prefix index."""
        holders_by_page: Holders = {page: [] for page in self.pages}
        for page in self.lent:
            holders_by_page[page].append(None)
        for page in self.indexed:
            holders_by_page[page].append(INDEX)
        for holder in (*self.rows.values(), *self.prefixes.values()):
            for page in holder.pages():
                holders_by_page[page].append(holder)
        return holders_by_page

    def copies(self) -> list[Copy]:
        """The copies that are not finished on the device."""
        riding = [
            copy for step in self.steps if step.number > self.completed for copy in step.copies
        ]
        return self.pending + riding

    def held_by_copies(self) -> set[Page]:
        """A copy holds both its pages until its step completes; on a single stream, is launched."""
        launched = [copy for step in self.steps if step.launched for copy in step.copies]
        copies = [copy for copy in self.copies() if self.page_fencing or copy not in launched]
        return {page for copy in copies for page in (copy.src, copy.dst)}

    def free_pages(self, group: int) -> int:
        return self.groups[group].num_pages - sum(page.group == group for page in self.pages)

    def states(self, group: int, holders_by_page: Holders) -> dict[Page, str]:
        """What each page of a group is to the caller, given what `holders` says."""
        held_by_copy = self.held_by_copies()

        def state(page: Page, holders: list[Row | Prefix | str | None]) -> str:
            if others(holders):
                return "shared" if page.shared else "owned"
            waits = page.fence > self.completed or page in held_by_copy
            return "cached" if holders and not waits else "fenced"

        return {
            page: state(page, holders)
            for page, holders in holders_by_page.items()
            if page.group == group
        }

    def reclaimable_pages(self, group: int, holders_by_page: Holders) -> int:
        return sum(
            bool(others(who)) and all(isinstance(it, Row) and it.idle for it in others(who))
            for page, who in holders_by_page.items()
            if page.group == group
        )

    def num_free_rows(self) -> int:
        return self.num_rows - len(self.rows) - len(self.fenced_rows)

    def unfinished(self) -> list[tuple[int, str, str]]:
        def stage(step: Step) -> str:
            if step.launched:
                return "resolved" if step.resolved else "launched"
            return "stale" if self._is_stale(step) else "prepared"

        return [(step.number, step.kind, stage(step)) for step in self.steps]

    # --- Arithmetic of the contract ---

    def _floor(self, at: int, length: int) -> int:
        return length // self.groups[at].page_size * self.groups[at].page_size

    def _evict_to(self, at: int, length: int) -> int:
        """Slots below the window of a row of `length` tokens, whole pages only."""
        window = self.groups[at].window
        return 0 if window is None else self._floor(at, max(0, length - window + 1))

    def _sinks(self, at: int) -> set[int]:
        """Columns of the first tokens, which no row gives up."""
        return set(range(-(-self.groups[at].sink // self.groups[at].page_size)))

    def _needed(self, at: int, length: int) -> set[int]:
        """Columns that a row of `length` tokens must hold to go on."""
        columns = set(range(-(-length // self.groups[at].page_size)))
        return self._window(at, length) | self._sinks(at) & columns

    def _window(self, at: int, length: int) -> set[int]:
        """Columns of the window of a row of `length` tokens."""
        size = self.groups[at].page_size
        return set(range(self._evict_to(at, length) // size, -(-length // size)))

    def _most(self, shape: int) -> int:
        S, _, N = self.shapes[shape]
        return min(S + 1, N)

    def _wanted(self, row: Row, shape: int) -> list[int]:
        """Slots that the row needs for a round, per group."""
        slots = []
        for group in self.groups:
            options = {"hosts_drafts": group.hosts_drafts, "layout": group.layout}
            geometry = (group.page_size, *self.shapes[shape])
            if self.policy == "exact":
                slots.append(reference.need_exact(row.lo, row.hi, *geometry, **options))
            else:
                widest = max(
                    reference.alloc_len(group.page_size, *tree, **options) for tree in self.shapes
                )
                slots.append(row.lo + (self.depth + 1) * widest)
        return slots

    def _stands(self, lane: Lane) -> bool:
        return self.epochs[lane.row.number] == lane.epoch

    def _is_stale(self, step: Step) -> bool:
        return not all(self._stands(lane) for lane in step.lanes)

    def _fence(self, row: Row) -> int:
        return row.last_launched if self.page_fencing else 0

    def _below_window(self, row: Row, at: int) -> list[int]:
        """Columns that leave the row's table when it is prepared."""
        to = self._evict_to(at, row.reads_from)
        return [
            column
            for column in row.parts[at].table
            if column < to // self.groups[at].page_size and column not in self._sinks(at)
        ]

    def _sweep(self) -> None:
        """Free the pages without holder and fence, and drop copies into dropped pages."""
        self.pending = [copy for copy in self.pending if copy.stands]
        while self.steps and self.steps[0].resolved and self.steps[0].number <= self.completed:
            del self.steps[0]  # One that waits for its resolve keeps the younger ones.
        held_by_copy = self.held_by_copies()
        self.pages = [
            page
            for page, holders in self.holders().items()
            if holders or page in held_by_copy or page.fence > self.completed
        ]
