"""`EngineClient`: the front's end. Streams of many clients share the engine's batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.texts import NextTurn
from specpool.errors import ConfigError, SpecpoolError
from specpool.serve.bridge.messages import (
    Abort,
    Accepted,
    Done,
    Failed,
    Ready,
    Refused,
    Reply,
    Stop,
    Submit,
    Tokens,
    VerbCall,
)

log = logging.getLogger("specpool.serve")


class EngineGone(SpecpoolError):  # noqa: N818 - a state, not a mistake
    """The engine's process has ended."""


class EngineFault(SpecpoolError):  # noqa: N818 - the engine's, not the caller's
    """The engine refused something by its own fault; the message is not for clients."""


class Carrier(Protocol):
    """What carries messages to an engine and back."""

    async def listen(self, hear: Callable[[list[Any]], None]) -> None:
        """Give each list of messages to `hear`; return when the engine is gone."""

    def send(self, message: Any) -> None:
        """Send a message; never waits."""


class Stream:
    """The news of one prompt: `Tokens` and `Done` of all its samples."""

    def __init__(
        self, client: EngineClient, key: int, num_samples: int, answer: asyncio.Future[Any]
    ) -> None:
        self._client, self._key = client, key
        self._answer = answer  # to the `Submit`
        answer.add_done_callback(self._answered)
        self.num_left = num_samples  # samples that have not ended
        self._news: list[Tokens | Done] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def put(self, news: Tokens | Done) -> None:
        """Add news and wake the reader."""
        if isinstance(news, Done):
            self.num_left -= 1
        self._news.append(news)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make the reader raise `error` after the news that have come so far."""
        self._error = error
        self._wake()

    async def accepted(self) -> None:
        """Wait until the engine has queued the prompt.

        Raises:
            ConfigError: the engine refuses it.
            EngineFault: it refuses it by its own fault.
            EngineGone: the engine is gone.
        """
        while not self._answer.done():
            await self._wait()
        self._answer.result()

    async def news(self) -> list[Tokens | Done]:
        """Return all news since the last call, at least one; [] if all samples have ended.

        Raises:
            EngineGone: the engine is gone.
        """
        while not self._news:
            if not self.num_left and self._error is None:
                return []
            await self._wait()
        news, self._news = self._news, []
        return news

    def abort(self) -> None:
        """Abort what is left; each sample's `Done`, or the refusal, still comes."""
        if not self._client.ended.is_set():
            self._error = None  # of a `fail`: the end is waited for
        if self.num_left:
            self._client.send(Abort(self._key))

    def close(self) -> None:
        """Abort what is left, and hear no more of it. A second call does nothing."""
        self._client.forget(self._key, aborts=self.num_left > 0)

    async def _wait(self) -> None:
        """Wait for something to come; raise what made the stream fail."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if answer.exception() is not None:  # refused: nothing follows
            self._client.forget(self._key, aborts=False)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Sends prompts and calls to an engine, and hands its news to their streams.

    Attributes:
        ready: what the engine said of itself.
        num_open: samples that run or wait.
        ended: an event that is set when the engine has gone.
    """

    def __init__(self, carrier: Carrier) -> None:
        """Talk through this carrier, from the running event loop."""
        self._carrier = carrier
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.num_open = 0
        self._readiness: asyncio.Future[Ready] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.failure: str | None = None
        self._listening = asyncio.create_task(self._listen())

    async def start(self) -> Ready:
        """Wait until the engine is loaded.

        Raises:
            ConfigError: an option or a checkpoint does not fit.
            EngineGone: the process has died.
        """
        self.ready = await self._readiness
        return self.ready

    def submit(
        self,
        prompt: list[int] | NextTurn,
        params: SamplingParams,
        *,
        session: int | None = None,
        priority: int = 0,
    ) -> Stream:
        """Send a prompt; return its stream, which tells whether the engine accepts it.

        Raises:
            EngineGone: the engine is gone.
        """
        key = next(self._keys)
        answer = self._ask(key, Submit(key, prompt, params, session, priority))
        stream = self._streams[key] = Stream(self, key, params.n, answer)
        self.num_open += params.n
        return stream

    async def call(self, verb: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a verb of `Runner` between two turns, and return its result.

        Raises:
            ConfigError: the engine refuses it.
            EngineFault: it refuses it by its own fault.
            EngineGone: the engine is gone.
            TimeoutError: no answer came within `timeout` seconds.
        """
        key = next(self._keys)
        return await asyncio.wait_for(self._ask(key, VerbCall(key, verb, args)), timeout)

    def forget(self, key: int, *, aborts: bool) -> None:
        """Drop a stream, and abort what is left of it."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        self.num_open -= stream.num_left
        if aborts:
            self.send(Abort(key))

    def send(self, message: Any) -> None:
        """Send a message that has no answer; without an engine it is dropped."""
        if not self.ended.is_set():
            self._carrier.send(message)

    def fail_all(self, error: Exception) -> None:
        """Make the readers of all streams raise `error`; they then abort what is left."""
        for stream in list(self._streams.values()):
            stream.fail(error)

    async def close(self) -> None:
        """Tell the engine to stop, and hear no more."""
        self.send(Stop())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._listening), 10)
        self._listening.cancel()
        self._end("the server is shutting down")

    def _ask(self, key: int, message: Any) -> asyncio.Future[Any]:
        """Send a message; return its answer, which is to come."""
        if self.ended.is_set():
            raise EngineGone("the engine is gone")
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[key] = answer
        answer.add_done_callback(lambda _: self._answers.pop(key, None))
        self._carrier.send(message)
        return answer

    async def _listen(self) -> None:
        await self._carrier.listen(self._take)
        self._end("the engine's process has ended")

    def _take(self, messages: list[Any]) -> None:
        """Take a list of messages."""
        for message in messages:
            if isinstance(message, Tokens | Done):
                if (stream := self._streams.get(message.key)) is not None:
                    stream.put(message)
                    self.num_open -= isinstance(message, Done)
                    if not stream.num_left:
                        del self._streams[message.key]
            else:
                self._hear(message)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Ready):
            self._readiness.set_result(message)
        elif isinstance(message, Failed):
            if not self._readiness.done():
                kind = ConfigError if message.is_users else EngineGone
                self._readiness.set_exception(kind(message.message.partition(": ")[2]))
            self._end(message.message)
        elif isinstance(message, Accepted | Reply | Refused):
            answer = self._answers.get(message.key)
            if answer is None or answer.done():
                return
            if isinstance(message, Refused):
                fault = ConfigError if message.is_users else EngineFault
                answer.set_exception(fault(message.message))
            else:
                answer.set_result(message.value if isinstance(message, Reply) else None)

    def _end(self, why: str) -> None:
        if self.ended.is_set():
            return
        self.failure = why
        self.ended.set()
        error = EngineGone(why)
        if not self._readiness.done():
            self._readiness.set_exception(error)
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(error)
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        self.num_open = 0
