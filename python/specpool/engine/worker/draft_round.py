"""`DraftRound`: the work of a round with drafts: draft, verify, compact, draft-extend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.engine.attention import AttentionView
from specpool.engine.attention.lanes import Lanes, own_view
from specpool.engine.draft.base import DraftTree
from specpool.engine.draft.side_by_side import DraftPart
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.scheduler.request import NO_TREE, Request
from specpool.engine.worker.forward import Pass
from specpool.engine.worker.part import Part
from specpool.engine.worker.proposer import Proposal
from specpool.engine.worker.results import Outcome
from specpool.engine.worker.step_work import RoundContext, are_greedy
from specpool.engine.worker.verify import Verdict, verify
from specpool.kernels.launch import runs_kernels


class DraftRound:
    """A round in which some lanes draft: the target reads a tree of each lane.

    Attributes:
        requests: one per lane; empty in the capture of a graph.
    """

    def __init__(
        self,
        context: RoundContext,
        lanes: Lanes,
        requests: Sequence[Request],
        *,
        runs: Sequence[tuple[Shape, int]],
    ) -> None:
        """Run a round of `lanes`.

        Args:
            context: what the round works with.
            lanes: all lanes of the round.
            requests: one per lane; empty in the capture of a graph.
            runs: (shape, number of lanes) of each run of lanes that share a shape, in order.
        """
        self.requests = requests
        self._context, self._lanes, self._runs = context, lanes, runs
        self._parts: list[Part]
        self._verdicts: list[Verdict]  # one for each part
        self._verdict: Verdict  # of all lanes
        self._output: TargetOutput

    def launch(self) -> Pass:
        """Draft; return the nodes of all trees."""
        context = self._context
        self._parts = parts = self._drafted()
        if len(parts) == 1:
            lanes, tokens = parts[0].lanes, parts[0].tree.tokens.view(-1)
        else:
            widths = [np.full(len(p.positions), p.positions.shape[1], np.int32) for p in parts]
            lanes = Lanes(self._lanes.rows, self._lanes.seq_lens, np.concatenate(widths))
            tokens = torch.cat([part.tree.tokens.view(-1) for part in parts])
        # A node of a chain sees all tokens before it, so no mask is needed.
        are_chains = all(part.is_chain for part in parts)
        positions, views = context.causal_reads(lanes) if are_chains else self._tree_reads(lanes)
        return Pass(
            lanes=lanes,
            tokens=tokens,
            positions=positions,
            views=views,
            logits_at=None,
            wants_features=context.followers.wants_features,
            trees=() if are_chains else [part.tree for part in parts],
        )

    def outcome(self, output: TargetOutput) -> Outcome:
        """Walk each tree along the target's own tokens. This makes the accept lengths."""
        context, parts = self._context, self._parts
        verdicts = []
        for part in parts:
            drawn = self._drawn(part, output.logits)
            if part.is_broken is not None:  # an invalid tree's walk ends at the root
                drawn = drawn.masked_fill(part.is_broken.unsqueeze(1), NO_TREE)
            verdicts.append(verify(part.tree, drawn, part.num_steps))
        verdict = Verdict.joined(verdicts, [part.first for part in parts])
        context.rows.put(self._lanes, self._lanes.starts + verdict.accept_len, verdict.bonus)
        context.processors.add(self._lanes, self.requests, verdict.tokens, verdict.accept_len)
        self._output, self._verdicts, self._verdict = output, verdicts, verdict
        return Outcome.of_verify(verdict, output.logits)

    def follow(self) -> None:
        """Compact, and let the drafters write their KV of the accepted tokens."""
        for part, verdict in zip(self._parts, self._verdicts, strict=True):
            if not part.is_chain:
                self._compact(part, verdict)
        self._context.followers.draft_round(
            lanes=self._lanes,
            parts=self._parts,
            verdicts=self._verdicts,
            verdict=self._verdict,
            output=self._output,
        )

    def _drafted(self) -> list[Part]:
        """Draft for each run of lanes, and return their parts."""
        wanted: list[tuple[DraftPart, Sequence[Request]]] = []
        lane = 0
        for shape, num_lanes in self._runs:
            end = lane + num_lanes
            lanes = self._lanes.part(lane, end, shape.num_draft_tokens)
            roots = self._context.rows.root_tokens.index_select(0, lanes.rows)
            wanted.append((DraftPart(lanes, shape, roots), self.requests[lane:end]))
            lane = end
        drafting = [i for i, (run, _) in enumerate(wanted) if run.shape.num_draft_tokens > 1]
        proposals = self._context.proposer.propose_parts([wanted[i] for i in drafting])
        trees = dict(zip(drafting, proposals, strict=True))
        parts: list[Part] = []
        first = 0
        for index, (run, requests) in enumerate(wanted):
            proposal = trees.get(index) or (_root_trees(run.root_tokens), None, None)
            parts.append(self._part(run, proposal, requests, first))
            first += parts[-1].positions.numel()
        return parts

    def _part(
        self, run: DraftPart, proposal: Proposal, requests: Sequence[Request], first: int
    ) -> Part:
        """Return the part of lanes that have these trees; `first` is its first node's index."""
        tree, is_broken, drafter = proposal
        return Part(
            lanes=run.lanes,
            tree=tree,
            positions=run.lanes.starts.unsqueeze(1) + tree.depths,
            num_steps=run.shape.num_steps,
            chains_of=drafter if run.shape.topk == 1 else None,
            is_chain=_are_chains(tree),
            first=first,
            is_broken=is_broken,
            requests=requests,
            on_host=self._context.processors.look(tree, requests),  # before the target's forward
        )

    def _tree_reads(self, lanes: Lanes) -> tuple[Tensor, dict[int, AttentionView]]:
        """Return positions and views of trees: node i is in cell start + i, at start + depth."""
        context = self._context
        of_parts = [part.positions.clamp(max=context.last_position) for part in self._parts]
        masks, by_lane = _own_cells(self._parts, of_parts)
        views = {}
        for group in context.target_fields:
            slots = lanes.slots(context.cache, group)
            views[group] = own_view(context.cache, group, lanes, slots, masks, by_lane, by_lane)
        return torch.cat([positions.view(-1) for positions in of_parts]).long(), views

    def _drawn(self, part: Part, logits: Tensor) -> Tensor:
        """Choose the target's tokens at all nodes of a part, int64 [B, N]."""
        of_part = logits[part.first : part.first + part.positions.numel()]
        processed = self._context.processors.process(
            of_part, part.lanes, part.requests, part.tree, part.on_host
        )
        return self._context.rows.draw(
            part.lanes.rows, processed, part.positions + 1, greedy=are_greedy(part.requests)
        )

    def _compact(self, part: Part, verdict: Verdict) -> None:
        """Move the accepted nodes' KV to the slots right after the prefix, in all target layers.

        So are the inputs that recurrent layers have recorded.
        """
        num_nodes = part.positions.shape[1]
        if num_nodes == 1:
            return
        cache = self._context.cache
        for group, fields in self._context.target_fields.items():
            kernels.compact_accepted(
                fields,
                cache.tables[group],
                cache.page_sizes[group],
                part.lanes.rows,
                part.lanes.starts,
                verdict.accept_index,
                num_draft_tokens=num_nodes,
            )
        if self._context.state is not None:
            self._context.state.compact(
                part.lanes.rows,
                part.lanes.starts,
                verdict.accept_index,
                num_draft_tokens=num_nodes,
            )


