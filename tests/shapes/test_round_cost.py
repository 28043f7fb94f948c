"""Tests of `RoundCost`: the seconds of rounds whose rows have different shapes."""

import numpy as np
import pytest

from specpool.engine.shape_names import parse_shape
from specpool.engine.shapes.round_cost import RoundCost

NAMES = ("none", "chain:1", "chain:3", "tree:3x4x16")
SHAPES = [parse_shape("shape", name) for name in NAMES]
CHARGE, LANE = (0.0, 0.2, 0.5, 0.6), (0.01, 0.03, 0.07, 0.3)


def lanes(*counts: int) -> np.ndarray:
    """Return the shapes of so many rows of each, int32 [B]."""
    return np.repeat(np.arange(len(SHAPES), dtype=np.int32), counts)


def seconds_of(shapes: np.ndarray) -> float:
    """A device whose rounds are a sum, as `Costs` has it."""
    return float(2 + max(CHARGE[shape] for shape in shapes) + sum(LANE[shape] for shape in shapes))


def told(*sizes: int) -> RoundCost:
    cost = RoundCost(SHAPES, SHAPES[0])
    for size in sizes:
        for index, shape in enumerate(SHAPES):
            for _ in range(3):
                cost.add_uniform_round(shape, size, seconds_of(np.full(size, index, np.int32)))
    return cost


def test_mixed_rounds_are_known_from_uniform_ones() -> None:
    """Law: if what shapes add is a sum, mixed rounds that were never measured are known."""
    cost, rng = told(1, 2, 4, 8, 16), np.random.default_rng(0)
    for _ in range(50):
        shapes = lanes(*rng.multinomial(16, [0.25] * 4))
        assert cost.costs(16).seconds(shapes) == pytest.approx(seconds_of(shapes), rel=1e-9)


def test_rounds_of_one_shape_take_what_was_measured() -> None:
    """Law: between two shapes for all rows the measured seconds decide, whatever they are."""
    cost, rng = RoundCost(SHAPES, SHAPES[0]), np.random.default_rng(0)
    took = {}
    for size in (1, 2, 4, 8, 16):
        for index, shape in enumerate(SHAPES):
            shapes = np.full(size, index, np.int32)
            took[index, size] = seconds_of(shapes) * float(rng.uniform(0.7, 1.4))
            for _ in range(3):
                cost.add_uniform_round(shape, size, took[index, size])
    for (index, size), seconds in took.items():
        known = cost.costs(size).seconds(np.full(size, index, np.int32))
        assert known == pytest.approx(max(seconds, took[0, size])), "no draft shortens a round"


def test_service_corrects_what_the_start_told() -> None:
    """Law: rounds that take longer are learned, and so is what differing rows take beside."""
    cost = told(1, 8)
    plain, chains, mixed = lanes(8, 0, 0, 0), lanes(0, 0, 8, 0), lanes(4, 0, 4, 0)
    for _ in range(200):
        cost.observe(plain, 1.5 * seconds_of(plain))
        cost.observe(chains, 1.2 * seconds_of(chains))
        cost.observe(mixed, 1.5 * seconds_of(mixed))
    for shapes, factor in ((plain, 1.5), (chains, 1.2), (mixed, 1.5)):
        assert cost.costs(8).seconds(shapes) == pytest.approx(factor * seconds_of(shapes), rel=0.02)
    assert cost.costs(8).mixed > 0


def test_a_stall_teaches_little() -> None:
    """Law: one round that takes 1,000 times as long is not taken for what the rows take."""
    cost = told(1, 4)
    mixed = lanes(2, 0, 2, 0)
    before = cost.costs(4).seconds(mixed)
    cost.observe(mixed, 1e3 * before)
    assert before < cost.costs(4).seconds(mixed) <= 1.11 * before


def test_no_seconds_make_a_round_take_nothing() -> None:
    """Law: no measured seconds make a share of a round fall below 0."""
    cost = told(1, 4)
    for counts in ((4, 0, 0, 0), (0, 0, 4, 0), (1, 1, 1, 1)) * 100:
        cost.observe(lanes(*counts), 1e-9)
    costs = cost.costs(4)
    assert costs.base > 0 and costs.mixed >= 0 and min(costs.lane) >= 0 and min(costs.charge) >= 0


def test_a_shape_without_a_time_is_timed_in_service() -> None:
    """Law: a loop that times nothing at its start learns from its own rounds."""
    cost = RoundCost(SHAPES, SHAPES[0])
    for index in range(len(SHAPES)):
        shapes = np.full(8, index, np.int32)
        for _ in range(20):
            cost.observe(shapes, seconds_of(shapes))
    for index in range(len(SHAPES)):
        shapes = np.full(8, index, np.int32)
        assert cost.costs(8).seconds(shapes) == pytest.approx(seconds_of(shapes), rel=0.1)
