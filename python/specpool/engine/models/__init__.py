"""Models that run over pages: any Hugging Face decoder as the target, EAGLE heads as drafts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool.engine.models.eagle.head import EagleHead
    from specpool.engine.models.target import TargetModel
    from specpool.engine.models.target_output import TargetOutput

# Imported at first use: these modules import torch, which readers of a config do not need.
_LAZY = {
    "EagleHead": "specpool.engine.models.eagle.head",
    "TargetModel": "specpool.engine.models.target",
    "TargetOutput": "specpool.engine.models.target",
}

__all__ = ["EagleHead", "TargetModel", "TargetOutput"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
