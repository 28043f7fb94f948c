"""`Worker`: runs the phases of a step: prefill, draft, build, verify, compact, draft-extend.

The worker decides nothing: rows, shapes and pages come from the plan. It does not wait for the
device either: values for the next step stay on the device (`RowState`), and values for the host are
copied right after verify, while draft-extend still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Ledger, Plan, Shape
from specpool.attention import AttentionView, BackEnd, Started
from specpool.attention.cudnn import without_cudnn
from specpool.attention.lanes import Lanes, causal_view, own_view
from specpool.attention.seq_lens import SeqLens
from specpool.draft.base import Drafter
from specpool.draft.side_by_side import DraftPart
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import upload
from specpool.memory.kv_cache import KVCache
from specpool.models.target import TargetModel
from specpool.models.target_output import TargetOutput
from specpool.scheduler.request import NO_TREE, Request
from specpool.scheduler.step import Step
from specpool.worker.followers import Followers
from specpool.worker.forward import Forward, Pass
from specpool.worker.graphs.capture import Capture
from specpool.worker.graphs.graphs import Graphs
from specpool.worker.graphs.round_graph import RoundKind
from specpool.worker.parts import Part, are_greedy, bare_tree, draft_any, not_finite, own_cells
from specpool.worker.processors import Processors
from specpool.worker.proposer import Proposal, Proposer
from specpool.worker.recurrent_forward import StateForward
from specpool.worker.results import Outcome, PendingStep
from specpool.worker.row_state import RowState
from specpool.worker.verify import Verdict, verify


class Worker:
    """A runner of the target, and of drafters if there are any, on the rows of a plan (v2).

    Attributes:
        graphs: the captured rounds; None = none were captured.
    """

    def __init__(
        self,
        target: TargetModel,
        drafters: Sequence[Drafter],
        cache: KVCache,
        *,
        target_groups: Sequence[int],
        shapes: Sequence[Shape],
        max_context_len: int,
        attention: BackEnd,
    ) -> None:
        """Work on `cache`, whose first layers are the target's.

        Args:
            target: the model.
            drafters: attached to `cache`; `Request.drafter` is an index into them.
            cache: holds the KV of all.
            target_groups: the group of each of the target's layers.
            shapes: the ledger's shapes.
            max_context_len: positions at or beyond it are clamped to the last one.
            attention: the back end; its `needs_host_lengths` makes rounds wait for their lengths.
        """
        self.graphs: Graphs | None = None
        self._cache = cache
        vocab_size, device = target.vocab_size, cache.device
        self._keeps_state = target.keeps_state
        num_rows = cache.tables[0].shape[0] - 1
        self._proposer = Proposer(drafters, vocab_size, device, keeps_state=self._keeps_state)
        self._followers = Followers(drafters, num_rows)
        self._processors = Processors(num_rows, vocab_size, device)
        self._forward: Forward = (
            StateForward(target, cache, target_groups, num_rows=num_rows)
            if self._keeps_state
            else Forward(
                target,
                cache,
                target_groups,
                feature_layers=self._followers.feature_layers,
            )
        )
        self._has_windows = any(cache.windows[group] is not None for group in target_groups)
        self._last_position = max_context_len - 1
        self._shapes = list(shapes)
        most = max(shape.num_draft_tokens for shape in shapes)
        self._state = RowState(
            num_rows,
            most,
            cache.device,
            # On a CPU reading the lengths costs no wait, and exact lengths save masked reads.
            needs_host_lengths=attention.needs_host_lengths or not runs_kernels(cache.device),
        )
        self._fields = {  # group -> the KV of the target's layers in it
            group: cache.fields([i for i, g in enumerate(target_groups) if g == group])
            for group in sorted(set(target_groups))
        }

    def capture(
        self,
        capture: Capture,
        ledger: Ledger,
        sizes: Mapping[RoundKind, Sequence[int]],
        attention: Started | None,
    ) -> Graphs:
        """Capture CUDA graphs of rounds, before any request runs; see `Graphs`."""
        recorder = None if attention is None else attention.recorder
        self.graphs = Graphs(capture, ledger, self._cache, self._state, recorder)
        with without_cudnn(self._cache.device):
            self.graphs.build(sizes, self.steps_of)
        return self.graphs

    @torch.inference_mode()
    def run(self, steps: Sequence[Step]) -> list[PendingStep]:
        """Run one forward for launched steps: for one step, or for a prefill and a round together.

        A prefill step runs the next chunk of each prompt; lanes whose prompt ends get their first
        token. A round is draft, verify, compact, draft-extend. A round that has a graph is
        replayed.
        """
        with without_cudnn(self._cache.device):
            replayed = None if self.graphs is None else self.graphs.replay(steps, self._catch_up)
            if replayed is not None:
                pending = [replayed]
            else:
                passes = [
                    self._round(step) if step.is_decode else self._prefill(step.plan, step.requests)
                    for step in steps
                ]
                pending = self._forward.run(passes)
        for step in steps:
            if step.is_decode:
                self._followers.note(step.plan)
        return pending

    def _prefill(self, plan: Plan, requests: Sequence[Request]) -> Pass:
        ends = plan.new_len.tolist()
        chunks = [r.tokens[s:e] for r, s, e in zip(requests, plan.start, ends, strict=True)]
        done = [end >= request.prefill_len for request, end in zip(requests, ends, strict=True)]
        # The feature at p goes with the token at p + 1. At the prompt's end that is the token that
        # will be drawn, here -1.
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
        lens = SeqLens(starts, plan.start, plan.start)
        lanes = Lanes(rows, lens, plan.new_len - plan.start)
        self._state.put_params(lanes, requests)
        followers = self._followers if draft_any(requests) else None
        greedy = are_greedy(requests)

        def follow_up(output: TargetOutput) -> Iterator[Outcome]:
            positions = new_lens.unsqueeze(1)
            self._processors.start(lanes, requests, done)
            logits = self._processors.process(output.logits, lanes, requests, done=done)
            drawn = self._state.draw(lanes.rows, logits, positions, greedy=greedy)
            if self._has_windows:  # the last token may not see an earlier token that is NaN
                spoiled = not_finite(lanes, output.hidden)
                drawn = drawn.masked_fill(spoiled.unsqueeze(1), -1)
            self._state.put(lanes, new_lens, drawn[:, 0])
            self._processors.add(lanes, requests, drawn, done)
            yield Outcome(drawn, False, output.logits)
            if followers:
                shifted = tokens.roll(-1)
                shifted[lanes.lasts] = torch.where(after < 0, drawn[:, 0], after).clamp(min=0)
                followers.prefill(plan.rows, lanes, tokens, shifted, output)

        wants_features = followers is not None and followers.wants_features
        return self._causal_pass(
            requests, lanes, tokens, lanes.lasts, wants_features, follow_up, done=done
        )

    def _round(self, step: Step) -> Pass:
        plan, requests = step.plan, step.requests
        lanes = self._state.lanes(plan.rows, plan.lo, plan.hi)
        greedy = are_greedy(requests)
        if not plan.shapes.any():
            writes_draft = plan.writes_draft
            return self._plain_round(lanes, requests, writes_draft=writes_draft, greedy=greedy)
        self._catch_up(plan)
        return self._draft_round(lanes, self._parts(lanes, plan, requests), requests)

    def steps_of(self, kind: RoundKind, lanes: Lanes) -> Iterator[Outcome]:
        """Launch a round whose lanes only the device knows, for the capture of a graph.

        Tokens are drawn with the rows' own parameters, so they are the same as `run` draws.
        """
        if kind.shape.num_draft_tokens == 1:
            one = self._plain_round(lanes, (), writes_draft=kind.writes_draft, greedy=False)
        else:
            wanted = self._wanted(lanes, 0, len(lanes.seq_lens), kind.shape)
            trees = self._proposer.propose(wanted.lanes, wanted.shape, wanted.root_tokens, ())
            part = self._part(wanted, trees, (), greedy=False)
            one = self._draft_round(lanes, [part], ())
        yield from self._forward.steps(one)

    def _draft_round(
        self, lanes: Lanes, parts: Sequence[Part], requests: Sequence[Request]
    ) -> Pass:
        """Make the pass that verifies the parts' trees, compacts, and lets the drafters follow."""
        are_chains = [part.is_chain for part in parts]

        def follow_up(output: TargetOutput) -> Iterator[Outcome]:
            verdicts = []
            for part in parts:
                drawn = self._drawn(part, output.logits)
                if part.is_broken is not None:  # an invalid tree's walk ends at the root
                    drawn = drawn.masked_fill(part.is_broken.unsqueeze(1), NO_TREE)
                verdicts.append(verify(part.tree, drawn, part.num_steps))
            verdict = Verdict.joined(verdicts, [part.first for part in parts])
            self._state.put(lanes, lanes.starts + verdict.accept_len, verdict.bonus)
            self._processors.add(lanes, requests, verdict.tokens, verdict.accept_len)
            yield Outcome.of_verify(verdict, output.logits)
            self._forward.keep(verdict.accept_len)
            for part, accepted, is_chain in zip(parts, verdicts, are_chains, strict=True):
                if not is_chain:
                    self._compact(part, accepted)
            self._followers.draft_round(lanes, parts, verdicts, verdict, output)

        wants_features = self._followers.wants_features
        # A node of a chain sees all tokens before it, so no mask is needed. With states all are.
        is_causal = self._keeps_state or all(are_chains)
        return self._tree_pass(requests, lanes, parts, wants_features, follow_up, is_causal)

    def _drawn(self, part: Part, logits: Tensor) -> Tensor:
        """Choose the target's tokens at all nodes of a part, int64 [B, N]."""
        mine = logits[part.first : part.first + part.positions.numel()]
        mine = self._processors.process(mine, part.lanes, part.requests, part.tree, part.on_host)
        positions = part.positions + 1
        return self._state.draw(part.lanes.rows, mine, positions, greedy=part.greedy)

    def _plain_round(
        self, lanes: Lanes, requests: Sequence[Request], *, writes_draft: bool, greedy: bool
    ) -> Pass:
        """Make the pass of a plain round: the target reads the root of each lane.

        With `writes_draft`, the drafters write the root's draft KV too.
        """
        roots = self._state.root_tokens.index_select(0, lanes.rows)
        followers = self._followers if writes_draft else None

        def follow_up(output: TargetOutput) -> Iterator[Outcome]:
            new_lens = lanes.starts + 1
            positions = new_lens.unsqueeze(1)
            logits = self._processors.process(output.logits, lanes, requests)
            drawn = self._state.draw(lanes.rows, logits, positions, greedy=greedy)
            self._state.put(lanes, new_lens, drawn[:, 0])
            self._processors.add(lanes, requests, drawn)
            yield Outcome(drawn, False, output.logits)
            if followers:
                followers.plain_round(lanes, roots, drawn[:, 0].clamp(min=0), output)

        wants_features = followers is not None and followers.wants_features
        return self._causal_pass(requests, lanes, roots, None, wants_features, follow_up)

    def _catch_up(self, plan: Plan) -> None:
        self._followers.catch_up(plan, self._state)

    def _parts(
        self,
        lanes: Lanes,
        plan: Plan,
        requests: Sequence[Request],
    ) -> list[Part]:
        """Split the lanes into runs that share a shape, and propose the trees of all."""
        shapes = plan.shapes
        ends = [*(np.flatnonzero(np.diff(shapes)) + 1).tolist(), len(shapes)]
        starts = [0, *ends[:-1]]
        wanted = [
            self._wanted(lanes, start, end, self._shapes[shapes[start]])
            for start, end in zip(starts, ends, strict=True)
        ]
        of = [requests[start:end] for start, end in zip(starts, ends, strict=True)]
        drafting = [i for i, part in enumerate(wanted) if part.shape.num_draft_tokens > 1]
        proposals = self._proposer.propose_parts([(wanted[i], of[i]) for i in drafting])
        trees = dict(zip(drafting, proposals, strict=True))
        parts: list[Part] = []
        first = 0
        for i, each in enumerate(wanted):
            tree = trees.get(i) or (bare_tree(each.root_tokens), None, None)
            part = self._part(each, tree, of[i], greedy=are_greedy(of[i]), first=first)
            parts.append(part)
            first += part.positions.numel()
        return parts

    def _wanted(self, lanes: Lanes, start: int, end: int, shape: Shape) -> DraftPart:
        """Return what the lanes `[start, end)` are to draft, all with one shape."""
        part = lanes.part(start, end, shape.num_draft_tokens)
        return DraftPart(part, shape, self._state.root_tokens.index_select(0, part.rows))

    def _part(
        self,
        wanted: DraftPart,
        proposal: Proposal,
        requests: Sequence[Request],
        *,
        greedy: bool,
        first: int = 0,
    ) -> Part:
        """Make the part of lanes that have got these trees.

        `requests` belong to these lanes; none in a capture. `first` is the index of the part's
        first token among the round's.
        """
        (tree, is_broken, proposer), shape = proposal, wanted.shape
        positions = wanted.lanes.starts.unsqueeze(1) + tree.depths
        on_host = self._processors.look(tree, requests)  # before the target's forward
        chains_of = proposer if shape.topk == 1 else None
        steps = shape.num_steps, chains_of
        return Part(
            wanted.lanes, tree, positions, *steps, greedy, first, is_broken, requests, on_host
        )

    def _compact(self, part: Part, verdict: Verdict) -> None:
        """Move the accepted nodes' KV to the slots right after the prefix, in all target layers."""
        num_nodes = part.positions.shape[1]
        for group, fields in self._fields.items() if num_nodes > 1 else ():
            kernels.compact_accepted(
                fields,
                self._cache.tables[group],
                self._cache.page_sizes[group],
                part.lanes.rows,
                part.lanes.starts,
                verdict.accept_index,
                num_draft_tokens=num_nodes,
            )

    def _causal_pass(
        self,
        requests: Sequence[Request],
        lanes: Lanes,
        tokens: Tensor,
        logits_at: Tensor | None,
        wants_features: bool,
        follow_up: Callable[[TargetOutput], Iterator[Outcome]],
        *,
        is_round: bool = False,
        done: Sequence[bool] | None = None,
    ) -> Pass:
        """Make the pass of a prefill or plain decode: a query sees all positions up to its own."""
        groups = () if self._keeps_state else self._fields
        views = {group: causal_view(self._cache, group, lanes) for group in groups}
        positions = lanes.positions
        if lanes.most > self._last_position + 1:
            positions = positions.clamp(max=self._last_position)
        wants = logits_at, wants_features, is_round
        return Pass(requests, lanes, tokens, positions, views, *wants, follow_up, done)

    def _tree_pass(
        self,
        requests: Sequence[Request],
        lanes: Lanes,
        parts: Sequence[Part],
        wants_features: bool,
        follow_up: Callable[[TargetOutput], Iterator[Outcome]],
        is_causal: bool,
    ) -> Pass:
        """Make the pass of a verify: node i lies in cell start + i, at position start + depth.

        With `is_causal` all trees are chains, so each node sees all tokens before it.
        """
        if len(parts) == 1:
            lanes, tokens = parts[0].lanes, parts[0].tree.tokens.view(-1)
        else:
            widths = [np.full(len(p.positions), p.positions.shape[1], np.int32) for p in parts]
            lanes = Lanes(lanes.rows, lanes.seq_lens, np.concatenate(widths))
            tokens = torch.cat([part.tree.tokens.view(-1) for part in parts])
        if is_causal:
            sees = wants_features and not self._keeps_state
            return self._causal_pass(requests, lanes, tokens, None, sees, follow_up, is_round=True)
        of_parts = [part.positions.clamp(max=self._last_position) for part in parts]
        masks, by_lane = own_cells(parts, of_parts)
        views: dict[int, AttentionView] = {}
        for group in self._fields:
            slots = lanes.slots(self._cache, group)
            views[group] = own_view(self._cache, group, lanes, slots, masks, by_lane, by_lane)
        flat = torch.cat([positions.view(-1) for positions in of_parts])
        wants = None, wants_features, True
        return Pass(requests, lanes, tokens, flat.long(), views, *wants, follow_up)
