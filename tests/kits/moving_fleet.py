"""Replicas whose sessions move, in an event loop of simulated time, with an oracle of their texts.

Unlike `python -m lab fleet`, an engine answers a call later, a parcel may come late, twice, out
of order or long after its sender has given up, and a client may leave in the middle of any call.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections import defaultdict
from types import SimpleNamespace

from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError, SpecpoolError
from specpool.serve.answers import whole
from specpool.serve.api.errors import ApiError
from specpool.serve.bridge.client import EngineFault
from specpool.serve.config import ServeConfig
from specpool.serve.replicas.mover import Mover, Time
from specpool.serve.replicas.routing import Routing, owner_of
from specpool.serve.sessions import Sessions, public_id_of

#: Seconds that a sender waits for an answer.
PATIENCE = 3.0


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to what comes next."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


class Engine:
    """What `Sessions` calls: it works through messages in order, also if nobody waits any more."""

    def __init__(self, rng: random.Random, fault_share: float) -> None:
        self.ready = SimpleNamespace(max_context_len=10**6, max_batch=8, model_key="")
        self.texts: dict[int, list[int]] = {}
        self._rng, self._fault_share, self._next = rng, fault_share, 1
        self._calls: asyncio.Queue = asyncio.Queue()
        self.seconds = [0, 0.01, 0.1, 0.5]  # that a call may take
        self.task = asyncio.ensure_future(self._work())

    async def call(self, verb, *args, timeout=None):
        answer = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((verb, args, answer))
        return await answer

    async def _work(self) -> None:
        while True:
            verb, args, answer = await self._calls.get()
            await asyncio.sleep(self._rng.choice(self.seconds))
            try:
                if verb in ("open", "export") and self._rng.random() < self._fault_share:
                    raise EngineFault("no memory")
                outcome = getattr(self, f"_{verb}")(*args)
            except (SpecpoolError, KeyError) as error:
                if isinstance(error, KeyError):
                    error = ConfigError(f"there is no session {error}")
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(outcome)

    def _open(self, max_tokens, tokens=(), image=None) -> int:
        number, self._next = self._next, self._next + 1
        self.texts[number] = list(tokens if image is None else image)
        return number

    def _export(self, number):
        return tuple(self.texts[number]) if self._rng.random() < 0.7 else None

    def _fork(self, number) -> int:
        return self._open(None, self.texts[number])

    def _rewind(self, number, offset) -> int:
        del self.texts[number][offset:]
        return offset

    def _close(self, number) -> None:
        del self.texts[number]

    def _turn(self, number, history_len, new) -> list[int]:
        if len(self.texts[number]) != history_len:
            raise ConfigError(f"{history_len} tokens, not {len(self.texts[number])}")
        before = list(self.texts[number])
        self.texts[number] += new
        return before


class Replica:
    """A front without HTTP. It is its mover's way to the others."""

    def __init__(self, fleet: Fleet, tag: str) -> None:
        self.fleet, self.tag = fleet, tag
        self.engine = Engine(fleet.rng, fleet.fault_share)
        loop = asyncio.get_running_loop()
        config = ServeConfig(max_open_sessions=fleet.max_sessions, session_timeout=1e5)
        names = random.Random(tag)
        secret = lambda num: names.randbytes(num).hex()  # noqa: E731
        self.sessions = Sessions(self.engine, config, tag, loop.time, secret)
        self.tasks: set[asyncio.Task] = set()
        self.mover = Mover(self.sessions, tag, self, Time(loop.time, asyncio.sleep, self.spawn))
        self.is_up, self.is_leaving = True, False

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, SpecpoolError):
                self.fleet.failures.append(error)

    async def send(self, tag, parcel):
        rng, fleet = self.fleet.rng, self.fleet
        other = fleet.replicas[tag]
        fleet.sent_to[parcel.ident].add(tag)
        answer = asyncio.get_running_loop().create_future()

        async def deliver(delay, answers):
            await asyncio.sleep(delay)
            fate = await other.receive(copy.deepcopy(parcel))
            if answers and not answer.done():
                answer.set_result(fate)

        def delay():
            return (
                rng.choice([0.01, 0.05, 1.0])
                if rng.random() > fleet.late_share
                else rng.uniform(2, 40)
            )

        if rng.random() >= fleet.loss:
            fleet.spawn(deliver(delay(), rng.random() >= fleet.loss))
        if rng.random() < fleet.late_share:
            fleet.spawn(deliver(delay(), False))  # it comes twice
        try:
            return await asyncio.wait_for(answer, PATIENCE)
        except asyncio.TimeoutError:
            return "unknown"

    async def announce(self, tag, parcels):
        rng, fleet, other = self.fleet.rng, self.fleet, self.fleet.replicas[tag]

        async def deliver():
            await asyncio.sleep(rng.uniform(0, 40 if rng.random() < fleet.late_share else 1))
            if other.is_up:
                other.mover.expect(parcels)

        if rng.random() >= fleet.loss:
            delivery = fleet.spawn(deliver())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(delivery), PATIENCE)
                return rng.random() >= fleet.loss
        return False

    async def receive(self, parcel):
        if not self.is_up:
            return "gone"
        try:
            await asyncio.shield(self.spawn(self.mover.take_in(parcel)))
        except SpecpoolError:
            return "refused"
        except asyncio.CancelledError:  # the replica ends
            return "unknown"
        self.fleet.holders[parcel.ident].add(self.tag)
        return "taken"

    async def close_unheard(self, record) -> None:
        with contextlib.suppress(SpecpoolError):
            await whole(self.sessions.close(record.ident))
            self.fleet.closed.add(record.ident)

    def die(self) -> None:
        self.is_up = False
        for task in [*self.tasks, self.engine.task]:
            task.cancel()


