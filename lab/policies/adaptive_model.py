"""Run policies on text that changes: rounds have measured times, and a seed draws the drafts.

Tokens are counted by their expectation, so that a figure depends on the policy alone. The results
that the policy sees are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from specpool._core import Shape
from specpool.engine.assembly.calibration import TOLD
from specpool.engine.scheduler.round_shapes import RoundShapes
from specpool.engine.shapes import Controller

Float64 = npt.NDArray[np.float64]
#: How likely a draft is right, by its depth and by the elapsed share of the phase, in [0, 1].
Rate = Callable[[int, float], float]

PHASES: dict[str, Rate] = {
    "0.9": lambda depth, at: 0.9,
    "jumps to 0.2": lambda depth, at: 0.2,
    "jumps to 0.7": lambda depth, at: 0.7,
    "jumps to 0": lambda depth, at: 0.0,
    "drifts from 0.1 to 0.9": lambda depth, at: 0.1 + 0.8 * at,
    "drifts from 0.9 to 0.3": lambda depth, at: 0.9 - 0.6 * at,
    "jumps to 0.8, half of it with each depth": lambda depth, at: 0.8 * 0.5**depth,
}
#: A tree counts as so many drafts per depth: if one is wrong, another branch may be right.
TREE_TRIES = 1.7
_NOISE = 0.03  # standard deviation of a measured round
_STALL_RATE, _STALL = 0.005, 10.0  # so many rounds take so many times as long


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a round, by shape and batch size; in between by a line.

    Attributes:
        seconds: of a round among others of its shape.
        catch_up: what a drafting round takes longer after a plain round, by batch size.
    """

    seconds: Mapping[Shape, Mapping[int, float]]
    catch_up: Mapping[int, float] = field(default_factory=lambda: {1: 0.0})

    def seconds_of(self, shape: Shape, batch_size: int, previous: Shape | None = None) -> float:
        """Return the seconds of a round; `previous` is the shape of the round before."""
        seconds = _between(self.seconds[shape], batch_size)
        if previous is not None and shape.num_steps > 0 == previous.num_steps:
            seconds += _between(self.catch_up, batch_size)
        return seconds


@dataclass(slots=True)
class Cell:
    """The rounds of one phase and batch size."""

    tokens: float = 0.0  # of a lane
    seconds: float = 0.0
    num_rounds: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Count a round."""
        self.tokens += tokens
        self.seconds += seconds
        self.num_rounds += 1

    @property
    def rate(self) -> float:
        """Tokens of a lane per second."""
        return self.tokens / self.seconds


Cells = dict[tuple[str, int], Cell]


@dataclass(slots=True)
class Run:
    """What one policy did on a workload."""

    cells: Cells = field(default_factory=dict)
    switch_ct: int = 0
    round_us: list[float] = field(default_factory=list)  # of all its calls, by round
    switch_us: list[float] = field(default_factory=list)  # of the rounds with another shape


def rates_of(shape: Shape, rate: Rate, at: float) -> Float64:
    """float64 [num_steps], how likely each depth is right where those before it are."""
    tries = TREE_TRIES if shape.topk > 1 else 1.0
    wrong = np.array([1 - rate(depth, at) for depth in range(shape.num_steps)])
    return np.asarray(1 - wrong**tries, dtype=np.float64)


def expected(shape: Shape, rate: Rate, at: float) -> float:
    """Tokens that a round gives a lane, the bonus token among them."""
    return 1 + float(np.cumprod(rates_of(shape, rate, at)).sum())


def static(shape: Shape, costs: Costs, batch_sizes: Sequence[int], rounds: int) -> Cells:
    """Run a workload with one shape alone; `batch_sizes` are repeated."""
    cells: Cells = {}
    for name, rate in PHASES.items():
        for i in range(rounds):
            size = batch_sizes[i % len(batch_sizes)]
            cell = cells.setdefault((name, size), Cell())
            cell.add(expected(shape, rate, i / rounds), costs.seconds_of(shape, size))
    return cells


def replay(
    controller: Controller,
    costs: Costs,
    batch_sizes: Sequence[int],
    rounds: int,
    *,
    seed: int,
) -> Run:
    """Run a workload with a policy's choices, through the scheduler's own `RoundShapes`."""
    rng = np.random.default_rng(seed)
    for shape, cells in costs.seconds.items():  # as an engine measures at its start
        for size, seconds in cells.items():
            for _ in range(TOLD):
                controller.on_round_seconds(shape, size, seconds * _noise(rng))
    shapes = list(costs.seconds)
    rows = np.arange(max(batch_sizes))
    round_shapes = RoundShapes(shapes, len(rows), controller)
    _, _, choices = round_shapes.allowed(Shape.none(), None)
    for row in rows if choices else ():
        round_shapes.put(int(row), choices or 0)
    run, previous = Run(), cast("Shape | None", None)
    limits = np.zeros(max(batch_sizes), np.int32)
    for name, rate in PHASES.items():
        for i in range(rounds):
            size, at = batch_sizes[i % len(batch_sizes)], i / rounds
            limits[:] = np.arange(len(limits)) < size
            start = time.perf_counter_ns()
            lanes = round_shapes.choose(limits)[0][:size]
            chosen = time.perf_counter_ns() - start
            choice = round_shapes.run()
            assert choice is not None
            seconds = costs.seconds_of(choice.shape, size, previous)
            run.cells.setdefault((name, size), Cell()).add(
                expected(choice.shape, rate, at), seconds
            )
            right = rng.random((size, choice.shape.num_steps)) < rates_of(choice.shape, rate, at)
            accept_len = 1 + np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)
            measured = seconds * _noise(rng) * (_STALL if rng.random() < _STALL_RATE else 1)
            start = time.perf_counter_ns()
            round_shapes.learn(choice, lanes, accept_len)
            round_shapes.observe(choice, lanes, measured)
            us = (chosen + time.perf_counter_ns() - start) / 1e3
            run.round_us.append(us)
            if previous not in (None, choice.shape):
                run.switch_us.append(us)
            previous = choice.shape
    run.switch_ct = round_shapes.switch_ct
    return run


def tokens_per_second(cells: Cells, phase: str | None = None) -> float:
    """Scale to the same work for all: each batch size's lanes give as many tokens as its rounds."""
    work = seconds = 0.0
    for (name, size), cell in cells.items():
        if phase in (None, name):
            work += cell.num_rounds * size
            seconds += cell.num_rounds / cell.rate
    return work / seconds


def merged(runs: Sequence[Run]) -> Cells:
    """The cells of several seeds as one."""
    cells: Cells = {}
    for run in runs:
        for key, cell in run.cells.items():
            into = cells.setdefault(key, Cell())
            into.tokens += cell.tokens
            into.seconds += cell.seconds
            into.num_rounds += cell.num_rounds
    return cells


def with_hindsight(statics: Sequence[Cells]) -> Cells:
    """For each phase and batch size the best of them."""
    return {
        key: max((cells[key] for cells in statics), key=lambda cell: cell.rate)
        for key in statics[0]
    }


def _between(cells: Mapping[int, float], batch_size: int) -> float:
    return float(np.interp(batch_size, [*cells], [*cells.values()]))


def _noise(rng: np.random.Generator) -> float:
    return float(1 + _NOISE * rng.standard_normal())
