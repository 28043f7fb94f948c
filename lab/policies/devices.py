"""Simulated devices for the budget, of published figures, and rows of mixed difficulty.

A forward of a roofline reads its weights and the rows' keys and values once, and computes each
node: it takes the longer of both times. A device with a measured curve takes the seconds of its
linear layers from there. The draft head runs once for each depth, for all rows that draft so deep.
Throughput counts tokens by their expectation, so that a figure depends on the policy alone. The
results that the policy sees, and the tokens by which a request meets its target, are drawn.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.policies.curves import LLAMA_8B_A100, LLAMA_70B_4_A100, Curve
from specpool._core import Shape
from specpool.arrays import Int32
from specpool.engine.assembly.calibration import TOLD
from specpool.engine.scheduler.round_shapes import RoundShapes
from specpool.engine.shape_names import parse_shape
from specpool.engine.shapes import BudgetController, Controller

Float64 = npt.NDArray[np.float64]
PLAIN = Shape.none()
CANDIDATES = tuple(
    parse_shape("shape", name)
    for name in ("none", "chain:1", "chain:3", "chain:5", "tree:3x4x16", "tree:5x8x32")
)
#: A tree counts as so many drafts per depth: if one is wrong, another branch may be right.
TREE_TRIES = 1.7
REQUEST_LEN = 128  # tokens of a request; a row takes the next one at once
CONTEXT_LEN = 1024  # tokens of a row, on average


class Simulated(ABC):
    """A device whose rounds are one forward of the target and one of the draft head per depth."""

    @abstractmethod
    def forward(
        self, nodes: float, context: float, again: float = 0.0, *, head: bool = False
    ) -> float:
        """Seconds of one forward of so many nodes, whose rows hold so many tokens in all.

        `again` counts each of these tokens once for each draft that reads it.
        """

    def round(
        self,
        shapes: Sequence[Shape],
        counts: Sequence[float],
        contexts: Sequence[float] | None = None,
    ) -> float:
        """Seconds of a round in which `counts` lanes have each shape.

        `contexts` are the tokens that the lanes of each shape hold in all.
        """
        held = [n * CONTEXT_LEN for n in counts] if contexts is None else contexts
        lanes = [lane for lane in zip(counts, shapes, held, strict=True) if lane[0]]
        seconds = self.forward(
            sum(n * shape.num_draft_tokens for n, shape, _ in lanes),
            sum(tokens for *_, tokens in lanes),
            sum(tokens * (shape.num_draft_tokens - 1) for _, shape, tokens in lanes),
        )
        for depth in range(max(shape.num_steps for _, shape, _ in lanes)):
            drafting = [lane for lane in lanes if lane[1].num_steps > depth]
            nodes = sum(n * shape.topk for n, shape, _ in drafting)
            seconds += self.forward(nodes, sum(tokens for *_, tokens in drafting), head=True)
        return seconds


@dataclass(frozen=True, slots=True)
class Device(Simulated):
    """A model on a card, or on several that share each layer.

    The share of the peak that a kernel reaches is assumed: 0.6 of the arithmetic, 0.8 of the bytes.
    With a curve, weights and arithmetic of the target are those of its output layer alone.
    """

    name: str
    weight_bytes: float
    head_bytes: float  # of the draft model, its output layer included
    token_bytes: float  # of keys and values
    token_flops: float
    head_flops: float
    peak_flops: float
    peak_bytes: float
    overhead: float  # seconds of a forward beside the kernels
    curve: Curve = ()  # measured milliseconds of the linear layers, by nodes

    def forward(
        self, nodes: float, context: float, again: float = 0.0, *, head: bool = False
    ) -> float:
        """See `Simulated.forward`; all drafts of a row read its context at once."""
        weights, flops = (
            (self.head_bytes, self.head_flops) if head else (self.weight_bytes, self.token_flops)
        )
        kv = context * self.token_bytes * (1 / 32 if head else 1.0)
        bytes_time = (weights + kv) / (0.8 * self.peak_bytes)
        seconds = max(bytes_time, nodes * flops / (0.6 * self.peak_flops))
        if self.curve and not head:
            sizes, milliseconds = (np.array(column) for column in zip(*self.curve, strict=True))
            seconds += float(np.interp(nodes, sizes, milliseconds)) / 1e3
        return self.overhead * (0.2 if head else 1) + seconds


# Peaks: NVIDIA's data sheets. H100 SXM: 3.35 TB/s, 989 TFLOP/s in bf16 without sparsity. H200: 4.8
# TB/s, 1,979 TFLOP/s in fp8. Models: the published configs of Llama 3.1. 8B in bf16: 16.1 GB, 128
# KiB of KV a token. 70B in fp8: 70.6 GB, 160 KiB a token (8-bit KV). Heads: EAGLE-3's one layer and
# a draft vocabulary of 32,000. A100 of 80 GB: 2.04 TB/s, 312 TFLOP/s in bf16; each of four reads a
# quarter of the output layer and of 320 KiB of KV a token, and the draft head runs on one.
DEVICES = (
    Device("8B on an H100", 16.1e9, 0.85e9, 131072, 16.1e9, 0.85e9, 989e12, 3.35e12, 2e-4),
    Device("70B on an H200", 70.6e9, 1.6e9, 163840, 141e9, 3.2e9, 1979e12, 4.8e12, 4e-4),
    Device(
        "8B on an A100, measured",
        1.05e9,
        0.85e9,
        131072,
        1.05e9,
        0.85e9,
        312e12,
        2.04e12,
        2e-4,
        LLAMA_8B_A100,
    ),
    Device(
        "70B on four A100, measured",
        0.53e9,
        3.2e9,
        81920,
        0.53e9,
        3.2e9,
        312e12,
        2.04e12,
        4e-4,
        LLAMA_70B_4_A100,
    ),
)


@dataclass(frozen=True, slots=True)
class Mix:
    """Rows of mixed difficulty: the acceptance rates of requests, and the rows with a target."""

    name: str
    rates: tuple[float, ...]  # the acceptance rates of requests, which take turns
    contexts: tuple[int, ...] = (CONTEXT_LEN,)  # tokens that they hold, which take turns likewise
    target_share: float = 0.0  # of the requests
    tpot_ms: float = 0.0
    relaxed_ms: float = 0.0  # the target of the other requests; 0 means none

    @property
    def kinds(self) -> list[tuple[float, float, float]]:
        """The share of the requests, acceptance rate and target of each kind of request."""
        share, size = self.target_share, len(self.rates)
        targets = [(share, self.tpot_ms), (1 - share, self.relaxed_ms)]
        return [(part / size, rate, ms) for part, ms in targets if part for rate in self.rates]


@dataclass(slots=True)
class Run:
    """What a policy did."""

    tokens: float = 0.0
    seconds: float = 0.0
    good: float = 0.0  # tokens of requests that have no target or met it
    num_targets: int = 0
    num_met: int = 0
    decide_us: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def goodput(self) -> float:
        """Tokens per second of requests that have no target or met it."""
        return self.good / self.seconds


class Rows:
    """The requests of the rows: difficulty, target, tokens made, and when they began."""

    def __init__(self, mix: Mix, num_rows: int, seed: int) -> None:
        """Give each row a request, at a random place in it."""
        self.mix, self.rng = mix, np.random.default_rng(seed)
        self._number = [*range(num_rows)]  # of each row's request: difficulties take turns
        self.context: Int32 = np.zeros(num_rows, np.int32)
        self.rate, self.target = np.zeros((2, num_rows))
        self.made, self.began = np.zeros((2, num_rows))
        self.left = self.rng.uniform(0.2, 1.0, num_rows) * REQUEST_LEN
        for row in range(num_rows):
            self.begin(row, 0.0)

    def begin(self, row: int, now: float) -> None:
        """Give the row its next request."""
        number, num_rates = self._number[row], len(self.mix.rates)
        self._number[row] += 1
        self.rate[row] = self.mix.rates[number % num_rates]
        self.context[row] = self.mix.contexts[number // num_rates % len(self.mix.contexts)]
        has_target = (number // num_rates * 0.618034) % 1 < self.mix.target_share
        self.target[row] = self.mix.tpot_ms if has_target else self.mix.relaxed_ms
        self.made[row], self.began[row] = 0.0, now

    def right(self, shape: Shape) -> Float64:
        """How likely a draft is right in each row where those before it are, float64 [rows]."""
        tries = TREE_TRIES if shape.topk > 1 else 1.0
        return np.asarray(1 - (1 - self.rate) ** tries)


def run(
    device: Simulated,
    mix: Mix,
    num_rows: int,
    rounds: int,
    *,
    controller: Controller | None = None,
    shape: Shape = PLAIN,
    seed: int = 0,
    error: float = 0.0,
) -> Run:
    """Serve the mix with one shape for all rows, or with a controller through `RoundShapes`.

    What the start tells of each shape is wrong by a factor whose logarithm deviates by `error`.
    """
    rows, outcome, now = Rows(mix, num_rows, seed), Run(), 0.0
    shapes = [*CANDIDATES]
    round_shapes = RoundShapes(shapes, num_rows, controller)
    _, index, choices = round_shapes.allowed(shape, None)
    requests: list[Any] = [
        SimpleNamespace(
            row=row, forced=[], choices=choices, shape_index=index, priority=0, params=None
        )
        for row in range(num_rows)
    ]

    def admit(row: int) -> None:
        target = float(rows.target[row]) or None
        requests[row].params = SimpleNamespace(tpot_ms=target)
        round_shapes.admit(row, requests[row], row)

    for row in range(num_rows):
        admit(row)
    if controller is not None:
        draws = np.random.default_rng(seed).normal(scale=error, size=len(CANDIDATES))
        factors = dict(zip(CANDIDATES, np.exp(draws).tolist(), strict=True))
        _calibrate(device, controller, num_rows, factors, mix.contexts[0])
    limits = np.ones(num_rows, np.int32)
    all_rows = np.arange(num_rows)
    for _ in range(rounds):
        if isinstance(controller, BudgetController):
            controller._clock = lambda now=now: now  # type: ignore[misc]
        lanes = round_shapes.choose(limits)[0].copy()
        choice = round_shapes.run()
        counts = np.bincount(lanes, minlength=len(shapes)).tolist()
        held = np.bincount(lanes, rows.context, minlength=len(shapes)).tolist()
        seconds = device.round(shapes, counts, held)
        accept_len = np.ones(num_rows, np.int32)
        expected = np.ones(num_rows)
        for number, lane_shape in enumerate(shapes):
            lane_rows = all_rows[lanes == number]
            if not len(lane_rows) or not lane_shape.num_steps:
                continue
            right = rows.right(lane_shape)[lane_rows, None]
            drawn = rows.rng.random((len(lane_rows), lane_shape.num_steps)) < right
            accept_len[lane_rows] += np.cumprod(drawn, axis=1).sum(axis=1).astype(np.int32)
            expected[lane_rows] += np.cumprod(
                np.repeat(right, lane_shape.num_steps, 1), axis=1
            ).sum(axis=1)
        now += seconds
        outcome.seconds += seconds
        outcome.tokens += float(expected.sum())
        if choice is not None:
            round_shapes.learn(choice, lanes, accept_len, requests)
            noisy = seconds * float(1 + 0.03 * rows.rng.normal())
            round_shapes.observe(choice, lanes, noisy)
        rows.made += accept_len  # as a request sees it: one that was unlucky is late
        for row in np.flatnonzero(rows.made >= rows.left).tolist():
            took, target = 1e3 * (now - rows.began[row]) / rows.made[row], rows.target[row]
            outcome.num_targets += target > 0
            if not target or took <= target:
                outcome.num_met += target > 0
                outcome.good += rows.made[row]
            rows.left[row] = REQUEST_LEN
            rows.begin(row, now)
            admit(row)
    return outcome


def _calibrate(
    device: Simulated,
    controller: Controller,
    num_rows: int,
    factors: Mapping[Shape, float],
    context: int,
) -> None:
    """Tell the controller the seconds that an engine measures at its start, times these factors.

    All rows hold `context` tokens then.
    """
    sizes = {1 << i for i in range(num_rows.bit_length())} | {num_rows}
    for size, shape in itertools.product(sorted(sizes), CANDIDATES):
        seconds = factors[shape] * device.round([shape], [size], [size * context])
        for _ in range(TOLD):
            controller.on_round_seconds(shape, size, seconds)
