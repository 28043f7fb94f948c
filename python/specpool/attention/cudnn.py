"""`without_cudnn`: a block in which torch does not attend by cuDNN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Keep torch from attending by cuDNN within the block; on a CPU, do nothing.

    cuDNN builds a plan for each new shape and length, which takes up to half a second.
    """
    switch: Any = torch.backends.cuda  # only some versions of torch have types for it
    if device.type != "cuda" or not switch.cudnn_sdp_enabled():
        yield
        return
    switch.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        switch.enable_cudnn_sdp(True)
