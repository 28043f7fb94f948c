"""`SessionOwnerRouter`: Ray Serve's proxies choose a replica by it.

A turn of a session goes to the replica that opened the session, or nowhere: it waits while that
replica is full. If that replica has left, the turn goes to where the session moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from specpool.serve.replicas.routing import (
    MOST_CHARS,
    MOST_PATIENT,
    PATIENCE,
    Routing,
    owner_of,
    tell,
)

#: The header with a hint of a request's prefix.
HINT_HEADER = b"x-prefix-hint"
_PATH = b"/v1/sessions/"


class SessionOwnerRouter(ConsistentHashRouter):  # type: ignore[misc] # it is Any for mypy
    """Routes turns to their session's owner, hinted requests by their hint, and others by load.

    It derives from Ray's router of this name because that one gives each routing task's result to
    the task's own request, which ownership needs. Its own ring is not used.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin without replicas; Ray calls it with `request_router_kwargs`."""
        super().initialize_state(num_virtual_nodes=1, num_fallback_replicas=0)
        self._patience = float(kwargs.get("patience", PATIENCE))
        self._routing = Routing()
        self._by_tag: dict[str, RunningReplica] = {}
        self._num_patient = 0
        self._news = asyncio.Event()

    @property
    def max_num_routing_tasks(self) -> int:
        """The most requests that are routed at once: those that wait leave room for others."""
        return MOST_PATIENT + 2 * len(self._by_tag)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over Serve's list of running replicas."""
        super().update_replicas(replicas)
        self._by_tag = {replica.replica_id.unique_id: replica for replica in replicas}
        self._routing.update(self._by_tag)
        self._news.set()
        self._news = asyncio.Event()
        tell([*self._by_tag])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica at once, before Serve's list does."""
        super().on_replica_actor_died(replica_id)
        self._by_tag.pop(replica_id.unique_id, None)
        self._routing.lose(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas; within a rank Serve takes the one with less work."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        head = RequestHead(pending_request.args)
        session = pending_request.metadata.session_id or head.session
        if session:
            owner = owner_of(session)
            if owner is None:  # the id has another form: any replica answers so
                return self._ranks(self._routing.spread())
            await self._hear_of(owner)
            if owner in self._by_tag:
                return [[self._by_tag[owner]]]
            new_owner = self._routing.place_of(session)
            return self._ranks([] if new_owner is None else [new_owner])
        first = self._routing.hinted(head.hint, self._load_of) if head.hint else None
        spread = self._ranks(self._routing.spread())
        return spread if first is None else [*self._ranks([first]), *spread]

    def _ranks(self, tags: list[str]) -> list[list[RunningReplica]]:
        return [[self._by_tag[tag] for tag in tags]] if tags else []

    def _load_of(self, tag: str) -> int:
        replica = self._by_tag[tag]
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    async def _hear_of(self, owner: str) -> None:
        """Wait a moment for an owner that was never heard of, unless too many wait already."""
        if self._routing.knows(owner) != "unknown" or self._num_patient >= MOST_PATIENT:
            return
        self._num_patient += 1
        end = time.monotonic() + self._patience
        try:
            while (
                self._routing.knows(owner) == "unknown"
                and (seconds_left := end - time.monotonic()) > 0
            ):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), seconds_left)
        finally:
            self._num_patient -= 1


class RequestHead:
    """What a router reads in the head of a request that came by HTTP.

    Attributes:
        session: the session that the path names, such as `/v1/sessions/ID/fork`; "" means none.
        hint: the hint of its prefix; "" means none, or none of use.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        """Read the head in what the proxy passes on: its own pickle. Most requests have neither."""
        self.session = self.hint = ""
        content = args[0] if args else None
        if not isinstance(content, bytes) or not (_PATH in content or HINT_HEADER in content):
            return
        try:
            scope = pickle.loads(content).asgi_scope
            path, headers = str(scope["path"]), dict(scope["headers"])
        except Exception:  # another form than Ray 2.60's: the request goes where there is room
            return
        if path.startswith(_PATH.decode()):
            self.session = path.split("/")[3]
        hint = headers.get(HINT_HEADER, b"").decode("latin-1").strip()
        self.hint = hint if len(hint) <= MOST_CHARS else ""
