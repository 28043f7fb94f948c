"""`Fleet`: runs a scenario of replicas, proxies and clients, and checks the laws."""

from __future__ import annotations

import random
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from lab.fleet.client import Client, FleetTally, SessionClient, TextClient
from lab.fleet.proxy import SimProxy
from lab.fleet.replica import SimReplica
from lab.fleet.settings import FleetSettings
from lab.fleet.world import FleetLaw, Node, World
from specpool.serve.replicas.routing import owner_of
from specpool.serve.sessions import SessionRecord

#: Simulated seconds in which faults happen.
_STORMY = 30.0
#: Seconds between two looks of a replica that leaves, as Serve's.
_WAIT_LOOP = 0.5


class Fleet:
    """A run of one scenario. The controller is a part of it.

    Laws: no request is lost or answered twice; a session's text is what its client has seen, to the
    token; no two replicas answer for a session; a session is lost only with a replica that had it,
    or by its timeout; a replica that leaves ends no text that it has taken; at the end each replica
    that is left holds no page, whatever died.
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
        self._replicas: list[SimReplica] = []  # also those that leave
        # A session -> all replicas that had it; and where it was sent last.
        self._holders: defaultdict[str, set[str]] = defaultdict(set)
        self._sent_to: dict[str, str] = {}
        self._left: set[str] = set()
        self._killed: set[str] = set()  # or ended when there was no other replica
        self._version = 0
        self._num_proxies = 0
        self.proxies = [self._new_proxy() for _ in range(settings.num_proxies)]
        for _ in range(settings.num_replicas):
            self._list(self.new_replica(), publishes=False)
        self._publish()
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
        self._tell(proxy, dict(self._listed))
        return proxy

    def _new_clients(self) -> Iterator[Client]:
        def pick() -> SimProxy:
            return self._random.choice(self.proxies)

        for i in range(self.settings.num_clients):
            name, rest = f"client {i}", (self.settings, self.tally, pick)
            if i % 2:
                yield TextClient(self.world, name, *rest)
            else:
                yield SessionClient(
                    self.world,
                    name,
                    *rest,
                    check_loss=self._check_loss,
                    check_moving=self._check_moving,
                )

    # --- the controller ---

    def _list(self, replica: SimReplica, *, publishes: bool = True) -> None:
        replica.on_holds = lambda ident: self._note_holder(ident, replica.tag)
        replica.on_sent = self._note_sent
        replica.on_turn = self._check_alone
        self._replicas = [*(member for member in self._replicas if member.is_up), replica]
        self._listed[replica.tag] = replica
        if publishes:
            self._publish()

    def _note_holder(self, ident: str, tag: str) -> None:
        self.tally.moved += bool(self._holders[ident])  # else it was opened here
        self._holders[ident].add(tag)

    def _note_sent(self, ident: str, tag: str) -> None:
        self._sent_to[ident] = tag

    def _unlist(self, replica: SimReplica) -> None:
        replica.is_leaving = True
        if self._listed.pop(replica.tag, None) is not None:
            self._publish()

    def _publish(self) -> None:
        self._version += 1
        listed = dict(self._listed)
        nodes: list[SimProxy | SimReplica] = [*self.proxies, *self._replicas]
        for node in nodes:
            self._tell(node, listed)
            if self._random.random() < self.settings.list_repeats:
                self._tell(node, listed)

    def _tell(self, node: SimProxy | SimReplica, listed: Mapping[str, SimReplica]) -> None:
        """Send the list as it is now; a partition delays it until its end."""
        version = self._version

        def arrive() -> None:
            if self.world.is_cut(self._controller, node):
                self.world.after(1.0, lambda: self._tell(node, dict(self._listed)))
            elif node.is_up:
                node.take(version, listed)

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
            time = self._random.expovariate(rate) if rate else _STORMY
            while time < _STORMY:
                self.world.after(time, act)
                time += self._random.expovariate(rate)
        for i in range(self.settings.updates):
            self.world.after(2 + i * _STORMY / 2, self._update)

    def _kill(self) -> None:
        replicas = [replica for replica in self._listed.values() if replica.is_up]
        if not replicas:
            return
        victim = self._random.choice(replicas)
        self.tally.deaths += 1
        self._killed.add(victim.tag)
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
        nodes: list[Node] = [self._controller, *self.proxies, *self._replicas]
        first: list[Node] = [*self.proxies, *self._replicas]
        a, b = self._random.choice(first), self._random.choice(nodes)
        if a is not b:
            self.world.cut(a, b, self._random.uniform(0.1, 10))

    def _update(self) -> None:
        """Replace the replicas one by one, as Serve does: drain, end, start."""
        old = [replica for replica in self._listed.values() if not replica.is_leaving]

        def next_one() -> None:
            while old and not (old[-1].is_up and old[-1].tag in self._listed):
                old.pop()  # it has died meanwhile, and is replaced anyway
            if not old:
                return
            replica = old.pop()
            self._unlist(replica)
            self.world.after(_WAIT_LOOP, lambda: self._drain(replica, next_one))

        next_one()

    def _drain(self, replica: SimReplica, then: Callable[[], None]) -> None:
        if replica.is_up and replica.engine.num_open:
            self.world.after(_WAIT_LOOP, lambda: self._drain(replica, then))
            return

        async def leave() -> None:
            if await replica.mover.close() and not self._listed:
                self._killed.add(replica.tag)
            while replica.engine.num_open:  # a router had an old list
                await self.world.sleep(_WAIT_LOOP)
            self.tally.drained += 1
            self.leave(replica)

        self.world.run(replica, leave())
        self._start_later()
        self.world.after(self.settings.start_seconds, then)

    def leave(self, replica: SimReplica) -> None:
        """End a replica that has drained.

        Raises:
            FleetLaw: it has taken texts that have not ended.
        """
        if replica.engine.num_open:
            raise FleetLaw(f"{replica.name} leaves with {replica.engine.num_open} texts")
        self._left.add(replica.tag)
        replica.die()

    # --- laws ---

    def _check_alone(self, record: SessionRecord) -> None:
        """Check that the session of a turn is at one replica, which answers for it.

        Raises:
            FleetLaw: another replica would answer too, or will soon.
        """
        if record.is_leaving:
            raise FleetLaw(f"session {record.ident} answers while it leaves")
        holders = [
            replica.name
            for replica in self._replicas
            if replica.is_up
            for other in replica.sessions
            if other.ident == record.ident and not other.is_leaving
        ]
        if len(holders) != 1:
            raise FleetLaw(f"session {record.ident} is at {', '.join(holders)}")

    def _check_moving(self, ident: str) -> None:
        """Check that a session that moves, as a client was told, has a reason to do so.

        Raises:
            FleetLaw: its owner is there, and lists come in time.
        """
        owner = self._listed.get(owner_of(ident) or "")
        if self.settings.is_quiet and owner is not None and owner.is_up:
            raise FleetLaw(f"session {ident} was said to move, and its owner is there")

    def _check_loss(self, ident: str) -> None:
        """Check that a session that is lost was lost with a replica that had it.

        If messages are lost or lists come late, a session may come later than a request waits. Or
        the replica that it was sent to ends before it can be asked whether it has the session.

        Raises:
            FleetLaw: no replica that had it was killed.
        """
        holders = self._holders[ident]
        if holders & self._killed:
            return
        self.tally.needless += 1
        is_somewhere = any(
            replica.is_up and ident == record.ident
            for replica in self._replicas
            for record in replica.sessions
        )
        is_unsure = self._sent_to.get(ident) in self._left | self._killed
        if self.settings.moves_in_time or not (is_somewhere or is_unsure):
            raise FleetLaw(f"session {ident} is lost, and none of {sorted(holders)} was killed")
