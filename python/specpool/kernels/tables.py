"""Launchers of `cuda/tables.cu`: updates of page tables, and slots of rows and positions.

Twins: `specpool.kernels.twins`. A twin refuses bad values, such as rows outside the table. A kernel
maps them to the sink, because device values are not read before a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specpool._core as _core
from specpool.errors import ShapeError
from specpool.kernels.checks import (
    THREADS,
    Table,
    blocks,
    capacity,
    i32,
    is_holey,
    number,
    output,
    outputs,
    upper_bounds,
)
from specpool.kernels.launch import launch, runs_kernels
from specpool.kernels.transfer import upload
from specpool.kernels.with_twin import with_twin


@with_twin(_core.apply_table_delta)
def apply_table_delta(page_table: Tensor, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
    """Write pages[i] into page_table[rows[i], columns[i]].

    Args:
        page_table: int32 [num_rows + 1, pages_per_row], written.
        rows: int32 [n], in [1, num_rows].
        columns: int32 [n]; no (row, column) twice.
        pages: int32 [n].
    """
    table = Table(page_table, 1)
    n = table.lanes("rows", rows).shape[0]
    entry = (rows, table.lanes("columns", columns, n), table.lanes("pages", pages, n))
    launch("apply_table_delta", blocks(n), (THREADS,), (*table.args[:3], *entry, i32(n)))


# The layout of `struct Cells` in cuda/tables.cu.
_CELLS = np.dtype([("base", np.int64), ("num_rows", np.int32), ("pages_per_row", np.int32)])

Delta = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Changes of a page table on the host: rows [n], columns [n], pages [n]."""


def apply_table_deltas(page_tables: Sequence[Tensor], deltas: Sequence[Delta]) -> None:
    """Write the changes of several page tables with one upload and one launch, or none.

    Args:
        page_tables: int32 [num_rows + 1, pages_per_row] each, on one device, written.
        deltas: of each table, as `Ledger.take_delta` gives them; no (row, column) twice.
    """
    tables = [Table(page_table, 1) for page_table in page_tables]
    if len(deltas) != len(tables):
        raise ShapeError(f"deltas must be {len(tables)}, one for each table, got {len(deltas)}")
    for index, (table, delta) in enumerate(zip(tables, deltas, strict=True)):
        if table.device != tables[0].device:
            raise ShapeError(
                f"page_tables[{index}] must be on {tables[0].device}, it is on {table.device}"
            )
        if len({part.shape for part in delta}) > 1 or any(part.dtype != np.int32 for part in delta):
            types = ", ".join(f"{part.dtype} {list(part.shape)}" for part in delta)
            raise ShapeError(f"deltas[{index}] must be three int32 arrays [n], got {types}")
    changed = [pair for pair in zip(tables, deltas, strict=True) if len(pair[1][0])]
    if not changed:
        return
    device = tables[0].device
    if not runs_kernels(device):
        for table, delta in changed:
            _core.apply_table_delta(table.cells.numpy(), *delta)
        return
    rows = [(t.cells.data_ptr(), t.num_rows, t.pages_per_row) for t, _ in changed]
    table_index = np.repeat(
        np.arange(len(changed), dtype=np.int32), [len(d[0]) for _, d in changed]
    )
    parts = [np.concatenate([delta[part] for _, delta in changed]) for part in range(3)]
    described, entries = upload(
        device, np.array(rows, _CELLS).view(np.uint8), np.stack([table_index, *parts])
    )
    n, touched = len(table_index), [table.cells for table, _ in changed]
    args = (described, i32(len(changed)), entries, i32(n))
    launch("apply_table_deltas", blocks(n), (THREADS,), args, touches=touched)


@with_twin(_core.slots_at)
def slots_at(
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the slot of each (rows[i], positions[i]), int32 [n]; both arguments are int32 [n]."""
    table = Table(page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("positions", positions, n)
    slots = output("out", out, torch.int32, (n,), table.device)
    launch("slots_at", blocks(n), (THREADS,), (*table.args, rows, positions, slots, i32(n)))
    return slots


@with_twin(_core.slot_ranges)
def slot_ranges(
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    starts: Tensor,
    lens: Tensor,
    *,
    hi: NDArray[np.int32] | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the slots of positions [starts[i], starts[i] + lens[i]) of each row, lane after lane.

    Args:
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        starts: int32 [n].
        lens: int32 [n].
        hi: [n] on the host, upper bounds of `lens`; None means the row's width.
        out: int32, at least sum(hi).

    Returns:
        `out`, or int32 [sum(hi)]; valid below sum(lens).
    """
    table = Table(page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    lanes = (rows, table.lanes("starts", starts, n), table.lanes("lens", lens, n))
    bounds = upper_bounds(hi, n, table.row_width)
    slots = capacity("out", int(bounds.sum()), out, table.device)
    grid = (n, _tiles(bounds))
    launch("slot_ranges", grid, (THREADS,), (*table.args, *lanes, slots, i32(slots.shape[0])))
    return slots


def _tiles(bounds: NDArray[np.int64]) -> int:
    """Return the number of blocks that share a lane's elements, four elements per thread."""
    max_len = int(bounds.max(initial=0))
    return min(-(-max_len // (4 * THREADS)), 1024)


@with_twin(_core.draft_write_slots)
def draft_write_slots(
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    roots: Tensor,
    *,
    num_steps: int,
    topk: int,
    layout: str,
    out: Tensor | None = None,
) -> Tensor:
    """Return the slots that each branch writes its drafts to, int32 [n, K, S].

    Entry [i, b, j] is the slot of step j of branch b of lane i. `rows` and `roots` are int32 [n].
    """
    table = Table(page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("roots", roots, n)
    s, k = number("num_steps", num_steps, 1), number("topk", topk, 1)
    holey = is_holey(layout)
    grid = blocks(n * k * s)
    slots = output("out", out, torch.int32, (n, k, s), table.device)
    args = (*table.args, rows, roots, slots, i32(n), i32(s), i32(k), holey)
    launch("draft_write_slots", grid, (THREADS,), args)
    return slots


@with_twin(_core.page_csr)
def page_csr(
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    lens: Tensor,
    *,
    hi: NDArray[np.int32] | Sequence[int] | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """List the pages of positions [0, lens[i]) of each row as CSR, for prefill and verify.

    Args:
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        lens: int32 [n].
        hi: [n] on the host, upper bounds of `lens`; None means the row's width.
        out: the three results; kv_indices may be longer than needed.

    Returns:
        int32: kv_indptr [n + 1]; kv_indices [sum of ceil(hi / P)], valid below kv_indptr[-1];
        kv_last_page_len [n], in 1..P, 0 where lens is 0.
    """
    table = Table(page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("lens", lens, n)
    bounds = upper_bounds(hi, n, table.row_width)
    if out is not None and len(out) != 3:
        raise ShapeError(
            f"out must hold kv_indptr, kv_indices, kv_last_page_len, got {len(out)} tensors"
        )
    indptr, indices_buffer, last = out if out is not None else (None, None, None)
    names, shapes = ("kv_indptr", "kv_last_page_len"), ((n + 1,), (n,))
    indptr_and_last = None if indptr is None or last is None else (indptr, last)
    indptr, last = outputs(names, indptr_and_last, [torch.int32] * 2, shapes, table.device)
    pages = int((-(-bounds // table.page_size)).sum())
    indices = capacity("out.kv_indices", pages, indices_buffer, table.device)
    if n == 0:
        indptr.zero_()
    args = (*table.args, rows, lens, indptr, indices, last, i32(indices.shape[0]))
    launch("page_csr", (n,), (THREADS,), args)
    return indptr, indices, last
