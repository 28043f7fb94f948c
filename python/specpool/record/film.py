"""`Film` and `Picture`: the pages, rows and slots of a ledger at one moment, as plain values.

A `Film` replays a log and takes a `Picture` after any event. `terminal.py` and `page.py` draw it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specpool._core import Event, Group, Ledger, Plan, Replay, Shape, draft_write_positions
from specpool.errors import RecordError

# Page states of `Ledger.ownership_map`.
FREE, OWNED, SHARED, FENCED, CACHED = range(5)

SlotKind = Literal["evicted", "shared", "committed", "root", "draft", "hole", "verify", "reserved"]


@dataclass(frozen=True, slots=True)
class Round:
    """One row's part of a decode in flight."""

    step: int
    shape: int  # index into Ledger.shapes
    lo: int  # least position of the round's root
    hi: int  # greatest position of the root, inclusive
    state: str  # "prepared", "stale" or "launched"


@dataclass(frozen=True, slots=True)
class RowPicture:
    """One admitted row; lengths in slots, per group where they are tuples."""

    row: int
    tag: str | None
    resolved: int
    in_flight: int
    drafted: int
    epoch: int
    idle: bool
    rounds: tuple[Round, ...]  # in flight, oldest first
    allocated: tuple[int, ...]
    protected: tuple[int, ...]
    evicted: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]  # of [0, allocated), 0 where evicted

    @property
    def committed(self) -> int:
        """`kv_committed_len`: final tokens, and one root for each round in flight."""
        return self.resolved + self.in_flight


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """One page pool: `ownership_map` up to the last page ever taken, n, and the counts."""

    states: NDArray[np.uint8]  # [n + 1]
    owners: NDArray[np.int32]  # [n + 1]
    holders: NDArray[np.int32]  # [n + 1]
    free: int
    fenced: int
    cached: int
    reclaimable: int


