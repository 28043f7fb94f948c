"""`RoundGraph`: one captured decode round of one shape, with a fixed number of lanes.

A replay repeats the captured launches with every number that the host computed at the capture. So
the graph reads its lanes from the device (`LaneBuffer`), and the host checks them before the
replay. Unused lanes are row 0 at position 0: they write only to the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool._core import Group, Plan, Shape, sizing_alloc_len_per_decode
from specpool.arrays import Int32
from specpool.engine.attention import GraphRecorder
from specpool.engine.memory.kv_cache import PageBounds
from specpool.engine.scheduler.request import Request
from specpool.engine.worker.graphs.capture import Recording
from specpool.engine.worker.results import Outcome, PendingStep
from specpool.errors import ShapeError
from specpool.kernels.transfer import overwrite


@dataclass(frozen=True, slots=True)
class RoundKind:
    """The kind of a round: what all rounds of a graph have in common.

    Attributes:
        shape: the shape of every lane.
        writes_draft: whether the drafter writes draft KV of the lanes.
    """

    shape: Shape
    writes_draft: bool

    @property
    def drafts(self) -> bool:
        """Whether a drafter takes part: it proposes, or at least writes draft KV."""
        return self.shape.num_draft_tokens > 1 or self.writes_draft


def write_lens(kind: RoundKind, groups: Sequence[Group]) -> Int32:
    """Return how many slots a round writes in each group, counted from its root: [groups, 1].

    It reads none beyond them.
    """
    shape = kind.shape
    lens = [
        sizing_alloc_len_per_decode(
            page_size=group.page_size,
            num_steps=shape.num_steps,
            topk=shape.topk,
            num_draft_tokens=shape.num_draft_tokens,
            hosts_drafts=group.hosts_drafts,
            layout="dense",
        )
        for group in groups
    ]
    return np.array(lens, np.int32).reshape(-1, 1)


def page_bounds(kind: RoundKind, size: int, groups: Sequence[Group]) -> PageBounds:
    """Return how many pages a round of `size` lanes reads, if `RoundGraph.holds` its plan.

    A window bounds what each lane reads. Unused lanes read, too: their roots stand at position 0.
    """
    lens = write_lens(kind, groups)[:, 0].tolist()
    of_rows = [None if group.window is not None else group.num_pages for group in groups]
    unused = [-(-written // group.page_size) for written, group in zip(lens, groups, strict=True)]
    return PageBounds(size, of_rows, unused)


class LaneBuffer:
    """The lanes of the next round on the device, in one buffer of the largest batch for all graphs.

    Attributes:
        cells: int32 [3, max_lanes], each lane's row, lo and hi.
    """

    def __init__(self, max_lanes: int, device: torch.device) -> None:
        """Allocate `max_lanes` lanes, all of them padding."""
        self.cells = torch.zeros(3, max_lanes, dtype=torch.int32, device=device)

    def lanes(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, lo and hi of the first `size` lanes, int32 [size] each."""
        rows, lo, hi = self.cells[:, :size].unbind()
        return rows, lo, hi

    def put(self, plan: Plan) -> None:
        """Write the lanes of `plan`, on torch's current stream; the other lanes become padding."""
        cells = np.zeros(self.cells.shape, np.int32)
        cells[0, : len(plan)], cells[1, : len(plan)] = plan.rows, plan.lo
        cells[2, : len(plan)] = plan.hi
        overwrite(self.cells, cells)


class RoundGraph:
    """One captured decode round.

    Attributes:
        kind: the kind of its rounds.
        size: the number of lanes.
        bound: the greatest root position.
    """

    def __init__(
        self,
        kind: RoundKind,
        size: int,
        bound: int,
        recording: Recording,
        buffer: LaneBuffer,
        *,
        num_rows: int,
        groups: Sequence[Group],
        recorder: GraphRecorder | None = None,
        bounds: PageBounds | None = None,
    ) -> None:
        """Wrap a recording whose lanes are the first `size` of `buffer`.

        Args:
            kind: the kind of its rounds.
            size: the number of lanes.
            bound: the greatest root position.
            recording: what is replayed.
            buffer: holds the lanes.
            num_rows: the ledger's.
            groups: the ledger's.
            recorder: the attention's, which plans each replay; None if there is nothing to plan.
            bounds: for how many pages the recording has room; None means all of its lanes.
        """
        self._recorder = recorder
        self.kind, self.size, self.bound = kind, size, bound
        # Keep only `packed`: other tensors of the outcome lie in the shared pool, where another
        # replay may overwrite them.
        self._packed, self._is_verify = recording.outcome.packed, recording.outcome.is_verify
        self._decide: Callable[[], None] = recording.decide
        self._follow: Callable[[], None] | None = recording.follow
        self._buffer, self._num_rows = buffer, num_rows
        self._write_lens = write_lens(kind, groups)
        self._bounds = bounds
        # int32 [groups, 1]
        self._page_sizes = np.array([[group.page_size] for group in groups], np.int32)

    def holds(self, plan: Plan) -> bool:
        """Return whether the graph has room for all pages that the lanes of a plan may read.

        Rows that share pages may read more than there are: a page once for each of them.
        """
        if self._bounds is None:
            return True
        ends = plan.hi + self._write_lens
        num_read = (-(-ends // self._page_sizes)).sum(1).tolist()
        return all(
            bound is None or read <= bound
            for read, bound in zip(num_read, self._bounds.of_rows, strict=True)
        )

    def replay(self, plan: Plan, requests: Sequence[Request]) -> PendingStep:
        """Replay the round of a plan; its requests must not want log probabilities.

        Raises:
            ShapeError: the graph cannot serve a lane of the plan; nothing is replayed.
        """
        self._check(plan)
        self._buffer.put(plan)
        if self._recorder is not None:
            hi = np.zeros(self.size, np.int32)  # of unused lanes, too
            hi[: len(plan)] = plan.hi
            self._recorder.plan(hi)
        self._decide()
        pending = PendingStep(
            requests, Outcome(self._packed[: len(plan)], is_verify=self._is_verify)
        )
        if self._follow is not None:
            self._follow()
        return pending

    def _check(self, plan: Plan) -> None:
        """Check the lanes as the kernel launchers would, with the host's upper bounds."""
        rows, lo, hi = plan.rows, plan.lo, plan.hi
        if not 1 <= len(plan) <= self.size:
            raise ShapeError(f"{len(plan)} lanes in a graph of {self.size}")
        _check_range("row", rows, 1, self._num_rows)
        _check_range("lo", lo, 0, hi)
        _check_range("hi", hi, lo, self.bound)
        ends = hi + self._write_lens
        if (ends > plan.allocated_after).any():
            group, lane = np.argwhere(ends > plan.allocated_after)[0].tolist()
            raise ShapeError(
                f"lane {lane}, row {rows[lane]}, writes up to slot {ends[group, lane]} of group "
                f"{group}, where it has {plan.allocated_after[group, lane]}"
            )


def _check_range(name: str, values: Int32, least: Int32 | int, greatest: Int32 | int) -> None:
    wrong = (values < least) | (values > greatest)
    if wrong.any():
        lane = int(wrong.argmax())
        low, high = (np.broadcast_to(bound, values.shape)[lane] for bound in (least, greatest))
        raise ShapeError(f"{name} of lane {lane} must be in [{low}, {high}], got {values[lane]}")
