"""`SessionClient` and `TextClient`: what people's programs do, and what they must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from lab.fleet.engine import MAX_CONTEXT_LEN, answer_of
from lab.fleet.replica import Request
from lab.fleet.settings import FleetSettings
from lab.fleet.world import Cut, FleetLaw, Node, World

#: Seconds that a client waits for an answer.
_PATIENCE = 20.0
#: Seconds after which a turn that has not ended is lost: faults have long ended then.
_LOST = 600.0


@dataclass(slots=True)
class FleetTally:
    """What has happened."""

    scenarios: int = 0
    turns: int = 0
    texts: int = 0
    attempts: int = 0
    cuts: int = 0
    left_early: int = 0
    seen_late: int = 0  # turns that were appended though their answer was lost
    full: int = 0
    lost_sessions: int = 0  # 410
    needless: int = 0  # of these, a replica that has not died had the session
    expired: int = 0
    moved: int = 0
    told_moving: int = 0  # 503: a turn met a session that moves
    deaths: int = 0
    proxy_deaths: int = 0
    partitions: int = 0
    drained: int = 0
    lost_messages: int = 0
    events: int = 0

    def add(self, other: FleetTally) -> None:
        """Add the counts of another one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Client(Node):
    """A client: it sends one request at a time, and again until it is answered."""

    def __init__(
        self,
        world: World,
        name: str,
        settings: FleetSettings,
        tally: FleetTally,
        pick: Callable[[], Node],
    ) -> None:
        super().__init__(world, name)
        self._settings, self._tally, self._pick = settings, tally, pick
        self._left = settings.turns_each
        self.is_done = False
        self._since = 0.0

    def think(self, act: Callable[[], None]) -> None:
        """Pause, then go on."""
        pause = self.world.random.expovariate(1 / self._settings.think_seconds)
        self._since = self.world.now + pause
        self.world.after(pause, act)

    def send(self, request: Request, hear: Callable[[int, dict[str, Any]], None]) -> None:
        """Send a request by some proxy; `hear` gets status and body; 0 if there was no answer."""
        if self.world.now - self._since > _LOST:
            raise FleetLaw(f"{self.name}: a request is lost: no answer for {_LOST:g} s")
        world, ends = self.world, [0]
        self._tally.attempts += 1

        def done(answer: Any) -> None:
            ends[0] += 1
            if ends[0] > 1:
                raise FleetLaw(f"{self.name} was answered twice")
            if isinstance(answer, Cut) or answer[0] == 500:
                self._tally.cuts += 1
                answer = 0, {}
            hear(*answer)

        proxy: Any = self._pick()
        call = world.call(self, proxy, lambda attempt: proxy.serve(attempt, request), done)
        early = world.random.random() < 0.01
        self._tally.left_early += early
        wait = world.random.uniform(0, 0.1) if early else _PATIENCE

        def give_up() -> None:
            if not ends[0]:
                call.leave()
                done(Cut(is_dead=False))

        world.after(wait, give_up)

    def again(self, act: Callable[[], None]) -> None:
        """Do something after a moment, because it did not work."""
        self.world.after(self.world.random.uniform(0.05, 0.5), act)

    def new_tokens(self, num_tokens: int) -> list[int]:
        """Return a part of a prompt."""
        return [
            self.world.random.randrange(1 << 16)
            for _ in range(self.world.random.randint(1, num_tokens))
        ]


class TextClient(Client):
    """Sends texts with hints; each answer must be the right one."""

    def start(self) -> None:
        """Begin."""
        self.think(self._next)

    def _next(self) -> None:
        prompt, num_new = self.new_tokens(40), self.world.random.randint(1, 24)
        hint = f"hint {self.world.random.randint(0, 7)}"
        request = {"kind": "text", "prompt": prompt, "num_new": num_new, "hint": hint}

        def hear(status: int, body: dict[str, Any]) -> None:
            if status != 200:
                self._tally.full += status == 429
                self.again(lambda: self.send(request, hear))
                return
            if body["new"] != answer_of(prompt, num_new):
                raise FleetLaw(f"{self.name} got another text than its own")
            self._tally.texts += 1
            self._left -= 1
            if self._left:
                self.think(self._next)
            else:
                self.is_done = True

        self.send(request, hear)


