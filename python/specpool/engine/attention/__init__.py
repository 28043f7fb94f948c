"""Attention over pages: the views that a forward reads and writes, and the back ends."""

from specpool.engine.attention.attend import attend
from specpool.engine.attention.backend import (
    BACK_ENDS,
    BackEnd,
    back_end,
    check_trees,
    start_back_end,
)
from specpool.engine.attention.graph_recorder import GraphRecorder, Started
from specpool.engine.attention.view import (
    AttentionBatch,
    AttentionView,
    JoinedView,
    TokenReads,
    View,
)

__all__ = [
    "BACK_ENDS",
    "AttentionBatch",
    "AttentionView",
    "BackEnd",
    "GraphRecorder",
    "JoinedView",
    "Started",
    "TokenReads",
    "View",
    "attend",
    "back_end",
    "check_trees",
    "start_back_end",
]
