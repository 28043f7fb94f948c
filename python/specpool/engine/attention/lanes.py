"""`Lanes`, the rows and positions of a forward, and the attention views that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool import kernels
from specpool.arrays import Int32
from specpool.engine.attention.seq_lens import Origins, SeqLens
from specpool.engine.attention.view import AttentionView, OwnCells, TokenReads
from specpool.engine.memory.kv_cache import KVCache, first_cells
from specpool.kernels.transfer import upload

_FIRST = Origins(0, 0)


@dataclass
class Lanes:
    """The rows of one forward, the first position of each, and its number of tokens.

    Attributes:
        rows: int32 [B], on the device.
        seq_lens: the rows' lengths: positions below have KV already.
        widths: tokens of each lane in this forward, at least 1: int32 [B], on the host, or one
            number for all lanes.
        lens: int32 [B], on the device: how many tokens of each lane count; the rest is padding,
            and `widths` must be one number. None means all tokens count.
    """

    rows: Tensor
    seq_lens: SeqLens
    widths: Int32 | int
    lens: Tensor | None = None

    @property
    def starts(self) -> Tensor:
        """int32 [B], on the device: the first position of each lane's tokens."""
        return self.seq_lens.on_device

    @cached_property
    def index(self) -> Tensor:
        """int64 [B], the rows as an index for torch."""
        return self.rows.long()

    def part(self, start: int, end: int, width: int) -> Lanes:
        """Return the lanes `[start, end)`, with `width` tokens each."""
        if start == 0 and end == len(self.seq_lens):
            return Lanes(self.rows, self.seq_lens, width)
        lanes = slice(start, end)
        return Lanes(self.rows[lanes], self.seq_lens.filter(lanes), width)

    def filter(self, keep: npt.NDArray[np.bool_]) -> Lanes:
        """Return the lanes of `keep`, bool [B], with one token each."""
        if keep.all():
            is_narrow = isinstance(self.widths, int) and self.widths == 1
            return self if is_narrow else Lanes(self.rows, self.seq_lens, 1)
        (lane_index,) = upload(self.rows.device, np.flatnonzero(keep))
        return Lanes(self.rows.index_select(0, lane_index), self.seq_lens.filter(keep), 1)

    def ahead(self, step: int) -> Lanes:
        """Return the same rows, `step` positions further on (or back), with one token each."""
        return Lanes(self.rows, self.seq_lens.ahead(step) if step else self.seq_lens, 1)

    @property
    def max_len(self) -> int:
        """An upper bound of all lanes' lengths after this forward."""
        return int((self.seq_lens.hi + self.widths).max())

    @property
    def counts(self) -> Tensor:
        """int32 [B], on the device: the tokens of each lane that count."""
        if self.lens is not None:
            return self.lens
        if isinstance(self.widths, int):
            return torch.full_like(self.starts, self.widths)
        return self._order[0]

    @property
    def last_indices(self) -> Tensor:
        """int64 [B], the index of each lane's last token that counts."""
        if isinstance(self.widths, int):
            size = len(self.seq_lens) * self.widths
            firsts = torch.arange(0, size, self.widths, device=self.rows.device)
            return firsts + ((self.widths if self.lens is None else self.lens) - 1)
        return self._order[1]

    @property
    def positions(self) -> Tensor:
        """int64 [T], the position of each token in its row."""
        if isinstance(self.widths, int):
            if self.widths == 1:
                return self.starts.long()
            offsets = torch.arange(self.widths, device=self.rows.device)
            return (self.starts.unsqueeze(1) + offsets).view(-1)
        _, _, lanes, offsets = self._order
        return self.starts.index_select(0, lanes) + offsets

    @cached_property
    def _order(self) -> list[Tensor]:
        """On the device: widths; each lane's last token; each token's lane and its place there."""
        widths = np.asarray(self.widths)
        ends = np.cumsum(widths, dtype=np.int64)
        lanes = np.repeat(np.arange(len(ends)), widths)
        offsets = np.arange(ends[-1]) - (ends - widths)[lanes]
        return upload(self.rows.device, widths, ends - 1, lanes, offsets)

    @cached_property
    def padding(self) -> Tensor | None:
        """Bool [T], true for tokens that do not count; None if all count."""
        if self.lens is None or not isinstance(self.widths, int):
            return None
        offsets = torch.arange(self.widths, device=self.rows.device)
        return (offsets >= self.lens.unsqueeze(1)).view(-1)

    def pages(
        self, cache: KVCache, group: int, num_cells: int | None = None
    ) -> tuple[Tensor, Origins]:
        """Return the pages that the lanes' queries see, as `KVCache.pages_of` does.

        They reach `num_cells` cells beyond each start; None means `widths` cells.
        """
        lens, ahead = self.seq_lens, self.widths if num_cells is None else num_cells
        window = cache.windows[group]
        if window is not None and isinstance(ahead, int) and (lens.hi - lens.lo).max() > window:
            pages, begins = cache.window_pages(group, self.rows, self.starts, ahead)
            return pages, Origins(begins, None)
        pages, first = cache.pages_of(group, self.rows, lens.lo, lens.hi + ahead)
        if isinstance(first, int):
            return pages, Origins(first, first)
        assert window is not None
        size, num_sinks = cache.page_sizes[group], cache.num_sinks[group]
        return pages, Origins(first, first_cells(lens.lo, window, size, num_sinks))

    def slots(self, cache: KVCache, group: int) -> Tensor:
        """Return the slots of the tokens' KV, int64 [T]; padding goes to the sink, slot 0."""
        row_table = (cache.tables[group], cache.page_sizes[group], self.rows)
        if not isinstance(self.widths, int):
            slots = kernels.slot_ranges(*row_table, self.starts, self.counts, hi=self.widths)
        elif self.widths == 1:
            slots = kernels.slots_at(*row_table, self.starts)
        else:
            counts = torch.full_like(self.starts, self.widths)
            hi = np.full_like(self.seq_lens.hi, self.widths)
            slots = kernels.slot_ranges(*row_table, self.starts, counts, hi=hi)
        if self.lens is not None and self.padding is not None:
            slots = slots.masked_fill(self.padding, 0)
        return slots.long()


