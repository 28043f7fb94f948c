"""What becomes of a parcel that goes by Serve's handle, without Ray."""

from __future__ import annotations

import asyncio
import functools
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest

import ray_stand_in
from specpool.errors import ConfigError
from specpool.serve.replicas import routing


class Handle:
    """Serve's handle: notes its options, and answers as the test says."""

    def __init__(self, answers):
        self.answers, self.given, self.sent = answers, {}, []

    def options(self, **given):
        self.given |= given
        return self

    def remote(self, *args):
        self.sent.append((self.given["method_name"], self.given["session_id"], args))
        return self._answer(self.answers.pop(0))

    async def _answer(self, answer):
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(9)
        return answer


@pytest.fixture
def peers(monkeypatch):
    """The module, and the handle that it gets."""
    ray_stand_in.install(monkeypatch)
    handle = Handle([])
    context = SimpleNamespace(deployment="Replica", app_name="app", replica_tag="own")
    serve, exceptions = sys.modules["ray.serve"], ModuleType("ray.exceptions")
    exceptions.ActorDiedError = type("ActorDiedError", (Exception,), {})
    serve.get_replica_context = lambda: context
    serve.get_deployment_handle = lambda name, app: handle
    sys.modules["ray"].serve = serve
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    name = "specpool.serve.replicas.peers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = import_module(name)
    monkeypatch.setattr(routing, "listeners", [])
    monkeypatch.setattr(module, "listeners", routing.listeners)
    yield module, handle
    monkeypatch.undo()
    sys.modules.pop(name, None)


def test_each_end_of_a_call_is_a_fate(peers, monkeypatch):
    """Law: an answer is passed on, a death is "gone", and whatever else is "unknown"."""
    module, handle = peers
    monkeypatch.setattr(module, "_TIMEOUT", 0.05)
    handle.answers = ["taken", "refused", "gone", module.ActorDiedError(), OSError("cut"), None]
    parcel = SimpleNamespace(ident="a.1")

    async def main():
        peers = module.RayPeers(lambda tags: None)
        return [await peers.send("other", parcel) for _ in range(6)]

    assert asyncio.run(main()) == ["taken", "refused", "gone", "gone", "unknown", "unknown"]
    assert handle.sent == [("take_in", "other.parcel", ("other", parcel))] * 6


def test_what_is_announced_was_heard_or_not(peers):
    """Law: an error, and a replica that took the place of the right one, have not heard it."""
    _, handle = peers
    handle.answers = [True, False, OSError("cut")]

    async def main():
        peers = sys.modules["specpool.serve.replicas.peers"].RayPeers(lambda tags: None)
        return [await peers.announce("other", {"a.1": 3}) for _ in range(3)]

    assert asyncio.run(main()) == [True, False, False]
    assert handle.sent == [("expect", "other.parcel", ("other", {"a.1": 3}))] * 3


def test_a_replica_answers_for_each_parcel(peers, monkeypatch):
    """Law: whatever goes wrong is a no, so that no session is sent for ever; none stops halfway."""
    name = "specpool.serve.replicas.replica"
    monkeypatch.delitem(sys.modules, name, raising=False)
    made = import_module(name).Replica  # an object of it would end as Serve's do
    replica, heard, taken = SimpleNamespace(_tag="own", _moves=set()), [], []
    replica._spawn = functools.partial(made._spawn, replica)

    async def take_in(parcel):
        await asyncio.sleep(0.01)
        if isinstance(parcel.ident, Exception):
            raise parcel.ident
        taken.append(parcel.ident)

    replica._mover = SimpleNamespace(take_in=take_in, expect=heard.append)

    async def main():
        for ident, fate in (
            ("a.1", "taken"),
            (ConfigError("x"), "refused"),
            (KeyError(1), "refused"),
        ):
            assert await made.take_in(replica, "own", SimpleNamespace(ident=ident)) == fate
        assert await made.take_in(replica, "other", SimpleNamespace(ident="a.2")) == "gone"
        assert await made.expect(replica, "own", {"a.3": 1}) and not await made.expect(
            replica, "other", {}
        )
        call = asyncio.ensure_future(made.take_in(replica, "own", SimpleNamespace(ident="a.4")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert taken == ["a.1", "a.4"] and heard == [{"a.3": 1}] and not replica._moves
    monkeypatch.undo()
    sys.modules.pop(name, None)


def test_a_list_that_a_router_gets_is_heard_in_the_event_loop(peers):
    module, _ = peers
    heard = []

    async def main():
        module.RayPeers(heard.append)
        (hear,) = routing.listeners
        await asyncio.to_thread(hear, ["a", "b"])
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert heard == [["a", "b"]]
