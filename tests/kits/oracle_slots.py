"""The oracle of a ledger with a state group, from docs/contract.md, Recurrent state.

Slots are objects, as pages are. Nothing is counted: a slot is free when a search finds nobody who
holds it and no fence stands. So undoing a fold is to give the row its former slot back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from oracle import Oracle
from oracle_state import Refused, Row, Step


@dataclass(frozen=True)
class StateGroup:
    """What `specpool.StateGroup` says of one."""

    name: str
    num_slots: int
    flush: int
    eager: bool


@dataclass(eq=False)
class Slot:
    """A state slot that was taken at least once."""

    number: int = 0  # The pool's number; 0 until a plan has shown it.
    fence: int = 0  # Latest launched step of everyone who dropped it.


@dataclass
class State:
    """What a row holds: the state after `length` tokens, and the one that `end_turn` keeps."""

    slot: Slot | None = None
    length: int = 0
    kept: tuple[Slot, int] | None = None


@dataclass
class Fold:
    """One lane: read `src` of `start` tokens, fold up to `end`, write `dst`; None is zeros."""

    row: Row
    src: Slot | None
    start: int
    end: int
    dst: Slot | None  # None if nothing is folded.
    is_fresh: bool


class SlotOracle(Oracle):
    """The ledger with a state group, as the contract says it."""

    def __init__(self, *arguments: Any, states: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        (group,) = states
        self.group = StateGroup(group.name, group.num_slots, group.flush, group.eager)
        self.row_states: defaultdict[Row, State] = defaultdict(State)
        self.slots: list[Slot] = []  # All that were ever taken.
        self.folds: dict[int, list[Fold]] = {}  # By step; one for each lane.
        self.planned: list[Fold] | None = None  # Of the step that is being prepared.
        self.met: Counter[str] = Counter()  # What a run must have met, or it proves little.

    # --- What is seen from outside ---

    def slot_holders(self, slot: Slot) -> list[Row]:
        """Rows that hold the slot, one entry for each reason."""
        holders = []
        for row in self.rows.values():
            state = self.row_states[row]
            holders += [row] * (state.slot is slot)
            holders += [row] * (state.kept is not None and state.kept[0] is slot)
            holders += [row] * sum(
                fold.is_fresh and fold.src is slot for fold in self.unlaunched_folds(row)
            )
        return holders

    def held_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if self.slot_holders(slot)]

    def fenced_slots(self) -> list[Slot]:
        waiting = [slot for slot in self.slots if slot.fence > self.completed]
        return [slot for slot in waiting if not self.slot_holders(slot)]

    def free_state_slots(self) -> int:
        return self.group.num_slots - len(self.held_slots()) - len(self.fenced_slots())

    def reclaimable_state_slots(self) -> int:
        return sum(all(row.idle for row in self.slot_holders(slot)) for slot in self.held_slots())

    def unlaunched_folds(self, row: Row) -> list[Fold]:
        """The row's folds that a cancel, or a cut, would undo; newest first."""
        waiting = [step for step in reversed(self.steps) if not step.launched]
        return [
            fold
            for step in waiting
            for lane, fold in zip(step.lanes, self.folds.get(step.number, []), strict=False)
            if fold.row is row and self._stands(lane)
        ]

    # --- The verbs ---

    def _claim(
        self,
        kind: str,
        rows: list[Row],
        shapes: list[int],
        wanted: list[list[int]],
        writes_draft: bool,
    ) -> Step:
        ends = [
            line[0] - 1 if kind == "extend" else self._round_end(row, shape)
            for row, shape, line in zip(rows, shapes, wanted, strict=True)
        ]
        self.planned = [self._fold(row, end) for row, end in zip(rows, ends, strict=True)]
        try:
            step = super()._claim(kind, rows, shapes, wanted, writes_draft)
        finally:
            folds, self.planned = self.planned, None
        for fold in folds:
            if fold.is_fresh:
                fold.dst = Slot()
                self.slots.append(fold.dst)
            state = self.row_states[fold.row]
            state.slot, state.length = fold.dst or fold.src, fold.end
            self.met["eager round"] += kind == "decode" and fold.end > fold.row.resolved
            self.met["round behind an eager one"] += fold.start > fold.row.resolved
            self.met["state written beside a shared one"] += fold.is_fresh and fold.src is not None
            self.met["state written in place"] += fold.dst is not None and not fold.is_fresh
        self.folds[step.number] = folds
        return step

    def _round_end(self, row: Row, shape: int) -> int:
        length = self.row_states[row].length
        if self.group.eager and not row.rounds and self.shapes[shape][2] == 1:
            return row.resolved + 1
        return row.resolved if row.resolved - length >= self.group.flush else length

    def _fold(self, row: Row, end: int) -> Fold:
        state = self.row_states[row]
        if end <= state.length:
            return Fold(row, state.slot, state.length, state.length, None, is_fresh=False)
        in_place = (
            state.slot is not None
            and self.slot_holders(state.slot) == [row]
            and state.slot.fence <= self.completed
        )
        dst = state.slot if in_place else None
        return Fold(row, state.slot, state.length, end, dst, is_fresh=not in_place)

    def _check_pages(self, need: Iterable[int], rows: list[Row]) -> None:
        super()._check_pages(need, rows)
        fresh = [fold for fold in self.planned or [] if fold.is_fresh]
        if len(fresh) > self.free_state_slots():
            waiting = [
                fold for fold in fresh if fold.src and self.slot_holders(fold.src) == [fold.row]
            ]
            self.met["out of slots"] += 1
            self.met["out of slots until a fence opens"] += bool(waiting)
            raise Refused(
                "OutOfPages",
                group=self.group.name,
                need=len(fresh),
                free=self.free_state_slots(),
                cached=0,
                fenced=len(self.fenced_slots()) + len(waiting),
                reclaimable=self.reclaimable_state_slots(),
            )

    def launch(self, step: int) -> None:
        super().launch(step)
        for fold in self.folds[step]:
            if fold.is_fresh and fold.src is not None:
                fold.src.fence = max(fold.src.fence, step if self.page_fencing else 0)

    def cancel(self, step: int) -> None:
        lanes = [lane for record in self.steps if record.number == step for lane in record.lanes]
        super().cancel(step)
        for lane, fold in zip(lanes, self.folds.pop(step), strict=True):
            if self._stands(lane):
                self._undo(fold)

    def _undo(self, fold: Fold) -> None:
        state = self.row_states[fold.row]
        state.slot, state.length = fold.src, fold.start

    def _undo_unlaunched(self, row: Row) -> None:
        for fold in self.unlaunched_folds(row):
            self._undo(fold)
            self.met["fold undone by a cut"] += fold.dst is not None

    def _can_end_at(self, row: Row, length: int) -> bool:
        state = self.row_states[row]
        is_kept = state.kept is not None and state.kept[1] == length
        has_state = length >= state.length or is_kept or length == 0
        return has_state and super()._can_end_at(row, length)

    def trim(self, row: int, length: int, *, ends_turn: bool = False) -> int:
        record = self._row(row)
        if length < 0:
            raise Refused("ShapeError")
        self._undo_unlaunched(record)
        cut = super().trim(row, length, ends_turn=ends_turn)
        state = self.row_states[record]
        if cut < state.length:
            self._drop(state.slot, record)
            is_kept = state.kept is not None and state.kept[1] == cut
            state.slot, state.length = state.kept if is_kept and state.kept else (None, 0)
            self.met["cut to a kept state" if is_kept else "cut to no state"] += 1
        if state.kept is not None and state.kept[1] > cut:
            state.kept = None
        return cut

    def _drop(self, slot: Slot | None, row: Row) -> None:
        if slot is not None:
            slot.fence = max(slot.fence, self._fence(row))

    def end_turn(self, row: int, length: int) -> int:
        if not self.sessions:
            raise Refused("ConfigError")
        cut = super().end_turn(row, length)
        state = self.row_states[self.rows[row]]
        state.kept = None if state.slot is None else (state.slot, state.length)
        return cut

    def _checkpoint(self, row: Row) -> int:
        length = self.row_states[row].length
        windows = (self._window(at, length) - self._sinks(at) for at in self._all)
        is_held = all(
            columns <= part.table.keys() for columns, part in zip(windows, row.parts, strict=True)
        )
        return length if is_held else row.resolved

    def _fork_len(self, row: Row) -> int:
        return self.row_states[row].length

    def fork(self, row: int) -> Row:
        new = super().fork(row)
        source = self.row_states[self.rows[row]]
        self.met["fork of a state"] += source.slot is not None
        self.row_states[new] = State(source.slot, source.length)
        return new

    def give_back(self, row: int) -> None:
        record = self._row(row)
        self._undo_unlaunched(record)
        self._drop(self.row_states[record].slot, record)
        super().give_back(row)
        del self.row_states[record]

    retract = finish = abort = give_back

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise Refused("ConfigError")

    pin_prefix = lend = rebind = admit_lent = export = import_row = _refuse
