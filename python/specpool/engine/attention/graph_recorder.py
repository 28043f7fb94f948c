"""`Started` and `GraphRecorder`: what a back end is for one engine, and for one CUDA graph."""

from __future__ import annotations

from typing import Protocol

from specpool.arrays import Int32
from specpool.engine.attention.view import Attend


class GraphRecorder(Protocol):
    """The part of a back end that makes one CUDA graph's forwards repeatable."""

    @property
    def attend(self) -> Attend:
        """The `attend` for the views of the graph's work."""

    def restart(self) -> None:
        """Begin the graph's work anew: before each run, and before the capture."""

    def plan(self, hi: Int32) -> None:
        """Prepare a replay on the host, for roots up to `hi`, int32 [B]."""


class Started(Protocol):
    """A back end that serves one engine."""

    @property
    def attend(self) -> Attend:
        """The `attend` of the engine's views."""

    def recorder(self, bound: int) -> GraphRecorder:
        """Return a recorder for a graph whose roots lie up to `bound`."""
