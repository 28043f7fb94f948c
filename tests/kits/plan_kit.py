"""Random configurations for `specpool plan`, and a server that runs them on the real scheduler."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace

from lab.sim import Arrival, Settings, SimDevice, Text
from specpool import Ledger, OutOfPages, Plan, Shape
from specpool.capacity.capacity import Capacity, Fit
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.engine.config import EngineConfig
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.shapes import Controller

MAX_BATCHES = (1, 2, 5, 12, 30)


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
    def of(seed: int, windows: bool = False) -> Case:
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
        max_context_len = rng.choice([2, 3, 9, 40, 80])
        target_bytes, draft_bytes = rng.choice([(64, 2), (4, 4), (2, 8)])
        how = {
            "target_bytes": {None: target_bytes},
            "draft_bytes": draft_bytes if drafter == "eagle" else 0,
            "shapes": shapes if drafter != "none" else [],
            "max_context_len": max_context_len,
        }
        prefill_tokens = rng.choice([5, 64, 4096]) if windows else None
        if prefill_tokens is not None:
            config = replace(config, prefill_tokens=prefill_tokens)
            window = rng.randint(1, max_context_len + 2)
            by_window = [{None: 16, window: 64}, {window: 32}, {None: 4, window: 4, window + 3: 9}]
            how["target_bytes"] = rng.choice(by_window)
        least = size_groups(replace(config, num_pages=1), **how, kv_bytes=0)
        row_bytes = sum(group.pages_per_row * group.page_bytes for group in least.groups)
        sinks = sum(group.page_bytes for group in least.groups)
        if rng.random() < 0.2:
            max_pages = max(group.pages_per_row for group in least.groups)
            config = replace(config, num_pages=int(max_pages * rng.choice([1, 1.3, 2.5, 6])))
        rows = rng.choice([1, 1.01, 1.5, 2.2, 3, 6.7, 15, 60])
        kv_bytes = sinks + int(rows * row_bytes) + 1
        if windows:  # a prefill step and a checkpoint are beside what one row holds
            kv_bytes += row_bytes + 2 * least.max_chunk * 100
        sizes = size_groups(config, **how, kv_bytes=kv_bytes)
        max_len = rng.randint(2, max_context_len)
        return Case(
            sizes,
            drafter == "ngram",
            rng.randrange(len(sizes.shapes)),
            rng.randint(1, max_context_len - 1),
            rng.randint(1, max_len - 1),
            max_len,
            prefill_tokens or rng.choice([5, 64, 4096]),
            rng.choice([0, 0, 4, 64]),
            seed,
        )

    @property
    def plan(self) -> Plan:
        return Capacity(self.sizes, reads_tokens=self.reads_tokens, headroom=self.headroom)

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

    def prepare_decode(self, *args, **options) -> Plan:
        return self._counting(self._ledger.prepare_decode, *args, **options)

    def prepare_extend(self, *args, **options) -> Plan:
        return self._counting(self._ledger.prepare_extend, *args, **options)

    def _counting(self, verb, *args, **options) -> Plan:
        try:
            return verb(*args, **options)
        except OutOfPages:
            self.num_refused += 1
            raise


class Server:
    """The real ledger and scheduler of a case, on the simulated device."""

    def __init__(
        self,
        case: Case,
        max_batch: int | None = None,
        *,
        prefix_cache: bool = False,
        controller: Controller | None = None,
    ) -> None:
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
            SchedulerConfig(
                max_batch=max_batch or sizes.num_rows,
                prefill_tokens=case.prefill_tokens,
                keeps_draft_kv=sizes.keeps_draft_kv,
                reads_tokens=case.reads_tokens,
                headroom=case.headroom,
                prefix_cache=prefix_cache,
            ),
            controller=controller,
        )
        self.peak = [0] * len(sizes.groups)  # pages held, most at once
        self.rounds = self.most_running = 0

    def serve(self, arrivals: list[Arrival]) -> Server:
        """Serve as an engine does; all requests come at once."""
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
                    self.scheduler.take_over(step, self.device.result(step.plan))
        assert all(request.finish_reason == "length" for request in requests)
        return self
