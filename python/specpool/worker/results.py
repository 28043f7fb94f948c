"""The results of a launched step, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.kernels.transfer import Download
from specpool.scheduler.request import Request, TokenLogprob
from specpool.scheduler.step import StepResult
from specpool.worker.verify import Logprobs, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a step for each lane, on the device.

    Attributes:
        packed: int64. Without a verify: [B, 1], one token per lane. Of a verify: [B, A + 2], the
            target's tokens at the accepted nodes, then how many of them count, then whether some
            logits were not finite.
        is_verify: whether `packed` is of a verify.
        logits: [n, V], of all nodes of a verify, else of the B lanes; None = not available (a
            graph's replay).
        nodes: int64 [B, A], of a verify: the row of `logits` that each token is from.
    """

    packed: Tensor
    is_verify: bool
    logits: Tensor | None = None
    nodes: Tensor | None = None

    @classmethod
    def of_verify(cls, verdict: Verdict, logits: Tensor) -> Outcome:
        """Pack a verdict. `logits` has one row per node."""
        lens, not_finite = verdict.accept_len.unsqueeze(1), verdict.not_finite.unsqueeze(1)
        packed = torch.cat([verdict.tokens, lens, not_finite], 1)
        return cls(packed, True, logits, verdict.nodes)


class PendingStep:
    """A forward that has been launched; its results are on their way to the host."""

    def __init__(
        self, requests: Sequence[Request], outcome: Outcome, done: Sequence[bool] | None = None
    ) -> None:
        """Start the copies.

        Args:
            requests: one per lane.
            outcome: the lanes' results on the device.
            done: whether each lane's token is kept; None = all are. A prefill whose prompt has not
                ended drops it. A token of -1 (logits not finite) is always kept, so that the
                request ends.
        """
        packed, logits = outcome.packed, outcome.logits
        self._done, self._counted = done, outcome.is_verify
        self._wanted = [request.params.logprobs for request in requests]
        self._packed = Download(packed)
        self._logprobs = None
        most = max((n for n in self._wanted if n is not None), default=None)
        if most is not None and logits is not None:
            tokens = packed[:, :-2] if outcome.is_verify else packed
            chosen = logits if outcome.nodes is None else logits[outcome.nodes.view(-1)]
            self._logprobs = Logprobs(chosen, tokens.reshape(-1), most)

    def result(self) -> StepResult:
        """Wait until the results are on the host, and return them.

        A step waits for the device here only, and not for its draft-extend.
        """
        packed = self._packed.array()
        if self._counted:
            tokens, lens = packed[:, :-2].tolist(), packed[:, -2].astype(np.int32)
            not_finite = packed[:, -1].astype(bool).tolist()
            kept = [lane[:n] for lane, n in zip(tokens, lens.tolist(), strict=True)]
        else:  # one token per lane
            kept = tokens = packed.tolist()
            lens, not_finite = np.ones(len(packed), np.int32), [lane[0] < 0 for lane in tokens]
        if self._done is not None:
            lanes = zip(kept, self._done, strict=True)
            kept = [lane if done or lane[0] < 0 else [] for lane, done in lanes]
        if self._logprobs is None:
            return StepResult(kept, lens, not_finite)
        logprobs: list[list[TokenLogprob] | None] = [None] * len(kept)
        entries, width = self._logprobs.entries(), len(tokens[0])
        for i, num_top in enumerate(self._wanted):
            if num_top is not None:
                logprobs[i] = entries[i * width : i * width + len(kept[i])]
        return StepResult(kept, lens, not_finite, logprobs)
