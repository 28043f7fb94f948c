"""`AttentionView`: the slots and cells that one forward writes and reads in one group.

A view is built once per step and group, and every layer of the group uses it. Masks, page lists and
padding do not change from layer to layer, so the view computes them once and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.arrays import Int64
from specpool.engine.memory.scratch import Scratch
from specpool.errors import ShapeError
from specpool.kernels.transfer import upload

Mask = Tensor | NDArray[np.bool_] | NDArray[np.float32]
Attend = Callable[..., Tensor]
"""A back end's attention of one view, with the arguments of `specpool.engine.attention.attend`."""
Reader = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(k_buffer, v_buffer, page ids [n]) -> the pages' keys and values, [n, P * Hkv * D] each."""


@dataclass(slots=True)
class Reads:
    """The cells that layers of one window read, and which query may see which cell."""

    pages: Tensor | None  # [B * C'], page ids to gather; None: the cells lie in one run
    first_slot: int  # first slot of the run; unused otherwise
    lo: int  # columns [lo, hi) of the gathered rows are read
    hi: int
    mask: Tensor | None  # float [B, 1, Q, hi - lo], 0 or -inf; None: every column is visible
    reader: Reader | None = None  # None: torch's indexing
    scratch: Scratch | None = None  # memory for the result of torch's indexing; None: fresh memory
    folded: dict[int, Tensor] = field(default_factory=dict)  # query heads per KV head -> mask

    def gather(
        self, k_buffer: Tensor, v_buffer: Tensor, num_lanes: int, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Read both buffers ``[num_slots, Hkv, D]`` as ``[B, Hkv, hi - lo, D]``."""
        if self.pages is None:
            return self._run(k_buffer), self._run(v_buffer)
        if self.reader is not None:
            keys, values = self.reader(k_buffer, v_buffer, self.pages)
        else:
            keys = self._select("keys", k_buffer, self.pages, page_size)
            values = self._select("values", v_buffer, self.pages, page_size)
        return self._cut(keys, k_buffer, num_lanes), self._cut(values, v_buffer, num_lanes)

    def _select(self, name: str, buffer: Tensor, pages: Tensor, page_size: int) -> Tensor:
        # One index per page, not per slot: up to 40 % faster on the CPU.
        rows = buffer.view(-1, page_size * buffer.shape[1] * buffer.shape[2])
        if self.scratch is None:
            return rows.index_select(0, pages)
        out = self.scratch.take(name, len(pages), rows.shape[1], rows.dtype)
        return torch.index_select(rows, 0, pages, out=out)

    # `as_strided` replaces five calls that would view, cut and transpose.

    def _run(self, buffer: Tensor) -> Tensor:
        _, heads, dim = buffer.shape
        token = heads * dim
        first = buffer.storage_offset() + (self.first_slot + self.lo) * token
        return buffer.as_strided((1, heads, self.hi - self.lo, dim), (0, dim, token, 1), first)

    def _cut(self, rows: Tensor, buffer: Tensor, num_lanes: int) -> Tensor:
        _, heads, dim = buffer.shape
        token = heads * dim
        lane = rows.numel() // num_lanes
        first = rows.storage_offset() + self.lo * token
        return rows.as_strided(
            (num_lanes, heads, self.hi - self.lo, dim), (lane, dim, token, 1), first
        )

    def folded_mask(self, groups: int) -> Tensor | None:
        """Return the mask ``[B, 1, groups * Q, hi - lo]`` for folded query heads."""
        if self.mask is None or groups == 1 or self.mask.shape[2] == 1:  # one query broadcasts
            return self.mask
        mask = self.folded.get(groups)
        if mask is None:
            mask = self.folded[groups] = torch.cat([self.mask] * groups, 2)
        return mask


@dataclass(frozen=True, slots=True)
class TokenReads:
    """The slots that each query reads, in order of position."""

    kv_indptr: NDArray[np.int32]  # int32 [T + 1], host
    kv_indices: Tensor  # int32 [kv_indptr[-1] or more], slots, device


@dataclass(frozen=True, slots=True)
class OwnCells:
    """The cells behind a lane's prefix, each of which some queries see.

    All queries of the lane see its whole prefix, the cells ``[0, start)``.

    Attributes:
        starts: returns int32 [B], on the device.
        mask: bool [B, Q, W], on the device: query i sees cell ``start + j``.
        slots: (the view) -> int64 [B, W], the slot of each of these cells; any slot where no query
            of the lane sees the cell. It takes the view, because a function that holds its view
            would keep it, with memory of the device, until the garbage collector runs.
    """

    starts: Callable[[], Tensor]
    mask: Tensor
    slots: Callable[[AttentionView], Tensor]


@dataclass(slots=True)
class AttentionView:
    """The slots and cells that one forward writes and reads in ONE group.

    NOTE: cells past a lane's length are read and masked, and masking does not undo NaN or infinity.
    So every page that is handed out must hold finite values (zero the pages of a failed request).

    Attributes:
        page_size: slots per page, P.
        write_slots: int64 [T], the slot of each new token, lane after lane.
        read_pages: int32 or int64 [B, C] page ids. Column ``c * P + o`` of a gathered row is in-row
            position ``c * P + o``. Page 0, the sink, pads.
        q_lens: queries of each lane, or one int if all lanes have as many. Their sum is T, or less
            if the KV of some tokens is only written.
        mask_for: window -> [B, Q, C * P] with Q = max(q_lens): which columns a query sees, with
            windows by position, as bool or as a float32 bias (0 or -inf). Rows past a lane's q_len
            are read but their result is dropped. Called at most once per distinct window, and not
            at all if ``decode_len`` is set.
        decode_len: set only if each lane has one query and all of them see exactly the in-row
            positions ``[max(0, decode_len - window), decode_len)``, as in plain decoding at equal
            lengths. The read is then cut there and no mask is built.
        reader: reads whole pages, by int32 page ids; None means torch's indexing does.
        kv_lens: int32 [B], on the host: no query of a lane sees a column from there on; None =
            C * P.
        is_causal: query i of a lane sees exactly the columns up to ``kv_len - q_len + i`` that
            its window does not hide.
        causal_lens: returns int32 [B], on the device: the same rule with these lengths, which the
            host need not know; None if the queries see other columns.
        own_cells: what the mask without a window shows, as a prefix and the cells behind it; None
            if it shows other cells.
        read_tokens: returns the same reads as slots per query, for draft branches that read
            different slots of one lane; None if not known.
        attend_with: the back end's `attend`; None means torch's.
        scratch: memory for the result of torch's indexing; None means fresh memory.
        most_pages: an upper bound of the pages that all lanes see together, each page once for
            every lane that sees it; None means what ``kv_lens`` says.

    Raises:
        ShapeError: sizes do not fit together.
    """

    page_size: int
    write_slots: Tensor
    read_pages: Tensor
    q_lens: int | Sequence[int]
    mask_for: Callable[[int | None], Mask]
    decode_len: int | None = None
    reader: Reader | None = None
    kv_lens: NDArray[np.int32] | None = None
    is_causal: bool = False
    causal_lens: Callable[[], Tensor] | None = None
    own_cells: OwnCells | None = None
    read_tokens: Callable[[], TokenReads] | None = None
    attend_with: Attend | None = None
    scratch: Scratch | None = None
    most_pages: int | None = None
    num_lanes: int = field(init=False)  # B
    max_q_len: int = field(init=False)  # Q
    num_queries: int = field(init=False)  # the sum of the q_lens
    pad_index: Tensor | None = field(init=False, default=None)  # int64 [B * Q], token or 0
    unpad_index: Tensor | None = field(init=False, default=None)  # int64 [T], into B * Q
    _reads: dict[tuple[int | None, torch.dtype], Reads] = field(init=False, default_factory=dict)
    # What back ends compute once per view, by their own keys.
    plans: dict[Hashable, object] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ShapeError(f"page_size {self.page_size}, must be at least 1")
        if self.read_pages.ndim != 2:
            raise ShapeError(f"read_pages is [B, C], got {list(self.read_pages.shape)}")
        num_lanes, num_tokens = self.read_pages.shape[0], self.write_slots.shape[0]
        q_lens = self.q_lens
        if not isinstance(q_lens, int):
            if len(q_lens) != num_lanes or num_lanes == 0:
                raise ShapeError(f"{len(q_lens)} q_lens for {num_lanes} lanes of read_pages")
            total, widest, narrowest = sum(q_lens), max(q_lens), min(q_lens)
            if narrowest < 0:
                raise ShapeError(f"q_lens {narrowest} of a lane, must be at least 0")
            if narrowest == widest:
                q_lens = widest
        else:
            total, widest = q_lens * num_lanes, q_lens
        if not 1 <= total <= num_tokens:
            raise ShapeError(f"q_lens add up to {total}, write_slots has {num_tokens} entries")
        if self.decode_len is not None:
            width = self.read_pages.shape[1] * self.page_size
            if q_lens != 1 or not 0 < self.decode_len <= width:
                raise ShapeError(
                    f"decode_len {self.decode_len} needs one query per lane and 1..={width} columns"
                )
        self.q_lens, self.num_lanes, self.max_q_len = q_lens, num_lanes, widest
        self.num_queries = total
        if not isinstance(q_lens, int):
            self._build_padding(q_lens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return self.write_slots.shape[0]

    def _build_padding(self, q_lens: Sequence[int]) -> None:
        """Build the indices that pad ragged lanes to Q queries each, and remove the padding."""
        lens = np.asarray(q_lens, dtype=np.int64)
        offset = np.arange(self.max_q_len)
        real = offset < lens[:, None]
        first = np.cumsum(lens) - lens
        pad = np.where(real, first[:, None] + offset, 0).reshape(-1)
        self.pad_index, self.unpad_index = upload(
            self.write_slots.device, pad, np.flatnonzero(real)
        )

    def reads(self, window: int | None, dtype: torch.dtype) -> Reads:
        """Return the cells that a layer with this ``window`` reads; computed once per window."""
        key = (window, dtype)
        reads = self._reads.get(key)
        if reads is None:
            reads = self._reads[key] = self._build_reads(window, dtype)
        return reads

    def _build_reads(self, window: int | None, dtype: torch.dtype) -> Reads:
        size, pages = self.page_size, self.read_pages
        width = pages.shape[1] * size
        if window is not None and window >= width:
            return self.reads(None, dtype)  # the window hides nothing: share the full mask
        lo, hi, mask = 0, width, None
        if self.decode_len is None:
            mask = self._additive_mask(window, dtype)
        else:
            # [pages below the window, not read) | first .. last: the pages read
            lo = 0 if window is None else max(0, self.decode_len - window)
            first, last = lo // size, (self.decode_len - 1) // size
            pages = pages[:, first : last + 1]
            lo, hi = lo - first * size, self.decode_len - first * size
        if self.reader is not None:
            # One column of a wider table is not contiguous, and `reshape` would not copy it.
            return Reads(pages.reshape(-1).contiguous(), 0, lo, hi, mask, self.reader)
        return self._reads_of(pages, lo, hi, mask)

    def run_of(self, lane: int, end: int) -> Reads:
        """Return the reads of one lane's columns [0, end), without a mask or reader."""
        pages = self.read_pages[lane : lane + 1, : -(-end // self.page_size)]
        return self._reads_of(pages, 0, end, None)

    def _reads_of(self, pages: Tensor, lo: int, hi: int, mask: Tensor | None) -> Reads:
        run = _consecutive(pages)
        if run is not None:
            return Reads(None, run * self.page_size, lo, hi, mask)
        return Reads(pages.reshape(-1).long(), 0, lo, hi, mask, scratch=self.scratch)

    def mask(self, window: int | None) -> Tensor:
        """Return the result of `mask_for` on the device, bool or float32 [B, Q, C * P].

        Raises:
            ShapeError: `mask_for` gave another dtype or shape.
        """
        mask = torch.as_tensor(self.mask_for(window), device=self.write_slots.device)
        expected = [self.num_lanes, self.max_q_len, self.read_pages.shape[1] * self.page_size]
        if list(mask.shape) != expected or mask.dtype not in (torch.bool, torch.float32):
            raise ShapeError(
                f"mask_for({window}) is {mask.dtype} {list(mask.shape)}, expected bool or float32"
                f" {expected}"
            )
        return mask

    def _additive_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask as float [B, 1, Q, C * P]; SDPA would convert bool in every layer."""
        mask = self.mask(window)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        return mask.to(dtype).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class JoinedView:
    """Several views of one group that share a forward; their tokens follow one another.

    Attributes:
        views: such as one of prompts and one of trees. No lane of one view may read cells that a
            lane of another view writes.
    """

    views: Sequence[AttentionView]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all views."""
        return sum(view.num_tokens for view in self.views)


View = AttentionView | JoinedView


def first_columns(counts: NDArray[np.integer], num_columns: int) -> Int64:
    """Return the entries of the first `counts` columns of each row of a table, row after row.

    Entry c of row b of the flattened table is `b * num_columns + c`; the result is int64
    [sum(counts)].
    """
    ends = np.cumsum(counts, dtype=np.int64)
    shifts = np.arange(len(counts)) * num_columns - (ends - counts)
    return np.repeat(shifts, counts) + np.arange(ends[-1])


def _consecutive(pages: Tensor) -> int | None:
    """Return the first page if there is one lane and its pages are consecutive, else None.

    Consecutive pages can be read in place. On a GPU the answer is None, because looking would wait
    for the device.
    """
    if pages.shape[0] != 1 or pages.device.type != "cpu":
        return None
    row = pages[0].tolist()
    return row[0] if row == list(range(row[0], row[0] + len(row))) else None


@dataclass(slots=True)
class AttentionBatch:
    """The attention inputs of one forward: the views of its groups, and each layer's buffers.

    Attributes:
        views: one per group in use.
        kv: layer index -> (k_buffer [num_slots, Hkv, Dk], v_buffer [num_slots, Hkv, Dv], view).
        window: the most keys that a query of any layer sees; None means what the layer says.
    """

    views: Sequence[View]
    kv: Sequence[tuple[Tensor, Tensor, View]] | Mapping[int, tuple[Tensor, Tensor, View]]
    window: int | None = None

    def window_of(self, layer_window: int | None) -> int | None:
        """Return the narrower of a layer's window and the batch's; None if neither has one."""
        return min(
            (window for window in (layer_window, self.window) if window is not None), default=None
        )
