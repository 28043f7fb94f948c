"""specpool: the KV-cache memory manager for speculative decoding.

The ledger needs NumPy alone. `Engine` and what belongs to it are imported at first use; `Engine`
needs `specpool[hf]`.
"""

from __future__ import annotations

import copyreg
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specpool._core import BlockPool, Group, Ledger, Plan, Shape, Snapshot, StateGroup, __version__
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
    RankError,
    RecordError,
    RowOverflow,
    ShapeError,
    SpecpoolError,
    StalePlan,
    TransferError,
)

if TYPE_CHECKING:
    from specpool.engine.comparison import Comparison
    from specpool.engine.config import EngineConfig
    from specpool.engine.engine import Engine
    from specpool.engine.output import Chunk, RequestOutput
    from specpool.engine.sampling_params import SamplingParams
    from specpool.engine.session import Session, Turn
    from specpool.engine.stats import EngineStats
    from specpool.engine.text.structured.grammar import Grammar

_LAZY = {
    "Chunk": "specpool.engine.output",
    "Comparison": "specpool.engine.comparison",
    "Engine": "specpool.engine.engine",
    "EngineConfig": "specpool.engine.config",
    "EngineStats": "specpool.engine.stats",
    "Grammar": "specpool.engine.text.structured.grammar",
    "RequestOutput": "specpool.engine.output",
    "SamplingParams": "specpool.engine.sampling_params",
    "Session": "specpool.engine.session",
    "Turn": "specpool.engine.session",
}

__all__ = [
    "BlockPool",
    "CheckpointError",
    "Chunk",
    "Comparison",
    "ConfigError",
    "ContextEnd",
    "CorruptState",
    "DraftLag",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Grammar",
    "Group",
    "Ledger",
    "NotReady",
    "OrderError",
    "OutOfMemory",
    "OutOfPages",
    "OutOfRows",
    "PageStateError",
    "Plan",
    "RankError",
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
    "StateGroup",
    "TransferError",
    "Turn",
    "__version__",
]


def _parts(shape: Shape) -> tuple[type[Shape], tuple[int, int, int]]:
    return Shape, (shape.num_steps, shape.topk, shape.num_draft_tokens)


copyreg.pickle(Shape, _parts)  # a Rust class, which pickle and copy know nothing of


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
