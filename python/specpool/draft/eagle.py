"""EAGLE drafting over our pages: expand a tree level by level, keep the draft KV up to date.

Draft KV cell p of a row holds (the target's feature at p, the token at p + 1). In a round, branch b
writes its level-j token to the cell that the layout names, at model position root + j:

    dense  [0, root) prefix | [root + b*S, root + (b+1)*S) branch b
    holey  whole pages per branch: its copy of the prefix's partial tail page, then its drafts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Shape
from specpool.attention import AttentionView, attend
from specpool.attention.lanes import causal_view, own_view, paged_view, range_positions
from specpool.draft.base import DraftTree, Int32, Int64, Lanes
from specpool.kernels import moves
from specpool.kv_cache import KVCache, LayerKV
from specpool.models import EagleHead, TargetModel

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EagleDrafter:
    """Drafts with an EAGLE head.

    What a round hands to the next is indexed by row and lives on the device (spec 8): the top-K
    probabilities and ids of the next token, and the recurrent feature.
    """

    reads_tokens = False

    def __init__(self, head: EagleHead, *, max_context_len: int, ancestry: str = "exact") -> None:
        """Draft with `head`; `ancestry` is `exact` or `branch` (`EngineConfig.ancestry`)."""
        self.head = head
        head.reserve_positions(max_context_len)
        self.layers = tuple(LayerKV(h, d, d) for h, d in head.layer_kv)
        self.feature_layers = tuple(head.feature_layers)
        self._exact = ancestry == "exact"
        self._last_position = max_context_len - 1

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        target: TargetModel,
        *,
        max_context_len: int | None = None,
        ancestry: str = "exact",
        feature_layers: Sequence[int] | None = None,
    ) -> EagleDrafter:
        """Load a head for `target`.

        Args:
            source: a folder or a hub name.
            target: whose embedding and output matrix the head shares.
            max_context_len: tokens of a sequence at most; None = the target's.
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
        limit = max_context_len or target.max_context_len
        return cls(head, max_context_len=limit, ancestry=ancestry)

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shape: Shape
    ) -> None:
        """See `Drafter.attach`."""
        self._cache, self._group, self._layout = cache, group, layout
        self._layer_ids = list(range(first_layer, first_layer + len(self.layers)))
        num_rows = cache.tables[group].shape[0]
        options = {"dtype": cache.dtype, "device": cache.device}
        self._topk = shape.topk
        self._topk_p = torch.zeros(num_rows, shape.topk, dtype=torch.float32, device=cache.device)
        self._topk_ids = torch.zeros(num_rows, shape.topk, dtype=torch.int64, device=cache.device)
        self._hidden = torch.zeros(num_rows, self.head.hidden_size, **options)

    def extend(self, lanes: Lanes, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """See `Drafter.extend`."""
        view = causal_view(self._cache, self._group, lanes.rows, lanes.starts, lanes.q_lens)
        positions = range_positions(lanes.starts, lanes.q_lens)
        hidden = self.head.forward(
            tokens,
            self.head.combine(features),
            self._to_device(np.minimum(positions, self._last_position)),
            self._attend(view),
        )
        rows = self._to_device(lanes.rows.astype(np.int64))
        last = hidden[self._to_device(np.cumsum(lanes.q_lens, dtype=np.int64) - 1)]
        topk_p, topk_ids = self.head.topk(last, self._topk)
        self._topk_p[rows], self._topk_ids[rows], self._hidden[rows] = topk_p, topk_ids, last

    def propose(
        self, lanes: Lanes, shape: Shape, root_tokens: Int64, tokens: Sequence[Sequence[int]] | None
    ) -> DraftTree:
        """See `Drafter.propose`."""
        num_steps, topk = shape.num_steps, shape.topk
        rows = self._to_device(lanes.rows.astype(np.int64))
        topk_p, topk_ids = self._topk_p[rows, :topk], self._topk_ids[rows, :topk]
        hidden = self._hidden[rows]
        candidates = kernels.Candidates.empty(len(lanes.rows), num_steps=num_steps, topk=topk)
        branches = self._branches(lanes, shape)
        scores = None
        for step in range(num_steps):
            ids, parents, scores = candidates.select(
                step, topk_p.cpu().numpy(), topk_ids.cpu().numpy(), scores
            )
            if step == num_steps - 1:
                break
            if topk > 1:
                hidden = hidden[self._to_device(_parent_lanes(parents, step))]
            positions = np.minimum(np.repeat(lanes.starts + step, topk), self._last_position)
            hidden = self.head.forward(
                self._to_device(ids),
                hidden,
                self._to_device(positions.astype(np.int64)),
                self._attend(branches.view(step, parents)),
            )
            topk_p, topk_ids = self.head.topk(hidden, topk)
        parent_list, chosen, drafts = candidates.organize(shape.num_draft_tokens)
        links = kernels.build_tree(parent_list, chosen, topk=topk)
        return DraftTree.of(np.concatenate([root_tokens[:, None], drafts], 1), links)

    def _branches(self, lanes: Lanes, shape: Shape) -> _Branches:
        if shape.topk == 1:
            return _Chain(self._cache, self._group, lanes, shape)
        if self._layout == "holey":
            buffers = self._cache.buffers(self._layer_ids)
            return _HoleyBranches(self._cache, self._group, lanes, shape, buffers, self._exact)
        return _DenseBranches(self._cache, self._group, lanes, shape, self._exact)

    def _attend(self, view: AttentionView) -> Attend:
        def call(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            i = self._layer_ids[layer]
            scaling = q.shape[-1] ** -0.5
            return attend(
                view, self._cache.keys[i], self._cache.values[i], q, k, v, scaling=scaling
            )

        return call

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._cache.device)


def _parent_lanes(parents: Int32, step: int) -> Int64:
    """Which of the last step's lanes each branch continues, int64 [B*K]; at step 0 one per row."""
    num_lanes, topk = parents.shape
    lanes = np.repeat(np.arange(num_lanes, dtype=np.int64), topk)
    return lanes if step == 0 else lanes * topk + parents.ravel()


class _Branches(Protocol):
    """Where a round's branches write and what they read, step by step."""

    def view(self, step: int, parents: Int32) -> AttentionView:
        """Of the forward of step `step`, whose branch b continues branch `parents[:, b]`."""


class _Chain:
    """One branch: each step is a decode of the next position."""

    def __init__(self, cache: KVCache, group: int, lanes: Lanes, shape: Shape) -> None:
        self._cache, self._group, self._lanes = cache, group, lanes

    def view(self, step: int, parents: Int32) -> AttentionView:
        lanes = self._lanes
        ones = np.ones_like(lanes.starts)
        return causal_view(self._cache, self._group, lanes.rows, lanes.starts + step, ones)


class _DenseBranches:
    """Token-granular readers: a mask over the row's draft cells says who sees whom."""

    def __init__(self, cache: KVCache, group: int, lanes: Lanes, shape: Shape, exact: bool) -> None:
        self._cache, self._group, self._lanes = cache, group, lanes
        self._form = {
            "num_steps": shape.num_steps,
            "topk": shape.topk,
            "page_size": cache.page_sizes[group],
            "layout": "dense",
        }
        self._slots = kernels.draft_write_slots(
            cache.tables[group],
            cache.page_sizes[group],
            lanes.rows,
            lanes.starts,
            num_steps=shape.num_steps,
            topk=shape.topk,
            layout="dense",
        )
        # int32 [B, K, S]: whose cell of step j holds the j-th draft on a branch's path
        size = (len(lanes.rows), shape.topk, shape.num_steps)
        self._ancestors = np.zeros(size, np.int32) if exact else None

    def view(self, step: int, parents: Int32) -> AttentionView:
        ancestors = None
        if self._ancestors is not None:
            kernels.advance_ancestors(self._ancestors, parents, step)
            ancestors = self._ancestors
        lanes = self._lanes
        own_mask, own_positions = kernels.draft_visibility(
            lanes.starts, step=step, ancestors=ancestors, **self._form
        )
        slots = self._slots[:, :, step]
        q_positions = np.repeat(lanes.starts[:, None] + step, own_mask.shape[1], 1)
        return own_view(
            self._cache,
            self._group,
            lanes.rows,
            lanes.starts,
            slots,
            own_mask,
            own_positions,
            q_positions.astype(np.int32),
        )


class _HoleyBranches:
    """Whole-page readers: each branch is a sequence of pages of its own behind the shared prefix."""

    def __init__(
        self,
        cache: KVCache,
        group: int,
        lanes: Lanes,
        shape: Shape,
        buffers: list[torch.Tensor],
        exact: bool,
    ) -> None:
        self._cache, self._group, self._lanes = cache, group, lanes
        self._shape, self._buffers, self._exact = shape, buffers, exact
        self._where = (cache.tables[group], cache.page_sizes[group], lanes.rows, lanes.starts)
        form = {"num_steps": shape.num_steps, "topk": shape.topk}
        moves.duplicate_prefix_tail(buffers, *self._where, **form)
        self._slots = kernels.draft_write_slots(*self._where, **form, layout="holey")

    def view(self, step: int, parents: Int32) -> AttentionView:
        num_steps, topk = self._shape.num_steps, self._shape.topk
        if step and self._exact:
            moves.copy_parent_drafts(
                self._buffers, *self._where, parents, num_steps=num_steps, step=step
            )
        pages = kernels.branch_pages(*self._where, num_steps=num_steps, topk=topk, step=step)
        starts = np.repeat(self._lanes.starts + step, topk)
        return paged_view(self._cache, self._group, pages, starts, self._slots[:, :, step])
