"""`Exports`: the KV of rows that leave for another engine.

An export takes a row's place in the ledger. Nobody writes its pages, so they are read while others
run. It ends in one of two ways: the KV has arrived, or the row comes back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.scheduler.state import State
from specpool.errors import NotReady, OutOfMemory, OutOfPages, OutOfRows


@dataclass(frozen=True, slots=True, eq=False)
class RowExport:
    """The KV of a row on its way out.

    Attributes:
        prefix: its number in the ledger; 0 = the text goes without KV.
        length: tokens with KV.
        drafted_len: tokens with draft KV.
        pages: of each group, int32 [n], in the order of the columns; then the state slot, [1], if
            there are states.
    """

    prefix: int
    length: int
    drafted_len: int
    pages: tuple[npt.NDArray[np.int32], ...]


class Exports:
    """The rows on their way out."""

    def __init__(self, state: State, reclaim: Reclaim) -> None:
        """Start without exports; `reclaim` is called before a running request loses its row."""
        self._state, self._reclaim = state, reclaim
        self._prefixes: set[int] = set()

    @property
    def prefixes(self) -> frozenset[int]:
        """The ledger's prefixes that rows on their way out hold."""
        return frozenset(self._prefixes)

    def of_conversation(self, conversation: Conversation) -> RowExport:
        """Take the idle row of a conversation, which keeps its tokens and is busy until the end.

        No step of the row is in flight. A row with a page copy that waits for a step, such as that
        of a new fork, or with no token, or whose state has none, stays here until the end, and the
        text goes without KV. So does one whose state slot is the last that no export holds.
        """
        conversation.leaves = True
        row = conversation.row
        if not (row and self._can_take(row)):
            return self._without_kv()
        try:
            export = self._of_row(row)
        except NotReady:
            return self._without_kv()
        self._state.conversations.forget(row)
        return export

    def of_request(self, request: Request) -> RowExport:
        """Take a request that runs or waits from its queue, and its row if it has one.

        No step of the row is in flight. With a page copy into the row that waits for a step, or a
        state without tokens, or in the last slot that no export holds, the row is given back at
        once.
        """
        state = self._state
        if request in state.waiting:
            state.waiting.remove(request)
            return self._without_kv()
        self._reclaim.before_release(request)  # the prefix cache keeps what it has computed
        try:
            can_take = self._can_take(request.row)
            export = self._of_row(request.row) if can_take else self._without_kv()
        except NotReady:
            export = self._without_kv()
        if not export.prefix:
            state.rows.retract(request.row)
        state.running.leave(request)
        state.running.remove(request)
        return export

    def part(self, request: Request) -> None:
        """Let the further samples of a request's prompt wait by themselves, before one leaves."""
        self._state.waiting.part(request)

    def arrived(self, export: RowExport) -> None:
        """Give the pages up: another engine has their content. A second call does nothing."""
        if export.prefix in self._prefixes:
            self._prefixes.remove(export.prefix)
            self._state.ledger.release_prefix(export.prefix)

    def return_conversation(self, export: RowExport, conversation: Conversation) -> None:
        """Give a conversation its row back, or its tokens alone if there is no room."""
        state = self._state
        conversation.leaves = False
        if export.prefix not in self._prefixes:
            return
        try:
            if state.conversations.open.get(conversation.number) is conversation:
                with contextlib.suppress(OutOfRows, OutOfPages, OutOfMemory, NotReady):
                    tag = f"session {conversation.number}"
                    row = state.ledger.admit(tag, prefix=export.prefix)
                    state.conversations.keep(conversation, row, export.length)
        finally:
            self.arrived(export)
            if not conversation.row:
                state.conversations.count_drop(conversation)

    def return_request(self, export: RowExport, request: Request) -> None:
        """Queue a request again; the prefix cache may still have its KV."""
        self.arrived(export)
        if request.finish_reason is None:
            request.num_retractions += 1
            self._state.waiting.add(request)

    def _can_take(self, row: int) -> bool:
        """Return whether the row has tokens, and a state slot is left for the rows that stay.

        Without a slot they would end with an error, because no export gives way to them.
        """
        ledger, num_held = self._state.ledger, len(self._prefixes)
        has_slot = all(num_held + 1 < states.num_slots for states in ledger.states)
        return has_slot and bool(ledger.resolved_len[row] > 0)

    def _of_row(self, row: int) -> RowExport:
        ledger = self._state.ledger
        prefix = self._state.rows.export(row)
        self._prefixes.add(prefix)
        pages = [ledger.prefix_pages(prefix, g)[1] for g in range(len(ledger.groups))]
        if ledger.states:
            pages.append(np.array([ledger.prefix_state_slot(prefix)], np.int32))
        return RowExport(
            prefix, ledger.prefix_len(prefix), ledger.prefix_drafted_len(prefix), tuple(pages)
        )

    def _without_kv(self) -> RowExport:
        return RowExport(0, 0, 0, ())
