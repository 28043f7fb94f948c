"""`Rows`: the one place where rows are given back to the ledger.

A row goes back to the pool, stays with its conversation, goes to the host, or is out of use.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger, Plan
from specpool.errors import SpecpoolError
from specpool.memory.host.tier import Handle
from specpool.scheduler.requests.request import Request
from specpool.scheduler.rows.host_handles import HostHandles


class Rows:
    """Gives rows back. A row that the ledger refuses to take is out of use from then on.

    Attributes:
        before_release: called with a request that ends or is retracted while it still has its row.
    """

    def __init__(
        self, ledger: Ledger, handles: HostHandles, before_release: Callable[[Request], None]
    ) -> None:
        """Every row is in use."""
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
        """Give back a row whose tokens may come again."""
        self._ledger.retract(row)

    def release(self, row: int) -> Handle | None:
        """Give back a row whose KV would be of use again; move that to the host if it is worth it.

        Returns:
            The KV on the host; None = it is gone.
        """
        handle = self._handles.offload(row)
        if handle is None:
            self.retract(row)
        return handle

    def end_turn(self, row: int, num_tokens: int) -> int:
        """Leave a row idle, with that many tokens at most; return how many it has."""
        return self._ledger.end_turn(row, num_tokens)

    def abort_all(self, is_owned: Callable[[int], bool]) -> None:
        """Give back every row in use that nobody owns: Ctrl-C came before it had an owner."""
        for row in range(1, self._ledger.num_rows + 1):
            if self._ledger.is_live(row) and not (self.is_quarantined(row) or is_owned(row)):
                try:
                    self.abort(row)
                except SpecpoolError:
                    self.quarantine(row)

    def quarantine(self, row: int) -> None:
        """Take the row out of use, for good: what it holds is not given back."""
        self._quarantined[row] = int(self._ledger.epoch[row])

    def is_quarantined(self, row: int) -> bool:
        """Whether the row is out of use."""
        return self._quarantined.get(row) == self._ledger.epoch[row] and self._ledger.is_live(row)

    def alive(self, plan: Plan) -> npt.NDArray[np.bool_]:
        """Return the plan's lanes whose row was not given back or taken out of use since, [B]."""
        alive: npt.NDArray[np.bool_] = self._ledger.epoch[plan.rows] == plan.epochs
        if self._quarantined:
            alive &= [not self.is_quarantined(row) for row in plan.rows.tolist()]
        return alive