class Fleet:
    """Replicas, one router, and what their clients know.

    Attributes:
        faults: of what has gone wrong, a line each.
        moves: sessions that came somewhere.
    """

    def __init__(self, seed: int, **options) -> None:
        self.rng = random.Random(seed)
        self.loss = options.get("loss", 0.0)
        self.late_share = options.get("late_share", 0.1)
        self.fault_share = options.get("fault_share", 0.05)
        self.max_sessions = options.get("max_sessions", 64)
        self.leave_share = options.get("leave_share", 0.1)
        self.kills, self.flaps = options.get("kills", False), options.get("flaps", True)
        self.replicas: dict[str, Replica] = {}
        self.listed: set[str] = set()
        self.routing = Routing(seed)
        self.holders: defaultdict[str, set[str]] = defaultdict(set)
        self.sent_to: defaultdict[str, set[str]] = defaultdict(set)
        self.killed: set[str] = set()
        self.closed: set[str] = set()
        self.told: set[str] = set()  # sessions that a client has heard of
        self.open: dict[str, Client] = {}
        self.num_turns = self.num_lost = self.num_left = 0
        self.tasks: set[asyncio.Task] = set()
        self.failures: list[BaseException] = []

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        self.tasks.add(task)

        def ended(task):
            self.tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self.failures.append(task.exception())

        task.add_done_callback(ended)
        return task

    # --- replicas ---

    def publish(self) -> None:
        async def tell(act):
            await asyncio.sleep(self.rng.choice([0, 0.1, 0.4]))
            act(sorted(self.listed))

        self.spawn(tell(self.routing.update))
        for replica in self.replicas.values():
            if replica.is_up:
                self.spawn(tell(replica.mover.update))

    def start(self) -> None:
        tag = f"r{len(self.replicas)}"
        self.replicas[tag] = Replica(self, tag)
        self.replicas[tag].mover.update(self.listed)
        self.listed.add(tag)
        self.publish()

    async def drain(self, tag: str) -> None:
        replica = self.replicas[tag]
        replica.is_leaving = True
        self.listed.discard(tag)
        self.publish()
        await asyncio.sleep(1)
        if await replica.mover.close():
            self.killed.add(tag)  # it could not give them away
        self.is_up = False
        for record in replica.sessions:
            self.holders[record.ident].add(tag)
        replica.die()

    async def storm(self, num: int) -> None:
        for _ in range(num):
            await asyncio.sleep(self.rng.choice([0.2, 1, 5, 20]))
            what = self.rng.choice(["start", "drain", "flap", "kill"])
            here = sorted(self.listed)
            if what == "start" and len(here) < 5:
                self.start()
            elif what == "drain" and len(here) > 1:
                self.spawn(self.drain(self.rng.choice(here)))
            elif what == "flap" and len(here) > 1 and self.flaps:
                tag = self.rng.choice(here)
                self.listed.discard(tag)
                self.publish()
                await asyncio.sleep(self.rng.choice([0.1, 0.6, 2]))
                if self.replicas[tag].is_up and not self.replicas[tag].is_leaving:
                    self.listed.add(tag)
                    self.publish()
            elif what == "kill" and len(here) > 1 and self.kills:
                tag = self.rng.choice(here)
                self.killed.add(tag)
                self.replicas[tag].die()
                await asyncio.sleep(self.rng.choice([0.1, 1]))
                self.listed.discard(tag)
                self.publish()

    # --- laws ---

    def answering(self, ident: str) -> list[str]:
        return [
            replica.tag
            for replica in self.replicas.values()
            if replica.is_up
            for record in replica.sessions
            if record.ident == ident and not record.is_leaving
        ]

    def check_alone(self, ident: str) -> None:
        holders = self.answering(ident)
        assert len(holders) == 1, f"{ident} is at {holders}"

    def check_loss(self, ident: str) -> None:
        """Check that a session is lost with a replica, or that somebody still has it."""
        self.num_lost += 1
        who = self.holders[ident] | self.sent_to[ident] | {owner_of(ident)}
        ended = {t for t in who if not self.replicas[t].is_up or self.replicas[t].is_leaving}
        unsure = (self.loss or self.late_share) and ended & self.sent_to[ident]
        somewhere = any(
            record.ident == ident
            for replica in self.replicas.values()
            if replica.is_up
            for record in replica.sessions
        )
        assert somewhere or unsure or ended & self.killed, f"{ident} is lost"

    def check_end(self) -> None:
        if self.failures:
            raise self.failures[0]
        for replica in self.replicas.values():
            if not replica.is_up:
                continue
            numbers = sorted(record.conversation.number for record in replica.sessions)
            assert sorted(replica.engine.texts) == numbers, (
                f"{replica.tag} has sessions without a name"
            )
            sessions, mover = replica.sessions, replica.mover
            for record in sessions:
                is_misplaced = replica.mover.is_elsewhere(record.ident)
                assert is_misplaced or not (record.is_busy or record.is_leaving), record.ident
                text = replica.engine.texts[record.conversation.number]
                assert text == record.conversation.tokens, f"{record.ident} has two texts"
                assert record.ident not in self.closed, f"{record.ident} was closed"
                assert record.ident in self.told, f"nobody has heard of {record.ident}"
            left = {
                "opening": sessions._opening.total(),
                "settling": len(sessions._settling),
                "waiting": mover._num_waiting,
            }
            if not mover._misplaced():  # else they are sent again and again
                left |= {
                    "moving": mover._num_moving,
                    "later": len(mover._later),
                    "announced": len(mover._announced),
                    "tasks": len(replica.tasks),
                }
            assert not any(left.values()), f"{replica.tag} has {left}"
        for ident, client in self.open.items():
            if client.is_closing:  # it has left before it heard the answer
                continue
            if len(holders := self.answering(ident)) != 1:
                assert not holders, f"{ident} is at {holders}"
                self.check_loss(ident)


