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

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.outputs)

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
        firsts = np.cumsum(widths, dtype=np.int64) - widths
        is_folding = folds.dst > 0
        builder = _Builder(
            ring_len=state.ring_len,
            folds=folds,
            roots=roots.tolist(),
            widths=widths.tolist(),
            firsts=firsts.tolist(),
            num_folded=np.where(is_folding, np.maximum(folds.end - roots, 0), 0).tolist(),
            outputs=np.zeros(int(widths.sum()), np.int64),
            device=device,
        )
        groups, run = builder.fold_groups(), builder.run_group(paths)
        (order,) = upload(device, builder.outputs)
        return cls(state, groups, run, order)


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Builds the groups of B lanes, and fills in where each token's output will be."""

    ring_len: int
    folds: StateFolds
    roots: list[int]
    widths: list[int]
    firsts: list[int]  # of each lane, the number of its first token
    num_folded: list[int]  # of each lane, how many of its own tokens fold
    outputs: Int64  # of `LaneStates`
    device: torch.device
    num_outputs: int = 0  # of the groups built so far

    def fold_groups(self) -> list[FoldGroup]:
        """Return the lanes that fold, grouped by how many records and how many own tokens."""
        folds = self.folds
        lanes_by_kind: dict[tuple[int, int, bool], list[int]] = {}
        for lane in np.flatnonzero(folds.dst).tolist():
            num_records = min(int(folds.end[lane]), self.roots[lane]) - int(folds.begin[lane])
            kind = num_records, self.num_folded[lane], not folds.src[lane]
            lanes_by_kind.setdefault(kind, []).append(lane)
        groups = []
        for (num_records, num_own, is_fresh), lanes in lanes_by_kind.items():
            tokens = np.concatenate([self._tokens(lane, 0, num_own) for lane in lanes])
            records = [self._places(lane, int(folds.begin[lane]), num_records) for lane in lanes]
            self.outputs[tokens] = np.arange(self.num_outputs, self.num_outputs + len(tokens))
            self.num_outputs += len(tokens)
            src, dst, places, indices = upload(
                self.device,
                folds.src[lanes].astype(np.int64),
                folds.dst[lanes].astype(np.int64),
                np.concatenate(records),
                tokens,
            )
            groups.append(FoldGroup(src, dst, places, indices, is_fresh))
        return groups

    def run_group(self, paths: Mapping[int, Int64]) -> RunGroup | None:
        """Return the paths of all lanes that have tokens beyond their fold."""
        folds = self.folds
        slots: list[int] = []
        sequences: list[Int64] = []  # the inputs of each path
        pending_lens: list[int] = []  # of each path, the records before its own tokens
        records, recorded, places = [], [], []
        num_inputs = len(self.outputs)
        for lane, (root, width, num_own) in enumerate(
            zip(self.roots, self.widths, self.num_folded, strict=True)
        ):
            if width == num_own:
                continue
            begin = min(int(folds.end[lane]), root)
            pending = np.arange(num_inputs, num_inputs + root - begin)
            num_inputs += len(pending)
            records.append(self._places(lane, begin, root - begin))
            unfolded = self._tokens(lane, num_own, width)
            recorded.append(unfolded)
            places.append(self._places(lane, root + num_own, width - num_own))
            tree = paths.get(lane)
            for path in [unfolded] if tree is None else self.firsts[lane] + tree:
                sequences.append(np.concatenate([pending, path]))
                pending_lens.append(len(pending))
                slots.append(int(folds.dst[lane] or folds.src[lane]))
        if not slots:
            return None
        longest = max(map(len, sequences))
        inputs = np.empty((len(slots), longest), np.int64)
        for number, (sequence, num_pending) in enumerate(zip(sequences, pending_lens, strict=True)):
            inputs[number, : len(sequence)] = sequence
            inputs[number, len(sequence) :] = sequence[-1]
            start = self.num_outputs + number * longest
            computed = np.arange(start + num_pending, start + len(sequence))
            # Backwards: a node's first place counts, because a padded leaf comes again.
            self.outputs[sequence[num_pending:][::-1]] = computed[::-1]
        arrays = (
            np.array(slots, np.int64),
            np.concatenate(records),
            inputs.reshape(-1),
            np.concatenate(recorded),
            np.concatenate(places),
        )
        return RunGroup(*upload(self.device, *arrays))

    def _tokens(self, lane: int, begin: int, end: int) -> Int64:
        """Return the numbers of the lane's own tokens `[begin, end)` in the forward."""
        return np.arange(self.firsts[lane] + begin, self.firsts[lane] + end)

    def _places(self, lane: int, begin: int, count: int) -> Int64:
        """Return the places of `count` positions from `begin` on in the lane's ring."""
        positions = np.arange(begin, begin + count, dtype=np.int64)
        return int(self.folds.rows[lane]) * self.ring_len + positions % self.ring_len
