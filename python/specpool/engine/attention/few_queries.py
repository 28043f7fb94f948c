"""Attention of few queries on a GPU, by a kernel of our own that reads the pages in place.

It serves plain decoding, drafting, verifying and trees in 16 bits. It gathers nothing, and moves
the live KV once, however many query heads share a KV head. The kernel takes the lanes' lengths as
an array on the device, so it also serves a CUDA graph, where the host knows only bounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specpool.engine.attention.view import AttentionView
from specpool.kernels.attend import DTYPES, HEAD_DIMS, attend_pages
from specpool.kernels.launch import runs_kernels
from specpool.kernels.paged_cells import MOST_OWN, PagedCells
from specpool.kernels.transfer import upload

#: The most rows, queries times query heads of a KV head. With more, the gathered KV is read once
#: for many queries, and torch's flash kernel is faster.
MOST_ROWS = 128


def serves_few_queries(
    view: AttentionView, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, window: int | None
) -> bool:
    """Return whether `attend_few_queries` can attend for a layer without soft cap and sinks.

    Args:
        view: the view of the forward.
        q: [T, H, Dk] queries.
        k_buffer: [num_slots, Hkv, Dk].
        v_buffer: [num_slots, Hkv, Dv].
        window: the layer's window; None means full attention.
    """
    if not runs_kernels(q.device) or q.dtype not in DTYPES or q.shape[2] not in HEAD_DIMS:
        return False
    if not q.dtype == k_buffer.dtype == v_buffer.dtype or v_buffer.shape[2] != q.shape[2]:
        return False
    if view.max_q_len * (q.shape[1] // k_buffer.shape[1]) > MOST_ROWS:
        return False
    if view.own_cells is None:
        return view.is_causal or view.causal_lens is not None or view.decode_len is not None
    # A window goes by position, and the nodes of a lane have several.
    hides_nothing = window is None or window >= view.read_pages.shape[1] * view.page_size
    return hides_nothing and view.own_cells.mask.shape[2] <= MOST_OWN


def attend_few_queries(
    view: AttentionView,
    k_buffer: Tensor,
    v_buffer: Tensor,
    q: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Attend in place. Call it only if `serves_few_queries`, with all KV in its slots.

    Args:
        view: the view of the forward.
        k_buffer: [num_slots, Hkv, D].
        v_buffer: [num_slots, Hkv, D].
        q: [T, H, D].
        scaling: factor of the scores.
        window: see `specpool.engine.attention.attend`.

    Returns:
        [T, H, D].
    """
    cells = view.plans.get(PagedCells)
    if cells is None:
        cells = view.plans[PagedCells] = _cells(view)
    assert isinstance(cells, PagedCells)
    return attend_pages(
        q[: view.num_queries].contiguous(),
        k_buffer,
        v_buffer,
        cells,
        scaling=scaling,
        window=None if view.own_cells is not None else window,
    )


def _cells(view: AttentionView) -> PagedCells:
    """Return what the queries of a view see, without a wait for the device."""
    pages, device = view.read_pages, view.read_pages.device
    num_lanes, width = pages.shape[0], pages.shape[1] * view.page_size
    if isinstance(view.q_lens, int):
        q_starts = torch.arange(
            0, num_lanes * view.q_lens + 1, view.q_lens, dtype=torch.int32, device=device
        )
    else:
        (q_starts,) = upload(device, np.cumsum([0, *view.q_lens]).astype(np.int32))
    most_cells = width if view.kv_lens is None else min(int(view.kv_lens.max()), width)
    own_slots = sees = None
    if view.own_cells is not None:
        lens, mask = view.own_cells.starts(), view.own_cells.mask
        own_slots = view.own_cells.slots(view).int().contiguous()
        bits = torch.arange(mask.shape[2], device=device)
        sees = (mask.long() << bits).sum(2)
        most_cells += mask.shape[2]
    elif view.causal_lens is not None:
        lens = view.causal_lens()
    elif view.is_causal:
        assert view.kv_lens is not None
        (lens,) = upload(device, view.kv_lens.astype(np.int32))
    else:
        assert view.decode_len is not None
        lens = torch.full((num_lanes,), view.decode_len, dtype=torch.int32, device=device)
    return PagedCells(
        pages=pages.int().contiguous(),
        page_size=view.page_size,
        lens=lens.int().contiguous(),
        q_starts=q_starts,
        num_queries=view.max_q_len,
        most_cells=most_cells,
        own_slots=own_slots,
        sees=sees,
    )
