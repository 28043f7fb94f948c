"""`World`: simulated time, and a network whose calls are late, cut or lost."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from specpool.errors import SpecpoolError


class FleetLaw(SpecpoolError):  # noqa: N818 - what is broken, not a mistake of the caller
    """A law of the fleet does not hold."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a call without an answer.

    Attributes:
        is_dead: the other node was found dead, rather than silent.
    """

    is_dead: bool


class Node:
    """Something with an address."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_up = True
        self.calls: dict[Call, None] = {}  # those that it serves; a set has no fixed order

    def die(self) -> None:
        """End at once; the callers of open calls learn it after a moment."""
        self.is_up = False
        for call in list(self.calls):
            call.end(Cut(is_dead=True))
        self.calls.clear()


class Call:
    """A call from one node to another. It ends once: by its answer, or cut."""

    def __init__(self, near: Node, far: Node, done: Callable[[Any], None]) -> None:
        self._near, self._far, self._done = near, far, done
        self._is_answered = self._is_over = False
        self.has_left = False
        self.on_left: Callable[[], None] = lambda: None  # the server's, if the caller leaves

    def reply(self, value: Any) -> None:
        """Answer.

        Raises:
            FleetLaw: it was answered before.
        """
        if self._is_answered:
            raise FleetLaw(f"{self._far.name} answered a call of {self._near.name} twice: {value}")
        self._is_answered = True
        self._far.calls.pop(self, None)
        self.end(value)

    def end(self, value: Any) -> None:
        """Bring the answer, or the end without one, to the caller."""
        world = self._near.world
        if not world.passes(self._far, self._near):
            value = Cut(is_dead=False)
            world.after(world.silence, lambda: self._finish(value))
        else:
            world.after(world.delay(), lambda: self._finish(value))

    def leave(self) -> None:
        """Stop to wait; the server hears it, unless the network is cut."""
        if self._is_over:
            return
        self._is_over = True
        world = self._near.world
        self._far.calls.pop(self, None)

        def left() -> None:
            self.has_left = True
            if self._far.is_up and not self._is_answered:
                self._is_answered = True
                self.on_left()

        world.after(world.silence if world.is_cut(self._near, self._far) else world.delay(), left)

    def _finish(self, value: Any) -> None:
        if not self._is_over and self._near.is_up:
            self._is_over = True
            self._done(value)


class Later:
    """A value that a coroutine of the simulation waits for."""

    def __init__(self) -> None:
        self._is_set, self._value = False, None
        self.then: Callable[[], None] = lambda: None

    def set(self, value: Any = None) -> None:
        """Let the coroutine go on."""
        self._is_set, self._value = True, value
        self.then()

    def __await__(self) -> Generator[Later, None, Any]:
        if not self._is_set:
            yield self
        return self._value


class World:
    """Time and the network.

    Attributes:
        now: seconds.
        random: decides everything.
        loss: the share of messages that are lost.
        silence: seconds until a call that nobody answers is given up.
    """

    def __init__(self, seed: int, *, mean_delay: float, loss: float, silence: float) -> None:
        self.now, self.random = 0.0, random.Random(seed)
        self._mean_delay, self.loss, self.silence = mean_delay, loss, silence
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._cuts: dict[frozenset[str], float] = {}  # pairs of nodes -> until when
        self.lost_ct = 0

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act))

    def sleep(self, seconds: float) -> Later:
        """Return what a coroutine waits for to go on after some seconds."""
        later = Later()
        self.after(seconds, later.set)
        return later

    def run(self, node: Node, work: Coroutine[Any, None, Any]) -> None:
        """Run a coroutine of a node, which may wait for `Later` alone. It ends with its node."""
        if not node.is_up:
            work.close()
            return
        try:
            work.send(None).then = lambda: self.run(node, work)
        except StopIteration:
            pass

    def step(self) -> bool:
        """Do what comes next; return whether there was something."""
        if not self._events:
            return False
        self.now, _, act = heapq.heappop(self._events)
        act()
        return True

    def delay(self) -> float:
        """Return the seconds that a message takes."""
        return self.random.expovariate(1 / self._mean_delay)

    def cut(self, a: Node, b: Node, seconds: float) -> None:
        """Let nothing pass between two nodes for a while."""
        self._cuts[frozenset((a.name, b.name))] = self.now + seconds

    def is_cut(self, a: Node, b: Node) -> bool:
        """Return whether two nodes are cut from each other now."""
        return self._cuts.get(frozenset((a.name, b.name)), 0.0) > self.now

    def passes(self, near: Node, far: Node) -> bool:
        """Return whether a message arrives."""
        if self.is_cut(near, far) or self.random.random() < self.loss:
            self.lost_ct += 1
            return False
        return True

    def call(
        self, near: Node, far: Node, serve: Callable[[Call], None], done: Callable[[Any], None]
    ) -> Call:
        """Call another node.

        Args:
            near: the caller.
            far: the server.
            serve: what it does; it answers by `Call.reply`, at once or later.
            done: gets the answer, or `Cut`.
        """
        call = Call(near, far, done)

        def arrive() -> None:
            if call.has_left:
                return
            if not far.is_up:
                call.end(Cut(is_dead=True))
                return
            far.calls[call] = None
            serve(call)

        if self.passes(near, far):
            self.after(self.delay(), arrive)
        else:
            self.after(self.silence, lambda: call._finish(Cut(is_dead=False)))
        return call
