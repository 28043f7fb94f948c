"""`Admission`: gives rows to waiting requests."""

from __future__ import annotations

import contextlib

import numpy as np

from specpool.arrays import Int32, Int64
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.state import State
from specpool.engine.shapes.budget import Spare
from specpool.errors import NotReady, OutOfMemory, OutOfPages, OutOfRows


class Admission:
    """The part of the scheduler that gives rows to waiting requests and to samples.

    Waiting requests get rows in their order. Samples of a running prompt get forks of its row.
    """

    def __init__(self, state: State, reclaim: Reclaim) -> None:
        """Move requests of `state` from those that wait to those that run.

        `reclaim` frees pages if the tail of a pin finds none, and ends a request that the ledger
        has no memory for.
        """
        self._state, self._reclaim = state, reclaim

    def admit(self) -> None:
        """Admit waiting requests in order, while the pages for every row's next round fit."""
        state = self._state
        claimed = None
        while state.waiting and len(state.running) < state.config.max_batch:
            request = state.waiting.first
            try:
                hit = state.prefix_cache.match(request)
                if state.prefix_cache.is_coming(request, hit.length):
                    return
                if state.running:
                    needed = state.needs.pages(len(request.tokens), request.shape_index)
                    new_pages = needed - hit.shared + hit.cached
                    pages, chunks = self._claimed() if claimed is None else claimed
                    chunks = chunks + state.needs.chunk_pages(len(request.tokens), needed)
                    claimed = pages + new_pages, chunks
                    total = state.needs.with_step(*claimed)
                    if not self._has_room(new_pages) or (total > state.needs.num_pages).any():
                        return
                start = self._take_idle_row(request) or self._take_row(request)
                if start is None:
                    return
                row, length = start
                self._start(request, row, length)
                state.prefix_cache.cuts.start(request)
            except BaseException as error:
                self._reclaim.fault(request, error)
                continue
            state.prefix_cache.count(request, length)
            state.waiting.remove(request)
            if length == len(request.tokens) - 1:  # no prefill will fork its siblings
                state.waiting.part(request)
            if length or request.conversation is not None:  # which pages are shared has changed
                claimed = None

    def _start(self, request: Request, row: int, length: int) -> None:
        """Let a request run on a row; give the row back if that fails."""
        state = self._state
        try:
            state.running.start(request, row, length)
        except BaseException:
            state.running.leave(request)
            state.conversations.give_up(row)
            raise

    def _has_room(self, new_pages: Int64) -> bool:
        """Return whether `new_pages`, int64 [num_groups], can be had now."""
        ledger = self._state.ledger
        return all(
            num_pages <= ledger.free_pages(g) + ledger.cached_pages(g) + ledger.reclaimable_pages(g)
            for g, num_pages in enumerate(new_pages.tolist())
        )

    def spare(self, rows: Int64, shapes: Int32) -> Spare:
        """Return the pages by which running rows may be wider than admission counts them.

        The rows' next rounds then fit with the headroom of every running row, and no row waits
        whose pages are there: waiting requests come first, because a row gives a token more for a
        smaller share of the seconds.

        Args:
            rows: int64 [B], rows that decode.
            shapes: int32 [B, C], the shapes that each may have, the narrowest first.

        Returns:
            Pages beyond the narrowest shape's, int32 [B, C, G], and the pages that are left for
            them, int64 [G]. None means all rows may have their widest shape.
        """
        state = self._state
        ledger, needs = state.ledger, state.needs
        pages = needs.pages_by_shape(state.running.lens[rows], shapes).astype(np.int32)
        pages -= pages[:, :1]
        free = needs.num_pages - needs.with_step(*self._claimed())
        for group in range(len(ledger.groups)):  # pages that others hold, such as sessions
            available = ledger.free_pages(group) + ledger.cached_pages(group)
            free[group] = max(min(free[group], available), 0)
        if (pages.max(axis=1).sum(axis=0) <= free).all():
            return None
        return np.maximum(pages, 0), free

    def _claimed(self) -> tuple[Int64, Int64]:
        """Return the pages of all running rows' next rounds, and of their chunks. O(rows).

        Both are int64 [num_groups].
        """
        state = self._state
        ledger, lens = state.ledger, state.running.lens
        groups = range(len(ledger.groups))
        rows = np.flatnonzero(lens)
        claimed, chunks = state.needs.total_pages(lens[rows], state.running.shapes[rows])
        if not state.in_flight:  # then only copies that wait for a step fence pages
            claimed += [ledger.fenced_pages(g) for g in groups]
        num_shared = [ledger.shared_pages(g) for g in groups]
        if any(num_shared):
            claimed -= np.where(num_shared, self._shared_twice(rows, num_shared), 0)
        return claimed, chunks

    def _shared_twice(self, rows: Int64, num_shared: list[int]) -> Int64:
        """Return how many pages of these running rows a sum over the rows counts too often.

        It is negative if there are shared pages that none of the rows holds, as those of a pin.
        `num_shared` are the shared pages of each group; the result is int64 [num_groups].
        """
        ledger = self._state.ledger
        _, shared = ledger.held_pages(rows)
        repeated: Int64 = shared.sum(axis=0) - num_shared
        # Idle rows give their pages back when they are needed. A turn that has not prepared its
        # first step is still counted as idle; then it is not known whose the pages are.
        if ledger.idle.any() and not ledger.idle[rows].any():
            idle_held, idle_shared = ledger.held_pages(np.flatnonzero(ledger.idle))
            unshared = (idle_held - idle_shared).sum(axis=0)
            reclaimable = [ledger.reclaimable_pages(g) for g in range(len(ledger.groups))]
            repeated += np.maximum(reclaimable - unshared, 0)
        return repeated

    def _take_idle_row(self, request: Request) -> tuple[int, int] | None:
        """Take the idle row of the request's conversation, unless the prefix cache has more.

        A cut row goes back to the beginning of a page that is shared; a hit ends at any token.

        Returns:
            The row and its number of tokens with KV, or None.
        """
        state = self._state
        start = state.conversations.take(request)
        if start is None or state.prefix_cache.match(request).length <= start[1]:
            return start
        state.conversations.give_up(start[0])
        return None

    def _take_row(self, request: Request) -> tuple[int, int] | None:
        """Take a free row; return it and its number of tokens with KV, or None.

        The KV comes from the longest text in the prefix cache, or from a longer pin.
        """
        state = self._state
        state.handles.take(request)
        pins = state.pins.shared_with(request.tokens) if request.handle is None else []
        cached_len = state.prefix_cache.match(request).length if pins else 0
        while True:
            pays = state.prefix_cache.cuts.pays
            pins = [(pin, n) for pin, n in pins if n > cached_len and pays(request, n)]
            try:
                if pins:
                    pin, length = pins[0]
                    row = state.ledger.admit(
                        str(request.request_id), prefix=pin.prefix, length=length
                    )
                elif row := state.handles.bring_back(request):
                    length = self._cut(request, row)
                else:
                    row, length = state.prefix_cache.admit(request)
            except NotReady:  # the window before that length is not held
                del pins[0]
            except OutOfRows:  # all free rows are fenced
                return None
            except OutOfPages as shortage:
                if self._reclaim.drop_idle(shortage):
                    continue
                if state.running or state.in_flight or state.pins or request.skips_cache:
                    return None  # others give pages back, or a pin gives way
                request.skips_cache = True  # the pages that it would share are all there are
                state.handles.drop(request)
                pins, cached_len = [], 0
            except OutOfMemory as shortage:
                if not state.running:  # no request will give memory back
                    self._reclaim.give_up([request], shortage)
                return None
            else:
                return row, length

    def _cut(self, request: Request, row: int) -> int:
        """Cut a row that came back to the tokens of use; give the row back if that fails."""
        try:
            return self._state.conversations.start(request, row)
        except BaseException:
            self._state.conversations.give_up(row)
            raise

    def fork(self, request: Request) -> None:
        """Fork the request's row for its siblings, once all but the prompt's last token has KV.

        If the row has a state, they begin where that is. Siblings that find no row or page wait.
        """
        state = self._state
        while request.siblings:
            sibling, row = request.siblings[0], 0
            if sibling.finish_reason is None and len(state.running) < state.config.max_batch:
                with contextlib.suppress(OutOfRows, OutOfPages, OutOfMemory):
                    row = state.ledger.fork(request.row, str(sibling.request_id))
            if row:
                try:
                    self._start(sibling, row, int(state.ledger.resolved_len[row]))
                except BaseException as error:
                    state.waiting.add(sibling)
                    self._reclaim.fault(sibling, error)
            else:
                state.waiting.add(sibling)
            del request.siblings[0]
