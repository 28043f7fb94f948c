"""The results of a launched step, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.engine.scheduler.request import Request, TokenLogprob
from specpool.engine.scheduler.step import StepResult
from specpool.engine.worker.verify import Logprobs, Verdict
from specpool.kernels.transfer import Download


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a step for each lane, on the device.

    Attributes:
        packed: int64. Without a verify: [B, 1], one token per lane. Of a verify: [B, A + 2], the
            target's tokens at the accepted nodes, then how many of them count, then whether some
            logits were not finite.
        is_verify: whether `packed` is of a verify.
        logits: [n, V], of all nodes of a verify, else of the B lanes; None if not available (a
            graph's replay).
        nodes: int64 [B, A], of a verify: the row of `logits` that each token is from.
        done: of a prefill, on the host: whether each lane's token counts, because its prompt has
            ended; None if all do. A token below 0 always counts, so that the request ends.
    """

    packed: Tensor
    is_verify: bool
    logits: Tensor | None = None
    nodes: Tensor | None = None
    done: Sequence[bool] | None = None

    @classmethod
    def of_verify(cls, verdict: Verdict, logits: Tensor) -> Outcome:
        """Pack a verdict. `logits` has one row per node."""
        accept_len, not_finite = verdict.accept_len.unsqueeze(1), verdict.not_finite.unsqueeze(1)
        packed = torch.cat([verdict.tokens, accept_len, not_finite], 1)
        return cls(packed, is_verify=True, logits=logits, nodes=verdict.nodes)


class PendingStep:
    """A forward that has been launched; its results are on their way to the host."""

    def __init__(self, requests: Sequence[Request], outcome: Outcome) -> None:
        """Start the copies of the outcome of these requests' lanes."""
        packed, logits = outcome.packed, outcome.logits
        self._done = None if outcome.done is None else np.array(outcome.done, np.bool_)
        self._is_verify = outcome.is_verify
        self._wanted = [request.params.logprobs for request in requests]
        self._packed = Download(packed)
        self._logprobs = None
        num_top = max((num for num in self._wanted if num is not None), default=None)
        if num_top is not None and logits is not None:
            tokens = packed[:, :-2] if outcome.is_verify else packed
            chosen = logits if outcome.nodes is None else logits[outcome.nodes.view(-1)]
            self._logprobs = Logprobs(chosen, tokens.reshape(-1), num_top)

    def result(self) -> StepResult:
        """Wait until the results are on the host, and return them.

        A step waits for the device here only, and not for its draft-extend.
        """
        packed = self._packed.array()
        if self._is_verify:
            drawn, accept_len = packed[:, :-2], packed[:, -2].astype(np.int32)
            not_finite = packed[:, -1].astype(np.bool_)
        else:  # one token per lane
            drawn, accept_len = packed, np.ones(len(packed), np.int32)
            not_finite = packed[:, 0] < 0
        if self._done is not None:
            accept_len = (self._done | not_finite).astype(np.int32)
        num_tokens = accept_len.tolist()
        logprobs: list[list[TokenLogprob] | None] | None = None
        if self._logprobs is not None:
            entries, width = self._logprobs.entries(), drawn.shape[1]
            logprobs = [
                None if num_top is None else entries[lane * width : lane * width + n]
                for lane, (num_top, n) in enumerate(zip(self._wanted, num_tokens, strict=True))
            ]
        return StepResult(
            tokens=[lane[:n] for lane, n in zip(drawn.tolist(), num_tokens, strict=True)],
            accept_len=accept_len,
            not_finite=not_finite,
            logprobs=logprobs,
        )
