"""`States`: what vLLM's model runner does with the states of recurrent layers, in mode `align`.

A row's running state is in the block of the token behind which it is, or, where drafts were
accepted, in one of the blocks behind that. Before a step it is copied where the step needs it; a
step with drafts leaves one state for each of them; behind a step the state of a whole block is
copied to the block's own place, where the prefix cache names it.
"""

from __future__ import annotations

from lab.engines.content import digest
from lab.engines.device import UNWRITTEN, LateDevice, SlotMemory
from lab.engines.vllm_rows import Lane, RunningState


class States:
    """The states of one group, a key for each block."""

    def __init__(self, device: LateDevice, seed: int, group: int, size: int, blocks: int) -> None:
        self.device, self.seed, self.group, self.size = device, seed, group, size
        self.memory = device.add(SlotMemory("states", blocks, 1))

    def move(self, lane: Lane, begin: int) -> None:
        """Before a step: copy a row's state to the block in which the step leaves its own."""
        if lane.state is None:
            lane.state = RunningState((begin - 1) // self.size)
        state, column = lane.state, self._column(lane, begin)
        if state.column not in (-1, column):
            self._copy(lane, state.column + state.accepted - 1, column)
            state.accepted = 1
        state.column = column

    def read(self, lane: Lane, begin: int) -> None:
        """Begin a step: the state must be that of all tokens before it."""
        if begin == 0 or lane.state is None:
            return
        block = self._block(lane, lane.state.column + lane.state.accepted - 1)
        if self.memory.keys[block, 0] != lane.row.text.state_key(begin):
            held = self.memory.keys[block, 0]
            why = "nobody wrote" if held == UNWRITTEN else "is of other tokens"
            self.device.fault(
                "states",
                "state read",
                f"{lane.row.name} goes on from the state of {begin} tokens in block {block}, "
                f"which {why}",
            )

    def write(self, lane: Lane, begin: int, right: int) -> None:
        """End a step: a state behind the known tokens and behind each draft, right up to `right`.

        Then that of a whole block is copied to the block's place.
        """
        assert lane.state is not None
        state, first = lane.state, begin + lane.count - len(lane.drafts)
        for at in range(len(lane.drafts) + 1):
            tokens = first + at
            key = lane.row.text.state_key(tokens) if tokens <= right else digest(self.seed, tokens)
            self.memory.keys[self._block(lane, state.column + at), 0] = key
        state.accepted = right - first + 1
        whole = right // self.size * self.size
        if whole >= first:
            column = whole // self.size - 1
            if column == state.column:
                state.accepted = 1
            self._copy(lane, state.column + whole - first, column)

    def _column(self, lane: Lane, begin: int) -> int:
        return -(-(begin + lane.count) // self.size) - 1

    def _block(self, lane: Lane, column: int) -> int:
        return lane.blocks[self.group][column]

    def _copy(self, lane: Lane, source: int, target: int) -> None:
        keys = self.memory.keys
        keys[self._block(lane, target)] = keys[self._block(lane, source)]
