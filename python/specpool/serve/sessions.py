"""`Sessions`: conversations over HTTP. The front knows the tokens, the engine has the KV.

A session belongs to the API key that opened it. Its full name, `ident`, is the id that clients know
and the key's id behind it (`ident_of`). A request names a session by the id that it sends and the
key that it has, so with another key it names one that never existed. The name goes along when a
session moves, and so does its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Conversation, Message
from specpool.engine.texts import NextTurn, Prompt, Texts
from specpool.errors import SpecpoolError
from specpool.serve.api.errors import ApiError, session_moving
from specpool.serve.bridge.client import EngineClient, EngineFault, Stream
from specpool.serve.bridge.messages import Done
from specpool.serve.bridge.parcel import OtherServers, ParcelNumbers, SessionParcel
from specpool.serve.config import ServeConfig


def ident_of(public_id: str, key_id: str) -> str:
    """Return the full name of a session, which one key alone can name.

    Args:
        public_id: the id that the client sends.
        key_id: the id of its key; "" on a server without keys.
    """
    return f"{public_id}/{key_id}" if key_id else public_id


def public_id_of(ident: str) -> str:
    """Return the id that clients and routers know."""
    return ident.partition("/")[0]


@dataclass(slots=True, eq=False)
class SessionRecord:
    """An open session.

    Attributes:
        ident: its full name.
        conversation: its tokens and turns, as in the engine; `number` is the engine's.
        max_tokens: the most tokens of all turns.
        is_busy: a turn, a rewind, a fork or a move is under way.
        used: seconds by the clock of `Sessions` at the end of the latest call.
        parcel: the number of its latest parcel, which has come or was sent; 0 if there was none.
        is_leaving: it is on its way to another server. Requests for it are refused until that
            server has refused it.
    """

    ident: str
    conversation: Conversation
    max_tokens: int
    is_busy: bool = False
    used: float = 0.0
    parcel: int = 0
    is_leaving: bool = False

    @property
    def public_id(self) -> str:
        """Its name for clients."""
        return public_id_of(self.ident)

    @property
    def key_id(self) -> str:
        """The id of the key that it belongs to."""
        return self.ident.partition("/")[2]

    @property
    def offset(self) -> int:
        """The tokens of all turns that have ended."""
        return len(self.conversation.tokens)

    def body(self) -> dict[str, Any]:
        """Return the session as clients see it."""
        return {
            "id": self.public_id,
            "object": "session",
            "offset": self.offset,
            "turn_ends": [turn.end for turn in self.conversation.said],
            "max_tokens": self.max_tokens,
            "busy": self.is_busy,
        }


class Sessions:
    """The open sessions of the server.

    Attributes:
        other_servers: the servers to which sessions move; None if there are none.
    """

    def __init__(
        self,
        client: EngineClient,
        config: ServeConfig,
        tag: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        secret: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        """Start without sessions.

        Args:
            client: the way to the engine.
            config: the options.
            tag: begins the id of each session, so that a router knows its server. No two servers
                may ever have the same tag, not even one after the other. None means a random tag.
            clock: returns seconds that never jump.
            secret: returns the given number of random bytes in hex, for the rest of an id.
        """
        self._clock, self._secret = clock, secret
        self._client, self._config = client, config
        # A session lives in one server's memory: its name says in which.
        self._tag = tag or secrets.token_hex(4)
        self._records: dict[str, SessionRecord] = {}
        self._opening: Counter[str] = Counter()  # by key; the engine has not answered yet
        self._settling: set[asyncio.Task[None]] = set()
        self.other_servers: OtherServers | None = None
        self._past = ParcelNumbers()  # of sessions that moved on, or were closed after a move
        self._refused = ParcelNumbers()
        self._taking_in = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Any:
        return iter(list(self._records.values()))

    def of_key(self, key_id: str) -> list[SessionRecord]:
        """Return the sessions of a key."""
        return [record for record in self if record.key_id == key_id]

    async def open(self, max_tokens: int | None, key_id: str = "") -> SessionRecord:
        """Open a session for the key of this id.

        Raises:
            ApiError: too many are open.
            ConfigError: `max_tokens` does not fit the engine.
        """
        with self._room(key_id):
            number = await self._client.call("open", max_tokens)
            limit = max_tokens or self._client.ready.max_context_len
            return self._keep(Conversation(number), limit, key_id)

    def may_come(self, ident: str) -> bool:
        """Return whether a session is not here, but may be on its way to this server."""
        if (record := self._records.get(ident)) is not None:
            return record.is_leaving
        return ident in self._past or not self._is_own(ident)

    async def reach(self, ident: str) -> None:
        """Wait a moment for a session that may be on its way to this server.

        Raises:
            ApiError: too many requests wait already.
        """
        if self.other_servers is not None and self.may_come(ident):
            await self.other_servers.wait_for(ident)

    def find(self, ident: str) -> SessionRecord:
        """Return a session.

        Raises:
            ApiError: there is none: 503 if it moves, 410 if it was at another server, else 404.
        """
        record = self._records.get(ident)
        if record is not None and not record.is_leaving:
            return record
        is_moving = self.other_servers is not None and self.other_servers.is_moving(ident)
        if record is not None or (is_moving and self.may_come(ident)):
            raise session_moving()
        if not self._is_own(ident) or ident in self._past:
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
                session={"id": record.public_id, "offset": record.offset},
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
        ending: Done,
        params: SamplingParams,
        eos: frozenset[int],
        message: Message | None = None,
    ) -> None:
        """Add a turn that has ended, as the engine does, and give the session back.

        Args:
            record: the session.
            turn: what was sent.
            ending: the turn's end.
            params: the turn's.
            eos: the tokens that end every text.
            message: the answer with its calls of tools; None if it has none.
        """
        if ending.finish_reason in ("stop", "length"):
            record.conversation.add_turn(
                [*turn.tokens, *ending.token_ids],
                turn.said,
                messages=turn.messages,
                output_ids=ending.token_ids,
                params=params,
                stop_ids=params.stop_ids(eos),
                hit_stop_string=ending.stop_hit is not None,
                message=message,
            )
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

        The session is busy until the engine reports the end. If the turn ended just before the
        abort, its tokens are added to the session.
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
            num_kept = await self._client.call("rewind", record.conversation.number, offset)
            record.conversation.cut(offset)
        finally:
            self.release(record)
        return record, int(num_kept)

    async def fork(self, ident: str) -> SessionRecord:
        """Open a copy of a session.

        Raises:
            ApiError: there is no such session, it is busy, or too many are open.
        """
        record = self.find(ident)
        with self._room(record.key_id):
            self._take(record)
            try:
                number = await self._client.call("fork", record.conversation.number)
            finally:
                self.release(record)
            old = record.conversation
            copy = Conversation(number, list(old.tokens), list(old.said))
            return self._keep(copy, record.max_tokens, record.key_id)

    async def close(self, ident: str) -> None:
        """Close a session and abort its turn.

        Raises:
            ApiError: there is no such session.
        """
        record = self.find(ident)
        self._forget(record)
        await self._client.call("close", record.conversation.number)

    async def pack(self, ident: str) -> tuple[SessionRecord, SessionParcel]:
        """Return an idle session for another server; requests for it are refused until `unpack`.

        Cost: a copy of its KV, between two turns of the engine. If that fails, only the text goes.

        Raises:
            ApiError: it is busy, or not here.
            EngineGone: the engine is gone.
        """
        record = self._take(self.find(ident))
        record.is_leaving, image = True, None
        try:
            with contextlib.suppress(EngineFault):
                image = await self._client.call("export", record.conversation.number)
        except BaseException:
            self.unpack(record)
            raise
        return record, SessionParcel(
            ident=ident,
            model=self._model,
            number=record.parcel + 1,
            max_tokens=record.max_tokens,
            tokens=record.conversation.tokens,
            said=record.conversation.said,
            idle_seconds=self._clock() - record.used,
            image=image,
        )

    def unpack(self, record: SessionRecord) -> None:
        """Let a session that was packed go on here, because no other server has it."""
        record.is_busy = record.is_leaving = False
        record.parcel += 1  # the next one has another text

    async def leave(self, record: SessionRecord) -> None:
        """Forget a session that was packed, because another server has it."""
        if self._records.get(record.ident) is record:  # else it has come back already
            self._forget(record)
            self._past.note(record.ident, record.parcel)
            await self._client.call("close", record.conversation.number)

    def latest_parcel(self, ident: str) -> int:
        """Return the number of a session's latest parcel here; 0 if there was none."""
        record = self._records.get(ident)
        return self._past.latest(ident) if record is None else record.parcel

    async def take_in(self, parcel: SessionParcel, *, takes_new: bool = True) -> None:
        """Take in a session of another server. If it came before, nothing happens.

        Its KV comes along if there is room and the engines are alike. On an error nothing changes,
        and the same parcel is refused for ever, because its session may have gone on at its sender.

        Args:
            parcel: the session.
            takes_new: whether a session that has not come before is taken.

        Raises:
            ApiError: another model, no room, or a session of this name is here.
            ConfigError: the text does not fit the engine.
            EngineGone: the engine is gone.
        """
        async with self._taking_in:  # a parcel that comes again waits until it is clear
            old = self._records.get(parcel.ident)
            if parcel.number <= self.latest_parcel(parcel.ident):
                return
            try:
                await self._take_in(parcel, old, takes_new)
            except Exception:
                self._refused.note(parcel.ident, parcel.number)
                raise
            if old is not None:  # a copy that was sent away, and has come back longer
                with contextlib.suppress(SpecpoolError):
                    await self._client.call("close", old.conversation.number)

    async def _take_in(
        self, parcel: SessionParcel, old: SessionRecord | None, takes_new: bool
    ) -> None:
        if parcel.number <= self._refused.latest(parcel.ident):
            raise ApiError(409, "the same parcel was refused before", code="parcel_refused")
        if not takes_new:
            raise ApiError(503, "this replica leaves too", code="replica_leaves")
        if parcel.model != self._model:
            raise ApiError(
                409,
                f"the session is of the model {parcel.model}, this server has {self._model}",
                code="model_mismatch",
            )
        if old is not None and not old.is_leaving:
            raise ApiError(409, "the session is here already", code="session_exists")
        with self._room():
            max_tokens = min(parcel.max_tokens, self._client.ready.max_context_len)
            number = await self._client.call("open", max_tokens, parcel.tokens, parcel.image)
        conversation = Conversation(number, parcel.tokens, parcel.said)
        record = SessionRecord(parcel.ident, conversation, max_tokens, parcel=parcel.number)
        record.used = self._clock() - parcel.idle_seconds
        self._records[parcel.ident] = record

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

    @property
    def _model(self) -> tuple[str, str]:
        """What a server must have for the tokens of a session to mean the same there."""
        return self._config.names[0], self._client.ready.model_key

    def _is_own(self, ident: str) -> bool:
        """Return whether this server has opened a session."""
        return ident.startswith(f"{self._tag}.")

    def _forget(self, record: SessionRecord) -> None:
        del self._records[record.ident]
        if record.parcel:
            self._past.note(record.ident, record.parcel)

    def _take(self, record: SessionRecord) -> SessionRecord:
        if record.is_busy:
            raise ApiError(
                409, "a turn of the session has not ended", code="session_busy", param=None
            )
        record.is_busy = True
        return record

    @contextlib.contextmanager
    def _room(self, key_id: str = "") -> Iterator[None]:
        """Reserve the place of a session while the engine opens it.

        If there are several keys, one of them may have at most as many sessions as places are free:
        half of the places if no other key has any, and never all.

        Raises:
            ApiError: with those that are being opened, too many are open.
        """
        num = len(self._records) + self._opening.total()
        num_free = self._config.max_open_sessions - num
        has_others = self._config.has_several_keys
        num_own = len(self.of_key(key_id)) + self._opening[key_id] if has_others else num
        if num_free <= 0 or (has_others and num_own > num_free):
            suffix = " of this key" if has_others else ""
            raise ApiError(
                429,
                f"{num_own} sessions{suffix} are open, which is the most: close one",
                code="too_many_sessions",
                retry=False,
            )
        self._opening[key_id] += 1
        try:
            yield
        finally:
            self._opening[key_id] -= 1

    def _keep(self, conversation: Conversation, max_tokens: int, key_id: str) -> SessionRecord:
        ident = ident_of(f"{self._tag}.{self._secret(16)}", key_id)
        record = SessionRecord(ident, conversation, max_tokens, used=self._clock())
        self._records[record.ident] = record
        return record
