"""Verify: accept the drafts of a tree that agree with the target's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool import kernels
from specpool.engine.draft.base import DraftTree
from specpool.engine.scheduler.request import TokenLogprob
from specpool.kernels.transfer import Download


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one verify, on the device, with A = S + 1 places per lane."""

    accept_index: Tensor  # int32 [B, A], flat node ids b*N + node, -1 padded
    accept_len: Tensor  # int32 [B], the bonus token included
    nodes: Tensor  # int64 [B, A], accept_index with node 0 for padding
    tokens: Tensor  # int64 [B, A], the target's token at each node; -1 means logits not finite
    not_finite: Tensor  # bool [B], whether some node's logits were not finite

    @classmethod
    def joined(cls, verdicts: Sequence[Verdict], firsts: Sequence[int]) -> Verdict:
        """Join the verdicts of a round's parts into one, padded to the longest.

        NOTE: `accept_index` of the result is that of the first verdict alone.

        Args:
            verdicts: of parts whose lanes follow one another.
            firsts: the index of each part's first node in the round; added to its `nodes`.
        """
        if len(verdicts) == 1:
            return verdicts[0]
        width = max(verdict.tokens.shape[1] for verdict in verdicts)

        def padded(table: Tensor) -> Tensor:
            return torch.nn.functional.pad(table, (0, width - table.shape[1]))

        return cls(
            verdicts[0].accept_index,
            torch.cat([verdict.accept_len for verdict in verdicts]),
            torch.cat([padded(v.nodes + n) for v, n in zip(verdicts, firsts, strict=True)]),
            torch.cat([padded(verdict.tokens) for verdict in verdicts]),
            torch.cat([verdict.not_finite for verdict in verdicts]),
        )

    @property
    def bonus(self) -> Tensor:
        """int64 [B], the last accepted token of each lane: the next round's root."""
        return self.tokens.gather(1, (self.accept_len.long() - 1).unsqueeze(1)).squeeze(1)


def verify(tree: DraftTree, target_tokens: Tensor, num_steps: int) -> Verdict:
    """Walk each tree along the target's own tokens.

    Args:
        tree: B trees of N nodes.
        target_tokens: int64 [B, N], the target's token at each node, greedy or drawn.
        num_steps: S.
    """
    accept_index, accept_len, predict = kernels.verify_tree(
        tree.tokens, tree.first_child, tree.next_sibling, target_tokens, num_steps=num_steps
    )
    nodes = accept_index.long().clamp(min=0)
    not_finite = target_tokens.amin(1) < 0
    return Verdict(accept_index, accept_len, nodes, predict[nodes], not_finite)


class Logprobs:
    """Log probabilities on their way to the host."""

    def __init__(self, logits: Tensor, tokens: Tensor, num_top: int) -> None:
        """Start the copies of the log probabilities of tokens, and of the likeliest tokens.

        Args:
            logits: [n, V].
            tokens: int64 [n].
            num_top: how many of the likeliest tokens to report, besides.
        """
        table = torch.log_softmax(logits.float(), -1)
        values, ids = table.topk(min(num_top, table.shape[1]), -1)
        chosen = table.gather(1, tokens.clamp(min=0).unsqueeze(1))
        self._tokens, self._ids = Download(tokens), Download(ids)
        self._values = Download(torch.cat([chosen, values], 1))

    def entries(self) -> list[TokenLogprob]:
        """Wait for the copies; return one entry per token."""
        return [
            TokenLogprob(token, chosen, dict(zip(ids, values, strict=True)))
            for token, ids, (chosen, *values) in zip(
                self._tokens.array().tolist(),
                self._ids.array().tolist(),
                self._values.array().tolist(),
                strict=True,
            )
        ]
