"""Random simulated devices and mixes of rows, to find where the policy `budget` loses.

`budget_model` simulates published devices. These are unlike any of them: a device computes beside
reading (a roofline, sharp or soft) or after it (as a CPU does), a node costs next to nothing or a
fifth of the weights, and rows hold 64 to 32,768 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benches import budget_model as model
from specpool._core import Shape
from specpool.adaptive import Controller

SIZES = (1, 4, 8, 16, 32, 64, 96)
#: How reading and computing add up: the root of the sum of their powers.
POWERS = {"a roofline": 64.0, "a soft roofline": 4.0, "a CPU": 1.0}


@dataclass(frozen=True, slots=True)
class RandomDevice:
    """Seconds of a forward: to read the weights, per node, and per token that the rows hold."""

    name: str
    power: float
    overhead: float
    weights: float
    node: float
    token: float
    again: float  # of a token, for each draft that reads it
    head: float  # a forward of the draft head over one of the target

    def _forward(self, nodes: float, tokens: float, again: float) -> float:
        reading = self.weights + self.token * tokens + self.again * again
        most = max(reading, self.node * nodes)
        parts = (reading / most) ** self.power + (self.node * nodes / most) ** self.power
        return float(self.overhead + most * parts ** (1 / self.power))

    def round(
        self,
        shapes: Sequence[Shape],
        counts: Sequence[float],
        contexts: Sequence[float] | None = None,
    ) -> float:
        """See `Device.round`."""
        held = [n * model.CONTEXT_LEN for n in counts] if contexts is None else contexts
        lanes = [lane for lane in zip(counts, shapes, held, strict=True) if lane[0]]
        seconds = self._forward(
            sum(n * shape.num_draft_tokens for n, shape, _ in lanes),
            sum(tokens for *_, tokens in lanes),
            sum(tokens * (shape.num_draft_tokens - 1) for _, shape, tokens in lanes),
        )
        for depth in range(max(shape.num_steps for _, shape, _ in lanes)):
            drafting = [lane for lane in lanes if lane[1].num_steps > depth]
            nodes = sum(n * shape.topk for n, shape, _ in drafting)
            tokens = sum(tokens for *_, tokens in drafting)
            seconds += self.head * self._forward(nodes, tokens / 8, 0.0)
        return seconds


def random_case(seed: int) -> tuple[RandomDevice, model.Mix, int]:
    """Return a device, a mix of rows, and how many rows there are."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice([*POWERS]))
    weights = float(10 ** rng.uniform(-3.3, -1.5))
    token = weights * float(10 ** rng.uniform(-7, -4.3))
    device = RandomDevice(
        name=f"{kind}, seed {seed}",
        power=POWERS[kind],
        overhead=float(10 ** rng.uniform(-4.5, -3)),
        weights=weights,
        node=weights * float(10 ** rng.uniform(-3.5, -0.7)),
        token=token,
        again=token * float(rng.choice([0.0, 10 ** rng.uniform(-2, 0)])),
        head=float(rng.uniform(0.02, 0.2)),
    )
    rates = tuple(rng.uniform(0.02, 0.97, rng.integers(1, 4)).tolist())
    lens = (2 ** rng.uniform(6, 15, rng.integers(1, 3))).astype(int).tolist()
    return device, model.Mix("random rows", rates, tuple(lens)), int(rng.choice(SIZES))


def ratios(seed: int, controller: Controller, rounds: int) -> tuple[float, float]:
    """Return the tokens per second with a policy over the best single shape's and over plain."""
    how = *random_case(seed), rounds
    static = {shape: model.run(*how, shape=shape, seed=1).rate for shape in model.CANDIDATES}
    rate = model.run(*how, controller=controller, seed=2).rate
    return rate / max(static.values()), rate / static[model.PLAIN]
