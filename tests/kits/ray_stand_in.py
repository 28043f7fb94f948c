"""Stand-ins for the modules of Ray that the router imports: enough to run it without Ray."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class ConsistentHashRouter:
    """Ray's class, as far as ours calls it; the loads are the test's to set."""

    def __init__(self) -> None:
        self.loads: dict[str, int] = {}
        self.replica_queue_len_cache = SimpleNamespace(get=self._load)
        self.initialize_state()

    def _load(self, replica_id: Any) -> int | None:
        return self.loads.get(replica_id.unique_id)

    def initialize_state(self, **kwargs: Any) -> None:
        self.ring = kwargs

    def update_replicas(self, replicas: list[Any]) -> None:
        self.replicas = replicas

    def on_replica_actor_died(self, replica_id: Any) -> None:
        self.replicas = [replica for replica in self.replicas if replica.replica_id != replica_id]


@dataclass(frozen=True)
class ReplicaID:
    unique_id: str


@dataclass
class RunningReplica:
    replica_id: ReplicaID


@dataclass
class HTTPRequest:
    """What Ray's proxy pickles: the head of a request."""

    asgi_scope: dict[str, Any]


@dataclass
class PendingRequest:
    args: list[Any] = field(default_factory=list)
    metadata: Any = field(default_factory=lambda: SimpleNamespace(session_id=""))
    routing_context: Any = field(default_factory=lambda: SimpleNamespace(should_backoff=False))


def request(path: str = "/v1/completions", session: str = "", **headers: str) -> PendingRequest:
    """A request as the router gets it; `x_prefix_hint` stands for the header `x-prefix-hint`."""
    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    scope = {"type": "http", "path": path, "headers": raw}
    return PendingRequest([pickle.dumps(HTTPRequest(scope))], SimpleNamespace(session_id=session))


def install(monkeypatch: Any) -> None:
    """Put the stand-ins where the router imports from."""
    request_router = ModuleType("ray.serve.request_router")
    for stand_in in (PendingRequest, ReplicaID, RunningReplica):
        setattr(request_router, stand_in.__name__, stand_in)
    router = ModuleType("ray.serve.experimental.consistent_hash_router")
    router.ConsistentHashRouter = ConsistentHashRouter  # type: ignore[attr-defined]
    names = ("ray", "ray.serve", "ray.serve.experimental")
    for module in (*map(ModuleType, names), request_router, router):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "specpool.serve.replicas.router", raising=False)
