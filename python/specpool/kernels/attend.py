"""Launcher of `cuda/attend.cu`: attention of few queries over pages, which it reads in place.

Twin: `specpool.kernels.twin_attend`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specpool.errors import ShapeError
from specpool.kernels import twin_attend
from specpool.kernels.checks import INT_MAX, ceil_pow2, device_of, expect, i32, number, output
from specpool.kernels.launch import launch, runs_kernels
from specpool.kernels.paged_cells import PagedCells

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
# As in cuda/attend.cu: threads of a block, rows of a tile, the fewest cells of a part.
_THREADS, _TILE, _LEAST_PART = 128, 16, 64
_MERGE_THREADS = 256
# Blocks that keep a GPU busy: twice what runs at once on 132 multiprocessors.
_BLOCKS = 528


def attend_pages(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    cells: PagedCells,
    *,
    scaling: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend over cells where they lie; sums are float32, in a fixed order.

    The KV of a lane is read once for each 64 rows, a row being one query of one query head. One
    launch, or two where several blocks share a lane. With several blocks it allocates room for
    their results.

    Args:
        q: bfloat16 or float16 [T, H, D], D = 64, 128 or 256, H a multiple of Hkv.
        k_buffer: as q, [num_slots, Hkv, D].
        v_buffer: likewise.
        cells: what each lane's queries see.
        scaling: factor of the scores, above 0.
        window: causal queries see the last `window` cells, their own included; None = all.
        out: as q; None means a new tensor. Rows of no lane are left as they are.

    Returns:
        `out`: zeros for a query that sees no cell.
    """
    device = device_of("q", q)
    num_tokens, heads, dim = expect("q", q, DTYPES, (None, None, None), device).shape
    expect("k_buffer", k_buffer, q.dtype, (None, None, dim), device)
    num_slots, kv_heads, _ = k_buffer.shape
    expect("v_buffer", v_buffer, q.dtype, (num_slots, kv_heads, dim), device)
    expect("pages", cells.pages, torch.int32, (None, None), device)
    if dim not in HEAD_DIMS:
        raise ShapeError(f"head_dim must be 64, 128 or 256, got {dim}")
    if not kv_heads or heads % kv_heads:
        raise ShapeError(f"{heads} query heads must be a multiple of {kv_heads} KV heads")
    if not (math.isfinite(scaling) and scaling > 0):
        raise ShapeError(f"scaling must be a finite number above 0, got {scaling}")
    if window is not None:
        number("window", window, 1)
        if cells.own_slots is not None:
            raise ShapeError(f"window {window} needs causal queries, these have own cells")
    number("num_slots", num_slots, 1)
    result = output("out", out, q.dtype, (num_tokens, heads, dim), device)
    aligned = {"q": q, "k_buffer": k_buffer, "v_buffer": v_buffer, "out": result}
    for name, tensor in aligned.items():
        behind = tensor.data_ptr() % 16
        if behind:
            raise ShapeError(
                f"{name} must begin at a multiple of 16 bytes, got one {behind} bytes behind"
            )
    if not runs_kernels(device):
        return twin_attend.attend_pages(
            q, k_buffer, v_buffer, cells, scaling=scaling, window=window, out=result
        )

    lanes, columns = cells.pages.shape
    group = heads // kv_heads
    rows = cells.num_queries * group
    tiles = 1 if rows <= _TILE else 2 if rows <= 2 * _TILE or dim == max(HEAD_DIMS) else 4
    blocks = kv_heads * -(-rows // (_TILE * tiles))
    parts = _num_parts(lanes * blocks, cells.most_cells)
    sums = stats = None
    if parts > 1:
        places = lanes * parts * blocks * _TILE * tiles
        sums = torch.empty(places, dim, dtype=torch.float32, device=device)
        stats = torch.empty(places, 2, dtype=torch.float32, device=device)
    args = (
        *(q, k_buffer, v_buffer, result, sums, stats),
        *(cells.pages, cells.lens, cells.q_starts, cells.own_slots, cells.sees),
        *(i32(num_slots), i32(cells.page_size), i32(columns), i32(kv_heads), i32(group)),
        *(i32(cells.num_queries), i32(0 if cells.own_slots is None else cells.own_slots.shape[1])),
        *(i32(window or 0), i32(tiles), i32(parts)),
        np.float32(scaling * math.log2(math.e)),
        i32(q.dtype == torch.float16),
    )
    grid = (blocks, parts, lanes)
    if dim == 64:
        launch("attend_64", grid, (_THREADS,), args)
    elif dim == 128:
        launch("attend_128", grid, (_THREADS,), args)
    else:
        launch("attend_256", grid, (_THREADS,), args)
    if parts > 1:
        # Of many parts, each thread adds up few; the block joins the threads' sums.
        quads = dim // 4
        groups = min(ceil_pow2(-(-parts // 8)), _MERGE_THREADS // quads)
        heads_each = max(_THREADS // (quads * groups), 1)
        grid = (-(-heads // heads_each), cells.num_queries, lanes)
        block = (quads * groups * heads_each,)
        launch("merge_attention", grid, block, (*args, i32(dim), i32(groups)))
    return result


def _num_parts(blocks: int, most_cells: int) -> int:
    """Return how many blocks share a lane's cells, for `blocks` if one does."""
    wanted = -(-_BLOCKS // max(blocks, 1))
    return max(min(wanted, -(-min(most_cells, INT_MAX) // _LEAST_PART)), 1)
