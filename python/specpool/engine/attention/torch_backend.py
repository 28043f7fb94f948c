"""The torch back end, for CPU and GPU: write new K and V, gather whole pages, attend.

It accepts any mask, so dense draft layouts and exact ancestry work at any page size. On a CPU,
`in_place` serves few queries and `prompts` serves long chunks without gathering whole lanes. On a
GPU, `few_queries` reads pages in place; `fused` serves causal lanes and `trees` serves trees with
more queries or other heads, both without a mask over the prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specpool.engine.attention import in_place
from specpool.engine.attention.few_queries import attend_few_queries, serves_few_queries
from specpool.engine.attention.fused import attend_fused, serves_fused
from specpool.engine.attention.prompts import attend_prompts, serves_prompts
from specpool.engine.attention.trees import attend_trees, serves_trees
from specpool.engine.attention.view import AttentionView, Reads
from specpool.engine.attention.writes import write_kv

# Up to this many queries per lane, query heads are folded into the query axis, so that each K and V
# head is read once. With more queries the folded mask costs more than this saves.
_FOLD_MAX_QUERIES = 32
# Where no fused kernel of torch takes both a mask and groups of query heads: asked for both, torch
# would compute every score in memory.
_NO_GROUPS = "cuda"


def attend(
    view: AttentionView,
    k_buffer: Tensor,
    v_buffer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with torch; see `specpool.engine.attention.attend`."""
    if in_place.serves_in_place(view, q, k_buffer, v_buffer):
        return in_place.attend_in_place(
            view,
            k_buffer,
            v_buffer,
            q,
            k,
            v,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    dtype = q.dtype
    explicit = softcap is not None or sinks is not None
    if not explicit and serves_few_queries(view, q, k_buffer, v_buffer, window):
        write_kv(k_buffer, v_buffer, view.write_slots, k, v)
        return attend_few_queries(view, k_buffer, v_buffer, q, scaling, window)
    by_lane = not explicit and serves_prompts(view, q, v_buffer, window)
    fused = not explicit and serves_fused(view, q, v_buffer)
    tree = not explicit and not fused and serves_trees(view, q, v_buffer, window)
    # `reads` raises for a bad mask, so call it before anything is written.
    reads = None if by_lane or fused or tree else view.reads(window, dtype)
    k, v = write_kv(k_buffer, v_buffer, view.write_slots, k, v)
    if fused:
        return attend_fused(view, k_buffer, v_buffer, q, scaling, window)
    if tree:
        return attend_trees(view, k_buffer, v_buffer, q, scaling)
    if reads is None:
        return attend_prompts(view, k_buffer, v_buffer, q, k.to(dtype), v.to(dtype), scaling)
    keys, values = reads.gather(k_buffer, v_buffer, view.num_lanes, view.page_size)
    if keys.dtype != dtype:
        keys, values = keys.to(dtype), values.to(dtype)
    return _attend_gathered(view, reads, q, keys, values, scaling, softcap, sinks)


def _attend_gathered(
    view: AttentionView,
    reads: Reads,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over what was gathered, keys and values [B, Hkv, L, D]; queries and output ragged."""
    lanes, queries = view.num_lanes, view.max_q_len
    explicit = softcap is not None or sinks is not None
    heads, kv_heads = q.shape[1], keys.shape[1]
    groups = heads // kv_heads
    fold = explicit or queries <= _FOLD_MAX_QUERIES
    if view.pad_index is not None:
        q = q.index_select(0, view.pad_index)
    if queries > 1:
        q = q.view(lanes, queries, heads, -1).transpose(1, 2)  # [B, H, Q, Dk]
    if fold:
        # The folded axis is [group, query]: all queries of the first query head come first.
        q = q.reshape(lanes, kv_heads, groups * queries, -1)
    if explicit:
        out = _explicit_softmax(q, keys, values, reads, scaling, softcap, sinks)
    elif fold:
        mask = reads.folded_mask(groups)
        out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
    elif q.device.type == _NO_GROUPS and groups > 1:
        # [B, Hkv, Q, D] for each head of a group; the heads of one KV head are neighbours.
        heads_of = [
            scaled_dot_product_attention(
                q[:, head::groups], keys, values, attn_mask=reads.mask, scale=scaling
            )
            for head in range(groups)
        ]
        out = torch.stack(heads_of, 2)
    else:
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=reads.mask, scale=scaling, enable_gqa=groups > 1
        )
    if queries == 1:
        return out.reshape(lanes, heads, -1)
    out = out.reshape(lanes, heads, queries, -1).transpose(1, 2)  # [B, Q, H, Dv]
    out = out.reshape(lanes * queries, heads, -1)
    return out if view.unpad_index is None else out.index_select(0, view.unpad_index)


def _explicit_softmax(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    reads: Reads,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with a soft cap or sinks, which SDPA lacks; q is folded, [B, Hkv, G * Q, Dk]."""
    lanes, kv_heads, rows, _ = q.shape
    scores = torch.matmul(q, keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if reads.mask is not None:
        # [B, Hkv, G, Q, L] + [B, 1, 1, Q, L]: the mask needs no copy per head here.
        queries = reads.mask.shape[2]
        by_head = scores.view(lanes, kv_heads, rows // queries, queries, -1)
        scores = (by_head + reads.mask.unsqueeze(2)).view(lanes, kv_heads, rows, -1)
    if sinks is None:
        weights = torch.softmax(scores, -1, dtype=torch.float32)
    else:
        groups = sinks.numel() // kv_heads
        sink = sinks.view(1, kv_heads, groups, 1, 1).expand(lanes, -1, -1, rows // groups, 1)
        scores = torch.cat([scores, sink.reshape(lanes, kv_heads, rows, 1).to(scores.dtype)], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(q.dtype), values)
