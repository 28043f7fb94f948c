"""`without_cudnn`: a block in which torch does not attend by cuDNN."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from specpool.engine.switches import HeldOff

_cuda: Any = torch.backends.cuda  # only some versions of torch have types for its switches
_cudnn = HeldOff(lambda: _cuda.cudnn_sdp_enabled(), lambda is_on: _cuda.enable_cudnn_sdp(is_on))


def without_cudnn(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Keep torch from attending by cuDNN within the block; on a CPU, do nothing.

    cuDNN builds a plan for each new shape and length, which takes up to half a second. torch's
    switch is one for all threads, so it stays off until the last engine's block ends.
    """
    return _cudnn.block() if device.type == "cuda" else contextlib.nullcontext()