def _sink(cache: KVCache, group: int, window: int | None) -> int:
    """Return how many first tokens a layer with this window sees beside it.

    The sink is a part of the draft window, which has one key less than the group. A layer that was
    trained with a shorter window sees that alone.
    """
    group_window = cache.windows[group]
    return cache.sinks[group] if window is not None and window + 1 == group_window else 0


def _only_masked(cache: KVCache, group: int) -> bool:
    """Return whether a query of the group sees cells that no window names.

    NOTE: views of such a group must set none of `decode_len`, `is_causal`, `causal_lens` and
    `own_cells`, so that every layer uses the view's mask, whatever window it asks for.
    """
    return cache.chunks[group] is not None or cache.sinks[group] > 0


def causal_view(cache: KVCache, group: int, lanes: Lanes) -> AttentionView:
    """Build the view in which a token at position p sees `[0, p]` of its row.

    Prefill, plain decode and draft-extend use it.

    Args:
        cache: holds the page tables.
        group: the group of the layers that will use the view.
        lanes: B lanes.
    """
    pages, origins = lanes.pages(cache, group)
    return _causal(cache, group, pages, origins, lanes, lanes.slots(cache, group))


def last_view(cache: KVCache, group: int, lanes: Lanes) -> AttentionView:
    """Build a causal view in which only each lane's last token is a query.

    The KV of all tokens is written. See `causal_view` for the arguments.
    """
    pages, origins = lanes.pages(cache, group)
    num_before = lanes.widths - 1
    if lanes.lens is None and isinstance(num_before, int):
        last = lanes.ahead(num_before)
    else:
        least = num_before if lanes.lens is None else 0
        last = Lanes(lanes.rows, lanes.seq_lens.grown(lanes.counts - 1, least, num_before), 1)
    return _causal(cache, group, pages, origins, last, lanes.slots(cache, group))


