"""The oracle of a ledger with a state group, from docs/contract.md, Recurrent state.

Slots are objects, as pages are. Nothing is counted: a slot is free when a search finds nobody who
holds or keeps it and no fence stands. So undoing a fold is to give the row its former slot back.
The index knows a state by its text, and has it as long as it knows the text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from oracle_index import IndexOracle, Match, Text
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
    writer: tuple[int, Row] | None = None  # The last launched step that writes it, and its row.
    used: int = 0  # The operation after which it became cached, or that found it again.
    was_cached: bool = False


@dataclass(eq=False)
class Mark:
    """A soft mark: the state waits for `index`."""

    slot: Slot
    length: int


@dataclass
class State:
    """What a row holds: the state after `length` tokens, and the one that `end_turn` keeps."""

    slot: Slot | None = None
    length: int = 0
    kept: tuple[Slot, int] | None = None
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Fold:
    """One lane: read `src` of `start` tokens, fold up to `end`, write `dst`; None is zeros."""

    row: Row
    src: Slot | None
    start: int
    end: int
    dst: Slot | None  # None if nothing is folded.
    is_fresh: bool
    can_steal: bool = False  # It may write `src` if all that keeps it gives it up.
    mark: Mark | None = None  # The soft mark that it left.


#: Stands among the holders of a slot for every export.
EXPORT = Row(0, [])


class SlotOracle(IndexOracle):
    """The ledger with a state group, as the contract says it."""

    def __init__(self, *arguments: Any, states: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        (group,) = states
        self.group = StateGroup(group.name, group.num_slots, group.flush, group.eager)
        self.row_states: defaultdict[Row, State] = defaultdict(State)
        self.slots: list[Slot] = []  # All that were ever taken.
        self.folds: dict[int, list[Fold]] = {}  # By step; one for each lane.
        self.planned: list[Fold] | None = None  # Of the step that is being prepared.
        self.indexed_states: dict[tuple[bytes, Text], Slot] = {}  # By salt and text.
        self.exported_states: dict[int, Slot] = {}  # By prefix.
        self.operation = 0  # How many have succeeded.
        self.met: Counter[str] = Counter()  # What a run must have met, or it proves little.

    # --- What is seen from outside ---

    def holders_by_slot(self) -> dict[Slot, list[Row]]:
        """Rows that hold each slot, one entry for each reason, and exports."""
        holders: defaultdict[Slot, list[Row]] = defaultdict(list)
        for exported in self.exported_states.values():
            holders[exported].append(EXPORT)
        for row in self.rows.values():
            state = self.row_states[row]
            folds = [fold.src for fold in self.unlaunched_folds(row) if fold.is_fresh]
            for slot in (state.slot, state.kept and state.kept[0], *folds):
                if slot is not None:
                    holders[slot].append(row)
        return {**holders}

    def slot_holders(self, slot: Slot) -> list[Row]:
        return self.holders_by_slot().get(slot, [])

    def kept_slots(self) -> set[Slot]:
        """Slots that soft marks or the index hold."""
        marks = [mark for row in self.rows.values() for mark in self.row_states[row].marks]
        return {mark.slot for mark in marks} | set(self.indexed_states.values())

    def held_slots(self) -> list[Slot]:
        held = self.holders_by_slot()
        return [slot for slot in self.slots if slot in held]

    def fenced_slots(self) -> list[Slot]:
        held = self.holders_by_slot()
        return [slot for slot in self.slots if slot.fence > self.completed and slot not in held]

    def cached_slots(self) -> list[Slot]:
        free = self.kept_slots() - self.holders_by_slot().keys()
        return [slot for slot in self.slots if slot in free and slot.fence <= self.completed]

    def free_state_slots(self) -> int:
        in_use = {*self.held_slots(), *self.fenced_slots(), *self.cached_slots()}
        return self.group.num_slots - len(in_use)

    def reclaimable_state_slots(self) -> int:
        return sum(all(row.idle for row in rows) for rows in self.holders_by_slot().values())

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
            elif fold.dst in self.kept_slots():
                self._unkeep(fold.dst)
                self.met["steal"] += 1
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
        is_alone = (
            state.slot is not None
            and self.slot_holders(state.slot) == [row]
            and state.slot.fence <= self.completed
        )
        in_place = is_alone and state.slot not in self.kept_slots()
        dst = state.slot if in_place else None
        can_steal = is_alone and not in_place
        return Fold(row, state.slot, state.length, end, dst, not in_place, can_steal)

    def _check_pages(self, need: Iterable[int], rows: list[Row], taken: Sequence[int] = ()) -> None:
        super()._check_pages(need, rows, taken)
        if not self.planned:
            return
        fresh = [fold for fold in self.planned if fold.is_fresh]
        stealing = [fold for fold in fresh if fold.can_steal]
        lacking = max(0, len(fresh) - self.free_state_slots() - len(self.cached_slots()))
        if lacking > len(stealing):
            waiting = [
                fold
                for fold in fresh
                if not fold.can_steal and fold.src and self.slot_holders(fold.src) == [fold.row]
            ]
            self.met["out of slots"] += 1
            self.met["out of slots until a fence opens"] += bool(waiting)
            raise Refused(
                "OutOfPages",
                group=self.group.name,
                need=len(fresh) - len(stealing),
                free=self.free_state_slots(),
                cached=len(self.cached_slots()),
                fenced=len(self.fenced_slots()) + len(waiting),
                reclaimable=self.reclaimable_state_slots(),
            )
        for fold in stealing[:lacking]:
            fold.dst, fold.is_fresh = fold.src, False

    def prepare_extend(
        self,
        rows: Sequence[int],
        new_lens: Sequence[int],
        writes_draft: bool = True,
        keep: Sequence[int] = (),
    ) -> Step:
        if not all(0 <= lane < len(rows) for lane in keep) or sorted(set(keep)) != list(keep):
            raise Refused("ShapeError")
        step = super().prepare_extend(rows, new_lens, writes_draft)
        for lane in keep:
            fold = self.folds[step.number][lane]
            self._leave_mark(fold)
        return step

    def _leave_mark(self, fold: Fold) -> None:
        state = self.row_states[fold.row]
        if state.slot is not None and all(mark.slot is not state.slot for mark in state.marks):
            fold.mark = Mark(state.slot, state.length)
            state.marks.append(fold.mark)
            self.met["soft mark"] += 1

    def launch(self, step: int) -> None:
        super().launch(step)
        for fold in self.folds[step]:
            if fold.dst is not None:
                fold.dst.writer = step, fold.row
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
        if fold.mark in state.marks:
            state.marks.remove(fold.mark)
            self.met["soft mark undone"] += 1

    def _undo_unlaunched(self, row: Row) -> None:
        for fold in self.unlaunched_folds(row):
            self._undo(fold)
            self.met["fold undone by a cut"] += fold.dst is not None

    def _can_end_at(self, row: Row, length: int) -> bool:
        state = self.row_states[row]
        has_state = length >= state.length or length in self._held(state) or length == 0
        return has_state and super()._can_end_at(row, length)

    def _held(self, state: State) -> dict[int, Slot]:
        """The states that the row holds beside its own, by length."""
        held = {mark.length: mark.slot for mark in state.marks}
        return held | ({state.kept[1]: state.kept[0]} if state.kept else {})

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
            state.slot, state.length = self._held(state).get(cut), cut
            case = "cut to a kept state" if is_kept else "cut to a soft mark"
            self.met[case if state.slot else "cut to no state"] += 1
        if state.kept is not None and state.kept[1] > cut:
            state.kept = None
        state.marks = [mark for mark in state.marks if mark.length <= cut]
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

    def export(self, row: int) -> int:
        record = self.rows.get(row)
        slot = self.row_states[record].slot if record else None
        prefix = super().export(row)
        assert slot is not None
        self.exported_states[prefix] = slot
        self.met["export of a state"] += 1
        return prefix

    def release_prefix(self, prefix: int) -> None:
        super().release_prefix(prefix)
        del self.exported_states[prefix]

    def admit(self, prefix: int | None = None, length: int | None = None) -> Row:
        export = self.prefixes.get(prefix)
        if export is not None and length not in (None, 0, export.length):
            raise Refused("ShapeError")
        row = super().admit(prefix, length)
        if row.resolved:
            self.row_states[row] = State(self.exported_states[prefix], row.resolved)
            self.met["admission on an export"] += 1
        return row

    def _check_free_slot(self) -> None:
        if self.free_state_slots() + len(self.cached_slots()) < 1:
            self.met["import without a slot"] += 1
            raise Refused(
                "OutOfPages",
                group=self.group.name,
                need=1,
                free=0,
                cached=0,
                fenced=len(self.fenced_slots()),
                reclaimable=self.reclaimable_state_slots(),
            )

    def import_row(self, length: int, drafted_len: int) -> Row:
        row = super().import_row(length, drafted_len)
        slot = Slot()
        self.slots.append(slot)
        self.row_states[row] = State(slot, length)
        return row

    def give_back(self, row: int) -> None:
        record = self._row(row)
        self._undo_unlaunched(record)
        self._drop(self.row_states[record].slot, record)
        super().give_back(row)
        del self.row_states[record]

    retract = finish = abort = give_back

    # --- The prefix index ---

    def take_states(self, row: int, text: Text, salt: bytes) -> None:
        """`index` found that it knows the text now."""
        record = self.rows[row]
        state = self.row_states[record]
        unwritten = self._unwritten(record)
        states = [(mark.slot, mark.length, mark) for mark in state.marks]
        if state.slot is not None:
            states.append((state.slot, state.length, None))
        for slot, length, mark in states:
            if length > len(text) or slot in unwritten:
                continue
            key = salt, text[:length]
            if key in self.indexed_states:
                self.indexed_states[key].used = self.operation
                self.met["state known already"] += 1
            elif slot not in self.indexed_states.values():
                self.indexed_states[key] = slot
                self.met["waiting state" if self._is_waiting(slot) else "state indexed"] += 1
            if mark is not None:
                state.marks.remove(mark)

    def _unwritten(self, row: Row) -> list[Slot | None]:
        """Slots that a step which is not launched writes."""
        return [fold.dst for fold in self.unlaunched_folds(row)]

    def _is_waiting(self, slot: Slot) -> bool:
        return slot.writer is not None and slot.writer[0] > self.completed

    def _serves(self, slot: Slot) -> bool:
        return not self._is_waiting(slot)

    def _hit_len(self, match: Match, tokens: Text, salt: bytes) -> int:
        lengths = [
            len(text)
            for (other, text), slot in self.indexed_states.items()
            if other == salt and text == tokens[: min(len(text), match.known)]
            if self._serves(slot)
        ]
        longest = max(lengths, default=0)
        held = [length for length in lengths if self._has_windows(match, length)]
        self.met["hit"] += bool(held)
        self.met["hit behind a window"] += max(held, default=0) < longest
        return max(held, default=0)

    def admit_cached(self, tokens: Sequence[int], salt: bytes = b"", **options: Any) -> Row:
        row = super().admit_cached(tokens, salt, **options)
        slot = self.indexed_states.get((salt, tuple(tokens[: row.resolved])))
        self.row_states[row] = State(slot, row.resolved)
        return row

    def abandon(self, step: int) -> None:
        records = [record for record in self.steps if record.number == step]
        super().abandon(step)
        for record in records:
            rows = [lane.row for lane in record.lanes]
            spoiled = [
                key
                for key, slot in self.indexed_states.items()
                if slot.writer and slot.writer[0] >= step and slot.writer[1] in rows
            ]
            for key in spoiled:
                del self.indexed_states[key]
            self.met["spoiled state"] += len(spoiled)

    def _unkeep(self, slot: Slot) -> None:
        for state in self.row_states.values():
            state.marks = [mark for mark in state.marks if mark.slot is not slot]
        states = self.indexed_states.items()
        self.indexed_states = {key: other for key, other in states if other is not slot}

    def observe_states(self, keepers: set[tuple[Any, ...]]) -> None:
        """The ledger has these (salt, text) and (row, length): see what it gave up."""
        self.drop_unknown_states()
        lacking = max(0, -self.free_state_slots())
        cached = self.cached_slots()
        lost = [slot for slot in cached if not self._keepers(slot) & keepers]
        assert len(lost) == lacking, f"{len(lost)} cached slots are gone, {lacking} were lacking"
        stay = [slot.used for slot in cached if slot not in lost]
        for slot in lost:
            assert all(slot.used <= used for used in stay), "a state used later was given up"
            self.met["eviction of a mark" if self._is_marked(slot) else "eviction"] += 1
            self._unkeep(slot)

    def drop_unknown_states(self) -> None:
        """A state goes with the KV of its text."""
        for salt, text in list(self.indexed_states):
            if not self.is_known(salt, text):
                self.met["state dropped with its KV"] += 1
                del self.indexed_states[salt, text]

    def _keepers(self, slot: Slot) -> set[tuple[Any, ...]]:
        marks = {
            (row.number, mark.length)
            for row, state in self.row_states.items()
            for mark in state.marks
            if mark.slot is slot
        }
        return marks | {key for key, other in self.indexed_states.items() if other is slot}

    def _is_marked(self, slot: Slot) -> bool:
        return slot not in self.indexed_states.values()

    def note_uses(self) -> None:
        """At the end of an operation: which slots have become cached."""
        self.operation += 1
        cached = self.cached_slots()
        for slot in self.slots:
            is_cached = slot in cached
            if is_cached and not slot.was_cached:
                slot.used = self.operation
            slot.was_cached = is_cached

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise Refused("ConfigError")

    pin_prefix = lend = rebind = admit_lent = _refuse
