"""Attention back ends: what one forward reads and writes on pages, and how it attends."""

from specpool.attention.torch_backend import attend
from specpool.attention.view import AttentionBatch, AttentionView

__all__ = ["AttentionBatch", "AttentionView", "attend"]
