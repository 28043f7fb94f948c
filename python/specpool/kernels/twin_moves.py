"""Moves of KV between slots in torch, on any device and for any dtype (docs/kernels.md).

A buffer is a tensor with one dimension of slots, or a `PageBlocked` one. `slot_dim` is the
dimension of the slots, so one tensor may hold all layers. Every move reads all sources before it
writes, so sources and targets may overlap. The core moves contiguous buffers in host memory,
without an intermediate copy if it can. Other buffers are moved by torch's gather and scatter. A
call with no slots does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specpool._core as _core
from specpool.errors import ShapeError

Slots = NDArray[np.int64] | Tensor
"""Slots, int64 [n]: a NumPy array, whose values are checked, or a tensor on the buffers' device,
whose values are trusted."""


@dataclass(frozen=True, slots=True)
class PageBlocked:
    """A buffer whose pages hold one field after the other, for all their slots (sgl#31218).

    Attributes:
        data: any dtype [num_pages, page_size * sum(widths)], contiguous.
        page_size: slots of a page.
        widths: elements that one slot has in each field, e.g. (head_size, 1) for keys then scales.
    """

    data: Tensor
    page_size: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        per_page = self.page_size * sum(self.widths)
        if self.page_size < 1 or not self.widths or min(self.widths) < 1:
            raise ShapeError(
                f"page_size and widths must be 1 or more, got {self.page_size}, {self.widths}"
            )
        if self.data.ndim != 2 or self.data.shape[1] != per_page or not self.data.is_contiguous():
            raise ShapeError(
                f"data must be contiguous [num_pages, {per_page}], got {tuple(self.data.shape)}"
            )

    def fields(self) -> list[Tensor]:
        """Return each field as a view [num_pages, page_size, width]."""
        views, first = [], 0
        for width in self.widths:
            size = self.page_size * width
            columns = _as_bytes(self.data)[:, first : first + size]
            views.append(columns.view(-1, self.page_size, width))
            first += size
        return views


Buffer = Tensor | PageBlocked


def _host_bytes(
    buffers: Sequence[Buffer], slot_dim: int
) -> list[tuple[NDArray[np.uint8], tuple[int, ...]]] | None:
    """Return the buffers for `_core.move_slots`; None unless all are contiguous on the CPU."""
    tensors = [b.data if isinstance(b, PageBlocked) else b for b in buffers]
    if not all(t.device.type == "cpu" and t.is_contiguous() and t.numel() for t in tensors):
        return None
    return [
        _blocked_bytes(b) if isinstance(b, PageBlocked) else _plain_bytes(b, slot_dim)
        for b in buffers
    ]


def _blocked_bytes(buffer: PageBlocked) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    size = buffer.data.element_size()
    return buffer.data.view(torch.uint8).numpy()[None], tuple(size * w for w in buffer.widths)


def _plain_bytes(buffer: Tensor, slot_dim: int) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    """Return the bytes of a contiguous tensor as [lead, slots, width], and its widths."""
    lead, slots = math.prod(buffer.shape[:slot_dim]), buffer.shape[slot_dim]
    content = buffer.view(-1).view(torch.uint8).view(lead, slots, -1)
    return content.numpy(), (content.shape[2],)


def _as_bytes(buffer: Tensor) -> Tensor:
    """View 8-bit floats as bytes, because torch cannot index them on every device."""
    if buffer.dtype.itemsize == 1 and buffer.dtype.is_floating_point:
        return buffer.view(torch.uint8)
    return buffer


def _num_slots(buffer: Buffer, slot_dim: int) -> int:
    if isinstance(buffer, PageBlocked):
        return buffer.data.shape[0] * buffer.page_size
    if not 0 <= slot_dim < buffer.ndim:
        raise ShapeError(
            f"slot_dim must be a dimension of {tuple(buffer.shape)} counted from 0, got {slot_dim}"
        )
    return buffer.shape[slot_dim]


def _device(buffers: Sequence[Buffer]) -> torch.device:
    devices = {(b.data if isinstance(b, PageBlocked) else b).device for b in buffers}
    if len(devices) > 1:
        raise ShapeError(
            f"buffers must be on one device, got {', '.join(sorted(map(str, devices)))}"
        )
    return devices.pop()


def _as_index(name: str, slots: Slots, device: torch.device) -> Tensor:
    if isinstance(slots, Tensor):
        if slots.dtype != torch.int64 or slots.ndim != 1 or slots.device != device:
            raise ShapeError(
                f"{name} must be int64 [n] on {device}, got {slots.dtype} {tuple(slots.shape)} "
                f"on {slots.device}"
            )
        return slots
    index = torch.from_numpy(slots)
    return index if device.type == "cpu" else index.to(device, non_blocking=True)


def _host_index(name: str, slots: Slots) -> NDArray[np.int64]:
    if isinstance(slots, Tensor):
        return _as_index(name, slots, torch.device("cpu")).contiguous().numpy()
    return slots


def _check_forms(src: Slots, dst: Slots) -> None:
    if isinstance(src, Tensor) != isinstance(dst, Tensor):
        raise ShapeError("src and dst must both be NumPy arrays or both tensors")
    if isinstance(src, Tensor) and src.shape != dst.shape:
        raise ShapeError(f"dst must have {len(src)} elements, got {len(dst)}")


def _check_values(src: Slots, dst: Slots, num_slots: int) -> None:
    """Raise `ShapeError` for slots outside the buffers; the values of tensors are not read."""
    if isinstance(src, np.ndarray) and isinstance(dst, np.ndarray):
        _core.check_moves(src, dst, num_slots)


def move_kv(buffers: Sequence[Buffer], src: Slots, dst: Slots, *, slot_dim: int = 0) -> None:
    """Move slots in every buffer: slot dst[i] gets the content of slot src[i] before the call.

    Args:
        buffers: tensors with slots in dimension `slot_dim`, or `PageBlocked` ones; on one device.
        src: int64 [n] slots read.
        dst: int64 [n] slots written, each once.
        slot_dim: dimension of the slots in the tensors.

    Raises:
        ShapeError: a dtype or shape is wrong, a slot is outside a buffer, or a slot is written
            twice. (The values of index tensors on a GPU are trusted, since reading them would
            wait.)
    """
    if not buffers or len(src) == len(dst) == 0:
        return
    num_slots = min(_num_slots(buffer, slot_dim) for buffer in buffers)
    _check_forms(src, dst)
    device = _device(buffers)
    host = _host_bytes(buffers, slot_dim)
    if host is not None:
        _core.move_slots(host, _host_index("src", src), _host_index("dst", dst))
        return
    _check_values(src, dst, num_slots)
    read, written = _as_index("src", src, device), _as_index("dst", dst, device)
    for buffer in buffers:
        if isinstance(buffer, PageBlocked):
            p = buffer.page_size
            for field in buffer.fields():
                field[written // p, written % p] = field[read // p, read % p]
        else:
            plain = _as_bytes(buffer)
            plain.index_copy_(slot_dim, written, plain.index_select(slot_dim, read))


def gather_kv(buffers: Sequence[Tensor], slots: Slots, *, slot_dim: int = 0) -> list[Tensor]:
    """Read slots of every buffer into new contiguous tensors.

    Args:
        buffers: tensors with slots in dimension `slot_dim`, on one device.
        slots: int64 [n], repeats allowed.
        slot_dim: dimension of the slots.

    Returns:
        One tensor per buffer, `n` long in dimension `slot_dim`.

    Raises:
        ShapeError: a dtype or shape is wrong, or a slot is outside a buffer.
    """
    if not buffers:
        return []
    num_slots = min(_num_slots(buffer, slot_dim) for buffer in buffers)
    if isinstance(slots, np.ndarray):
        _core.check_slots("slots", slots, num_slots)
    index = _as_index("slots", slots, _device(buffers))
    return [
        _as_bytes(buffer).index_select(slot_dim, index).view(buffer.dtype) for buffer in buffers
    ]


def scatter_kv(
    buffers: Sequence[Tensor], slots: Slots, values: Sequence[Tensor], *, slot_dim: int = 0
) -> None:
    """Write contiguous values into slots of every buffer; the inverse of `gather_kv`.

    Args:
        buffers: tensors with slots in dimension `slot_dim`, on one device.
        slots: int64 [n], each once.
        values: one tensor per buffer, of its dtype and device, `n` long in dimension `slot_dim`.
        slot_dim: dimension of the slots.

    Raises:
        ShapeError: numbers, dtypes or shapes do not fit, or a slot is outside a buffer or written
            twice.
    """
    if len(values) != len(buffers):
        raise ShapeError(f"values must have {len(buffers)} tensors, got {len(values)}")
    if not buffers:
        return
    num_slots = min(_num_slots(buffer, slot_dim) for buffer in buffers)
    device = _device(buffers)
    for number, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
        shape = (*buffer.shape[:slot_dim], len(slots), *buffer.shape[slot_dim + 1 :])
        if value.shape != shape or value.dtype != buffer.dtype or value.device != device:
            raise ShapeError(
                f"values[{number}] must be {buffer.dtype} {shape} on {device}, got {value.dtype} "
                f"{tuple(value.shape)} on {value.device}"
            )
    if len(slots) == 0:
        return
    host = _host_bytes(buffers, slot_dim)
    if host is not None:
        content = [_plain_bytes(value.contiguous(), slot_dim)[0] for value in values]
        _core.scatter_slots(host, _host_index("slots", slots), content)
        return
    _check_values(slots, slots, num_slots)
    index = _as_index("slots", slots, device)
    for buffer, value in zip(buffers, values, strict=True):
        _as_bytes(buffer).index_copy_(slot_dim, index, _as_bytes(value))


def compact_accepted(
    buffers: Sequence[Buffer],
    page_table: NDArray[np.int32],
    page_size: int,
    rows: NDArray[np.int32],
    roots: NDArray[np.int32],
    accept_index: NDArray[np.int32],
    *,
    num_draft_tokens: int,
    slot_dim: int = 0,
) -> None:
    """Move the KV of the accepted nodes to positions root, root + 1, ... (`compact_moves`)."""
    src, dst = _core.compact_moves(
        page_table, page_size, rows, roots, accept_index, num_draft_tokens=num_draft_tokens
    )
    move_kv(buffers, src, dst, slot_dim=slot_dim)


def duplicate_prefix_tail(
    buffers: Sequence[Buffer],
    page_table: NDArray[np.int32],
    page_size: int,
    rows: NDArray[np.int32],
    roots: NDArray[np.int32],
    *,
    num_steps: int,
    topk: int,
    slot_dim: int = 0,
) -> None:
    """Copy each prefix's tail before the drafts of branches 1..K (`prefix_tail_moves`)."""
    src, dst = _core.prefix_tail_moves(
        page_table, page_size, rows, roots, num_steps=num_steps, topk=topk
    )
    move_kv(buffers, src, dst, slot_dim=slot_dim)


def copy_parent_drafts(
    buffers: Sequence[Buffer],
    page_table: NDArray[np.int32],
    page_size: int,
    rows: NDArray[np.int32],
    roots: NDArray[np.int32],
    branch_parents: NDArray[np.int32],
    *,
    num_steps: int,
    step: int,
    slot_dim: int = 0,
) -> None:
    """Copy the drafts of each branch's parent over its own (`branch_copy_moves`)."""
    src, dst = _core.branch_copy_moves(
        page_table, page_size, rows, roots, branch_parents, num_steps=num_steps, step=step
    )
    move_kv(buffers, src, dst, slot_dim=slot_dim)
