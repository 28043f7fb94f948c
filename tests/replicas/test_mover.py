"""When a replica sends its sessions away, how many at once, and for whom a request waits."""

from __future__ import annotations

import random

import pytest

from lab.fleet.engine import SimEngine
from lab.fleet.world import Node, World
from specpool.serve.api.errors import ApiError
from specpool.serve.bridge.client import EngineFault, EngineGone
from specpool.serve.config import ServeConfig
from specpool.serve.replicas.manifest import LONGEST_MOVES
from specpool.serve.replicas.mover import MOST_AT_ONCE, SETTLE, WAIT, Mover, Time
from specpool.serve.replicas.routing import Routing
from specpool.serve.sessions import Sessions, ident_of


class Replica(Node):
    """A replica in simulated time; `fates` says what becomes of its parcels, "taken" at the end."""

    def __init__(self, tag: str = "own", num: int = 0, *, is_listed: bool = True):
        super().__init__(World(0, mean_delay=0.001, loss=0.0, silence=2.0), tag)
        world = self.world
        clock = lambda: world.now + 1000.0  # noqa: E731
        names = random.Random(0)
        secret = lambda num: names.randbytes(num).hex()  # noqa: E731
        engine = SimEngine(random.Random(0), 64)
        self.sessions = Sessions(engine, ServeConfig(), tag, clock, secret)
        time = Time(clock, world.sleep, lambda work: world.run(self, work))
        self.mover = Mover(self.sessions, tag, self, time)
        self.fates: list[str] = []
        self.sent: list[tuple[float, str, str]] = []
        self.told: list[tuple[float, str, dict[str, int]]] = []
        self.is_refused = lambda ident: False
        self.seconds = 0.05  # until an answer comes
        self.is_deaf = False  # the others do not hear what is announced
        self.num_going = self.most_going = 0
        self.mover.update([tag] * is_listed)
        self.idents = [self.do(self.sessions.open(None)).ident for _ in range(num)]

    async def announce(self, tag, parcels):
        self.told.append((self.world.now, tag, dict(parcels)))
        return not self.is_deaf

    async def send(self, tag, parcel):
        self.sent.append((self.world.now, tag, parcel.ident))
        self.num_going += 1
        self.most_going = max(self.most_going, self.num_going)
        await self.world.sleep(self.seconds)
        self.num_going -= 1
        if self.is_refused(parcel.ident):
            return "refused"
        return self.fates.pop(0) if self.fates else "taken"

    def start(self, work):
        """Start a coroutine; its result, or error, comes into the list."""
        results = []

        async def main():
            try:
                results.append(await work)
            except ApiError as error:
                results.append(error)

        self.world.run(self, main())
        return results

    def do(self, work):
        """Run a coroutine that does not wait."""
        (result,) = self.start(work)
        return result

    def run(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.after(seconds, lambda: None)
        while self.world.now < end and self.world.step():
            pass


def test_sessions_leave_once_the_replica_is_off_the_list_and_a_few_at_once():
    """Law: none leaves before routers can know; then all do, 4 at once, the latest used first."""
    replica = Replica(num=10)
    replica.mover.update(["own", "a", "b"])
    replica.run(5)
    assert not replica.sent
    for ident in replica.idents[:3]:
        replica.run(0.1)
        replica.sessions.release(replica.sessions.find(ident))
    replica.mover.update(["a", "b"])
    replica.run(SETTLE - 0.1)
    assert not replica.sent
    replica.run(3)
    assert len(replica.sessions) == 0 and replica.most_going == MOST_AT_ONCE
    assert [ident for _, _, ident in replica.sent[:3]] == replica.idents[2::-1]
    assert {tag for _, tag, _ in replica.sent} == {"a", "b"}
    replica.run(100)
    assert len(replica.sent) == 10


def test_a_busy_session_leaves_when_its_turn_has_ended():
    replica = Replica(num=1)
    record = replica.sessions.begin(replica.idents[0], 0)
    replica.mover.update(["a"])
    replica.run(30)
    assert not replica.sent
    replica.sessions.release(record)
    replica.run(0.3)
    assert len(replica.sent) == 1 and len(replica.sessions) == 0


def test_busy_sessions_do_not_keep_idle_ones():
    replica = Replica(num=MOST_AT_ONCE + 1)
    for ident in replica.idents[1:]:
        replica.run(0.1)
        replica.sessions.release(replica.sessions.begin(ident, 0))
        replica.sessions.begin(ident, 0)  # all of them were used later than the idle one
    replica.mover.update(["a"])
    replica.run(SETTLE + 0.3)
    assert [ident for _, _, ident in replica.sent] == replica.idents[:1]


def test_a_list_that_changes_while_a_session_is_packed_keeps_it():
    replica = Replica(num=1)
    pack = replica.sessions.pack

    async def slow(ident):
        packed = await pack(ident)
        await replica.world.sleep(1)
        return packed

    replica.sessions.pack = slow
    replica.mover.update(["a"])
    replica.run(SETTLE + 0.3)
    replica.mover.update(["own", "a"])
    replica.run(3)
    assert not replica.sent and replica.sessions.find(replica.idents[0])


def test_an_engine_that_ends_while_a_session_leaves_ends_nothing_else():
    replica = Replica(num=1)

    async def leave(record):
        raise EngineGone("it has ended")

    replica.sessions.leave = leave
    replica.mover.update(["a"])
    replica.run(1)
    assert replica.sent and not replica.mover._num_moving


@pytest.mark.parametrize("fate", ["refused", "gone"])
def test_a_refused_session_goes_on_here_and_is_sent_again(fate):
    """Law: it answers between two tries, which are seconds apart."""
    replica = Replica(num=1)
    replica.fates = [fate, fate]
    replica.mover.update(["a"])
    replica.run(1)
    assert len(replica.sent) == 1 and replica.sessions.find(replica.idents[0])
    replica.run(6)
    times = [at for at, _, _ in replica.sent]
    assert len(times) == 3 and times[1] - times[0] > 2 and len(replica.sessions) == 0


def test_without_an_answer_the_same_replica_is_asked_until_it_says_so():
    """Law: the session answers nothing meanwhile; whom it may be with is the only one asked."""
    replica = Replica(num=1)
    replica.fates = ["unknown"] * 5
    replica.mover.update(["a", "b"])
    replica.run(1)
    with pytest.raises(ApiError, match="moves to another replica"):
        replica.sessions.find(replica.idents[0])
    replica.run(2)
    assert len({tag for _, tag, _ in replica.sent}) == 1 and len(replica.sent) == 6
    assert len(replica.sessions) == 0


def test_without_an_answer_of_one_that_has_left_the_copy_is_dropped():
    """Law: it may have passed the session on, so nobody answers for it here any more."""
    replica = Replica(num=1)
    replica.fates = ["unknown"] * 99
    replica.mover.update(["a"])
    replica.run(1)
    replica.mover.update(["b"])
    replica.run(2)
    assert len(replica.sessions) == 1
    replica.run(2)
    assert len(replica.sessions) == 0 and {tag for _, tag, _ in replica.sent} == {"a"}


def test_a_list_that_leaves_one_out_for_a_moment_loses_no_session():
    """Law: who was asked and comes back to the list is asked again, and its no counts."""
    replica = Replica(num=1)
    replica.fates = ["unknown", "unknown", "refused"]
    replica.mover.update(["a"])
    replica.run(SETTLE + 0.1)
    replica.mover.update(["b"])
    replica.run(2)
    assert len(replica.sent) <= 2
    replica.mover.update(["a", "b"])
    replica.run(0.5)
    assert replica.sent[-1][1] == "a" and len(replica.sessions) == 1
    replica.fates = ["taken"]
    replica.run(5)
    assert len(replica.sessions) == 0


def test_a_slow_answer_is_no_time_off_the_list():
    """Law: the 3 s begin when the replica was last asked."""
    replica = Replica(num=1)
    replica.fates, replica.seconds = ["unknown", "unknown", "refused"], 4
    replica.mover.update(["a"])
    replica.run(SETTLE + 8)  # the second answer is on its way
    replica.mover.update(["b"])
    replica.run(2)
    replica.mover.update(["a"])
    replica.run(5)
    assert len(replica.sent) == 3 and len(replica.sessions) == 1


def test_a_new_replica_keeps_its_sessions_until_its_own_list_has_it():
    """Law: routers may hear of a replica before it hears of itself."""
    replica = Replica(num=1, is_listed=False)
    replica.mover.update(["a", "b"])
    replica.run(5)
    assert not replica.sent
    replica.mover.update(["a", "own"])
    replica.mover.update(["a"])
    replica.run(5)
    assert len(replica.sent) == 1


def test_closing_waits_for_what_comes_in():
    """Law: a session whose taking in has begun moves on, before the replica ends."""
    giver, replica = Replica("giver", num=1), Replica()
    replica.mover.update(["own", "giver", "a"])
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    call, engine = replica.sessions._client.call, replica.sessions._client

    async def slow(*args, **options):
        if args[0] == "open":
            await replica.world.sleep(1)
        return await call(*args, **options)

    engine.call = slow
    taken, closed = (
        replica.start(replica.mover.take_in(parcel)),
        replica.start(replica.mover.close()),
    )
    replica.run(0.9)
    assert not taken and not closed
    replica.run(3)
    assert taken == [None] and closed == [0] and len(replica.sent) == 1


def test_nothing_is_kept_of_sessions_that_have_left():
    """Law: also while others stay for ever, because they are refused."""
    replica = Replica(num=9)
    refused = replica.idents[0]
    replica.is_refused = lambda ident: ident == refused
    replica.mover.update(["a"])
    replica.run(20)
    assert len(replica.sessions) == 1
    assert set(replica.mover._announced) == {refused} and set(replica.mover._later) <= {refused}


def test_a_fault_of_the_engine_is_not_tried_all_the_time():
    replica = Replica(num=1)
    tries = []

    async def pack(ident):
        tries.append(replica.world.now)
        raise EngineFault("no memory")

    replica.sessions.pack = pack
    replica.mover.update(["own"])
    replica.mover.update(["a"])
    replica.run(5)
    assert len(tries) == 3


def test_closing_ends_in_time_and_says_what_is_left():
    """Law: at once without sessions or others; else when all have left, or the time is over."""
    assert Replica().do(Replica().mover.close()) == 0
    alone = Replica(num=2)
    alone.mover.update(["own"])
    assert alone.do(alone.mover.close()) == 2
    replica = Replica(num=5)
    replica.mover.update(["own", "a"])
    replica.run(9)
    results = replica.start(replica.mover.close(60))
    replica.run(2)
    assert results == [0] and len(replica.sent) == 5
    stuck = Replica(num=1)
    stuck.fates = ["refused"] * 99
    stuck.mover.update(["own", "a"])
    results = stuck.start(stuck.mover.close(10))
    stuck.run(9)
    assert not results
    stuck.run(2)
    assert results == [1]


@pytest.mark.parametrize("is_listed", [True, False])
def test_one_that_closes_is_no_place_whatever_the_list_says(is_listed):
    """Law: its sessions leave and none comes, though a late list still has it, or none ever had."""
    giver, replica = Replica("giver", num=1), Replica(num=2, is_listed=is_listed)
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    replica.mover.update(["a"])
    results = replica.start(replica.mover.close())
    if is_listed:
        replica.mover.update(["own", "a"])
    else:
        replica.run(SETTLE / 2)
        assert len(replica.sent) == 2  # no router has to hear of it first
    assert replica.do(replica.mover.take_in(parcel)).status == 503
    replica.run(3)
    assert results == [0] and len(replica.sent) == 2


def test_two_replicas_whose_lists_differ_do_not_play_ball():
    """Law: a session that has come stays for 2 s at least, also if it belongs elsewhere."""
    giver, replica = Replica("giver", num=1), Replica()
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    replica.mover.update(["own", "giver"])
    replica.run(9)
    replica.do(replica.mover.take_in(parcel))
    replica.run(1.8)
    assert not replica.sent
    replica.run(0.5)
    assert len(replica.sent) == 1


def test_one_that_leaves_takes_nothing_new_in():
    giver, replica = Replica("giver", num=2), Replica()
    replica.mover.update(["own", "giver"])
    parcels = [giver.do(giver.sessions.pack(ident))[1] for ident in giver.idents]
    assert replica.do(replica.mover.take_in(parcels[0])) is None
    replica.mover.update(["giver"])
    assert replica.do(replica.mover.take_in(parcels[0])) is None  # it came before
    error = replica.do(replica.mover.take_in(parcels[1]))
    assert error.status == 503 and len(replica.sessions) == 1


def test_a_request_waits_for_a_session_that_may_come():
    """Law: not for one that was closed here, nor one that belongs elsewhere, nor for ever."""
    giver, replica = Replica("giver", num=1), Replica(num=1)
    replica.mover.update(["own"])
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    results = replica.start(replica.sessions.reach(parcel.ident))
    replica.run(1)
    assert not results
    replica.do(replica.mover.take_in(parcel))
    replica.run(0.2)
    assert results == [None] and replica.sessions.find(parcel.ident)
    for ident in (replica.idents[0], f"own.{'0' * 32}", "no form", parcel.ident):
        assert replica.start(replica.sessions.reach(ident)) == [None]
    replica.mover.update(["own", "giver"])
    assert replica.start(replica.sessions.reach("giver.x")) == [None]  # its owner is there
    with pytest.raises(ApiError, match="moves to another replica"):
        replica.sessions.find("giver.x")
    replica.mover.update(["own"])
    results = replica.start(replica.sessions.reach("giver.x"))
    replica.run(WAIT - 0.1)
    assert not results
    replica.run(0.3)
    assert results == [None]
    with pytest.raises(ApiError, match="another server's memory"):
        replica.sessions.find("giver.x")


def test_a_session_that_was_closed_here_moves_nowhere():
    replica = Replica(num=1)
    replica.do(replica.sessions.close(replica.idents[0]))
    replica.mover.update(["a"])
    with pytest.raises(ApiError, match="it was closed"):
        replica.sessions.find(replica.idents[0])


def test_an_id_of_another_form_is_nowhere():
    replica = Replica()
    replica.mover.update(["own", "a", "b"])
    for i in range(9):  # on the ring each would have a place
        with pytest.raises(ApiError, match="another server's memory"):
            replica.sessions.find(f"no form {i}")


def test_sessions_that_will_move_are_announced_to_their_places():
    """Law: at once, once for each place, and again only to who has not heard it."""
    replica = Replica(num=6)
    replica.mover.update(["own", "a", "b"])
    replica.run(1)
    assert not replica.told
    replica.fates = ["refused"] * 99
    replica.is_deaf = True
    replica.mover.update(["a", "b"])
    replica.run(0.05)
    replica.is_deaf = False
    replica.run(3)
    for tag in ("a", "b"):
        idents = {ident for _, to, ident in replica.sent if to == tag}
        announcements = [(at, parcels) for at, to, parcels in replica.told if to == tag]
        assert idents and all(set(parcels) == idents for _, parcels in announcements)
        assert (
            len(announcements) == 2
            and announcements[1][0] - announcements[0][0] < 0.3
            and announcements[1][0] < 1.5
        )
        assert set(announcements[0][1].values()) == {1}
    del replica.told[:]
    replica.mover.update(["a"])
    replica.run(0.2)
    ((_, tag, parcels),) = replica.told
    assert tag == "a" and len(parcels) == len({i for _, to, i in replica.sent if to == "b"})


def test_a_session_that_was_announced_moves_until_it_comes():
    """Law: clients are told to ask again, for a minute at most; then it is lost."""
    giver, replica = Replica("giver", num=2), Replica()
    replica.mover.update(["own"])
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    replica.mover.expect(dict.fromkeys(giver.idents, 1))
    replica.run(LONGEST_MOVES / 2)
    for ident in giver.idents:
        with pytest.raises(ApiError, match="moves to another replica"):
            replica.sessions.find(ident)
    replica.do(replica.mover.take_in(parcel))
    replica.do(replica.sessions.close(parcel.ident))
    replica.mover.expect({parcel.ident: 1})  # that comes late
    with pytest.raises(ApiError, match="another server's memory"):
        replica.sessions.find(parcel.ident)
    replica.mover.expect({parcel.ident: 2})
    with pytest.raises(ApiError, match="moves to another replica"):
        replica.sessions.find(parcel.ident)
    replica.run(LONGEST_MOVES / 2 + 1)
    with pytest.raises(ApiError, match="another server's memory"):
        replica.sessions.find(giver.idents[1])
    replica.run(LONGEST_MOVES)
    replica.mover.expect({})
    assert not replica.mover._expected


def test_a_session_that_was_announced_moves_for_its_own_key_alone():
    """Law: a request of another key is answered, and waits, as for an id that never existed."""
    giver, replica = Replica("g" * 40), Replica()
    replica.mover.update(["own"])
    record = giver.do(giver.sessions.open(None, "a" * 64))
    _, parcel = giver.do(giver.sessions.pack(record.ident))
    replica.mover.expect({record.ident: 1})
    other, never = (ident_of(name, "b") for name in (record.public_id, f"{'g' * 40}.x"))
    with pytest.raises(ApiError, match="moves to another replica"):
        replica.sessions.find(record.ident)
    results = [
        replica.start(replica.sessions.reach(ident)) for ident in (record.ident, other, never)
    ]
    replica.run(0.2)
    assert results == [[], [], []]
    replica.do(replica.mover.take_in(parcel))
    replica.run(0.2)
    assert results == [[None], [], []] and replica.sessions.find(record.ident)
    replica.run(WAIT)
    assert results == [[None]] * 3
    for ident in (other, never):
        with pytest.raises(ApiError, match="another server's memory"):
            replica.sessions.find(ident)


def test_a_session_of_a_key_moves_to_where_routers_look_for_it():
    """Law: routers know its id alone."""
    replica = Replica()
    idents = [replica.do(replica.sessions.open(None, "a" * 64)) for _ in range(6)]
    replica.mover.update(["a", "b"])
    replica.run(2)
    routing = Routing()
    routing.update(["a", "b"])
    places = {
        session_record.ident: routing.place_of(session_record.public_id)
        for session_record in idents
    }
    assert {ident: tag for _, tag, ident in replica.sent} == places and set(places.values()) == {
        "a",
        "b",
    }


def test_a_flood_of_wrong_ids_takes_no_session_from_anybody():
    """Law: whose request cannot wait is not told that its session is lost, but to ask again."""
    giver, replica = Replica("giver", num=1), Replica(num=1)
    replica.mover.update(["own"])
    results = [replica.start(replica.sessions.reach(f"gone.{i}/other")) for i in range(300)]
    refused = [result[0] for result in results if result]
    assert len(refused) == 300 - 256
    assert replica.start(replica.sessions.reach(replica.idents[0])) == [None]  # one that is here
    assert replica.start(replica.sessions.reach("no form")) == [None]
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    refused += replica.start(replica.sessions.reach(parcel.ident))
    for error in refused:
        assert error.status == 503 and error.body["error"]["code"] == "session_moving"
    replica.do(replica.mover.take_in(parcel))
    assert replica.start(replica.sessions.reach(parcel.ident)) == [None]
    assert replica.sessions.find(parcel.ident)
    replica.run(WAIT + 1)
    assert sum(result == [None] for result in results) == 256
