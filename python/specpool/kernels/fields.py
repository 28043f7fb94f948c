"""`Fields`: KV buffers as the kernels see them, by descriptors of their bytes on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.errors import ShapeError
from specpool.kernels.checks import INT_MAX, ceil_pow2, number
from specpool.kernels.transfer import upload
from specpool.kernels.twin_moves import Buffer, PageBlocked

# The layout of `struct Field` in cuda/moves.cu.
FIELD = np.dtype(
    [("base", np.int64), ("page_stride", np.int64), ("width", np.int32), ("vec", np.int32)]
)


@dataclass(frozen=True, slots=True)
class Fields:
    """Buffers with the same slots, such as all layers of a group, that move in one launch.

    Attributes:
        table: uint8 [num_fields, 24], on the buffers' device: the descriptors for the kernels.
        rows: the same on the host, [num_fields] of (base, page_stride, width, vec).
        buffers: the tensors themselves, kept alive because `table` holds their addresses.
        source: the buffers as they were given, for the CPU twins.
        slot_dim: the dimension of the slots in the buffers.
        page_size: P of the group.
        num_slots: the least number of slots of a buffer.
        widths: bytes of one slot in each field.
        vecs: bytes of one access to each field.
    """

    table: Tensor
    rows: NDArray[np.void]
    buffers: tuple[Tensor, ...]
    source: tuple[Buffer, ...]
    slot_dim: int
    page_size: int
    num_slots: int
    widths: tuple[int, ...]
    vecs: tuple[int, ...]

    @classmethod
    def of(cls, buffers: Sequence[Buffer], page_size: int, *, slot_dim: int = 0) -> Fields:
        """Describe buffers.

        Args:
            buffers: tensors with slots in dimension `slot_dim`, contiguous from there on, or
                `PageBlocked` ones; any dtype, on one device.
            page_size: P.
            slot_dim: the dimension of the slots. Each index of the dimensions before is a field.

        Raises:
            ShapeError: a buffer has another form, page size or device, or there are more than
                65535 fields or more slots than int32 can count.
        """
        page_size = number("page_size", page_size, 1)
        if not buffers:
            raise ShapeError("buffers must hold at least 1, got 0")
        tensors = tuple(b.data if isinstance(b, PageBlocked) else b for b in buffers)
        fields: list[tuple[int, int, int]] = []  # base, page_stride, width
        num_slots = INT_MAX + 1
        for index, buffer in enumerate(buffers):
            described = (
                _page_blocked(index, buffer, page_size)
                if isinstance(buffer, PageBlocked)
                else _plain(index, buffer, page_size, slot_dim)
            )
            fields += described[0]
            num_slots = min(num_slots, described[1])
            if tensors[index].device != tensors[0].device:
                raise ShapeError(
                    f"buffers[{index}] must be on {tensors[0].device}, it is on "
                    f"{tensors[index].device}"
                )
        fields = [field for field in fields if number("bytes of a slot", field[2], 0)]
        number("fields of buffers", len(fields), 1, 65535)
        number("slots of buffers", num_slots, 1)
        vecs = [_vec(field) for field in fields]
        rows = [(*field, vec) for field, vec in zip(fields, vecs, strict=True)]
        content = np.array(rows, FIELD)
        return cls(
            send_rows(tensors[0].device, content)[0],
            content,
            tensors,
            tuple(buffers),
            slot_dim,
            page_size,
            num_slots,
            tuple(field[2] for field in fields),
            tuple(vecs),
        )

    def empty(self, num_slots: int) -> Fields:
        """Allocate contiguous buffers of the same widths, a uint8 [num_slots, width] per field."""
        device = self.table.device
        shapes = [(max(num_slots, 1), width) for width in self.widths]
        return Fields.of([torch.empty(s, dtype=torch.uint8, device=device) for s in shapes], 1)

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.table.device

    def views(self) -> list[Tensor]:
        """Return each field as pages, uint8 [num_pages, page_size, width], for the CPU twins."""
        views: list[Tensor] = []
        for buffer in self.source:
            if isinstance(buffer, PageBlocked):
                views += [field.view(torch.uint8) for field in buffer.fields()]
                continue
            for index in np.ndindex(*buffer.shape[: self.slot_dim]):
                slots = buffer[index].reshape(buffer.shape[self.slot_dim], 1, -1)
                views.append(slots.view(torch.uint8))  # each slot is a page of size 1
        return [view for view in views if view.numel()]

    @property
    def columns(self) -> int:
        """The most accesses that one slot of a field takes."""
        return max(width // vec for width, vec in zip(self.widths, self.vecs, strict=True))

    def block(self, threads: int = 256) -> tuple[int, int]:
        """Return the block size as (columns, slots)."""
        columns = min(ceil_pow2(self.columns), threads)
        return columns, threads // columns


def send_rows(device: torch.device, *rows: NDArray[np.void]) -> list[Tensor]:
    """Copy descriptors to a device, uint8 [num_fields, 24] each."""
    return upload(
        device,
        *(
            descriptors.view(np.uint8).reshape(len(descriptors), FIELD.itemsize)
            for descriptors in rows
        ),
    )


def _plain(
    number: int, buffer: Tensor, page_size: int, slot_dim: int
) -> tuple[list[tuple[int, int, int]], int]:
    if not 0 <= slot_dim < buffer.ndim:
        raise ShapeError(
            f"slot_dim must be a dimension of buffers[{number}] {list(buffer.shape)} counted from "
            f"0, got {slot_dim}"
        )
    tail = buffer.shape[slot_dim + 1 :]
    width = int(np.prod(tail, dtype=np.int64)) * buffer.element_size()
    strides = buffer.stride()[slot_dim:]
    dense = torch.empty(buffer.shape[slot_dim:], device="meta").stride()
    sizes = buffer.shape[slot_dim:]
    if any(size > 1 and a != b for size, a, b in zip(sizes, strides, dense, strict=True)):
        raise ShapeError(
            f"buffers[{number}] must be contiguous from dimension {slot_dim} on, got shape "
            f"{list(buffer.shape)} with strides {list(buffer.stride())}"
        )
    lead = list(np.ndindex(*buffer.shape[:slot_dim]))
    size = buffer.element_size()
    bases = [
        buffer.data_ptr()
        + size * sum(i * s for i, s in zip(index, buffer.stride()[:slot_dim], strict=True))
        for index in lead
    ]
    return [(base, page_size * width, width) for base in bases], buffer.shape[slot_dim]


def _page_blocked(
    number: int, buffer: PageBlocked, page_size: int
) -> tuple[list[tuple[int, int, int]], int]:
    if buffer.page_size != page_size:
        raise ShapeError(
            f"buffers[{number}] must have pages of {page_size} slots, they have {buffer.page_size}"
        )
    size = buffer.data.element_size()
    fields, base = [], buffer.data.data_ptr()
    for width in buffer.widths:
        fields.append((base, buffer.data.shape[1] * size, width * size))
        base += page_size * width * size
    return fields, buffer.data.shape[0] * page_size


def _vec(field: tuple[int, int, int]) -> int:
    """Return the widest access, in bytes, that every slot of the field is aligned to."""
    alignment = field[0] | field[1] | field[2] | 16
    return alignment & -alignment
