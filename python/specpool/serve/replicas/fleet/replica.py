"""`SimReplica`: a replica's front: the real `Sessions` on a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from specpool.engine.texts import NextTurn, Texts
from specpool.errors import ConfigError
from specpool.sampling_params import SamplingParams
from specpool.serve.api.errors import ApiError
from specpool.serve.bridge.messages import Done
from specpool.serve.config import ServeConfig
from specpool.serve.replicas.fleet.engine import BATCH, SimEngine, Work
from specpool.serve.replicas.fleet.settings import FleetSettings
from specpool.serve.replicas.fleet.world import Call, Node, World
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
        is_leaving: it is no longer on the controller's list.
    """

    def __init__(self, world: World, tag: str, settings: FleetSettings) -> None:
        super().__init__(world, f"replica {tag}")
        rng = world.random
        self.tag, self.is_leaving = tag, False
        self._offset = rng.uniform(0, 1e6)
        self._rate = 1 + settings.skew * rng.uniform(-1, 1)
        self.engine = SimEngine(rng, _MAX_SESSIONS)
        config = ServeConfig(
            max_sessions=_MAX_SESSIONS,
            session_timeout=settings.session_timeout,
            max_queue=settings.max_queue,
        )
        engine: Any = self.engine
        self.sessions = Sessions(engine, config, tag, self.clock)
        self._config, self._settings = config, settings
        self._texts = Texts(None)
        self._is_turning = False
        world.after(_EXPIRY, self._expire)

    def clock(self) -> float:
        """Return this node's seconds, which are a little too long or too short."""
        return self._offset + self._rate * self.world.now

    def serve(self, call: Call, request: Request) -> None:
        """Answer a request now, or when its text has ended."""
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
            return 200, _run(self.sessions.open(None)).body()
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
        turn = self.sessions.turn(record, self._texts, request["prompt"], {})
        self._turn(call, record, turn, request["num_new"])
        return None

    def _turn(self, call: Call, record: SessionRecord, turn: NextTurn, num_new: int) -> None:
        def done(new: list[int]) -> None:
            params = SamplingParams(max_new_tokens=num_new)
            self.sessions.end(record, turn, _done(new), params, frozenset())
            call.reply((200, {"new": new, "offset": record.offset}))

        work = Work(turn.ids, num_new, done, record.conversation.number, turn.history_len)
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
