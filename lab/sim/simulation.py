"""`Simulation`: runs a scenario on a simulated device and checks the laws after every turn."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from lab.sim.arrivals import Arrival, Text
from lab.sim.broken_law import BrokenLaw
from lab.sim.controllers import simulated_controller
from lab.sim.device import Delta, SimDevice, SimHost
from lab.sim.indexed import Indexed
from lab.sim.laws import Laws
from lab.sim.settings import Settings
from lab.sim.source import Scenario
from lab.sim.talks import Talks
from lab.sim.watch import Pinned, Pins, Tally, Watch
from specpool._core import Shape
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step
from specpool.errors import StalePlan


@dataclass(frozen=True, slots=True)
class _Flying:
    turn: int
    step: Step


class _Interrupted(BaseException):
    """A simulated Ctrl-C."""


class Simulation:
    """A run of one scenario.

    Args:
        scenario: the requests and the faults.
        check: 0 checks the ends and texts of requests; 1 also the pools' sums and the laws of each
            turn; 2 also a full audit of the ledger each turn, and every slot that a forward
            touches.
        keeps_trace: record what happens in `trace`.
    """

    def __init__(self, scenario: Scenario, check: int = 2, *, keeps_trace: bool = False) -> None:
        self.scenario, self.check = scenario, check
        self.trace: list[str] = []
        self._keeps_trace = keeps_trace
        settings = scenario.settings
        rng = self._rng = random.Random(scenario.seed)
        self._ledger = settings.ledger()
        self._device = SimDevice(self._ledger, settings, rng, has_memory=check >= 2)
        self._host = None
        if settings.host_pages:
            self._host = HostTier(self._ledger, SimHost(self._device, settings, rng))
        controller = simulated_controller(settings, scenario.seed)
        self._scheduler = Scheduler(
            self._ledger,
            _scheduler_config(settings),
            host=self._host,
            controller=controller,
            is_promising=self._is_promising if settings.mixes_drafters else None,
            before_release=lambda victim: self._laws.check_need(
                victim, is_flying=bool(self._flying)
            ),
        )
        self._scheduler.handles.token_seconds = 0.3
        self.tally = Tally(scenarios=1)
        self._turn = 0
        self._flying: deque[_Flying] = deque()
        self._indexed = Indexed(self._ledger, is_on=settings.prefix_cache)
        self._to_come = deque(arrival for arrival in scenario.arrivals if not arrival.session)
        self._talks = Talks(
            [arrival for arrival in scenario.arrivals if arrival.session],
            self._ledger,
            self._scheduler.conversations,
            settings,
            self._indexed,
        )
        self._faults = {fault.step: fault.kind for fault in scenario.faults}
        self._watches: dict[int, Watch] = {}  # by request id, for those that have not ended
        self._ended: list[Watch] = []
        self._pins = Pins(self._ledger)
        self._laws = Laws(
            scenario=scenario,
            check=check,
            ledger=self._ledger,
            scheduler=self._scheduler,
            host=self._host,
            candidates=() if controller is None else controller.candidates,
            talks=self._talks,
            pins=self._pins,
            indexed=self._indexed,
            watches=self._watches,
            tally=self.tally,
            note=self._note,
        )

    def run(self, most_rounds: int | None = None) -> Tally:
        """Run to the end, or until `most_rounds` turns have launched a step.

        Raises:
            BrokenLaw: a law does not hold. Errors of the scheduler and the ledger pass through.
        """
        while self._to_come or self._watches or self._flying or not self._talks.is_over:
            if most_rounds is not None and self.tally.rounds >= most_rounds:
                return self.tally
            if not self._watches and not self._flying:
                comes = [self._to_come[0].turn] if self._to_come else []
                comes += [] if self._talks.is_over else [self._talks.next_due]
                self._turn = max(self._turn, min(comes))
            self._one_turn()
        self._check_end()
        return self.tally

    def _one_turn(self) -> None:
        self._turn += 1
        steps: list[Step] = []
        try:
            self._come_and_go()
            steps = self._schedule()
            behind = deque(steps)
            while behind:
                self._launch(behind.popleft(), behind)
            depth = self.scenario.settings.overlap_depth if steps else 1
            if steps and self.scenario.settings.is_late:
                depth += self._rng.randint(-1, 1)  # results come early or late
            while self._flying and self._flying[0].turn <= self._turn - max(depth, 0):
                self._take_over(self._flying.popleft().step)
        except _Interrupted:
            self._note("interrupted")
            for watch in self._watches.values():
                if watch.request.row:
                    watch.may_end.add("abort")
            self._flying.clear()
            self._device.reset()
            self._talks.lose()
            self._scheduler.recover("interrupted")
            self._pins.look()
            self._laws.check_empty("after an interrupt")
        self._look_around(bool(steps))

    def _come_and_go(self) -> None:
        while self._to_come and self._to_come[0].turn < self._turn:
            arrival = self._to_come.popleft()
            request = self._watch(arrival)
            while self._to_come and self._to_come[0].is_sample(arrival):
                request.siblings.append(self._watch(self._to_come.popleft()))
            self._scheduler.submit(request)
        for talk, arrival in self._talks.come(self._turn, self.tally, self._drain):
            request = self._watch(arrival)
            request.conversation, talk.watch = talk.conversation, self._watches[arrival.request_id]
            talk.start = 0
            self._scheduler.submit(request)
        for pinned in list(self._pins.pinned):
            arrival = pinned.watch.arrival
            if arrival.unpin_after is not None and self._turn > arrival.turn + arrival.unpin_after:
                self._unpin(pinned)
        forgets = self.scenario.settings.forgets
        if forgets and self._rng.random() < forgets:
            self._scheduler.prefix_cache.forget(self._rng.choice([None, b"", b"a"]))
        for watch in self._watches.values():
            after = watch.arrival.abort_after
            if after is not None and self._turn > watch.came_at + after:
                if watch.request.finish_reason is None:
                    self._note(f"request {watch.arrival.request_id} is aborted")
                    watch.may_end.add("abort")
                    self._scheduler.abort(watch.request)
                    self._scheduler.abort(watch.request)  # a second call does nothing

    def _watch(self, arrival: Arrival) -> Request:
        """Record a request that arrives."""
        request = arrival.request()
        if arrival.adapts:
            of_round = self._scheduler.round_shapes
            _, request.shape_index, request.choices = of_round.allowed(
                Shape.none(), arrival.most_steps
            )
        if not self._scheduler.fits(request):
            raise BrokenLaw(f"{arrival} does not fit pools of a full row and more")
        came_at = self._turn if arrival.session else arrival.turn
        self._watches[arrival.request_id] = Watch(arrival, request, Text(arrival), came_at)
        self.tally.requests += 1
        self._note(f"request {arrival.request_id} comes")
        return request

    def _is_promising(self, request: Request) -> bool:
        watch = self._watches[request.request_id]
        watch.judged = request.row, request.epoch, len(request.tokens)
        return watch.arrival.is_promising(len(request.tokens))

    def _unpin(self, pinned: Pinned) -> None:
        self._note(f"the text of request {pinned.watch.arrival.request_id} is pinned no longer")
        self._pins.pinned.remove(pinned)
        self._scheduler.pins.drop(pinned.pin)
        self._scheduler.pins.drop(pinned.pin)  # a second call does nothing

    def _schedule(self) -> list[Step]:
        num_retracted = self._scheduler.num_retracted
        before = [
            (w, (w.request.row, w.request.epoch)) for w in self._watches.values() if w.request.row
        ]
        self._talks.look()
        if self._scheduler.num_waiting:
            self._indexed.look()
        steps = self._scheduler.schedule()
        if self.scenario.settings.mixes_drafters:
            for watch in self._watches.values():
                watch.planned = watch.judged, len(watch.request.tokens)
        if self._scheduler.num_retracted > num_retracted:
            self._indexed.look_again()  # a request may be admitted again, and find its own tokens
        self.tally.switches = self._scheduler.round_shapes.switch_ct
        pinned = self._pins.look()
        if len(self._pins.pinned) < len(pinned):
            self._laws.check_drop(pinned, is_flying=bool(self._flying))
        if not steps and not self._flying and self._scheduler.requests():
            raise BrokenLaw("livelock: nothing can run, and nothing is in flight")
        self.tally.rounds += bool(steps)
        if self.check:
            if self._scheduler.num_retracted > num_retracted:
                self._laws.check_retraction(before, steps)
            self._laws.check_admission(pinned, self._turn)
        return steps

    def _launch(self, step: Step, behind: deque[Step]) -> None:
        number = step.plan.step
        try:
            self._scheduler.launch(step)
        except StalePlan:
            self._note(f"step {number} is stale")
            for flying in reversed([step, *behind]):
                self._scheduler.cancel(flying)
            behind.clear()
            return
        pairs = zip(step.requests, step.plan.shapes.tolist(), strict=True)
        self.tally.mixed_rounds += len({r.reads_tokens for r, shape in pairs if shape}) > 1
        self._note(
            f"step {number}: {step.plan.kind} of "
            + ", ".join(f"{r.request_id} (row {r.row})" for r in step.requests)
        )
        if self.check:
            self._laws.check_step(step, self._turn)
        delta = self._ledger.take_delta(number)
        self._ledger.ack_delta(number)
        texts = [self._watches[request.request_id].text for request in step.requests]
        if step.handles is not None:
            self._reload(step, texts, delta)
            return
        self._device.launch(step, texts, delta)
        if self._faults.get(number) == "launch":
            self._fail(step)
        else:
            self._flying.append(_Flying(self._turn, step))

    def _reload(self, step: Step, texts: list[Text], delta: Delta) -> None:
        host, handles = self._host, step.handles
        assert host is not None and handles is not None
        try:
            self._device.launch(step, texts, delta, lambda: host.restore(step.plan, handles))
        except RuntimeError:
            self._fail(step)
        else:
            self._flying.append(_Flying(self._turn, step))

    def _take_over(self, step: Step) -> None:
        fault = self._faults.get(step.plan.step)
        if fault == "interrupt":
            raise _Interrupted
        if step.handles is not None:
            self._come_back(step, step.handles)
            return
        if fault == "result":
            self._fail(step)
            return
        result = self._device.result(step.plan, not_finite=fault == "not_finite")
        for request, not_finite in zip(step.requests, result.not_finite, strict=True):
            if not_finite and request.request_id in self._watches:
                self._watches[request.request_id].may_end.add("error")
        self._note(f"step {step.plan.step} gives {result.accept_len.tolist()}")
        pinning = [(r, self._pins.lines(r)) for r in step.requests if r.wants_pin and r.row]
        samples = [sibling for request in step.requests for sibling in request.siblings]
        try:
            self._scheduler.take_over(step, result)
        finally:
            for request, lines in pinning:
                if request.pin is not None:
                    self._note(f"request {request.request_id} is pinned")
                    self._pins.add(self._watches[request.request_id], request.pin, lines)
                    self.tally.pins += 1
        for sibling in samples:
            if sibling.row and sibling.request_id in self._watches:  # it lacks only the last token
                self._note(f"request {sibling.request_id} is forked (row {sibling.row})")
                watch = self._watches[sibling.request_id]
                lens = (sibling.prompt_len - 1,)
                if self.scenario.settings.state_flush:  # the state has a token less
                    lens = (max(sibling.prompt_len - 2, 0),)
                self._laws.admit(watch, lens, self._turn)
                self.tally.forks += 1

    def _come_back(self, step: Step, handles: list[Handle]) -> None:
        self._note(f"step {step.plan.step} brings {[r.request_id for r in step.requests]} back")
        lanes = [*zip(step.requests, handles, step.plan.epochs.tolist(), strict=True)]
        stand = [r.epoch == epoch and bool(r.row) for r, _, epoch in lanes]
        self._scheduler.take_over(step, self._device.result(step.plan))
        for (request, handle, _), stands in zip(lanes, stand, strict=True):
            if not stands or request.handle is not None:
                continue
            watch, length = self._watches[request.request_id], handle.length
            if self.scenario.settings.keeps_draft_kv and request.shape_index:
                length = min(length, handle.drafted_len)
            length = min(length, len(request.tokens) - 1, self._talks.common_len(watch))
            start, has_window = request.prefilled_len, self.scenario.settings.window is not None
            if start > length or (start < length and not has_window):
                raise BrokenLaw(
                    f"request {request.request_id} came back with {handle.length} tokens, and is "
                    f"prefilled from {start} on, not {length}"
                )
            watch.taken, watch.starts = (request.row, request.epoch), (start,)
            watch.admitted_len = len(request.tokens)

    def _drain(self) -> None:
        while self._flying:
            self._take_over(self._flying.popleft().step)

    def _fail(self, step: Step) -> None:
        while self._flying and self._flying[0].step.plan.step < step.plan.step:
            self._take_over(self._flying.popleft().step)
        self._note(f"step {step.plan.step} fails")
        self.tally.device_errors += 1
        for request, row, epoch in zip(
            step.requests, step.plan.rows, step.plan.epochs, strict=True
        ):
            if (request.row, request.epoch) == (row, epoch):
                self._watches[request.request_id].may_end.add("error")
        self._device.fail(step.plan.step)
        self._talks.lose()
        self._scheduler.fail(step, RuntimeError("a simulated fault"))

    def _look_around(self, has_launched: bool) -> None:
        """Find the requests that ended in a turn, and check the laws."""
        for watch in list(self._watches.values()):
            self._laws.check_each(watch, self._turn, has_launched=has_launched)
            request = watch.request
            if request.finish_reason is not None:
                self._talks.ends(watch, self._turn, self.tally)
                del self._watches[watch.arrival.request_id]
                self._ended.append(watch)
                self.tally.tokens += request.num_output_tokens
                self.tally.aborts += request.finish_reason == "abort"
                self.tally.retractions += request.num_retractions
        self._laws.check_turn()

    def _check_end(self) -> None:
        if (texts := self._scheduler.prefix_cache.stats()) is not None:
            self.tally.reused += texts.hit_ct
            self.tally.from_host += texts.host_ct
            self.tally.evictions += texts.eviction_ct
        self.tally.dropped_sessions += self._scheduler.conversations.drop_ct
        if self._host is not None:
            stats = self._host.stats()
            self.tally.offloads += stats.offload_ct
            self.tally.reloads += stats.reload_ct
            self.tally.failed_copies += stats.failed_ct
            if stats.num_handles:
                raise BrokenLaw(f"at the end the host keeps {self._host.handles}")
        if self._scheduler.conversations.open:
            raise BrokenLaw(f"sessions are open: {[*self._scheduler.conversations.open]}")
        self._laws.check_empty("at the end")
        for pinned in list(self._pins.pinned):
            self._unpin(pinned)
        self._laws.check_empty("with nothing pinned")
        for watch in self._ended:
            if len(watch.request.tokens) != watch.num_tokens:
                raise BrokenLaw(f"request {watch.arrival.request_id} went on after its end")

    def _note(self, event: str) -> None:
        if self._keeps_trace:
            self.trace.append(f"turn {self._turn}: {event}")


def _scheduler_config(settings: Settings) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch=settings.max_batch,
        prefix_cache=settings.prefix_cache,
        prefill_tokens=settings.prefill_tokens,
        keeps_draft_kv=settings.keeps_draft_kv,
        reads_tokens=settings.reads_tokens,
        headroom=settings.headroom,
        max_idle=settings.max_sessions,
        idle_pages=settings.session_pages,
    )
