"""Launchers of `cuda/reads.cu`: they list the slots or pages that draft branches read.

Twins: `specpool.kernels.twins`.
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
    ceil_pow2,
    expect,
    i32,
    is_holey,
    number,
    output,
    upper_bounds,
)
from specpool.kernels.launch import SHARED_BYTES, launch
from specpool.kernels.with_twin import with_twin


def read_capacity(hi: NDArray[np.int64], *, num_steps: int, topk: int) -> int:
    """Return the slots that `kv_indices` must hold in any step of a round: K * (sum(hi) + n * S).

    `hi` are the upper bounds of the n roots. The bound holds for every replay of a captured round
    (sgl#27338).
    """
    return topk * (int(hi.sum()) + len(hi) * num_steps)


@with_twin(_core.draft_read_indices)
def draft_read_indices(
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    roots: Tensor,
    *,
    num_steps: int,
    topk: int,
    step: int,
    layout: str,
    ancestors: Tensor | None = None,
    hi: NDArray[np.int32] | Sequence[int] | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """List the slots that each branch reads at a draft step as CSR: prefix, then step + 1 drafts.

    Args:
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        roots: int32 [n].
        num_steps: S.
        topk: K.
        step: in [0, S).
        layout: `dense` or `holey`.
        ancestors: int32 [n, K, width > step] (`advance_ancestors`): a branch reads its true
            ancestors. None: it reads its own cells, as in SGLang.
        hi: [n] on the host, upper bounds of the roots; None means the row's width.
        out: both results; kv_indices may hold more than `read_capacity`.

    Returns:
        int32: kv_indptr [n*K + 1], kv_indices [K * (sum(hi) + n*S)], valid below kv_indptr[-1].
    """
    table = Table(page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("roots", roots, n)
    s, k = number("num_steps", num_steps, 1), number("topk", topk, 1)
    step, holey = number("step", step, 0, s - 1), is_holey(layout)
    width = 0
    if ancestors is not None:
        expect("ancestors", ancestors, torch.int32, (n, k, None), table.device)
        width = number("columns of ancestors", ancestors.shape[2], step + 1)
    bounds = upper_bounds(hi, n, table.row_width)
    need = read_capacity(bounds, num_steps=s, topk=k)
    if out is not None and len(out) != 2:
        raise ShapeError(f"out must hold kv_indptr, kv_indices, got {len(out)} tensors")
    buffers = (None, None) if out is None else out
    indptr = output("out.kv_indptr", buffers[0], torch.int32, (n * k + 1,), table.device)
    indices = capacity("out.kv_indices", need, buffers[1], table.device)
    if n == 0:
        indptr.zero_()
    max_len = int(bounds.max(initial=0)) + s
    grid = (n * k, min(-(-max_len // (4 * THREADS)), 1024))
    sizes = (i32(indices.shape[0]), i32(s), i32(k), i32(step), holey)
    args = (*table.args, rows, roots, ancestors, i32(width), indptr, indices, *sizes)
    launch("draft_read_indices", grid, (THREADS,), args)
    return indptr, indices


@with_twin(_core.branch_pages)
def branch_pages(
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    roots: Tensor,
    *,
    num_steps: int,
    topk: int,
    step: int,
    hi: NDArray[np.int32] | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """List the pages that each branch reads at a draft step in the holey layout, padded with 0.

    Args:
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        roots: int32 [n].
        num_steps: S.
        topk: K.
        step: in [0, S).
        hi: [n] on the host, upper bounds of the roots; None means the row's width.
        out: int32 [n*K, width or more].

    Returns:
        `out`, or int32 [n*K, width], where width = (max(hi) + step) // P + 1.
    """
    table = Table(page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("roots", roots, n)
    s, k = number("num_steps", num_steps, 1), number("topk", topk, 1)
    step = number("step", step, 0, s - 1)
    bounds = upper_bounds(hi, n, table.row_width)
    width = (int(bounds.max()) + step) // table.page_size + 1 if n else 0
    if out is not None:
        expect("out", out, torch.int32, (n * k, None), table.device)
        width = number("columns of out", out.shape[1], width)
    grid = blocks(n * k * width)
    pages = output("out", out, torch.int32, (n * k, width), table.device)
    args = (*table.args, rows, roots, pages, i32(n), i32(width), i32(s), i32(k), i32(step))
    launch("branch_pages", grid, (THREADS,), args)
    return pages


@with_twin(_core.advance_ancestors)
def advance_ancestors(ancestors: Tensor, branch_parents: Tensor, step: int) -> None:
    """Update ancestors to `step` in place, after the selection of that step.

    Args:
        ancestors: int32 [n, K, width > step], written.
        branch_parents: int32 [n, K], from `select_topk`.
        step: call it for 0, 1, ... in order.
    """
    device = ancestors.device
    expect("ancestors", ancestors, torch.int32, (None, None, None), device)
    n, k, width = ancestors.shape
    expect("branch_parents", branch_parents, torch.int32, (n, k), device)
    step = number("step", step, 0, width - 1)
    shared = 4 * k * step
    number("K * step of ancestors", k * step, 0, SHARED_BYTES // 4)
    block = (min(max(ceil_pow2(k * (step + 1)), 32), THREADS),)
    args = (ancestors, branch_parents, i32(k), i32(width), i32(step))
    launch("advance_ancestors", (n,) if k else (0,), block, args, shared_mem=shared)
