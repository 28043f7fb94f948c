"""Planted faults: one rule of docs/contract.md, Recurrent state, is broken in each.

A fault is planted in the oracle, which then differs from the ledger once an operation meets the
rule, or between the ledger and the device, which then breaks a law at a forward.
"""

from __future__ import annotations

from typing import Any

from lockstep import Lockstep
from oracle_index import Match
from oracle_slots import Fold, Slot, SlotOracle
from oracle_state import Row
from specpool import Ledger, Plan
from state_device import Ring, StateDevice

# --- What the device is told ---


class FoldsOneMore(StateDevice):
    """Exact length: the state has one token more than the host believes."""

    def _fold(self, plan: Plan, lane: int) -> tuple[int, int, int, int]:
        src, dst, begin, end = super()._fold(plan, lane)
        return src, dst, begin, end + 1


class FoldsToTheRoot(StateDevice):
    """Known: a round folds up to the device's root, which the host does not know."""

    def _fold(self, plan: Plan, lane: int) -> tuple[int, int, int, int]:
        src, dst, begin, end = super()._fold(plan, lane)
        return src, dst, begin, len(self._sequence(int(plan.rows[lane])).tokens) if dst else end


class WritesTheSlotItReads(StateDevice):
    """Read-only: a step writes the slot that a checkpoint or another row holds."""

    def _fold(self, plan: Plan, lane: int) -> tuple[int, int, int, int]:
        src, dst, begin, end = super()._fold(plan, lane)
        return src, src if src and dst else dst, begin, end


class ReadsARecycledSlot(StateDevice):
    """Zero: a row without a slot starts from what the slot that it took holds."""

    def _fold(self, plan: Plan, lane: int) -> tuple[int, int, int, int]:
        src, dst, begin, end = super()._fold(plan, lane)
        return src or dst, dst, begin, end


class HasAShorterRing(StateDevice):
    """Ring: one record fewer."""

    def __init__(self, ledger: Ledger, *arguments: Any, **options: Any) -> None:
        super().__init__(ledger, *arguments, **options)
        self.ring_len -= 1


class SkipsCompaction(StateDevice):
    """Cursor: the records of accepted nodes are not moved to their positions."""

    def _record(self, ring: Ring, tokens: list[int], positions: range) -> None:
        super()._record(ring, tokens, positions[:1])


# --- What the oracle believes ---


class CountsRoots(SlotOracle):
    """Known: a fold counts tokens in flight."""

    def _round_end(self, row: Row, shape: int) -> int:
        return super()._round_end(row, shape) + len(row.rounds)


class EagerInFlight(SlotOracle):
    """Known: an eager round folds its root although results are to come."""

    def _round_end(self, row: Row, shape: int) -> int:
        if self.group.eager and self.shapes[shape][2] == 1:
            return row.resolved + 1
        return super()._round_end(row, shape)


class FoldsBack(SlotOracle):
    """Forward: a round behind an eager one goes back to the resolved tokens."""

    def _round_end(self, row: Row, shape: int) -> int:
        end = super()._round_end(row, shape)
        return min(end, row.resolved) if row.rounds else end

    def _fold(self, row: Row, end: int) -> Fold:
        fold = super()._fold(row, end)
        fold.end = end
        return fold


class IgnoresHolders(SlotOracle):
    """Read-only: a row writes in place although others hold the slot."""

    def _fold(self, row: Row, end: int) -> Fold:
        fold = super()._fold(row, end)
        if fold.is_fresh and fold.src is not None and fold.src.fence <= self.completed:
            return Fold(row, fold.src, fold.start, end, fold.src, is_fresh=False)
        return fold


class IgnoresReaders(SlotOracle):
    """One writer: a row writes in place although a launched step of a former holder reads."""

    def _fold(self, row: Row, end: int) -> Fold:
        fold = super()._fold(row, end)
        if fold.is_fresh and fold.src is not None and self.slot_holders(fold.src) == [row]:
            return Fold(row, fold.src, fold.start, end, fold.src, is_fresh=False)
        return fold


class CutsBelowTheState(SlotOracle):
    """Deep cut: a cut below c goes where no state is held."""

    def _can_end_at(self, row: Row, length: int) -> bool:
        return super(SlotOracle, self)._can_end_at(row, length)


class FreesAtOnce(SlotOracle):
    """Fence: slots of a released row do not wait for its last step."""

    def _drop(self, slot: Slot | None, row: Row) -> None:
        pass


class ReadsWithoutAFence(SlotOracle):
    """Fence: the slot that a launched step reads and gives up does not wait for it."""

    def launch(self, step: int) -> None:
        fences = [slot.fence for slot in self.slots]
        super().launch(step)
        for slot, fence in zip(self.slots, fences, strict=True):
            slot.fence = fence


class CancelKeepsTheFold(SlotOracle):
    """Undo: a cancel leaves the row the slot that the step took."""

    def cancel(self, step: int) -> None:
        states = {row: (state.slot, state.length) for row, state in self.row_states.items()}
        super().cancel(step)
        for row, (slot, length) in states.items():
            self.row_states[row].slot, self.row_states[row].length = slot, length


class CutKeepsTheFold(SlotOracle):
    """Undo: a cut does not undo what is not launched."""

    def _undo_unlaunched(self, row: Row) -> None:
        pass


