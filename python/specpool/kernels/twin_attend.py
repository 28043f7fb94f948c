"""The CPU twin of `specpool.kernels.attend`, in torch and float32."""

from __future__ import annotations

import torch
from torch import Tensor

from specpool.kernels.paged_cells import PagedCells


def attend_pages(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    cells: PagedCells,
    *,
    scaling: float,
    window: int | None,
    out: Tensor,
) -> Tensor:
    """Attend lane after lane; see `specpool.kernels.attend.attend_pages`."""
    group = q.shape[1] // k_buffer.shape[1]
    starts, size = cells.q_starts.tolist(), cells.page_size
    for lane, length in enumerate(cells.lens.tolist()):
        first, end = starts[lane], starts[lane + 1]
        slots = (cells.pages[lane].unsqueeze(1) * size + torch.arange(size)).view(-1)[:length]
        places = torch.arange(len(slots))
        queries = torch.arange(end - first).unsqueeze(1)
        if cells.own_slots is None or cells.sees is None:
            last = length - (end - first) + queries
            sees = (places <= last) & (places > last - (window or length + 1))
        else:
            numbers = torch.arange(cells.own_slots.shape[1])
            bits = cells.sees[lane, : end - first].unsqueeze(1) >> numbers & 1
            sees = torch.cat([(places >= 0).expand(end - first, -1), bits.bool()], 1)
            slots = torch.cat([slots, cells.own_slots[lane]])
        keys, values = (
            buffer[slots].float().repeat_interleave(group, 1) for buffer in (k_buffer, v_buffer)
        )
        scores = torch.einsum("qhd,nhd->hqn", q[first:end].float(), keys) * scaling
        weights = scores.masked_fill(~sees, -torch.inf).softmax(2).masked_fill(~sees, 0)
        out[first:end] = torch.einsum("hqn,nhd->qhd", weights, values).to(out.dtype)
    return out
