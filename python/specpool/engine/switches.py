"""`HeldOff`: something of the whole process that several threads may need switched off."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class HeldOff:
    """Something of the whole process that is off while any thread is within a block.

    The first thread that enters switches it off. The last one that leaves switches it on again, if
    it was on before.
    """

    def __init__(self, is_on: Callable[[], bool], switch: Callable[[bool], object]) -> None:
        """Hold nothing off yet.

        Args:
            is_on: returns whether it is on.
            switch: switches it on or off.
        """
        self._is_on, self._switch = is_on, switch
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._was_on = False

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Keep it off within the block."""
        with self._lock:
            if self._num_blocks == 0:
                self._was_on = self._is_on()
                if self._was_on:
                    self._switch(False)
            self._num_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                if self._num_blocks == 0 and self._was_on:
                    self._switch(True)
