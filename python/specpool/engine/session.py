"""`Session`: a conversation whose KV stays between its turns, and `Turn`, one append to it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from specpool.checks import check_int
from specpool.engine.core import EngineCore
from specpool.engine.output import Chunk, Report, RequestOutput
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Conversation, Request
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool._core import Shape
    from specpool.engine.texts import NextTurn, Prompt


class Turn(Iterator["Chunk | RequestOutput"]):
    """One turn of a session: an iterator over its chunks, with the output at the end.

    A turn waits and runs like any other request. Reading any stream of the engine moves it on.
    Closing the turn before its end aborts it and leaves the session as it was before.
    """

    def __init__(self, core: EngineCore, request: Request) -> None:
        """Report on a request that has been submitted; most callers want `Session.append`."""
        self._core, self._request = core, request
        self._report = Report(request, core.tokenizer)
        self._news: deque[Chunk | RequestOutput] = deque()
        self._is_read = False

    def __next__(self) -> Chunk | RequestOutput:
        """Return the next chunk or the output; run turns of the engine until there is one."""
        with self._core.lock:
            while not self._news:
                if self._is_read:
                    raise StopIteration
                if self._request.finish_reason is None:
                    self._core.loop.turn()
                self._news += self._report.news()
                self._core.end_undecoded(self._request, self._report)
            item = self._news.popleft()
            if isinstance(item, RequestOutput):
                self._is_read = True
                self._core.loop.drain_if_idle()
            return item

    def output(self) -> RequestOutput:
        """Run the turn to its end and return the output.

        Raises:
            ConfigError: the turn has been read to its end, or closed.
        """
        for item in self:
            if isinstance(item, RequestOutput):
                return item
        raise ConfigError("the turn has been read to its end, or closed")

    def close(self) -> None:
        """Abort the turn if it has not ended. A second call does nothing."""
        self._is_read = True
        self._news.clear()
        with self._core.lock, self._core.loop.recovering():
            self._core.scheduler.abort(self._request)
            self._core.loop.drain_if_idle()

    def __enter__(self) -> Turn:
        """Return the turn itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the turn."""
        self.close()


class Session:
    """A conversation that keeps its KV, so that a turn computes its new tokens only.

    Between turns the session always keeps its tokens, and its KV while there is room. If the KV was
    dropped, the next turn computes it again. Use it as a context manager, or call `close`.
    """

    def __init__(self, core: EngineCore, conversation: Conversation, max_tokens: int) -> None:
        """Wrap an open conversation; most callers want `Engine.open_session`."""
        self._core, self._conversation = core, conversation
        self._open = core.scheduler.conversations.open
        self.max_tokens = max_tokens

    def is_of(self, core: EngineCore) -> bool:
        """Return whether the session belongs to this engine core."""
        return self._core is core

    @property
    def number(self) -> int:
        """The session's number within its engine, from 1."""
        return self._conversation.number

    @property
    def tokens(self) -> list[int]:
        """The token ids of all turns that have ended, prompts and outputs."""
        return list(self._conversation.tokens)

    @property
    def num_tokens(self) -> int:
        """The number of `tokens`."""
        return len(self._conversation.tokens)

    @property
    def turn_ends(self) -> list[int]:
        """The number of tokens at the end of each turn: offsets for `rewind`."""
        return [turn.end for turn in self._conversation.said]

    @property
    def is_busy(self) -> bool:
        """Whether a turn waits or runs."""
        return self._turn() is not None

    @property
    def closed(self) -> bool:
        """Whether the session or its engine has been closed."""
        return self.number not in self._open

    def append(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        shape: Shape | None = None,
        priority: int = 0,
    ) -> Turn:
        """Append a prompt to the session and generate the answer.

        The session grows when the turn ends by a stop or its length. A turn that is aborted or
        fails leaves the session as it was.

        Args:
            prompt: a string, token ids, or the new messages of a chat, which follow the messages
                and answers of the earlier turns. An empty prompt generates on from the end of the
                last turn.
            params: None means the defaults.
            shape: None means the engine's, or one of its shapes.
            priority: as in `Engine.generate`.

        Returns:
            The turn, an iterator that runs while it is read.

        Raises:
            ConfigError: the session is closed or busy, or the prompt or a parameter cannot work.
        """
        core, request = self._core, None
        core.compile(params)
        try:
            with core.lock:
                request = self.next_turn(prompt, params, shape, priority)
                core.scheduler.submit(request)
                return Turn(core, request)
        except BaseException:  # such as Ctrl-C: the caller does not get the turn
            if request is not None:
                core.take_back(request)
            raise

    async def append_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        shape: Shape | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Chunk | RequestOutput]:
        """Append as `append` does, for asyncio: see `Engine.stream_async`."""
        turn = self.append(prompt, params, shape=shape, priority=priority)
        try:
            while (item := await asyncio.to_thread(next, turn, None)) is not None:
                yield item
        finally:
            turn.close()

    def rewind(self, offset: int) -> int:
        """Forget all tokens from `offset` on, and the chat messages of a turn that is cut.

        Returns:
            How many of the remaining tokens still have KV. This is less than `offset` if the KV
            was dropped, or if a window that the model needs is gone. The next turn computes the
            rest.

        Raises:
            ConfigError: the session is closed or busy, or `offset` is not in [0, num_tokens].
        """
        core = self._core
        with core.lock:
            self._check_idle("rewind")
            check_int("offset", offset, 0, self.num_tokens)
            with core.loop.recovering():
                return core.scheduler.cut(self._conversation, offset)

    def fork(self) -> Session:
        """Return a new session with the same tokens, on the same pages if there is room.

        Raises:
            ConfigError: the session is closed or busy.
        """
        core, copy = self._core, None
        try:
            with core.lock:
                self._check_idle("fork")
                core.loop.drain()  # a round of the last turn may be under way
                with core.loop.recovering():
                    copy = core.scheduler.fork(self._conversation)
                return Session(core, copy, self.max_tokens)
        except BaseException:  # such as Ctrl-C: the caller does not get the copy
            if copy is not None:
                with core.lock:
                    core.scheduler.close(copy)
            raise

    def leaving(self) -> tuple[Conversation, Request | None]:
        """Return the conversation for an export, and the turn that waits or runs.

        Raises:
            ConfigError: the session is closed, or being exported.
        """
        turn = self._turn()
        if turn is None or self._conversation.leaves:
            self._check_idle("export")
        return self._conversation, turn

    def abort(self) -> None:
        """Abort the turn that waits or runs, if any; the session is as it was before the turn."""
        turn = self._turn()
        if turn is not None:
            with self._core.lock, self._core.loop.recovering():
                self._core.scheduler.abort(turn)

    def close(self) -> None:
        """Abort the turn and give everything back. A second call does nothing."""
        with self._core.lock, self._core.loop.recovering():
            if not self.closed:
                self.abort()
                self._core.scheduler.close(self._conversation)
                self._core.loop.drain_if_idle()

    def next_turn(
        self,
        prompt: Prompt | NextTurn,
        params: SamplingParams | None,
        shape: Shape | None,
        priority: int,
    ) -> Request:
        """Make the request of the next turn; the caller submits it."""
        self._check_idle("append to")
        return self._core.prompts.turn(
            self._conversation, prompt, params, shape, priority, self.max_tokens
        )

    def _check_idle(self, verb: str) -> None:
        """Raise `ConfigError` unless the session is open, and between turns."""
        if self.closed:
            raise ConfigError(f"cannot {verb} session {self.number}: it has been closed")
        if self._conversation.leaves:
            raise ConfigError(f"cannot {verb} session {self.number}: it is being exported")
        turn = self._turn()
        if turn is not None:
            raise ConfigError(
                f"cannot {verb} session {self.number}: its turn (request {turn.request_id}) has "
                "not ended"
            )

    def _turn(self) -> Request | None:
        return self._core.scheduler.conversations.turn_of(self._conversation)

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the session."""
        self.close()
