"""The phases of a step on the device: prefill, draft, build, verify, compact, draft-extend.

The worker never decides: which rows, which shapes and which pages come from the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Plan, Shape
from specpool.attention import AttentionBatch, AttentionView
from specpool.attention.lanes import causal_view, own_view, range_positions
from specpool.draft.base import Drafter, DraftTree, Int32, Int64, Lanes
from specpool.errors import ShapeError
from specpool.kernels import moves
from specpool.kv_cache import KVCache
from specpool.models.target import TargetModel, TargetOutput
from specpool.request import Request, TokenLogprob
from specpool.verify import draw_tokens, logprobs_of, verify


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one forward gave each lane."""

    tokens: list[list[int]]  # accepted drafts, then the bonus token; -1 = logits not finite
    accept_len: Int32  # [B]
    not_finite: list[bool]
    logprobs: list[list[TokenLogprob] | None]


class EagleWorker:
    """Runs the target, and a drafter beside it, on the rows of a plan (v2, spec 12)."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: KVCache,
        *,
        target_groups: Sequence[int],
        max_context_len: int,
    ) -> None:
        """Work on `cache`, whose first layers are the target's."""
        self._target, self._drafter, self._cache = target, drafter, cache
        self._target_groups = list(target_groups)
        self._target_layers = list(range(target.num_layers))
        self._last_position = max_context_len - 1

    @torch.inference_mode()
    def prefill(self, plan: Plan, requests: Sequence[Request]) -> RoundResult:
        """Run the next chunk of each prompt; the lanes whose prompt ends get their first token.

        Args:
            plan: of `prepare_extend`.
            requests: the plan's lanes.
        """
        lanes = Lanes(plan.rows, plan.start, plan.new_len - plan.start)
        ends = plan.new_len.tolist()
        tokens = np.concatenate(
            [
                r.tokens[start:end]
                for r, start, end in zip(requests, plan.start.tolist(), ends, strict=True)
            ]
        ).astype(np.int64)
        last = np.cumsum(lanes.q_lens, dtype=np.int64) - 1
        self._capture(_drafts(requests))
        output = self._forward_causal(lanes, tokens, last)
        done = [end >= request.prompt_len for request, end in zip(requests, ends, strict=True)]
        drawn = draw_tokens(requests, output.logits, plan.new_len.astype(np.int64)[:, None])
        if self._drafter is not None and _drafts(requests):
            # Feature p goes with token p + 1: shift left, and append what follows the chunk.
            following = [
                drawn[i, 0] if done[i] else request.tokens[ends[i]]
                for i, request in enumerate(requests)
            ]
            shifted = np.roll(tokens, -1)
            shifted[last] = np.maximum(following, 0)
            self._drafter.extend(lanes, self._to_device(shifted), _features(output))
        kept = [drawn[i].tolist() if done[i] else [] for i in range(len(requests))]
        ready = np.flatnonzero(done)
        return RoundResult(
            kept,
            np.ones(len(requests), np.int32),
            (drawn[:, 0] < 0).tolist(),
            self._logprobs(requests, output.logits, ready, drawn[ready, 0], kept),
        )

    @torch.inference_mode()
    def decode(self, plan: Plan, requests: Sequence[Request], shape: Shape) -> RoundResult:
        """One round: draft, verify, compact, draft-extend.

        Args:
            plan: of `prepare_decode`, every lane of `shape`.
            requests: the plan's lanes.
            shape: the round's shape.
        """
        if self._drafter is None or shape.num_draft_tokens == 1:
            return self._decode_plainly(plan, requests)
        roots = np.array([request.tokens[-1] for request in requests], np.int64)
        lanes = Lanes(plan.rows, plan.start, np.full_like(plan.start, shape.num_draft_tokens))
        texts = [request.tokens for request in requests] if self._drafter.reads_tokens else None
        tree = self._drafter.propose(lanes, shape, roots, texts)
        if not isinstance(tree, DraftTree):
            raise ShapeError(f"a drafter proposes a DraftTree, got {tree!r:.80}")
        tree.check(shape, roots, self._target.vocab_size)
        positions = (lanes.starts[:, None] + tree.depths).astype(np.int64)
        self._capture(True)
        output = self._forward_tree(lanes, tree, positions)
        drawn = draw_tokens(requests, output.logits, positions + 1)
        verdict = verify(tree, drawn, shape.num_steps)
        self._compact(lanes, verdict.accept_index, shape.num_draft_tokens)
        self._drafter.extend(
            Lanes(lanes.rows, lanes.starts, verdict.accept_len),
            self._to_device(np.maximum(verdict.tokens, 0)),
            _features(output).index_select(0, self._to_device(verdict.nodes)),
        )
        flat = iter(verdict.tokens.tolist())
        tokens = [list(itertools.islice(flat, n)) for n in verdict.accept_len.tolist()]
        return RoundResult(
            tokens,
            verdict.accept_len,
            verdict.not_finite,
            self._logprobs(requests, output.logits, verdict.nodes, verdict.tokens, tokens),
        )

    def _decode_plainly(self, plan: Plan, requests: Sequence[Request]) -> RoundResult:
        """Shape 0: the root alone goes through the target; no draft KV is kept."""
        roots = np.array([request.tokens[-1] for request in requests], np.int64)
        lanes = Lanes(plan.rows, plan.start, np.ones_like(plan.start))
        self._capture(False)
        output = self._forward_causal(lanes, roots, None)
        drawn = draw_tokens(requests, output.logits, plan.start.astype(np.int64)[:, None] + 1)
        tokens = drawn.tolist()
        return RoundResult(
            tokens,
            lanes.q_lens,
            [token[0] < 0 for token in tokens],
            self._logprobs(requests, output.logits, np.arange(len(tokens)), drawn[:, 0], tokens),
        )

    def _capture(self, wanted: bool) -> None:
        """Features cost hooks in every forward: have them only while somebody drafts."""
        layers = self._drafter.feature_layers if wanted and self._drafter is not None else ()
        self._target.capture(layers)

    def _forward_causal(self, lanes: Lanes, tokens: Int64, logits_at: Int64 | None) -> TargetOutput:
        """Prefill or plain decode: every query sees all positions up to its own."""
        q_lens = None if len(tokens) == len(lanes.rows) else lanes.q_lens
        views = {
            group: causal_view(self._cache, group, lanes.rows, lanes.starts, q_lens)
            for group in set(self._target_groups)
        }
        if q_lens is None:
            positions = lanes.starts.astype(np.int64)
        else:
            positions = range_positions(lanes.starts, q_lens)
        return self._forward(tokens, positions, views, logits_at)

    def _forward_tree(self, lanes: Lanes, tree: DraftTree, positions: Int64) -> TargetOutput:
        """Verify: node i of lane b lies in cell start + i, at position start + depth."""
        clamped = np.minimum(positions, self._last_position).astype(np.int32)
        views = {}
        for group in set(self._target_groups):
            table, page_size = self._cache.tables[group], self._cache.page_sizes[group]
            slots = kernels.slot_ranges(table, page_size, lanes.rows, lanes.starts, lanes.q_lens)
            views[group] = own_view(
                self._cache, group, lanes.rows, lanes.starts, slots, tree.mask, clamped, clamped
            )
        return self._forward(tree.tokens.ravel(), positions.ravel(), views, None)

    def _forward(
        self,
        tokens: Int64,
        positions: Int64,
        views: dict[int, AttentionView],
        logits_at: Int64 | None,
    ) -> TargetOutput:
        layers = [
            (self._cache.keys[i], self._cache.values[i], views[group])
            for i, group in enumerate(self._target_groups)
        ]
        return self._target.forward(
            self._to_device(tokens),
            self._to_device(np.minimum(positions, self._last_position)),
            AttentionBatch(list(views.values()), layers),
            None if logits_at is None else self._to_device(logits_at),
        )

    def _compact(self, lanes: Lanes, accept_index: Int32, num_nodes: int) -> None:
        """Move the accepted nodes' KV right behind the prefix, in every target layer."""
        for group in set(self._target_groups):
            layers = [i for i in self._target_layers if self._target_groups[i] == group]
            moves.compact_accepted(
                self._cache.buffers(layers),
                self._cache.tables[group],
                self._cache.page_sizes[group],
                lanes.rows,
                lanes.starts,
                accept_index,
                num_draft_tokens=num_nodes,
            )

    def _logprobs(
        self,
        requests: Sequence[Request],
        logits: torch.Tensor,
        nodes: npt.NDArray[np.int64],
        tokens: Int64,
        kept: list[list[int]],
    ) -> list[list[TokenLogprob] | None]:
        """Per lane: the log probabilities of its kept tokens, if it asked for them."""
        wanted = [request.params.logprobs for request in requests]
        if all(n is None for n in wanted):
            return [None] * len(requests)
        most = max(n for n in wanted if n is not None)
        table = iter(logprobs_of(logits[self._to_device(nodes)], tokens, most))
        result: list[list[TokenLogprob] | None] = []
        for lane, num_top in zip(kept, wanted, strict=True):
            entries = [next(table) for _ in lane]
            result.append(None if num_top is None else [e.first(num_top) for e in entries])
        return result

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._cache.device)


def _features(output: TargetOutput) -> torch.Tensor:
    """What a head reads: the captured layers' inputs, or the last hidden state."""
    return output.hidden if output.features is None else output.features


def _drafts(requests: Sequence[Request]) -> bool:
    """Whether the lanes draft at all: a request that opted out keeps no draft KV."""
    return any(request.shape.num_draft_tokens > 1 for request in requests)