@dataclass(frozen=True, slots=True)
class Picture:
    """The ledger right after `event` (None: before the first one)."""

    event: Event | None
    groups: tuple[GroupPicture, ...]
    rows: tuple[RowPicture, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One position of a row. Drafts set `branch` and `step`; holes set `source`."""

    position: int
    kind: SlotKind
    branch: int = -1
    step: int = -1
    source: int = -1
    in_verify: bool = False


def row_name(row: int, num_rows: int) -> str:
    """Return a short name in capital letters, of equal width for all rows: A, B, .. or AA, .."""
    width, num_names = 1, 26
    while num_rows > num_names:
        width, num_names = width + 1, num_names * 26
    name, number = "", row - 1
    for _ in range(width):
        name, number = chr(ord("A") + number % 26) + name, number // 26
    return name


class Film:
    """A replay of a log, event by event.

    Args:
        path: the event log.

    Raises:
        RecordError: the log cannot be read; every method may raise it too.
    """

    def __init__(self, path: Path) -> None:
        self.replay = Replay(path)
        self.ledger: Ledger = self.replay.ledger
        self.damage: RecordError | None = None  # the error at which `readable` ended
        self._plans: dict[int, Plan] = {}
        self._event: Event | None = None

    def advance(self) -> Event | None:
        """Replay one event and return it; None at the end of the log."""
        event = self.replay.advance()
        if event is None:
            return None
        self._event = event
        if event.plan is not None:
            self._plans[event.plan.step] = event.plan
        if event.verb in ("complete", "resolve", "cancel"):
            in_flight = {step for step, _, _ in self.ledger.steps()}
            self._plans = {step: plan for step, plan in self._plans.items() if step in in_flight}
        return event

    def events(self) -> Iterator[Event]:
        """Replay the rest of the log, and yield each event."""
        while (event := self.advance()) is not None:
            yield event

    def readable(self) -> Iterator[Event]:
        """Replay the rest of the log up to its damage, if any, and yield each event.

        If the log is damaged, the generator ends there and sets `damage`.

        Raises:
            RecordError: the replay differs, so that the ledger is not the recorded one.
        """
        while True:
            digest = self.ledger.digest
            try:
                event = self.advance()
            except RecordError as error:
                if self.ledger.digest != digest:
                    raise
                self.damage = error
                return
            if event is None:
                return
            yield event

    def to_step(self, step: int) -> None:
        """Replay until right after the preparation of `step`.

        Raises:
            RecordError: the log has no such step.
        """
        last = 0
        for event in self.events():
            if event.plan is not None:
                last = event.plan.step
                if last == step:
                    return
        raise RecordError(f"step {step} is not in the log: its steps are 1 to {last}")

    def picture(self) -> Picture:
        """Return a picture of the ledger as it is now."""
        ledger = self.ledger
        return Picture(
            event=self._event,
            groups=tuple(_group(ledger, index) for index in range(len(ledger.groups))),
            rows=tuple(self._rows()),
        )

    def _rows(self) -> Iterator[RowPicture]:
        ledger = self.ledger
        groups, rounds = range(len(ledger.groups)), self._rounds()
        live = ledger.live_rows()  # a ledger may have millions of rows and admit two
        allocated, protected, evicted = (
            list(zip(*(of_group(index)[live].tolist() for index in groups), strict=True))
            for of_group in (ledger.allocated_len, ledger.protected_len, ledger.evicted_len)
        )
        tables = [ledger.page_table(index) for index in groups]
        sizes = [group.page_size for group in ledger.groups]
        resolved, in_flight = ledger.resolved_len[live].tolist(), ledger.in_flight[live].tolist()
        drafted, epoch = ledger.drafted_len[live].tolist(), ledger.epoch[live].tolist()
        idle = ledger.idle[live].tolist()
        for lane, row in enumerate(live.tolist()):
            yield RowPicture(
                row=row,
                tag=ledger.tag(row),
                resolved=resolved[lane],
                in_flight=in_flight[lane],
                drafted=drafted[lane],
                epoch=epoch[lane],
                idle=idle[lane],
                rounds=tuple(rounds.get(row, ())),
                allocated=allocated[lane],
                protected=protected[lane],
                evicted=evicted[lane],
                pages=tuple(
                    tuple(table[row, : length // size].tolist())
                    for table, length, size in zip(tables, allocated[lane], sizes, strict=True)
                ),
            )

    def _rounds(self) -> dict[int, list[Round]]:
        """Return each row's rounds in flight, with the bounds of their roots."""
        ledger = self.ledger
        resolved, epoch = ledger.resolved_len, ledger.epoch
        max_accept_lens = [shape.max_accept_len for shape in ledger.shapes]
        rounds: dict[int, list[Round]] = {}
        for step, kind, state in ledger.steps():
            plan = self._plans.get(step)
            if plan is None or kind != "decode" or state == "resolved":
                continue
            stands = plan.epochs == epoch[plan.rows]
            lanes = zip(plan.rows[stands].tolist(), plan.shapes[stands].tolist(), strict=True)
            for row, shape in lanes:
                of_row = rounds.setdefault(row, [])
                lo = hi = int(resolved[row])
                if of_row:
                    lo, hi = of_row[-1].lo + 1, of_row[-1].hi + max_accept_lens[of_row[-1].shape]
                of_row.append(Round(step, shape, lo, hi, state))
        return rounds


def _group(ledger: Ledger, index: int) -> GroupPicture:
    states, owners, holders = ledger.ownership_map(index, taken=True)
    return GroupPicture(
        states,
        owners,
        holders,
        free=ledger.free_pages(index),
        fenced=ledger.fenced_pages(index),
        cached=ledger.cached_pages(index),
        reclaimable=ledger.reclaimable_pages(index),
    )


def slots(row: RowPicture, index: int, group: Group, shapes: list[Shape]) -> list[Slot]:
    """Return every position of the row in the group `index`, `[0, allocated)`.

    The drafts are those of the newest round in flight, with its root at its least position.
    """
    kinds = [
        Slot(position, _kind(row, index, group.page_size, position))
        for position in range(row.allocated[index])
    ]
    if not row.rounds:
        return kinds
    newest = row.rounds[-1]
    shape, root = shapes[newest.shape], newest.lo
    for slot in _drafts(group, shape, root):
        kinds[slot.position] = slot
    for position in range(root, min(root + shape.num_draft_tokens, len(kinds))):
        old = kinds[position]
        kind: SlotKind = "verify" if old.kind == "reserved" else old.kind
        kinds[position] = Slot(position, kind, old.branch, old.step, old.source, in_verify=True)
    return kinds


def _kind(row: RowPicture, index: int, page_size: int, position: int) -> SlotKind:
    if row.pages[index][position // page_size] == 0:
        return "evicted"
    if position < row.protected[index]:
        return "shared"
    if position < row.resolved:
        return "committed"
    return "root" if position < row.committed else "reserved"


def _drafts(group: Group, shape: Shape, root: int) -> Iterator[Slot]:
    """Yield the cells of the round's branches, and the copies of the prefix's tail before them."""
    if not group.hosts_drafts or shape.num_steps == 0:
        return
    cells = draft_write_positions(
        np.array([root], dtype=np.int32),
        num_steps=shape.num_steps,
        topk=shape.topk,
        page_size=group.page_size,
        layout=group.layout,
    )[0]
    is_holey = group.layout == "holey" and group.page_size > 1 and shape.topk > 1
    last = root % group.page_size if is_holey else 0
    for branch, positions in enumerate(cells.tolist()):
        for step, position in enumerate(positions):
            yield Slot(position, "draft", branch, step)
        for back in range(1, last + 1):
            if branch > 0:
                yield Slot(positions[0] - back, "hole", branch, source=root - back)
