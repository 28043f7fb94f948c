"""Causal attention on a GPU: torch's fused kernels for lanes of unlike length.

The kernels take the lanes' lengths as arrays on the device. So no mask is built, no lane is padded
to the longest, and nothing past a lane's length is read, also within a CUDA graph, where the host
knows only bounds. Torch's own choice would build a cuDNN plan for each new length, or fall back to
math.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.engine.attention.view import AttentionView, first_columns
from specpool.kernels.transfer import upload

_flash = torch.ops.aten._flash_attention_forward
_efficient = torch.ops.aten._efficient_attention_forward
DEVICE = "cuda"
FLASH_DTYPES = (torch.float16, torch.bfloat16)
"""Lanes of these dtypes read their live pages alone, also where the host knows only bounds."""
_FLASH_MAX_DIM = 256
_LAST_QUERY_SEES_ALL = 2  # torch's number of the causal mask that is aligned to the last key
# The memory-efficient kernel wants keys once per head of queries. With fewer queries these copies
# cost more than a mask.
_MANY_QUERIES = 32


@dataclass(frozen=True, slots=True)
class FusedLanes:
    """The lanes of a view, as the kernels want them.

    Attributes:
        pages: int32 or int64 [n], all pages to read, lane after lane; -1 behind the last lane's
            pages.
        q_starts: int32 [B + 1], on the device: the first query of each lane.
        k_starts: int32 [B + 1], on the device: the first cell of each lane among the pages' cells.
        kv_lens: int32 [B], on the device: the cells of each lane.
        max_q_len: the most queries of a lane.
        max_kv_len: an upper bound of the cells of a lane.
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
    if q.device.type != DEVICE or view.decode_len is not None:
        return False
    # The kernels read 16 bytes at a time.
    if q.shape[2] != v_buffer.shape[2] or q.shape[2] * q.itemsize % 16:
        return False
    if takes_flash(q):
        return view.is_causal or view.causal_lens is not None
    has_many_queries = view.max_q_len > _MANY_QUERIES and view.causal_lens is not None
    return has_many_queries or (view.is_causal and view.max_q_len > 1)


def takes_flash(q: Tensor) -> bool:
    """Return whether torch's flash kernel takes queries of this dtype and width."""
    return q.dtype in FLASH_DTYPES and q.shape[2] <= _FLASH_MAX_DIM


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
        window: see `specpool.engine.attention.attend`.

    Returns:
        [T, H, D].
    """
    lanes = _lanes(view)
    keys, values = gather(view, lanes, k_buffer, v_buffer, q.dtype)
    q = q[: view.num_queries]
    if takes_flash(q):
        return flash(lanes, q, keys, values, scaling, window)[0]
    groups = q.shape[1] // keys.shape[1]
    if groups > 1:  # this kernel wants a head of keys for each head of queries
        keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    out: Tensor = _efficient(
        q.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        None,
        lanes.q_starts,
        lanes.k_starts,
        lanes.max_q_len,
        lanes.max_kv_len,
        0.0,
        _LAST_QUERY_SEES_ALL,
        scale=scaling,
        seqlen_k=lanes.kv_lens,
        window_size=window,
    )[0]
    return out.squeeze(0)


def gather(
    view: AttentionView, lanes: FusedLanes, k_buffer: Tensor, v_buffer: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the lanes' pages, [n * P, Hkv, D]; page -1 holds anything."""
    if view.reader is not None:
        keys, values = view.reader(k_buffer, v_buffer, lanes.pages)
    else:
        pages = lanes.pages.long().clamp(min=0)
        keys, values = (
            buffer.view(-1, view.page_size, *buffer.shape[1:])[pages]
            for buffer in (k_buffer, v_buffer)
        )
    keys = keys.view(-1, *k_buffer.shape[1:]).to(dtype)
    return keys, values.view(-1, *v_buffer.shape[1:]).to(dtype)


def flash(
    lanes: FusedLanes,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None = None,
    *,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run torch's flash kernel: the result, [T, H, D], and its softmax sums' logarithms, [H, T].

    A lane without cells gives zeros; its logarithms are infinite.
    """
    result = _flash(
        q,
        keys,
        values,
        lanes.q_starts,
        lanes.k_starts,
        lanes.max_q_len,
        lanes.max_kv_len,
        0.0,
        is_causal,
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
        seqused_k=lanes.kv_lens,
    )
    return result[0], result[1]


def _lanes(view: AttentionView) -> FusedLanes:
    """Return the view's lanes; computed once per view, without a wait for the device."""
    lanes = view.plans.get(FusedLanes)
    if lanes is None:
        lanes = view.plans[FusedLanes] = _split(view)
    return lanes  # type: ignore[return-value]


def _split(view: AttentionView) -> FusedLanes:
    if not view.is_causal:
        assert view.causal_lens is not None
        return live_lanes(view, view.causal_lens())
    assert view.kv_lens is not None
    lens = view.kv_lens.astype(np.int64)
    counts = -(-lens // view.page_size)
    ends = np.cumsum(counts)
    q_lens = np.broadcast_to(np.asarray(view.q_lens, np.int64), len(lens))
    at, q_starts, k_starts, kv_lens = upload(
        view.read_pages.device,
        first_columns(counts, view.read_pages.shape[1]),
        np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        np.concatenate([[0], ends * view.page_size]).astype(np.int32),
        lens.astype(np.int32),
    )
    return FusedLanes(
        view.read_pages.reshape(-1).index_select(0, at),
        q_starts,
        k_starts,
        kv_lens,
        int(q_lens.max()),
        int(lens.max()),
    )


def live_lanes(view: AttentionView, lens: Tensor) -> FusedLanes:
    """Return the lanes where only the device knows the lengths: their live pages, side by side.

    The room for pages is what the host allows for, not lanes times columns.

    Args:
        view: the view of the forward.
        lens: int32 [B], on the device: the first cells of each lane, which are read.
    """
    pages, size = view.read_pages, view.page_size
    num_lanes, columns = pages.shape
    room = _room(view)
    counts = (lens + (size - 1)) // size
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))  # int64 [B + 1], in pages
    columns_of = torch.arange(columns, device=pages.device)
    # The last place takes the pages that no query sees, and is cut off.
    places = torch.where(
        columns_of < counts.unsqueeze(1), starts[:-1].unsqueeze(1) + columns_of, room
    )
    live = pages.new_full((room + 1,), -1).scatter_(0, places.view(-1), pages.reshape(-1))

    if isinstance(view.q_lens, int):
        num_queries = num_lanes * view.q_lens
        q_starts = torch.arange(
            0, num_queries + 1, view.q_lens, dtype=torch.int32, device=pages.device
        )
    else:
        (q_starts,) = upload(pages.device, np.cumsum([0, *view.q_lens]).astype(np.int32))
    return FusedLanes(
        live[:room],
        q_starts,
        (starts * size).int(),
        lens.int(),
        view.max_q_len,
        columns * size,
    )


def _room(view: AttentionView) -> int:
    """Return an upper bound of the pages that all lanes of a view read together."""
    num_lanes, columns = view.read_pages.shape
    room = num_lanes * columns
    if view.kv_lens is not None:
        counts = -(-view.kv_lens.astype(np.int64) // view.page_size)
        room = int(np.minimum(counts, columns).sum())
    return room if view.most_pages is None else min(room, view.most_pages)