def _own_cells(parts: Sequence[Part], positions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what the nodes of all lanes see of their own trees, padded to the widest.

    Args:
        parts: of one round.
        positions: int32 [B, N] for each part, of its nodes.

    Returns:
        bool [B, N, N], and the positions int32 [B, N].
    """
    if len(parts) == 1:
        return parts[0].tree.mask, positions[0]
    num_lanes = sum(len(of_part) for of_part in positions)
    max_nodes = max(of_part.shape[1] for of_part in positions)
    mask = parts[0].tree.mask.new_zeros(num_lanes, max_nodes, max_nodes)
    by_lane = positions[0].new_zeros(num_lanes, max_nodes)
    start = 0
    for part, of_part in zip(parts, positions, strict=True):
        batch, num_nodes = of_part.shape
        mask[start : start + batch, :num_nodes, :num_nodes] = part.tree.mask
        by_lane[start : start + batch, :num_nodes] = of_part
        start += batch
    return mask, by_lane


def _root_trees(roots: Tensor) -> DraftTree:
    """Return trees that consist of the roots, int64 [B], alone."""
    size = len(roots), 1
    depths = torch.zeros(size, dtype=torch.int32, device=roots.device)
    alone = torch.ones(*size, 1, dtype=torch.bool, device=roots.device)
    return DraftTree.chain(roots.unsqueeze(1), (depths, alone, depths - 1, depths - 1))


def _are_chains(tree: DraftTree) -> bool:
    """Return whether the host knows that in every tree node i continues node i - 1."""
    if tree.is_chain or runs_kernels(tree.depths.device):
        return tree.is_chain
    return bool((tree.depths.numpy() == np.arange(tree.depths.shape[1])).all())
