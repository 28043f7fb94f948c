"""`Acceptance`: estimates how likely each depth of a draft is right, from decayed counts.

A depth's rate is conditional: it counts lanes whose drafts were right up to that depth. All chains
share their rates, so a deep chain also tells about shallower ones. Trees of one width share theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from specpool._core import Shape
from specpool.engine.shapes.base import NumCorrectDrafts

_DECAY = 0.99  # of a depth's counts, for each round that drafts it: a memory of 100 rounds
_RECENT_DECAY = 0.85
_JUMP = 3.5  # standard deviations by which recent rounds must differ from the rest
_PRIOR = 0.6  # the rate of the first depth before any round
_PRIOR_TRIES = 1.0
_JUMP_TRIES = 4.0  # recent tries to keep after a jump; the oldest are from before it
_CHAINS = (1, 0)
_STALE_ROUNDS = 40  # rounds without a depth that halve its counts


def count_survivors(num_correct_drafts: NumCorrectDrafts, num_steps: int) -> list[int]:
    """Return the number of lanes with at least k correct drafts, for k = 0 to num_steps."""
    lanes: list[int] = np.bincount(num_correct_drafts, minlength=num_steps + 1).tolist()
    for k in range(len(lanes) - 2, -1, -1):
        lanes[k] += lanes[k + 1]
    return lanes[: num_steps + 1]


class _Family:
    """The decayed counts of each depth, for the chains or for the trees of one width."""

    def __init__(self, num_steps: int) -> None:
        self.hits, self.tries = [0.0] * num_steps, [0.0] * num_steps
        self.recent_hits, self.recent_tries = [0.0] * num_steps, [0.0] * num_steps
        self.seen = [0] * num_steps  # round in which each depth was drafted last, 0 = never
        self.variance = 0.0  # of the recent hits, if the rates have not changed
        self.rates: list[float] = []

    def add(self, survivors: list[int], now: int) -> bool:
        """Add a round's survivors; return whether acceptance has jumped."""
        surprise = variance = 0.0
        for j in range(len(survivors) - 1):
            tried, hit = survivors[j], survivors[j + 1]
            self.recent_tries[j] = _RECENT_DECAY * self.recent_tries[j] + tried
            self.recent_hits[j] = _RECENT_DECAY * self.recent_hits[j] + hit
            if self.tries[j] >= 1:
                rate = min(max(self.hits[j] / self.tries[j], 0.05), 0.95)
                surprise += self.recent_hits[j] - self.recent_tries[j] * rate
                variance += tried * rate * (1 - rate)
            share = _DECAY * _freshness(now - 1 - self.seen[j])
            self.tries[j] = share * self.tries[j] + tried
            self.hits[j] = share * self.hits[j] + hit
            self.seen[j] = now
        self.variance = _RECENT_DECAY**2 * self.variance + variance
        if surprise * surprise <= _JUMP**2 * self.variance:
            return False
        share = min(1.0, _JUMP_TRIES / self.recent_tries[0])
        self.hits = [share * hits for hits in self.recent_hits]
        self.tries = [share * tries for tries in self.recent_tries]
        self.variance = 0.0
        self.recent_hits[:] = self.recent_tries[:] = [0.0] * len(self.hits)
        return True

    def forget(self, depth: int) -> None:
        """Drop the counts of `depth` and deeper."""
        for counts in (self.hits, self.tries, self.recent_hits, self.recent_tries):
            counts[depth:] = [0.0] * (len(counts) - depth)

    def estimate(self, prior: list[float]) -> None:
        """Set the rates; the prior of a depth beyond `prior` is the rate of the depth before."""
        rate, rates = _PRIOR, list[float]()
        for j, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True)):
            lean = prior[j] if j < len(prior) else rate
            rate = (hits + _PRIOR_TRIES * lean) / (tries + _PRIOR_TRIES)
            rates.append(rate)
        self.rates = rates  # all at once, because Ctrl-C may come

    def hopes(self, now: int) -> list[float]:
        """Return optimistic rates: the fewer and older the rounds, the nearer to 1."""
        hopes, fresh, latest = [], 1.0, now
        for rate, tries, seen in zip(self.rates, self.tries, self.seen, strict=True):
            if seen != latest:
                fresh, latest = _freshness(now - seen), seen
            hopes.append(rate + (1 - rate) / (1 + tries * fresh))
        return hopes


