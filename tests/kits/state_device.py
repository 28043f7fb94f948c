"""A fake device with recurrent states: slots that record their text, and a ring a row.

It checks the laws of docs/contract.md, Recurrent state, at the forward that would break them. Rows
run in any order, as on `FakeDevice`, and the nodes of a round are written before anything is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specpool import Ledger, Plan
from specpool.testing import DeviceFault, FakeDevice

Ring: TypeAlias = dict[int, tuple[int, int]]  # place -> (position, token)


@dataclass
class Touch:
    """What one launched lane does with slots."""

    step: int
    sequence: Any  # Of its row: another request on the row has another.
    src: int
    dst: int


class StateDevice(FakeDevice):
    """`FakeDevice` with slots and rings. `plans` has the plan of every step prepared, by number."""

    def __init__(self, ledger: Ledger, plans: Mapping[int, Plan], **options: Any) -> None:
        super().__init__(ledger, **options)
        self.plans = plans
        self.ring_len = ledger.state_ring_len(0)
        self.slots: dict[int, tuple[int, ...] | str] = {0: ()}  # Slot -> the text of its state.
        self.rings: defaultdict[int, Ring] = defaultdict(dict)  # By row.
        self.touches: list[Touch] = []

    def begin(self, row: int, tokens: Sequence[int] = (), **prompt: Any) -> None:
        super().begin(row, tokens, **prompt)
        self.rings[row] = {}

    def launch(self, plan: Plan) -> None:
        super().launch(plan)
        if self._ledger.page_fencing:  # Without, there is one stream.
            self._check_writers(plan)

    def _check_writers(self, plan: Plan) -> None:
        """Check that no step of another row on its way uses a slot that this one writes.

        Nor may it write a slot that this one reads.
        """
        completed = self._ledger.completed
        self.touches = [touch for touch in self.touches if touch.step > completed]
        for lane, row in enumerate(plan.rows.tolist()):
            sequence, (src, dst, _, _) = self._sequence(row), self._fold(plan, lane)
            for touch in self.touches:
                if touch.sequence is sequence:
                    continue
                if dst and dst in (touch.src, touch.dst):
                    raise DeviceFault(
                        f"step {plan.step}, row {row} writes slot {dst} of step {touch.step}"
                    )
                if src and src == touch.dst:
                    raise DeviceFault(
                        f"step {plan.step}, row {row} reads slot {src}, step {touch.step} writes it"
                    )
            self.touches.append(Touch(plan.step, sequence, src, dst))

    def _forward(self, unit: Any, wish: int) -> None:
        plan, lane = unit.plan, unit.lane
        src, dst, begin, end = self._fold(plan, lane)
        sequence, ring = self._sequence(unit.row), self.rings[unit.row]
        if plan.kind == "extend":
            root, nodes = int(plan.start[lane]), 0
        else:
            root = len(sequence.tokens)
            nodes = self._shapes[int(plan.shapes[lane])].num_draft_tokens
        for position in range(root, root + nodes):
            ring[position % self.ring_len] = position, -plan.step
        if not sequence.failed and not unit.failed:
            self._read_state(unit, sequence.tokens, src, range(begin, root))
        super()._forward(unit, wish)
        tokens = sequence.tokens
        self._record(ring, tokens, range(max(root, end), len(tokens)))
        if dst:
            is_garbage = sequence.failed or unit.failed
            self.slots[dst] = "garbage" if is_garbage else tuple(tokens[:end])

    def _fold(self, plan: Plan, lane: int) -> tuple[int, int, int, int]:
        """Return (src, dst, from, to) of a lane."""
        names = ("state_src", "state_dst", "state_from", "state_to")
        src, dst, begin, end = (int(getattr(plan, name)[0, lane]) for name in names)
        return src, dst, begin, end

    def _record(self, ring: Ring, tokens: list[int], positions: range) -> None:
        """Write the records of the tokens that stay: of an extend, or of the accepted nodes."""
        for position in positions:
            ring[position % self.ring_len] = position, tokens[position]

    def _read_state(self, unit: Any, tokens: list[int], src: int, pending: range) -> None:
        who = f"step {unit.step} ({unit.plan.kind}), row {unit.row}"
        if self.slots.get(src) != tuple(tokens[: pending.start]):
            raise DeviceFault(f"{who}: slot {src} is not the state after {pending.start} tokens")
        for position in pending:
            record = self.rings[unit.row].get(position % self.ring_len)
            if record != (position, tokens[position]):
                raise DeviceFault(f"{who}: the record of position {position} is {record}")

    def check_states(self) -> None:
        """Check the states of every row of which nothing is on its way or prepared."""
        ledger = self._ledger
        waiting = {unit.row for unit in self._queue if hasattr(unit, "row")}
        waiting |= {
            int(row)
            for step, _, state in ledger.steps()
            if state in ("prepared", "stale")
            for row in self.plans[step].rows.tolist()
        }
        for row in ledger.live_rows().tolist():
            sequence = self._sequence(row)
            if row in waiting or sequence.failed:
                continue
            states = [(int(ledger.state_slot(0)[row]), int(ledger.state_len(0)[row]))]
            states += [kept] if (kept := ledger.kept_state(0, row)) else []
            states += ledger.soft_marks(0, row)
            for slot, length in states:
                if self.slots.get(slot) != tuple(sequence.tokens[:length]):
                    raise DeviceFault(f"row {row}: slot {slot} is not its state of {length} tokens")

    def check_exported(self, slot: int, text: tuple[int, ...]) -> None:
        """Check the state of an export."""
        if self.slots.get(slot) != text:
            raise DeviceFault(f"slot {slot} of an export is not its state of {len(text)} tokens")

    def check_indexed(self, slot: int, text: tuple[int, ...]) -> None:
        """Check a state of the prefix index that may serve."""
        if self.slots.get(slot) != text:
            raise DeviceFault(
                f"slot {slot} of the index is not the state of its {len(text)} tokens"
            )