def chain_views(cache: KVCache, group: int, lanes: Lanes) -> list[AttentionView]:
    """Build the views of `widths` forwards in a row, each with the next token of every lane.

    Args:
        cache: holds the page tables.
        group: the group of the layers that will use the views.
        lanes: B lanes, all of one width.
    """
    assert isinstance(lanes.widths, int)
    num_views = lanes.widths
    pages, origins = lanes.pages(cache, group)
    num_columns = pages.shape[1] * cache.page_sizes[group]
    slots = lanes.slots(cache, group).view(-1, num_views)
    chunk, is_masked = cache.chunks[group], _only_masked(cache, group)
    length = None if is_masked else lanes.seq_lens.common
    kv_lens, is_exact = _kv_lens(lanes, origins, 1), lanes.seq_lens.is_exact
    biases: dict[int | None, Tensor] = {}  # window -> the bias of all forwards

    def bias_for(window: int | None, step: int) -> Tensor:
        if window not in biases:
            bias = kernels.attention_bias(
                origins.since(lanes.starts),
                lanes.counts,
                num_columns,
                num_queries=num_views,
                window=window,
                sink=_sink(cache, group, window),
            )
            if chunk is not None:
                bias = _causal_chunks(bias, chunk, lanes, origins)
            biases[window] = bias
        return biases[window][:, step : step + 1]

    return [
        AttentionView(
            page_size=cache.page_sizes[group],
            write_slots=slots[:, step],
            read_pages=pages,
            q_lens=1,
            mask_for=partial(bias_for, step=step),
            decode_len=None if length is None else length + 1 + step - int(origins.on_device),
            reader=cache.reader,
            kv_lens=None if kv_lens is None else kv_lens + np.int32(step),
            is_causal=is_exact and kv_lens is not None and not is_masked,
            causal_lens=None if is_masked else _causal_lens(lanes, origins, step + 1),
            attend_with=cache.attend_with,
            scratch=cache.scratch,
            most_pages=cache.most_pages(group, len(pages)),
        )
        for step in range(num_views)
    ]


def paged_view(
    cache: KVCache, group: int, pages: Tensor, lanes: Lanes, slots: Tensor
) -> AttentionView:
    """Build a causal view over given pages, one token per lane (branches of the holey layout).

    Args:
        cache: gives the page sizes.
        group: the group of the layers that will use the view.
        pages: int32 [B, C], the pages of each lane, padded with page 0.
        lanes: B lanes, one token each.
        slots: int32 or int64, B slots for the tokens' KV.
    """
    return _causal(cache, group, pages, _FIRST, lanes, slots.reshape(-1).long())


def own_view(
    cache: KVCache,
    group: int,
    lanes: Lanes,
    slots: Tensor,
    own_mask: Tensor,
    own_positions: Tensor,
    q_positions: Tensor,
    read_tokens: Callable[[], TokenReads] | None = None,
) -> AttentionView:
    """Build the view in which a query sees `[0, start)` and the cells after it that a mask names.

    Verify and dense drafting use it.

    Args:
        cache: holds the page tables.
        group: the group of the layers that will use the view.
        lanes: B lanes; `starts` are the prefix lengths. Narrower lanes than Q are padded.
        slots: int32 or int64, a slot for the KV of each query, lane after lane.
        own_mask: bool [B, Q, W]: query i sees cell `start + j`.
        own_positions: int32 [B, W], the model position of the token in each of these cells.
        q_positions: int32 [B, Q], the model position of each query. Windows go by position.
        read_tokens: see `AttentionView`.
    """
    _, num_queries, num_cells = own_mask.shape
    pages, origins = lanes.pages(cache, group, num_cells)
    num_columns = pages.shape[1] * cache.page_sizes[group]

    ragged = not isinstance(lanes.widths, int)
    chunk = cache.chunks[group]
    if chunk is not None:
        least = (q_positions - q_positions % chunk).unsqueeze(2)  # [B, Q, 1]
        own_mask = own_mask & (own_positions.unsqueeze(1) >= least)

    def bias_for(window: int | None) -> Tensor:
        counts = lanes.counts if ragged else torch.full_like(lanes.starts, num_queries)
        bias = kernels.attention_bias(
            origins.since(lanes.starts),
            counts,
            num_columns,
            num_queries=num_queries,
            own_mask=own_mask,
            q_positions=origins.since(q_positions),
            own_positions=origins.since(own_positions),
            window=window,
            sink=_sink(cache, group, window),
        )
        if chunk is None:
            return bias
        return _chunks(bias, chunk, q_positions, origins, counts)

    return AttentionView(
        page_size=cache.page_sizes[group],
        write_slots=slots.reshape(-1).long(),
        read_pages=pages,
        q_lens=num_queries if isinstance(lanes.widths, int) else lanes.widths.tolist(),
        mask_for=bias_for,
        reader=cache.reader,
        kv_lens=_kv_lens(lanes, origins, lanes.widths if ragged else num_cells),
        own_cells=None
        if _only_masked(cache, group)
        else OwnCells(
            lambda: origins.since(lanes.starts),
            own_mask,
            partial(_own_slots, cache, group, lanes, num_cells),
        ),
        read_tokens=read_tokens,
        attend_with=cache.attend_with,
        scratch=cache.scratch,
        most_pages=cache.most_pages(group, len(pages)),
    )


