"""Causal attention over prompts on a CPU: lane by lane, at exact lengths and without a mask.

A chunk's own tokens are still at hand, so they are not read back from pages. All queries of a chunk
see what lies before it. The two parts are attended to apart, then joined by the logarithms of their
softmax sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specpool.attention.view import AttentionView, Reads

# Up to so many queries per lane one read of all lanes together is faster.
_FEW_QUERIES = 32
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Lane:
    tokens: slice  # of the forward
    prefix: Reads | None  # what lies before the chunk; None = nothing


def serves_prompts(view: AttentionView, q: Tensor, values: Tensor, window: int | None) -> bool:
    """Whether `attend_prompts` can attend for a layer without soft cap and sinks.

    Args:
        view: of the forward.
        q: [T, H, Dk] queries.
        values: [num_slots, Hkv, Dv], the layer's.
        window: of the layer.
    """
    lens = view.kv_lens
    if q.device.type != "cpu" or view.reader is not None or not view.is_causal or lens is None:
        return False
    if view.max_q_len <= _FEW_QUERIES or view.num_queries != view.num_tokens:
        return False
    if window is not None and window < lens.max():
        return False
    lanes = _lanes(view)
    # The parts are joined as they come out: in 16 bits that would round once more.
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
    """Attend where `serves_prompts` says so; the chunk's KV is in its pages already.

    Args:
        view: of the forward.
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
    """[1, H, n, D]: attention to the chunk itself, and to what lies before it."""
    _, heads, num_tokens, dim = q.shape
    groups = heads // keys.shape[1]
    if groups > 1:
        keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    own, own_lse = _flash(q, keys, values, 0.0, True, scale=scaling)
    # No mask: the query heads of one KV head are folded, and each key is read once.
    folded = q.reshape(1, heads // groups, groups * num_tokens, dim)
    old_keys, old_values = old_keys.to(q.dtype), old_values.to(q.dtype)
    old, old_lse = _flash(folded, old_keys, old_values, 0.0, False, scale=scaling)
    share = torch.sigmoid(old_lse.reshape(own_lse.shape) - own_lse)
    return torch.lerp(own, old.reshape(own.shape), share.unsqueeze(-1).to(own.dtype))


def _lanes(view: AttentionView) -> list[_Lane]:
    """The view's lanes; worked out at the first layer."""
    found = view.plans.get(_Lane)
    if found is None:
        found = view.plans[_Lane] = _split(view)
    return found  # type: ignore[return-value]


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
