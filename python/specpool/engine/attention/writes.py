"""`write_kv`: writes the keys and values of a forward into their slots."""

from __future__ import annotations

from torch import Tensor

from specpool import kernels
from specpool.kernels.launch import runs_kernels


def write_kv(
    k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Write a layer's new keys and values into slots; on a GPU with one launch.

    Args:
        k_buffer: [num_slots, Hkv, Dk], written.
        v_buffer: [num_slots, Hkv, Dv], written.
        slots: int64 [T].
        k: [T, Hkv, Dk]; converted if the buffer has another dtype.
        v: [T, Hkv, Dv], likewise.

    Returns:
        Keys and values as they were written.
    """
    if k.dtype != k_buffer.dtype:
        k, v = k.to(k_buffer.dtype), v.to(v_buffer.dtype)
    if runs_kernels(k_buffer.device):
        kernels.write_kv(k_buffer, v_buffer, k, v, slots)
    else:
        k_buffer.index_copy_(0, slots, k)
        v_buffer.index_copy_(0, slots, v)
    return k, v
