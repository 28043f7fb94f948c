"""`Step`, which a scheduler prepares, and `StepResult`, which it gets back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from specpool._core import Plan
from specpool.arrays import Int32
from specpool.memory.host.handle import Handle
from specpool.scheduler.request import Request, TokenLogprob
from specpool.scheduler.round_shapes import Choice


@dataclass(frozen=True, slots=True)
class Step:
    """A prepared step: a chunk of some prompts, or one round of some rows."""

    plan: Plan
    requests: list[Request]  # the plan's lanes
    handles: list[Handle] | None = None  # for a reload: each lane's KV on the host
    choice: Choice | None = None  # for a round: the controller's choice

    @property
    def is_decode(self) -> bool:
        """Whether the step is a round, with accept lengths to come."""
        return self.plan.kind == "decode"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step for each lane."""

    tokens: list[list[int]]  # of each lane, perhaps none; the last is no draft, below 0 = an error
    accept_len: Int32  # [B], for a decode step
    not_finite: list[bool]
    logprobs: list[list[TokenLogprob] | None] | None = None

    def of(self, lives: npt.NDArray[np.bool_]) -> StepResult:
        """Return the results of the lanes that are set in `lives`, bool [B]."""
        chosen = lives.tolist()
        return StepResult(
            [*compress(self.tokens, chosen)],
            self.accept_len[lives],
            [*compress(self.not_finite, chosen)],
            None if self.logprobs is None else [*compress(self.logprobs, chosen)],
        )
