"""Which replica a request goes to, without Ray: the choice itself, and Ray's router around it."""

from __future__ import annotations

import asyncio
import random
import string
import sys
from collections import Counter
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ray_stand_in
from ray_stand_in import ReplicaID, RunningReplica, request
from specpool.serve.replicas import routing
from specpool.serve.replicas.routing import Routing, owner_of

SESSION = "a" * 32


def tag(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase + string.digits, k=8))


def slow_hinted(tags: set[str], hint: str, loads: dict[str, int]) -> str:
    """The oracle: the whole ring, sorted anew, walked from the hint on."""

    def place(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

    ring = sorted(
        (place(f"{replica_tag} {i}"), replica_tag) for replica_tag in tags for i in range(64)
    )
    max_load = 1.25 * sum(loads[replica_tag] for replica_tag in tags) / len(tags) + 4
    start = place(hint)
    behind = [replica_tag for at, replica_tag in ring if at >= start] + [
        replica_tag for at, replica_tag in ring if at < start
    ]
    return next(replica_tag for replica_tag in behind if loads[replica_tag] <= max_load)


def test_random_changes_against_a_slow_oracle():
    """Law: after any joins and leaves, owners and hints are as from a table made anew."""
    rng = random.Random(5)
    for _ in range(8):
        routing, live, ever = Routing(1), set(), set()
        for _ in range(30):
            if live and rng.random() < 0.4:
                gone = rng.choice(sorted(live))
                live.discard(gone)
                if rng.random() < 0.5:
                    routing.lose(gone)
            elif len(live) < 16:  # up to here the mean is exact
                live.add(tag(rng))
            ever |= live
            routing.update(live)
            assert len(routing) == len(live)
            for replica_tag in ever:
                assert routing.knows(replica_tag) == ("here" if replica_tag in live else "gone")
            assert routing.knows(tag(rng)) == "unknown"
            assert len(set(routing.spread())) == min(2, len(live)) and set(routing.spread()) <= live
            loads = {replica_tag: rng.choice([0, 1, 2, 9, 40]) for replica_tag in live}
            for hint in map(str, range(5)):
                chosen = routing.hinted(hint, loads.__getitem__)
                assert chosen == (slow_hinted(live, hint, loads) if live else None)


def test_a_change_moves_few_hints():
    """Law: if a replica of 20 leaves, the hints of the other 19 stay where they are."""
    rng = random.Random(1)
    tags = [tag(rng) for _ in range(20)]
    routing = Routing(0)
    routing.update(tags)
    hints = [str(i) for i in range(2000)]
    before = {hint: routing.hinted(hint, lambda _: 0) for hint in hints}
    shares = Counter(before.values())
    assert len(shares) == 20 and max(shares.values()) < 2 * 100
    routing.update(tags[1:])
    for hint in hints:
        if before[hint] != tags[0]:
            assert routing.hinted(hint, lambda _: 0) == before[hint]


def test_a_sessions_place_is_its_owner_and_then_one_on_the_ring():
    """Law: without its owner, a session's place is the same by every list with these replicas."""
    rng = random.Random(3)
    tags = [tag(rng) for _ in range(20)]
    idents = [f"{rng.choice(tags)}.{rng.getrandbits(128):032x}" for _ in range(500)]
    routing, other = Routing(0), Routing(1)
    routing.update(tags)
    assert [routing.place_of(ident) for ident in idents] == [owner_of(ident) for ident in idents]
    routing.update(tags[10:])
    other.update(tags[10:])
    places = Counter()
    for ident in idents:
        owner, home = owner_of(ident), routing.place_of(ident)
        assert home == other.place_of(ident)
        if owner in tags[10:]:
            assert home == owner
        else:
            assert home == slow_hinted(set(tags[10:]), ident, Counter())
            places[home] += 1
    assert len(places) == 10 and max(places.values()) < 3 * places.total() / 10
    assert Routing(0).place_of(idents[0]) is None


def test_one_hint_does_not_flood_a_replica():
    """Law: with all requests of one hint, no replica has more than 1.25 of the mean and 5."""
    routing, loads = Routing(0), Counter()
    routing.update(f"replica{i}" for i in range(10))
    for _ in range(1000):
        chosen = routing.hinted("the same for all", loads.__getitem__)
        loads[chosen] += 1
        assert max(loads.values()) <= 1.25 * loads.total() / 10 + 5
    assert len(loads) == 8  # 1.25 times the mean of 10 replicas is what 8 of them have


def test_replicas_that_left_are_not_remembered_without_end():
    routing = Routing(0)
    for i in range(5000):
        routing.update([f"r{i}"])
    assert routing.knows("r4990") == "gone" and routing.knows("r1") == "unknown"


def test_the_owner_in_a_sessions_id():
    assert owner_of(f"abcd1234.{SESSION}") == "abcd1234"
    for wrong in ("", "abcd1234", ".", "abcd1234.", f".{SESSION}", "a." + "x" * 200):
        assert owner_of(wrong) is None


# --- Ray's router around it ---------------------------------------------------------------------


@pytest.fixture
def router(monkeypatch):
    ray_stand_in.install(monkeypatch)
    module = import_module("specpool.serve.replicas.router")
    router = module.SessionOwnerRouter()
    router.update_replicas([RunningReplica(ReplicaID(f"replica{i}")) for i in range(4)])
    yield router
    monkeypatch.undo()
    sys.modules.pop("specpool.serve.replicas.router", None)


def choose(router, pending):
    ranks = asyncio.run(router.choose_replicas(list(router.replicas), pending))
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


def test_a_turn_goes_to_its_owner_or_waits(router):
    """Law: the owner is the only choice, however full it is; a full one is asked again later."""
    router.loads = {"replica2": 10**6}
    for ident in (f"replica2.{SESSION}", f"replica2.{SESSION[1:]}"):
        pending = request(session=ident)
        assert choose(router, pending) == [["replica2"]]
        assert pending.routing_context.should_backoff


@pytest.mark.parametrize("end", ["", "/fork", "/rewind"])
def test_a_path_names_a_session_too(router, end):
    for i in range(4):
        pending = request(f"/v1/sessions/replica{i}.{SESSION}{end}")
        assert choose(router, pending) == [[f"replica{i}"]]


def test_who_has_left_is_not_waited_for(router):
    """Law: a turn whose owner died goes to its place on the ring at once, from every router.

    Nothing else goes to the dead one, though Serve's list has not come yet.
    """
    router.on_replica_actor_died(ReplicaID("replica2"))
    router._patience = 1e9
    ranks = choose(router, request(session=f"replica2.{SESSION}"))
    home = slow_hinted({f"replica{i}" for i in (0, 1, 3)}, f"replica2.{SESSION}", Counter())
    assert ranks == [[home]]
    for i in range(50):
        for pending in (request(), request(x_prefix_hint=str(i))):
            assert not any("replica2" in rank for rank in choose(router, pending))


def test_a_late_list_is_waited_for(router):
    """Law: a turn of a replica that this router has not heard of yet waits for the list."""

    router._patience = 1e9

    async def both():
        turn = asyncio.ensure_future(
            router.choose_replicas(router.replicas, request(session=f"new.{SESSION}"))
        )
        await asyncio.sleep(0.1)
        assert not turn.done()
        router.update_replicas([*router.replicas, RunningReplica(ReplicaID("new"))])
        return await turn

    assert [[replica.replica_id.unique_id for replica in rank] for rank in asyncio.run(both())] == [
        ["new"]
    ]


def test_a_flood_of_wrong_ids_does_not_stop_the_router(router, monkeypatch):
    """Law: at most 256 wait, which leave tasks for others; further ones are sent on at once."""
    now = 0.0
    module = sys.modules["specpool.serve.replicas.router"]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    async def flood():
        nonlocal now
        router._patience = 1e9
        turns = [
            asyncio.ensure_future(
                router.choose_replicas(router.replicas, request(session=f"wrong{i}.{SESSION}"))
            )
            for i in range(300)
        ]
        await asyncio.wait(turns[256:])
        waiting = [turn for turn in turns if not turn.done()]
        assert len(waiting) == 256 < router.max_num_routing_tasks
        now = 2e9
        router.update_replicas([*router.replicas])  # they look again
        await asyncio.gather(*turns)

    asyncio.run(flood())


def test_hints_and_what_is_none(router):
    ranks = {choose(router, request(x_prefix_hint="a b"))[0][0] for _ in range(20)}
    assert len(ranks) == 1
    for pending in (
        request(),
        request(x_prefix_hint=""),
        request(x_prefix_hint="x" * 129),
        ray_stand_in.PendingRequest([b"no pickle with x-prefix-hint"]),
        ray_stand_in.PendingRequest(["x-prefix-hint"]),
        ray_stand_in.PendingRequest(),
        request(session="no owner"),
    ):
        first_choices = {rank[0] for rank in (choose(router, pending)[0] for _ in range(40))}
        assert len(first_choices) > 1, pending
    assert choose(router, None) == [[f"replica{i}" for i in range(4)]]


def test_a_replica_hears_of_the_others_by_its_router(router, monkeypatch):
    """Law: also by a copy of the router's file, because Ray gives each process one by value."""
    heard = []
    monkeypatch.setattr(routing, "listeners", [heard.append])
    original = sys.modules[type(router).__module__]
    copy = ModuleType(original.__name__)
    exec(compile(Path(original.__file__).read_text(), original.__file__, "exec"), vars(copy))
    for instance in (router, copy.SessionOwnerRouter()):
        instance.update_replicas(
            [RunningReplica(ReplicaID("one")), RunningReplica(ReplicaID("two"))]
        )
    assert heard == [["one", "two"]] * 2


def test_a_session_comes_before_a_hint(router):
    pending = request(session=f"replica1.{SESSION}", x_prefix_hint="a")
    assert choose(router, pending) == [["replica1"]]
