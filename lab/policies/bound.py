"""What a choice of shapes could give to requests with targets, if it knew all of them.

Each kind of request, by its acceptance and its target, gets one shape, and rounds are as the mean
round: the kinds are in it by how long they stay. All ways to give the kinds their shapes are tried.
A policy that turns between shapes may do a little better, and chance makes it do worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lab.policies.devices import CANDIDATES, TREE_TRIES, Device, Mix
from specpool._core import Shape


def most_goodput(device: Device, mix: Mix, num_rows: int) -> tuple[float, float]:
    """Return the most tokens per second in time with one shape for all, and with one per kind."""
    kinds = mix.kinds
    share = np.array([kind[0] for kind in kinds])
    tokens = np.array([[_tokens(shape, rate) for shape in CANDIDATES] for _, rate, _ in kinds])
    alike = apart = 0.0
    for picks in itertools.product(range(len(CANDIDATES)), repeat=len(kinds)):
        picked_tokens = tokens[range(len(kinds)), picks]
        goodput = _goodput(
            device, picks, share, picked_tokens, [kind[2] for kind in kinds], num_rows
        )
        apart = max(apart, goodput)
        if len({*picks}) == 1:
            alike = max(alike, goodput)
    return alike, apart


def _goodput(
    device: Device,
    picks: Sequence[int],
    share: np.ndarray,
    tokens: np.ndarray,
    targets: Sequence[float],
    num_rows: int,
) -> float:
    """Tokens per second of the kinds in time, if each has its pick and its share of requests."""
    stay = share / tokens / (share / tokens).sum()
    lanes = np.bincount(picks, weights=num_rows * stay, minlength=len(CANDIDATES))
    seconds = device.round(CANDIDATES, lanes.tolist())
    due = np.array([1e3 * seconds / ms if ms else 0.0 for ms in targets])
    return float(num_rows * (stay @ tokens) / seconds * share[tokens >= due].sum())


def _tokens(shape: Shape, rate: float) -> float:
    right = 1 - (1 - rate) ** (TREE_TRIES if shape.topk > 1 else 1.0)
    return float(1 + sum(right ** (depth + 1) for depth in range(shape.num_steps)))
