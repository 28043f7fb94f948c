"""Launchers of `cuda/moves.cu`: they move KV as bytes, in all layers with one launch.

Twins: `specpool.kernels.twin_moves`, on the buffers that `Fields` describes. A kernel skips slots
outside the buffers and padding lanes (row 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.errors import ShapeError
from specpool.kernels import twin_moves as moves
from specpool.kernels import with_twin as twins
from specpool.kernels.checks import (
    Table,
    ceil_pow2,
    device_of,
    expect,
    i32,
    i64,
    is_holey,
    number,
    packed_rows,
)
from specpool.kernels.fields import Fields, send_rows
from specpool.kernels.launch import SHARED_BYTES, Arg, launch, runs_kernels
from specpool.kernels.with_twin import with_twin

# Accesses of a thread that are under way at once, as in cuda/moves.cu.
_IN_FLIGHT = 4
# Blocks of a large copy: 16 for each of 256 multiprocessors.
_BLOCKS = 4096
# Blocks that leave no multiprocessor of a large GPU idle, and those that it can run at once.
_FEW, _FULL = 264, 1056
MAX_HELD = SHARED_BYTES // 16
"""Slots that a block can hold of one column."""


def _checked_table(fields: Fields, page_table: Tensor, page_size: int) -> Table:
    table = Table(page_table, page_size)
    if table.page_size != fields.page_size:
        raise ShapeError(f"page_size must be the fields' {fields.page_size}, got {page_size}")
    if table.device != fields.table.device:
        raise ShapeError(f"page_table must be on {fields.table.device}, got {table.device}")
    return table


def _slots(name: str, slots: Tensor, fields: Fields, n: int | None = None) -> Tensor:
    return expect(name, slots, torch.int32, (n,), fields.table.device)


def _copy(target: Fields, source: Fields, dst: Tensor | None, src: Tensor | None, n: int) -> None:
    """Copy n slots with one launch; no slot may be both read and written."""
    if not runs_kernels(source.device):
        twins.copy_slots(target, source, dst, src, n)
        return
    block, fields = source.block(), len(source.widths)
    tiles = -(-source.columns // (_IN_FLIGHT * block[0])) if source.columns > block[0] else 1
    # As many blocks as there are groups of slots, up to what keeps every GPU busy; more go in turn.
    max_turns = max(_BLOCKS // (fields * tiles), 1)
    turns = -(-n // block[1])
    if tiles == 1 and turns * fields > _FULL:
        # Enough blocks run: rather give each thread several slots, whose loads overlap.
        turns = max(-(-turns // _IN_FLIGHT), _FULL // fields)
    grid = (min(turns, max_turns), fields, tiles)
    sizes = (source.page_size, target.page_size, source.num_slots, target.num_slots)
    args: tuple[Arg, ...] = (source.table, target.table, *map(i32, sizes), src, dst, i32(n))
    launch("copy_slots", grid, block, args, touches=(*source.buffers, *target.buffers))


def _same_widths(name: str, values: Fields, fields: Fields, n: int) -> None:
    if values.widths != fields.widths or values.num_slots < n:
        raise ShapeError(
            f"{name} must be {n} slots or more of the fields' widths {list(fields.widths)}, got "
            f"{values.num_slots} of {list(values.widths)}"
        )
    if values.table.device != fields.table.device:
        raise ShapeError(f"{name} must be on {fields.table.device}, got {values.table.device}")


def gather_kv(fields: Fields, slots: Tensor, *, out: Fields | None = None) -> Fields:
    """Read slots into contiguous buffers.

    Args:
        fields: the buffers.
        slots: int32 [n], repeats allowed.
        out: buffers of the same widths with n slots or more; slot i gets slots[i]. None = new ones.

    Returns:
        `out`.
    """
    n = _slots("slots", slots, fields).shape[0]
    values = fields.empty(n) if out is None else out
    _same_widths("out", values, fields, n)
    _copy(values, fields, None, slots, n)
    return values


def scatter_kv(fields: Fields, slots: Tensor, values: Fields) -> None:
    """Write contiguous values into slots; the inverse of `gather_kv`.

    Args:
        fields: the buffers, written.
        slots: int32 [n], each once.
        values: buffers of the same widths, of n slots or more.
    """
    n = _slots("slots", slots, fields).shape[0]
    _same_widths("values", values, fields, n)
    _copy(fields, values, slots, None, n)


@with_twin(twins.move_kv)
def move_kv(fields: Fields, src: Tensor, dst: Tensor, *, disjoint: bool = False) -> None:
    """Move slots in every buffer: slot dst[i] gets the content of slot src[i] before the call.

    Args:
        fields: the buffers, written.
        src: int32 [n].
        dst: int32 [n], each once.
        disjoint: the caller promises that no slot is in both, as in copies of pages. This is the
            fastest way. Otherwise up to 2816 slots move in one launch, and more through a copy.
    """
    n = _slots("src", src, fields).shape[0]
    _slots("dst", dst, fields, n)
    if disjoint:
        _copy(fields, fields, dst, src, n)
    elif n > MAX_HELD:
        scatter_kv(fields, dst, gather_kv(fields, src))
    else:
        tiles, block, shared = _block_layout(fields, n, 1)
        args = (fields.table, i32(fields.page_size), i32(fields.num_slots), src, dst, i32(n))
        grid = (tiles if n else 0, len(fields.widths))
        launch("move_slots", grid, block, args, shared_mem=shared, touches=fields.buffers)


def write_kv(k_buffer: Tensor, v_buffer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the keys and values of n tokens into their slots of a layer's buffers.

    Args:
        k_buffer: [num_slots, ...], contiguous, written.
        v_buffer: likewise.
        k: [n, ...], of the dtype and the slots' sizes of `k_buffer`; it is copied if the numbers of
            a token do not follow one another.
        v: likewise.
        slots: int64 [n], each once; but what lies in the sink is of no use, so any may go there.
    """
    device = device_of("k_buffer", k_buffer)
    if slots.dtype != torch.int64 or slots.ndim != 1 or slots.device != device:
        raise ShapeError(
            f"slots must be torch.int64 [n] on {device}, got {slots.dtype} {list(slots.shape)} on "
            f"{slots.device}"
        )
    n = len(slots)
    num_slots = number("slots of k_buffer", len(k_buffer), 1)
    parts = (("k", k, k_buffer), ("v", v, v_buffer))
    for name, tokens, buffer in parts:
        expect(f"{name}_buffer", buffer, buffer.dtype, (num_slots, *buffer.shape[1:]), device)
        if (
            tokens.dtype != buffer.dtype
            or tokens.shape != (n, *buffer.shape[1:])
            or tokens.device != device
        ):
            raise ShapeError(
                f"{name} must be {buffer.dtype} {[n, *buffer.shape[1:]]} on {device}, got "
                f"{tokens.dtype} {list(tokens.shape)} on {tokens.device}"
            )
    if not runs_kernels(device):
        twins.write_kv(k_buffer, v_buffer, k, v, slots)
        return
    rows, strides, widths, vecs = [], [], [], []
    for _, tokens, buffer in parts:
        memory, stride = packed_rows(tokens)
        width = buffer[0].numel() * buffer.itemsize
        alignment = memory.data_ptr() | buffer.data_ptr() | stride * buffer.itemsize | width | 16
        rows.append(memory)
        strides.append(i64(stride * buffer.itemsize))
        widths.append(i32(width))
        vecs.append(i32(alignment & -alignment))
    columns = max(int(width // vec) for width, vec in zip(widths, vecs, strict=True))
    threads = min(ceil_pow2(columns), 256)
    block = (threads, 256 // threads)
    tiles = -(-columns // (_IN_FLIGHT * threads)) if columns > threads else 1
    grid = (min(-(-n // block[1]), max(_BLOCKS // (2 * tiles), 1)), 2, tiles)
    slot_list, slots_stride = packed_rows(slots)
    places = (i32(num_slots), slot_list, i64(slots_stride), i32(n))
    args: tuple[Arg, ...] = (k_buffer, v_buffer, *rows, *strides, *widths, *vecs, *places)
    launch("write_kv", grid if columns else (0,), block, args)


def copy_pages(groups: Mapping[int, Fields], copies: NDArray[np.int32]) -> None:
    """Copy the first tokens of pages to other pages, in all buffers of all groups with one launch.

    Args:
        groups: the buffers of each group that `copies` names, written.
        copies: int32 [n, 4], on the host, as in `Plan.page_copies`: (group, src page, dst page,
            tokens), in order. A copy that needs an earlier one's result is a launch of its own.

    Raises:
        ShapeError: a group, a page or a number of tokens is out of range; nothing is copied.
    """
    runs: list[list[tuple[int, int, int, int]]] = []
    read, written = set[tuple[int, int]](), set[tuple[int, int]]()
    for index, (group, src, dst, tokens) in enumerate(copies.tolist()):
        if group not in groups:
            raise ShapeError(f"copies[{index}] names group {group}, there are {sorted(groups)}")
        size = groups[group].page_size
        num_pages = groups[group].num_slots // size
        number(f"source page of copies[{index}]", src, 0, num_pages - 1)
        number(f"target page of copies[{index}]", dst, 0, num_pages - 1)
        number(f"tokens of copies[{index}]", tokens, 0, size)
        if not runs or (group, dst) in read | written or (group, src) in written:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((group, src, dst, tokens))
        read.add((group, src))
        written.add((group, dst))
    for run in runs:
        _copy_run(groups, run)


def _copy_run(groups: Mapping[int, Fields], run: Sequence[tuple[int, int, int, int]]) -> None:
    """Copy pages of which none is both read and written.

    A page's tokens lie one after the other in each field. So to the kernel each copy of a field is
    a field of its own, with one slot as wide as these tokens.
    """
    device = groups[run[0][0]].device
    if not runs_kernels(device):
        for group, src, dst, tokens in run:
            size, offsets = groups[group].page_size, torch.arange(tokens, dtype=torch.int32)
            move_kv(groups[group], src * size + offsets, dst * size + offsets, disjoint=True)
        return
    rows = [np.concatenate([_page(groups[c[0]].rows, c[at], c[3]) for c in run]) for at in (1, 2)]
    touches = [buffer for group in {c[0] for c in run} for buffer in groups[group].buffers]
    unit = i32(1)
    for first in range(0, len(rows[0]), 65535):
        source, target = (descriptors[first : first + 65535] for descriptors in rows)
        columns = int((source["width"] // source["vec"]).max())
        threads = min(ceil_pow2(columns), 256)
        tiles = min(-(-columns // (_IN_FLIGHT * threads)), max(_BLOCKS // len(source), 1))
        args = (*send_rows(device, source, target), unit, unit, unit, unit, None, None, unit)
        grid = (1 if columns else 0, len(source), tiles)
        launch("copy_slots", grid, (threads, 1), args, touches=touches)


def _page(rows: NDArray[np.void], page: int, tokens: int) -> NDArray[np.void]:
    """Return the fields of one page, with its first tokens as the only slot."""
    fields = rows.copy()
    fields["base"] += page * rows["page_stride"]
    fields["width"] *= tokens
    return fields


def _block_layout(fields: Fields, n: int, lanes: int) -> tuple[int, tuple[int, int], int]:
    """Return tiles per field, block size and shared bytes for blocks that hold n slots.

    Few blocks become more by narrower tiles, down to 128 bytes of a slot.
    """
    room = MAX_HELD // max(n, 1)
    columns = min(ceil_pow2(fields.columns), 1 << (room.bit_length() - 1), 256)
    while columns > 8 and -(-fields.columns // columns) * len(fields.widths) * lanes < _FEW:
        columns //= 2
    rows = max(min(256 // columns, ceil_pow2(n)), 1)
    return -(-fields.columns // columns), (columns, rows), 16 * n * columns


def _tiles(blocks: int, max_tiles: int) -> int:
    """Return in how many parts, up to `max_tiles`, to split the work of each of the blocks."""
    return max(min(-(-_FEW // max(blocks, 1)), max_tiles), 1)


@with_twin(moves.compact_accepted)
def compact_accepted(
    fields: Fields,
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    roots: Tensor,
    accept_index: Tensor,
    *,
    num_draft_tokens: int,
) -> None:
    """Move the KV of the accepted nodes to positions root, root + 1, ...

    Args:
        fields: the buffers, written.
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        roots: int32 [n].
        accept_index: int32 [n, S + 1], of `verify_tree`.
        num_draft_tokens: N.
    """
    table = _checked_table(fields, page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("roots", roots, n)
    expect("accept_index", accept_index, torch.int32, (n, None), table.device)
    width, nodes = accept_index.shape[1], number("num_draft_tokens", num_draft_tokens, 1)
    number("n * num_draft_tokens", n * nodes, 0)
    tiles = _tiles(n * len(fields.widths), -(-fields.columns // 32))
    threads = min(max(ceil_pow2(-(-fields.columns // tiles)), 32), 256)
    args = (fields.table, i32(fields.num_slots), *table.args, rows, roots, accept_index)
    grid = (n if width > 1 else 0, len(fields.widths), -(-fields.columns // threads))
    sizes = (i32(width), i32(nodes))
    launch("compact_accepted", grid, (threads,), (*args, *sizes), touches=fields.buffers)


@with_twin(moves.duplicate_prefix_tail)
def duplicate_prefix_tail(
    fields: Fields,
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    roots: Tensor,
    *,
    num_steps: int,
    topk: int,
) -> None:
    """Copy each prefix's tail before the drafts of branches 1..K, holey layout (sgl#7725).

    Args:
        fields: the buffers, written.
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        roots: int32 [n].
        num_steps: S.
        topk: K.
    """
    table = _checked_table(fields, page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("roots", roots, n)
    s, k = number("num_steps", num_steps, 1), number("topk", topk, 1)
    copies = n * (k - 1) if table.page_size > 1 else 0
    number("n * (topk - 1)", copies, 0)
    args = (fields.table, i32(fields.num_slots), *table.args, rows, roots, i32(s), i32(k))
    block = fields.block()
    turns = -(-(table.page_size - 1) // block[1])  # of a tail at its longest
    grid = (copies, len(fields.widths), _tiles(copies * len(fields.widths), turns))
    launch("duplicate_prefix_tail", grid, block, args, touches=fields.buffers)


@with_twin(twins.copy_parent_drafts)
def copy_parent_drafts(
    fields: Fields,
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    roots: Tensor,
    branch_parents: Tensor,
    *,
    num_steps: int,
    step: int,
    layout: str = "holey",
) -> None:
    """Copy drafts 0..step of each branch's parent over its own, after the selection of `step`.

    Args:
        fields: the buffers, written.
        page_table: int32 [num_rows + 1, pages_per_row].
        page_size: P.
        rows: int32 [n].
        roots: int32 [n].
        branch_parents: int32 [n, K], from `select_topk`; branches may swap.
        num_steps: S.
        step: in [0, S); K * step at most 2816.
        layout: `dense` or `holey`.
    """
    table = _checked_table(fields, page_table, page_size)
    n = table.lanes("rows", rows).shape[0]
    table.lanes("roots", roots, n)
    expect("branch_parents", branch_parents, torch.int32, (n, None), table.device)
    s, k = number("num_steps", num_steps, 1), branch_parents.shape[1]
    step, holey = number("step", step, 0, s - 1), is_holey(layout)
    drafts = number("topk * step", k * step, 0, MAX_HELD)
    tiles, block, shared = _block_layout(fields, drafts, n)
    sizes = (i32(s), i32(k), holey, i32(step), i32(tiles))
    number("n * tiles", n * tiles, 0)
    args = (fields.table, i32(fields.num_slots), *table.args, rows, roots, branch_parents, *sizes)
    grid = (n * tiles if drafts else 0, len(fields.widths))
    launch("copy_parent_drafts", grid, block, args, shared_mem=shared, touches=fields.buffers)
