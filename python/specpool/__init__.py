"""specpool: the KV-cache memory manager for speculative decoding."""

from specpool._core import Group, Ledger, Plan, Shape, __version__
from specpool.errors import (
    CheckpointError,
    ConfigError,
    ContextEnd,
    CorruptState,
    DraftLag,
    NotReady,
    OrderError,
    OutOfPages,
    OutOfRows,
    PageStateError,
    RowOverflow,
    ShapeError,
    SpecpoolError,
    StalePlan,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextEnd",
    "CorruptState",
    "DraftLag",
    "Group",
    "Ledger",
    "NotReady",
    "OrderError",
    "OutOfPages",
    "OutOfRows",
    "PageStateError",
    "Plan",
    "RowOverflow",
    "Shape",
    "ShapeError",
    "SpecpoolError",
    "StalePlan",
    "__version__",
]