def _own_slots(
    cache: KVCache, group: int, lanes: Lanes, num_cells: int, view: AttentionView
) -> Tensor:
    """Return the slots of the `num_cells` cells behind each lane's prefix, int64 [B, W]."""
    if not isinstance(lanes.widths, int):  # node i lies in cell start + i
        assert view.pad_index is not None
        return view.write_slots.index_select(0, view.pad_index).view(-1, num_cells)
    if num_cells == view.max_q_len:
        return view.write_slots.view(-1, num_cells)
    return Lanes(lanes.rows, lanes.seq_lens, num_cells).slots(cache, group).view(-1, num_cells)


def _kv_lens(lanes: Lanes, origins: Origins, ahead: Int32 | int) -> Int32 | None:
    """Return the host's upper bounds of the cells that lanes read, int32 [B].

    Return None if only the device knows where the lanes' pages begin.
    """
    if origins.on_host is None:
        return None
    return (lanes.seq_lens.hi + (ahead - origins.on_host)).astype(np.int32, copy=False)


def _causal_lens(lanes: Lanes, origins: Origins, ahead: int | None) -> Callable[[], Tensor]:
    """Return what computes, on the device, how many cells each lane's last query sees, int32 [B].

    The last query stands `ahead` cells beyond the lane's start; None means the lane's width.
    """

    def compute() -> Tensor:
        if ahead is not None:
            return origins.since(lanes.starts) + ahead
        widths = lanes.widths if isinstance(lanes.widths, int) else lanes.counts
        return origins.since(lanes.starts) + widths

    return compute


def _causal_chunks(bias: Tensor, chunk: int, lanes: Lanes, origins: Origins) -> Tensor:
    """Apply `_chunks` to queries at the positions from each start on."""
    queries = torch.arange(bias.shape[1], device=bias.device)
    return _chunks(bias, chunk, lanes.starts.unsqueeze(1) + queries, origins, lanes.counts)


def _chunks(
    bias: Tensor, chunk: int, q_positions: Tensor, origins: Origins, counts: Tensor
) -> Tensor:
    """Hide from each query the columns before its own chunk.

    Args:
        bias: float32 [B, Q, C], 0 or -inf; columns are positions from `origins` on.
        chunk: positions of a chunk; the first begins at position 0.
        q_positions: int32 or int64 [B, Q].
        origins: the position of column 0.
        counts: int32 [B], queries that count; the rest must keep seeing column 0.
    """
    least = origins.since(q_positions - q_positions % chunk)
    padding = torch.arange(bias.shape[1], device=bias.device) >= counts.unsqueeze(1)
    columns = torch.arange(bias.shape[2], device=bias.device)
    return bias.masked_fill(columns < least.masked_fill(padding, 0).unsqueeze(2), -torch.inf)


def _causal(
    cache: KVCache,
    group: int,
    pages: Tensor,
    origins: Origins,
    lanes: Lanes,
    slots: Tensor,
) -> AttentionView:
    num_columns = pages.shape[1] * cache.page_sizes[group]
    widths, chunk = lanes.widths, cache.chunks[group]
    is_masked = _only_masked(cache, group)

    def bias_for(window: int | None) -> Tensor:
        num_queries = widths if isinstance(widths, int) else int(widths.max())
        bias = kernels.attention_bias(
            origins.since(lanes.starts),
            lanes.counts,
            num_columns,
            num_queries=num_queries,
            window=window,
            sink=_sink(cache, group, window),
        )
        return bias if chunk is None else _causal_chunks(bias, chunk, lanes, origins)

    # Plain decoding needs no mask if the host knows that all lanes read equally many cells.
    is_plain = isinstance(widths, int) and widths == 1 and not is_masked
    length, first = lanes.seq_lens.common if is_plain else None, origins.on_host
    decode_len = length + 1 - first if length is not None and isinstance(first, int) else None
    kv_lens = _kv_lens(lanes, origins, widths)
    return AttentionView(
        page_size=cache.page_sizes[group],
        write_slots=slots,
        read_pages=pages,
        q_lens=widths if isinstance(widths, int) else widths.tolist(),
        mask_for=bias_for,
        decode_len=decode_len,
        reader=cache.reader,
        kv_lens=kv_lens,
        is_causal=kv_lens is not None and lanes.seq_lens.is_exact and not is_masked,
        causal_lens=None if is_masked else _causal_lens(lanes, origins, None),
        attend_with=cache.attend_with,
        scratch=cache.scratch,
        most_pages=cache.most_pages(group, len(pages)),
    )
