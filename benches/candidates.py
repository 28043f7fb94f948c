"""The candidates of a draft round, in buffers that are allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specpool import _core


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidate buffers of a batch; M = K + (S-1)*K*K. A round overwrites the one before.

    Attributes:
        topk: K.
        scores: float32 [batch, M], cumulative probabilities.
        tokens: int64 [batch, M].
        parents: int64 [batch, 1 + K*S]; -1, then per step the numbers of the kept candidates.
    """

    topk: int
    scores: NDArray[np.float32]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    @classmethod
    def empty(cls, batch: int, *, num_steps: int, topk: int) -> Candidates:
        """Buffers for `batch` lanes of `num_steps` steps and `topk` branches."""
        total = topk + (num_steps - 1) * topk * topk
        return cls(
            topk,
            np.zeros((batch, total), np.float32),
            np.zeros((batch, total), np.int64),
            np.zeros((batch, 1 + topk * num_steps), np.int64),
        )

    def select(
        self,
        step: int,
        topk_p: NDArray[np.float32],
        topk_index: NDArray[np.int64],
        scores: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """`select_topk` into these buffers: input_ids, branch_parents, scores."""
        return _core.select_topk(
            step, topk_p, topk_index, scores, self.scores, self.tokens, self.parents
        )

    def organize(
        self, num_draft_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """`organize` of these buffers: parent_list, top_scores_index, draft_tokens."""
        return _core.organize(
            self.scores,
            self.tokens,
            self.parents,
            topk=self.topk,
            num_draft_tokens=num_draft_tokens,
        )
