"""When Python searches for garbage: everything else stands still meanwhile."""

from __future__ import annotations

import asyncio
import atexit
import gc
from collections.abc import Callable

#: Whole searches wait for so many smaller ones (Python's own number is 10): with thousands of
#: requests, each takes a quarter of a second.
_RARELY = 1000
#: Seconds between two looks whether a whole search would be short now.
_PAUSE = 5.0
#: With so few requests it is short: some milliseconds.
_FEW = 64


def settle() -> None:
    """Leave what is loaded out of all later searches: it stays, and takes half a second to see.

    At exit all of it is searched again: libraries print a line for each object that is left behind.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


async def tidy(num_open: Callable[[], int]) -> None:
    """Search while there are few requests, instead of in the middle of a crowd; cancel to end.

    Args:
        num_open: returns how many requests, or idle connections, are open.
    """
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, _RARELY)
    while True:
        await asyncio.sleep(_PAUSE)
        if num_open() <= _FEW:
            gc.collect()