class SessionClient(Client):
    """Has a session, and the text that it must have.

    It behaves as docs/serve.md says: a turn that is sent again has the same offset; after 409 the
    session is rewound to what the client has seen; after 410 a new one gets the whole text.
    """

    def __init__(
        self,
        *args: Any,
        check_loss: Callable[[str], None],
        check_moving: Callable[[str], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check_loss, self._check_moving = check_loss, check_moving
        self._ident = ""
        self._text: list[int] = []  # what the client has seen
        self._held = 0  # how much of it the session has
        self._used = 0.0  # when the latest call of the session ended well

    def start(self) -> None:
        """Begin."""
        self.think(self._next)

    def _next(self) -> None:
        room = MAX_CONTEXT_LEN - 1 - len(self._text)
        if room < 40:
            self._close(self._begin_anew)
            return
        self._turn(self.new_tokens(16), self.world.random.randint(1, 20))

    def _begin_anew(self) -> None:
        self._ident, self._text, self._held = "", [], 0
        self._next()

    def _turn(self, prompt: list[int], num_new: int) -> None:
        if not self._ident:
            self._open(lambda: self._turn(prompt, num_new))
            return
        request = {
            "kind": "turn",
            "session": self._ident,
            "offset": self._held,
            "prompt": self._text[self._held :] + prompt,
            "num_new": num_new,
        }
        self.send(request, lambda status, body: self._hear(status, body, prompt, num_new))

    def _hear(self, status: int, body: dict[str, Any], prompt: list[int], num_new: int) -> None:
        code = body.get("code")
        if status == 200:
            self._ended(body, prompt, num_new)
            return
        if code == "session_offset_mismatch":
            self._tally.seen_late += 1
            there = body["session"]["offset"]
            if there < self._held:
                raise FleetLaw(f"{self.name}: its session has {there} tokens, not {self._held}")
            self._rewind(lambda: self._turn(prompt, num_new))
            return
        if code in ("session_lost", "session_not_found"):
            self._lose(str(code))
        if code == "session_moving":
            self._tally.told_moving += 1
            self._check_moving(self._ident)
        self._tally.full += status == 429
        self.again(lambda: self._turn(prompt, num_new))

    def _ended(self, body: dict[str, Any], prompt: list[int], num_new: int) -> None:
        text = self._text + prompt
        if body["new"] != answer_of(text, num_new):
            raise FleetLaw(f"{self.name}: a turn goes on with another text than its session's")
        self._text = text + body["new"]
        if body["offset"] != len(self._text):
            raise FleetLaw(
                f"{self.name}: its session has {body['offset']} tokens, not {len(self._text)}"
            )
        self._held, self._used = len(self._text), self.world.now
        self._tally.turns += 1
        self._left -= 1
        if self._left:
            self.think(self._next)
        else:
            self._close(self._finish)

    def _lose(self, code: str) -> None:
        """Note that the session is gone, which must have a reason."""
        idle = self.world.now - self._used
        if idle * (1 + self._settings.skew) >= self._settings.session_timeout:
            self._tally.expired += 1
        elif code == "session_not_found":
            raise FleetLaw(f"{self.name}: its session was closed after {idle:.1f} s")
        else:
            self._tally.lost_sessions += 1
            self._check_loss(self._ident)
        self._ident, self._held = "", 0

    def _open(self, then: Callable[[], None]) -> None:
        def hear(status: int, body: dict[str, Any]) -> None:
            if status == 200:
                self._ident, self._held, self._used = body["id"], 0, self.world.now
                then()
            else:
                self.again(lambda: self._open(then))

        self.send({"kind": "open"}, hear)

    def _rewind(self, then: Callable[[], None]) -> None:
        def hear(status: int, body: dict[str, Any]) -> None:
            if body.get("code") in ("session_lost", "session_not_found"):
                self._lose(str(body["code"]))
            self.again(then)

        self.send({"kind": "rewind", "session": self._ident, "offset": self._held}, hear)

    def _close(self, then: Callable[[], None]) -> None:
        """Close the session; if nobody answers, it is left to its timeout."""
        self.send({"kind": "close", "session": self._ident}, lambda status, body: then())

    def _finish(self) -> None:
        self.is_done = True
