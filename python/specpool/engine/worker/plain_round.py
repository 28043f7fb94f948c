"""`PlainRound`: the work of a round without drafts, one token for each lane."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specpool.engine.attention.lanes import Lanes
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.scheduler.request import Request
from specpool.engine.worker.forward import Pass
from specpool.engine.worker.results import Outcome
from specpool.engine.worker.step_work import RoundContext, are_greedy


class PlainRound:
    """A round without drafts: the target reads the root of each lane, and gives the next token.

    Attributes:
        requests: one per lane; empty in the capture of a graph.
    """

    def __init__(
        self,
        context: RoundContext,
        lanes: Lanes,
        requests: Sequence[Request],
        *,
        writes_draft: bool,
    ) -> None:
        """Run a round of `lanes`. With `writes_draft` the drafters write the roots' KV too."""
        self.requests = requests
        self._context, self._lanes = context, lanes
        self._followers = context.followers if writes_draft and context.followers else None
        self._roots: Tensor  # int64 [B]
        self._drawn: Tensor  # int64 [B, 1]
        self._output: TargetOutput

    def launch(self) -> Pass:
        """Return the roots."""
        self._roots = self._context.rows.root_tokens.index_select(0, self._lanes.rows)
        positions, views = self._context.causal_reads(self._lanes)
        return Pass(
            lanes=self._lanes,
            tokens=self._roots,
            positions=positions,
            views=views,
            logits_at=None,
            wants_features=self._followers is not None and self._followers.wants_features,
        )

    def outcome(self, output: TargetOutput) -> Outcome:
        """Draw the next token of each lane."""
        context, lanes = self._context, self._lanes
        new_lens = lanes.starts + 1
        logits = context.processors.process(output.logits, lanes, self.requests)
        drawn = context.rows.draw(
            lanes.rows, logits, new_lens.unsqueeze(1), greedy=are_greedy(self.requests)
        )
        context.rows.put(lanes, new_lens, drawn[:, 0])
        context.processors.add(lanes, self.requests, drawn)
        self._output, self._drawn = output, drawn
        return Outcome(drawn, is_verify=False, logits=output.logits)

    def follow(self) -> None:
        """Let the drafters write the roots' KV, if the step says so."""
        if self._followers is not None:
            self._followers.plain_round(
                self._lanes, self._roots, self._drawn[:, 0].clamp(min=0), self._output
            )
