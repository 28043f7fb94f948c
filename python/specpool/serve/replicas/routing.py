"""`Routing`: which replica a request goes to. There is no Ray here, so the simulation runs it too.

A session's id begins with the tag of the replica that has it, so no table of sessions is needed.
"""

from __future__ import annotations

import bisect
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Literal

#: Places of each replica on the ring: the largest share is then about a third above the mean.
_PLACES = 64
#: If one replica in so many changes, or fewer, the ring is changed in place.
_FEW = 8
#: Tags of replicas that have left, as far as they are remembered.
_MOST_GONE = 4096
#: Replicas whose loads are looked at to estimate the mean.
_SAMPLE = 16
#: How far a replica's load may be above the mean before a hint is passed over.
_BOUND = 1.25
#: Requests above that which do not matter: loads are known a little late.
_SLACK = 4
#: Seconds that a turn waits for an owner that a router has never heard of: a list may be late.
PATIENCE = 0.5
#: Turns that wait so at once; further ones do not.
MOST_PATIENT = 256
#: The longest hint and session id, in characters.
MOST_CHARS = 128

#: A session's owner is here, has left, or was never heard of.
Known = Literal["here", "gone", "unknown"]

#: Called with the tags of each list that a router of this process gets, in the router's thread.
#: They are not in the router's file, because Ray gives each process a copy of what is in it.
listeners: list[Callable[[list[str]], object]] = []


def tell(tags: list[str]) -> None:
    """Tell the listeners of this process a list of replicas."""
    for hear in listeners:
        hear(tags)


def owner_of(session_id: str) -> str | None:
    """Return the tag of the replica that opened a session; None = the id has another form."""
    tag, dot, rest = session_id.partition(".")
    return tag if dot and tag and rest and len(session_id) <= MOST_CHARS else None


class Routing:
    """The replicas that a router knows."""

    def __init__(self, seed: int | None = None) -> None:
        """Know no replica yet; `seed` decides the random choices."""
        self._tags: list[str] = []
        self._here: set[str] = set()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._ring: list[tuple[int, str]] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._tags)

    def update(self, tags: Iterable[str]) -> None:
        """Take over the list of the replicas that take requests.

        Cost: O(replicas) to compare the lists; a few changes cost a search in the ring each.
        """
        wanted = set(tags)
        if wanted == self._here:
            return
        left, came = self._here - wanted, wanted - self._here
        for tag in sorted(left):
            self._gone[tag] = None
        for tag in came:
            self._gone.pop(tag, None)
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        if _FEW * (len(left) + len(came)) < len(wanted):
            for tag in left:
                for place in _places(tag):
                    del self._ring[bisect.bisect_left(self._ring, (place, tag))]
            for tag in came:
                for place in _places(tag):
                    bisect.insort(self._ring, (place, tag))
        else:
            ring = [each for each in self._ring if each[1] not in left]
            self._ring = sorted(ring + [(at, tag) for tag in came for at in _places(tag)])
        self._here = wanted
        self._tags = sorted(wanted)

    def lose(self, tag: str) -> None:
        """Forget a replica that was found dead before the list says so."""
        if tag in self._here:
            self.update(self._here - {tag})

    def knows(self, tag: str) -> Known:
        """Return what is known of a replica."""
        if tag in self._here:
            return "here"
        return "gone" if tag in self._gone else "unknown"

    def place_of(self, session_id: str) -> str | None:
        """Return the replica that a session belongs to; None = there is no replica.

        It is the owner. If the owner is not here, it is the first replica on the ring behind the
        id, for all who have the same list. Cost: a search in the ring.
        """
        owner = owner_of(session_id)
        if owner is not None and owner in self._here:
            return owner
        if not self._ring:
            return None
        start = bisect.bisect(self._ring, (_hash(session_id), ""))
        return self._ring[start % len(self._ring)][1]

    def hinted(self, hint: str, load_of: Callable[[str], float]) -> str | None:
        """Return the replica for a hint; None = there is no replica.

        It is the first one on the ring behind the hint whose load is at most 4 above 1.25 times the
        mean: requests with one hint share a prefix cache, and no hint can flood a replica.

        Args:
            hint: any text; requests with equal hints go to the same replica.
            load_of: the requests that a replica has.
        """
        if not self._tags:
            return None
        sample = self._tags
        if len(sample) > _SAMPLE:
            sample = self._random.sample(sample, _SAMPLE)
        most = _BOUND * sum(map(load_of, sample)) / len(sample) + _SLACK
        start = bisect.bisect(self._ring, (_hash(hint), ""))
        seen: set[str] = set()
        for i in range(len(self._ring)):
            tag = self._ring[(start + i) % len(self._ring)][1]
            if tag not in seen:
                if load_of(tag) <= most:
                    return tag
                seen.add(tag)
                if len(seen) >= _SAMPLE:  # the sample was misleading
                    break
        return min(seen, key=load_of)

    def spread(self) -> list[str]:
        """Return two replicas at random, of which the less loaded shall take a request."""
        return self._random.sample(self._tags, min(2, len(self._tags)))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def _places(tag: str) -> list[int]:
    return [_hash(f"{tag} {i}") for i in range(_PLACES)]
