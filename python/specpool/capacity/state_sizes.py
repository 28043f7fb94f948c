"""`StateSize`: the slots and rings of recurrent layers, and their bytes, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpool._core import Shape, StateGroup


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What the recurrent layers of a model keep.

    Attributes:
        slot: bytes of one state of all layers.
        record: bytes of what all layers record of one token.
        flush: the recorded tokens that are worth a fold; see `StateGroup`.
        snapshots: whether a row keeps a whole state for each draft token instead of records. No
            engine here does so: a plan compares with those that do. vLLM 0.33 has 1 +
            num_speculative_tokens states a request (`MambaSpec.max_memory_usage_bytes`), which is N
            for a chain of N nodes.
    """

    slot: int
    record: int
    flush: int = 1
    snapshots: bool = False

    def size(
        self,
        shapes: Sequence[Shape],
        *,
        num_slots: int,
        num_rows: int,
        num_sessions: int,
        overlap_depth: int,
    ) -> StateSize:
        """Return the size of so many slots, and of the rings of rows, sessions and row 0.

        Snapshots are of the rows that run alone.
        """
        if self.snapshots:
            num_drafts = max(shape.num_draft_tokens for shape in shapes) - 1
            return StateSize(num_slots, self.slot, num_rows, num_drafts, self.slot, self.flush)
        ring_len = state_group(num_slots, self.flush).ring_len(shapes, overlap_depth=overlap_depth)
        num_rings = num_rows + num_sessions + 1
        return StateSize(num_slots, self.slot, num_rings, ring_len, self.record, self.flush)


@dataclass(frozen=True, slots=True)
class StateSize:
    """The state group of a ledger and its size.

    Attributes:
        num_slots: without slot 0, which is zeros.
        slot_bytes: of one state.
        num_rings: how many rings there are.
        ring_len: records of a ring.
        record_bytes: of one record; the bytes that a draft token takes.
        flush: of the state group.
    """

    num_slots: int
    slot_bytes: int
    num_rings: int
    ring_len: int
    record_bytes: int
    flush: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that runs: a slot and a ring."""
        return self.slot_bytes + self.ring_len * self.record_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots and rings, slot 0 included."""
        slots = (self.num_slots + 1) * self.slot_bytes
        return slots + self.num_rings * self.ring_len * self.record_bytes


def state_group(num_slots: int, flush: int) -> StateGroup:
    """Return the state group of an engine's ledger."""
    return StateGroup("states", num_slots=num_slots, flush=flush, eager=True)
