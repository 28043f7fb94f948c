"""Views for lanes of rows: from (row, positions) to the pages and slots of one forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool.attention.view import AttentionView
from specpool.kv_cache import KVCache

Int32 = npt.NDArray[np.int32]


def causal_view(
    cache: KVCache, group: int, rows: Int32, starts: Int32, q_lens: Int32 | None = None
) -> AttentionView:
    """Prefill, plain decode, draft-extend: a token at position p sees `[0, p]` of its row.

    Args:
        cache: whose mirrors of the page tables are read.
        group: of the layers that will use the view.
        rows: int32 [B].
        starts: int32 [B], the position of each lane's first token.
        q_lens: int32 [B], tokens per lane, at least 1; None = one each.
    """
    table, page_size = cache.tables[group], cache.page_sizes[group]
    if q_lens is None:
        slots, longest = kernels.slots_at(table, page_size, rows, starts), int(starts.max()) + 1
    else:
        slots = kernels.slot_ranges(table, page_size, rows, starts, q_lens)
        longest = int((starts + q_lens).max())
    return _causal(cache, group, _pages(cache, group, rows, longest), starts, q_lens, slots)


def last_view(
    cache: KVCache, group: int, rows: Int32, starts: Int32, q_lens: Int32
) -> AttentionView:
    """As `causal_view`, but only each lane's last token is a query; all tokens' KV is written."""
    slots = kernels.slot_ranges(cache.tables[group], cache.page_sizes[group], rows, starts, q_lens)
    last = starts + q_lens - np.int32(1)
    return _causal(cache, group, _pages(cache, group, rows, int(last.max()) + 1), last, None, slots)


def paged_view(
    cache: KVCache, group: int, pages: Int32, starts: Int32, slots: npt.NDArray[np.int64]
) -> AttentionView:
    """One token per lane, each lane a sequence of whole pages (branches of the holey layout).

    Args:
        cache: whose page sizes are read.
        group: of the layers that will use the view.
        pages: int32 [B, C], padded with page 0.
        starts: int32 [B], the position of each lane's token.
        slots: int64, B of them, where each token's KV goes.
    """
    return _causal(cache, group, pages, starts, None, slots.ravel())


def own_view(
    cache: KVCache,
    group: int,
    rows: Int32,
    starts: Int32,
    slots: npt.NDArray[np.int64],
    own_mask: npt.NDArray[np.bool_],
    own_positions: Int32,
    q_positions: Int32,
) -> AttentionView:
    """Verify and dense drafting: a query sees `[0, start)` and its own choice of cells after it.

    Args:
        cache: whose mirrors of the page tables are read.
        group: of the layers that will use the view.
        rows: int32 [B].
        starts: int32 [B], cells of the prefix.
        slots: int64, B * Q of them, where each query's KV goes.
        own_mask: bool [B, Q, W]: query i sees cell `start + j`.
        own_positions: int32 [B, W], the model position of the token in each of these cells.
        q_positions: int32 [B, Q], the model position of each query. Windows go by position.
    """
    num_lanes, num_queries, num_cells = own_mask.shape
    pages = _pages(cache, group, rows, int(starts.max()) + num_cells)
    num_columns = pages.shape[1] * cache.page_sizes[group]
    q_lens = np.full(num_lanes, num_queries, np.int32)

    def bias_for(window: int | None) -> npt.NDArray[np.float32]:
        return kernels.attention_bias(
            starts,
            q_lens,
            num_columns,
            own_mask=own_mask,
            q_positions=q_positions,
            own_positions=own_positions,
            window=window,
        )

    return AttentionView(
        page_size=cache.page_sizes[group],
        write_slots=_to_device(cache, slots.reshape(-1)),
        read_pages=_to_device(cache, pages),
        q_lens=num_queries,
        mask_for=bias_for,
    )


def range_positions(starts: Int32, lens: Int32) -> npt.NDArray[np.int64]:
    """`start, start + 1, ...` for each lane, int64 [sum(lens)]."""
    ends = np.cumsum(lens, dtype=np.int64)
    first = starts - (ends - lens)
    return np.repeat(first, lens) + np.arange(ends[-1])


def _causal(
    cache: KVCache,
    group: int,
    pages: Int32,
    starts: Int32,
    q_lens: Int32 | None,
    slots: npt.NDArray[np.int64],
) -> AttentionView:
    num_columns = pages.shape[1] * cache.page_sizes[group]

    def bias_for(window: int | None) -> npt.NDArray[np.float32]:
        lens = np.ones_like(starts) if q_lens is None else q_lens
        return kernels.attention_bias(starts, lens, num_columns, window=window)

    lengths = starts.tolist()
    equal = q_lens is None and lengths.count(lengths[0]) == len(lengths)
    return AttentionView(
        page_size=cache.page_sizes[group],
        write_slots=_to_device(cache, slots),
        read_pages=_to_device(cache, pages),
        q_lens=1 if q_lens is None else q_lens.tolist(),
        mask_for=bias_for,
        decode_len=lengths[0] + 1 if equal else None,
    )


def _pages(cache: KVCache, group: int, rows: Int32, length: int) -> Int32:
    """The pages of each row that cover `[0, length)`, int32 [B, C]."""
    columns = -(-length // cache.page_sizes[group])
    return cache.tables[group][:, :columns].take(rows, 0)


def _to_device(cache: KVCache, array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(cache.device)
