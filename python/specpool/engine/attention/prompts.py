"""Causal attention over prompts on a CPU: lane by lane, at exact lengths and without a mask.

The attention of a chunk has two parts. The chunk's own keys and values are arguments, so they are
not read back from pages. The cells before the chunk are visible to all its queries, so this part
needs no mask. The two results are joined by the logarithms of their softmax sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specpool.engine.attention.view import AttentionView, Reads

# Up to this many queries per lane, reading all lanes together is faster.
_FEW_QUERIES = 32
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Lane:
    tokens: slice  # of the forward
    prefix: Reads | None  # the cells before the chunk; None if there are none


def serves_prompts(view: AttentionView, q: Tensor, values: Tensor, window: int | None) -> bool:
    """Return whether `attend_prompts` can attend for a layer without soft cap and sinks.

    Args:
        view: the view of the forward.
        q: [T, H, Dk] queries.
        values: [num_slots, Hkv, Dv], the layer's value buffer.
        window: the layer's window; None means full attention.
    """
    lens = view.kv_lens
    if q.device.type != "cpu" or view.reader is not None or not view.is_causal or lens is None:
        return False
    if view.max_q_len <= _FEW_QUERIES or view.num_queries != view.num_tokens:
        return False
    if window is not None and window < lens.max():
        return False
    lanes = _lanes(view)
    # Joining two parts in 16 bits would round once more, so a prefix needs float32.
    is_exact = q.dtype == torch.float32 and q.shape[2] == values.shape[2]
    return is_exact or all(lane.prefix is None for lane in lanes)


def attend_prompts(
    view: AttentionView,
    k_buffer: Tensor,
    v_buffer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
) -> Tensor:
    """Attend lane by lane. Call it only if `serves_prompts`, with the chunk's KV in its pages.

    Args:
        view: the view of the forward.
        k_buffer: [num_slots, Hkv, Dk].
        v_buffer: [num_slots, Hkv, Dv].
        q: [T, H, Dk].
        k: [T, Hkv, Dk] the chunk's keys, as the pages hold them.
        v: [T, Hkv, Dv] its values.
        scaling: factor of the scores.

    Returns:
        [T, H, Dv].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for lane in _lanes(view):
        # [1, heads, tokens, D]
        queries, keys, values = (
            part[lane.tokens].transpose(0, 1).unsqueeze(0) for part in (q, k, v)
        )
        if lane.prefix is None:
            done = scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            prefix = lane.prefix.gather(k_buffer, v_buffer, 1, view.page_size)
            done = _joined(queries, keys, values, *prefix, scaling)
        out[lane.tokens] = done[0].transpose(0, 1)
    return out


def _joined(
    q: Tensor, keys: Tensor, values: Tensor, old_keys: Tensor, old_values: Tensor, scaling: float
) -> Tensor:
    """Attend to the chunk itself and to the cells before it, and join both: [1, H, n, D]."""
    _, heads, num_tokens, dim = q.shape
    groups = heads // keys.shape[1]
    if groups > 1:
        keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    own_result, own_lse = _flash(q, keys, values, 0.0, True, scale=scaling)
    # This part has no mask, so the query heads of a KV head are folded and read each key once.
    folded = q.reshape(1, heads // groups, groups * num_tokens, dim)
    old_keys, old_values = old_keys.to(q.dtype), old_values.to(q.dtype)
    old_result, old_lse = _flash(folded, old_keys, old_values, 0.0, False, scale=scaling)
    share = torch.sigmoid(old_lse.reshape(own_lse.shape) - own_lse)
    return torch.lerp(
        own_result, old_result.reshape(own_result.shape), share.unsqueeze(-1).to(own_result.dtype)
    )


def _lanes(view: AttentionView) -> list[_Lane]:
    """Return the view's lanes; computed once per view."""
    lanes = view.plans.get(_Lane)
    if lanes is None:
        lanes = view.plans[_Lane] = _split(view)
    return lanes  # type: ignore[return-value]


def _split(view: AttentionView) -> list[_Lane]:
    assert view.kv_lens is not None
    q_lens = view.q_lens
    widths = [q_lens] * view.num_lanes if isinstance(q_lens, int) else q_lens
    lanes, first = [], 0
    for index, (width, end) in enumerate(zip(widths, view.kv_lens.tolist(), strict=True)):
        tokens = slice(first, first + width)
        first = tokens.stop
        if width:
            start = end - width
            lanes.append(_Lane(tokens, view.run_of(index, start) if start else None))
    return lanes
