"""SGLang's look for leaks, which has to know of the pages in quarantine.

When it is idle, SGLang ends the process unless free, cached and held slots are all there are.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from specpool.plugins.status import status_of

_SCHEDULER = "sglang.srt.managers.scheduler"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker"
_KNOWN = ["self", "ps", "uncached"]


def counts_quarantine() -> bool:
    """Return whether no look for leaks will end the process because of a page in quarantine.

    The first call changes SGLang's: its module is loaded then if it is to be loaded at all.
    """
    checker = getattr(sys.modules.get(_CHECKER), "SchedulerInvariantChecker", None)
    if checker is None and _SCHEDULER not in sys.modules:
        return True  # an allocator without a scheduler
    original = getattr(checker, "_check_full_pool", None)
    if hasattr(original, "__wrapped__"):
        return True
    if original is None or list(inspect.signature(original).parameters) != _KNOWN:
        status_of("sglang").leave_alone(
            "a wrong free raises: SGLang looks for leaks in another way"
        )
        return False

    @functools.wraps(original)
    def check_full_pool(self: Any, ps: Any, uncached: int = 0) -> Any:
        allocator = self.token_to_kv_pool_allocator
        quarantine = getattr(allocator, "quarantine", None)
        num_pages = 0 if quarantine is None else len(quarantine.blocks)
        return original(self, ps, uncached + num_pages * allocator.page_size)

    checker._check_full_pool = check_full_pool  # type: ignore[union-attr]
    return True
