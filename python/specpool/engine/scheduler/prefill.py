"""`Prefill`: prepares prefill steps and reloads."""

from __future__ import annotations

from specpool._core import Plan
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.state import State
from specpool.engine.scheduler.step import Step
from specpool.errors import OutOfMemory, OutOfPages


class Prefill:
    """The part of the scheduler that prepares steps for requests whose tokens lack KV."""

    def __init__(self, state: State, reclaim: Reclaim) -> None:
        """Prepare steps for running requests of `state`; `reclaim` frees pages for a chunk."""
        self._state, self._reclaim = state, reclaim
        self._has_windows = any(group.window is not None for group in state.ledger.groups)

    def reload(self) -> Step | None:
        """Prepare the next chunks that come back from the host, as many as pages allow."""
        state = self._state
        if not state.running.prefilling:
            return None
        chosen, ends, writes_draft = state.handles.reloads(
            state.running.prefilling.values(), state.ledger.max_batch
        )
        plan = self._extend(chosen, ends, writes_draft)
        if plan is None:
            return None
        handles = [request.handle for request in chosen if request.handle is not None]
        return Step(plan, chosen, handles)

    def chunk(self) -> Step | None:
        """Prepare the next chunks of prompts in the order of admission, as many as pages allow."""
        state = self._state
        if not state.running.prefilling:
            return None
        budget = state.config.prefill_tokens
        chosen: list[Request] = []
        ends: list[int] = []
        for request in state.running.prefilling.values():
            # A request with siblings waits before its last token until they have been forked.
            num_left = request.prefill_len - request.prefilled_len - bool(request.siblings)
            # So only windows stay held.
            if request.wants_pin and self._has_windows and num_left > 1:
                num_left -= 1
            if (
                request.handle is None
                and num_left > 0
                and budget > 0
                and len(chosen) < state.ledger.max_batch
            ):
                end = request.prefilled_len + min(num_left, budget)
                end = state.prefix_cache.cuts.chunk_end(request, end)
                chosen.append(request)
                ends.append(end)
                budget -= end - request.prefilled_len
        writes_draft = state.config.keeps_draft_kv and any(r.shape_index for r in chosen)
        plan = self._extend(chosen, ends, writes_draft)
        return None if plan is None else Step(plan, chosen)

    def _extend(self, chosen: list[Request], ends: list[int], writes_draft: bool) -> Plan | None:
        """Prepare the extends of these requests, without the last ones if they find no pages."""
        while chosen:
            keep = [lane for lane, r in enumerate(chosen) if ends[lane] in r.cuts]
            try:
                plan = self._state.ledger.prepare_extend(
                    [r.row for r in chosen], ends, writes_draft=writes_draft, keep=keep
                )
            except OutOfPages as shortage:
                if not self._reclaim.drop_idle(shortage):
                    chosen.pop(), ends.pop()
                continue
            except OutOfMemory as shortage:
                self._reclaim.give_up(chosen, shortage)
                return None
            for request, end in zip(chosen, ends, strict=True):
                request.prefilled_len = end
            return plan
        return None
