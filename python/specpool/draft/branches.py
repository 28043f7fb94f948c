"""Where the branches of a draft tree write their KV and what they read (spec 5, 6)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specpool import kernels
from specpool._core import Shape
from specpool.attention import AttentionView
from specpool.attention.lanes import own_view, paged_view
from specpool.draft.base import Int32, Lanes
from specpool.kernels import moves
from specpool.kv_cache import KVCache


class Branches(Protocol):
    """Where a round's branches write and what they read, step by step."""

    def view(self, step: int, parents: Int32) -> AttentionView:
        """Of the forward of step `step`, whose branch b continues branch `parents[:, b]`."""


class DenseBranches:
    """Token-granular readers: a mask over the row's draft cells says who sees whom."""

    def __init__(self, cache: KVCache, group: int, lanes: Lanes, shape: Shape, exact: bool) -> None:
        self._cache, self._group, self._lanes = cache, group, lanes
        self._shape = shape
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
        """See `Branches.view`."""
        ancestors = None
        if self._ancestors is not None:
            kernels.advance_ancestors(self._ancestors, parents, step)
            ancestors = self._ancestors
        lanes = self._lanes
        own_mask, own_positions = kernels.draft_visibility(
            lanes.starts,
            num_steps=self._shape.num_steps,
            topk=self._shape.topk,
            step=step,
            page_size=self._cache.page_sizes[self._group],
            layout="dense",
            ancestors=ancestors,
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


class HoleyBranches:
    """Whole-page readers: each branch has pages of its own behind the shared prefix."""

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
        num_steps, topk = shape.num_steps, shape.topk
        moves.duplicate_prefix_tail(buffers, *self._where, num_steps=num_steps, topk=topk)
        self._slots = kernels.draft_write_slots(
            *self._where, num_steps=num_steps, topk=topk, layout="holey"
        )

    def view(self, step: int, parents: Int32) -> AttentionView:
        """See `Branches.view`."""
        num_steps, topk = self._shape.num_steps, self._shape.topk
        if step and self._exact:
            moves.copy_parent_drafts(
                self._buffers, *self._where, parents, num_steps=num_steps, step=step
            )
        pages = kernels.branch_pages(*self._where, num_steps=num_steps, topk=topk, step=step)
        starts = np.repeat(self._lanes.starts + step, topk)
        return paged_view(self._cache, self._group, pages, starts, self._slots[:, :, step])
