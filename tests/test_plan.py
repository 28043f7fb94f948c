"""`specpool plan` says what the real scheduler will do, from numbers or a model's config alone."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace

from specpool import Ledger, OutOfPages, Shape
from specpool import Plan as StepPlan
from specpool.config import EngineConfig
from specpool.plan import Fit, Plan
from specpool.plan_groups import GroupSizes, size_groups
from specpool.scheduler import Scheduler
from specpool.sim import Arrival, Settings, SimDevice, Text

MAX_BATCHES = (1, 2, 5, 12, 40)
SHAPES = [(1, 1, 2), (3, 1, 4), (7, 1, 8), (2, 2, 4), (4, 4, 16), (5, 8, 32)]


@dataclass(frozen=True)
class Case:
    """A random configuration, and requests for it, a function of its seed."""

    sizes: GroupSizes
    reads_tokens: bool
    shape: int
    num_tokens: int
    prompt_len: int
    max_len: int
    prefill_tokens: int
    headroom: int
    seed: int

    @staticmethod
    def of(seed: int) -> Case:
        rng = random.Random(seed)
        drafter = rng.choice(["eagle", "eagle", "eagle", "ngram", "none"])
        shapes = [Shape(*shape) for shape in rng.sample(SHAPES, rng.randint(1, 2))]
        config = EngineConfig(
            page_size=rng.choice([1, 2, 3, 4, 16, 64]),
            placement=rng.choice(["split", "shared"]),
            policy=rng.choice(["exact", "exact", "double_buffer"]),
            layout=rng.choice(["auto", "dense", "holey", "holey"]),
            max_batch=rng.choice(MAX_BATCHES),
            overlap_depth=rng.randint(0, 1),
            num_pages=None,
        )
        max_context_len = rng.choice([2, 3, 9, 40, 100])
        target_bytes, draft_bytes = rng.choice([(64, 2), (4, 4), (2, 8)])
        how = {
            "target_bytes": target_bytes,
            "draft_bytes": draft_bytes if drafter == "eagle" else 0,
            "shapes": shapes if drafter != "none" else [],
            "max_context_len": max_context_len,
        }
        least = size_groups(replace(config, num_pages=1), **how, kv_bytes=0)
        row_bytes = sum(group.pages_per_row * group.page_bytes for group in least.groups)
        sinks = sum(group.page_bytes for group in least.groups)
        if rng.random() < 0.2:
            most = max(group.pages_per_row for group in least.groups)
            config = replace(config, num_pages=int(most * rng.choice([1, 1.3, 2.5, 6])))
        rows = rng.choice([1, 1.01, 1.5, 2.2, 3, 6.7, 15, 60])
        sizes = size_groups(config, **how, kv_bytes=sinks + int(rows * row_bytes) + 1)
        max_len = rng.randint(2, max_context_len)
        return Case(
            sizes,
            drafter == "ngram",
            rng.randrange(len(sizes.shapes)),
            rng.randint(1, max_context_len - 1),
            rng.randint(1, max_len - 1),
            max_len,
            rng.choice([5, 64, 4096]),
            rng.choice([0, 0, 4, 64]),
            seed,
        )

    @property
    def plan(self) -> Plan:
        return Plan(self.sizes, reads_tokens=self.reads_tokens, headroom=self.headroom)

    def at_once(self) -> Fit:
        return self.plan.at_once(self.num_tokens, self.shape)

    def to_the_end(self) -> Fit:
        return self.plan.to_the_end(self.prompt_len, self.max_len, self.shape)

    def arrival(self, request_id: int, accept_rate: float) -> Arrival:
        return Arrival(
            request_id=request_id,
            turn=0,
            prompt_len=self.prompt_len,
            max_len=self.max_len,
            shape=self.shape,
            accept_rate=accept_rate,
        )


class Watched:
    """A ledger that counts the steps for which it had no pages."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.num_refused = ledger, 0

    def __getattr__(self, name: str):
        return getattr(self._ledger, name)

    def prepare_decode(self, *args, **options) -> StepPlan:
        return self._counting(self._ledger.prepare_decode, *args, **options)

    def prepare_extend(self, *args, **options) -> StepPlan:
        return self._counting(self._ledger.prepare_extend, *args, **options)

    def _counting(self, verb, *args, **options) -> StepPlan:
        try:
            return verb(*args, **options)
        except OutOfPages:
            self.num_refused += 1
            raise


