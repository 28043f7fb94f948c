"""The requests of a scheduler: `Waiting`, those without a row, and `Running`, those with one."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger
from specpool.arrays import Int32, Int64
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.round_shapes import RoundShapes


class Waiting:
    """The queue of waiting requests: greater priority first, then in the order of arrival.

    Joining, leaving and finding the next request cost O(log n) for n waiting requests.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._requests: dict[int, Request] = {}  # the waiting requests, by number
        # A heap of their orders. A request that has left stays until it comes first, or `tidy`.
        self._orders: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order, at the cost of a sort."""
        return iter(sorted(self._requests.values(), key=_order))

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def first(self) -> Request:
        """The request to admit next."""
        while self._orders[0][1] not in self._requests:
            heapq.heappop(self._orders)
        return self._requests[self._orders[0][1]]

    def has_number_of(self, request: Request) -> bool:
        """Return whether a request with this number waits."""
        return request.request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request, and its siblings unless they will share its prompt.

        A second call does nothing.
        """
        shares = len(request.tokens) > 1 and request.finish_reason is None
        siblings = [] if shares else request.siblings
        for sample in [request, *siblings]:
            if sample.finish_reason is None and sample not in self:
                heapq.heappush(self._orders, _order(sample))  # first: an order alone does no harm
                self._requests[sample.request_id] = sample
        if siblings:
            request.siblings = []

    def part(self, request: Request) -> None:
        """Queue the request's siblings separately, because they can no longer share its pages."""
        for sibling in request.siblings:
            self.add(sibling)
        request.siblings = []

    def remove(self, request: Request) -> None:
        """Take a request that got a row, or has ended, from the queue."""
        del self._requests[request.request_id]
        if len(self._orders) > 2 * len(self._requests) + _TIDY:
            self.tidy()

    def tidy(self) -> None:
        """Rebuild the heap without requests that have left."""
        self._orders = sorted(map(_order, self._requests.values()))


# The heap is rebuilt when it holds this many orders and two for each waiting request.
_TIDY = 64


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.request_id


class Running:
    """The requests that have a row. Only `start`, `leave` and `remove` change which they are.

    Attributes:
        requests: number -> request, in the order of admission.
        prefilling: row -> request, for requests that cannot decode yet, in the order of admission.
        by_row: object [num_rows + 1], the request of each row, or None.
        lens: int32 [num_rows + 1], tokens that the host knows; 0 = the row is free.
        limits: int32 [num_rows + 1], the most tokens; 0 = the row cannot decode yet, or is free.
        shapes: int32 [num_rows + 1], `Request.shape_index`.
        waits: bool [num_rows + 1], whether the row's next round waits for the tokens of its last,
            because the host has to know them.
        accept_len: int32 [num_rows + 1], of the row's latest round; kept up under overlap only.
    """

    def __init__(self, ledger: Ledger, round_shapes: RoundShapes, *, reads_tokens: bool) -> None:
        """Start without requests; see `SchedulerConfig` for the option."""
        self._ledger, self._round_shapes = ledger, round_shapes
        self._reads_tokens = reads_tokens
        self._num_admitted = 0
        self.requests: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        num_rows = ledger.num_rows + 1
        self.by_row = np.full(num_rows, None, object)
        self.waits = np.zeros(num_rows, np.bool_)
        self._reads = np.ones(num_rows, np.bool_)  # rows whose drafter reads tokens
        self.accept_len: Int32 = np.ones(num_rows, np.int32)
        self.lens: Int32
        self.limits: Int32
        self.shapes: Int32
        self.lens, self.limits, self.shapes = np.zeros((3, num_rows), np.int32)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

    def start(self, request: Request, row: int, prefilled_len: int) -> None:
        """Add a request with a row that has KV of its first `prefilled_len` tokens."""
        if request.times.started is None:
            request.times.started = time.perf_counter()
        request.row, request.epoch = row, int(self._ledger.epoch[row])
        request.prefilled_len, request.prefill_len = prefilled_len, len(request.tokens)
        request.shared_len, request.indexed_len, request.cuts = prefilled_len, 0, set()
        if request.handle is None:
            _count_start(request)
        self.by_row[row] = request
        self.lens[row], self.accept_len[row] = len(request.tokens), 1
        self.shapes[row] = request.shape_index
        self.waits[row] = request.waits_for_tokens
        self._reads[row] = request.reads_tokens
        self._round_shapes.admit(row, request, self._num_admitted)
        self.prefilling[row] = request
        self._num_admitted += 1
        self.requests[request.request_id] = request

    def go_on(self, request: Request, prefilled_len: int) -> None:
        """Prefill the rest of a request whose KV has come back from the host."""
        request.prefilled_len = prefilled_len
        request.epoch = int(self._ledger.epoch[request.row])
        _count_start(request)

    def decode(self, request: Request) -> None:
        """Let the request decode: its last prefill step is launched."""
        self.limits[request.row] = request.max_len
        self.prefilling.pop(request.row, None)

    def ready(self, shape_of: Int32, order: Int64) -> Int64:
        """Return the rows that are ready for a round, int64 [B], in their order as lanes.

        Args:
            shape_of: int32 [num_rows + 1], the shape that each row's round would have.
            order: int64 [num_rows + 1], each row's place among the lanes.
        """
        in_flight = self._ledger.in_flight
        # Skip a row whose rounds in flight will probably finish it. If the guess is wrong, the row
        # waits one round.
        if self._ledger.overlap_depth:
            is_ready = self.lens + in_flight * self.accept_len < self.limits
            is_ready &= in_flight <= self._ledger.overlap_depth
        else:
            is_ready = (self.lens < self.limits) & (in_flight == 0)
        if self._reads_tokens:  # draft only if the host knows the root
            is_resolved = self.lens == self._ledger.resolved_len + 1
            is_ready &= (in_flight == 0) & is_resolved | (shape_of == 0) | ~self._reads
        if self.waits.any():
            is_resolved = self.lens == self._ledger.resolved_len + 1
            is_ready &= (in_flight == 0) & is_resolved | ~self.waits
        (rows,) = is_ready.nonzero()
        return rows[order[rows].argsort()]

    def grow(self, rows: Int32, num_new: Int32) -> npt.NDArray[np.bool_]:
        """Add new tokens to the rows' lengths; return which rows are at their limit, bool [B]."""
        lens = self.lens[rows] + num_new
        self.lens[rows] = lens
        return lens >= self.limits[rows]

    def leave(self, request: Request) -> None:
        """Forget the request's row, which has been given back; `remove` comes last."""
        self.by_row[request.row] = None
        self.prefilling.pop(request.row, None)
        self.waits[request.row] = False
        self.lens[request.row] = self.limits[request.row] = request.row = 0

    def remove(self, request: Request) -> None:
        """Drop a request that has left its row."""
        del self.requests[request.request_id]

    def clear_rows(self) -> None:
        """Forget every row: all have been given back."""
        self.lens[:] = self.limits[:] = 0
        self.waits[:] = False
        self.by_row[:] = None
        self.prefilling.clear()


def _count_start(request: Request) -> None:
    """Count the tokens that a request reuses, and those that its prefill computes."""
    if not request.num_retractions:
        request.num_reused = request.prefilled_len
    if request.conversation is not None:
        request.conversation.reused_token_ct += request.prefilled_len
        num_computed = request.prefill_len - request.prefilled_len
        request.conversation.computed_token_ct += num_computed
