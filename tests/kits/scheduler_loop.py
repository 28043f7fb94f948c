"""A scheduler on a simulated device, turned by hand."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np

from lab.sim import Arrival, Settings, SimDevice, Text
from sim_plants import Lying
from specpool import Shape
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step
from specpool.engine.shapes import Controller


def put_ledger(scheduler: Scheduler, ledger: Any) -> None:
    """Let the scheduler and its parts call this ledger in place of theirs."""
    state = scheduler.state
    for part in vars(state).values():
        if part is not state.ledger and hasattr(part, "_ledger"):
            part._ledger = ledger
    state.ledger = ledger


class Unfenced(Lying):
    """A ledger that takes every step for complete as soon as it is launched."""

    def ack_delta(self, step):
        self._ledger.ack_delta(step)
        self._ledger.complete(step)

    def complete(self, step):
        pass


class Loop:
    """A scheduler on a simulated device, turned by hand."""

    def __init__(
        self,
        *arrivals: Arrival,
        fenced: bool = True,
        controller: Controller | None = None,
        **options,
    ) -> None:
        settings = Settings(**{"page_sizes": (4,), "max_context_len": 32, **options})
        self.ledger = settings.ledger() if fenced else Unfenced(settings.ledger())
        self.device = SimDevice(self.ledger, settings, random.Random(0))
        self.scheduler = Scheduler(
            self.ledger,
            SchedulerConfig(
                max_batch=settings.max_batch,
                prefill_tokens=settings.prefill_tokens,
                keeps_draft_kv=settings.keeps_draft_kv,
            ),
            controller=controller,
        )
        self.requests = [arrival.request() for arrival in arrivals]
        self.texts = {arrival.request_id: Text(arrival) for arrival in arrivals}
        self.flying: deque[Step] = deque()
        self.depth = settings.overlap_depth
        for request, arrival in zip(self.requests, arrivals, strict=True):
            if arrival.adapts:
                allowed = self.scheduler.round_shapes.allowed(Shape.none(), arrival.most_steps)
                _, request.shape_index, request.choices = allowed
            self.scheduler.submit(request)

    def turn(self) -> list[Step]:
        """Prepare and launch what can run."""
        steps = self.scheduler.schedule()
        for step in steps:
            self.launch(step)
        return steps

    def launch(self, step: Step) -> None:
        self.scheduler.launch(step)
        delta = self.ledger.take_delta(step.plan.step)
        self.ledger.ack_delta(step.plan.step)
        texts = [self.texts[request.request_id] for request in step.requests]
        self.device.launch(step, texts, delta)
        self.flying.append(step)

    def take(self) -> np.ndarray:
        """The oldest results; its lanes' roots."""
        step = self.flying.popleft()
        roots = self.device._forwards[step.plan.step].roots
        self.scheduler.take_over(step, self.device.result(step.plan))
        return roots

    def fail(self) -> None:
        step = self.flying.popleft()
        self.device.fail(step.plan.step)
        self.scheduler.fail(step, RuntimeError("gone"))

    def run(self) -> None:
        """Run to the end, as the engine does."""
        for _ in range(1000):
            steps = self.turn()
            while self.flying and (not steps or len(self.flying) > self.depth):
                self.take()
            if not self.scheduler.requests() and not self.flying:
                break
        self.is_clean()
        for request in self.requests:
            text_tokens = self.texts[request.request_id].tokens
            assert request.tokens == text_tokens[: len(request.tokens)]

    def is_clean(self) -> None:
        self.ledger.check()
        assert not self.ledger.steps()
        for g, group in enumerate(self.ledger.groups):
            assert self.ledger.free_pages(g) == group.num_pages
        assert self.ledger.num_free_rows == self.ledger.num_rows


def arrival(number: int, prompt_len: int = 5, max_len: int = 20, **options) -> Arrival:
    return Arrival(request_id=number, turn=0, prompt_len=prompt_len, max_len=max_len, **options)
