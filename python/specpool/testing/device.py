"""`FakeDevice`: runs launched steps on slots that record which token they hold.

Every forward reads its prefix and writes all cells that a real round can touch. So a page that was
handed out too early, a late table delta or a wrong length shows as a stale or foreign token, at the
step that reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from specpool import Ledger, OrderError, Plan

_Ints: TypeAlias = NDArray[np.int32]
_Delta: TypeAlias = tuple[_Ints, _Ints, _Ints]  # rows, columns, pages of one group


# The content of a slot that was never written. Tokens are 0 or greater, and drafts of a step are
# its number negated.
_NOTHING = -(2**63)
# The device's first token. Prompts have smaller ones, and int32 holds those that follow.
_FIRST_TOKEN = 2**20


class DeviceFault(AssertionError):  # noqa: N818 - a fault of the schedule, found by the device
    """A forward read a token of another row, or used a position without a page."""


@dataclass(eq=False)
class _LaunchedLane:
    """One row's part of a launched step."""

    plan: Plan
    lane: int
    lines: list[_Ints]  # the row's pages, per group, at the launch
    accept_len: int | None = None  # None if the lane has not run
    failed: bool = False

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def row(self) -> int:
        return int(self.plan.rows[self.lane])


@dataclass(eq=False)
class _Copies:
    """A step's page copies."""

    step: int
    moves: list[tuple[int, int, int, int]]  # (group, src page, dst page, tokens)
    rows: set[int]  # the rows that the copies go to


@dataclass
class _Sequence:
    """The device's record of a row."""

    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # tokens that extends write, from position 0 on
    failed: bool = False  # a forward or copy of the row failed, so its KV is garbage


