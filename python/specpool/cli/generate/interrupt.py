"""`Interrupt`: handles Ctrl-C during a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A handler of Ctrl-C: the first asks to stop after the round, the second stops at once."""

    def __init__(self) -> None:
        self.is_requested = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Catch SIGINT inside the block."""
        old_handler = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, old_handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
