"""`Rows` gives rows back to the ledger, and `HostHandles` keeps their KV on the host.

No other file gives a row back. A row is released, stays idle with its conversation, goes to the
host, or is out of use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger, Plan
from specpool.arrays import Int32
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.scheduler.request import Conversation, Request
from specpool.errors import NotReady, OutOfPages, OutOfRows, SpecpoolError

_log = logging.getLogger("specpool")


@contextlib.contextmanager
def costing_speed() -> Iterator[None]:
    """Let a failure within the block cost KV that is computed again, and end no request.

    An error of the ledger or the tier is raised all the same: it concerns more than one request.
    """
    try:
        yield
    except SpecpoolError:
        raise
    except Exception as error:
        _log.warning("KV of a request is computed again: %s: %s", type(error).__name__, error)


class HostHandles:
    """The handles of requests and conversations. Each handle has one owner.

    Attributes:
        token_seconds: average seconds to prefill one token; the loop measures and writes it.
    """

    def __init__(self, host: HostTier | None, *, keeps_draft_kv: bool) -> None:
        """Start with no handles. Without a `host`, no KV goes to the host."""
        self._host, self._keeps_draft_kv = host, keeps_draft_kv
        self.token_seconds = 0.0

    def save(self, row: int) -> Handle | None:
        """Copy the row's KV to the host if that pays; return None if nothing was copied."""
        # `NotReady`: a step of the row is in flight.
        with costing_speed(), contextlib.suppress(NotReady):
            if self._host is not None and self._host.pays(row, self.token_seconds):
                return self._host.save(row)
        return None

    def take(self, request: Request) -> None:
        """Give a request its handle, or that of its conversation, cut to the tokens it can use.

        From here on the request owns the handle.
        """
        conversation, handle = request.conversation, request.handle
        if conversation is not None and handle is None:
            handle, conversation.handle = conversation.handle, None
        if handle is not None and self._host is not None:
            drafted_len = handle.drafted_len if self._keeps_draft_kv else handle.length
            request.handle = self._host.trim(handle, request.useful_len(handle.length, drafted_len))

    def bring_back(self, request: Request) -> int:
        """Give a request the row of its handle, if that has a recurrent state; return it, or 0.

        Raises:
            OutOfRows: no row is free.
            OutOfPages: there are too few pages, or no state slot.
        """
        handle, host = request.handle, self._host
        if host is None or handle is None or not host.ledger.states:
            return 0
        row = self._import(host, handle, request)
        request.handle = None
        return row

    def bring_text(
        self, request: Request, tokens: Int32, start: int, *, needs_draft: bool
    ) -> tuple[int, int] | None:
        """Give a request a row on a text with a recurrent state of more than `start` tokens.

        `tokens` are its tokens. With siblings it gets none, as in `lend`.

        Returns:
            The row and its number of tokens. None if the host has no such text, or there is no room
            for the row.
        """
        host = self._host
        if host is None or not host.ledger.states or request.siblings:
            return None
        with costing_speed(), contextlib.suppress(OutOfRows, OutOfPages):
            handle = host.lend(
                tokens, request.salt, start, self.token_seconds, needs_draft=needs_draft
            )
            if handle is None:
                return None
            try:
                row = self._import(host, handle, request)
            finally:
                self.discard(handle)
            return (row, handle.length) if row else None
        return None

    @staticmethod
    def _import(host: HostTier, handle: Handle, request: Request) -> int:
        """Return a new row with a handle's KV and state; 0 if the copy failed."""
        tag = str(request.request_id)
        row = host.ledger.import_row(handle.length, handle.drafted_len, tag)
        if host.fill(handle, row):
            return row
        host.ledger.abort(row)
        return 0

    def save_text(self, request: Request) -> None:
        """Keep the KV of a request's text on the host, as far as it is indexed, if that pays."""
        if self._host is not None and request.indexed_len:
            tokens = request.token_array()[: request.indexed_len]
            self._host.texts.save(request.row, tokens, request.salt, self.token_seconds)

    def lend(self, request: Request, tokens: Int32, start: int, *, needs_draft: bool) -> None:
        """Let a request that has `start` tokens with KV bring back what the host has of the rest.

        `tokens` are its tokens. With siblings it gets none: they are forked behind a prefill.
        """
        if self._host is None or self._host.ledger.states or request.siblings:
            return
        with costing_speed():
            request.handle = self._host.lend(
                tokens, request.salt, start, self.token_seconds, needs_draft=needs_draft
            )

    def forget_texts(self, salt: bytes | None = None) -> None:
        """Drop the texts on the host, or those of one salt."""
        if self._host is not None:
            self._host.texts.forget(salt)

    def return_lent(self, request: Request) -> None:
        """Drop a handle that was lent to a request for the row that it loses."""
        if request.handle is not None and request.handle.is_lent:
            self.drop(request)

    def return_handle(self, request: Request) -> None:
        """Give a request's handle back to its conversation, or drop it if there is none."""
        self.return_lent(request)
        handle, conversation = request.handle, request.conversation
        if conversation is None:
            self.drop(request)
        elif handle is not None and self._host is not None and self._host.holds(handle):
            conversation.handle, request.handle = handle, None

    def drop(self, owner: Conversation | Request) -> None:
        """Drop the handle of a request or conversation, if it has one."""
        handle, owner.handle = owner.handle, None
        self.discard(handle)

    def discard(self, handle: Handle | None) -> None:
        """Drop a handle that nobody has, unless it is gone already."""
        if handle is not None and self._host is not None and self._host.holds(handle):
            self._host.drop(handle)

    def cut(self, conversation: Conversation, num_tokens: int) -> None:
        """Cut a conversation's handle to at most `num_tokens` tokens."""
        handle = conversation.handle
        if handle is not None and self._host is not None:
            conversation.handle = self._host.trim(handle, min(num_tokens, handle.length))

    def reloads(
        self, requests: Iterable[Request], max_batch: int
    ) -> tuple[list[Request], list[int], bool]:
        """Choose at most `max_batch` requests whose KV can come back in one step.

        Returns:
            The requests, the end of each request's chunk, and whether the step writes draft KV,
            which is the same for all of its chunks.
        """
        chosen: list[Request] = []
        ends: list[int] = []
        writes_draft = False
        for request in requests if self._host is not None else ():
            handle = request.handle
            if handle is None or request.prefilled_len >= handle.length:
                continue
            assert self._host is not None
            end = 0
            with costing_speed():
                end, writes = self._host.next_extend(handle, request.prefilled_len)
            if not end:  # it cannot come back
                self.drop(request)
                continue
            if not chosen:
                writes_draft = writes
            if writes == writes_draft and len(chosen) < max_batch:
                chosen.append(request)
                ends.append(end)
        return chosen, ends, writes_draft

    def forget_failed(self, owners: Iterable[Conversation | Request]) -> None:
        """Forget handles whose copies failed; their tokens will be prefilled."""
        if self._host is not None:
            for owner in owners:
                if owner.handle is not None and not self._host.holds(owner.handle):
                    owner.handle = None

    def recover(self, owners: list[Conversation | Request]) -> None:
        """Drop all handles that none of these owners has, after Ctrl-C at any point."""
        if self._host is not None:
            self._host.recover([owner.handle for owner in owners if owner.handle is not None])
            self.forget_failed(owners)


class Rows:
    """The part of the scheduler that gives rows back."""

    def __init__(self, ledger: Ledger, handles: HostHandles) -> None:
        """Start without rows out of use."""
        self._ledger, self._handles = ledger, handles
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

    def release(self, row: int) -> Handle | None:
        """Give back a row; copy its KV to the host first if that pays.

        Returns:
            The handle of the KV on the host; None if the KV is gone.
        """
        handle = self._handles.save(row)
        try:
            self.retract(row)
        except BaseException:  # the row stays, and with it its KV
            self._handles.discard(handle)
            raise
        return handle

    def export(self, row: int) -> int:
        """Give back a row whose KV leaves, or is pinned with its state; return its prefix.

        Raises:
            NotReady: a page copy into the row waits for a step.
        """
        return self._ledger.export(row)

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
