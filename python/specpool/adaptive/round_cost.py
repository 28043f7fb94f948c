"""`RoundCost`: the seconds of a round as a function of how many rows have each shape.

The seconds are a sum: a constant, a share per row, for each shape that drafts a charge and a share
per lane, and a slope on the nodes of the verify beyond a ridge (on a GPU, the nodes up to the ridge
ride along with the weights). Every share is 0 or more. The least squares of relative errors fit it
to measured rounds: those of the start, then those in service. Rounds of about the same number of
rows count most, because no such sum holds from one row to a thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specpool._core import Shape
from specpool.arrays import Int64

Float64 = npt.NDArray[np.float64]

_MOST_MIXES = 128  # compositions of rounds that are kept; the oldest of service goes first
_WEIGHT = 0.2  # of a new measurement of a composition
_NUM_RATIOS = 9  # rounds whose median is the load
_REFIT = 64  # the most rounds in service from one fit to the next
_NUM_RIDGES = 10
_NEAR = 2.0  # how fast rounds count less, by octaves of their rows, squared
_BETTER = 0.9  # a ridge must leave less than this share of the error without one
# Before any measurement: shares of a plain round of one row.
_PER_STEP, _PER_NODE, _PER_ROW = 0.1, 0.02, 0.02


class RoundCost:
    """A fitted sum of shares, and the load that the latest rounds had beside it.

    Attributes:
        load: measured seconds over fitted ones, the median of the latest rounds.
        ridge, slope: nodes of a verify without a cost of their own, seconds of each one beyond.
        charge, lane: float64 [S], seconds of a shape once, and of each of its rows.
        nodes: float64 [S], nodes of a row's verify.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """Start without measurements; shape indices are into `shapes`."""
        self._num_steps = np.array([shape.num_steps for shape in shapes], np.float64)
        self.nodes: Float64 = np.array([shape.num_draft_tokens for shape in shapes], np.float64)
        self._seconds: dict[tuple[int, ...], float] = {}  # by the lanes of each shape
        self._told: set[tuple[int, ...]] = set()  # those that were measured at the start
        self._since, self._until = 0, 4  # rounds since the latest fit, and until the next
        self._octave = -1  # of the sizes that it was for; -1 = fit anew
        self._ratios: deque[float] = deque(maxlen=_NUM_RATIOS)
        self.load, self.ridge, self.slope = 1.0, 0.0, 0.0
        self._base = np.array([1.0, _PER_ROW])
        self.charge: Float64
        self.lane: Float64
        self.charge, self.lane = np.zeros((2, len(shapes)))

    def tell(self, shape: int, batch_size: int, seconds: float) -> None:
        """Add a round of the start, of one shape; of several equal ones the least counts."""
        if not seconds > 0:
            return
        counts = np.zeros(len(self.nodes), np.int64)
        counts[shape] = batch_size
        key = tuple(counts.tolist())
        self._seconds[key] = min(seconds, self._seconds.get(key, seconds))
        self._told.add(key)
        self._octave = -1

    def observe(self, counts: Int64, seconds: float) -> None:
        """Add a round in service; `counts` are the lanes of each shape, int64 [S]."""
        if not seconds > 0:
            return
        self.fit(int(counts.sum()))
        key = tuple(counts.tolist())
        fitted = self.of(counts)
        took = seconds / self.load  # before this round: a stall must not hide in its own load
        # Rounds of one shape alone tell the load: they were measured at the start. What several
        # shapes take together would pass for load, and never be learned.
        if np.count_nonzero(counts) == 1:
            self._ratios.append(seconds / fitted)
            self.load = float(np.median(self._ratios))
        known = self._seconds.get(key, fitted)
        self._seconds[key] = known + _WEIGHT * (min(max(took, known / 2), 2 * known) - known)
        if len(self._seconds) > _MOST_MIXES:
            oldest = next((each for each in self._seconds if each not in self._told), key)
            del self._seconds[oldest]
        self._since += 1
        if self._since >= self._until:
            self._since, self._octave = 0, -1
            self._until = min(2 * self._until, _REFIT)

    def base(self, batch_size: int) -> float:
        """Return the seconds of a round of so many rows without drafts."""
        return float(self._base[0] + self._base[1] * batch_size)

    def of(self, counts: Int64) -> float:
        """Return the fitted seconds of a round, without load; `counts` as in `observe`."""
        seconds = self.base(int(counts.sum())) + self.charge[counts > 0].sum()
        seconds += counts @ self.lane + self.slope * max(
            0.0, float(counts @ self.nodes) - self.ridge
        )
        return float(seconds)

    def fit(self, batch_size: int) -> None:
        """Fit the shares to rounds of about so many rows, if there is something new to fit."""
        octave = batch_size.bit_length()
        if octave == self._octave:
            return
        self._octave = octave
        counts, seconds = self._samples()
        drafts = np.flatnonzero(self._num_steps)
        # Rows without a draft have a charge too, if rounds of several shapes can tell it.
        charged = drafts
        if ((counts > 0).sum(axis=1) > 1).any():
            charged = np.arange(len(self.nodes))
        sizes, nodes = counts.sum(axis=1), counts @ self.nodes
        own = [np.ones(len(seconds)), sizes, *(counts[:, charged] > 0).T, *counts[:, drafts].T]
        weights = 1 / (1 + _NEAR * np.log2(sizes / (0.75 * (1 << octave))) ** 2)
        best = _least_squares(own, seconds, weights)
        ridge, error = 0.0, best[1] * _BETTER
        places = np.unique(nodes)[:-1]
        for place in places[:: max(len(places) // _NUM_RIDGES, 1)].tolist():
            found = _least_squares([*own, np.maximum(nodes - place, 0.0)], seconds, weights)
            if found[1] < error:
                best, ridge, error = found, place, found[1]
        shares, num = best[0], 2 + len(charged)
        self._base = np.maximum(shares[:2], [1e-9, 0.0])
        self.charge[charged] = shares[2:num]
        self.lane[drafts] = shares[num : num + len(drafts)]
        self.ridge, self.slope = ridge, float(shares[num + len(drafts)]) if ridge else 0.0

    def _samples(self) -> tuple[Float64, Float64]:
        """Return compositions, float64 [n, S], and seconds; guesses for shapes without any."""
        counts = [*self._seconds]
        seconds: list[float] = [*self._seconds.values()]
        plain: list[float] = [
            took for key, took in self._seconds.items() if sum(key) == 1 == key[0]
        ]
        scale = float(plain[0] if plain else min(seconds, default=1.0))
        seen = np.array(counts).any(axis=0) if counts else np.zeros(len(self.nodes), np.bool_)
        for shape in np.flatnonzero(~seen).tolist():
            for size in (1, 8):
                counts.append(tuple(size * (i == shape) for i in range(len(self.nodes))))
                per_row = _PER_ROW + _PER_NODE * (self.nodes[shape] - 1)
                guess = float(1 - _PER_ROW + _PER_STEP * self._num_steps[shape] + size * per_row)
                seconds.append(scale * guess)
        return np.array(counts, np.float64), np.array(seconds)


def _least_squares(
    columns: Sequence[Float64], seconds: Float64, weights: Float64
) -> tuple[Float64, float]:
    """Return the shares, all 0 or more, with the least squares of relative errors, and these.

    This is the active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974).
    """
    matrix = np.stack(columns, axis=1) * (weights / seconds)[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    matrix = matrix / scale
    wanted = weights
    size = matrix.shape[1]
    shares, is_in = np.zeros(size), np.zeros(size, np.bool_)
    for _ in range(3 * size):
        slope = matrix.T @ (wanted - matrix @ shares)
        slope[is_in] = -1.0
        enters = int(slope.argmax())
        if slope[enters] <= 1e-10:
            break
        is_in[enters] = True
        while True:
            found = np.zeros(size)
            found[is_in] = np.linalg.lstsq(matrix[:, is_in], wanted, rcond=1e-10)[0]
            leaves = is_in & (found <= 0)
            if not leaves.any():
                break
            step = (shares[leaves] / np.maximum(shares[leaves] - found[leaves], 1e-300)).min()
            shares = shares + step * (found - shares)
            is_in &= shares > 1e-12
            shares[~is_in] = 0.0
        shares = found
    error = wanted - matrix @ shares
    return shares / scale, float(error @ error)