class Server:
    """The real ledger and scheduler of a case, on the simulated device."""

    def __init__(self, case: Case, max_batch: int | None = None) -> None:
        sizes = self.sizes = case.sizes
        self.ledger = Watched(sizes.ledger())
        settings = Settings(
            page_sizes=tuple(group.page_size for group in sizes.groups),
            num_pages=tuple(group.num_pages for group in sizes.groups),
            keeps_draft_kv=sizes.keeps_draft_kv,
        )
        self.device = SimDevice(self.ledger, settings, random.Random(0), has_memory=False)
        self.scheduler = Scheduler(
            self.ledger,
            max_batch=max_batch or sizes.num_rows,
            prefill_tokens=case.prefill_tokens,
            keeps_draft_kv=sizes.keeps_draft_kv,
            reads_tokens=case.reads_tokens,
            headroom=case.headroom,
        )
        self.peak = [0] * len(sizes.groups)  # pages held, most at once
        self.rounds = self.most_running = 0

    def serve(self, arrivals: list[Arrival]) -> Server:
        """As an engine does it; all come at once."""
        texts = {arrival.request_id: Text(arrival) for arrival in arrivals}
        requests = [arrival.request() for arrival in arrivals]
        for request in requests:
            assert self.scheduler.fits(request)
            self.scheduler.submit(request)
        flying: deque = deque()
        while flying or self.scheduler.requests():
            steps = self.scheduler.schedule()
            self.most_running = max(self.most_running, self.scheduler.num_running)
            for step in steps:
                self.scheduler.launch(step)
                self.rounds += step.is_decode
                delta = self.ledger.take_delta(step.plan.step)
                self.ledger.ack_delta(step.plan.step)
                self.device.launch(step, [texts[r.request_id] for r in step.requests], delta)
            for g, group in enumerate(self.sizes.groups):
                held = group.num_pages - self.ledger.free_pages(g) - self.ledger.fenced_pages(g)
                self.peak[g] = max(self.peak[g], held)
            flying.append(steps)
            while len(flying) > self.sizes.overlap_depth or (flying and not steps):
                for step in flying.popleft():
                    self.scheduler.finish(step, self.device.result(step.plan))
        assert all(request.finish_reason == "length" for request in requests)
        return self


CASES = range(1000)


def test_scenario_50_as_many_as_planned_are_admitted():
    """More than fit are submitted; the scheduler admits as many as the plan said."""
    limits = set()
    for seed in CASES:
        case = Case.of(seed)
        fit = case.at_once()
        server = Server(case)
        asks = replace(case, prompt_len=case.num_tokens, max_len=case.sizes.max_context_len)
        for number in range(fit.num_requests + 3):
            server.scheduler.submit(asks.arrival(number + 1, 0.5).request())
        server.scheduler.schedule()
        assert server.scheduler.num_running == fit.num_requests, (seed, fit)
        limits.add(fit.limit)
    assert limits == {
        "pages of kv",
        "pages of target",
        "pages of draft",
        "pages of target and draft",
        *(f"max_batch {n}" for n in MAX_BATCHES),
    }


def test_scenario_50_as_many_as_planned_never_wait_for_a_page():
    """So many side by side; then with as many again behind them, which come as others end."""
    num_beside = 0
    for seed in CASES:
        case, rng = Case.of(seed), random.Random(seed)
        n = case.to_the_end().num_requests
        arrivals = [case.arrival(i + 1, rng.choice([0.0, 0.5, 1.0])) for i in range(2 * n)]
        server = Server(case).serve(arrivals[:n])
        assert (server.ledger.num_refused, server.scheduler.num_retracted) == (0, 0), seed
        assert server.most_running == n, seed
        assert Server(case, max_batch=n).serve(arrivals).scheduler.num_retracted == 0, seed
        num_beside += n > 1
    assert num_beside > 300


def test_scenario_50_one_more_waits_for_a_page():
    """Where pages are what binds: it is not admitted, or some round finds no pages."""
    num_waiting = num_refused = 0
    for seed in CASES:
        # In step with one another, a token a round: all are longest at once.
        case = replace(Case.of(seed), prefill_tokens=1 << 14, headroom=0)
        fit = case.to_the_end()
        if not fit.limit.startswith("pages"):
            continue
        server = Server(case)
        arrivals = [case.arrival(i + 1, 0.0) for i in range(fit.num_requests + 1)]
        server.serve(arrivals)
        is_waiting = server.most_running <= fit.num_requests
        assert is_waiting or server.ledger.num_refused, (seed, fit)
        if case.sizes.overlap_depth == 0 and not is_waiting:
            assert server.scheduler.num_retracted, (seed, fit)
        num_waiting += is_waiting
        num_refused += not is_waiting
    assert num_waiting > 100 and num_refused > 100


def test_a_request_holds_as_many_pages_as_planned_and_no_more():
    """Alone, a token a round: it passes every root."""
    num_decoded = 0
    for seed in CASES:
        case = replace(Case.of(seed), headroom=0)
        server = Server(case).serve([case.arrival(1, 0.0)])
        if server.rounds:  # a prompt and one token may be all
            assert tuple(server.peak) == case.to_the_end().pages, seed
            num_decoded += 1
    assert num_decoded > 700
