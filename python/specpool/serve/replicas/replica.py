"""`Replica`: one server of several: the app of `specpool serve` behind Ray Serve's proxies.

A replica has one engine in a process of its own, or in several that share the target. It ends with
its engine, so that Serve starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from specpool.engine.text.chat_template import render
from specpool.errors import one_line
from specpool.serve.app import build_app
from specpool.serve.bridge.client import EngineClient
from specpool.serve.bridge.parcel import SessionParcel
from specpool.serve.bridge.process import EngineProcess
from specpool.serve.bridge.ranked_process import RankedProcess
from specpool.serve.config import Launch
from specpool.serve.replicas.figures import publish
from specpool.serve.replicas.mover import Fate, Mover, Time
from specpool.serve.replicas.peers import RayPeers
from specpool.serve.server import tokenizer_of
from specpool.serve.service import Service

log = logging.getLogger("specpool.serve")

#: Seconds in which streams send their last event after the engine has gone.
_LAST_WORDS = 1.0


class Replica:
    """What Serve runs: it starts the engine, and answers by the app of `specpool serve`."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, prepare: Callable[[list[str]], Launch], words: list[str]
    ) -> None:
        """Load the engine; return when it is ready.

        Args:
            prepare: checks the options, here on the replica's node.
            words: the options of `specpool serve`.

        Raises:
            ConfigError: an option or a checkpoint does not fit.
            EngineGone: the engine's process has died.
        """
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        launch = prepare(words)
        self._stuck_timeout = launch.stuck_timeout
        self._engine = (
            EngineProcess(launch.loading, launch.threads)
            if launch.ranks == 1
            else RankedProcess(launch.loading, launch.threads, words, launch.ranks)
        )
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._moves: set[asyncio.Task[Any]] = set()
        try:
            await self._start(launch)
        except BaseException:
            self._engine.close(0)
            raise

    async def _start(self, launch: Launch) -> None:
        self._client = EngineClient(self._engine)
        warm = asyncio.create_task(asyncio.to_thread(render, "", [], {}))
        ready = await self._client.start()
        tokenizer = await asyncio.to_thread(
            tokenizer_of,
            ready.tokenizer,
            launch.chat_template,
            bool(launch.loading["trust_remote_code"]),
        )
        await warm
        self._tag = serve.get_replica_context().replica_tag
        self._service = Service(launch.config, self._client, tokenizer, self._tag)
        time_ = Time(time.monotonic, asyncio.sleep, self._spawn)
        peers = RayPeers(lambda tags: self._mover.update(tags))
        self._mover = Mover(self._service.sessions, self._tag, peers, time_)
        self._tasks = [
            asyncio.create_task(self._service.sessions.expire()),
            asyncio.create_task(publish(self._service)),
            asyncio.create_task(self._end_with_engine()),
        ]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Serve calls it once, after `__init__`."""
        return build_app(self._service)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine beside others; a task that nobody holds may be collected."""
        task = asyncio.create_task(work)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        return task

    async def take_in(self, tag: str, parcel: SessionParcel) -> Fate:
        """Take in a session; another replica calls it.

        Args:
            tag: the replica that the session is for.
            parcel: the session.
        """
        if tag != self._tag:  # that one has left, and the router has chosen another
            return "gone"
        try:
            # A caller who leaves must not stop it halfway.
            await asyncio.shield(self._spawn(self._mover.take_in(parcel)))
        except Exception as error:  # without an answer, the session would be sent for ever
            log.warning("a session was refused: %s", one_line(error))
            return "refused"
        return "taken"

    async def expect(self, tag: str, parcels: Mapping[str, int]) -> bool:
        """Hear which sessions another replica will send; it calls this.

        Args:
            tag: the replica that the sessions are for.
            parcels: the number of each session's parcel.
        """
        if tag != self._tag:
            return False
        self._mover.expect(parcels)
        return True

    async def check_health(self) -> None:
        """Say whether the replica can work; Serve calls it every few seconds.

        The engine answers between two turns. If it does not, it is killed: a process that is stuck
        would outlive the replica, with its GPU's memory.

        Raises:
            RuntimeError: the engine has gone, or is stuck.
        """
        if self._client.ended.is_set():
            raise RuntimeError(f"the engine has ended: {self._client.failure}")
        try:
            await self._client.call("stats", timeout=self._stuck_timeout)
        except asyncio.TimeoutError:
            why = f"the engine did not answer within {self._stuck_timeout:g} s, and was killed"
            log.error(why)
            await asyncio.to_thread(self._engine.close, 0)
            raise RuntimeError(why) from None

    async def _end_with_engine(self) -> None:
        await self._client.ended.wait()
        if self._is_closing:
            return
        log.error("the engine has ended: %s; the replica ends too", self._client.failure)
        await asyncio.sleep(_LAST_WORDS)
        await asyncio.to_thread(self._engine.close, 0)  # no rank of it may stay
        os._exit(2)  # Serve sees it at once; its own health check takes several periods

    async def __del__(self) -> None:
        """Move the sessions and stop the engine. Serve calls it behind the last request."""
        if self._is_closing or not hasattr(self, "_mover"):
            return
        self._is_closing = True
        self._service.is_draining = True
        moving, ended = self._spawn(self._mover.close()), self._spawn(self._client.ended.wait())
        await asyncio.wait({moving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if num_left := len(self._service.sessions):
            log.warning("%d sessions could not move to another replica, and are lost", num_left)
        for task in list(self._moves):
            task.cancel()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await self._client.close()
        self._service.close()
        await asyncio.to_thread(self._engine.close)


def application(prepare: Callable[[list[str]], Launch], words: list[str]) -> serve.Application:
    """Return the application of these options; how many replicas is the config's to say."""
    ingress = serve.ingress()(Replica)
    bound: Any = serve.deployment(ingress, name="Replica").bind(prepare, words)
    return bound
