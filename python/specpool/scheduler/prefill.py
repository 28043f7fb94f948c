"""`Prefills`: prepares prefill steps and reloads."""

from __future__ import annotations

from specpool._core import Ledger, Plan
from specpool.errors import OutOfMemory, OutOfPages
from specpool.scheduler.config import SchedulerConfig
from specpool.scheduler.queues import Running
from specpool.scheduler.reclaim import Ends, Room
from specpool.scheduler.request import Request
from specpool.scheduler.rows import HostHandles
from specpool.scheduler.step import Step


class Prefills:
    """The part of the scheduler that prepares steps for requests whose tokens lack KV."""

    def __init__(
        self,
        ledger: Ledger,
        config: SchedulerConfig,
        running: Running,
        handles: HostHandles,
        room: Room,
        ends: Ends,
    ) -> None:
        """Prepare steps for requests of `running`.

        Args:
            ledger: the rows and pages.
            config: limits the tokens of a step, and says whether it writes draft KV.
            running: the requests with a row.
            handles: the KV that comes back from the host.
            room: frees pages for a chunk.
            ends: ends the requests of a chunk that the ledger has no memory for.
        """
        self._ledger, self._config, self._running = ledger, config, running
        self._handles, self._room, self._ends = handles, room, ends
        self._has_windows = any(group.window is not None for group in ledger.groups)

    def reload(self) -> Step | None:
        """Prepare the next chunks that come back from the host, as many as pages allow."""
        if not self._running.prefilling:
            return None
        chosen, ends, writes_draft = self._handles.reloads(
            self._running.prefilling.values(), self._ledger.max_batch
        )
        plan = self._extend(chosen, ends, writes_draft)
        if plan is None:
            return None
        return Step(plan, chosen, [each.handle for each in chosen if each.handle is not None])

    def chunk(self) -> Step | None:
        """Prepare the next chunks of prompts in the order of admission, as many as pages allow."""
        if not self._running.prefilling:
            return None
        budget = self._config.prefill_tokens
        chosen: list[Request] = []
        ends: list[int] = []
        for request in self._running.prefilling.values():
            # A request with siblings waits before its last token until they have been forked.
            left = request.prefill_len - request.prefilled_len - bool(request.siblings)
            if request.wants_pin and self._has_windows and left > 1:  # so only windows stay held
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
        writes_draft = self._config.keeps_draft_kv and any(r.shape_index for r in chosen)
        plan = self._extend(chosen, ends, writes_draft)
        return None if plan is None else Step(plan, chosen)

    def _extend(self, chosen: list[Request], ends: list[int], writes_draft: bool) -> Plan | None:
        """Prepare the extends of these requests, without the last ones if they find no pages."""
        while chosen:
            try:
                plan = self._ledger.prepare_extend(
                    [r.row for r in chosen], ends, writes_draft=writes_draft
                )
            except OutOfPages as shortage:
                if not self._room.reclaim(shortage):
                    chosen.pop(), ends.pop()
                continue
            except OutOfMemory as shortage:
                self._ends.give_up(chosen, shortage)
                return None
            for request, end in zip(chosen, ends, strict=True):
                request.prefilled_len = end
            return plan
        return None
