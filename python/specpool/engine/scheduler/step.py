"""`Step`, which a scheduler prepares, and `StepResult`, which it gets back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from specpool._core import Plan
from specpool.arrays import Int32
from specpool.engine.memory.host.handle import Handle
from specpool.engine.scheduler.request import Request, TokenLogprob
from specpool.engine.scheduler.round_shapes import Choice


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of a step for each of its B lanes, on the host.

    Attributes:
        tokens: the new tokens of each lane. The last is not a draft; below 0 it is an error,
            `NOT_FINITE` or `NO_TREE`.
        accept_len: int32 [B], how many they are. Of a prefill it is 1, or 0 while the prompt goes
            on; of a reload it is 0.
        not_finite: bool [B], whether some logits of the lane were not finite. It is also true if
            the drafter's tree was not a tree.
        logprobs: for each lane one entry per token, or None if it wants none; None if no lane does.
    """

    tokens: list[list[int]]
    accept_len: Int32
    not_finite: npt.NDArray[np.bool_]
    logprobs: list[list[TokenLogprob] | None] | None = None

    @classmethod
    def of_lanes(cls, tokens: list[list[int]]) -> StepResult:
        """Return the result with these tokens of each lane; the last may be an error."""
        return cls(
            tokens=tokens,
            accept_len=np.array([len(lane) for lane in tokens], np.int32),
            not_finite=np.array([bool(lane) and lane[-1] < 0 for lane in tokens], np.bool_),
        )

    def select(self, lives: npt.NDArray[np.bool_]) -> StepResult:
        """Return the results of the lanes that are set in `lives`, bool [B]."""
        chosen = lives.tolist()
        return StepResult(
            tokens=[*compress(self.tokens, chosen)],
            accept_len=self.accept_len[lives],
            not_finite=self.not_finite[lives],
            logprobs=None if self.logprobs is None else [*compress(self.logprobs, chosen)],
        )
