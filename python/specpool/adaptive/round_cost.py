"""`RoundCost`: the seconds of a round as a function of how many rows have each shape.

The seconds are a sum: a constant, a share per row, for each shape that drafts a charge and a share
per lane, a slope on the nodes of the verify beyond a ridge (on a GPU, the nodes up to the ridge
ride along with the weights), and a share per token of the rows' context, with one more for each
draft that reads it. Every share is 0 or more. The least squares of relative errors fit it to
measured rounds: those of the start, then those in service. Rounds of about the same number of rows
and about the same context count most, because no such sum holds from one row to a thousand.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool._core import Shape
from specpool.arrays import Int64

Float64 = npt.NDArray[np.float64]

_MOST_MIXES = 128  # compositions of rounds in service that are kept, the latest ones
_WEIGHT = 0.2  # of a new measurement of a composition
# The first measurements of one in service and their weight, if they differ by more than a tenth:
# the start or a fit may be wrong.
_NUM_FIRST, _FIRST_WEIGHT, _WRONG = 4, 0.5, 0.1
_NUM_RATIOS = 9  # rounds whose median is the load
_NUM_NEW = 4  # rounds of a shape, after those of another, whose load was another's
_REFIT = 256  # the most rounds in service from one fit to the next
_NUM_RIDGES = 10
_NEAR = 2.0  # how fast rounds count less, by octaves of their rows, squared
_NEAR_CONTEXT = 0.1  # likewise, by octaves of their mean context
_FIRM = 1e-9  # makes the equations of columns that depend on each other solvable
_BETTER = 0.9  # a ridge must leave less than this share of the error without one
# Before any measurement: shares of a plain round of one row.
_PER_STEP, _PER_NODE, _PER_ROW = 0.1, 0.02, 0.02


@dataclass(slots=True)
class _Fit:
    """The shares of a round of about so many rows; see `RoundCost`."""

    number: int  # of the fits that were due when it was made
    base: Float64  # [2], of a round and of each of its rows
    charge: Float64
    lane: Float64
    ridge: float
    ridge_per_token: float
    slope: float
    per_token: Float64
    #: What rounds of one shape took over what the shares say, by shape: the sizes, and the ratios.
    ratios: dict[int, tuple[list[int], list[float]]] | None = None


@dataclass(slots=True)
class _Sample:
    """Measured seconds of a composition."""

    seconds: float
    context: Float64  # [S], tokens that the lanes of each shape held
    num: int = 0  # measurements in service

    def at(self, context: Float64, per_token: Float64) -> float:
        """Return the seconds with another context."""
        return max(self.seconds + float(per_token @ (context - self.context)), self.seconds / 4)


class RoundCost:
    """A fitted sum of shares, and the load that the latest rounds had beside it.

    Attributes:
        load: measured seconds over known ones, the median of the latest rounds.
        ridge, ridge_per_token: nodes of a verify without a cost of their own, and more of them for
            each token that the rows hold.
        slope: seconds of each node beyond.
        charge, lane: float64 [S], seconds of a shape once, and of each of its rows.
        per_token: float64 [S], seconds of each token that a row of a shape holds.
        nodes: float64 [S], nodes of a row's verify.

    The `context` of methods is float64 [S], the tokens that the lanes of each shape hold together;
    None = it is not known, and counts as 0.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """Start without measurements; shape indices are into `shapes`."""
        self._num_steps = np.array([shape.num_steps for shape in shapes], np.float64)
        self.nodes: Float64 = np.array([shape.num_draft_tokens for shape in shapes], np.float64)
        # By the lanes of each shape, and the octave of the mean context.
        self._samples: dict[tuple[tuple[int, ...], int], _Sample] = {}
        self._told: set[tuple[tuple[int, ...], int]] = set()  # those measured at the start
        self._octaves: list[int] = []  # of the contexts of all samples
        self._since, self._until = 0, 16  # rounds since a fit was due, and until the next is
        self._fits: dict[tuple[int, int], _Fit] = {}  # by the octaves of size and context
        self._number = 0  # fits that were due so far
        # Rows and octave of the context that the shares are for; 0 rows = they must be set anew.
        self._size = self._octave = 0
        self._zeros: Float64 = np.zeros(len(shapes))
        self._latest: tuple[int, ...] | None = None  # lanes of the latest round
        self._visit: deque[float] = deque(maxlen=_NUM_NEW)  # seconds without load of rounds like it
        self._alike = 0  # the next so many rounds like it tell more than the load
        self._ratios: deque[float] = deque(maxlen=_NUM_RATIOS)
        self.load, self.ridge, self.ridge_per_token, self.slope = 1.0, 0.0, 0.0, 0.0
        self._base = np.array([1.0, _PER_ROW])
        self.charge: Float64
        self.lane: Float64
        self.per_token: Float64
        self.charge, self.lane, self.per_token = np.zeros((3, len(shapes)))

    def tell(self, counts: Int64, seconds: float, context: Float64 | None = None) -> None:
        """Add a round of the start; of several equal ones the least counts.

        `counts` are the lanes of each shape, int64 [S].
        """
        context = self._zeros if context is None else context
        key = tuple(counts.tolist()), _octave(counts, context)
        if key not in self._samples or seconds < self._samples[key].seconds:
            self._put(key, _Sample(seconds, context))
        self._told.add(key)
        self._number, self._size = self._number + 1, 0

    def observe(self, counts: Int64, seconds: float, context: Float64 | None = None) -> None:
        """Add a round in service; `counts` are the lanes of each shape, int64 [S]."""
        context = self._zeros if context is None else context
        key = tuple(counts.tolist())
        known = self.known(counts, context)
        took = seconds / self.load  # before this round: a stall must not hide in its own load
        if key != self._latest:
            self._latest, self._alike = key, -1 if self._latest is None else _NUM_NEW
            self._visit.clear()
        # Rounds of one shape alone tell the load: they were measured at the start. What several
        # shapes take together would pass for load, and never be learned. What one shape takes is
        # learned beside the load of the rounds before it.
        learns, is_uniform = True, len(key) - key.count(0) == 1
        if is_uniform:
            self._ratios.append(seconds / known)
            self.load = sorted(self._ratios)[len(self._ratios) // 2]
            learns = self._alike > 0
        self._alike -= 1
        place = key, _octave(counts, context)
        num = self._samples[place].num if place in self._samples else 0
        if learns:
            self._visit.append(min(max(took, known / 2), 2 * known))
            middle = sorted(self._visit)[(len(self._visit) - 1) // 2]  # a stall only adds seconds
            is_wrong = num < _NUM_FIRST and abs(middle / known - 1) > _WRONG
            known += (_FIRST_WEIGHT if is_wrong else _WEIGHT) * (middle - known)
            num += 1
            if num == _NUM_FIRST and is_uniform:  # now it is known, so others lean on it
                self._number, self._size = self._number + 1, 0
        self._put(place, _Sample(known, context, num))
        if len(self._samples) - len(self._told) > _MOST_MIXES:
            del self._samples[next(each for each in self._samples if each not in self._told)]
        self._since += 1
        if self._since >= self._until:
            self._since, self._number, self._size = 0, self._number + 1, 0
            self._until = min(2 * self._until, _REFIT)

    def doubt(self, counts: Int64, context: Float64) -> None:
        """Let the next rounds of a composition count as the first in service: measure it anew."""
        sample = self._samples.get((tuple(counts.tolist()), _octave(counts, context)))
        if sample is not None:
            sample.num = 0

    def known(self, counts: Int64, context: Float64 | None = None) -> float:
        """Return the seconds of a round as measured, or else as fitted, without load."""
        context = self._zeros if context is None else context
        sample = self._nearest(tuple(counts.tolist()), _octave(counts, context))
        if sample is not None:
            return sample.at(context, self.per_token)
        num_rows = int(counts.sum())
        self.fit(num_rows, float(context.sum()) / max(num_rows, 1))
        return self.of(counts, context)

    def base(self, batch_size: int) -> float:
        """Return the seconds of a round of so many rows without drafts and without context."""
        return float(self._base[0] + self._base[1] * batch_size)

    def of(self, counts: Int64, context: Float64 | None = None) -> float:
        """Return the fitted seconds of a round, without load; `counts` as in `observe`."""
        context = self._zeros if context is None else context
        seconds = self.base(int(counts.sum())) + self.charge[counts > 0].sum()
        free = self.ridge + self.ridge_per_token * float(context.sum())
        seconds += self.slope * max(float(counts @ self.nodes) - free, 0.0)
        return float(seconds + counts @ self.lane + self.per_token @ context)

    def fit(self, batch_size: int, context: float = 0.0) -> None:
        """Set the shares for rounds of so many rows and so much context a row, if they are not yet.

        The fit is for sizes and contexts of about an octave. Then the shares of each shape are
        scaled, so that rounds of one shape take what was measured: a choice between two shapes for
        all rows must not hang on the error of the fit.
        """
        octave = int(context).bit_length()
        if batch_size == self._size and octave == self._octave:
            return
        self._size, self._octave = batch_size, octave
        place = batch_size.bit_length(), octave
        fit = self._fits.get(place)
        if fit is None or fit.number < self._number:
            fit = self._fits[place] = self._fitted(0.75 * (1 << place[0]), 0.75 * (1 << octave))
        self._base, self.charge, self.lane = fit.base.copy(), fit.charge.copy(), fit.lane.copy()
        self.ridge, self.ridge_per_token, self.slope = fit.ridge, fit.ridge_per_token, fit.slope
        self.per_token = fit.per_token
        self._meet_uniform(fit, batch_size, context)

    def _put(self, key: tuple[tuple[int, ...], int], sample: _Sample) -> None:
        self._samples[key] = sample
        if key[1] not in self._octaves:
            self._octaves.append(key[1])

    def _nearest(self, key: tuple[int, ...], octave: int) -> _Sample | None:
        """Return the sample of a composition whose context is the nearest."""
        sample = self._samples.get((key, octave))
        if sample is None:
            others = [each for each in self._octaves if (key, each) in self._samples]
            if others:
                sample = self._samples[key, min(others, key=lambda each: abs(each - octave))]
        return sample

    def _fitted(self, near: float, near_context: float) -> _Fit:
        """Fit the shares to rounds of about so many rows and so much context a row."""
        counts, seconds, context = self._all_samples()
        drafts = np.flatnonzero(self._num_steps)
        # Rows without a draft have a charge too, if rounds of several shapes can tell it.
        charged = drafts
        if ((counts > 0).sum(axis=1) > 1).any():
            charged = np.arange(len(self.nodes))
        sizes, held = counts.sum(axis=1), context.sum(axis=1)
        own = [np.ones(len(seconds)), sizes, *(counts[:, charged] > 0).T, *counts[:, drafts].T]
        own += [held, context @ (self.nodes - 1)]
        far = _NEAR * np.log2(sizes / near) ** 2
        far += _NEAR_CONTEXT * np.log2((held / sizes + 1) / (near_context + 1)) ** 2
        problem = _Problem(own, seconds, 1 / (1 + far))
        plain, error = problem.solve(np.zeros(len(own)))
        shares, error = plain / problem.scale, error * _BETTER
        # A ridge that stays, or one that grows as the seconds do in which nodes ride along: if the
        # rows' context is read then, more nodes are free.
        growths = [0.0]
        if (reading := float(shares[-2])) > 0:
            growths.append(reading / max(float(shares[0] + shares[1] * near), 1e-9))
        nodes = counts @ self.nodes
        places = np.unique(nodes)[:-1]
        ridge, growth, slope = 0.0, 0.0, np.zeros(1)
        for grows in growths:
            for place in places[:: max(len(places) // _NUM_RIDGES, 1)].tolist():
                beyond = np.maximum(nodes - place * (1 + grows * held), 0.0)
                bent = problem.with_column(beyond)
                found, off = bent.solve(np.append(plain, 0.0))
                if off < error:
                    ridge, growth, error = place, place * grows, off
                    shares, slope = np.split(found / bent.scale, [-1])
        charge, lane = np.zeros((2, len(self.nodes)))
        num = 2 + len(charged)
        charge[charged], lane[drafts] = shares[2:num], shares[num:-2]
        return _Fit(
            number=self._number,
            base=np.maximum(shares[:2], [1e-9, 0.0]),
            charge=charge,
            lane=lane,
            ridge=ridge,
            ridge_per_token=growth,
            slope=float(slope[0]),
            per_token=shares[-2] + shares[-1] * (self.nodes - 1),
        )

    def _uniform(self, shape: int, batch_size: int, context: float) -> float:
        """Return the seconds of a round of one shape and `context` tokens a row, by the shares."""
        held = batch_size * context
        free = self.ridge + self.ridge_per_token * held
        over = max(batch_size * float(self.nodes[shape]) - free, 0.0)
        own = float(self.charge[shape] + batch_size * self.lane[shape])
        return self.base(batch_size) + own + self.slope * over + held * float(self.per_token[shape])

    def _measured(self) -> dict[int, tuple[list[int], list[float]]]:
        """Return what rounds of one shape took over what the shares say, by shape and size.

        Of several contexts the nearest counts.
        """
        nearest: dict[tuple[int, int], tuple[int, float]] = {}  # by size and shape
        for (counts, octave), sample in self._samples.items():
            if len(counts) - counts.count(0) == 1:
                size = sum(counts)
                place, far = (size, counts.index(size)), abs(octave - self._octave)
                if place not in nearest or far < nearest[place][0]:
                    context = float(sample.context.sum()) / size
                    fitted = self._uniform(place[1], size, context)
                    nearest[place] = far, sample.seconds / fitted
        found: dict[int, tuple[list[int], list[float]]] = {}
        for (size, shape), (_, ratio) in sorted(nearest.items()):
            sizes, ratios = found.setdefault(shape, ([], []))
            sizes.append(size)
            ratios.append(ratio)
        return found

    def _meet_uniform(self, fit: _Fit, batch_size: int, context: float) -> None:
        """Scale the shares so that a round of one shape takes what was measured of its size.

        Between measured sizes, and beyond them, the ratio of measured to fitted counts.
        """
        if fit.ratios is None:
            fit.ratios = self._measured()
        fitted = {shape: self._uniform(shape, batch_size, context) for shape in fit.ratios}
        wanted = {
            shape: fitted[shape] * float(np.interp(batch_size, *measured))
            for shape, measured in fit.ratios.items()
        }
        for shape in sorted(wanted, key=lambda shape: self._num_steps[shape]):
            own = float(self.charge[shape] + batch_size * self.lane[shape])
            if not self._num_steps[shape]:  # the first, because all rounds have their base
                share = self.base(batch_size)
                self._base *= (
                    max(wanted[shape] - self._uniform(shape, batch_size, context) + share, 1e-9)
                    / share
                )
                continue
            rest = max(wanted[shape] - self._uniform(shape, batch_size, context) + own, 0.0)
            if own > 0:
                self.charge[shape] *= rest / own
                self.lane[shape] *= rest / own
            else:
                self.lane[shape] = rest / batch_size

    def _all_samples(self) -> tuple[Float64, Float64, Float64]:
        """Return compositions, float64 [n, S], seconds, and contexts, float64 [n, S].

        Shapes without any have guesses.
        """
        counts = [counts for counts, _ in self._samples]
        seconds: list[float] = [sample.seconds for sample in self._samples.values()]
        plain: list[float] = [
            sample.seconds for (key, _), sample in self._samples.items() if sum(key) == 1 == key[0]
        ]
        scale = float(plain[0] if plain else min(seconds, default=1.0))
        seen = np.array(counts).any(axis=0) if counts else np.zeros(len(self.nodes), np.bool_)
        for shape in np.flatnonzero(~seen).tolist():
            for size in (1, 8):
                counts.append(tuple(size * (i == shape) for i in range(len(self.nodes))))
                per_row = _PER_ROW + _PER_NODE * (self.nodes[shape] - 1)
                guess = float(1 - _PER_ROW + _PER_STEP * self._num_steps[shape] + size * per_row)
                seconds.append(scale * guess)
        context = np.zeros((len(counts), len(self.nodes)))
        for line, sample in enumerate(self._samples.values()):
            context[line] = sample.context
        return np.array(counts, np.float64), np.array(seconds), context


def _octave(counts: Int64, context: Float64) -> int:
    """Return the octave of the mean context of a round's lanes."""
    return int(context.sum() / max(int(counts.sum()), 1)).bit_length()


class _Problem:
    """Shares of columns, all 0 or more, with the least squares of relative errors.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974), on the normal
    equations of columns scaled to 1.

    Attributes:
        scale: float64 [n], by which a scaled column is greater than the column.
    """

    def __init__(self, columns: Sequence[Float64], seconds: Float64, weights: Float64) -> None:
        """Solve for `seconds`, float64 [m], by columns of m numbers, with the rows' weights."""
        self._seconds, self._weights = seconds, weights
        matrix = np.stack(columns, axis=1) * (weights / seconds)[:, None]
        self.scale: Float64 = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
        self._matrix: Float64 = matrix / self.scale
        self._gram = self._matrix.T @ self._matrix + _FIRM * np.eye(len(columns))
        self._right = self._matrix.T @ weights
        self._error = float(weights @ weights)

    def with_column(self, column: Float64) -> _Problem:
        """Return the problem with one more column, the last one."""
        more = copy.copy(self)
        scaled = column * (self._weights / self._seconds)
        scale = max(float(scaled.max()), 1e-12)
        scaled /= scale
        more.scale = np.append(self.scale, scale)
        more._matrix = np.column_stack([self._matrix, scaled])
        across = self._matrix.T @ scaled
        corner = np.append(across, scaled @ scaled + _FIRM)
        more._gram = np.vstack([np.column_stack([self._gram, across]), corner])
        more._right = np.append(self._right, scaled @ self._weights)
        return more

    def solve(self, shares: Float64) -> tuple[Float64, float]:
        """Return the best shares, scaled, and their error.

        `shares` is where the search begins: 0 or more, and optimal for the columns above 0.
        """
        gram, right, size = self._gram, self._right, len(shares)
        is_in = shares > 0
        for _ in range(3 * size):
            slope = right - gram @ shares
            slope[is_in] = -1.0
            enters = int(slope.argmax())
            if slope[enters] <= 1e-10:
                break
            is_in[enters] = True
            while True:
                some = np.flatnonzero(is_in)
                found = np.zeros(size)
                found[some] = np.linalg.solve(gram[np.ix_(some, some)], right[some])
                leaves = is_in & (found <= 0)
                if not leaves.any():
                    break
                step = (shares[leaves] / np.maximum(shares[leaves] - found[leaves], 1e-300)).min()
                shares = shares + step * (found - shares)
                is_in &= shares > 1e-12
                shares[~is_in] = 0.0
            shares = found
        return shares, self._error + float(shares @ (gram @ shares - 2 * right))
