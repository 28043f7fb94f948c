"""Append-only conversations, and the rows that they keep between their turns (docs/engine.md).

A row has one owner: a request while a turn runs, its conversation while it is idle.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from specpool._core import Ledger
from specpool.errors import NotReady, OutOfMemory, OutOfPages, OutOfRows, SpecpoolError
from specpool.scheduler.config import SchedulerConfig
from specpool.scheduler.requests.conversation import Conversation, Said
from specpool.scheduler.requests.request import Request
from specpool.scheduler.rows.host_handles import HostHandles
from specpool.scheduler.rows.rows import Rows


class Conversations:
    """The conversations of a scheduler, and the idle rows, those idle the longest first."""

    def __init__(
        self,
        ledger: Ledger,
        config: SchedulerConfig,
        rows: Rows,
        handles: HostHandles,
    ) -> None:
        """No conversation is open.

        Args:
            ledger: of the rows.
            config: says how many rows and pages may be idle, and whether turns need draft KV.
            rows: gives idle rows back.
            handles: keeps KV of idle rows on the host.
        """
        self._ledger, self._config = ledger, config
        self._rows, self._handles = rows, handles
        self._idle: dict[int, Conversation] = {}  # by row
        self._numbers = itertools.count(1)
        self.open: dict[int, Conversation] = {}  # by number
        self._turns: dict[int, Request] = {}  # the latest of each open conversation, by its number
        self.drop_ct = 0  # of all that were ever open

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
            self._handles.drop(conversation)
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
        self._rows.end_turn(row, num_tokens)
        conversation.row, conversation.epoch = row, int(self._ledger.epoch[row])
        self._idle.pop(row, None)  # a rewind is use too
        self._idle[row] = conversation
        while len(self._idle) > self._config.max_idle or self._is_over():
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
            self._handles.return_handle(request)
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
        drafted_len = self._ledger.drafted_len[row] if self._config.keeps_draft_kv else kept_len
        length = request.useful_len(kept_len, int(drafted_len))
        if conversation is None:
            return length if length == kept_len else self._ledger.trim(row, length)
        if length < kept_len or self._ledger.checkpoint_len(row) is None:
            return self._rows.end_turn(row, length)
        return length

    def cut(self, conversation: Conversation, num_tokens: int) -> int:
        """Leave that many tokens; returns how many of them have KV."""
        conversation.cut(num_tokens)
        self._handles.cut(conversation, num_tokens)
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

    def _is_over(self) -> bool:
        """Whether idle rows keep more pages than they may."""
        most = self._config.idle_pages
        if most is None or not self._idle:
            return False
        groups = range(len(self._ledger.groups))
        return any(self._ledger.reclaimable_pages(g) > most for g in groups)

    def _drop_oldest(self) -> None:
        conversation = next(iter(self._idle.values()))
        if self.owns(conversation.row):
            conversation.handle = self._rows.release(conversation.row)
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
            self._rows.retract(row)
        self._forget(conversation)

    def _forget(self, conversation: Conversation) -> None:
        if self._idle.get(conversation.row) is conversation:
            del self._idle[conversation.row]
        conversation.row = 0
