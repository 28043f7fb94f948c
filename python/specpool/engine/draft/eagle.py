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
from specpool.engine.attention import View, attend
from specpool.engine.attention.lanes import Lanes, causal_view, last_view
from specpool.engine.attention.writes import write_kv
from specpool.engine.draft.head_drafter import HeadDrafter
from specpool.engine.memory.kv_cache import KVCache, LayerKV
from specpool.engine.models import EagleHead, TargetModel


class EagleDrafter(HeadDrafter):
    """A drafter with an EAGLE head."""

    head: EagleHead

    def __init__(self, head: EagleHead, *, ancestry: str = "exact") -> None:
        """Draft with `head`; `ancestry` is as in `from_pretrained`."""
        self.head = head
        self.layers = tuple(LayerKV(h, d, d) for h, d in head.layer_kv)
        self.feature_layers = tuple(head.feature_layers)
        self._exact = ancestry == "exact"

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
            ancestry: `exact` = a draft token attends to its true ancestors; `branch` = to its
                branch's own slots, whatever they hold (SGLang's reading, for comparison).
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
        """Take the cache; see `HeadDrafter.attach`."""
        super().attach(cache, first_layer, group, layout, shapes)
        windows = (self.head.config.sliding_window, self._window)
        self._window = min((w for w in windows if w is not None), default=None)
        self.head.reserve_positions(cache.max_context_len)
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
        hidden = self._forward(tokens, inputs, lanes.positions, views, keep=lanes.last_indices)
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
        no_lanes = lanes.index[:0]
        self._forward(tokens, inputs, lanes.positions, views, keep=no_lanes, slots=slots)
        last = inputs if lanes.widths == 1 else inputs.index_select(0, lanes.last_indices)
        self._put_off.index_copy_(0, lanes.index, last)

    def catch_up(self, lanes: Lanes, root_tokens: Tensor) -> None:
        """Run each row's last token again through the whole head; see `Patient.catch_up`.

        The pages still hold every cell that the token sees: the draft group keeps one cell more
        than a window.
        """
        last_tokens = lanes.ahead(-1)
        inputs = self._put_off.index_select(0, lanes.index)
        view = causal_view(self._cache, self._group, last_tokens)
        hidden = self._draft(root_tokens, inputs, last_tokens.positions, view)
        self._hidden.index_copy_(0, lanes.index, hidden)

    def _draft(self, tokens: Tensor, hidden: Tensor, positions: Tensor, view: View) -> Tensor:
        return self._forward(tokens, hidden, positions, [view] * len(self.layers))

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
                write_kv(keys, values, slots, k, v)
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
