"""`KVCache`: the KV buffers of every layer, and the page tables that the kernels read.

The slots of page 0 are the sink: padding writes there, and every query that reads it masks it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Ledger
from specpool.arrays import Int32
from specpool.capacity.layer_kv import LayerKV as LayerKV
from specpool.engine.memory.buffers import zeroed_buffer
from specpool.engine.memory.scratch import Scratch
from specpool.kernels.launch import prepare, runs_kernels
from specpool.kernels.transfer import upload


def first_cells(least: Int32, window: int, page_size: int, num_sinks: int = 0) -> Int32:
    """Return the first cell of the page in which a window begins, int32 [B].

    Behind the pages of a sink, return how many cells lie between the sink and that page.

    Args:
        least: int32 [B], the least query position of each row.
        window: cells that a query sees, its own included.
        page_size: slots per page.
        num_sinks: pages of the sink.
    """
    pages: Int32 = np.maximum(least - (window - 1), 0) // page_size
    cells: Int32 = np.maximum(pages - num_sinks, 0) * page_size
    return cells


@dataclass(frozen=True, slots=True)
class PageBounds:
    """How many pages a round of a graph reads at most.

    Attributes:
        num_lanes: the lanes of the round.
        of_rows: per group, the most pages of all rows together, each page once for every row that
            sees it; None if the group has no such bound.
        of_unused: per group, the most pages of an unused lane.
    """

    num_lanes: int
    of_rows: Sequence[int | None]
    of_unused: Sequence[int]


class KVCache:
    """The KV buffers of each layer and the page table of each group, all on the device.

    Only `apply_delta` writes the tables, once per step and before its forward. So a forward reads
    the tables as they were when its step was prepared.
    """

    def __init__(
        self,
        ledger: Ledger,
        layers: Sequence[LayerKV],
        layer_groups: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        attend_with: Callable[..., Tensor] | None = None,
    ) -> None:
        """Allocate zeroed buffers.

        Args:
            ledger: gives the groups' page sizes, page counts and tables.
            layers: what each layer stores.
            layer_groups: the group of each layer, `len(layers)` indices into `ledger.groups`.
            dtype: dtype of keys and values.
            device: where the buffers live.
            attend_with: the back end's `attend` for all views of these pages; None means torch's.

        Raises:
            ConfigError: the kernels cannot be built for the CUDA device, or the device has no room
                for the buffers.
        """
        if device.type == "cuda":
            prepare(device)
        self.device = device
        self.dtype = dtype
        self.attend_with = attend_with
        self.scratch = Scratch()  # one forward runs at a time
        self.page_sizes = [group.page_size for group in ledger.groups]
        self.windows = [group.window for group in ledger.groups]
        self.sinks = [group.sink for group in ledger.groups]
        self.num_sinks = [-(-group.sink // group.page_size) for group in ledger.groups]  # pages
        self.layer_groups = list(layer_groups)
        # Per group: the chunk size if its layers use chunked attention, else None. The probe
        # refuses groups that mix both.
        chunked = {g for g, layer in zip(layer_groups, layers, strict=True) if layer.is_chunked}
        self.chunks = [w if g in chunked else None for g, w in enumerate(self.windows)]
        self.max_context_len = ledger.max_context_len
        self._ledger = ledger
        slots = [(group.num_pages + 1) * group.page_size for group in ledger.groups]

        def buffer(group: int, num_heads: int, head_dim: int) -> Tensor:
            shape = (slots[group], num_heads, head_dim)
            return zeroed_buffer(
                shape, dtype, device, content="a layer's KV", options="kv_bytes or num_pages"
            )

        # Each [num_slots, num_kv_heads, head_dim]. Zeroed, because attention reads masked slots
        # and 0 * NaN is NaN.
        self.keys = [
            buffer(g, layer.num_kv_heads, layer.k_head_dim)
            for g, layer in zip(layer_groups, layers, strict=True)
        ]
        self.values = [
            buffer(g, layer.num_kv_heads, layer.v_head_dim)
            for g, layer in zip(layer_groups, layers, strict=True)
        ]
        # int32 [num_rows + 1, pages_per_row] per group
        self.tables = upload(device, *(ledger.full_table(g) for g in range(len(ledger.groups))))
        self._whole_groups: dict[int, kernels.Fields] = {}  # group -> all of its layers
        self._bounds: PageBounds | None = None
        # Output buffers of `read_pages` by widths: the current ones, and those that graphs use.
        self._gathered: dict[tuple[int, ...], kernels.Fields] = {}
        self._pinned: dict[tuple[int, ...], kernels.Fields] = {}
        # Address of a layer's keys -> its K and V as fields in which a page counts as one slot.
        self._by_page: dict[int, kernels.Fields] = {}
        if runs_kernels(device):
            for group, pair in zip(
                layer_groups, zip(self.keys, self.values, strict=True), strict=True
            ):
                pages = [b.view(ledger.groups[group].num_pages + 1, -1) for b in pair]
                self._by_page[pair[0].data_ptr()] = kernels.Fields.of(pages, 1)

    def fields(self, layers: Sequence[int]) -> kernels.Fields:
        """Return the keys and values of layers of one group, for moves in one launch."""
        page_size = self.page_sizes[self.layer_groups[layers[0]]]
        return kernels.Fields.of(self.buffers(layers), page_size)

    def buffers(self, layers: Sequence[int]) -> list[Tensor]:
        """Return the keys of these layers, then their values."""
        return [self.keys[i] for i in layers] + [self.values[i] for i in layers]

    def apply_delta(self, step: int) -> None:
        """Copy the table changes that preparing `step` made to the device's tables.

        Raises:
            OrderError: see `Ledger.take_delta`.
        """
        kernels.apply_table_deltas(self.tables, self._ledger.take_delta(step))
        self._ledger.ack_delta(step)

    def copy_pages(self, copies: npt.NDArray[np.int32]) -> None:
        """Apply a plan's page copies, int32 [n, 4]: (group, src page, dst page, tokens), in order.

        Call it before the step's forward. Copies arise when a forked row gets its own copy of a
        partly filled page.
        """
        for group in set(copies[:, 0].tolist()) - self._whole_groups.keys():
            layers = [i for i, g in enumerate(self.layer_groups) if g == group]
            if layers:
                self._whole_groups[group] = self.fields(layers)
            else:  # a target of recurrent layers alone has pages, but no KV
                copies = copies[copies[:, 0] != group]
        kernels.copy_pages(self._whole_groups, copies)

    def pages_of(
        self, group: int, rows: Tensor, least: Int32, ends: Int32
    ) -> tuple[Tensor, Tensor | int]:
        """Return the pages of each row that a forward's queries can see, and where they begin.

        In a window group the pages begin at the window of the first query, so that the read does
        not grow with the rows. The pages of a sink come before them.

        Args:
            group: the group of the pages.
            rows: int32 [B], on the device.
            least: int32 [B], on the host: a lower bound of the row's query positions.
            ends: int32 [B], on the host: an upper bound, exclusive.

        Returns:
            The pages, int32 [B, C], page 0 if a row has none; and the position that each row's
            pages begin at, int32 [B], or one number for all rows. With a sink it is how many cells
            were left out behind the sink: a later cell c stands at position c + that number.
        """
        table, size, window = self.tables[group], self.page_sizes[group], self.windows[group]
        if window is None:
            return table[:, : -(-int(ends.max()) // size)].index_select(0, rows), 0
        num_sinks = self.num_sinks[group]
        firsts = first_cells(least, window, size, num_sinks) // size
        num_columns = int((-(-ends // size) - firsts).max())
        first = int(firsts[0])
        if (firsts == first).all() and (first == 0 or num_sinks == 0):
            return table[:, first : first + num_columns].index_select(0, rows), first * size
        at = np.arange(num_columns)
        columns = np.where(at < num_sinks, at, firsts[:, None] + at)
        columns = np.minimum(columns, table.shape[1] - 1)
        index, origins = upload(self.device, columns.astype(np.int64), firsts * size)
        return table[rows.long().unsqueeze(1), index], origins

    def window_pages(
        self, group: int, rows: Tensor, starts: Tensor, num_cells: int
    ) -> tuple[Tensor, Tensor]:
        """Return the pages as `pages_of` does for a window group, from lengths on the device.

        Args:
            group: the group of the pages.
            rows: int32 [B], on the device.
            starts: int32 [B], on the device: the first query position of each lane.
            num_cells: the most cells from `starts` on that the lane's queries see.

        Returns:
            The pages, int32 [B, C], page 0 if a row has none; and the positions that they begin
            at, int32 [B].
        """
        table, size, window = self.tables[group], self.page_sizes[group], self.windows[group]
        assert window is not None
        num_sinks = self.num_sinks[group]
        firsts = torch.clamp(starts - (window - 1), min=0) // size
        # Enough columns for a window that begins anywhere in a page.
        num_columns = (window - 1 + num_cells + size - 2) // size + 1 + num_sinks
        at = torch.arange(num_columns, device=self.device)
        if num_sinks:
            firsts = torch.clamp(firsts - num_sinks, min=0)
        columns = firsts.unsqueeze(1) + at
        if num_sinks:
            columns = torch.where(at < num_sinks, at, columns)
        index = columns.clamp(max=table.shape[1] - 1)
        return table[rows.long().unsqueeze(1), index], (firsts * size).int()

    @property
    def reader(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """`read_pages` if kernels run; None means torch's indexing reads the pages."""
        return self.read_pages if self._by_page else None

    def read_pages(self, keys: Tensor, values: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Read whole pages of one layer with one launch of `gather_kv`.

        Args:
            keys: [num_slots, Hkv, Dk], an element of `self.keys`.
            values: [num_slots, Hkv, Dv], of the same layer.
            pages: int32 [n].

        Returns:
            [n, P * Hkv * Dk] and [n, P * Hkv * Dv], valid until the next call.
        """
        fields = self._by_page[keys.data_ptr()]
        space = self._pinned.get(fields.widths)
        if space is None or space.num_slots < len(pages):
            space = self._gathered.get(fields.widths)
        if space is None or space.num_slots < len(pages):
            # Some extra room, so that a growing text does not allocate anew at each step.
            space = self._gathered[fields.widths] = fields.empty(len(pages) + len(pages) // 8)
        kernels.gather_kv(fields, pages, out=space)
        rows = [buffer[: len(pages)].view(self.dtype) for buffer in space.buffers]
        return rows[0], rows[1]

    @contextlib.contextmanager
    def attending_with(self, attend: Callable[..., Tensor]) -> Iterator[None]:
        """Give the views that are built within the block another `attend`."""
        before, self.attend_with = self.attend_with, attend
        try:
            yield
        finally:
            self.attend_with = before

    @contextlib.contextmanager
    def reading_within(self, bounds: PageBounds | None) -> Iterator[None]:
        """Let the views that are built within the block read no more pages than `bounds` says.

        None if their pages are not bounded.
        """
        before, self._bounds = self._bounds, bounds
        try:
            yield
        finally:
            self._bounds = before

    def most_pages(self, group: int, num_lanes: int) -> int | None:
        """Return the most pages that the lanes of a view of a group read; None if not bounded.

        A view may have several lanes for each of the round, as for the branches of a tree.
        """
        bounds = self._bounds
        of_rows = None if bounds is None else bounds.of_rows[group]
        if bounds is None or of_rows is None:
            return None
        max_pages = of_rows + bounds.num_lanes * bounds.of_unused[group]
        return max_pages * -(-num_lanes // bounds.num_lanes)

    @contextlib.contextmanager
    def trying_reads(self) -> Iterator[None]:
        """Drop the output buffers of `read_pages` that were made in the block if it fails."""
        before = dict(self._gathered)
        try:
            yield
        except BaseException:
            self._gathered = before
            raise

    def pin_reads(self) -> None:
        """Keep the current output buffers of `read_pages`: graphs will hold their addresses."""
        self._pinned |= self._gathered
        self._gathered = {}

    def scrub(self, group: int, pages: npt.NDArray[np.int32]) -> None:
        """Zero pages, int32 [n], in every layer of a group, so that no NaN outlives its request."""
        size = self.page_sizes[group]
        (index,) = upload(self.device, pages.astype(np.int64))
        layers = [i for i, g in enumerate(self.layer_groups) if g == group]
        for buffer in self.buffers(layers):
            buffer.view(-1, size * buffer.shape[1] * buffer.shape[2])[index] = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in (*self.keys, *self.values))
