"""Append-only conversations, and the rows that they keep between their turns (docs/engine.md).

A row has one owner: a request while a turn runs, its conversation while it is idle.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from specpool._core import Ledger
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.scheduler.rows import HostHandles, Rows
from specpool.errors import NotReady, OutOfMemory, OutOfPages, OutOfRows, SpecpoolError


class Conversations:
    """The conversations of a scheduler, and the idle rows, those idle the longest first."""

    def __init__(
        self,
        ledger: Ledger,
        config: SchedulerConfig,
        rows: Rows,
        handles: HostHandles,
    ) -> None:
        """Start without conversations.

        Args:
            ledger: the rows and pages.
            config: limits idle rows and pages, and says whether turns need draft KV.
            rows: gives idle rows back.
            handles: keeps KV of idle rows on the host.
        """
        self._ledger, self._config = ledger, config
        self._rows, self._handles = rows, handles
        self._idle: dict[int, Conversation] = {}  # by row
        self._numbers = itertools.count(1)
        self.open: dict[int, Conversation] = {}  # by number
        self._turns: dict[int, Request] = {}  # by number: the latest turn of each
        self.drop_ct = 0  # of all conversations, also closed ones

    def new(self, tokens: list[int]) -> Conversation:
        """Open a conversation that begins with these tokens."""
        conversation = Conversation(next(self._numbers), tokens)
        try:
            self.open[conversation.number] = conversation
            return conversation
        except BaseException:  # Ctrl-C: the caller would not get it
            self.open.pop(conversation.number, None)
            raise

    def begin(self, request: Request) -> None:
        """Record the request as its conversation's turn; the conversation is busy until it ends."""
        if request.conversation is not None:
            self._turns[request.conversation.number] = request

    def end(self, request: Request) -> None:
        """Add a turn that has ended by a stop or its length to its conversation."""
        conversation = request.conversation
        if conversation is None:
            return
        conversation.add_turn(
            list(request.tokens),
            request.said,
            messages=request.messages,
            output_ids=request.output_ids,
            params=request.params,
            stop_ids=request.stop_ids,
            hit_stop_string=request.watch is not None and request.watch.hit is not None,
        )
        conversation.turn_ct += 1

    def turn_of(self, conversation: Conversation) -> Request | None:
        """Return the request of the turn that waits or runs; None if the conversation is idle."""
        turn = self._turns.get(conversation.number)
        return None if turn is None or turn.finish_reason is not None else turn

    def close(self, conversation: Conversation) -> None:
        """Forget an idle conversation and give back its KV. A second call does nothing."""
        try:
            self._give_back(conversation)
        except SpecpoolError:  # the ledger refuses: the row is out of use
            self._forget(conversation)
            raise
        finally:
            self._handles.drop(conversation)
        self._turns.pop(conversation.number, None)
        self.open.pop(conversation.number, None)  # last: until then a second call works

    def close_all(self) -> list[str]:
        """Close all conversations; return a message for each row that could not be given back."""
        failures = []
        for conversation in list(self.open.values()):
            try:
                self.close(conversation)
            except SpecpoolError as error:
                failures.append(f"the row of session {conversation.number}: {error}")
                self.close(conversation)
        return failures

    def kept_len(self, conversation: Conversation) -> int:
        """Return the tokens with KV on the conversation's idle row."""
        return int(self._ledger.resolved_len[conversation.row])

    def owns(self, row: int) -> bool:
        """Return whether the row is the idle row of an open conversation."""
        conversation = self._idle.get(row)
        return (
            conversation is not None
            and conversation.epoch == self._ledger.epoch[row]
            and self.open.get(conversation.number) is conversation
        )

    def rows(self) -> Iterator[tuple[int, Conversation]]:
        """Yield the idle rows with their conversations."""
        yield from self._idle.items()

    def keep(self, conversation: Conversation, row: int, num_tokens: int) -> None:
        """Make a row idle for its conversation, with KV of at most `num_tokens` tokens.

        If there are too many idle rows or pages, those idle the longest are dropped.
        """
        self.hold(conversation, row, num_tokens)
        while len(self._idle) > self._config.max_idle or self._is_over():
            self._drop_oldest()

    def hold(self, conversation: Conversation, row: int, num_tokens: int) -> None:
        """Make a row idle, as `keep` does, without a look at the limits."""
        self._rows.end_turn(row, num_tokens)
        conversation.row, conversation.epoch = row, int(self._ledger.epoch[row])
        self._idle.pop(row, None)  # it becomes the newest, also after a rewind
        self._idle[row] = conversation

    def fall_back(self, request: Request) -> bool:
        """Give the request's row back to its conversation, as the last turn has left it.

        Returns:
            False if nothing was kept; the caller must then give the row back.
        """
        conversation, checkpoint = request.conversation, self._ledger.checkpoint_len(request.row)
        if conversation is None:
            return False
        if request.handle is not None:  # its KV is on its way back
            self._handles.return_handle(request)
            return False
        if not checkpoint or request.tainted:
            return False
        self.keep(conversation, request.row, checkpoint)
        return True

    def take(self, request: Request) -> tuple[int, int] | None:
        """Take the idle row of the request's conversation, cut to the tokens of use.

        Returns:
            The row and its number of tokens with KV; None if there is no such row.
        """
        conversation = request.conversation
        if conversation is None or not conversation.row:
            return None
        row = conversation.row
        length = self.start(request, row)
        self._forget(conversation)
        return row, length

    def give_up(self, row: int) -> None:
        """Give back a row that `take` has taken."""
        self._rows.retract(row)

    def start(self, request: Request, row: int) -> int:
        """Cut a row with KV of the request or its conversation to the tokens that are of use.

        Returns:
            The number of tokens kept: the prefill begins there. If the turn is aborted, the row
            falls back to this length.
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
        """Cut a conversation to `num_tokens` tokens; return how many of them have KV."""
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
        """Open a conversation with the same tokens, on the same pages if there is room.

        The caller must have drained all steps of the row.
        """
        copy = None
        try:
            copy = self.new(list(conversation.tokens))
            copy.said = list(conversation.said)
            if conversation.row:
                # `NotReady`: the row is a fork itself, and its page copy waits for the next step.
                with contextlib.suppress(OutOfRows, OutOfPages, OutOfMemory, NotReady):
                    row = self._ledger.fork(conversation.row, f"session {copy.number}")
                    self.keep(copy, row, self.kept_len(conversation))
            return copy
        except BaseException:  # Ctrl-C: the caller would not get it
            if copy is not None:
                self.close(copy)
            raise

    def drop_kv(self, conversation: Conversation) -> None:
        """Drop the KV of an idle conversation, here and on the host; it keeps its tokens."""
        self._give_back(conversation)
        self._handles.drop(conversation)

    def reclaim(self, shortage: OutOfPages) -> bool:
        """Drop the row that is idle the longest; return False if that would free no page."""
        if not shortage.reclaimable or not self._idle:
            return False
        self._drop_oldest()
        return True

    def forget(self, row: int) -> None:
        """Take a row that is out of use from its conversation, which keeps its tokens alone."""
        if row in self._idle:
            self._forget(self._idle[row])

    def forget_lost(self) -> None:
        """Forget idle rows that the ledger has taken back, after an abandoned step or Ctrl-C."""
        for row, conversation in list(self._idle.items()):
            if not self.owns(row):
                self._forget(conversation)
                self.count_drop(conversation)
        for conversation in self.open.values():
            if self._idle.get(conversation.row) is not conversation:
                conversation.row = 0

    def _is_over(self) -> bool:
        """Return whether idle rows keep more pages than `idle_pages` allows."""
        limit = self._config.idle_pages
        if limit is None or not self._idle:
            return False
        groups = range(len(self._ledger.groups))
        return any(self._ledger.reclaimable_pages(g) > limit for g in groups)

    def _drop_oldest(self) -> None:
        conversation = next(iter(self._idle.values()))
        if self.owns(conversation.row):
            conversation.handle = self._rows.release(conversation.row)
        self._forget(conversation)
        if conversation.handle is None:
            self.count_drop(conversation)

    def count_drop(self, conversation: Conversation) -> None:
        """Count a drop of the conversation's KV."""
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
