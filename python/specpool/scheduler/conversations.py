"""Append-only conversations, and the rows that they keep between their turns (docs/engine.md).

A row has one owner: a request while a turn runs, its conversation while it is idle.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpool._core import Ledger
from specpool.errors import NotReady, OutOfMemory, OutOfPages, OutOfRows, SpecpoolError
from specpool.scheduler.conversation import Conversation, Said, common_len

if TYPE_CHECKING:
    from specpool.memory.host.tier import Handle, HostTier
    from specpool.scheduler.request import Request


class Conversations:
    """The conversations of a scheduler, and the idle rows, those idle the longest first."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_idle: int,
        max_pages: int | None,
        keeps_draft_kv: bool,
        host: HostTier | None = None,
    ) -> None:
        """No conversation is open.

        Args:
            ledger: of the rows.
            max_idle: idle rows at most.
            max_pages: of each group that idle rows may keep for themselves; None = all.
            keeps_draft_kv: a turn that drafts needs the draft's KV too.
            host: where KV goes that is worth it; None = nowhere.
        """
        self._ledger, self._host = ledger, host
        self._max_idle, self._max_pages = max_idle, max_pages
        self._keeps_draft_kv = keeps_draft_kv
        self._idle: dict[int, Conversation] = {}  # by row
        self._numbers = itertools.count(1)
        self.open: dict[int, Conversation] = {}  # by number
        self._turns: dict[int, Request] = {}  # the latest of each open conversation, by its number
        self.drop_ct = 0  # of all that were ever open
        self.token_seconds = 0.0  # what the prefill of a token takes; whoever times it writes it

    def new(self, tokens: list[int]) -> Conversation:
        """A further conversation, with what has been said in it."""
        conversation = Conversation(next(self._numbers), tokens)
        try:
            self.open[conversation.number] = conversation
            return conversation
        except BaseException:  # Ctrl-C: nobody would have it
            self.open.pop(conversation.number, None)
            raise

    def begin(self, request: Request) -> None:
        """The request is the next turn of its conversation, which is busy until it ends."""
        if request.conversation is not None:
            self._turns[request.conversation.number] = request

    def end(self, request: Request) -> None:
        """Add a turn that has ended by a stop or its length to its conversation."""
        conversation = request.conversation
        if conversation is None:
            return
        answer_ids = [token for token in request.output_ids if token not in request.stop_ids]
        said = Said(len(request.tokens), request.messages, answer_ids, request.params.stop)
        # Both or neither, whenever Ctrl-C comes.
        conversation.tokens, conversation.said = list(request.tokens), [*request.said, said]
        conversation.turn_ct += 1

    def turn_of(self, conversation: Conversation) -> Request | None:
        """The request of the turn that waits or runs; None = the conversation is idle."""
        turn = self._turns.get(conversation.number)
        return None if turn is None or turn.finish_reason is not None else turn

    def close(self, conversation: Conversation) -> None:
        """Forget one between turns, and give back what it keeps; twice is once."""
        try:
            self._give_back(conversation)
        except SpecpoolError:  # the ledger refuses: the row is out of use
            self._forget(conversation)
            raise
        finally:
            self.drop_handle(conversation)
        self._turns.pop(conversation.number, None)
        self.open.pop(conversation.number, None)  # last: Ctrl-C may come before

    def close_all(self) -> list[str]:
        """Forget all of them; returns what could not be given back."""
        failures = []
        for conversation in list(self.open.values()):
            try:
                self.close(conversation)
            except SpecpoolError as error:
                failures.append(f"the row of session {conversation.number}: {error}")
                self.close(conversation)
        return failures

    def kept_len(self, conversation: Conversation) -> int:
        """Tokens with KV on an idle row."""
        return int(self._ledger.resolved_len[conversation.row])

    def owns(self, row: int) -> bool:
        """Whether the row is idle, and that of an open conversation."""
        conversation = self._idle.get(row)
        return (
            conversation is not None
            and conversation.epoch == self._ledger.epoch[row]
            and self.open.get(conversation.number) is conversation
        )

    def rows(self) -> Iterator[tuple[int, Conversation]]:
        """The idle rows."""
        yield from self._idle.items()

    def keep(self, conversation: Conversation, row: int, num_tokens: int) -> None:
        """A turn is over: the row stays idle, with KV of that many tokens at most."""
        self._ledger.end_turn(row, num_tokens)
        conversation.row, conversation.epoch = row, int(self._ledger.epoch[row])
        self._idle.pop(row, None)  # a rewind is use too
        self._idle[row] = conversation
        while len(self._idle) > self._max_idle or self._is_over():
            self._drop_oldest()

    def fall_back(self, request: Request) -> bool:
        """Give the request's row back to its conversation, as the last turn has left it.

        Returns:
            False where nothing was kept: the row is the caller's to give back.
        """
        conversation, checkpoint = request.conversation, self._ledger.checkpoint_len(request.row)
        if conversation is None:
            return False
        if request.handle is not None:  # on its way back
            self.return_handle(request)
            return False
        if not checkpoint or request.tainted:
            return False
        self.keep(conversation, request.row, checkpoint)
        return True

    def take(self, request: Request) -> tuple[int, int] | None:
        """The idle row of the request's conversation, and how many of its tokens have KV there.

        What lies beyond them has been freed. None: there is no such row.
        """
        conversation = request.conversation
        if conversation is None or not conversation.row:
            return None
        row = conversation.row
        length = self.start(request, row)
        self._forget(conversation)
        return row, length

    def start(self, request: Request, row: int) -> int:
        """Cut the row, which has KV of the request's conversation or its own, to what is of use.

        Returns:
            From where the request is to be prefilled; an aborted turn falls back to it.
        """
        conversation, kept_len = request.conversation, int(self._ledger.resolved_len[row])
        length = self._useful_len(request, kept_len, int(self._ledger.drafted_len[row]))
        if conversation is None:
            return length if length == kept_len else self._ledger.trim(row, length)
        if length < kept_len or self._ledger.checkpoint_len(row) is None:
            return self._ledger.end_turn(row, length)
        return length

    def take_handle(self, request: Request) -> None:
        """What the request has on the host, or its conversation, as far as it is of use."""
        conversation, handle = request.conversation, request.handle
        if conversation is not None and handle is None:
            handle, conversation.handle = conversation.handle, None
        if handle is not None and self._host is not None:
            length = self._useful_len(request, handle.length, handle.drafted_len)
            request.handle = self._host.trim(handle, length)

    def release(self, row: int) -> Handle | None:
        """Give a row back whose KV would be of use again: to the host, if that is worth it."""
        host = self._host
        if host is not None and host.pays(row, self.token_seconds):
            with contextlib.suppress(NotReady):  # a step of it is under way
                if (handle := host.offload(row)) is not None:
                    return handle
        self._ledger.retract(row)
        return None

    def return_handle(self, request: Request) -> None:
        """A request gives up what it has on the host: its conversation keeps it."""
        handle, conversation = request.handle, request.conversation
        if conversation is None:
            self.drop_handle(request)
        elif handle is not None and self._host is not None and self._host.holds(handle):
            conversation.handle, request.handle = handle, None

    def drop_handle(self, owner: Conversation | Request) -> None:
        """Keep nothing for it on the host."""
        handle, owner.handle = owner.handle, None
        if handle is not None and self._host is not None and self._host.holds(handle):
            self._host.drop(handle)

    def cut(self, conversation: Conversation, num_tokens: int) -> int:
        """Leave that many tokens; returns how many of them have KV."""
        conversation.cut(num_tokens)
        handle = conversation.handle
        if handle is not None and self._host is not None:
            conversation.handle = self._host.trim(handle, min(num_tokens, handle.length))
        if not conversation.row:
            return 0
        if num_tokens == 0:
            self._give_back(conversation)
            return 0
        if num_tokens < self.kept_len(conversation):
            self.keep(conversation, conversation.row, num_tokens)
        return self.kept_len(conversation) if conversation.row else 0

    def fork(self, conversation: Conversation) -> Conversation:
        """A further conversation with the same tokens, on the same pages while there is room.

        Nothing of the row may be in flight any more.
        """
        copy = None
        try:
            copy = self.new(list(conversation.tokens))
            copy.said = list(conversation.said)
            if conversation.row:
                # Not ready: the row is a fork itself; its copy of a page waits for the next step.
                with contextlib.suppress(OutOfRows, OutOfPages, OutOfMemory, NotReady):
                    row = self._ledger.fork(conversation.row, f"session {copy.number}")
                    self.keep(copy, row, self.kept_len(conversation))
            return copy
        except BaseException:  # Ctrl-C: nobody would have it
            if copy is not None:
                self.close(copy)
            raise

    def reclaim(self, shortage: OutOfPages) -> bool:
        """Drop what has been idle the longest; False where that would help nobody."""
        if not shortage.reclaimable or not self._idle:
            return False
        self._drop_oldest()
        return True

    def forget(self, row: int) -> None:
        """The row is out of use: its conversation has its tokens alone."""
        if row in self._idle:
            self._forget(self._idle[row])

    def forget_lost(self) -> None:
        """A step was abandoned, and rows with it that were idle already; or Ctrl-C has come."""
        for row, conversation in list(self._idle.items()):
            if not self.owns(row):
                self._forget(conversation)
                self.count_drop(conversation)
        for conversation in self.open.values():
            if self._idle.get(conversation.row) is not conversation:
                conversation.row = 0

    def _useful_len(self, request: Request, kept_len: int, drafted_len: int) -> int:
        """How many of the request's tokens need no prefill, where so many of a row have KV."""
        length = min(kept_len, len(request.tokens) - 1)  # the last one gives the first root
        if self._keeps_draft_kv and request.shape_index:
            length = min(length, drafted_len)
        if request.conversation is not None:
            length = min(length, common_len(request.conversation.tokens, request.tokens))
        return length

    def _is_over(self) -> bool:
        """Whether idle rows keep more pages than they may."""
        if self._max_pages is None or not self._idle:
            return False
        groups = range(len(self._ledger.groups))
        return any(self._ledger.reclaimable_pages(g) > self._max_pages for g in groups)

    def _drop_oldest(self) -> None:
        conversation = next(iter(self._idle.values()))
        if self.owns(conversation.row):
            conversation.handle = self.release(conversation.row)
        self._forget(conversation)
        if conversation.handle is None:
            self.count_drop(conversation)

    def count_drop(self, conversation: Conversation) -> None:
        """Its KV had to give way."""
        conversation.drop_ct += 1
        self.drop_ct += 1

    def _give_back(self, conversation: Conversation) -> None:
        row = conversation.row
        if row and self.owns(row):
            self._ledger.retract(row)
        self._forget(conversation)

    def _forget(self, conversation: Conversation) -> None:
        if self._idle.get(conversation.row) is conversation:
            del self._idle[conversation.row]
        conversation.row = 0
