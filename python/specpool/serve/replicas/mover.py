"""`Mover`: sends each session of a replica to where it belongs. There is no Ray here.

A session belongs to its owner, the replica that opened it. If the owner is not on the list of
replicas, it belongs to a place on the routers' ring. So the sessions of a replica that leaves
spread over the others, those of one that has left follow the ring when replicas come and go, and
no router needs a table. A session is at one replica at a time: while it is in transit, its old
replica refuses requests. Sessions that will come are announced to their new replica, which tells
clients to ask again for as long as the moves take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from specpool.errors import SpecpoolError
from specpool.serve.api.errors import ApiError, session_moving
from specpool.serve.bridge.parcel import SessionParcel
from specpool.serve.replicas.manifest import LONGEST_MOVES
from specpool.serve.replicas.routing import MOST_PATIENT, PATIENCE, Routing, owner_of
from specpool.serve.sessions import SessionRecord, Sessions, public_id_of

#: Seconds after a change of the list until sessions move: the routers hear of it at other times.
SETTLE = PATIENCE
#: Seconds that a request waits for a session that may be on its way.
WAIT = 3.0
#: Sessions of a replica that move at once.
MOST_AT_ONCE = 4
#: Seconds until a session that has come, or was refused, may be sent again.
_AGAIN = 2.0
#: Seconds until a replica that is off the list, and has not answered, is taken for one that left.
_BACK = 3.0
#: Seconds between two looks.
_LOOK = 0.1

#: What became of a parcel. "taken": the session is there, or was. "refused": neither. "gone": the
#: other replica has ended without an answer. "unknown": no answer came.
Fate = Literal["taken", "refused", "gone", "unknown"]


class PeerReplicas(Protocol):
    """The way to the other replicas."""

    async def send(self, tag: str, parcel: SessionParcel) -> Fate:
        """Give a session to the replica of this tag; never raises."""

    async def announce(self, tag: str, parcels: Mapping[str, int]) -> bool:
        """Tell the replica of this tag which sessions will come; see `Mover.expect`.

        Returns:
            Whether it has heard it. Never raises.
        """


@dataclass(frozen=True, slots=True)
class Time:
    """What a mover needs of an event loop; the simulation has its own.

    Attributes:
        now: seconds that never jump.
        sleep: waits for seconds.
        spawn: starts a coroutine beside others.
    """

    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[Any]]
    spawn: Callable[[Coroutine[Any, Any, None]], object]


class Mover:
    """Moves the sessions of one replica.

    Attributes:
        is_closing: the replica ends, and takes in no more sessions.
    """

    def __init__(self, sessions: Sessions, tag: str, peers: PeerReplicas, time: Time) -> None:
        """Know no replica yet.

        Args:
            sessions: those of this replica; their `other_servers` is this mover from now on.
            tag: this replica's.
            peers: the way to the others.
            time: the event loop.
        """
        self._sessions, self._tag, self._peers, self._time = sessions, tag, peers, time
        self._tags: set[str] = set()
        self._was_listed = False
        self._routing = Routing()  # behind `_tags`, until a session of another owner comes
        self._changed = 0.0
        self._later: dict[str, float] = {}  # session -> when it may be sent again
        self._announced: dict[str, str] = {}  # session -> the replica that was told of it
        self._expected: dict[str, float] = {}  # session -> until when it may come
        self._num_moving = self._num_coming = self._num_waiting = 0
        self._is_looking = False
        self.is_closing = False
        sessions.other_servers = self

    def update(self, tags: Iterable[str]) -> None:
        """Take over the list of the replicas that take requests. Cost: O(sessions here)."""
        self._tags = set(tags)
        self._was_listed |= self._tag in self._tags
        if not self._was_listed:  # it is new, and the other replicas may hear of it first
            self._tags.add(self._tag)
        if self.is_closing:
            self._tags.discard(self._tag)
        self._changed = self._time.now()
        self._look()

    async def take_in(self, parcel: SessionParcel) -> None:
        """Take in a session that another replica sends.

        Raises:
            ApiError: this replica leaves too, or see `Sessions.take_in`.
            ConfigError: the text does not fit the engine.
        """
        leaves = self.is_closing or (self._was_listed and self._tag not in self._tags)
        self._num_coming += 1
        try:
            await self._sessions.take_in(parcel, takes_new=not leaves)
        finally:
            self._num_coming -= 1
        self._expected.pop(parcel.ident, None)
        # Two replicas with different lists must not send a session back and forth.
        self._later[parcel.ident] = self._time.now() + _AGAIN
        self._look()

    def expect(self, parcels: Mapping[str, int]) -> None:
        """Hear which sessions another replica will send, each with the number of its parcel.

        For `LONGEST_MOVES` seconds, clients who ask for one are told that it moves.
        """
        now, sessions = self._time.now(), self._sessions
        late = {ident: deadline for ident, deadline in self._expected.items() if deadline > now}
        new = [ident for ident, number in parcels.items() if number > sessions.latest_parcel(ident)]
        self._expected = late | dict.fromkeys(new, now + LONGEST_MOVES)

    async def close(self, seconds: float = LONGEST_MOVES) -> int:
        """Move all sessions, because this replica ends; return how many had to stay.

        Sessions that are busy move when their turn has ended, and those that just come move on.

        Args:
            seconds: sessions that have not moved by then are given up.
        """
        self.is_closing = True
        self._tags.discard(self._tag)
        self._changed = min(self._changed, self._time.now() - SETTLE)
        self._later.clear()
        self._look()
        end = self._time.now() + seconds
        while self._has_work() and self._time.now() < end:
            await self._time.sleep(_LOOK)
        return len(self._sessions)

    def _has_work(self) -> bool:
        """Return whether a session comes in, or can be sent to another replica."""
        return self._num_coming > 0 or (len(self._sessions) > 0 and len(self._tags) > 0)

    # --- for `Sessions` ---

    def is_elsewhere(self, ident: str) -> bool:
        """Return whether another replica is the one that a session belongs to."""
        return self._place_of(ident) not in (None, self._tag)

    def is_moving(self, ident: str) -> bool:
        """Return whether a session that is not here may be on its way, here or elsewhere."""
        return self.is_elsewhere(ident) or self._expected.get(ident, 0.0) > self._time.now()

    async def wait_for(self, ident: str) -> None:
        """Wait for a session that may be on its way here.

        Raises:
            ApiError: too many requests wait. Whether the session is lost is not known then, and a
                client that was told so would give it up.
        """
        if owner_of(public_id_of(ident)) is None:
            return
        if not self._sessions.may_come(ident) or self.is_elsewhere(ident):
            return
        if self._num_waiting >= MOST_PATIENT:
            raise session_moving()
        self._num_waiting += 1
        end = self._time.now() + WAIT
        try:
            while self._sessions.may_come(ident) and self._time.now() < end:
                if self.is_elsewhere(ident):
                    return
                await self._time.sleep(_LOOK / 2)
        finally:
            self._num_waiting -= 1

    # --- moves ---

    def _place_of(self, ident: str) -> str | None:
        public_id = public_id_of(ident)  # as the routers know it
        owner = owner_of(public_id)
        if owner is None or owner in self._tags:
            return owner
        self._routing.update(self._tags)
        return self._routing.place_of(public_id)

    def _look(self) -> None:
        """Look for sessions to move, until there are none."""
        if not self._is_looking:
            self._is_looking = True
            self._time.spawn(self._move_all())

    async def _move_all(self) -> None:
        try:
            while (misplaced := self._misplaced()) or self._num_moving:
                now = self._time.now()
                self._later = {ident: time for ident, time in self._later.items() if time > now}
                self._announce(misplaced)
                if now - self._changed >= SETTLE:
                    due = [record for record in misplaced if record.ident not in self._later]
                    for record in due[: MOST_AT_ONCE - self._num_moving]:
                        self._num_moving += 1
                        self._time.spawn(self._move(record.ident))
                await self._time.sleep(_LOOK)
            self._later.clear()
            self._announced.clear()
        finally:
            self._is_looking = False

    def _announce(self, misplaced: Sequence[SessionRecord]) -> None:
        """Announce these sessions to the replicas that they belong to, unless that was done."""
        news: defaultdict[str, dict[str, int]] = defaultdict(dict)
        idents = {record.ident for record in misplaced}
        self._announced = {ident: t for ident, t in self._announced.items() if ident in idents}
        for record in misplaced:
            tag = self._place_of(record.ident)
            if tag is not None and self._announced.get(record.ident) != tag:
                self._announced[record.ident] = tag
                news[tag][record.ident] = record.parcel + 1
        for tag, parcels in news.items():
            self._time.spawn(self._tell(tag, parcels))

    async def _tell(self, tag: str, parcels: Mapping[str, int]) -> None:
        if not await self._peers.announce(tag, parcels):
            await self._time.sleep(_LOOK)
            for ident in parcels:
                if self._announced.get(ident) == tag:
                    del self._announced[ident]

    def _misplaced(self) -> list[SessionRecord]:
        """Return the sessions that belong elsewhere: idle ones first, the latest used before."""
        misplaced = [record for record in self._sessions if self.is_elsewhere(record.ident)]
        return sorted(misplaced, key=lambda record: (record.is_busy, -record.used))

    async def _move(self, ident: str) -> None:
        try:
            record, parcel = await self._sessions.pack(ident)
        except SpecpoolError as error:
            if not isinstance(error, ApiError):  # else a turn runs, or its client has closed it
                self._later[ident] = self._time.now() + _AGAIN
            self._num_moving -= 1
            return
        try:
            if await self._is_taken(parcel):
                await self._sessions.leave(record)
            else:
                self._later[ident] = self._time.now() + _AGAIN
                self._sessions.unpack(record)
        except SpecpoolError:  # the engine is gone
            pass
        finally:
            self._num_moving -= 1

    async def _is_taken(self, parcel: SessionParcel) -> bool:
        """Send a session; return whether it may be at another replica from now on.

        If no answer comes, the other replica alone knows whether it has the session. It is asked
        until it says so, also if a list leaves it out for a moment. If it leaves, it may have
        passed the session on: the copy here must not answer any more.
        """
        tag = self._place_of(parcel.ident)
        if tag is None or tag == self._tag:  # the list has changed meanwhile
            return False
        fate = await self._peers.send(tag, parcel)
        if fate != "unknown":
            return fate == "taken"
        listed = self._time.now()
        while fate == "unknown" and self._time.now() - listed < _BACK:
            await self._time.sleep(_LOOK)
            if tag in self._tags:
                fate = await self._peers.send(tag, parcel)
                listed = self._time.now()
        return fate != "refused"
