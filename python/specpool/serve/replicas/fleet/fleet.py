"""`Fleet`: runs a scenario of replicas, proxies and clients, and checks the laws."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from specpool.serve.replicas.fleet.client import Client, FleetTally, SessionClient, TextClient
from specpool.serve.replicas.fleet.proxy import SimProxy
from specpool.serve.replicas.fleet.replica import SimReplica
from specpool.serve.replicas.fleet.settings import FleetSettings
from specpool.serve.replicas.fleet.world import FleetLaw, Node, World

#: Simulated seconds in which faults happen.
_STORMY = 30.0
#: Seconds between two looks of a replica that leaves, as Serve's.
_WAIT_LOOP = 0.5


class Fleet:
    """A run of one scenario. The controller is a part of it.

    Laws: no request is lost or answered twice; a session's text is what its client has seen, to the
    token; a session is lost only with its owner, or by its timeout; a replica that leaves ends no
    text that it has taken; at the end each replica that is left holds no page, whatever died.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.tally = FleetTally(scenarios=1)
        self.world = World(
            settings.seed,
            mean_delay=settings.mean_delay,
            loss=settings.loss,
            silence=settings.silence,
        )
        self._random: random.Random = self.world.random
        self._controller = Node(self.world, "controller")
        self._listed: dict[str, SimReplica] = {}
        self._listed_since: dict[str, float] = {}
        self._version = 0
        self._num_proxies = 0
        self.proxies = [self._new_proxy() for _ in range(settings.num_proxies)]
        for _ in range(settings.num_replicas):
            self._list(self.new_replica())
        self._clients = list(self._new_clients())

    def run(self) -> FleetTally:
        """Run to the end.

        Raises:
            FleetLaw: a law does not hold. Errors of sessions and ledgers pass through.
        """
        self._plan_faults()
        for client in self._clients:
            client.start()  # type: ignore[attr-defined]
        while not all(client.is_done for client in self._clients) and self.world.step():
            self.tally.events += 1
        if not all(client.is_done for client in self._clients):
            raise FleetLaw("nothing happens any more, and clients wait")
        end = self.world.now + 3 * self.settings.session_timeout + 100
        while self.world.now < end and self.world.step():
            self.tally.events += 1
        self.world.loss = 0
        for replica in self._listed.values():
            replica.engine.check_empty(replica.name)
            if len(replica.sessions):
                raise FleetLaw(f"{replica.name} has {len(replica.sessions)} sessions at the end")
        self.tally.lost_messages += self.world.lost_ct
        return self.tally

    def new_replica(self) -> SimReplica:
        """Return a replica with a tag that none had before."""
        tag = "".join(self._random.choices(string.ascii_lowercase + string.digits, k=8))
        return SimReplica(self.world, tag, self.settings)

    def _new_proxy(self) -> SimProxy:
        self._num_proxies += 1
        proxy = SimProxy(self.world, f"proxy {self._num_proxies}", self.settings)
        self._tell(proxy)
        return proxy

    def _new_clients(self) -> Iterator[Client]:
        def pick() -> SimProxy:
            return self._random.choice(self.proxies)

        for i in range(self.settings.num_clients):
            name, rest = f"client {i}", (self.settings, self.tally, pick)
            if i % 2:
                yield TextClient(self.world, name, *rest)
            else:
                yield SessionClient(self.world, name, *rest, check_loss=self._check_loss)

    # --- the controller ---

    def _list(self, replica: SimReplica) -> None:
        self._listed[replica.tag] = replica
        self._listed_since[replica.tag] = self.world.now
        self._publish()

    def _unlist(self, replica: SimReplica) -> None:
        replica.is_leaving = True
        if self._listed.pop(replica.tag, None) is not None:
            self._publish()

    def _publish(self) -> None:
        self._version += 1
        for proxy in self.proxies:
            self._tell(proxy)
            if self._random.random() < self.settings.list_repeats:
                self._tell(proxy)

    def _tell(self, proxy: SimProxy) -> None:
        """Send the list as it is now; a partition delays it until its end."""
        version, listed = self._version, dict(self._listed)

        def arrive() -> None:
            if self.world.is_cut(self._controller, proxy):
                proxy.was_cut = True
                self.world.after(1.0, lambda: self._tell(proxy))
            elif proxy.is_up:
                proxy.take(version, listed)

        self.world.after(self._random.uniform(0, self.settings.list_delay), arrive)

    def _start_later(self) -> None:
        def start() -> None:
            self._list(self.new_replica())

        self.world.after(self.settings.start_seconds, start)

    # --- what goes wrong ---

    def _plan_faults(self) -> None:
        for rate, act in (
            (self.settings.deaths, self._kill),
            (self.settings.proxy_deaths, self._kill_proxy),
            (self.settings.partitions, self._part),
        ):
            at = self._random.expovariate(rate) if rate else _STORMY
            while at < _STORMY:
                self.world.after(at, act)
                at += self._random.expovariate(rate)
        for i in range(self.settings.updates):
            self.world.after(2 + i * _STORMY / 2, self._update)

    def _kill(self) -> None:
        replicas = [each for each in self._listed.values() if each.is_up]
        if not replicas:
            return
        victim = self._random.choice(replicas)
        self.tally.deaths += 1
        victim.die()

        def notice() -> None:
            if victim.tag in self._listed:  # an update may have come first
                self._unlist(victim)
                self._start_later()

        self.world.after(self._random.uniform(0, self.settings.notice_seconds), notice)

    def _kill_proxy(self) -> None:
        self.tally.proxy_deaths += 1
        i = self._random.randrange(len(self.proxies))
        old = self.proxies[i]
        self.proxies[i] = self._new_proxy()
        for call in list(old.calls):
            call.on_left()
        old.die()

    def _part(self) -> None:
        self.tally.partitions += 1
        nodes: list[Node] = [self._controller, *self.proxies, *self._listed.values()]
        a, b = self._random.choice(self.proxies), self._random.choice(nodes)
        if a is not b:
            self.world.cut(a, b, self._random.uniform(0.1, 10))

    def _update(self) -> None:
        """Replace the replicas one by one, as Serve does: drain, end, start."""
        old = [each for each in self._listed.values() if not each.is_leaving]

        def next_one() -> None:
            while old and not (old[-1].is_up and old[-1].tag in self._listed):
                old.pop()  # it has died meanwhile, and is replaced anyway
            if not old:
                return
            replica = old.pop()
            self._unlist(replica)
            self.world.after(_WAIT_LOOP, lambda: self._drain(replica, next_one))

        next_one()

    def _drain(self, replica: SimReplica, then: object) -> None:
        if replica.is_up and replica.engine.num_open:
            self.world.after(_WAIT_LOOP, lambda: self._drain(replica, then))
            return
        if replica.is_up:
            self.tally.drained += 1
            self.leave(replica)
        self._start_later()
        assert callable(then)
        self.world.after(self.settings.start_seconds, then)

    def leave(self, replica: SimReplica) -> None:
        """End a replica that has drained.

        Raises:
            FleetLaw: it has taken texts that have not ended.
        """
        if replica.engine.num_open:
            raise FleetLaw(f"{replica.name} leaves with {replica.engine.num_open} texts")
        replica.die()

    # --- laws ---

    def _check_loss(self, owner: str, sent: float) -> None:
        """Check that a session that is lost has lost its owner, or that nobody could know it.

        Raises:
            FleetLaw: the owner is there, and every proxy has heard of it or could have.
        """
        replica = self._listed.get(owner)
        if replica is None or not replica.is_up:
            return
        self.tally.needless += 1
        since = sent - self._listed_since[owner]
        # A proxy waits for `patience`. All lists of the owner have come by then, or maybe not yet.
        could_know = since + self.settings.patience >= self.settings.list_delay
        # A call that failed may have told the proxy of a death that was none: not in a quiet fleet.
        if self.settings.is_quiet or (
            could_know
            and all(owner in proxy.replicas and not proxy.was_cut for proxy in self.proxies)
        ):
            raise FleetLaw(
                f"a session is lost, and its owner {owner} is there, listed {since:.2f} s before"
            )
