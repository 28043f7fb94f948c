"""`Branches`: where the branches of a draft tree write their KV, and what they read."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.engine.attention import AttentionView, TokenReads
from specpool.engine.attention.lanes import Lanes, own_view, paged_view
from specpool.engine.memory.kv_cache import KVCache


def draft_window(cache: KVCache, group: int) -> int | None:
    """Return how many keys a query of the draft's layers sees; None means all.

    The group keeps one cell more (`size_groups`).
    """
    window = cache.windows[group]
    return None if window is None else window - 1


class Branches(Protocol):
    """The views of a round's branches, step by step."""

    def view(self, step: int, parents: Tensor) -> AttentionView:
        """Return the view of draft step `step`.

        `parents` is int64 [B, K]: branch b of this step continues branch `parents[:, b]` of the
        step before.
        """


def new_candidates(
    num_lanes: int, shape: Shape, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for what `kernels.select_topk` keeps of a round, for `kernels.build_tree`.

    Returns:
        Scores float32 [B, M] and ids int64 [B, M] of the candidates, and the parents of each step's
        branches, int64 [B, 1 + K * S]; M = K + (S - 1) * K * K.
    """
    topk, num_steps = shape.topk, shape.num_steps
    total = topk + (num_steps - 1) * topk * topk
    return (
        torch.empty(num_lanes, total, dtype=torch.float32, device=device),
        torch.empty(num_lanes, total, dtype=torch.int64, device=device),
        torch.empty(num_lanes, 1 + topk * num_steps, dtype=torch.int64, device=device),
    )


class DenseBranches:
    """Branches of the dense layout: a mask over the row's draft cells hides other branches."""

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
        # int32 [B, K, S]: the branch whose cell of step j holds the j-th draft of a path
        size = (len(lanes.seq_lens), shape.topk, shape.num_steps)
        self._ancestors = (
            torch.zeros(size, dtype=torch.int32, device=cache.device) if exact else None
        )

    def view(self, step: int, parents: Tensor) -> AttentionView:
        """See `Branches.view`."""
        if self._ancestors is not None:
            kernels.advance_ancestors(self._ancestors, parents, step)
        lanes, topk = self._lanes, self._shape.topk
        own_mask, own_positions = kernels.draft_visibility(
            lanes.starts,
            num_steps=self._shape.num_steps,
            topk=topk,
            step=step,
            page_size=self._cache.page_sizes[self._group],
            layout="dense",
            ancestors=self._ancestors,
        )
        return own_view(
            self._cache,
            self._group,
            lanes,
            self._slots[:, :, step],
            own_mask,
            own_positions,
            (lanes.starts + step).unsqueeze(1).expand(-1, topk).contiguous(),
            partial(self._read_tokens, step) if self._has_all(lanes) else None,
        )

    def _has_all(self, lanes: Lanes) -> bool:
        """Return whether the host knows all lengths and the group keeps all cells."""
        return lanes.seq_lens.is_exact and self._cache.windows[self._group] is None

    def _read_tokens(self, step: int) -> TokenReads:
        """Return the slots that each branch reads at `step`; call it before the next `view`."""
        lanes, topk = self._lanes, self._shape.topk
        _, indices = kernels.draft_read_indices(
            self._cache.tables[self._group],
            self._cache.page_sizes[self._group],
            lanes.rows,
            lanes.starts,
            num_steps=self._shape.num_steps,
            topk=topk,
            step=step,
            layout="dense",
            ancestors=self._ancestors,
            hi=lanes.seq_lens.hi,
        )
        lens = np.repeat(lanes.seq_lens.hi + (step + 1), topk)
        return TokenReads(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32), indices)


class HoleyBranches:
    """Branches of the holey layout: each has its own pages behind the shared prefix."""

    def __init__(
        self,
        cache: KVCache,
        group: int,
        lanes: Lanes,
        shape: Shape,
        fields: kernels.Fields,
        exact: bool,
    ) -> None:
        self._cache, self._group, self._lanes = cache, group, lanes
        self._shape, self._fields, self._exact = shape, fields, exact
        self._row_table = (cache.tables[group], cache.page_sizes[group], lanes.rows, lanes.starts)
        num_steps, topk = shape.num_steps, shape.topk
        kernels.duplicate_prefix_tail(fields, *self._row_table, num_steps=num_steps, topk=topk)
        self._slots = kernels.draft_write_slots(
            *self._row_table, num_steps=num_steps, topk=topk, layout="holey"
        )

    def view(self, step: int, parents: Tensor) -> AttentionView:
        """See `Branches.view`."""
        num_steps, topk, lanes = self._shape.num_steps, self._shape.topk, self._lanes
        if step and self._exact:
            kernels.copy_parent_drafts(
                self._fields, *self._row_table, parents, num_steps=num_steps, step=step
            )
        pages = kernels.branch_pages(
            *self._row_table, num_steps=num_steps, topk=topk, step=step, hi=lanes.seq_lens.hi
        )
        # B lanes of rows for B * K branches: the rows are not read, because the pages are given.
        branches = Lanes(lanes.rows, lanes.seq_lens.ahead(step).repeat(topk), 1)
        return paged_view(self._cache, self._group, pages, branches, self._slots[:, :, step])
