"""`Rows`: gives rows back to the ledger; no other file does.

A row is released, stays idle with its conversation, goes to the host, or is out of use.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger, Plan
from specpool.errors import SpecpoolError
from specpool.memory.host.handle import Handle
from specpool.scheduler.requests.request import Request
from specpool.scheduler.rows.host_handles import HostHandles


class Rows:
    """The part of the scheduler that gives rows back.

    Attributes:
        before_release: called with a request that ends or is retracted, before its row is released.
    """

    def __init__(
        self, ledger: Ledger, handles: HostHandles, before_release: Callable[[Request], None]
    ) -> None:
        """Start without rows out of use."""
        self._ledger, self._handles = ledger, handles
        self.before_release = before_release
        self._quarantined: dict[int, int] = {}  # rows out of use, and the epoch of each

    def finish(self, row: int) -> None:
        """Give back the row of a request that has ended by a stop or its length."""
        self._ledger.finish(row)

    def abort(self, row: int) -> None:
        """Give back the row of a request that has ended otherwise."""
        self._ledger.abort(row)

    def retract(self, row: int) -> None:
        """Give back a row whose request or conversation may come back."""
        self._ledger.retract(row)

    def return_lent(self, request: Request) -> None:
        """Drop what the host has lent a request for the row that it has lost."""
        self._handles.return_lent(request)

    def release(self, row: int) -> Handle | None:
        """Give back a row; move its KV to the host first if that pays.

        Returns:
            The handle of the KV on the host; None = the KV is gone.
        """
        handle = self._handles.offload(row)
        if handle is None:
            self.retract(row)
        return handle

    def end_turn(self, row: int, num_tokens: int) -> int:
        """Make a row idle with at most `num_tokens` tokens; return how many it has."""
        return self._ledger.end_turn(row, num_tokens)

    def abort_all(self, is_owned: Callable[[int], bool]) -> None:
        """Give back every live row without an owner, after Ctrl-C at any point."""
        for row in range(1, self._ledger.num_rows + 1):
            if self._ledger.is_live(row) and not (self.is_quarantined(row) or is_owned(row)):
                try:
                    self.abort(row)
                except SpecpoolError:
                    self.quarantine(row)

    def quarantine(self, row: int) -> None:
        """Take the row out of use for good; its pages are not given back."""
        self._quarantined[row] = int(self._ledger.epoch[row])

    def is_quarantined(self, row: int) -> bool:
        """Return whether the row is out of use."""
        return self._quarantined.get(row) == self._ledger.epoch[row] and self._ledger.is_live(row)

    def alive(self, plan: Plan) -> npt.NDArray[np.bool_]:
        """Return bool [B]: the plan's lanes whose row was not released or quarantined since."""
        alive: npt.NDArray[np.bool_] = self._ledger.epoch[plan.rows] == plan.epochs
        if self._quarantined:
            alive &= [not self.is_quarantined(row) for row in plan.rows.tolist()]
        return alive
