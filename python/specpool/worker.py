"""The phases of a step on the device: prefill, draft, build, verify, compact, draft-extend.

The worker never decides: which rows, which shapes and which pages come from the plan. Nor does it
wait: what the next step needs stays on the device (`RowState`), and what the host must know is
copied to it right after verify, while draft-extend still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool._core import Plan, Shape
from specpool.attention import AttentionBatch, AttentionView
from specpool.attention.lanes import Lanes, causal_view, own_view
from specpool.draft.base import Drafter, DraftTree, Int32
from specpool.errors import ShapeError
from specpool.kernels import device as kernels
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import Download, upload
from specpool.kv_cache import KVCache
from specpool.models.target import TargetModel, TargetOutput
from specpool.request import Request, TokenLogprob
from specpool.row_state import RowState
from specpool.verify import Logprobs, Verdict, verify


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one forward gave each lane."""

    tokens: list[list[int]]  # accepted drafts, then the bonus token; -1 = logits not finite
    accept_len: Int32  # [B]
    not_finite: list[bool]
    logprobs: list[list[TokenLogprob] | None]


class PendingRound:
    """A forward that has been launched; its results are on their way to the host."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokens: Tensor,
        logits: Tensor,
        verdict: Verdict | None = None,
        *,
        done: Sequence[bool] | None = None,
    ) -> None:
        """Start the copies.

        Args:
            requests: the lanes.
            tokens: int64 [B, A], the target's at the nodes that were accepted.
            logits: [n, V], of the nodes that `verdict` names, or of the B lanes.
            verdict: how many tokens count; None = one in each lane.
            done: lanes whose tokens count; None = all.
        """
        self._done = done
        self._wanted = [request.params.logprobs for request in requests]
        self._counted = verdict is not None
        if verdict is not None:
            lens, not_finite = verdict.accept_len.unsqueeze(1), verdict.not_finite.unsqueeze(1)
            self._packed = Download(torch.cat([tokens, lens, not_finite], 1))  # [B, A + 2]
        else:
            self._packed = Download(tokens)
        self._logprobs = None
        most = max((n for n in self._wanted if n is not None), default=None)
        if most is not None:
            chosen = logits if verdict is None else logits[verdict.nodes.view(-1)]
            self._logprobs = Logprobs(chosen, tokens.reshape(-1), most)

    def result(self) -> RoundResult:
        """Wait for the round's verify; the only thing that a step waits for."""
        packed = self._packed.array()
        if self._counted:
            tokens, lens = packed[:, :-2].tolist(), packed[:, -2]
            not_finite = packed[:, -1].astype(bool).tolist()
        else:
            tokens, lens = packed.tolist(), np.ones(len(packed), np.int32)
            not_finite = (packed[:, 0] < 0).tolist()
        kept = [lane[:n] for lane, n in zip(tokens, lens.tolist(), strict=True)]
        if self._done is not None:
            kept = [lane if done else [] for lane, done in zip(kept, self._done, strict=True)]
        logprobs: list[list[TokenLogprob] | None] = [None] * len(kept)
        if self._logprobs is not None:
            entries, width = self._logprobs.entries(), len(tokens[0])
            for i, num_top in enumerate(self._wanted):
                if num_top is not None:
                    mine = entries[i * width : i * width + len(kept[i])]
                    logprobs[i] = [entry.first(num_top) for entry in mine]
        return RoundResult(kept, lens.astype(np.int32), not_finite, logprobs)


