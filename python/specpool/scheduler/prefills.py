"""`Prefills`: rows that cannot decode yet, and the chunks that bring them there."""

from __future__ import annotations

from collections.abc import Callable

from specpool._core import Ledger, Plan
from specpool.errors import OutOfMemory, OutOfPages
from specpool.memory.host.tier import Handle, HostTier
from specpool.scheduler.request import Request
from specpool.scheduler.step import Step


class Prefills:
    """Requests whose tokens do not all have KV, or are about to, in the order of admission."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        prefill_tokens: int,
        keeps_draft_kv: bool,
        host: HostTier | None,
        reclaim: Callable[[OutOfPages], bool],
        give_up: Callable[[list[Request], OutOfMemory], None],
    ) -> None:
        """There is none; see `Scheduler` for the options.

        Args:
            ledger: of the rows.
            prefill_tokens: tokens of one step at most.
            keeps_draft_kv: a chunk of a request that drafts writes draft KV.
            host: what comes back from the host comes from there.
            reclaim: makes pages free that a chunk lacks; False = it cannot.
            give_up: ends the requests of a chunk that the ledger has no memory for.
        """
        self._ledger, self._prefill_tokens = ledger, prefill_tokens
        self._keeps_draft_kv, self._host = keeps_draft_kv, host
        self._reclaim, self._give_up = reclaim, give_up
        self._has_windows = any(group.window is not None for group in ledger.groups)
        self._requests: dict[int, Request] = {}  # by row

    def add(self, request: Request) -> None:
        """It has a row."""
        self._requests[request.row] = request

    def drop(self, row: int) -> None:
        """The row can decode, or has been given back."""
        self._requests.pop(row, None)

    def clear(self) -> None:
        """All rows have been given back."""
        self._requests.clear()

    def reload(self) -> Step | None:
        """The next chunks of what comes back from the host; as many as pages allow."""
        if self._host is None:
            return None
        chosen: list[Request] = []
        handles: list[Handle] = []
        ends: list[int] = []
        writes_draft = False
        for request in self._requests.values():
            handle = request.handle
            if handle is None or request.prefilled_len >= handle.length:
                continue
            end, writes = self._host.next_extend(handle, request.prefilled_len)
            if not chosen:
                writes_draft = writes
            if writes == writes_draft and len(chosen) < self._ledger.max_batch:
                chosen.append(request)
                handles.append(handle)
                ends.append(end)
        plan = self._extend(chosen, ends, writes_draft)
        return None if plan is None else Step(plan, chosen, handles[: len(chosen)])

    def chunk(self) -> Step | None:
        """The next chunks of prompts, in the order of admission; as many as pages allow."""
        if not self._requests:
            return None
        budget = self._prefill_tokens
        chosen: list[Request] = []
        ends: list[int] = []
        for request in self._requests.values():
            # One with siblings waits before its last token, until they have been forked.
            left = request.prefill_len - request.prefilled_len - bool(request.siblings)
            if request.wants_pin and self._has_windows and left > 1:  # no more of it is held then
                left -= 1
            if (
                request.handle is None
                and left > 0
                and budget > 0
                and len(chosen) < self._ledger.max_batch
            ):
                chosen.append(request)
                ends.append(request.prefilled_len + min(left, budget))
                budget -= min(left, budget)
        writes_draft = self._keeps_draft_kv and any(r.shape_index for r in chosen)
        plan = self._extend(chosen, ends, writes_draft)
        return None if plan is None else Step(plan, chosen)

    def _extend(self, chosen: list[Request], ends: list[int], writes_draft: bool) -> Plan | None:
        """Prepare the extends of these requests, but for the last ones that find no pages."""
        while chosen:
            try:
                plan = self._ledger.prepare_extend(
                    [r.row for r in chosen], ends, writes_draft=writes_draft
                )
            except OutOfPages as shortage:
                if not self._reclaim(shortage):
                    chosen.pop(), ends.pop()
                continue
            except OutOfMemory as shortage:
                self._give_up(chosen, shortage)
                return None
            for request, end in zip(chosen, ends, strict=True):
                request.prefilled_len = end
            return plan
        return None
