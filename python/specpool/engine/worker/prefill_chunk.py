"""`PrefillChunk`: the work of a prefill step, the next chunk of some prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specpool._core import Plan
from specpool.engine.attention.lanes import Lanes
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.scheduler.request import NOT_FINITE, Request
from specpool.engine.worker.forward import Pass
from specpool.engine.worker.results import Outcome
from specpool.engine.worker.step_work import RoundContext, are_greedy
from specpool.kernels.transfer import upload

# In place of the token that follows a prompt's end, which is not drawn yet.
_NOT_DRAWN = -1


class PrefillChunk:
    """The next chunk of some prompts. A lane whose prompt ends gets its first token.

    Attributes:
        requests: one per lane.
    """

    def __init__(self, context: RoundContext, plan: Plan, requests: Sequence[Request]) -> None:
        """Prefill the lanes of `plan`."""
        self.requests = requests
        self._context, self._plan = context, plan
        ends = plan.new_len.tolist()
        # For each lane, whether the chunk is the last of its prompt.
        self._done = [end >= r.prefill_len for r, end in zip(requests, ends, strict=True)]
        # A request that never drafts keeps no draft KV.
        drafts = any(request.shape.num_draft_tokens > 1 for request in requests)
        self._followers = context.followers if drafts and context.followers else None
        self._lanes: Lanes
        self._new_lens: Tensor  # int32 [B], the rows' lengths after the chunk
        self._tokens: Tensor  # int64 [T]
        self._following: Tensor  # int64 [B], the token after each lane's chunk, or `_NOT_DRAWN`
        self._drawn: Tensor  # int64 [B, 1]
        self._output: TargetOutput

    def launch(self) -> Pass:
        """Upload the chunks and the requests' sampling parameters; return the chunks' tokens."""
        plan, context = self._plan, self._context
        spans = zip(self.requests, plan.start.tolist(), plan.new_len.tolist(), strict=True)
        chunks = [request.tokens[start:end] for request, start, end in spans]
        lanes = zip(self.requests, plan.new_len.tolist(), self._done, strict=True)
        following = [_NOT_DRAWN if done else r.tokens[end] for r, end, done in lanes]
        rows, starts, self._new_lens, self._tokens, self._following = upload(
            context.cache.device,
            plan.rows,
            plan.start,
            plan.new_len,
            np.fromiter(chain.from_iterable(chunks), np.int64),
            np.array(following, np.int64),
        )
        self._lanes = Lanes(
            rows, SeqLens(starts, plan.start, plan.start), plan.new_len - plan.start
        )
        context.rows.put_params(self._lanes, self.requests)
        positions, views = context.causal_reads(self._lanes)
        wants_features = self._followers is not None and self._followers.wants_features
        return Pass(
            lanes=self._lanes,
            tokens=self._tokens,
            positions=positions,
            views=views,
            logits_at=self._lanes.last_indices,
            wants_features=wants_features,
            wants_hidden=wants_features or context.has_windows,
        )

    def outcome(self, output: TargetOutput) -> Outcome:
        """Draw a token for each lane; it counts if the lane's prompt has ended."""
        context, lanes, done = self._context, self._lanes, self._done
        context.processors.start(lanes, self.requests, done)
        logits = context.processors.process(output.logits, lanes, self.requests, done=done)
        drawn = context.rows.draw(
            lanes.rows,
            logits,
            self._new_lens.unsqueeze(1),
            greedy=are_greedy(self.requests),
        )
        if context.has_windows:  # the last token may not see an earlier token that is NaN
            spoiled = _has_not_finite(lanes, output.hidden)
            drawn = drawn.masked_fill(spoiled.unsqueeze(1), NOT_FINITE)
        context.rows.put(lanes, self._new_lens, drawn[:, 0])
        context.processors.add(lanes, self.requests, drawn, done)
        self._output, self._drawn = output, drawn
        return Outcome(drawn, is_verify=False, logits=output.logits, done=done)

    def follow(self) -> None:
        """Let the drafters write their KV: the feature at p goes with the token at p + 1."""
        if self._followers is None:
            return
        shifted = self._tokens.roll(-1)
        is_drawn = self._following == _NOT_DRAWN
        following = torch.where(is_drawn, self._drawn[:, 0], self._following)
        shifted[self._lanes.last_indices] = following.clamp(min=0)
        self._followers.prefill(
            rows=self._plan.rows,
            lanes=self._lanes,
            tokens=self._tokens,
            next_tokens=shifted,
            output=self._output,
        )


def _has_not_finite(lanes: Lanes, hidden: Tensor) -> Tensor:
    """Return bool [B]: the lanes with a token whose hidden state, of [T, h], is not finite.

    The KV of such a token is not finite either.
    """
    spoiled = (~hidden.isfinite().all(1)).cumsum(0).index_select(0, lanes.last_indices)
    return spoiled.diff(prepend=spoiled.new_zeros(1)) > 0
