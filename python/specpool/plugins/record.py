"""The logs of an engine's pools: their paths, and closing them when the process ends."""

from __future__ import annotations

import itertools
import os
from multiprocessing.util import Finalize

from specpool import BlockPool, Ledger

_numbers = itertools.count(1)


def log_path(variable: str) -> str | None:
    """Return the path of the next log, as the environment asks; None if it asks for none.

    Each process and each pool writes a log of its own: `PATH.<process>.<number>`.
    """
    record = os.environ.get(variable)
    return f"{record}.{os.getpid()}.{next(_numbers)}" if record else None


def close_at_exit(pool: BlockPool | Ledger) -> None:
    """Write the log out when the process ends, also in a child of `multiprocessing`."""
    Finalize(None, pool.close, exitpriority=0)