class KeepsACutCheckpoint(SlotOracle):
    """Conservation: a checkpoint stays held although the row was cut below it."""

    def trim(self, row: int, length: int, *, ends_turn: bool = False) -> int:
        state = self.row_states[self._row(row)]
        kept = state.kept
        cut = super().trim(row, length, ends_turn=ends_turn)
        state.kept = kept
        return cut


class ForgetsTheCheckpoint(SlotOracle):
    """Read-only: `end_turn` does not hold the row's slot."""

    def end_turn(self, row: int, length: int) -> int:
        cut = super().end_turn(row, length)
        self.row_states[self.rows[row]].kept = None
        return cut


# --- What the oracle believes of states that are kept ---


class CancelKeepsTheMark(SlotOracle):
    """Undo: the soft mark of a cancelled extend stays, on a slot that was never written."""

    def _undo(self, fold: Fold) -> None:
        fold.mark = None
        super()._undo(fold)


class CutKeepsTheMark(SlotOracle):
    """Conservation: a soft mark stays although the row was cut below it."""

    def trim(self, row: int, length: int, *, ends_turn: bool = False) -> int:
        marks = self.row_states[self._row(row)].marks
        cut = super().trim(row, length, ends_turn=ends_turn)
        self.row_states[self.rows[row]].marks = marks
        return cut


class ServesWaiting(SlotOracle):
    """Hit: a state serves while a step still writes it."""

    def _serves(self, slot: Slot) -> bool:
        return True


class KeepsSpoiled(SlotOracle):
    """Failure: the index keeps what a failed step wrote."""

    def abandon(self, step: int) -> None:
        states = dict(self.indexed_states)
        super().abandon(step)
        self.indexed_states = states


class KeepsWhatLaterStepsSpoiled(SlotOracle):
    """Failure: the index keeps what the rows of a failed step wrote in later steps."""

    def abandon(self, step: int) -> None:
        states = dict(self.indexed_states)
        super().abandon(step)
        later = {key: slot for key, slot in states.items() if slot.writer and slot.writer[0] > step}
        self.indexed_states |= later


class IndexesTheUnwritten(SlotOracle):
    """Hit: `index` takes a state that an unlaunched step writes."""

    def _unwritten(self, row: Row) -> list[Slot | None]:
        return []


class WritesWhatIsKept(SlotOracle):
    """Read-only: a row writes a slot in place that the index or a soft mark holds."""

    def _fold(self, row: Row, end: int) -> Fold:
        fold = super()._fold(row, end)
        if fold.can_steal:
            return Fold(row, fold.src, fold.start, end, fold.src, is_fresh=False)
        return fold


class NeverSteals(SlotOracle):
    """Progress: a row does not take its own slot back from the index and from soft marks."""

    def _fold(self, row: Row, end: int) -> Fold:
        fold = super()._fold(row, end)
        fold.can_steal = False
        return fold


class StealsBeforeItEvicts(SlotOracle):
    """Progress: a row takes its own slot back although another one could be had."""

    def _fold(self, row: Row, end: int) -> Fold:
        fold = super()._fold(row, end)
        if fold.can_steal and not self.free_state_slots():
            return Fold(row, fold.src, fold.start, end, fold.src, is_fresh=False)
        return fold


class EvictsTheNewest(SlotOracle):
    """Progress: the state that was used last goes first."""

    def note_uses(self) -> None:
        super().note_uses()
        self.operation -= 2


class ForgetsNoStates(SlotOracle):
    """Conservation: a state stays in the index without the KV of its text."""

    def drop_unknown_states(self) -> None:
        pass


class IgnoresWindows(SlotOracle):
    """Hit: a row begins where a window below it is not held."""

    def _has_windows(self, match: Match, length: int) -> bool:
        return True


class SparesFailedRows(SlotOracle):
    """Failure: the states that a failed step wrote are free before the step is complete."""

    def abandon(self, step: int) -> None:
        fences = [slot.fence for slot in self.slots]
        super().abandon(step)
        for slot, fence in zip(self.slots, fences, strict=True):
            slot.fence = fence


def planted(plant: type[SlotOracle] | type[StateDevice]) -> type[Lockstep]:
    """A lockstep with the fault."""
    is_oracle = issubclass(plant, SlotOracle)
    return type("Planted", (Lockstep,), {"slot_oracle" if is_oracle else "state_device": plant})


# Those that chance finds soon.
PLANTS = {
    plant.__name__: planted(plant)
    for plant in (
        FoldsOneMore,
        FoldsToTheRoot,
        WritesTheSlotItReads,
        ReadsARecycledSlot,
        SkipsCompaction,
        CountsRoots,
        EagerInFlight,
        FoldsBack,
        IgnoresHolders,
        CutsBelowTheState,
        FreesAtOnce,
        ReadsWithoutAFence,
        CancelKeepsTheFold,
        CutKeepsTheFold,
        KeepsACutCheckpoint,
        ForgetsTheCheckpoint,
        SparesFailedRows,
        CancelKeepsTheMark,
        CutKeepsTheMark,
        IndexesTheUnwritten,
        WritesWhatIsKept,
        NeverSteals,
        StealsBeforeItEvicts,
        EvictsTheNewest,
    )
}
