"""`SimReplica`: a replica's front: the real `Sessions` on a simulated engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from lab.fleet.engine import BATCH, SimEngine, Work
from lab.fleet.settings import FleetSettings
from lab.fleet.world import Call, Cut, Later, Node, World
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.texts import NextTurn, Texts
from specpool.errors import ConfigError
from specpool.serve.api.errors import ApiError
from specpool.serve.bridge.messages import Done
from specpool.serve.bridge.parcel import SessionParcel
from specpool.serve.config import ServeConfig
from specpool.serve.replicas.mover import Fate, Mover, Time
from specpool.serve.sessions import SessionRecord, Sessions

_MAX_SESSIONS = 64
_EXPIRY = 5.0
Request = dict[str, Any]
Answer = tuple[int, dict[str, Any]]


class SimReplica(Node):
    """One replica. Its requests are dicts with a `kind`, its answers (status, body).

    Attributes:
        tag: begins the ids of its sessions.
        sessions: the real thing.
        engine: the simulated one.
        mover: the real thing.
        is_leaving: it is no longer on the controller's list.
        version: of the list of replicas that it has; 0 if none yet.
        replicas: the replicas of that list.
        on_holds: called with each session that is opened or comes here.
        on_sent: called with each session that is sent, and the tag of the other replica.
        on_turn: called with the record of each turn that begins here.
    """

    def __init__(self, world: World, tag: str, settings: FleetSettings) -> None:
        super().__init__(world, f"replica {tag}")
        rng = world.random
        self.tag, self.is_leaving = tag, False
        self._offset = rng.uniform(0, 1e6)
        self._rate = 1 + settings.skew * rng.uniform(-1, 1)
        self.engine = SimEngine(rng, _MAX_SESSIONS)
        config = ServeConfig(
            max_open_sessions=_MAX_SESSIONS,
            session_timeout=settings.session_timeout,
            max_queue=settings.max_queue,
        )
        engine: Any = self.engine
        names = random.Random(rng.getrandbits(32))
        self.sessions = Sessions(
            engine, config, tag, self.clock, lambda num: names.randbytes(num).hex()
        )
        self.version = 0
        self.replicas: Mapping[str, SimReplica] = {}
        self.on_holds: Callable[[str], None] = lambda ident: None
        self.on_sent: Callable[[str, str], None] = lambda ident, tag: None
        self.on_turn: Callable[[SessionRecord], None] = lambda record: None
        time = Time(self.clock, world.sleep, lambda work: world.run(self, work))
        self.mover = Mover(self.sessions, tag, self, time)
        self._config, self._settings = config, settings
        self._texts = Texts(None)
        self._is_turning = False
        world.after(_EXPIRY, self._expire)

    def clock(self) -> float:
        """Return this node's seconds, which are a little too long or too short."""
        return self._offset + self._rate * self.world.now

    def take(self, version: int, replicas: Mapping[str, SimReplica]) -> None:
        """Take over a list, unless it is older than what is known."""
        if version > self.version:
            self.version, self.replicas = version, replicas
            self.mover.update(replicas)

    async def send(self, tag: str, parcel: SessionParcel) -> Fate:
        """Give a session to another replica."""
        other, later = self.replicas.get(tag), Later()
        if other is None:
            return "gone"
        await self.world.sleep(self.world.random.uniform(0, self._settings.move_seconds))
        self.on_sent(parcel.ident, tag)
        self.world.call(self, other, lambda call: other.receive(call, parcel), later.set)
        answer = await later
        if isinstance(answer, Cut):
            return "gone" if answer.is_dead else "unknown"
        fate: Fate = answer
        return fate

    async def announce(self, tag: str, parcels: Mapping[str, int]) -> bool:
        """Tell another replica which sessions will come."""
        other, later = self.replicas.get(tag), Later()
        if other is None:
            return False

        def hear(call: Call) -> None:
            other.mover.expect(parcels)
            call.reply(True)

        self.world.call(self, other, hear, later.set)
        return (await later) is True

    def receive(self, call: Call, parcel: SessionParcel) -> None:
        """Take a session in, and say so."""

        async def take_in() -> None:
            try:
                await self.mover.take_in(parcel)
                self.on_holds(parcel.ident)
                call.reply("taken")
            except (ApiError, ConfigError):
                call.reply("refused")

        self.world.run(self, take_in())

    def serve(self, call: Call, request: Request) -> None:
        """Answer a request now, or when its text has ended."""

        async def reach() -> None:
            await self.sessions.reach(request["session"])
            if not call.has_left:
                self._serve(call, request)

        if "session" in request:
            self.world.run(self, reach())
        else:
            self._serve(call, request)

    def _serve(self, call: Call, request: Request) -> None:
        try:
            answer = self._act(call, request)
        except ApiError as error:
            answer = error.status, error.body["error"]
        except ConfigError as error:
            answer = 400, {"code": "invalid_request", "message": str(error)}
        if answer is not None:
            call.reply(answer)

    def _act(self, call: Call, request: Request) -> Answer | None:
        kind, ident = request["kind"], request.get("session", "")
        if kind == "open":
            record = _run(self.sessions.open(None))
            self.on_holds(record.ident)
            return 200, record.body()
        if kind == "close":
            _run(self.sessions.close(ident))
            return 200, {}
        if kind == "rewind":
            record, _ = _run(self.sessions.rewind(ident, request["offset"]))
            return 200, record.body()
        if self.engine.num_open >= BATCH + self._config.max_queue:
            raise ApiError(429, "full", code="queue_full")
        if kind == "text":
            work = Work(
                request["prompt"], request["num_new"], lambda new: call.reply((200, {"new": new}))
            )
            self._submit(call, work, lambda: None)
            return None
        record = self.sessions.begin(ident, request["offset"])
        self.on_turn(record)
        turn = self.sessions.turn(record, self._texts, request["prompt"], {})
        self._turn(call, record, turn, request["num_new"])
        return None

    def _turn(self, call: Call, record: SessionRecord, turn: NextTurn, num_new: int) -> None:
        def done(new: list[int]) -> None:
            params = SamplingParams(max_new_tokens=num_new)
            self.sessions.end(record, turn, _done(new), params, frozenset())
            call.reply((200, {"new": new, "offset": record.offset}))

        work = Work(turn.tokens, num_new, done, record.conversation.number, turn.history_len)
        self._submit(call, work, lambda: self.sessions.release(record))

    def _submit(self, call: Call, work: Work, release: Callable[[], None]) -> None:
        def left() -> None:
            self.engine.abort(work)
            release()

        call.on_left = left
        self.engine.waiting.append(work)
        if not self._is_turning:
            self._is_turning = True
            self.world.after(self._settings.round_seconds, self._round)

    def _round(self) -> None:
        if not self.is_up:
            return
        self.engine.round()
        self._is_turning = self.engine.num_open > 0
        if self._is_turning:
            self.world.after(self._settings.round_seconds, self._round)

    def _expire(self) -> None:
        if self.is_up:
            _run(self.sessions.close_idle())
            self.world.after(_EXPIRY, self._expire)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a simulated call waited")


def _done(new: list[int]) -> Done:
    return Done(
        key=0,
        sample=0,
        finish_reason="length",
        error=None,
        stop_hit=None,
        num_prompt=0,
        token_ids=new,
        num_reused=0,
        num_drafts=0,
        num_accepted=0,
        accept_lens=[],
        queue_seconds=None,
        first_token_seconds=None,
        seconds=0.0,
    )
