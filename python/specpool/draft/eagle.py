"""EAGLE drafting over our pages: expand a tree level by level, keep the draft KV up to date.

Draft KV cell p of a row holds (the target's feature at p, the token at p + 1). In a round, branch b
writes its level-j token to the cell that the layout names, at model position root + j:

    dense  [0, root) prefix | [root + b*S, root + (b+1)*S) branch b
    holey  whole pages per branch: its copy of the prefix's partial tail page, then its drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Shape
from specpool.attention import AttentionView, attend
from specpool.attention.lanes import causal_view, last_view, range_positions
from specpool.draft.base import DraftTree, Int32, Int64, Lanes, Links
from specpool.draft.branches import Branches, DenseBranches, HoleyBranches
from specpool.errors import ConfigError
from specpool.kv_cache import KVCache, LayerKV
from specpool.models import EagleHead, TargetModel


class EagleDrafter:
    """Drafts with an EAGLE head.

    What a round hands to the next is indexed by row and lives on the device (spec 8): the top-K
    probabilities and ids of the next token, and the recurrent feature.
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
            target: whose embedding and output matrix the head shares.
            ancestry: `exact` or `branch` (`EngineConfig.ancestry`).
            feature_layers: target layers whose inputs are the features, whatever the file says.

        Raises:
            CheckpointError: a checkpoint that cannot be read or does not fit the target.
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
        self, cache: KVCache, first_layer: int, group: int, layout: str, shape: Shape
    ) -> None:
        """See `Drafter.attach`. What it keeps per row is one engine's, so it serves only one.

        Raises:
            ConfigError: it is attached already, or the head knows fewer tokens than topk.
        """
        if self._attached:
            raise ConfigError(
                "this drafter is attached to another engine: make a new one of the same head"
            )
        if shape.topk > self.head.draft_vocab_size:
            raise ConfigError(
                f"topk {shape.topk} is above the {self.head.draft_vocab_size} tokens that the draft"
                " head knows"
            )
        self._attached = True
        self._cache, self._group, self._layout = cache, group, layout
        self._last_position = cache.max_context_len - 1
        self.head.reserve_positions(cache.max_context_len)
        self._layer_ids = list(range(first_layer, first_layer + len(self.layers)))
        num_rows = cache.tables[group].shape[0]
        self._topk = shape.topk
        self._topk_p = torch.zeros(num_rows, shape.topk, dtype=torch.float32, device=cache.device)
        self._topk_ids = torch.zeros(num_rows, shape.topk, dtype=torch.int64, device=cache.device)
        self._hidden = torch.zeros(
            num_rows, self.head.hidden_size, dtype=cache.dtype, device=cache.device
        )

    def extend(self, lanes: Lanes, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """See `Drafter.extend`.

        All tokens get their KV, but only each lane's last one is followed to the end: its result
        is all that the next round wants.
        """
        rows = self._to_device(lanes.rows.astype(np.int64))
        last = self._to_device(np.cumsum(lanes.q_lens, dtype=np.int64) - 1)
        positions = range_positions(lanes.starts, lanes.q_lens)
        views = [causal_view(self._cache, self._group, lanes.rows, lanes.starts, lanes.q_lens)]
        views *= len(self.layers) - 1
        views.append(last_view(self._cache, self._group, lanes.rows, lanes.starts, lanes.q_lens))
        hidden = self._forward(tokens, self.head.combine(features), positions, views, keep=last)
        self._hidden.index_copy_(0, rows, hidden)
        if self._topk == 1:
            self._topk_ids.index_copy_(0, rows, self.head.best(hidden)[:, None])
        else:
            topk_p, topk_ids = self.head.topk(hidden, self._topk)
            self._topk_p.index_copy_(0, rows, topk_p)
            self._topk_ids.index_copy_(0, rows, topk_ids)

    def propose(
        self, lanes: Lanes, shape: Shape, root_tokens: Int64, tokens: Sequence[Sequence[int]] | None
    ) -> DraftTree:
        """See `Drafter.propose`."""
        rows = self._to_device(lanes.rows.astype(np.int64))
        topk_ids = self._topk_ids.index_select(0, rows)
        hidden = self._hidden.index_select(0, rows)
        if shape.topk == 1:
            drafts = self._chain(lanes, shape.num_steps, topk_ids[:, 0], hidden)
            return DraftTree.chain(np.concatenate([root_tokens[:, None], drafts], 1))
        topk_p = self._topk_p.index_select(0, rows)
        state = (topk_p[:, : shape.topk], topk_ids[:, : shape.topk], hidden)
        drafts, links = self._tree(lanes, shape, *state)
        return DraftTree.of(np.concatenate([root_tokens[:, None], drafts], 1), links)

    def _chain(
        self, lanes: Lanes, num_steps: int, token: torch.Tensor, hidden: torch.Tensor
    ) -> Int64:
        """One branch: each step decodes the next position, there is nothing to select."""
        drafts = [token]
        for step in range(num_steps - 1):
            starts = lanes.starts + np.int32(step)
            view = causal_view(self._cache, self._group, lanes.rows, starts)
            hidden = self._forward(token, hidden, starts.astype(np.int64), self._each_layer(view))
            token = self.head.best(hidden)
            drafts.append(token)
        return torch.stack(drafts, 1).cpu().numpy()

    def _tree(
        self,
        lanes: Lanes,
        shape: Shape,
        topk_p: torch.Tensor,
        topk_ids: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[Int64, Links]:
        """Select level by level, then organize and build (spec 5.1 to 5.3)."""
        num_steps, topk = shape.num_steps, shape.topk
        candidates = kernels.Candidates.empty(len(lanes.rows), num_steps=num_steps, topk=topk)
        branches = self._branches(lanes, shape)
        scores = None
        for step in range(num_steps):
            ids, parents, scores = candidates.select(
                step,
                topk_p.contiguous().cpu().numpy(),
                topk_ids.contiguous().cpu().numpy(),
                scores,
            )
            if step == num_steps - 1:
                break
            hidden = hidden.index_select(0, self._to_device(_parent_lanes(parents, step)))
            positions = np.repeat(lanes.starts.astype(np.int64) + step, topk)
            views = self._each_layer(branches.view(step, parents))
            hidden = self._forward(self._to_device(ids), hidden, positions, views)
            topk_p, topk_ids = self.head.topk(hidden, topk)
        parent_list, chosen, drafts = candidates.organize(shape.num_draft_tokens)
        return drafts, kernels.build_tree(parent_list, chosen, topk=topk)

    def _branches(self, lanes: Lanes, shape: Shape) -> Branches:
        if self._layout == "holey":
            buffers = self._cache.buffers(self._layer_ids)
            return HoleyBranches(self._cache, self._group, lanes, shape, buffers, self._exact)
        return DenseBranches(self._cache, self._group, lanes, shape, self._exact)

    def _each_layer(self, view: AttentionView) -> list[AttentionView]:
        return [view] * len(self.layers)

    def _forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: Int64,
        views: Sequence[AttentionView],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The head, each layer over its view; positions past the context are clamped to its end."""
        clamped = self._to_device(np.minimum(positions, self._last_position))

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            i = self._layer_ids[layer]
            return attend(
                views[layer],
                self._cache.keys[i],
                self._cache.values[i],
                q,
                k,
                v,
                scaling=q.shape[-1] ** -0.5,
                window=self.head.config.sliding_window,
            )

        return self.head.forward(tokens, hidden, clamped, attention, keep)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._cache.device)


def _parent_lanes(parents: Int32, step: int) -> Int64:
    """Which of the last step's lanes each branch continues, int64 [B*K]; at step 0 one per row."""
    num_lanes, topk = parents.shape
    lanes = np.repeat(np.arange(num_lanes, dtype=np.int64), topk)
    return lanes if step == 0 else lanes * topk + parents.ravel()
