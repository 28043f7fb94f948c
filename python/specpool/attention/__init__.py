"""Attention over pages: the views that a forward reads and writes, and the back ends."""

from specpool.attention.attend import attend
from specpool.attention.backend import BACK_ENDS, BackEnd, back_end, check_trees, start_back_end
from specpool.attention.graph_recorder import GraphRecorder, Started
from specpool.attention.view import (
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
