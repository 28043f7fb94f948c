"""Launchers of `cuda/layers.cu`: the small steps of a decoder layer.

Their twins are torch's own operators: equal bit for bit in rotations, and but for the last bits of
an exponential function in `gated_silu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from specpool.errors import ShapeError
from specpool.kernels import with_twin as twins
from specpool.kernels.checks import (
    TYPE_NUMBERS,
    device_of,
    expect,
    heads_of,
    i32,
    i64,
    number,
    output,
    outputs,
    packed_rows,
)
from specpool.kernels.launch import launch, runs_kernels

_MAX_THREADS, _MAX_TILES = 256, 65535


def rotate_heads(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int,
    is_rounded: bool,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of n tokens by their positions' angles (RoPE).

    Dimensions d and d + rotary_dim / 2 of a head are a pair, as in transformers' `rotate_half`.

    Args:
        q: float32, float16 or bfloat16 [n, H, D]; it is copied if the numbers of a token do not
            follow one another.
        k: [n, Hk, D] of the same dtype, likewise.
        cos: [n, W] of the same dtype or float32; W is rotary_dim, or half of it if both dimensions
            of a pair have the same angle.
        sin: likewise.
        rotary_dim: even, in [2, D]; dimensions from there on stay.
        is_rounded: products are rounded to the dtype of `cos` before they are added, as torch's
            operators do it; if False, only the result is rounded.
        out: as q and k, contiguous; None means new tensors.

    Returns:
        `out`: the rotated queries and keys.
    """
    device = device_of("q", q)
    n, q_heads, dim = heads_of("q", q, tuple(TYPE_NUMBERS), (None, None), device)
    _, k_heads, _ = heads_of("k", k, (q.dtype,), (n, dim), device)
    rotary_dim = number("rotary_dim", rotary_dim, 2, dim)
    width = cos.shape[-1]
    if rotary_dim % 2 or width not in (rotary_dim, rotary_dim // 2):
        raise ShapeError(
            "rotary_dim must be even, and cos as wide or half as wide, got "
            f"{rotary_dim} and {width}"
        )
    expect("cos", cos, (q.dtype, torch.float32), (n, width), device)
    expect("sin", sin, cos.dtype, (n, width), device)
    shapes, dtypes = (q.shape, k.shape), (q.dtype, q.dtype)
    q_out, k_out = outputs(("q", "k"), out, dtypes, shapes, device)
    if not runs_kernels(device):
        rotated = twins.rotate_heads(q, k, cos, sin, rotary_dim=rotary_dim, is_rounded=is_rounded)
        return q_out.copy_(rotated[0]), k_out.copy_(rotated[1])
    q_rows, q_stride = packed_rows(q)
    k_rows, k_stride = packed_rows(k)
    many = 16 // q.itemsize
    sizes = (rotary_dim // 2, dim - rotary_dim, dim, width, q_stride, k_stride)
    tensors = (q_out, k_out, q_rows, k_rows, cos, sin)
    is_wide = _is_wide(many, sizes, tensors)
    pieces = (rotary_dim // 2 + dim - rotary_dim) // (many if is_wide else 1)
    threads = min(-(-(q_heads + k_heads) * pieces // 32) * 32, _MAX_THREADS)
    numbers = (q_heads, k_heads, dim, rotary_dim, width, is_rounded and cos.dtype == q.dtype)
    types = (TYPE_NUMBERS[q.dtype], TYPE_NUMBERS[cos.dtype], is_wide)
    strides = (i64(q_stride), i64(k_stride))
    launch(
        "rotate_heads",
        (n if q_heads + k_heads else 0,),
        (threads,),
        (*tensors, *strides, *map(i32, numbers), *map(i32, types)),
    )
    return q_out, k_out


def gated_silu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up; silu is rounded to the dtype before the product, as torch does it.

    Args:
        gate: float32, float16 or bfloat16 [n, width]; it is copied if the numbers of a row do not
            follow one another.
        up: of the same dtype and shape, likewise.
        out: likewise, contiguous; None means a new tensor.
    """
    device = device_of("gate", gate)
    if (
        gate.dtype not in TYPE_NUMBERS
        or gate.ndim != 2
        or up.shape != gate.shape
        or up.dtype != gate.dtype
        or up.device != device
    ):
        raise ShapeError(
            "gate and up must be float32, float16 or bfloat16 [n, width] on one device, got "
            f"{gate.dtype} {list(gate.shape)} on {device} and {up.dtype} {list(up.shape)} on "
            f"{up.device}"
        )
    n, width = gate.shape
    product = output("out", out, gate.dtype, (n, width), device)
    if not runs_kernels(device):
        return product.copy_(silu(gate) * up)
    gate_rows, gate_stride = packed_rows(gate)
    up_rows, up_stride = packed_rows(up)
    many, tensors = 16 // gate.itemsize, (product, gate_rows, up_rows)
    is_wide = _is_wide(many, (width, gate_stride, up_stride), tensors)
    columns = width // many if is_wide else width
    threads = min(-(-columns // 32) * 32, _MAX_THREADS)
    grid = (n if width else 0, min(-(-columns // _MAX_THREADS), _MAX_TILES))
    numbers = (i32(width), i32(TYPE_NUMBERS[gate.dtype]), i32(is_wide))
    launch("gated_silu", grid, (threads,), (*tensors, i64(gate_stride), i64(up_stride), *numbers))
    return product


def _is_wide(many: int, sizes: Sequence[int], tensors: Sequence[Tensor]) -> bool:
    """Return whether a kernel may take `many` numbers of 16 bytes at a time."""
    return not any(size % many for size in sizes) and not any(
        tensor.data_ptr() % 16 for tensor in tensors
    )
