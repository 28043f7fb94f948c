"""`Book`, for level `rows`: one `specpool.Ledger` for SGLang's rows and its KV slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specpool import Group, Ledger, OutOfPages, Shape, SpecpoolError
from specpool._core import sizing_row_width
from specpool.plugins import record
from specpool.plugins.sglang import limits
from specpool.plugins.sglang.allocator import AllocatorError, upload
from specpool.slot_table import decode_into, launch_into, round_slots, slot_ranges

_I32 = npt.NDArray[np.int32]
#: The ledger's index of the one shape.
ROUND = 1
#: Up to this many numbers are read from a tensor as a list.
MAX_LIST = 16


class Book:
    """The ledger of a row pool and an allocator, and the rounds whose results are not in yet.

    SGLang publishes its settings, makes the row pool, then the allocator: `Book.latest` joins them.
    The ledger is built when all three are there. There is one stream, so whatever is launched comes
    before all that follows: each step is complete at once, and no page waits behind a fence.
    """

    latest: Book | None = None

    def __init__(self, pool: Any) -> None:
        limits.check()
        self.pool = pool
        self.allocator: Any = None
        #: SGLang's table, also while the tree reads the one on the host.
        self.table: torch.Tensor = pool.req_to_token
        table = self.table
        #: What SGLang's table on an accelerator holds, on the host; None where it is there itself.
        self.mirror = None if table.is_cpu else torch.zeros(table.shape, dtype=table.dtype)
        #: The slots of each row, int32 [rows, slots of a row], on the host. SGLang makes its table
        #: once, so the array of it is made once, too: `cells` is the same memory.
        self.host_table = table if self.mirror is None else self.mirror
        self.cells: _I32 = self.host_table.numpy()
        #: The last batch's rows: SGLang's tensor and the array of it.
        self._batch_rows: tuple[torch.Tensor | None, Any] = None, None
        #: Launched rounds and how many rows each has, oldest first.
        self.rounds: deque[tuple[int, int]] = deque()
        #: The batch whose prefill is being allocated.
        self.batch: Any = None
        #: The row whose tokens the tree is inserting, if any.
        self.inserted_row: int | None = None
        #: Pages that the tree dropped as duplicates; None outside an insert.
        self.duplicates: list[int] | None = None
        Book.latest = self

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger; it is made at its first use."""
        limits.check()
        allocator, shape = self.allocator, limits.shape()
        if allocator is None or not allocator.num_pages:
            raise AllocatorError("the row pool has no allocator with a page")
        kv = Group(
            "kv",
            page_size=allocator.page_size,
            num_pages=allocator.num_pages,
            hosts_drafts=True,
            layout="holey",
        )
        path = record.log_path("SPECPOOL_SGLANG_RECORD")
        ledger = Ledger(
            [kv],
            [shape],
            num_rows=self.pool.size,
            max_context_len=self._max_context_len(shape),
            overlap_depth=1,
            page_fencing=False,
            record=path,
        )
        if path:
            record.close_at_exit(ledger)
        return ledger

    def _max_context_len(self, shape: Shape) -> int:
        """The longest text whose round fits into SGLang's row, and into the pool."""
        page_size = self.allocator.page_size
        max_width = min(self.pool.req_to_token.shape[1], self.allocator.num_pages * page_size)

        def width(length: int) -> int:
            return sizing_row_width(
                [shape],
                page_size=page_size,
                max_context_len=length,
                overlap_depth=1,
                hosts_drafts=True,
                layout="holey",
            )

        low, high = 1, max_width
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if width(middle) <= max_width else (low, middle - 1)
        if low < 2:
            raise AllocatorError(f"no round of {shape} fits into rows of {max_width} slots")
        return low

    def clear(self) -> None:
        """Begin anew, as SGLang's flush does.

        Raises:
            AllocatorError: a round is in flight.
        """
        if self.rounds:
            raise AllocatorError(f"clear with {len(self.rounds)} rounds in flight")
        ledger = vars(self).pop("ledger", None)
        if ledger is not None:
            ledger.close()

    # The table of rows.

    @contextmanager
    def table_on_host(self) -> Iterator[None]:
        """Within it SGLang reads and writes the table on the host."""
        table, self.pool.req_to_token = self.pool.req_to_token, self.host_table
        try:
            yield
        finally:
            self.pool.req_to_token = table

    def publish(self, rows: _I32, starts: _I32, ends: _I32) -> None:
        """Copy cells `starts` to `ends` of each row to the accelerator's table, if there is one.

        It is one copy, whatever the number of rows, and it is not waited for.
        """
        lens = ends - starts
        if self.mirror is None or not lens.any():
            return
        first = rows.astype(np.int64) * self.mirror.shape[1] + starts
        cells = np.repeat(first - (np.cumsum(lens) - lens), lens) + np.arange(lens.sum())
        slots = self.cells.reshape(-1)[cells]
        down = upload(np.stack((cells, slots)), self.pool.device)
        self.table.view(-1)[down[0]] = down[1].to(torch.int32)

    # What a step does.

    def rows_of(self, rows: torch.Tensor) -> _I32:
        """Return a batch's rows, int32 [requests], from SGLang's tensor of int64 on the host.

        SGLang uses one tensor for many steps, and converting it takes longer than a small call of
        the ledger. So the array of the last tensor is kept.
        """
        last, array = self._batch_rows
        if rows is not last:
            array = rows.numpy().astype(np.int32)
            self._batch_rows = rows, array
        view: _I32 = array
        return view

    def extend(self, rows: _I32, starts: _I32, ends: _I32) -> torch.Tensor | None:
        """Grow the rows to `ends` tokens for a prefill; return the new slots, int64, lane by lane.

        None means that pages lack, and nothing has changed.

        Raises:
            AllocatorError: a row ends before its lane of `starts`, or the ledger refuses.
        """
        ledger = self.ledger
        try:
            lens = ledger.resolved_len[rows]
            if (lens < starts).any():
                raise AllocatorError(
                    f"rows {rows.tolist()} have {lens.tolist()} tokens, the batch begins at "
                    f"{starts.tolist()}"
                )
            for lane in np.flatnonzero(lens > starts).tolist():
                ledger.trim(int(rows[lane]), int(starts[lane]))
            plan = ledger.prepare_extend(rows, ends)
            launch_into(ledger, plan.step, self.cells)
        except OutOfPages:
            return None
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error
        page_size = self.allocator.page_size
        slots = slot_ranges(ledger.page_table(0), page_size, rows, starts, ends - starts)
        if self.mirror is None:
            return torch.from_numpy(slots)
        # SGLang writes the cells of the text; those behind it, to the end of a page, it does not.
        self.publish(rows, ends, ledger.allocated_len(0)[rows])
        return upload(slots, self.pool.device)

    def tokens_required(self, rows: _I32) -> int:
        """Return the slots that the next round of these rows will take."""
        return round_slots(self.ledger, rows, ROUND)

    def decode(self, rows: _I32) -> list[int] | None:
        """Claim and launch a round of each row; return the slots that each row has then.

        None means that pages lack, and nothing has changed.

        Raises:
            AllocatorError: the ledger refuses; nothing has changed.
        """
        ledger = self.ledger
        old_lens = None if self.mirror is None else ledger.allocated_len(0)[rows]
        try:
            step, held = decode_into(ledger, rows, ROUND, self.cells)
        except OutOfPages:
            return None
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error
        self.rounds.append((step, len(held)))
        if old_lens is not None:
            self.publish(rows, old_lens, np.array(held, np.int32))
        return held

    def resolve(self, accept_lens: torch.Tensor) -> None:
        """Count the oldest round's tokens, as the device accepted them.

        A grammar may keep fewer, even none: then its request ends, and SGLang's own length stays
        below the row's. Lanes whose row was given back or cut are dropped by the ledger.
        """
        if not self.rounds:
            raise AllocatorError("the result of a round that was not launched")
        step, num_rows = self.rounds.popleft()
        # A list of a few numbers is made in less time than an array on the tensor.
        lens = accept_lens.tolist() if num_rows <= MAX_LIST else accept_lens.numpy()
        try:
            self.ledger.resolve(step, lens)
        except SpecpoolError as error:
            raise AllocatorError(str(error)) from error
