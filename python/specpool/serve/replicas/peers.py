"""`RayPeers`: the way from a replica to the others, by the handle that Serve gives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
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
        own: Any = serve.get_deployment_handle(context.deployment, context.app_name)
        self._handle = own.options(method_name="take_in")  # its router runs from now on

    async def send(self, tag: str, parcel: SessionParcel) -> Fate:
        """Give a session to the replica of this tag; never raises."""
        # By this name the router finds the replica, as it finds the owner of a session.
        call = self._handle.options(session_id=f"{tag}.parcel").remote(tag, parcel)
        try:
            fate: Fate = await asyncio.wait_for(call, _TIMEOUT)
        except ActorDiedError:
            return "gone"
        except Exception as error:
            log.warning("session %s: no answer of replica %s: %s", parcel.ident, tag, error)
            return "unknown"
        return fate
