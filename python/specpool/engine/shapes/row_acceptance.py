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

_DECAY = 0.98  # of all rows' counts, each round: what is not drafted is tried again some day
_MOST_TRIES = 400.0  # so that a change of all texts is seen within some dozen rounds
# With several families, rounds of a row from which all rows learn, unless they have fewer tries.
_YOUNG_ROUNDS, _FEW_TRIES = 16, 32.0
_PRIOR, _PRIOR_TRIES = 0.6, 2.0  # the rate of the first depth before any round
_HOPE = 0.3  # a family without tries may spare this share of the errors of the best known one


class RowAcceptance:
    """The decayed counts of each row, family and depth."""

    def __init__(self, shapes: Sequence[Shape], num_rows: int) -> None:
        """Start without rounds for rows in `[0, num_rows)`; shape indices are into `shapes`."""
        keys: dict[tuple[int, int], int] = {}
        family = []
        for shape in shapes:
            key = (1, 0) if shape.topk == 1 else (shape.topk, shape.num_draft_tokens)
            family.append(keys.setdefault(key, len(keys)) if shape.num_steps else -1)
        self._family: Int32 = np.array(family, np.int32)
        self._num_steps: Int32 = np.array([shape.num_steps for shape in shapes], np.int32)
        size = max(len(keys), 1), max(int(self._num_steps.max(initial=0)), 1)
        self._hits, self._tries = np.zeros((2, num_rows, *size), np.float32)
        self._pooled: Float64 = np.zeros((2, *size))  # hits and tries of all rows
        self._age = np.zeros(num_rows, np.int64)  # rounds of each row

    def reset(self, row: int) -> None:
        """Forget a row's counts: another request has it."""
        self._hits[row] = self._tries[row] = self._age[row] = 0

    def learn(self, rows: Int32, shapes: Int32, accept_len: Int32) -> None:
        """Count the results of a round's lanes, int32 [B] each.

        A row's own results decide soon which family it drafts. What it says of that family then
        says nothing of other rows, so all rows learn from the first rounds of each row alone, and
        without the hits that the row owes to its own odds. A family with few tries counts in all
        rounds: one row that begins plainly would never try it again.
        """
        counts, prior = (self._hits, self._tries, self._family, self._num_steps), None
        if len(self._pooled[1]) > 1:
            is_rare_family = self._pooled[1, self._family[shapes], 0] < _FEW_TRIES
            is_learning = is_rare_family | (self._age[rows] < _YOUNG_ROUNDS)
            self._age[rows] += 1
            prior = self._prior()
            if not is_learning.all():
                count_acceptance(
                    *counts, rows[~is_learning], shapes[~is_learning], accept_len[~is_learning]
                )
                rows, shapes = rows[is_learning], shapes[is_learning]
                accept_len = accept_len[is_learning]
        new = count_acceptance(*counts, rows, shapes, accept_len, prior=prior)
        self._pooled *= _DECAY
        self._pooled += new.T.reshape(self._pooled.shape)
        tries = self._pooled[1].max(axis=1, keepdims=True)
        self._pooled *= np.minimum(1.0, _MOST_TRIES / np.maximum(tries, 1.0))

    def tokens(self, rows: Int32, *, deviations: float = 0.0) -> Float64:
        """Return the expected tokens of each row's round with each shape, float64 [B, S].

        The log odds of each row beside the others are taken to be `deviations` standard deviations
        above what is estimated.
        """
        counts = self._hits, self._tries, self._prior(), self._family, self._num_steps
        return expected_tokens(*counts, rows, deviations=deviations)

    def _prior(self) -> Float64:
        """Return the rates of all rows, float64 [F, D]."""
        hits, tries = self._pooled
        best_family = int(tries[:, 0].argmax())  # the family that is known best; others lean on it
        known, rate = [], _PRIOR
        for hit, tried in zip(hits[best_family].tolist(), tries[best_family].tolist(), strict=True):
            rate = (hit + _PRIOR_TRIES * rate) / (tried + _PRIOR_TRIES)
            known.append(rate)
        lean = np.array(known)
        lean += (1 - lean) * _HOPE
        rates: Float64 = (hits + _PRIOR_TRIES * lean) / (tries + _PRIOR_TRIES)
        rates[best_family] = known
        return rates
