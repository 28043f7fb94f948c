"""`SimProxy`: a proxy with the real `Routing`, which hears of replicas by lists that come late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.fleet.replica import Request, SimReplica
from lab.fleet.settings import FleetSettings
from lab.fleet.world import Call, Cut, Node, World
from specpool.serve.replicas.routing import MOST_PATIENT, Routing, owner_of

_POLL = 0.02


class SimProxy(Node):
    """A proxy.

    Attributes:
        version: of the list that it has; 0 if none yet.
        replicas: the replicas of that list.
    """

    def __init__(self, world: World, name: str, settings: FleetSettings) -> None:
        super().__init__(world, name)
        self.version = 0
        self.replicas: Mapping[str, SimReplica] = {}
        self._routing = Routing(world.random.getrandbits(32))
        self._settings = settings
        self._loads: dict[str, int] = {}
        self._num_patient = 0

    def take(self, version: int, replicas: Mapping[str, SimReplica]) -> None:
        """Take over a list, unless it is older than what is known."""
        if version > self.version:
            self.version, self.replicas = version, dict(replicas)
            self._routing.update(replicas)

    def serve(self, call: Call, request: Request) -> None:
        """Pass a request on to a replica, and its answer back."""
        ident = request.get("session")
        owner = None if ident is None else owner_of(ident)
        if owner is None:
            self._anywhere(call, request)
        else:
            self._to_owner(call, request, owner, self.world.now)

    def _to_owner(self, call: Call, request: Request, owner: str, since: float) -> None:
        """As the router does: a late list is waited for, but not by more than a few requests."""
        known = self._routing.knows(owner)
        if call.has_left or not self.is_up:
            return
        if known == "here":
            self._pass(call, request, owner)
            return
        is_first = since == self.world.now
        if is_first and known == "unknown" and self._num_patient < MOST_PATIENT:
            self._num_patient += 1
        elif is_first or known == "gone" or self.world.now - since >= self._settings.patience:
            self._num_patient -= not is_first
            self._to_place(call, request)
            return
        self.world.after(_POLL, lambda: self._to_owner(call, request, owner, since))

    def _to_place(self, call: Call, request: Request) -> None:
        """Pass a turn whose owner has left on to where the session moves."""
        tag = self._routing.place_of(request["session"])
        if tag is None:
            self._anywhere(call, request)
        else:
            self._pass(call, request, tag)

    def _anywhere(self, call: Call, request: Request) -> None:
        tags = self._routing.spread()
        if not tags:
            call.reply((503, {"code": "no_replica"}))
            return
        hint = request.get("hint")
        tag = self._routing.hinted(hint, self._load_of) if hint else None
        self._pass(call, request, tag or min(tags, key=self._load_of))

    def _pass(self, call: Call, request: Request, tag: str) -> None:
        replica = self.replicas[tag]
        self._loads[tag] = self._load_of(tag) + 1

        def done(answer: Any) -> None:
            self._loads[tag] -= 1
            if isinstance(answer, Cut):
                if answer.is_dead:
                    self._routing.lose(tag)
                answer = 500, {"code": "cut"}
            call.reply(answer)

        inner = self.world.call(
            self, replica, lambda attempt: replica.serve(attempt, request), done
        )

        def left() -> None:
            self._loads[tag] -= 1
            inner.leave()

        call.on_left = left

    def _load_of(self, tag: str) -> int:
        return self._loads.get(tag, 0)
