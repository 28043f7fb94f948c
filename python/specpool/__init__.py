"""specpool: the KV-cache memory manager for speculative decoding.

The ledger needs NumPy alone; `Engine` and what belongs to it are loaded at first use and need
`specpool[hf]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specpool._core import Group, Ledger, Plan, Shape, Snapshot, __version__
from specpool.config import EngineConfig, SamplingParams
from specpool.errors import (
    CheckpointError,
    ConfigError,
    ContextEnd,
    CorruptState,
    DraftLag,
    NotReady,
    OrderError,
    OutOfMemory,
    OutOfPages,
    OutOfRows,
    PageStateError,
    RecordError,
    RowOverflow,
    ShapeError,
    SpecpoolError,
    StalePlan,
)

if TYPE_CHECKING:
    from specpool.engine import Engine
    from specpool.output import Chunk
    from specpool.request import RequestOutput
    from specpool.session import Session, Turn
    from specpool.stats import EngineStats

_LAZY = {
    "Chunk": "specpool.output",
    "Engine": "specpool.engine",
    "EngineStats": "specpool.stats",
    "RequestOutput": "specpool.request",
    "Session": "specpool.session",
    "Turn": "specpool.session",
}

__all__ = [
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "ContextEnd",
    "CorruptState",
    "DraftLag",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Group",
    "Ledger",
    "NotReady",
    "OrderError",
    "OutOfMemory",
    "OutOfPages",
    "OutOfRows",
    "PageStateError",
    "Plan",
    "RecordError",
    "RequestOutput",
    "RowOverflow",
    "SamplingParams",
    "Session",
    "Shape",
    "ShapeError",
    "Snapshot",
    "SpecpoolError",
    "StalePlan",
    "Turn",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("specpool"):
            raise
        raise ModuleNotFoundError(
            f"specpool.{name} needs {error.name}: pip install 'specpool[hf]'", name=error.name
        ) from None
