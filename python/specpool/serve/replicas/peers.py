"""`RayPeers`: the way from a replica to the others, by the handle that Serve gives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError

from specpool.serve.bridge.parcel import SessionParcel
from specpool.serve.replicas.mover import Fate
from specpool.serve.replicas.routing import listeners

log = logging.getLogger("specpool.serve")

#: Seconds that another replica may take for a session.
_TIMEOUT = 30.0


class RayPeers:
    """The other replicas of this one's deployment."""

    def __init__(self, hear: Callable[[list[str]], None]) -> None:
        """Begin to listen; call it in a replica.

        Args:
            hear: called with each list of the replicas that take requests, in this event loop.
        """
        loop = asyncio.get_running_loop()
        listeners.append(lambda tags: loop.call_soon_threadsafe(hear, tags))
        context = serve.get_replica_context()
        handle: Any = serve.get_deployment_handle(context.deployment, context.app_name)
        self._handle = handle.options(method_name="take_in")  # its router runs from now on

    async def send(self, tag: str, parcel: SessionParcel) -> Fate:
        """Give a session to the replica of this tag; never raises."""
        try:
            fate: Fate = await self._call("take_in", tag, parcel)
        except ActorDiedError:
            return "gone"
        except Exception as error:
            log.warning("no answer of replica %s to a session: %s", tag, error)
            return "unknown"
        return fate

    async def announce(self, tag: str, parcels: Mapping[str, int]) -> bool:
        """Tell the replica of this tag which sessions will come; never raises."""
        try:
            return bool(await self._call("expect", tag, parcels))
        except Exception as error:
            log.warning("%d sessions: no answer of replica %s: %s", len(parcels), tag, error)
            return False

    async def _call(self, method: str, tag: str, *args: object) -> Any:
        """Call a method of the replica of this tag, or of another one if that has left."""
        # By this name the router finds the replica, as it finds the owner of a session.
        handle = self._handle.options(method_name=method, session_id=f"{tag}.parcel")
        return await asyncio.wait_for(handle.remote(tag, *args), _TIMEOUT)
