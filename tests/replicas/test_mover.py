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
        found = []

        async def main():
            try:
                found.append(await work)
            except ApiError as error:
                found.append(error)

        self.world.run(self, main())
        return found

    def do(self, work):
        """Run a coroutine that does not wait."""
        (found,) = self.start(work)
        return found

    def run(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.after(seconds, lambda: None)
        while self.world.now < end and self.world.step():
            pass


def test_sessions_leave_once_the_replica_is_off_the_list_and_a_few_at_once():
    """Law: none leaves before routers can know; then all do, 4 at once, the latest used first."""
    own = Replica(num=10)
    own.mover.update(["own", "a", "b"])
    own.run(5)
    assert not own.sent
    for ident in own.idents[:3]:
        own.run(0.1)
        own.sessions.release(own.sessions.find(ident))
    own.mover.update(["a", "b"])
    own.run(SETTLE - 0.1)
    assert not own.sent
    own.run(3)
    assert len(own.sessions) == 0 and own.most_going == MOST_AT_ONCE
    assert [ident for _, _, ident in own.sent[:3]] == own.idents[2::-1]
    assert {tag for _, tag, _ in own.sent} == {"a", "b"}
    own.run(100)
    assert len(own.sent) == 10


def test_a_busy_session_leaves_when_its_turn_has_ended():
    own = Replica(num=1)
    record = own.sessions.begin(own.idents[0], 0)
    own.mover.update(["a"])
    own.run(30)
    assert not own.sent
    own.sessions.release(record)
    own.run(0.3)
    assert len(own.sent) == 1 and len(own.sessions) == 0


def test_busy_sessions_do_not_keep_idle_ones():
    own = Replica(num=MOST_AT_ONCE + 1)
    for ident in own.idents[1:]:
        own.run(0.1)
        own.sessions.release(own.sessions.begin(ident, 0))
        own.sessions.begin(ident, 0)  # all of them were used later than the idle one
    own.mover.update(["a"])
    own.run(SETTLE + 0.3)
    assert [ident for _, _, ident in own.sent] == own.idents[:1]


def test_a_list_that_changes_while_a_session_is_packed_keeps_it():
    own = Replica(num=1)
    pack = own.sessions.pack

    async def slow(ident):
        found = await pack(ident)
        await own.world.sleep(1)
        return found

    own.sessions.pack = slow
    own.mover.update(["a"])
    own.run(SETTLE + 0.3)
    own.mover.update(["own", "a"])
    own.run(3)
    assert not own.sent and own.sessions.find(own.idents[0])


def test_an_engine_that_ends_while_a_session_leaves_ends_nothing_else():
    own = Replica(num=1)

    async def leave(record):
        raise EngineGone("it has ended")

    own.sessions.leave = leave
    own.mover.update(["a"])
    own.run(1)
    assert own.sent and not own.mover._num_moving


@pytest.mark.parametrize("fate", ["refused", "gone"])
def test_a_refused_session_goes_on_here_and_is_sent_again(fate):
    """Law: it answers between two tries, which are seconds apart."""
    own = Replica(num=1)
    own.fates = [fate, fate]
    own.mover.update(["a"])
    own.run(1)
    assert len(own.sent) == 1 and own.sessions.find(own.idents[0])
    own.run(6)
    times = [at for at, _, _ in own.sent]
    assert len(times) == 3 and times[1] - times[0] > 2 and len(own.sessions) == 0


def test_without_an_answer_the_same_replica_is_asked_until_it_says_so():
    """Law: the session answers nothing meanwhile; whom it may be with is the only one asked."""
    own = Replica(num=1)
    own.fates = ["unknown"] * 5
    own.mover.update(["a", "b"])
    own.run(1)
    with pytest.raises(ApiError, match="moves to another replica"):
        own.sessions.find(own.idents[0])
    own.run(2)
    assert len({tag for _, tag, _ in own.sent}) == 1 and len(own.sent) == 6
    assert len(own.sessions) == 0


def test_without_an_answer_of_one_that_has_left_the_copy_is_dropped():
    """Law: it may have passed the session on, so nobody answers for it here any more."""
    own = Replica(num=1)
    own.fates = ["unknown"] * 99
    own.mover.update(["a"])
    own.run(1)
    own.mover.update(["b"])
    own.run(2)
    assert len(own.sessions) == 1
    own.run(2)
    assert len(own.sessions) == 0 and {tag for _, tag, _ in own.sent} == {"a"}


def test_a_list_that_leaves_one_out_for_a_moment_loses_no_session():
    """Law: who was asked and comes back to the list is asked again, and its no counts."""
    own = Replica(num=1)
    own.fates = ["unknown", "unknown", "refused"]
    own.mover.update(["a"])
    own.run(SETTLE + 0.1)
    own.mover.update(["b"])
    own.run(2)
    assert len(own.sent) <= 2
    own.mover.update(["a", "b"])
    own.run(0.5)
    assert own.sent[-1][1] == "a" and len(own.sessions) == 1
    own.fates = ["taken"]
    own.run(5)
    assert len(own.sessions) == 0


def test_a_slow_answer_is_no_time_off_the_list():
    """Law: the 3 s begin when the replica was last asked."""
    own = Replica(num=1)
    own.fates, own.seconds = ["unknown", "unknown", "refused"], 4
    own.mover.update(["a"])
    own.run(SETTLE + 8)  # the second answer is on its way
    own.mover.update(["b"])
    own.run(2)
    own.mover.update(["a"])
    own.run(5)
    assert len(own.sent) == 3 and len(own.sessions) == 1


def test_a_new_replica_keeps_its_sessions_until_its_own_list_has_it():
    """Law: routers may hear of a replica before it hears of itself."""
    own = Replica(num=1, is_listed=False)
    own.mover.update(["a", "b"])
    own.run(5)
    assert not own.sent
    own.mover.update(["a", "own"])
    own.mover.update(["a"])
    own.run(5)
    assert len(own.sent) == 1


def test_closing_waits_for_what_comes_in():
    """Law: a session whose taking in has begun moves on, before the replica ends."""
    giver, own = Replica("giver", num=1), Replica()
    own.mover.update(["own", "giver", "a"])
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    call, engine = own.sessions._client.call, own.sessions._client

    async def slow(*args, **options):
        if args[0] == "open":
            await own.world.sleep(1)
        return await call(*args, **options)

    engine.call = slow
    taken, closed = own.start(own.mover.take_in(parcel)), own.start(own.mover.close())
    own.run(0.9)
    assert not taken and not closed
    own.run(3)
    assert taken == [None] and closed == [0] and len(own.sent) == 1


def test_nothing_is_kept_of_sessions_that_have_left():
    """Law: also while others stay for ever, because they are refused."""
    own = Replica(num=9)
    refused = own.idents[0]
    own.is_refused = lambda ident: ident == refused
    own.mover.update(["a"])
    own.run(20)
    assert len(own.sessions) == 1
    assert set(own.mover._announced) == {refused} and set(own.mover._later) <= {refused}


def test_a_fault_of_the_engine_is_not_tried_all_the_time():
    own = Replica(num=1)
    tries = []

    async def pack(ident):
        tries.append(own.world.now)
        raise EngineFault("no memory")

    own.sessions.pack = pack
    own.mover.update(["own"])
    own.mover.update(["a"])
    own.run(5)
    assert len(tries) == 3


def test_closing_ends_in_time_and_says_what_is_left():
    """Law: at once without sessions or others; else when all have left, or the time is over."""
    assert Replica().do(Replica().mover.close()) == 0
    alone = Replica(num=2)
    alone.mover.update(["own"])
    assert alone.do(alone.mover.close()) == 2
    own = Replica(num=5)
    own.mover.update(["own", "a"])
    own.run(9)
    found = own.start(own.mover.close(60))
    own.run(2)
    assert found == [0] and len(own.sent) == 5
    stuck = Replica(num=1)
    stuck.fates = ["refused"] * 99
    stuck.mover.update(["own", "a"])
    found = stuck.start(stuck.mover.close(10))
    stuck.run(9)
    assert not found
    stuck.run(2)
    assert found == [1]


@pytest.mark.parametrize("is_listed", [True, False])
def test_one_that_closes_is_no_place_whatever_the_list_says(is_listed):
    """Law: its sessions leave and none comes, though a late list still has it, or none ever had."""
    giver, own = Replica("giver", num=1), Replica(num=2, is_listed=is_listed)
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    own.mover.update(["a"])
    found = own.start(own.mover.close())
    if is_listed:
        own.mover.update(["own", "a"])
    else:
        own.run(SETTLE / 2)
        assert len(own.sent) == 2  # no router has to hear of it first
    assert own.do(own.mover.take_in(parcel)).status == 503
    own.run(3)
    assert found == [0] and len(own.sent) == 2


def test_two_replicas_whose_lists_differ_do_not_play_ball():
    """Law: a session that has come stays for 2 s at least, also if it belongs elsewhere."""
    giver, own = Replica("giver", num=1), Replica()
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    own.mover.update(["own", "giver"])
    own.run(9)
    own.do(own.mover.take_in(parcel))
    own.run(1.8)
    assert not own.sent
    own.run(0.5)
    assert len(own.sent) == 1


def test_one_that_leaves_takes_nothing_new_in():
    giver, own = Replica("giver", num=2), Replica()
    own.mover.update(["own", "giver"])
    parcels = [giver.do(giver.sessions.pack(ident))[1] for ident in giver.idents]
    assert own.do(own.mover.take_in(parcels[0])) is None
    own.mover.update(["giver"])
    assert own.do(own.mover.take_in(parcels[0])) is None  # it came before
    error = own.do(own.mover.take_in(parcels[1]))
    assert error.status == 503 and len(own.sessions) == 1


def test_a_request_waits_for_a_session_that_may_come():
    """Law: not for one that was closed here, nor one that belongs elsewhere, nor for ever."""
    giver, own = Replica("giver", num=1), Replica(num=1)
    own.mover.update(["own"])
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    found = own.start(own.sessions.reach(parcel.ident))
    own.run(1)
    assert not found
    own.do(own.mover.take_in(parcel))
    own.run(0.2)
    assert found == [None] and own.sessions.find(parcel.ident)
    for ident in (own.idents[0], f"own.{'0' * 32}", "no form", parcel.ident):
        assert own.start(own.sessions.reach(ident)) == [None]
    own.mover.update(["own", "giver"])
    assert own.start(own.sessions.reach("giver.x")) == [None]  # its owner is there
    with pytest.raises(ApiError, match="moves to another replica"):
        own.sessions.find("giver.x")
    own.mover.update(["own"])
    found = own.start(own.sessions.reach("giver.x"))
    own.run(WAIT - 0.1)
    assert not found
    own.run(0.3)
    assert found == [None]
    with pytest.raises(ApiError, match="another server's memory"):
        own.sessions.find("giver.x")


def test_a_session_that_was_closed_here_moves_nowhere():
    own = Replica(num=1)
    own.do(own.sessions.close(own.idents[0]))
    own.mover.update(["a"])
    with pytest.raises(ApiError, match="it was closed"):
        own.sessions.find(own.idents[0])


def test_an_id_of_another_form_is_nowhere():
    own = Replica()
    own.mover.update(["own", "a", "b"])
    for i in range(9):  # on the ring each would have a place
        with pytest.raises(ApiError, match="another server's memory"):
            own.sessions.find(f"no form {i}")


def test_sessions_that_will_move_are_announced_to_their_places():
    """Law: at once, once for each place, and again only to who has not heard it."""
    own = Replica(num=6)
    own.mover.update(["own", "a", "b"])
    own.run(1)
    assert not own.told
    own.fates = ["refused"] * 99
    own.is_deaf = True
    own.mover.update(["a", "b"])
    own.run(0.05)
    own.is_deaf = False
    own.run(3)
    for tag in ("a", "b"):
        idents = {ident for _, to, ident in own.sent if to == tag}
        told = [(at, parcels) for at, to, parcels in own.told if to == tag]
        assert idents and all(set(parcels) == idents for _, parcels in told)
        assert len(told) == 2 and told[1][0] - told[0][0] < 0.3 and told[1][0] < 1.5
        assert set(told[0][1].values()) == {1}
    del own.told[:]
    own.mover.update(["a"])
    own.run(0.2)
    ((_, tag, parcels),) = own.told
    assert tag == "a" and len(parcels) == len({i for _, to, i in own.sent if to == "b"})


def test_a_session_that_was_announced_moves_until_it_comes():
    """Law: clients are told to ask again, for a minute at most; then it is lost."""
    giver, own = Replica("giver", num=2), Replica()
    own.mover.update(["own"])
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    own.mover.expect(dict.fromkeys(giver.idents, 1))
    own.run(LONGEST_MOVES / 2)
    for ident in giver.idents:
        with pytest.raises(ApiError, match="moves to another replica"):
            own.sessions.find(ident)
    own.do(own.mover.take_in(parcel))
    own.do(own.sessions.close(parcel.ident))
    own.mover.expect({parcel.ident: 1})  # that comes late
    with pytest.raises(ApiError, match="another server's memory"):
        own.sessions.find(parcel.ident)
    own.mover.expect({parcel.ident: 2})
    with pytest.raises(ApiError, match="moves to another replica"):
        own.sessions.find(parcel.ident)
    own.run(LONGEST_MOVES / 2 + 1)
    with pytest.raises(ApiError, match="another server's memory"):
        own.sessions.find(giver.idents[1])
    own.run(LONGEST_MOVES)
    own.mover.expect({})
    assert not own.mover._expected


def test_a_session_that_was_announced_moves_for_its_own_key_alone():
    """Law: a request of another key is answered, and waits, as for an id that never existed."""
    giver, own = Replica("g" * 40), Replica()
    own.mover.update(["own"])
    record = giver.do(giver.sessions.open(None, "a" * 64))
    _, parcel = giver.do(giver.sessions.pack(record.ident))
    own.mover.expect({record.ident: 1})
    other, never = (ident_of(name, "b") for name in (record.public_id, f"{'g' * 40}.x"))
    with pytest.raises(ApiError, match="moves to another replica"):
        own.sessions.find(record.ident)
    found = [own.start(own.sessions.reach(ident)) for ident in (record.ident, other, never)]
    own.run(0.2)
    assert found == [[], [], []]
    own.do(own.mover.take_in(parcel))
    own.run(0.2)
    assert found == [[None], [], []] and own.sessions.find(record.ident)
    own.run(WAIT)
    assert found == [[None]] * 3
    for ident in (other, never):
        with pytest.raises(ApiError, match="another server's memory"):
            own.sessions.find(ident)


def test_a_session_of_a_key_moves_to_where_routers_look_for_it():
    """Law: routers know its id alone."""
    own = Replica()
    idents = [own.do(own.sessions.open(None, "a" * 64)) for _ in range(6)]
    own.mover.update(["a", "b"])
    own.run(2)
    routing = Routing()
    routing.update(["a", "b"])
    places = {each.ident: routing.place_of(each.public_id) for each in idents}
    assert {ident: tag for _, tag, ident in own.sent} == places and set(places.values()) == {
        "a",
        "b",
    }


def test_a_flood_of_wrong_ids_takes_no_session_from_anybody():
    """Law: whose request cannot wait is not told that its session is lost, but to ask again."""
    giver, own = Replica("giver", num=1), Replica(num=1)
    own.mover.update(["own"])
    found = [own.start(own.sessions.reach(f"gone.{i}/other")) for i in range(300)]
    refused = [each[0] for each in found if each]
    assert len(refused) == 300 - 256
    assert own.start(own.sessions.reach(own.idents[0])) == [None]  # one that is here
    assert own.start(own.sessions.reach("no form")) == [None]
    _, parcel = giver.do(giver.sessions.pack(giver.idents[0]))
    refused += own.start(own.sessions.reach(parcel.ident))
    for error in refused:
        assert error.status == 503 and error.body["error"]["code"] == "session_moving"
    own.do(own.mover.take_in(parcel))
    assert own.start(own.sessions.reach(parcel.ident)) == [None]
    assert own.sessions.find(parcel.ident)
    own.run(WAIT + 1)
    assert sum(each == [None] for each in found) == 256
