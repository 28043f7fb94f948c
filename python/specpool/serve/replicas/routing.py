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
_RING_POINTS = 64
#: If fewer than one replica in this many changes, the ring is changed in place.
_REPLICAS_PER_CHANGE = 8
#: The most tags of replicas that have left which are remembered.
_MAX_LEFT_TAGS = 4096
#: Replicas whose loads are looked at to estimate the mean.
_SAMPLE = 16
#: How many times the mean load a replica may have before a hint is passed over.
_BOUND = 1.25
#: Further requests that it may have, because loads are known a little late.
_SLACK = 4
#: Seconds that a turn waits for an owner that a router has never heard of: a list may be late.
PATIENCE = 0.5
#: The most turns that wait for an unknown owner; further turns do not wait.
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
    """Return the tag of the replica that opened a session; None if the id has another form."""
    tag, dot, secret = session_id.partition(".")
    return tag if dot and tag and secret and len(session_id) <= MOST_CHARS else None


class Routing:
    """The replicas that a router knows."""

    def __init__(self, seed: int | None = None) -> None:
        """Know no replica yet; `seed` decides the random choices."""
        self._tags: list[str] = []
        self._tag_set: set[str] = set()
        self._left_tags: OrderedDict[str, None] = OrderedDict()
        self._ring: list[tuple[int, str]] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._tags)

    def update(self, tags: Iterable[str]) -> None:
        """Take over the list of the replicas that take requests.

        Cost: O(replicas) to compare the lists; a few changes cost a search in the ring each.
        """
        wanted = set(tags)
        if wanted == self._tag_set:
            return
        lost, came = self._tag_set - wanted, wanted - self._tag_set
        for tag in sorted(lost):
            self._left_tags[tag] = None
        for tag in came:
            self._left_tags.pop(tag, None)
        while len(self._left_tags) > _MAX_LEFT_TAGS:
            self._left_tags.popitem(last=False)
        if _REPLICAS_PER_CHANGE * (len(lost) + len(came)) < len(wanted):
            for tag in lost:
                for point in _ring_points(tag):
                    del self._ring[bisect.bisect_left(self._ring, (point, tag))]
            for tag in came:
                for point in _ring_points(tag):
                    bisect.insort(self._ring, (point, tag))
        else:
            ring = [entry for entry in self._ring if entry[1] not in lost]
            self._ring = sorted(
                ring + [(point, tag) for tag in came for point in _ring_points(tag)]
            )
        self._tag_set = wanted
        self._tags = sorted(wanted)

    def lose(self, tag: str) -> None:
        """Forget a replica that was found dead before the list says so."""
        if tag in self._tag_set:
            self.update(self._tag_set - {tag})

    def knows(self, tag: str) -> Known:
        """Return what is known of a replica."""
        if tag in self._tag_set:
            return "here"
        return "gone" if tag in self._left_tags else "unknown"

    def place_of(self, session_id: str) -> str | None:
        """Return the replica that a session belongs to; None if there is no replica.

        It is the owner. If the owner is not here, it is the first replica on the ring behind the
        id, for all who have the same list. Cost: a search in the ring.
        """
        owner = owner_of(session_id)
        if owner is not None and owner in self._tag_set:
            return owner
        if not self._ring:
            return None
        start = bisect.bisect(self._ring, (_hash(session_id), ""))
        return self._ring[start % len(self._ring)][1]

    def hinted(self, hint: str, load_of: Callable[[str], float]) -> str | None:
        """Return the replica for a hint; None if there is no replica.

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
        max_load = _BOUND * sum(map(load_of, sample)) / len(sample) + _SLACK
        start = bisect.bisect(self._ring, (_hash(hint), ""))
        tried: set[str] = set()
        for i in range(len(self._ring)):
            tag = self._ring[(start + i) % len(self._ring)][1]
            if tag not in tried:
                if load_of(tag) <= max_load:
                    return tag
                tried.add(tag)
                if len(tried) >= _SAMPLE:  # the sample was misleading
                    break
        return min(tried, key=load_of)

    def spread(self) -> list[str]:
        """Return two replicas at random, of which the less loaded shall take a request."""
        return self._random.sample(self._tags, min(2, len(self._tags)))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def _ring_points(tag: str) -> list[int]:
    return [_hash(f"{tag} {i}") for i in range(_RING_POINTS)]