class Acceptance:
    """The expected tokens of a round of each shape."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        """Start without rounds for `shapes`."""
        depths: dict[tuple[int, int], int] = {}
        for shape in shapes:
            if shape.num_steps:
                key = _family_of(shape)
                depths[key] = max(depths.get(key, 0), shape.num_steps)
        self._families = {key: _Family(depth) for key, depth in depths.items()}
        self._now = 0
        # The expected tokens by family and depth; empty if not computed yet.
        self._expected: dict[tuple[int, int], list[float]] = {}
        self._hoped: dict[tuple[int, int], list[float]] = {}

    def observe(self, shape: Shape, num_correct_drafts: NumCorrectDrafts) -> bool:
        """Add a round's result; return whether acceptance has jumped."""
        self._now += 1
        self._hoped = {}
        if not shape.num_steps or not len(num_correct_drafts):
            return False
        family = self._families.get(_family_of(shape))
        if family is None or shape.num_steps > len(family.tries):
            return False
        self._expected = {}  # first, because Ctrl-C may come
        jumped = family.add(count_survivors(num_correct_drafts, shape.num_steps), self._now)
        if jumped:
            for other in self._families.values():
                other.forget(shape.num_steps if other is family else 0)
        return jumped

    def expected(self, shape: Shape) -> float:
        """Return the expected tokens of a lane's round, the bonus token included."""
        if not shape.num_steps:
            return 1.0
        return _tokens(shape, (self._expected or self._estimate())[_family_of(shape)])

    def hoped(self, shape: Shape) -> float:
        """Return the optimistic estimate of a lane's tokens, for choosing probes."""
        if not shape.num_steps:
            return 1.0
        return _tokens(shape, (self._hoped or self._estimate_hoped())[_family_of(shape)])

    def _estimate_hoped(self) -> dict[tuple[int, int], list[float]]:
        if not self._expected:
            self._estimate()
        hopes = {key: family.hopes(self._now) for key, family in self._families.items()}
        self._hoped = {key: _by_depth(rates) for key, rates in hopes.items()}
        return self._hoped

    def _estimate(self) -> dict[tuple[int, int], list[float]]:
        """Set all rates: the family seen last has no prior; its rates are the others' prior."""
        families = sorted(self._families.values(), key=lambda family: -family.seen[0])
        chains = self._families.get(_CHAINS)
        newest: list[float] = []
        for i, family in enumerate(families):
            family.estimate(newest)
            newest = newest or family.rates
            # A tree contains the chain, so the rates of the newer one bound those of the other.
            if family is chains and i:
                family.rates[:] = _bounded(min, family.rates, newest)
            elif chains in families[:i]:
                family.rates[:] = _bounded(max, family.rates, chains.rates)
        self._expected = {key: _by_depth(family.rates) for key, family in self._families.items()}
        return self._expected


def _freshness(rounds: int) -> float:
    """Return the share of a depth's counts that still counts after `rounds` without it."""
    return float(0.5 ** (rounds / _STALE_ROUNDS))


def _bounded(
    bound: Callable[[float, float], float], rates: list[float], bounds: list[float]
) -> list[float]:
    return [*map(bound, rates, bounds), *rates[len(bounds) :]]


def _family_of(shape: Shape) -> tuple[int, int]:
    return _CHAINS if shape.topk == 1 else (shape.topk, shape.num_draft_tokens)


def _by_depth(rates: list[float]) -> list[float]:
    """Return the expected tokens by depth of the draft, from 0 on, the bonus token included."""
    tokens = [reached := 1.0]
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


def _tokens(shape: Shape, by_depth: list[float]) -> float:
    return min(by_depth[shape.num_steps], float(shape.max_accept_len))
