"""What comes to a simulated engine: its settings, requests, aborts and faults, all from one seed.

A request's text, and how many drafts are accepted at each root, depend on its own seed and the
position alone: what else runs beside it changes neither.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specpool._core import Group, Ledger, Shape, sizing_row_width
from specpool.config import Placement, Policy, SamplingParams
from specpool.request import Request

#: The token that ends a request; no other position of a text has it.
STOP = 1 << 20

FaultKind = Literal["launch", "result", "not_finite", "interrupt"]

_SHAPES = [(1, 1, 2), (3, 1, 4), (7, 1, 8), (2, 2, 4), (4, 4, 16), (5, 8, 32)]
_WORDS = np.random.default_rng(0).integers(0, STOP, 1 << 16).tolist()
_LOG_DICE = np.log(np.random.default_rng(1).uniform(1e-9, 1.0, 1 << 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the engine is built; the names are those of `EngineConfig` and `Scheduler`."""

    page_sizes: tuple[int, ...]  # of each group
    num_pages: tuple[int, ...]
    placement: Placement = "split"
    layout: Literal["dense", "holey"] = "dense"
    policy: Policy = "exact"
    shapes: tuple[tuple[int, int, int], ...] = ()  # beside shape 0
    keeps_draft_kv: bool = True
    reads_tokens: bool = False
    overlap_depth: int = 0
    page_fencing: bool = True
    max_batch: int = 4
    prefill_tokens: int = 64
    headroom: int = 0
    max_context_len: int = 128
    is_late: bool = False  # forwards run, and results are taken over, at times of the seed's choice

    @property
    def hosts_drafts(self) -> tuple[bool, ...]:
        """Of each group; as `plan_pools` has it."""
        if len(self.page_sizes) == 2:
            return (False, True)
        return (self.placement == "shared" and bool(self.shapes),)

    def ledger(self) -> Ledger:
        """A ledger for these settings."""
        groups = [
            Group(f"group{i}", page_size=P, num_pages=n, hosts_drafts=hosts, layout=self.layout)
            for i, (P, n, hosts) in enumerate(
                zip(self.page_sizes, self.num_pages, self.hosts_drafts, strict=True)
            )
        ]
        return Ledger(
            groups,
            [Shape.none(), *(Shape(*shape) for shape in self.shapes)],
            num_rows=self.max_batch,
            max_context_len=self.max_context_len,
            overlap_depth=self.overlap_depth,
            policy=self.policy,
            draft_kv=self.keeps_draft_kv,
            page_fencing=self.page_fencing,
        )

    def pages_per_row(self) -> tuple[int, ...]:
        """Pages of a full row in each group: a pool has at least as many."""
        return tuple(
            sizing_row_width(
                [Shape.none(), *(Shape(*shape) for shape in self.shapes)],
                page_size=P,
                max_context_len=self.max_context_len,
                overlap_depth=self.overlap_depth,
                policy=self.policy,
                hosts_drafts=hosts,
                layout=self.layout,
            )
            // P
            for P, hosts in zip(self.page_sizes, self.hosts_drafts, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request to come."""

    request_id: int
    turn: int  # in which it comes
    prompt_len: int
    max_len: int  # tokens at most, the prompt included
    stop_at: int | None = None  # position of the token that ends it; None = its length does
    abort_after: int | None = None  # turns from its coming to its abort
    shape: int = 0
    priority: int = 0
    accept_rate: float = 0.0  # probability that a draft is right where those before it are

    @property
    def end(self) -> tuple[int, str]:
        """Its number of tokens when nothing goes wrong, and its finish reason."""
        if self.stop_at is not None and self.stop_at < self.max_len:
            return self.stop_at + 1, "stop"
        return self.max_len, "length"

    def request(self) -> Request:
        """As the scheduler gets it."""
        return Request(
            request_id=self.request_id,
            index=0,
            prompt_len=self.prompt_len,
            tokens=Text(self).tokens[: self.prompt_len],
            params=SamplingParams(),
            shape=Shape.none(),  # `shape_index` counts
            shape_index=self.shape,
            max_len=self.max_len,
            stop_ids=frozenset((STOP,)),
            seed=self.request_id,
            priority=self.priority,
        )


class Text:
    """What a request says when nothing goes wrong, and on beyond its end.

    Attributes:
        tokens: prompt and output.
        correct_drafts: [positions]: at each root, how many drafts are right.
    """

    def __init__(self, arrival: Arrival) -> None:
        num_tokens = arrival.max_len + 2 * 64  # rounds in flight go beyond the end
        start = arrival.request_id * 7919 % (len(_WORDS) - num_tokens)
        self.tokens: list[int] = _WORDS[start : start + num_tokens]
        if arrival.stop_at is not None:
            self.tokens[arrival.stop_at] = STOP
        rate = min(max(arrival.accept_rate, 1e-9), 1 - 1e-9)
        correct = _LOG_DICE[start : start + num_tokens] / np.log(rate)
        self.correct_drafts: list[int] = np.minimum(correct, 64).astype(int).tolist()


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a step.

    `launch`: its forward cannot be enqueued. `result`: it fails on the device. `not_finite`: its
    first lane's logits are. `interrupt`: Ctrl-C while its results are taken over.
    """

    step: int
    kind: FaultKind


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation does."""

    seed: int
    settings: Settings
    arrivals: tuple[Arrival, ...]  # by turn
    faults: tuple[Fault, ...] = ()


def scenario(seed: int) -> Scenario:
    """The scenario of a seed: small pools, so that requests are retracted, and many ways to end."""
    rng = random.Random(seed)
    settings = _settings(rng)
    num_requests = rng.choice([8, 20, 40, 150])
    pace = rng.choice([0, 0, 1, 1, 5])  # turns between arrivals, on average
    aborts = rng.choice([0.0, 0.1, 0.4])
    has_priorities = rng.random() < 0.3
    longest = settings.max_context_len
    arrivals, turn = [], 0
    for request_id in range(1, num_requests + 1):
        turn += rng.randint(0, 2 * pace)
        prompt_len = rng.randint(1, rng.choice([4, 4, longest // 2, longest - 1]))
        max_len = min(prompt_len + rng.randint(1, rng.choice([3, longest, 2 * longest])), longest)
        arrivals.append(
            Arrival(
                request_id=request_id,
                turn=turn,
                prompt_len=prompt_len,
                max_len=max_len,
                stop_at=rng.randint(prompt_len, max_len + 4) if rng.random() < 0.5 else None,
                abort_after=rng.randint(0, 60) if rng.random() < aborts else None,
                shape=rng.randint(0, len(settings.shapes)),
                priority=rng.randint(0, 2) if has_priorities else 0,
                accept_rate=rng.choice([0.0, 0.5, 0.8, 1.0]),
            )
        )
    num_faults = rng.choice([0, 0, 2, 10])
    steps = sorted(rng.sample(range(1, 20 * num_requests), num_faults))
    kinds: list[FaultKind] = ["launch", "result", "result", "not_finite", "interrupt"]
    faults = tuple(Fault(step, rng.choice(kinds)) for step in steps)
    return Scenario(seed, settings, tuple(arrivals), faults)


def _settings(rng: random.Random) -> Settings:
    placement: Placement = rng.choice(["split", "shared"])
    drafter = rng.choice(["eagle", "eagle", "ngram", "none"])
    page_size = rng.choice([1, 3, 4, 4, 16, 64])
    page_sizes = [page_size]
    if placement == "split" and drafter == "eagle":
        page_sizes.append(page_size if rng.random() < 0.7 else rng.choice([1, 3, 4, 16, 64]))
    shapes = rng.sample(_SHAPES, rng.randint(1, 3)) if drafter != "none" else []
    settings = Settings(
        page_sizes=tuple(page_sizes),
        num_pages=(),
        placement=placement,
        layout=rng.choice(["dense", "holey", "holey"]),
        policy="exact" if rng.random() < 0.8 else "double_buffer",
        shapes=tuple(shapes),
        keeps_draft_kv=drafter == "eagle",
        reads_tokens=drafter == "ngram",
        overlap_depth=rng.randint(0, 1),
        page_fencing=rng.random() < 0.8,
        max_batch=rng.choice([1, 3, 8, 8]),
        prefill_tokens=rng.choice([1, 5, 32, 32, 1024, 1024]),
        headroom=rng.choice([0, 0, 0, 8, 64]),
        max_context_len=rng.choice([8, 40, 100, 100]),
        is_late=rng.random() < 0.5,
    )
    room = rng.choice([0.0, 0.0, 0.0, 0.5, 3.0])
    num_pages = tuple(n + int(room * rng.random() * n) for n in settings.pages_per_row())
    return replace(settings, num_pages=num_pages)
