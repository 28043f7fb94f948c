"""`zeroed_buffer`: what KV, recurrent states and their records are kept in."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specpool.errors import ConfigError
from specpool.num_bytes import show_bytes


def zeroed_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, content: str, options: str
) -> Tensor:
    """Return zeros. On a CPU the system takes each page of memory when it is first written.

    Args:
        shape: of the buffer.
        dtype: of its numbers.
        device: where it lives.
        content: what it is for, in the error.
        options: the options that make it smaller, in the error.

    Raises:
        ConfigError: the device has no room for it.
    """
    num_bytes = dtype.itemsize * math.prod(shape)
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        # The pools were sized by what was free. Another process may have taken it since.
        raise ConfigError(
            f"{device} has no room for {show_bytes(num_bytes)} of {content}: another process uses "
            f"the device too; lower {options}, or end that process"
        ) from error
