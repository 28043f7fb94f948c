"""Random simulated devices and mixes of rows, to find where the policy `budget` loses.

`devices` simulates published devices. These are unlike any of them: a device computes beside
reading (a roofline, sharp or soft) or after it (as a CPU does), a node costs next to nothing or a
fifth of the weights, and rows hold 64 to 32,768 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.policies import devices as model
from specpool.engine.shapes import Controller

SIZES = (1, 4, 8, 16, 32, 64, 96)
#: How reading and computing add up: the root of the sum of their powers.
POWERS = {"a roofline": 64.0, "a soft roofline": 4.0, "a CPU": 1.0}


@dataclass(frozen=True, slots=True)
class RandomDevice(model.Simulated):
    """Seconds of a forward: to read the weights, per node, and per token that the rows hold."""

    name: str
    power: float
    overhead: float
    weights: float
    node: float
    token: float
    again: float  # of a token, for each draft that reads it
    head: float  # a forward of the draft head over one of the target

    def forward(
        self, nodes: float, context: float, again: float = 0.0, *, head: bool = False
    ) -> float:
        """See `Simulated.forward`; a head holds an eighth of the context's keys and values."""
        reading = self.weights + self.token * context / (8 if head else 1) + self.again * again
        longest = max(reading, self.node * nodes)
        parts = (reading / longest) ** self.power + (self.node * nodes / longest) ** self.power
        seconds = float(self.overhead + longest * parts ** (1 / self.power))
        return self.head * seconds if head else seconds


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
