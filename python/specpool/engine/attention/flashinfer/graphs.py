"""flashinfer within CUDA graphs: wrappers whose buffers stay, planned by the host before a replay.

A graph repeats its launches, so everything that changes from round to round lies in buffers. The
graph itself fills two of them: the pages to read, from the device's tables, and a mask of bits,
from the device's lengths. The host plans for upper bounds of the lengths, because it may not know
them yet; the mask hides what lies beyond. A plan has room for some rounds, so that most replays
need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specpool.arrays import Int32
from specpool.engine.attention.view import AttentionView
from specpool.kernels.transfer import mark, overwrite

# Tokens that a plan leaves each lane to grow: at 1,500 tokens 4 % of the reads, half on average.
_SLACK_TOKENS = 64
# Plan again once a plan reads this many times what the lanes hold.
_MOST_WASTE = 1.15
# Bytes of a wrapper's indices: 4 per block of its launch, and a launch has a few thousand blocks.
_INT_WORKSPACE_BYTES = 2 << 20
# Blocks from which a launch fills a GPU, so that no lane's reads need to be split among blocks.
_MANY_BLOCKS = 264
_TILE = 64  # rows of queries and heads that a block computes


class Wrapper:
    """A flashinfer wrapper for one kind of view within graphs, and its buffers.

    Several graphs share it: those of one batch size differ in their bound alone, and one graph runs
    at a time.

    Attributes:
        num_columns: the most pages of a lane.
        counts: int32 [B], on the host: the pages of each lane that are planned for.
    """

    def __init__(
        self,
        library: Any,
        workspace: Tensor,
        view: AttentionView,
        num_columns: int,
        options: dict[str, Any],
    ) -> None:
        """Allocate the buffers for lanes of up to `num_columns` pages.

        Args:
            library: the flashinfer module.
            workspace: uint8, shared by all wrappers.
            view: a view of the kind.
            num_columns: the most pages of a lane; a multiple of `_whole_bytes`.
            options: the arguments of `plan` that the layer gives.
        """
        device, lanes = view.write_slots.device, view.num_lanes
        self.num_columns, self._page_size = num_columns, view.page_size
        self._num_queries, self._options = view.max_q_len, options
        self._qo_indptr = torch.arange(lanes + 1, dtype=torch.int32) * view.max_q_len
        self.counts = np.zeros(lanes, np.int32)
        self._planned: Any = None
        cells = num_columns * view.page_size

        def buffer(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # One more than is read: what no lane reads is written there.
        self._kv_indices = buffer(lanes * num_columns + 1)
        self._mask = buffer(lanes * view.max_q_len * cells // 8 + 1, torch.uint8)
        self._kv_indptr, self._mask_indptr = buffer(lanes + 1), buffer(lanes + 1)
        self._bits = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=device)
        self._library_wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(lanes + 1),
            paged_kv_indptr_buf=self._kv_indptr,
            paged_kv_indices_buf=self._kv_indices,
            paged_kv_last_page_len_buf=buffer(lanes),
            custom_mask_buf=self._mask,
            mask_indptr_buf=self._mask_indptr,
            backend="fa2",  # the only kernels with custom masks
        )
        # The library's own has 8 MiB on the device and 8 MiB of pinned memory, for each wrapper.
        self._library_wrapper.reset_workspace_buffer(
            workspace, buffer(_INT_WORKSPACE_BYTES, torch.uint8)
        )

    def plan(self, counts: Int32) -> None:
        """Plan for `counts` pages of each lane, int32 [B], each a multiple of `_whole_bytes`.

        Not within a capture.
        """
        if self._planned is not None:
            self._planned.synchronize()  # the last plan's copy from pinned memory
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        last = torch.full((len(counts),), self._page_size, dtype=torch.int32)
        # `causal` is off: the mask's buffer makes the wrapper use it, whatever a plan is given.
        self._library_wrapper.plan(
            self._qo_indptr,
            torch.from_numpy(indptr),
            self._kv_indices[:0],  # the graph fills them in
            last,
            causal=False,
            **self._options,
        )
        row_bytes = counts.astype(np.int64) * self._page_size // 8
        ends = np.concatenate([[0], np.cumsum(row_bytes * self._num_queries)]).astype(np.int32)
        overwrite(self._mask_indptr, ends)
        self.counts = counts
        self._planned = mark(self._kv_indices.device)

    def fill(self, view: AttentionView, window: int | None) -> None:
        """Write the lanes' pages and mask for the current plan, all on the device."""
        columns = view.read_pages.shape[1]
        room = -columns % _whole_bytes(self._page_size)
        pages = pad(view.read_pages.int(), (0, room))
        firsts, counts = self._kv_indptr[:-1].long(), self._kv_indptr.diff().long()
        column = torch.arange(columns + room, device=pages.device)
        end = len(self._kv_indices) - 1
        at = torch.where(column < counts.unsqueeze(1), firsts.unsqueeze(1) + column, end)
        self._kv_indices.scatter_(0, at.view(-1), pages.view(-1))
        mask = view.mask(window)
        seen = pad(mask if mask.dtype == torch.bool else mask == 0, (0, room * self._page_size))
        lanes, queries, cells = seen.shape
        packed = (seen.view(lanes, queries, cells // 8, 8) * self._bits).sum(-1, dtype=torch.uint8)
        row_bytes = (counts * self._page_size // 8).view(-1, 1, 1)
        row = torch.arange(queries, device=pages.device).view(1, -1, 1)
        byte = torch.arange(cells // 8, device=pages.device).view(1, 1, -1)
        at = self._mask_indptr[:-1].long().view(-1, 1, 1) + row * row_bytes + byte
        at = torch.where(byte < row_bytes, at, len(self._mask) - 1)
        self._mask.scatter_(0, at.view(-1), packed.view(-1))

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        """Attend; see flashinfer."""
        out: Tensor = self._library_wrapper.run(q, pages)
        return out


def _whole_bytes(page_size: int) -> int:
    """Return the least number of pages whose cells fill whole bytes of a mask."""
    return 8 // math.gcd(8, page_size)


@dataclass(slots=True)
class _Use:
    """One view of a graph, with its wrapper.

    Attributes:
        wrapper: what reads it.
        page_size: slots per page, P.
        num_columns: the pages of a lane that the graph can fill in.
        reach: cells that a lane reads beyond its root; None if it reads the same pages in each
            round, as in a window whose place only the device knows.
    """

    wrapper: Wrapper
    page_size: int
    num_columns: int
    reach: int | None

    def plan(self, hi: Int32) -> None:
        """Plan for roots up to `hi`, int32 [B], unless the plan that stands serves them.

        The view may have several lanes for each row, the branches of a tree, one after the other.
        """
        unit, planned = _whole_bytes(self.page_size), self.wrapper.counts
        hi = np.repeat(hi, len(planned) // len(hi))

        def whole(num_tokens: Int32) -> Int32:
            counts = -(-num_tokens // self.page_size)
            return np.minimum(-(-counts // unit) * unit, self.num_columns).astype(np.int32)

        if self.reach is None:
            min_counts = max_counts = np.full(len(hi), self.num_columns, np.int32)
        else:
            min_counts = whole(hi + self.reach)
            max_counts = whole(hi + (self.reach + _SLACK_TOKENS))
        fits = (min_counts <= planned).all() and int(planned.max()) <= self.num_columns
        if not fits or planned.sum() > _MOST_WASTE * max_counts.sum():
            self.wrapper.plan(max_counts)


WrapperOf = Callable[[int, AttentionView, int, Hashable], Wrapper]
"""(place of the view in the graph, view, columns of a lane, layer) -> a wrapper with room."""


class Recorder:
    """The views of one graph, in the order in which its work asks for them.

    Attributes:
        attend: the `attend` for the views of the graph's work.
    """

    def __init__(self, bound: int, wrapper_of: WrapperOf, attend: Callable[..., Tensor]) -> None:
        """Start without views.

        Args:
            bound: the greatest root position of the graph.
            wrapper_of: makes a wrapper, or gives one that another graph has.
            attend: as `FlashInfer.attend`, with this recorder as the argument `recorder`.
        """
        self.attend = partial(attend, recorder=self)
        self._bound, self._wrapper_of = bound, wrapper_of
        self._uses: list[_Use] = []
        self._use_index = 0

    def restart(self) -> None:
        """Begin the work anew."""
        self._use_index = 0

    def wrapper(self, view: AttentionView, layer: Hashable, window: int | None) -> Wrapper:
        """Return the wrapper of a view and kind of layer, with its pages and mask filled in.

        Layers of one kind share it. The first run of the work plans, so it must not be captured.
        """
        key = (Recorder, layer)
        known_wrapper = view.plans.get(key)
        if isinstance(known_wrapper, Wrapper):
            return known_wrapper
        if self._use_index == len(self._uses):
            self._uses.append(self._use(view, layer))
        use = self._uses[self._use_index]
        self._use_index += 1
        use.wrapper.fill(view, window)
        view.plans[key] = use.wrapper
        return use.wrapper

    def _use(self, view: AttentionView, layer: Hashable) -> _Use:
        size = view.page_size
        columns = view.read_pages.shape[1]
        columns += -columns % _whole_bytes(size)
        reach = None if view.kv_lens is None else int(view.kv_lens.max()) - self._bound
        wrapper = self._wrapper_of(self._use_index, view, columns, layer)
        use = _Use(wrapper, size, columns, reach)
        wrapper.plan(np.full(view.num_lanes, columns, np.int32))
        return use

    def plan(self, hi: Int32) -> None:
        """Plan every view for roots up to `hi`, int32 [B]; most plans serve several rounds."""
        for use in self._uses:
            use.plan(hi)


def splits_no_lane(num_lanes: int, num_queries: int, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether a launch has blocks enough without splitting any lane's reads."""
    tiles = -(-num_queries * (num_heads // num_kv_heads) // _TILE)
    return num_lanes * tiles * num_kv_heads >= _MANY_BLOCKS
