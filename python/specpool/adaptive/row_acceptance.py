"""`RowAcceptance`: how likely each row's drafts are right, by depth, with all rows as the prior.

Shapes whose depths are alike form a family: all chains, or the trees of one width and size. The
core counts and estimates (`count_acceptance`, `expected_tokens`); this keeps its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specpool._core import Shape, count_acceptance, expected_tokens
from specpool.arrays import Int32

Float64 = npt.NDArray[np.float64]

_DECAY = 0.98  # of all rows' counts, for each round that drafts the family
_MOST_TRIES = 400.0  # so that a change of all texts is seen within some dozen rounds
_PRIOR, _PRIOR_TRIES = 0.6, 2.0  # the rate of the first depth before any round
_STALE_ROUNDS = 16  # rounds without a family that halve what its counts say against a try
# With several families, rounds of a row from which all rows learn, unless they have fewer tries.
_YOUNG_ROUNDS, _FEW_TRIES = 16, 32.0


class RowAcceptance:
    """The decayed counts of each row, family and depth."""

    def __init__(self, shapes: Sequence[Shape], num_rows: int) -> None:
        """Start without rounds for rows in `[0, num_rows)`; shape indices are into `shapes`."""
        keys: dict[tuple[int, int], int] = {}
        family = []
        for shape in shapes:
            chain = shape.topk == 1
            key = (1, 0) if chain else (shape.topk, shape.num_draft_tokens)
            family.append(keys.setdefault(key, len(keys)) if shape.num_steps else -1)
        self._family: Int32 = np.array(family, np.int32)
        self._num_steps: Int32 = np.array([shape.num_steps for shape in shapes], np.int32)
        # For counting, each shape also stands there with every lesser depth d, at d * S + shape.
        depths = np.arange(1, self._num_steps.max(initial=0) + 1, dtype=np.int32)
        lesser = np.minimum(depths[:, None], self._num_steps).reshape(-1)
        self._counted_steps: Int32 = np.concatenate([self._num_steps, lesser])
        self._counted_family: Int32 = np.tile(self._family, len(depths) + 1)
        depth = max(int(self._num_steps.max(initial=0)), 1)
        size = max(len(keys), 1), depth
        self._hits, self._tries = np.zeros((2, num_rows, *size), np.float32)
        self._pooled: Float64 = np.zeros((2, *size))  # hits and tries of all rows
        self._unseen = np.zeros(size[0])  # rounds since each family was drafted
        self._age = np.zeros(num_rows, np.int64)  # rounds of each row
        self._priors: dict[bool, Float64] = {}

    def reset(self, row: int) -> None:
        """Forget a row's counts: another request has it."""
        self._hits[row] = self._tries[row] = self._age[row] = 0

    def learn(
        self,
        rows: Int32,
        shapes: Int32,
        accept_len: Int32,
        goes_on: npt.NDArray[np.bool_] | None = None,
        undrafted: Int32 | None = None,
    ) -> None:
        """Count the results of a round's lanes.

        Where a lane `goes_on`, bool [B], the next draft was right too, but the target did not read
        it. So it counts as a hit, and the drafts behind it do not count. None = no lane does.

        A shape's last levels that were `undrafted`, int32 [B], do not count. None = all were
        drafted.

        A row's own results decide soon which family it drafts. What it says of that family then
        says nothing of other rows, so all rows learn from the first rounds of each row alone, and
        without the hits that the row owes to its own odds. A family with few tries counts in all
        rounds: one row that begins plainly would never try it again.
        """
        full = depth = self._num_steps[shapes]  # and the levels that count
        if undrafted is not None:
            depth = np.maximum(full - undrafted, 1)
        if goes_on is not None:
            goes_on = goes_on & (accept_len <= full)
            depth = np.where(goes_on, accept_len, depth)
            accept_len = accept_len + goes_on.astype(np.int32)
        if depth is not full:
            lesser = depth * len(self._family) + shapes
            shapes = np.where(depth < full, lesser, shapes).astype(np.int32)
        lanes = rows, shapes, accept_len
        counts, prior = (self._hits, self._tries, self._counted_family, self._counted_steps), None
        if len(self._unseen) > 1:
            few = self._pooled[1, self._counted_family[shapes], 0] < _FEW_TRIES
            young = few | (self._age[rows] < _YOUNG_ROUNDS)
            self._age[rows] += 1
            prior = self._prior(hopes=False)
            if not young.all():
                count_acceptance(*counts, *(lane[~young] for lane in lanes))
                rows, shapes, accept_len = (lane[young] for lane in lanes)
        new = count_acceptance(*counts, rows, shapes, accept_len, prior=prior)
        new = new.T.reshape(self._pooled.shape)
        for family, tries in enumerate(new[1, :, 0].tolist()):
            self._unseen[family] += 1
            if not tries:
                continue
            self._unseen[family] = 0
            pooled = self._pooled[:, family]
            pooled *= _DECAY
            pooled += new[:, family]
            if pooled[1, 0] > _MOST_TRIES:  # of all depths, the first has the most
                pooled *= np.minimum(1.0, _MOST_TRIES / np.maximum(pooled[1], 1.0))
        self._priors.clear()

    def tokens(self, rows: Int32, *, hopes: bool = False, deviations: float = 0.0) -> Float64:
        """Return the expected tokens of each row's round with each shape, float64 [B, S].

        With `hopes`, families that were not drafted lately are taken to be better than they were.
        The log odds of each row beside the others are taken to be so many standard `deviations`
        above what is estimated.
        """
        counts = self._hits, self._tries, self._prior(hopes), self._family, self._num_steps
        return expected_tokens(*counts, rows, deviations=deviations)

    def _prior(self, hopes: bool) -> Float64:
        """Return the rates of all rows, float64 [F, D]."""
        if (known := self._priors.get(hopes)) is not None:
            return known
        hits, tries = self._pooled
        best = int(tries[:, 0].argmax())  # the family that is known best; others lean on it
        base, lean = [], _PRIOR
        for hit, tried in zip(hits[best].tolist(), tries[best].tolist(), strict=True):
            lean = (hit + _PRIOR_TRIES * lean) / (tried + _PRIOR_TRIES)
            base.append(lean)
        rates: Float64 = (hits + _PRIOR_TRIES * np.array(base)) / (tries + _PRIOR_TRIES)
        rates[best] = base
        if hopes:
            fresh = tries * 0.5 ** (self._unseen[:, None] / _STALE_ROUNDS)
            rates = rates + (1 - rates) / (1 + fresh)
        self._priors[hopes] = rates
        return rates
