"""Attention of few queries on a CPU, by a kernel of the core that reads the pages in place.

It serves plain decoding, drafting and verifying in float32. It gathers nothing, pads no lane to the
longest one, and allows a row's pages to lie anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specpool._core as _core
from specpool.engine.attention.view import AttentionView

#: The most queries per lane. With more, matrix products are faster than reading each key once.
MOST_QUERIES = 8


@dataclass(frozen=True, slots=True)
class _Reads:
    """The arguments of the kernel that depend on the view and the window alone."""

    write_slots: NDArray[np.int64]  # [T]
    pages: NDArray[np.int32]  # [B, C]
    kv_lens: NDArray[np.int32]  # [B]
    q_lens: NDArray[np.int32]  # [B]
    bias: NDArray[np.float32] | None  # [B, Q, C * P]; None means causal
    window: int | None  # of causal queries


def serves_in_place(view: AttentionView, q: Tensor, k_buffer: Tensor, v_buffer: Tensor) -> bool:
    """Return whether `attend_in_place` can attend for these queries."""
    return (
        view.max_q_len <= MOST_QUERIES
        and view.reader is None
        and q.device.type == "cpu"
        and q.dtype == k_buffer.dtype == v_buffer.dtype == torch.float32
    )


def attend_in_place(
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
    """Attend in place; see `specpool.engine.attention.attend`. Call it only if `serves_in_place`.

    Raises:
        ShapeError: a mask, pages or lengths do not fit; nothing is written.
    """
    reads = _reads(view, window)
    out = q.new_empty(q.shape[0], q.shape[1], v_buffer.shape[2])
    if k.dtype != torch.float32:
        k, v = k.float(), v.float()
    _core.attend_pages(
        k_buffer.numpy(),
        v_buffer.numpy(),
        k.contiguous().numpy(),
        v.contiguous().numpy(),
        reads.write_slots,
        q.contiguous().numpy(),
        out.numpy(),
        reads.pages,
        reads.kv_lens,
        reads.q_lens,
        page_size=view.page_size,
        scaling=scaling,
        bias=reads.bias,
        window=reads.window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.float().numpy(),
        num_threads=torch.get_num_threads(),
    )
    return out


def _reads(view: AttentionView, window: int | None) -> _Reads:
    """Return what a layer with this window reads; computed once per view and window."""
    key = (_Reads, window)
    reads = view.plans.get(key)
    if reads is None:
        width = view.read_pages.shape[1] * view.page_size
        hides_nothing = window is not None and window >= width
        reads = _reads(view, None) if hides_nothing else _new_reads(view, window, width)
        view.plans[key] = reads
    return reads  # type: ignore[return-value]


def _new_reads(view: AttentionView, window: int | None, width: int) -> _Reads:
    pages = view.read_pages.int().contiguous().numpy()
    q_lens = np.empty(len(pages), np.int32)
    q_lens[:] = view.q_lens
    kv_lens, bias = view.kv_lens, None
    if view.decode_len is not None:
        kv_lens = np.full(len(pages), view.decode_len, np.int32)
    elif kv_lens is None or not view.is_causal:
        mask, window = view.mask(window), None
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        bias = mask.contiguous().numpy()
        if kv_lens is not None:  # upper bounds, which may exceed the columns of the mask
            kv_lens = np.minimum(kv_lens, width)
    if kv_lens is None:
        kv_lens = np.full(len(pages), width, np.int32)
    kv_lens = np.ascontiguousarray(kv_lens, np.int32)
    return _Reads(view.write_slots.contiguous().numpy(), pages, kv_lens, q_lens, bias, window)