class Client:
    """A client with a session at a time, and the text that it must have."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.ident, self.text = fleet, "", []
        self._next = 1000 * number
        self._key_id = ("", "a" * 64, "b" * 64)[number % 3]

    def replica(self) -> Replica | None:
        """The replica to which the router sends the next request."""
        routing = self.fleet.routing
        name = public_id_of(self.ident)  # a router knows no keys
        tag = routing.place_of(name) if name else (routing.spread() or [None])[0]
        return (
            None if tag is None or not self.fleet.replicas[tag].is_up else self.fleet.replicas[tag]
        )

    async def live(self, num: int) -> None:
        fleet = self.fleet
        for _ in range(num):
            await asyncio.sleep(fleet.rng.choice([0, 0.1, 1, 4]))
            replica = self.replica()
            if replica is None:
                continue
            act = self._next_act()
            call = replica.spawn(act(replica))
            leaves = fleet.rng.random() < fleet.leave_share
            done, _ = await asyncio.wait(
                {call}, timeout=fleet.rng.choice([0, 0.01, 0.3]) if leaves else None
            )
            if not done:
                fleet.num_left += 1
                call.cancel()
                await asyncio.wait({call})
            if call.cancelled() or call.exception() is None:
                continue
            error = call.exception()
            if not isinstance(error, ApiError | SpecpoolError):
                raise error
            self._hear(error)

    def _next_act(self):
        if not self.ident:
            return self._open
        if self.is_closing:
            return self._close
        if self.is_ahead:
            return self._rewind
        acts = [self._turn, self._rewind, self._fork, self._close]
        return self.fleet.rng.choices(acts, [12, 2, 1, 1])[0]

    def _hear(self, error) -> None:
        code = error.body["error"]["code"] if isinstance(error, ApiError) else ""
        if isinstance(error, ConfigError):
            raise error
        if code == "session_offset_mismatch":
            there = error.body["error"]["session"]["offset"]
            assert there >= len(self.text), f"{self.ident} has {there} of {len(self.text)} tokens"
            self.is_ahead = True
        elif code in ("session_lost", "session_not_found"):
            if not self.is_closing:
                self.fleet.check_loss(self.ident)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.fleet.open.pop(self.ident, None)
        self.ident, self.text = "", []
        self.is_ahead = self.is_closing = False

    is_ahead = is_closing = False

    async def _open(self, replica: Replica) -> None:
        opening = replica.sessions.open(None, self._key_id)
        record = await whole(opening, replica.close_unheard)
        self.ident = record.ident
        self.fleet.open[self.ident] = self
        self.fleet.told.add(self.ident)
        self.fleet.holders[self.ident].add(replica.tag)

    async def _turn(self, replica: Replica) -> None:
        sessions, engine = replica.sessions, replica.engine
        await sessions.reach(self.ident)
        record = sessions.begin(self.ident, len(self.text))
        self.fleet.check_alone(self.ident)
        new = [self._next, self._next + 1]
        self._next += 2
        history_len = len(record.conversation.tokens)
        turn = SimpleNamespace(tokens=[*record.conversation.tokens, new[0]], said=[], messages=None)
        done = SimpleNamespace(finish_reason="length", token_ids=new[1:], stop_hit=None)
        number, params = record.conversation.number, SamplingParams()
        work = asyncio.ensure_future(engine.call("turn", number, history_len, new))
        try:
            before = await asyncio.shield(work)
            assert before == self.text, f"{self.ident} goes on with another text"
            sessions.end(record, turn, done, params, frozenset())
            self.text = [*self.text, *new]
            self.fleet.num_turns += 1
        except asyncio.CancelledError:  # the client has left; the turn ends all the same

            async def finish():
                with contextlib.suppress(SpecpoolError, KeyError):
                    await work
                    sessions.end(record, turn, done, params, frozenset())
                sessions.release(record)

            replica.spawn(finish())
            raise
        except SpecpoolError:
            sessions.release(record)
            raise

    async def _rewind(self, replica: Replica) -> None:
        await replica.sessions.reach(self.ident)
        if not self.is_ahead:
            self.text = self.text[: 2 * self.fleet.rng.randint(0, len(self.text) // 2)]
            self.is_ahead = True  # until it has worked
        await whole(replica.sessions.rewind(self.ident, len(self.text)))
        self.is_ahead = False

    async def _fork(self, replica: Replica) -> None:
        await replica.sessions.reach(self.ident)
        copy = await whole(replica.sessions.fork(self.ident), replica.close_unheard)
        self.fleet.holders[copy.ident].add(replica.tag)
        self.fleet.told.add(copy.ident)
        await replica.close_unheard(copy)

    async def _close(self, replica: Replica) -> None:
        await replica.sessions.reach(self.ident)
        self.is_closing = True
        await whole(replica.sessions.close(self.ident))
        self.fleet.closed.add(self.ident)
        self._begin_anew()


def run_fleet(seed: int, *, num_clients: int = 8, num_calls: int = 60, **options) -> Fleet:
    """Run a fleet to its end, let everything come to rest, and check the laws."""

    async def main() -> Fleet:
        fleet = Fleet(seed, **options)
        for _ in range(3):
            fleet.start()
        await asyncio.sleep(1)
        clients = [fleet.spawn(Client(fleet, i).live(num_calls)) for i in range(num_clients)]
        storm = fleet.spawn(fleet.storm(20))
        await asyncio.wait({*clients, storm})
        await asyncio.sleep(300)
        fleet.check_end()
        for replica in fleet.replicas.values():
            replica.die()
        for task in list(fleet.tasks):
            task.cancel()
        return fleet

    loop = SimulatedTime()
    try:
        return loop.run_until_complete(main())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
