"""Attention masks, made with torch's own operations.

Twins: `specpool.kernels.twins`; the stub `_core.pyi` documents the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

import specpool._core as _core
from specpool.errors import ShapeError
from specpool.kernels.checks import number
from specpool.kernels.with_twin import with_twin


@with_twin(_core.attention_bias)
def attention_bias(
    starts: Tensor,
    q_lens: Tensor,
    num_columns: int,
    *,
    own_mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    own_positions: Tensor | None = None,
    num_queries: int,
    window: int | None = None,
    sink: int = 0,
) -> Tensor:
    """Make a bias, float32 [B, num_queries, num_columns]: 0 if a query sees a column, else -inf.

    Queries past a lane's q_len see column 0: their result is dropped, but must be finite.
    """
    device = starts.device
    number("num_columns", num_columns, 1)
    number("num_queries", num_queries, 1)
    if window is not None:
        number("window", window, 1)
    number("sink", sink, 0)
    columns = torch.arange(num_columns, device=device)
    first = starts.view(-1, 1, 1)
    queries = torch.arange(num_queries, device=device)
    if own_mask is None:
        positions = first + queries.view(1, -1, 1)
        visible = columns <= positions
        if window is not None:
            visible &= (columns > positions - window) | (columns < sink)
    else:
        if q_positions is None or own_positions is None:
            raise ShapeError("own_mask needs q_positions and own_positions")
        visible = (columns < first).expand(-1, num_queries, -1)
        positions, own_visible = q_positions.unsqueeze(2), own_mask
        if window is not None:
            visible = visible & ((columns > positions - window) | (columns < sink))
            at = own_positions.unsqueeze(1)
            own_visible = own_visible & ((at > positions - window) | (at < sink))
        cells = first + torch.arange(own_mask.shape[2], device=device)
        visible = visible.scatter(2, cells.expand_as(own_visible).long(), own_visible)
    visible[:, :, 0] |= queries >= q_lens.unsqueeze(1)
    zero = torch.zeros((), device=device)
    return torch.where(visible, zero, -torch.inf)


@with_twin(_core.draft_visibility)
def draft_visibility(
    roots: Tensor,
    *,
    num_steps: int,
    topk: int,
    step: int,
    page_size: int,
    layout: str,
    ancestors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Make own_mask, bool [B, K, W], and own_positions, int32 [B, W], of a dense draft step.

    W = (K-1)*S + step + 1 reaches the last cell that is written.
    """
    if layout != "dense":
        raise ShapeError(f"layout must be 'dense' on a device, got {layout!r}")
    number("topk", topk, 1)
    number("step", step, 0, number("num_steps", num_steps, 1) - 1)
    device = roots.device
    cells = torch.arange((topk - 1) * num_steps + step + 1, device=device)
    branches, depths = cells // num_steps, cells % num_steps
    if ancestors is None:
        owners = torch.arange(topk, device=device).view(1, topk, 1).expand(len(roots), -1, -1)
    else:
        owners = ancestors.index_select(2, depths)
    own_mask = (owners == branches) & (depths <= step)
    return own_mask, roots.unsqueeze(1) + depths.int()
