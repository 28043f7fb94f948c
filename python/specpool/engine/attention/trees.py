"""Attention of trees on a GPU: the prefix by torch's flash kernel, the tree by products, joined.

All nodes of a tree see the whole prefix of their row. So that part needs no mask, and the kernel
takes the lanes' lengths as an array on the device: it reads nothing past a prefix, also within a
CUDA graph. Behind the prefix each node sees some of the tree's own cells. These are few, and their
scores are computed in float32. The logarithms of the softmax sums join both, as in `prompts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.engine.attention import fused
from specpool.engine.attention.view import AttentionView

_HIDDEN = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Tree:
    """What all layers of a view share."""

    prefix: fused.FusedLanes
    slots: Tensor  # int64 [B * W], the own cells
    bias: Tensor  # float32 [B, 1, 1, Q, W], 0 or hidden
    lane_and_query: tuple[Tensor, Tensor] | None  # int64 [T] each; None if no lane is padded


def serves_trees(view: AttentionView, q: Tensor, v_buffer: Tensor, window: int | None) -> bool:
    """Return whether `attend_trees` can attend for a layer without soft cap and sinks.

    Args:
        view: the view of the forward.
        q: [T, H, Dk] queries.
        v_buffer: [num_slots, Hkv, Dv], the layer's value buffer.
        window: the layer's window; None means full attention.
    """
    if view.own_cells is None or q.device.type != fused.DEVICE or not fused.takes_flash(q):
        return False
    if window is not None and window < view.read_pages.shape[1] * view.page_size:
        return False  # a window goes by position, and the nodes of a lane have several
    # The kernel reads 16 bytes at a time.
    return q.shape[2] == v_buffer.shape[2] and q.shape[2] * q.itemsize % 16 == 0


def attend_trees(
    view: AttentionView, k_buffer: Tensor, v_buffer: Tensor, q: Tensor, scaling: float
) -> Tensor:
    """Attend over prefix and tree. Call it only if `serves_trees`, with all KV in its slots.

    Args:
        view: the view of the forward.
        k_buffer: [num_slots, Hkv, D].
        v_buffer: [num_slots, Hkv, D].
        q: [T, H, D].
        scaling: factor of the scores.

    Returns:
        [T, H, D].
    """
    tree = _tree(view)
    keys, values = fused.gather(view, tree.prefix, k_buffer, v_buffer, q.dtype)
    old_result, old_lse = fused.flash(tree.prefix, q, keys, values, scaling, is_causal=False)
    own_result, own_lse = _attend_own(view, tree, k_buffer, v_buffer, q, scaling)
    # A lane without a prefix has an infinite logarithm, of either sign, and no share.
    old_lse = old_lse.T.masked_fill(old_lse.T == torch.inf, -torch.inf).view(own_lse.shape)
    share = torch.sigmoid(own_lse - old_lse).unsqueeze(-1)
    # The first operand gives the order in memory, so the result needs no copy.
    result = torch.lerp(old_result.float().view(own_result.shape), own_result, share)
    return result.to(q.dtype).view(old_result.shape)


def _attend_own(
    view: AttentionView,
    tree: _Tree,
    k_buffer: Tensor,
    v_buffer: Tensor,
    q: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attend over the tree's own cells in float32.

    The query heads of one KV head lie beside each other, so each of its cells is read once for all.

    Returns:
        The result [..., Hkv, G, D] and the logarithms [..., Hkv, G], where ... is B, Q, or T if
        the lanes are ragged.
    """
    heads, kv_heads, dim = q.shape[1], *k_buffer.shape[1:]
    lanes, queries, width = view.num_lanes, view.max_q_len, tree.bias.shape[4]
    groups, batch = heads // kv_heads, lanes * kv_heads
    if view.pad_index is not None:
        q = q.index_select(0, view.pad_index)
    # [B, Hkv, G, Q, D], and the cells [B, Hkv, W, D]: one copy each, from 16 bits to float32.
    q = _in_order(q.view(lanes, queries, kv_heads, groups, dim).permute(0, 2, 3, 1, 4))
    keys, values = (
        _in_order(
            buffer.index_select(0, tree.slots).view(lanes, width, kv_heads, dim).transpose(1, 2)
        ).view(batch, width, dim)
        for buffer in (k_buffer, v_buffer)
    )
    scores = torch.bmm(q.mul_(scaling).view(batch, groups * queries, dim), keys.transpose(1, 2))
    scores = scores.view(lanes, kv_heads, groups, queries, width).add_(tree.bias)
    lse = scores.logsumexp(4)
    out = torch.bmm(scores.softmax(4).view(batch, groups * queries, width), values)
    out, lse = out.view(lanes, kv_heads, groups, queries, dim), lse.permute(0, 3, 1, 2)
    out = out.permute(0, 3, 1, 2, 4)
    if tree.lane_and_query is None:
        return out, lse
    return out[tree.lane_and_query], lse[tree.lane_and_query]


def _in_order(values: Tensor) -> Tensor:
    """Return the values as float32, in memory in the order of their axes."""
    return values.to(torch.float32, memory_format=torch.contiguous_format)


def _tree(view: AttentionView) -> _Tree:
    """Return what the layers share; computed once per view, without a wait for the device."""
    tree = view.plans.get(_Tree)
    if tree is None:
        own_cells, unpad = view.own_cells, view.unpad_index
        assert own_cells is not None
        tree = view.plans[_Tree] = _Tree(
            fused.live_lanes(view, own_cells.starts()),
            own_cells.slots(view).reshape(-1),
            torch.zeros(own_cells.mask.shape, device=own_cells.mask.device)
            .masked_fill_(~own_cells.mask, _HIDDEN)
            .view(view.num_lanes, 1, 1, *own_cells.mask.shape[1:]),
            None if unpad is None else (unpad // view.max_q_len, unpad % view.max_q_len),
        )
    return tree  # type: ignore[return-value]
