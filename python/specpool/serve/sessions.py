"""`Sessions`: conversations over HTTP. The front knows the tokens, the engine has the KV."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specpool.engine.texts import NextTurn, Prompt, Texts
from specpool.errors import SpecpoolError
from specpool.sampling_params import SamplingParams
from specpool.scheduler.requests.conversation import Conversation, Said
from specpool.serve.api.errors import ApiError
from specpool.serve.bridge.client import EngineClient, Stream
from specpool.serve.bridge.messages import Done
from specpool.serve.config import ServeConfig


@dataclass(slots=True, eq=False)
class SessionRecord:
    """An open session.

    Attributes:
        ident: its name for clients.
        conversation: its tokens and turns, as in the engine; `number` is the engine's.
        max_tokens: the most tokens of all turns.
        is_busy: a turn, a rewind or a fork is under way.
        used: seconds by the clock of `Sessions` at the end of the latest call.
    """

    ident: str
    conversation: Conversation
    max_tokens: int
    is_busy: bool = False
    used: float = 0.0

    @property
    def offset(self) -> int:
        """The tokens of all turns that have ended."""
        return len(self.conversation.tokens)

    def body(self) -> dict[str, Any]:
        """Return the session as clients see it."""
        return {
            "id": self.ident,
            "object": "session",
            "offset": self.offset,
            "turn_ends": [turn.end for turn in self.conversation.said],
            "max_tokens": self.max_tokens,
            "busy": self.is_busy,
        }


class Sessions:
    """The open sessions of the server."""

    def __init__(
        self,
        client: EngineClient,
        config: ServeConfig,
        tag: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without sessions.

        Args:
            client: the way to the engine.
            config: the options.
            tag: begins the id of each session, so that a router knows whose it is. No two servers
                may ever have the same, not even one after the other. None = a random one.
            clock: seconds that never jump.
        """
        self._clock = clock
        self._client, self._config = client, config
        # A session lives in one server's memory: its name says in which.
        self._tag = tag or secrets.token_hex(4)
        self._records: dict[str, SessionRecord] = {}
        self._num_opening = 0  # the engine has not answered yet
        self._settling: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Any:
        return iter(list(self._records.values()))

    async def open(self, max_tokens: int | None) -> SessionRecord:
        """Open a session.

        Raises:
            ApiError: too many are open.
            ConfigError: `max_tokens` does not fit the engine.
        """
        with self._room():
            number = await self._client.call("open", max_tokens)
            most = max_tokens or self._client.ready.max_context_len
            return self._keep(Conversation(number), most)

    def find(self, ident: str) -> SessionRecord:
        """Return a session.

        Raises:
            ApiError: there is none of this name: 410 if another server had it, else 404.
        """
        record = self._records.get(ident)
        if record is not None:
            return record
        if not ident.startswith(f"{self._tag}."):
            raise ApiError(
                410,
                "the session was in another server's memory, which is gone: open a new one and "
                "send the whole text",
                code="session_lost",
            )
        raise ApiError(404, "there is no such session: it was closed", code="session_not_found")

    def begin(self, ident: str, offset: int | None) -> SessionRecord:
        """Take a session for a turn; `end` or `settle` gives it back.

        Args:
            ident: its name.
            offset: the tokens that the client believes it has.

        Raises:
            ApiError: there is no such session, it is busy, or it has another length.
        """
        record = self.find(ident)
        if offset is None:
            raise ApiError(
                400,
                "a turn of a session needs session_offset, the tokens that the session has: "
                "without it, a turn that is sent again would be appended twice",
                code="session_offset_missing",
                param="session_offset",
            )
        self._take(record)
        if offset != record.offset:
            record.is_busy = False
            raise ApiError(
                409,
                f"the session has {record.offset} tokens, session_offset says {offset}: the turn "
                "may have been appended already",
                code="session_offset_mismatch",
                param="session_offset",
                retry=False,
                session={"id": record.ident, "offset": record.offset},
            )
        return record

    def turn(
        self, record: SessionRecord, texts: Texts, prompt: Prompt, variables: Mapping[str, Any]
    ) -> NextTurn:
        """Tokenize the next turn of a session that was taken.

        Raises:
            ConfigError: the prompt cannot follow.
        """
        return texts.turn(record.conversation, prompt, variables)

    def end(
        self,
        record: SessionRecord,
        turn: NextTurn,
        done: Done,
        params: SamplingParams,
        eos: frozenset[int],
    ) -> None:
        """Add a turn that has ended, as the engine does, and give the session back."""
        if done.finish_reason in ("stop", "length"):
            stop_ids = frozenset(params.stop_token_ids) | (eos if not params.ignore_eos else set())
            answer = [token for token in done.token_ids if token not in stop_ids]
            tokens = [*turn.ids, *done.token_ids]
            said = Said(len(tokens), turn.messages, answer, params.stop)
            record.conversation.tokens = tokens
            record.conversation.said = [*turn.said, said]
        self.release(record)

    def settle(
        self,
        record: SessionRecord,
        turn: NextTurn,
        stream: Stream,
        params: SamplingParams,
        eos: frozenset[int],
    ) -> None:
        """Abort a turn that failed or was refused, or whose client has left.

        The session is busy until the engine says so. The turn may have ended just before: the
        session has grown then.
        """

        async def wait() -> None:
            try:
                stream.abort()
                await stream.accepted()
                while news := await stream.news():
                    if isinstance(news[-1], Done):
                        self.end(record, turn, news[-1], params, eos)
            except SpecpoolError:  # it was refused, or the engine is gone
                pass
            finally:
                self.release(record)

        task = asyncio.create_task(wait())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def release(self, record: SessionRecord) -> None:
        """Give a session back. A second call does nothing."""
        record.is_busy, record.used = False, self._clock()

    async def rewind(self, ident: str, offset: int) -> tuple[SessionRecord, int]:
        """Forget the tokens from `offset` on; also return how many of the rest have KV.

        Raises:
            ApiError: there is no such session, or it is busy.
            ConfigError: the offset is beyond its tokens.
        """
        record = self._take(self.find(ident))
        try:
            kept = await self._client.call("rewind", record.conversation.number, offset)
            record.conversation.cut(offset)
        finally:
            self.release(record)
        return record, int(kept)

    async def fork(self, ident: str) -> SessionRecord:
        """Open a copy of a session.

        Raises:
            ApiError: there is no such session, it is busy, or too many are open.
        """
        record = self.find(ident)
        with self._room():
            self._take(record)
            try:
                number = await self._client.call("fork", record.conversation.number)
            finally:
                self.release(record)
            old = record.conversation
            copy = Conversation(number, list(old.tokens), list(old.said))
            return self._keep(copy, record.max_tokens)

    async def close(self, ident: str) -> None:
        """Close a session and abort its turn.

        Raises:
            ApiError: there is no such session.
        """
        record = self.find(ident)
        del self._records[ident]
        await self._client.call("close", record.conversation.number)

    async def expire(self) -> None:
        """Close the sessions that were idle for too long, for ever; cancel to end."""
        while True:
            await asyncio.sleep(min(self._config.session_timeout / 4, 10))
            await self.close_idle()

    async def close_idle(self) -> None:
        """Close the sessions that were idle for too long."""
        limit = self._clock() - self._config.session_timeout
        for record in self:
            if not record.is_busy and record.used < limit:
                with contextlib.suppress(SpecpoolError):  # its client has closed it meanwhile
                    await self.close(record.ident)

    def _take(self, record: SessionRecord) -> SessionRecord:
        if record.is_busy:
            raise ApiError(
                409, "a turn of the session has not ended", code="session_busy", param=None
            )
        record.is_busy = True
        return record

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Keep the place of a session while the engine opens it.

        Raises:
            ApiError: with those that are being opened, too many are open.
        """
        num = len(self._records) + self._num_opening
        if num >= self._config.max_sessions:
            raise ApiError(
                429,
                f"{num} sessions are open, which is the most: close one",
                code="too_many_sessions",
                retry=False,
            )
        self._num_opening += 1
        try:
            yield
        finally:
            self._num_opening -= 1

    def _keep(self, conversation: Conversation, max_tokens: int) -> SessionRecord:
        ident = f"{self._tag}.{secrets.token_hex(16)}"
        record = SessionRecord(ident, conversation, max_tokens, used=self._clock())
        self._records[record.ident] = record
        return record
