"""`FleetSettings`: a fleet, its network and its faults, all from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from specpool.serve.replicas.routing import PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A scenario. Times are simulated seconds, rates are per second and fleet.

    Attributes:
        seed: decides everything.
        num_replicas: replicas at the start; a dead one is replaced.
        num_proxies: proxies, each with a routing of its own.
        num_clients: clients; half of them have sessions.
        turns_each: turns of a session's client, or texts of another client.
        mean_delay: of a message.
        loss: share of messages that are lost.
        silence: seconds until a caller gives up a node that is silent.
        list_delay: the most seconds until a proxy has a new list of replicas.
        list_repeats: share of lists that come twice.
        deaths: replicas that die at once.
        proxy_deaths: proxies that die; another one comes at once, and knows nothing.
        partitions: pairs of nodes that are cut from each other for a while.
        updates: rolling updates of all replicas.
        start_seconds: until a new replica can work.
        notice_seconds: the most until the controller knows of a death.
        skew: how far a replica's clock may go wrong, as a share.
        session_timeout: by the replica's clock.
        round_seconds: of an engine's round.
        think_seconds: mean pause of a client between turns.
        patience: of the routers.
        max_queue: texts that wait at a replica beside those that run.
        move_seconds: the most that a session's KV takes from one replica to another.
    """

    seed: int
    num_replicas: int = 3
    num_proxies: int = 2
    num_clients: int = 24
    turns_each: int = 5
    mean_delay: float = 0.002
    loss: float = 0.0
    silence: float = 2.0
    list_delay: float = 0.3
    list_repeats: float = 0.0
    deaths: float = 0.0
    proxy_deaths: float = 0.0
    partitions: float = 0.0
    updates: int = 0
    start_seconds: float = 5.0
    notice_seconds: float = 1.0
    skew: float = 0.0
    session_timeout: float = 60.0
    round_seconds: float = 0.02
    think_seconds: float = 1.0
    patience: float = PATIENCE
    max_queue: int = 32
    move_seconds: float = 0.2

    @property
    def is_quiet(self) -> bool:
        """Whether every list comes before a router's patience ends."""
        return self.list_delay < self.patience and not self.partitions and not self.proxy_deaths

    @property
    def moves_in_time(self) -> bool:
        """Whether a session that moves always comes before a request stops to wait for it."""
        return self.is_quiet and not self.loss


def fleet_settings(seed: int, num_replicas: int = 3) -> FleetSettings:
    """Return the scenario of a seed; each kind of fault is in about half of them."""
    rng = random.Random(seed)

    def maybe(low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else 0.0

    return FleetSettings(
        seed=seed,
        num_replicas=num_replicas,
        num_proxies=rng.randint(1, 3),
        num_clients=max(24, 4 * num_replicas),
        turns_each=rng.randint(2, 8),
        mean_delay=rng.choice([0.0005, 0.002, 0.02]),
        loss=maybe(0.001, 0.03),
        list_delay=rng.choice([0.01, 0.3, 0.45, 2.0]),
        list_repeats=maybe(0.1, 0.5),
        deaths=maybe(0.02, 0.2),
        proxy_deaths=maybe(0.02, 0.1),
        partitions=maybe(0.02, 0.2),
        updates=rng.choice([0, 0, 1, 2]),
        start_seconds=rng.uniform(0.5, 8),
        notice_seconds=rng.uniform(0.05, 3),
        skew=maybe(0.01, 0.05),
        session_timeout=rng.choice([4.0, 60.0, 60.0]),
        think_seconds=rng.choice([0.05, 0.5, 2.0]),
        max_queue=rng.choice([0, 4, 32]),
    )


def update_settings(seed: int, num_replicas: int = 3) -> FleetSettings:
    """Return the scenario of a seed in which all replicas are replaced twice while clients talk.

    In half of them replicas die too, and in half of them messages are lost.
    """
    rng = random.Random(f"update {seed}")
    return FleetSettings(
        seed=seed,
        num_replicas=num_replicas,
        num_clients=max(24, 4 * num_replicas),
        turns_each=rng.randint(6, 14),
        mean_delay=rng.choice([0.002, 0.02]),
        loss=rng.uniform(0.005, 0.05) if seed % 2 else 0.0,
        list_delay=rng.choice([0.01, 0.3, 0.45]),
        list_repeats=rng.choice([0.0, 0.3]),
        deaths=rng.uniform(0.02, 0.1) if seed // 2 % 2 else 0.0,
        updates=2,
        start_seconds=rng.uniform(0.5, 4),
        skew=rng.choice([0.0, 0.03]),
        think_seconds=rng.choice([0.5, 2.0]),
        move_seconds=rng.choice([0.0, 0.1, 0.3]),
    )