class EagleWorker:
    """Runs the target, and a drafter beside it, on the rows of a plan (v2, spec 12)."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        cache: KVCache,
        *,
        target_groups: Sequence[int],
        max_nodes: int,
        max_context_len: int,
    ) -> None:
        """Work on `cache`, whose first layers are the target's.

        Args:
            target: with its layers' KV in `cache`.
            drafter: attached to `cache`, or None.
            cache: of both.
            target_groups: the group of each of the target's layers.
            max_nodes: N of the largest shape.
            max_context_len: positions beyond it are clamped.
        """
        self._target, self._drafter, self._cache = target, drafter, cache
        self._target_groups = list(target_groups)
        self._last_position = max_context_len - 1
        self._state = RowState(cache.tables[0].shape[0] - 1, max_nodes, cache.device)
        self._fields = {  # group -> all of the target's layers in it
            group: cache.fields([i for i, g in enumerate(target_groups) if g == group])
            for group in sorted(set(target_groups))
        }

    @torch.inference_mode()
    def prefill(self, plan: Plan, requests: Sequence[Request]) -> PendingRound:
        """Run the next chunk of each prompt; the lanes whose prompt ends get their first token.

        Args:
            plan: of `prepare_extend`.
            requests: the plan's lanes.
        """
        ends = plan.new_len.tolist()
        chunks = [r.tokens[s:e] for r, s, e in zip(requests, plan.start, ends, strict=True)]
        done = [end >= request.prompt_len for request, end in zip(requests, ends, strict=True)]
        # Feature p goes with token p + 1, which is the token drawn (-1) where the prompt ends.
        following = [
            -1 if last else request.tokens[end]
            for request, end, last in zip(requests, ends, done, strict=True)
        ]
        rows, starts, new_lens, tokens, after = upload(
            self._cache.device,
            plan.rows,
            plan.start,
            plan.new_len,
            np.concatenate(chunks).astype(np.int64),
            np.array(following, np.int64),
        )
        lanes = Lanes(rows, starts, plan.start, plan.start, plan.new_len - plan.start)
        self._state.put_params(lanes, requests)
        drafts = self._drafter if _drafts(requests) else None
        self._capture(drafts is not None)
        output = self._forward_causal(lanes, tokens, lanes.lasts)
        drawn = self._draw(lanes, requests, output.logits, new_lens.long().unsqueeze(1))
        self._state.put(lanes, new_lens, drawn[:, 0])
        pending = PendingRound(requests, drawn, output.logits, done=done)
        if drafts is not None:
            shifted = tokens.roll(-1)
            shifted[lanes.lasts] = torch.where(after < 0, drawn[:, 0], after).clamp(min=0)
            drafts.extend(lanes, shifted, _features(output))
        return pending

    @torch.inference_mode()
    def decode(self, plan: Plan, requests: Sequence[Request], shape: Shape) -> PendingRound:
        """One round: draft, verify, compact, draft-extend.

        Args:
            plan: of `prepare_decode`, every lane of `shape`.
            requests: the plan's lanes.
            shape: the round's shape.
        """
        lanes = self._state.lanes(plan.rows, plan.lo, plan.hi, shape.num_draft_tokens)
        roots = self._state.root_tokens.index_select(0, lanes.rows)
        if self._drafter is None or shape.num_draft_tokens == 1:
            return self._decode_plainly(lanes, roots, requests)
        tree = self._propose(self._drafter, lanes, shape, roots, requests)
        positions = lanes.starts.unsqueeze(1) + tree.depths
        self._capture(True)
        output = self._forward_tree(lanes, tree, positions)
        drawn = self._draw(lanes, requests, output.logits, positions.long() + 1)
        verdict = verify(tree, drawn, shape.num_steps)
        self._state.put(lanes, lanes.starts + verdict.accept_len, verdict.bonus)
        pending = PendingRound(requests, verdict.tokens, output.logits, verdict)
        for group, fields in self._fields.items():
            kernels.compact_accepted(
                fields,
                self._cache.tables[group],
                self._cache.page_sizes[group],
                lanes.rows,
                lanes.starts,
                verdict.accept_index,
                num_draft_tokens=shape.num_draft_tokens,
            )
        accepted, nodes, tokens = self._accepted(lanes, verdict)
        features = _features(output).index_select(0, nodes)
        if accepted.padding is not None:
            # A NaN of some other lane must not reach the sink, which all lanes read (masked).
            features = features.masked_fill(accepted.padding.unsqueeze(1), 0)
        self._drafter.extend(accepted, tokens.clamp(min=0), features)
        return pending

    def _propose(
        self,
        drafter: Drafter,
        lanes: Lanes,
        shape: Shape,
        roots: Tensor,
        requests: Sequence[Request],
    ) -> DraftTree:
        """A tree that verify may walk; the values of one that the host made are checked."""
        texts = [request.tokens for request in requests] if drafter.reads_tokens else None
        tree = drafter.propose(lanes, shape, roots, texts)
        if not isinstance(tree, DraftTree):
            raise ShapeError(f"a drafter proposes a DraftTree, got {tree!r:.80}")
        tree.check(shape, len(requests))
        if texts is not None and tree.tokens.device.type == "cpu":
            last = np.array([text[-1] for text in texts])
            tree.check_values(last, self._target.vocab_size)
        elif not runs_kernels(tree.tokens.device):
            tree.check_tokens(self._target.vocab_size)
        return tree.to(self._cache.device)

    def _decode_plainly(
        self, lanes: Lanes, roots: Tensor, requests: Sequence[Request]
    ) -> PendingRound:
        """Shape 0: the root alone goes through the target; no draft KV is kept."""
        self._capture(False)
        output = self._forward_causal(lanes, roots, None)
        new_lens = lanes.starts + 1
        drawn = self._draw(lanes, requests, output.logits, new_lens.long().unsqueeze(1))
        self._state.put(lanes, new_lens, drawn[:, 0])
        return PendingRound(requests, drawn, output.logits)

    def _draw(
        self, lanes: Lanes, requests: Sequence[Request], logits: Tensor, positions: Tensor
    ) -> Tensor:
        greedy = all(request.params.temperature == 0 for request in requests)
        return self._state.draw(lanes, logits, positions, greedy=greedy)

    def _accepted(self, lanes: Lanes, verdict: Verdict) -> tuple[Lanes, Tensor, Tensor]:
        """The accepted nodes as lanes of their own: which nodes, int64 [T], and their tokens.

        On a CPU the lengths are known at once. A device pads every lane to S+1 instead of telling.
        """
        where = (lanes.rows, lanes.starts, lanes.lo, lanes.hi)
        if runs_kernels(self._cache.device):
            width = verdict.accept_index.shape[1]
            padded = Lanes(*where, width, verdict.accept_len)
            return padded, verdict.nodes.view(-1), verdict.tokens.view(-1)
        index, lens = verdict.accept_index.numpy(), verdict.accept_len.numpy()
        kept = index >= 0
        nodes, tokens = upload(
            self._cache.device, index[kept].astype(np.int64), verdict.tokens.numpy()[kept]
        )
        widths = int(lens[0]) if len(lens) == 1 else lens
        return Lanes(*where, widths), nodes, tokens

    def _capture(self, wanted: bool) -> None:
        """Features cost hooks in every forward: have them only while somebody drafts."""
        layers = self._drafter.feature_layers if wanted and self._drafter is not None else ()
        self._target.capture(layers)

    def _forward_causal(
        self, lanes: Lanes, tokens: Tensor, logits_at: Tensor | None
    ) -> TargetOutput:
        """Prefill or plain decode: every query sees all positions up to its own."""
        views = {group: causal_view(self._cache, group, lanes) for group in self._fields}
        return self._forward(tokens, lanes.positions, views, logits_at)

    def _forward_tree(self, lanes: Lanes, tree: DraftTree, positions: Tensor) -> TargetOutput:
        """Verify: node i of lane b lies in cell start + i, at position start + depth."""
        clamped = positions.clamp(max=self._last_position)
        views = {}
        for group in self._fields:
            slots = lanes.slots(self._cache, group)
            views[group] = own_view(self._cache, group, lanes, slots, tree.mask, clamped, clamped)
        return self._forward(tree.tokens.view(-1), positions.view(-1), views, None)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        views: dict[int, AttentionView],
        logits_at: Tensor | None,
    ) -> TargetOutput:
        layers = [
            (self._cache.keys[i], self._cache.values[i], views[group])
            for i, group in enumerate(self._target_groups)
        ]
        return self._target.forward(
            tokens,
            positions.clamp(max=self._last_position).long(),
            AttentionBatch(list(views.values()), layers),
            logits_at,
        )


def _features(output: TargetOutput) -> Tensor:
    """What a head reads: the captured layers' inputs, or the last hidden state."""
    return output.hidden if output.features is None else output.features


def _drafts(requests: Sequence[Request]) -> bool:
    """Whether the lanes draft at all: a request that opted out keeps no draft KV."""
    return any(request.shape.num_draft_tokens > 1 for request in requests)
