"""The host's checks before a launch: dtype, shape, device, bounds. All raise `ShapeError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpool.errors import ShapeError
from specpool.kernels.launch import Arg

INT_MAX = 2**31 - 1
THREADS = 256

i32 = np.int32
i64 = np.int64

#: The numbers by which a launch says a type to the kernels that take several.
TYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def heads_of(
    name: str,
    value: Tensor,
    dtypes: Sequence[torch.dtype],
    sizes: tuple[int | None, int | None],
    device: torch.device,
) -> tuple[int, int, int]:
    """Check heads of tokens [n, H, D]; return n, H and D. `sizes` are n and D, None allows any."""
    is_right = (
        device_of(name, value) == device
        and value.dtype in dtypes
        and _has_shape(value.shape, (sizes[0], None, sizes[1]))
    )
    if not is_right:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        n, dim = sizes
        wanted = f"[{'n' if n is None else n}, heads, {'D' if dim is None else dim}]"
        raise ShapeError(
            f"{name} must be {kinds} {wanted} on {device}, got {value.dtype} {list(value.shape)} on"
            f" {value.device}"
        )
    n, heads, dim = value.shape
    return n, heads, dim


def expect(
    name: str,
    value: Any,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
) -> Tensor:
    """Return `value` if it is a contiguous tensor of this dtype and shape on `device`.

    A size of None allows any.
    """
    if isinstance(value, Tensor):  # every launch comes by here several times
        kind = value.dtype
        if (
            (kind is dtype or (not isinstance(dtype, torch.dtype) and kind in dtype))
            and _has_shape(value.shape, shape)
            and value.is_contiguous()
            and value.device == device
        ):
            return value
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    raise ShapeError(f"{name} must be contiguous {kinds} [{sizes}] on {device}, got {_text(value)}")


def _has_shape(actual: Sequence[int], wanted: Sequence[int | None]) -> bool:
    """Return whether the sizes are the wanted ones; None allows any."""
    if actual == wanted:
        return True
    if None not in wanted or len(actual) != len(wanted):
        return False
    for size, wanted_size in zip(actual, wanted, strict=True):  # a generator would take longer
        if wanted_size is not None and size != wanted_size:
            return False
    return True


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r:.60}"
    order = "" if value.is_contiguous() else ", not contiguous"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}{order}"


def output(
    name: str,
    value: Tensor | None,
    dtype: torch.dtype,
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Return `value` after a check, or a new tensor if it is None."""
    if value is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return expect(name, value, dtype, shape, device)


def outputs(
    names: Sequence[str],
    values: Sequence[Tensor] | None,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Return all of `values` after a check, or new tensors if there are none."""
    if values is None:
        return tuple(
            [
                torch.empty(tuple(shape), dtype=dtype, device=device)
                for dtype, shape in zip(dtypes, shapes, strict=True)
            ]
        )
    if len(values) != len(names):
        raise ShapeError(f"out must hold {', '.join(names)}, got {len(values)} tensors")
    return tuple(
        output(f"out.{name}", value, dtype, shape, device)
        for name, value, dtype, shape in zip(names, values, dtypes, shapes, strict=True)
    )


def packed_rows(value: Tensor) -> tuple[Tensor, int]:
    """Return rows for a kernel that takes them with a stride: their memory, and the stride.

    Args:
        value: [n, ...]; rows that are contiguous, such as parts of a wider matrix, are not copied.

    Returns:
        The memory from the first row to the last, contiguous, and the elements from row to row.
    """
    if not value.is_contiguous() and not value[0].is_contiguous():
        value = value.contiguous()
    if value.is_contiguous():
        return value, value.numel() // max(len(value), 1)
    stride = value.stride(0)
    span = (len(value) - 1) * stride + value[0].numel()
    return value.as_strided((span,), (1,)), stride


def number(name: str, value: int, least: int, greatest: int = INT_MAX) -> int:
    """Return `value` if it is an int in [least, greatest]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ShapeError(f"{name} must be an int, got {type(value).__name__} {value!r:.60}")
    if not least <= value <= greatest:
        raise ShapeError(f"{name} must be in [{least}, {greatest}], got {value}")
    return int(value)


def device_of(name: str, value: Any) -> torch.device:
    """Return the device of `value`, which all tensors of a call must share."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor, got {_text(value)}")
    return value.device


class Table:
    """A page table argument after its checks."""

    def __init__(self, page_table: Tensor, page_size: int) -> None:
        self.device = device_of("page_table", page_table)
        self.cells = expect("page_table", page_table, torch.int32, (None, None), self.device)
        self.num_rows, self.pages_per_row = page_table.shape
        self.page_size = number("page_size", page_size, 1)
        if not self.num_rows or not self.pages_per_row:
            raise ShapeError(
                "page_table must be [num_rows + 1, pages_per_row >= 1], got "
                f"{list(page_table.shape)}"
            )

    @property
    def row_width(self) -> int:
        """Slots of a row."""
        return self.pages_per_row * self.page_size

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arguments by which every kernel takes a page table."""
        return self.cells, i32(self.num_rows), i32(self.pages_per_row), i32(self.page_size)

    def lanes(self, name: str, value: Tensor, n: int | None = None) -> Tensor:
        """Return `value` if it is an int32 tensor with one entry for each lane."""
        return expect(name, value, torch.int32, (n,), self.device)


def is_holey(layout: str) -> np.int32:
    """Return the kernels' argument for a layout: 1 = holey, 0 = dense."""
    if layout not in ("dense", "holey"):
        raise ShapeError(f"layout must be 'dense' or 'holey', got {layout!r}")
    return i32(layout == "holey")


def upper_bounds(
    hi: NDArray[np.int32] | Sequence[int] | None, n: int, greatest: int
) -> NDArray[np.int64]:
    """Return checked upper bounds in [0, greatest], int64 [n]; all `greatest` if `hi` is None."""
    if hi is None:
        return np.full(n, greatest, np.int64)
    bounds = np.asarray(hi)
    if bounds.shape != (n,) or bounds.dtype.kind not in "iu":
        raise ShapeError(f"hi must be ints [{n}] on the host, got {bounds.dtype} {bounds.shape}")
    if n and (bounds.min() < 0 or bounds.max() > greatest):
        wrong = int(((bounds < 0) | (bounds > greatest)).argmax())
        raise ShapeError(f"hi[{wrong}] must be in [0, {greatest}], got {bounds[wrong]}")
    return bounds.astype(np.int64)


def capacity(name: str, need: int, value: Tensor | None, device: torch.device) -> Tensor:
    """Return `value` if it is int32 with room for `need` elements, or a new tensor if None."""
    if need > INT_MAX:
        raise ShapeError(f"{name} must hold {need} elements, more than int32 can count")
    if value is None:
        return torch.empty(need, dtype=torch.int32, device=device)
    buffer = expect(name, value, torch.int32, (None,), device)
    if buffer.shape[0] < need:
        raise ShapeError(f"{name} must hold {need} elements, it holds {buffer.shape[0]}")
    return buffer


def blocks(n: int) -> tuple[int]:
    """Return a grid with one thread for each of `n` elements."""
    if n > INT_MAX:
        raise ShapeError(f"{n} elements are more than int32 can count")
    return (-(-n // THREADS),)


def ceil_pow2(n: int) -> int:
    """Return the least power of two that is `n` or more."""
    return 1 << max(n - 1, 0).bit_length()
