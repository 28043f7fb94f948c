"""`LaneStates`: what the lanes of one forward read of their states, record and fold.

For each lane a step reads the slot `src`, which holds the state after `begin` tokens. It folds the
tokens `[begin, end)` into it and writes the slot `dst`. Then it runs over the tokens from `end` on,
without keeping their state, and records them in the row's ring. Some of the tokens that it folds or
runs over are in the ring already, the others are the lane's own tokens, from its root on:

    begin ---- end ---- root ---- root + N      of a round
    begin ---- start ---- end = new_len - 1     of an extend, whose last token is recorded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool._core import Plan
from specpool.arrays import Int32, Int64
from specpool.engine.models.recurrent import RecurrentState
from specpool.kernels.transfer import upload


@dataclass(frozen=True, slots=True)
class StateFolds:
    """What a plan says of its lanes' states: int32 [B] each, on the host; see `Plan.state_src`."""

    rows: Int32
    src: Int32
    dst: Int32
    begin: Int32
    end: Int32

    @classmethod
    def of_plans(cls, plans: Sequence[Plan]) -> StateFolds:
        """Return those of plans, one after the other."""
        return cls(
            np.concatenate([plan.rows for plan in plans]),
            *(
                np.concatenate([getattr(plan, name)[0] for plan in plans])
                for name in ("state_src", "state_dst", "state_from", "state_to")
            ),
        )


@dataclass(frozen=True, slots=True)
class FoldGroup:
    """Lanes that fold equally many records, and after them equally many of their own tokens.

    Attributes:
        src: int64 [b], the slots to read.
        dst: int64 [b], the slots to write.
        records: int64 [b * k], places in the ring.
        tokens: int64 [b * m], tokens of the forward.
        is_fresh: whether every lane begins at position 0, from a state of zeros.
    """

    src: Tensor
    dst: Tensor
    records: Tensor
    tokens: Tensor
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class RunGroup:
    """The paths to run over without keeping their state, padded to the longest.

    A chain is one path. A tree has one path for each leaf.

    Attributes:
        src: int64 [b], the slots to read, after all folds.
        records: int64 [n], places in the ring of all records that some path needs.
        inputs: int64 [b * w], the inputs of each path: indices into the forward's T tokens, or
            from T on into `records`.
        recorded: int64 [m], the forward's tokens that are recorded.
        places: int64 [m], where in the ring.
    """

    src: Tensor
    records: Tensor
    inputs: Tensor
    recorded: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class LaneStates:
    """What the lanes of a forward of T tokens read of their states, record and fold.

    Attributes:
        state: the slots and rings.
        folds: the lanes that fold.
        run: the lanes that run on; None if all tokens are folded.
        outputs: int64 [T], the place of each token's output among those of `folds`, then `run`.
    """

    state: RecurrentState
    folds: Sequence[FoldGroup]
    run: RunGroup | None
    outputs: Tensor

    @classmethod
    def build(
        cls,
        state: RecurrentState,
        folds: StateFolds,
        roots: Int32,
        widths: Int32,
        paths: Mapping[int, Int64],
        device: torch.device,
    ) -> LaneStates:
        """Group the lanes, on the host, for all mixers of a forward.

        Args:
            state: the slots and rings.
            folds: of B lanes.
            roots: int32 [B], the position of each lane's first token.
            widths: int32 [B], the tokens of each lane, which follow one another in the forward.
            paths: for each lane whose tokens are a tree, its paths from the root to each leaf:
                int64 [n, w], nodes, padded with the leaf.
            device: of the state.
        """
        ring_len = state.ring_len
        firsts = np.cumsum(widths, dtype=np.int64) - widths
        outputs = np.zeros(int(widths.sum()), np.int64)
        is_folding = folds.dst > 0
        num_own = np.where(is_folding, np.maximum(folds.end - roots, 0), 0)  # tokens that fold
        num_records = np.where(is_folding, np.minimum(folds.end, roots) - folds.begin, 0)

        def ring_places(lane: int, begin: int, count: int) -> Int64:
            positions = np.arange(begin, begin + count, dtype=np.int64)
            return int(folds.rows[lane]) * ring_len + positions % ring_len

        lanes_by_kind: dict[tuple[int, int, bool], list[int]] = {}
        for lane in np.flatnonzero(is_folding).tolist():
            kind = int(num_records[lane]), int(num_own[lane]), not folds.src[lane]
            lanes_by_kind.setdefault(kind, []).append(lane)
        groups, num_outputs = [], 0
        for (count, own, is_fresh), lanes in lanes_by_kind.items():
            tokens = (firsts[lanes][:, None] + np.arange(own)).reshape(-1)
            outputs[tokens] = num_outputs + np.arange(len(tokens))
            num_outputs += len(tokens)
            records = [ring_places(lane, int(folds.begin[lane]), count) for lane in lanes]
            arrays = folds.src[lanes], folds.dst[lanes], np.concatenate(records), tokens
            uploaded = upload(device, *(array.astype(np.int64) for array in arrays))
            groups.append(FoldGroup(*uploaded, is_fresh=is_fresh))

        slots: list[int] = []
        sequences: list[Int64] = []
        records, recorded, places = [], [], []
        ends: list[tuple[int, int]] = []  # of each path: its records, and its first own token
        total = len(outputs)
        for lane in np.flatnonzero(widths > num_own).tolist():
            own, width, root = int(num_own[lane]), int(widths[lane]), int(roots[lane])
            first = int(firsts[lane])
            begin = min(int(folds.end[lane]), root)
            pending = np.arange(total, total + root - begin)
            total += len(pending)
            records.append(ring_places(lane, begin, root - begin))
            tokens = np.arange(first + own, first + width)
            recorded.append(tokens)
            places.append(ring_places(lane, root + own, width - own))
            lane_paths = paths.get(lane)
            for path in (tokens,) if lane_paths is None else first + lane_paths:
                sequences.append(np.concatenate([pending, path]))
                ends.append((len(pending), len(path)))
                slots.append(int(folds.dst[lane] or folds.src[lane]))
        run = None
        if slots:
            longest = max(len(sequence) for sequence in sequences)
            inputs = np.empty((len(slots), longest), np.int64)
            for number, (sequence, (num_pending, num_tokens)) in enumerate(
                zip(sequences, ends, strict=True)
            ):
                inputs[number, : len(sequence)] = sequence
                inputs[number, len(sequence) :] = sequence[-1]
                start = num_outputs + number * longest + num_pending
                computed = np.arange(start, start + num_tokens)
                # Backwards: a node's first place counts, because a padded leaf comes again.
                outputs[sequence[num_pending:][::-1]] = computed[::-1]
            arrays = (
                np.array(slots, np.int64),
                np.concatenate(records),
                inputs.reshape(-1),
                np.concatenate(recorded),
                np.concatenate(places),
            )
            run = RunGroup(*upload(device, *arrays))
        (order,) = upload(device, outputs)
        return cls(state, groups, run, order)
