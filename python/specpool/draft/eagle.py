"""`EagleDrafter`: EAGLE drafting over pages, which expands a tree level by level.

Draft KV cell p of a row is made of the target's feature at p and the token at p + 1. In a round,
branch b writes its level-j token, at model position root + j, to a cell that the layout gives:

    dense  [0, root) prefix | [root + b*S, root + (b+1)*S) branch b
    holey  whole pages per branch: its copy of the prefix's partial tail page, then its drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import torch
from torch import Tensor

from specpool._core import Shape
from specpool.attention import View, attend
from specpool.attention.lanes import Lanes, causal_view, last_view
from specpool.draft.base import DraftTree
from specpool.draft.branches import Branches, DenseBranches, HoleyBranches, draft_window
from specpool.draft.expansion import Chains, draft_trees
from specpool.draft.side_by_side import Ask, DraftPart, Level, run_side_by_side
from specpool.errors import ConfigError
from specpool.memory.kv_cache import KVCache, LayerKV
from specpool.models import EagleHead, TargetModel


class EagleDrafter:
    """A drafter with an EAGLE head.

    A round hands one recurrent feature per row to the next round, on the device. The next round
    computes the top-K probabilities and ids from it, with the K of its own shape. So no state is
    sized by the widest shape.
    """

    reads_tokens = False

    def __init__(self, head: EagleHead, *, ancestry: str = "exact") -> None:
        """Draft with `head`; `ancestry` is `exact` or `branch` (`EngineConfig.ancestry`)."""
        self.head = head
        self.layers = tuple(LayerKV(h, d, d) for h, d in head.layer_kv)
        self.feature_layers = tuple(head.feature_layers)
        self._exact = ancestry == "exact"
        self._attached = False

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        target: TargetModel,
        *,
        ancestry: str = "exact",
        feature_layers: Sequence[int] | None = None,
    ) -> EagleDrafter:
        """Load a head for `target`.

        Args:
            source: a folder or a hub name.
            target: gives the head its embedding and output matrix.
            ancestry: `exact` or `branch` (`EngineConfig.ancestry`).
            feature_layers: target layers whose inputs are the features; overrides the file.

        Raises:
            CheckpointError: the checkpoint cannot be read, or does not fit the target.
        """
        head = EagleHead.from_pretrained(
            source,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            embedding_weight=target.embedding_weight,
            lm_head_weight=target.lm_head_weight,
            compute_logits=target.compute_logits,
            dtype=target.dtype,
            device=target.device,
            feature_layers=feature_layers,
        )
        return cls(head, ancestry=ancestry)

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; see `Drafter.attach`. A drafter keeps state per row, for one engine only.

        Raises:
            ConfigError: the drafter is attached already, the head knows fewer tokens than topk, or
                EAGLE cannot build a shape.
        """
        if self._attached:
            raise ConfigError(
                "this drafter is attached to another engine: make a new one of the same head"
            )
        for shape in shapes:
            if shape.num_draft_tokens > 1:
                Shape.eagle(shape.num_steps, shape.topk, shape.num_draft_tokens)
        topk = max(shape.topk for shape in shapes)
        if topk > self.head.draft_vocab_size:
            raise ConfigError(
                f"topk {topk} is above the {self.head.draft_vocab_size} tokens that the draft"
                " head knows"
            )
        self._attached = True
        self._cache, self._group, self._layout = cache, group, layout
        self._last_position = cache.max_context_len - 1
        windows = (self.head.config.sliding_window, draft_window(cache, group))
        self._chains = Chains(cache, group, 0)
        self._window = min((w for w in windows if w is not None), default=None)
        self.head.reserve_positions(cache.max_context_len)
        self._layer_ids = list(range(first_layer, first_layer + len(self.layers)))
        self._fields = cache.fields(self._layer_ids)
        num_rows = cache.tables[group].shape[0]
        self._hidden = torch.zeros(
            num_rows, self.head.hidden_size, dtype=cache.dtype, device=cache.device
        )
        self._put_off = torch.zeros_like(self._hidden)  # the head's input of each row; see `write`

    def extend(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Write draft KV; see `Drafter.extend`.

        All tokens get KV. Only the last token of each lane goes through the whole head, because
        the next round needs its result alone.
        """
        views: list[View] = [last_view(self._cache, self._group, lanes)]
        if len(self.layers) > 1:
            causal = causal_view(self._cache, self._group, lanes)
            views = [*[causal] * (len(self.layers) - 1), *views]
        inputs = self.head.combine(features)
        hidden = self._forward(tokens, inputs, lanes.positions, views, keep=lanes.lasts)
        self._hidden.index_copy_(0, lanes.index, hidden)

    def write(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Write draft KV; see `Patient.write`.

        The last layer's keys and values do not depend on its attention, so that is skipped.
        """
        slots = lanes.slots(self._cache, self._group)
        views: list[View] = []
        if len(self.layers) > 1:
            views = [causal_view(self._cache, self._group, lanes)] * (len(self.layers) - 1)
        inputs = self.head.combine(features)
        nobody = lanes.index[:0]
        self._forward(tokens, inputs, lanes.positions, views, keep=nobody, slots=slots)
        last = inputs if lanes.widths == 1 else inputs.index_select(0, lanes.lasts)
        self._put_off.index_copy_(0, lanes.index, last)

    def catch_up(self, lanes: Lanes, root_tokens: Tensor) -> None:
        """Run each row's last token again through the whole head; see `Patient.catch_up`.

        The pages still hold every cell that the token sees: the draft group keeps one cell more
        than a window.
        """
        lasts = lanes.ahead(-1)
        inputs = self._put_off.index_select(0, lanes.index)
        views = self._each_layer(causal_view(self._cache, self._group, lasts))
        hidden = self._forward(root_tokens, inputs, lasts.positions, views)
        self._hidden.index_copy_(0, lanes.index, hidden)

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        root_tokens: Tensor,
        tokens: Sequence[Sequence[int]] | None,
    ) -> DraftTree:
        """Propose a tree for each lane; see `Drafter.propose`."""
        return self.propose_parts([DraftPart(lanes, shape, root_tokens)])[0]

    def propose_parts(self, parts: Sequence[DraftPart]) -> list[DraftTree]:
        """Propose the trees of each part; see `SideBySide.propose_parts`."""
        topk = max(part.shape.topk for part in parts)
        rows = [part.lanes.rows for part in parts]
        hidden = self._hidden.index_select(0, rows[0] if len(rows) == 1 else torch.cat(rows))

        def level_of(hidden: Tensor) -> Level:
            if topk > 1:
                return Level(*self.head.topk(hidden, topk), hidden)
            return Level(None, self.head.best(hidden).unsqueeze(1), hidden)

        def run(ask: Ask) -> Level:
            assert ask.hidden is not None
            views = self._each_layer(ask.view)
            return level_of(self._forward(ask.tokens, ask.hidden, ask.positions, views))

        roots, drafting, first = level_of(hidden), [], 0
        for part, of_part in zip(parts, rows, strict=True):
            level = roots.part(first, len(of_part)) if len(parts) > 1 else roots
            first += len(of_part)
            if part.shape.topk == 1:
                drafting.append(self._chains.draft(part, level))
            else:
                branches = self._branches(part.lanes, part.shape)
                drafting.append(draft_trees(part, level, branches, 0))
        return run_side_by_side(drafting, run)

    def _branches(self, lanes: Lanes, shape: Shape) -> Branches:
        if self._layout == "holey":
            fields = self._fields
            return HoleyBranches(self._cache, self._group, lanes, shape, fields, self._exact)
        return DenseBranches(self._cache, self._group, lanes, shape, self._exact)

    def _each_layer(self, view: View) -> list[View]:
        return [view] * len(self.layers)

    def _forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        views: Sequence[View],
        keep: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Run the head, layer i over `views[i]`; clamp positions to the end of the context.

        A layer without a view writes its keys and values to `slots`, int64 [T], and attends to
        nothing.
        """
        clamped = positions.clamp(max=self._last_position).long()

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            i = self._layer_ids[layer]
            keys, values = self._cache.keys[i], self._cache.values[i]
            if layer >= len(views):
                assert slots is not None
                keys.index_copy_(0, slots, k.to(keys.dtype))
                values.index_copy_(0, slots, v.to(values.dtype))
                return q
            return attend(
                views[layer],
                keys,
                values,
                q,
                k,
                v,
                scaling=q.shape[-1] ** -0.5,
                window=self._window,
            )

        return self.head.forward(tokens, hidden, clamped, attention, keep)
