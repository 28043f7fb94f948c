"""The results of a launched step, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.kernels.transfer import Download
from specpool.scheduler.requests.request import Request, TokenLogprob
from specpool.scheduler.step import StepResult
from specpool.worker.verify import Logprobs, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave each lane, on the device.

    Attributes:
        packed: int64 [B, A], the target's tokens; of a verify [B, A + 2]: at the nodes that were
            accepted, and behind them how many count and whether some logits were not finite.
        is_verify: whether `packed` says what counts; else one token of each lane does.
        logits: [n, V], of all nodes, or of the B lanes; None = they are not to be had.
        nodes: int64 [B, A], of a verify: which of the logits each token is from.
    """

    packed: Tensor
    is_verify: bool
    logits: Tensor | None = None
    nodes: Tensor | None = None

    @classmethod
    def of_verify(cls, verdict: Verdict, logits: Tensor) -> Outcome:
        """What `verdict` says, whose nodes are those of `logits`."""
        lens, not_finite = verdict.accept_len.unsqueeze(1), verdict.not_finite.unsqueeze(1)
        return cls(torch.cat([verdict.tokens, lens, not_finite], 1), True, logits, verdict.nodes)


class PendingStep:
    """A forward that has been launched; its results are on their way to the host."""

    def __init__(
        self, requests: Sequence[Request], outcome: Outcome, done: Sequence[bool] | None = None
    ) -> None:
        """Start the copies.

        Args:
            requests: the lanes.
            outcome: theirs.
            done: whether each lane's token is kept; None = all are. A token of -1 (logits not
                finite) is always kept, so that the request ends.
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
        """Wait for the step's verify; the only thing that a step waits for."""
        packed = self._packed.array()
        if self._counted:
            tokens, lens = packed[:, :-2].tolist(), packed[:, -2].astype(np.int32)
            not_finite = packed[:, -1].astype(bool).tolist()
            kept = [lane[:n] for lane, n in zip(tokens, lens.tolist(), strict=True)]
        else:  # one token each
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
                mine = entries[i * width : i * width + len(kept[i])]
                logprobs[i] = [entry.first(num_top) for entry in mine]
        return StepResult(kept, lens, not_finite, logprobs)