class FakeDevice:
    """A device for tests that runs the forwards of one ledger, also out of order.

    Call `launch(plan)` in place of the model's forward, right after `ledger.launch(plan.step)`.
    Then call `accept_lens(step)` for `ledger.resolve`, and `finish(step)` before `ledger.complete`.
    For a row that starts with tokens (`admit` on a prefix, `admit_cached`, `fork`), call `begin`.
    Tokens are invented, other than those of a `prompt` that `begin` was given.

    Args:
        ledger: `launch` takes and acknowledges its table deltas.
        choose: `choose(n)` returns a number in `range(n)`; it decides accept lengths and the order
            in which rows run. The default is random with seed 0.
        in_order: True means one stream, which runs steps in order; the default if the ledger has no
            page fencing. False means that only a row's own forwards keep their order, and page
            copies run before the forwards of their step and of later steps.
        acknowledge: whether `launch` acknowledges the delta; False leaves that to the caller.

    Raises:
        DeviceFault: a forward goes wrong, or a call names a step that was not launched here. Any
            method may raise it.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        choose: Callable[[int], int] | None = None,
        in_order: bool | None = None,
        acknowledge: bool = True,
    ) -> None:
        self._ledger = ledger
        self._choose = choose or random.Random(0).randrange
        self._in_order = not ledger.page_fencing if in_order is None else in_order
        self._acknowledge = acknowledge
        self._groups, self._shapes = ledger.groups, ledger.shapes
        groups = range(len(self._groups))
        self._tables = [ledger.full_table(group) for group in groups]
        # Per group, slot -> token; a token that no sequence knows is garbage.
        self._target: list[dict[int, int]] = [{} for _ in groups]
        self._draft: list[dict[int, int]] = [{} for _ in groups]
        self._sequences: dict[int, _Sequence] = {}
        self._queue: list[_Copies | _LaunchedLane] = []
        self._steps: dict[int, list[_LaunchedLane]] = {}  # The steps in flight.
        self._newest = 0
        self._skipped: set[int] = set()  # Steps before the newest that were not launched here.
        self._next_token = _FIRST_TOKEN

    # --- What an engine calls ---

    def begin(self, row: int, tokens: Sequence[int] = (), *, prompt: Sequence[int] = ()) -> None:
        """Record which tokens a row, just admitted, holds, and which its prefill will write.

        Args:
            row: the row.
            tokens: those that it starts with, such as `tokens(other)`, or after `admit_cached` the
                cached beginning.
            prompt: the tokens that its extends write, from position 0 on: from 0 to 2**20 - 1, or
                from this device. Without it, and behind its end, the device invents tokens.
        """
        self._sequences[row] = _Sequence(list(tokens), list(prompt))

    def tokens(self, row: int) -> list[int]:
        """Return the row's tokens whose KV has been written.

        Those of launched rounds whose results the ledger does not have yet may be among them.
        """
        return list(self._sequence(row).tokens)

    def launch(self, plan: Plan) -> None:
        """Enqueue the forward of a step that the ledger has just launched."""
        self.apply_delta(self._ledger.take_delta(plan.step))
        if self._acknowledge:
            self._ledger.ack_delta(plan.step)
        moves = [tuple(move) for move in plan.page_copies.tolist()]
        if moves:
            rows = {
                int(row)
                for group, _, dst, _ in moves
                for row in np.nonzero((self._tables[group] == dst).any(axis=1))[0]
            }
            self._queue.append(_Copies(plan.step, moves, rows))
        lanes = [
            _LaunchedLane(plan, lane, [table[row].copy() for table in self._tables])
            for lane, row in enumerate(plan.rows)
        ]
        self._queue += lanes
        in_flight = {step for step, _, _ in self._ledger.steps()}
        self._steps = {step: lanes for step, lanes in self._steps.items() if step in in_flight}
        self._steps[plan.step] = lanes
        self._skipped |= set(range(self._newest + 1, plan.step))
        self._newest = plan.step

    def apply_delta(self, delta: Sequence[_Delta]) -> None:
        """Apply a result of `ledger.take_delta` that the caller has taken."""
        for table, (rows, columns, pages) in zip(self._tables, delta, strict=True):
            table[rows, columns] = pages

    def accept_lens(self, step: int, wish: Sequence[int] | None = None) -> list[int]:
        """Return each lane's accept length of a round; run the lanes that have not run yet.

        Args:
            step: a launched decode, not yet both resolved and complete.
            wish: [b], the accept lengths of lanes that have not run. None, or a value out of range,
                means random.
        """
        self._check_launched(step)
        if step not in self._steps:
            raise DeviceFault(f"step {step} is not one of those in flight: {list(self._steps)}")
        lanes = self._steps[step]
        for index, lane in enumerate(lanes):
            self._run_until(lane, 0 if wish is None else int(wish[index]))
        return [lane.accept_len or 0 for lane in lanes]

    def finish(self, step: int) -> None:
        """Run the rest of the step and of every step before it."""
        self._check_launched(step)
        self._run_up_to(step)

    def _run_up_to(self, step: int) -> None:
        while waiting := [unit for unit in self._queue if _step(unit) <= step]:
            self._run_one(waiting)

    def run_some(self) -> None:
        """Run one waiting forward or batch of copies, if there is any."""
        if self._queue:
            self._run_one(self._queue)

    def fail(self, step: int) -> None:
        """Fail the lanes and copies of a step that have not run; their rows then hold garbage."""
        self._check_launched(step)
        for unit in list(self._queue):
            if _step(unit) != step:
                continue
            if isinstance(unit, _LaunchedLane):
                unit.failed = True
            else:
                self._queue.remove(unit)
                for row in unit.rows:
                    self._sequence(row).failed = True

    def check_row(self, row: int, length: int) -> None:
        """Check that a row's KV is right in its sink and from its `evicted_len` to `length`."""
        self._run_up_to(max((_step(unit) for unit in self._queue), default=0))
        for group in range(len(self._groups)):
            line = self._ledger.full_table(group)[row]
            first = int(self._ledger.evicted_len(group)[row])
            for positions in range(min(self._groups[group].sink, first)), range(first, length):
                self._read(f"row {row}", group, line, row, positions, self._target)

    def check_complete(self) -> None:
        """Check that every step that is complete in the ledger was launched here, and has run.

        Raises:
            DeviceFault: a step was not; the message has the step and the missing call.
        """
        completed = self._ledger.completed
        for step in [*sorted(self._skipped), *range(self._newest + 1, completed + 1)]:
            if step <= completed and self._was_launched(step):
                raise DeviceFault(
                    f"step {step} was launched on the ledger, not on the device: "
                    f"call device.launch(plan) right after ledger.launch({step})"
                )
        for unit in self._queue:
            if unit.step <= completed and not (isinstance(unit, _LaunchedLane) and unit.failed):
                raise DeviceFault(
                    f"step {unit.step} is complete, but its forward has not run: "
                    f"call device.finish(step) before ledger.complete(step)"
                )

    def _was_launched(self, step: int) -> bool:
        """Return whether the ledger launched a completed step, and did not cancel it."""
        try:
            self._ledger.complete(step)  # No effect on such a step.
        except OrderError:
            return False
        return True

    def _check_launched(self, step: int) -> None:
        if not 1 <= step <= self._newest or step in self._skipped:
            raise DeviceFault(f"step {step} was not launched on this device")

    # --- Order ---

    def _ready(self, units: Sequence[_Copies | _LaunchedLane]) -> list[_Copies | _LaunchedLane]:
        if self._in_order:
            return [unit for unit in self._queue[:1] if unit in units]
        first_copies = next((unit for unit in self._queue if isinstance(unit, _Copies)), None)
        ready: list[_Copies | _LaunchedLane] = []
        rows: set[int] = set()
        for unit in self._queue:
            if isinstance(unit, _Copies):
                if unit is first_copies:
                    ready.append(unit)
            else:
                if unit.row not in rows and (first_copies is None or unit.step < first_copies.step):
                    ready.append(unit)
                rows.add(unit.row)
        return [unit for unit in ready if unit in units]

    def _run_one(self, units: Sequence[_Copies | _LaunchedLane], wish: int = 0) -> None:
        ready = self._ready(units)
        unit = ready[self._choose(len(ready))]
        self._queue.remove(unit)
        if isinstance(unit, _Copies):
            self._copy(unit)
        else:
            self._forward(unit, wish)

    def _run_until(self, lane: _LaunchedLane, wish: int) -> None:
        while lane in self._queue:
            units = (
                self._queue
                if self._in_order
                else [
                    unit
                    for unit in self._queue
                    if _step(unit) <= lane.step
                    and (unit is lane or isinstance(unit, _Copies) or unit.row == lane.row)
                ]
            )
            ready = self._ready(units)
            self._run_one(ready, wish if ready == [lane] else 0)

    # --- Forwards ---

    def _copy(self, copies: _Copies) -> None:
        for group, src, dst, tokens in copies.moves:
            size = self._groups[group].page_size
            for memory in (self._target[group], self._draft[group]):
                for offset in range(tokens):
                    memory[dst * size + offset] = memory.get(src * size + offset, _NOTHING)

    def _forward(self, unit: _LaunchedLane, wish: int) -> None:
        sequence = self._sequence(unit.row)
        if unit.failed:
            sequence.failed = True
        if unit.plan.kind == "extend":
            if not unit.failed:
                self._extend(unit, sequence)
            unit.accept_len = 0
            return
        max_accept_len = self._shapes[int(unit.plan.shapes[unit.lane])].max_accept_len
        unit.accept_len = wish if 1 <= wish <= max_accept_len else 1 + self._choose(max_accept_len)
        if not unit.failed:
            self._decode(unit, sequence, unit.accept_len)

    def _extend(self, unit: _LaunchedLane, sequence: _Sequence) -> None:
        lo, new_len = int(unit.plan.lo[unit.lane]), int(unit.plan.new_len[unit.lane])
        if lo == 0:
            sequence.failed = False
        if not sequence.failed:
            if len(sequence.tokens) < lo:
                raise DeviceFault(
                    f"{_name(unit)} starts at {lo}, the row has {len(sequence.tokens)} tokens"
                )
            self._read_prefix(unit, lo, self._target)
        sequence.tokens[lo:] = sequence.prompt[lo:new_len]
        sequence.tokens += self._new_tokens(new_len - len(sequence.tokens))
        self._keep(unit, sequence.tokens, range(lo, new_len))

    def _decode(self, unit: _LaunchedLane, sequence: _Sequence, accept_len: int) -> None:
        plan, lane = unit.plan, unit.lane
        lo, hi, root = int(plan.lo[lane]), int(plan.hi[lane]), len(sequence.tokens)
        shape = self._shapes[int(plan.shapes[lane])]
        if sequence.failed:
            root = lo + self._choose(hi - lo + 1)  # Garbage, but in range.
        else:
            if not lo <= root <= hi:
                raise DeviceFault(f"{_name(unit)}: the true root {root} is not in [{lo}, {hi}]")
            self._read_prefix(unit, root, self._target)
            if shape.num_steps > 0 and self._ledger.draft_kv:
                self._read_prefix(unit, root, self._draft)
        for group, spec in enumerate(self._groups):
            cells = set(range(root, root + shape.num_draft_tokens))
            if spec.hosts_drafts:
                cells |= _draft_cells(
                    root, spec.page_size, shape.num_steps, shape.topk, spec.layout == "holey"
                )
            for position in cells:
                slot = self._slot(_name(unit), group, unit.lines[group], position)
                self._target[group][slot] = self._draft[group][slot] = -plan.step
        del sequence.tokens[root:]
        sequence.tokens += self._new_tokens(root + accept_len - len(sequence.tokens))
        self._keep(unit, sequence.tokens, range(root, root + accept_len))

    def _keep(self, unit: _LaunchedLane, tokens: list[int], positions: range) -> None:
        """Write tokens that stay."""
        for group, spec in enumerate(self._groups):
            for position in positions:
                slot = self._slot(_name(unit), group, unit.lines[group], position)
                self._target[group][slot] = tokens[position]
                if unit.plan.writes_draft and spec.hosts_drafts:
                    self._draft[group][slot] = tokens[position]

    def _read_prefix(self, unit: _LaunchedLane, end: int, memory: list[dict[int, int]]) -> None:
        for group, spec in enumerate(self._groups):
            if memory is self._draft and not spec.hosts_drafts:
                continue
            first = 0 if spec.window is None else max(0, end - spec.window + 1)
            line = unit.lines[group]
            for positions in range(min(spec.sink, first)), range(first, end):
                self._read(_name(unit), group, line, unit.row, positions, memory)

    def _read(
        self,
        reader: str,
        group: int,
        line: _Ints,
        row: int,
        positions: range,
        memory: list[dict[int, int]],
    ) -> None:
        tokens = self._sequences[row].tokens
        for position in positions:
            slot = self._slot(reader, group, line, position)
            token, expected = memory[group].get(slot, _NOTHING), tokens[position]
            if token != expected:
                kind = "draft" if memory is self._draft else "target"
                raise DeviceFault(
                    f"{reader}: {kind} KV at position {position}, slot {slot} of group "
                    f"{self._groups[group].name}, is of {_token(token)}, not of token {expected}"
                )

    def _slot(self, reader: str, group: int, line: _Ints, position: int) -> int:
        size = self._groups[group].page_size
        page = int(line[position // size]) if position // size < len(line) else 0
        if page == 0:
            raise DeviceFault(
                f"{reader}: position {position} has no page in group {self._groups[group].name}"
            )
        return page * size + position % size

    def _sequence(self, row: int) -> _Sequence:
        return self._sequences.setdefault(row, _Sequence())

    def _new_tokens(self, count: int) -> list[int]:
        first, self._next_token = self._next_token, self._next_token + count
        return list(range(first, first + count))


def _step(unit: _Copies | _LaunchedLane) -> int:
    return unit.step


def _name(unit: _LaunchedLane) -> str:
    return f"step {unit.step} ({unit.plan.kind}), row {unit.row}"


def _token(content: int) -> str:
    if content == _NOTHING:
        return "nothing"
    return f"token {content}" if content >= 0 else f"drafts of step {-content}"


def _draft_cells(root: int, page_size: int, steps: int, topk: int, holey: bool) -> set[int]:
    """Return the cells that a round's drafts write, copies of the prefix's tail included."""
    if not holey or page_size == 1 or topk == 1:
        return {root + cell for cell in range(steps * topk)}
    if steps == 0:
        return set()
    last = root % page_size
    stride = -(-(last + steps) // page_size) * page_size
    drafts = {root + branch * stride + step for branch in range(topk) for step in range(steps)}
    holes = {
        root - last + branch * stride + offset
        for branch in range(1, topk)
        for offset in range(last)
    }
    return drafts | holes
