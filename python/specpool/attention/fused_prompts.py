"""Causal attention over prompts on a GPU: torch's fused kernels for lanes of unlike length.

The kernels take the lanes' lengths as arrays. So no mask is built, and no lane is padded to the
longest. Torch's own choice would build a cuDNN plan for each new length, or fall back to math.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.attention.view import AttentionView
from specpool.kernels.transfer import upload

_flash = torch.ops.aten._flash_attention_forward
_efficient = torch.ops.aten._efficient_attention_forward
_DEVICE = "cuda"
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MAX_DIM = 256
_LAST_QUERY_SEES_ALL = 2  # torch's number of the causal mask that is aligned to the last key


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The lanes of a view, as the kernels want them.

    Attributes:
        pages: int32 or int64 [n], all pages to read, lane after lane.
        q_starts: int32 [B + 1], on the device: the first query of each lane.
        k_starts: int32 [B + 1], on the device: the first cell of each lane among the pages' cells.
        kv_lens: int32 [B], on the device: the cells of each lane.
        max_q_len: the most queries of a lane.
        max_kv_len: the most cells of a lane.
    """

    pages: Tensor
    q_starts: Tensor
    k_starts: Tensor
    kv_lens: Tensor
    max_q_len: int
    max_kv_len: int


def serves_fused(view: AttentionView, q: Tensor, v_buffer: Tensor) -> bool:
    """Return whether `attend_fused` can attend for a layer without soft cap and sinks.

    Args:
        view: the view of the forward.
        q: [T, H, Dk] queries.
        v_buffer: [num_slots, Hkv, Dv], the layer's value buffer.
    """
    if q.device.type != _DEVICE or not view.is_causal or view.max_q_len == 1:
        return False
    # The kernels read 16 bytes at a time.
    return q.shape[2] == v_buffer.shape[2] and q.shape[2] * q.itemsize % 16 == 0


def attend_fused(
    view: AttentionView,
    k_buffer: Tensor,
    v_buffer: Tensor,
    q: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Attend with one kernel for all lanes. Call it only if `serves_fused`, with all KV in pages.

    Args:
        view: the view of the forward.
        k_buffer: [num_slots, Hkv, D].
        v_buffer: [num_slots, Hkv, D].
        q: [T, H, D].
        scaling: factor of the scores.
        window: see `specpool.attention.attend`.

    Returns:
        [T, H, D].
    """
    lanes = _lanes(view)
    if view.reader is not None:
        keys, values = view.reader(k_buffer, v_buffer, lanes.pages)
    else:
        keys, values = (
            buffer.view(-1, view.page_size, *buffer.shape[1:])[lanes.pages.long()]
            for buffer in (k_buffer, v_buffer)
        )
    keys = keys.view(-1, *k_buffer.shape[1:]).to(q.dtype)
    values = values.view(-1, *v_buffer.shape[1:]).to(q.dtype)
    places = (lanes.q_starts, lanes.k_starts, lanes.max_q_len, lanes.max_kv_len)
    q = q[: view.num_queries]
    if q.dtype in _FLASH_DTYPES and q.shape[2] <= _FLASH_MAX_DIM:
        out: Tensor = _flash(
            q,
            keys,
            values,
            *places,
            0.0,
            True,
            False,
            scale=scaling,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=-1 if window is None else 0,
            seqused_k=lanes.kv_lens,
        )[0]
        return out
    groups = q.shape[1] // keys.shape[1]
    if groups > 1:  # this kernel wants a head of keys for each head of queries
        keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    out = _efficient(
        q.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        None,
        *places,
        0.0,
        _LAST_QUERY_SEES_ALL,
        scale=scaling,
        seqlen_k=lanes.kv_lens,
        window_size=window,
    )[0]
    return out.squeeze(0)


def _lanes(view: AttentionView) -> _Lanes:
    """Return the view's lanes; computed once per view, without a wait for the device."""
    found = view.plans.get(_Lanes)
    if found is None:
        found = view.plans[_Lanes] = _split(view)
    return found  # type: ignore[return-value]


def _split(view: AttentionView) -> _Lanes:
    assert view.kv_lens is not None
    lens = view.kv_lens.astype(np.int64)
    counts = -(-lens // view.page_size)
    ends = np.cumsum(counts)
    # Entry i, of lane b, is column i - (pages of the lanes before b) of row b.
    shifts = np.arange(len(lens)) * view.read_pages.shape[1] - (ends - counts)
    q_lens = np.broadcast_to(np.asarray(view.q_lens, np.int64), len(lens))
    at, q_starts, k_starts, kv_lens = upload(
        view.read_pages.device,
        np.repeat(shifts, counts) + np.arange(ends[-1]),
        np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        np.concatenate([[0], ends * view.page_size]).astype(np.int32),
        lens.astype(np.int32),
    )
    return _Lanes(
        view.read_pages.reshape(-1).index_select(0, at),
        q_starts,
        k_starts,
        kv_lens,
        int(q_lens.max()),
        int(lens.max()),
    )
