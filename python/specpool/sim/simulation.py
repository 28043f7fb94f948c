"""The loop of an engine around a simulated device, and the laws that every turn of it must keep."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpool._core import Shape
from specpool.errors import StalePlan
from specpool.host_tier import Handle, HostTier
from specpool.request import Request
from specpool.scheduler import Scheduler, Step
from specpool.sim.controllers import simulated_controller
from specpool.sim.device import BrokenLaw, Delta, SimDevice, SimHost
from specpool.sim.source import Arrival, Scenario, Text
from specpool.sim.talks import Talks
from specpool.sim.watch import Pinned, Pins, Tally, Watch, shared_len

# Turns in which a row that could decode may be left out: its rounds in flight, a drain, a
# retraction, and what lateness adds.
_MOST_LEFT_OUT = 16


@dataclass(frozen=True, slots=True)
class _Flying:
    turn: int
    step: Step


class _Interrupted(BaseException):
    """Ctrl-C."""


class Simulation:
    """One scenario, run to its end.

    Args:
        scenario: what comes, and what goes wrong.
        check: 0 = requests' ends and texts alone; 1 = also the pools' sums and the laws of each
            turn; 2 = also a full audit of the ledger each turn, and every slot that a forward
            touches.
        keeps_trace: write down what happens, in `trace`.
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
        self._candidates = () if controller is None else controller.candidates
        self._scheduler = Scheduler(
            self._ledger,
            max_batch=settings.max_batch,
            prefill_tokens=settings.prefill_tokens,
            keeps_draft_kv=settings.keeps_draft_kv,
            reads_tokens=settings.reads_tokens,
            headroom=settings.headroom,
            max_idle=settings.max_sessions,
            idle_pages=settings.session_pages,
            host=self._host,
            token_seconds=lambda: 0.3,
            controller=controller,
            before_release=self._check_need,
        )
        self.tally = Tally(scenarios=1)
        self._turn = 0
        self._flying: deque[_Flying] = deque()
        self._to_come = deque(arrival for arrival in scenario.arrivals if not arrival.session)
        self._talks = Talks(
            [arrival for arrival in scenario.arrivals if arrival.session],
            self._ledger,
            self._scheduler.conversations,
            settings,
        )
        self._faults = {fault.step: fault.kind for fault in scenario.faults}
        self._watches: dict[int, Watch] = {}  # by request id: those that have not ended
        self._ended: list[Watch] = []
        self._admissions = 0
        self._has_samples = any(arrival.sample_of for arrival in scenario.arrivals)
        self._pins = Pins(self._ledger)
        self._begins_anew: Request | None = None
        self._idle_turns = 0  # since the last new token or end of a request
        self._P = np.array(settings.page_sizes)

    def run(self, most_rounds: int | None = None) -> Tally:
        """Run to the end, or for so many rounds.

        Raises:
            BrokenLaw: or any error of the scheduler's or the ledger's.
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

    # --- the loop, as the engine has it ---------------------------------------------------------

    def _one_turn(self) -> None:
        self._turn += 1
        steps: list[Step] = []
        try:
            self._come_and_go()
            steps = self._schedule()
            for step in steps:
                self._launch(step)
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
            self._is_empty("after an interrupt")
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
            assert talk.conversation is not None
            talk.conversation.turn, talk.start = request, 0
            self._scheduler.submit(request)
        for pinned in list(self._pins.kept):
            arrival = pinned.watch.arrival
            if arrival.unpin_after is not None and self._turn > arrival.turn + arrival.unpin_after:
                self._unpin(pinned)
        for watch in self._watches.values():
            after = watch.arrival.abort_after
            if after is not None and self._turn > watch.came_at + after:
                if watch.request.finish_reason is None:
                    self._note(f"request {watch.arrival.request_id} is aborted")
                    watch.may_end.add("abort")
                    self._scheduler.abort(watch.request)
                    self._scheduler.abort(watch.request)  # twice is once

    def _watch(self, arrival: Arrival) -> Request:
        """Somebody comes."""
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

    def _unpin(self, pinned: Pinned) -> None:
        self._note(f"the text of request {pinned.watch.arrival.request_id} is pinned no longer")
        self._pins.kept.remove(pinned)
        self._scheduler.pins.drop(pinned.pin)
        self._scheduler.pins.drop(pinned.pin)  # twice is once

    def _schedule(self) -> list[Step]:
        num_retracted = self._scheduler.num_retracted
        before = [(w, w.request.epoch) for w in self._watches.values() if w.request.row]
        self._talks.look()
        steps = self._scheduler.schedule()
        self.tally.switches = self._scheduler.round_shapes.switch_ct
        pinned = self._pins.look()
        if len(self._pins.kept) < len(pinned):
            self._check_drop(pinned)
        if not steps and not self._flying and self._scheduler.requests():
            raise BrokenLaw("livelock: nothing can run, and nothing is in flight")
        self.tally.rounds += bool(steps)
        if self.check:
            if self._scheduler.num_retracted > num_retracted:
                self._check_retraction(before, steps)
            self._check_admission(pinned)
        return steps

    def _launch(self, step: Step) -> None:
        number = step.plan.step
        try:
            self._scheduler.launch(step)
        except StalePlan:
            self._note(f"step {number} is stale")
            self._scheduler.cancel(step)
            return
        self._note(
            f"step {number}: {step.plan.kind} of "
            + ", ".join(f"{r.request_id} (row {r.row})" for r in step.requests)
        )
        if self.check:
            self._check_step(step)
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
        self._note(f"step {step.plan.step} gives {[len(tokens) for tokens in result.tokens]}")
        pinning = [(r, self._pins.lines(r)) for r in step.requests if r.wants_pin and r.row]
        samples = [sibling for request in step.requests for sibling in request.siblings]
        try:
            self._scheduler.finish(step, result)
        finally:
            for request, lines in pinning:
                if request.pin is not None:
                    self._note(f"request {request.request_id} is pinned")
                    self._pins.add(self._watches[request.request_id], request.pin, lines)
                    self.tally.pins += 1
        for sibling in samples:
            if sibling.row and sibling.request_id in self._watches:  # it has all but the last token
                self._note(f"request {sibling.request_id} is forked (row {sibling.row})")
                self._admit(self._watches[sibling.request_id], (sibling.prompt_len - 1,))
                self.tally.forks += 1

    def _come_back(self, step: Step, handles: list[Handle]) -> None:
        self._note(f"step {step.plan.step} brings {[r.request_id for r in step.requests]} back")
        lanes = [*zip(step.requests, handles, step.plan.epochs.tolist(), strict=True)]
        stand = [r.epoch == epoch and bool(r.row) for r, _, epoch in lanes]
        self._scheduler.finish(step, self._device.result(step.plan))
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

    # --- the laws -------------------------------------------------------------------------------

    def _admit(self, watch: Watch, starts: Sequence[int]) -> None:
        """It has got a row."""
        self._admissions += 1
        watch.admission = self._admissions
        watch.taken = watch.request.row, watch.request.epoch
        watch.last_step, watch.starts = self._turn, starts

    def _check_admission(self, pinned: list[Pinned]) -> None:
        """Nobody waits who comes before somebody admitted now; there are not too many.

        `pinned` were so before; some may have been dropped since.
        """
        admitted, waiting = [], []
        for watch in self._watches.values():
            if not watch.request.row:
                watch.admission, watch.taken = 0, None
                if watch.request.finish_reason is None:
                    waiting.append(watch)
            elif watch.taken != (watch.request.row, watch.request.epoch):
                admitted.append(watch)
        if admitted:
            if self._has_samples:
                forks = {r.request_id for w in self._watches.values() for r in w.request.siblings}
                waiting = [w for w in waiting if w.arrival.request_id not in forks]
            admitted.sort(key=lambda watch: watch.order)
            for watch in admitted:
                tokens = watch.request.tokens
                starts = {shared_len(tokens, pins) for pins in (pinned, self._pins.kept)}
                found = self._talks.start(watch)
                if watch.request.handle is not None:
                    found = (0,)
                self._admit(watch, tuple(starts) if found is None else found)
            self._note(f"admitted: {[w.arrival.request_id for w in admitted]}")
            first = min(waiting, key=lambda watch: watch.order, default=None)
            if first is not None and first.order < admitted[-1].order:
                raise BrokenLaw(
                    f"request {admitted[-1].arrival.request_id} was admitted before request "
                    f"{first.arrival.request_id}, retracted {first.request.num_retractions} times"
                )
        if self._scheduler.num_running > self.scenario.settings.max_batch:
            raise BrokenLaw(f"{self._scheduler.num_running} requests run at once")

    def _check_drop(self, pinned: list[Pinned]) -> None:
        """Some of these pins were dropped to make room: the oldest, and nothing was in flight."""
        num_gone = len(pinned) - len(self._pins.kept)
        self.tally.dropped_pins += num_gone
        self._note(f"{num_gone} pins are dropped")
        if pinned[num_gone:] != self._pins.kept:
            raise BrokenLaw(f"{num_gone} pins were dropped, but they are not the oldest")
        if self._flying:
            raise BrokenLaw("a pin is dropped while results are still to come")

    def _check_retraction(self, before: list[tuple[Watch, int]], steps: list[Step]) -> None:
        """Whoever was retracted is the last admitted of the least priority; one at least stays.

        `before` are those that ran, and the epochs of their rows; `steps` what runs now.
        """
        kept = [w for w, epoch in before if w.request.row and w.request.epoch == epoch]
        gone = [w for w, _ in before if w not in kept and w.request.finish_reason is None]
        self._note(f"retracted: {[w.arrival.request_id for w in gone]}")
        if not kept and len(gone) == 1 and self._begins_anew == gone[0].request:
            return
        users = {id(request) for step in steps for request in step.requests}
        for victim in gone:
            if victim.request.row and users.isdisjoint(id(w.request) for w in kept):
                raise BrokenLaw(
                    f"request {victim.arrival.request_id} was retracted, and has a row again "
                    "before anybody could use its pages"
                )
            for other in kept:
                if (-other.arrival.priority, other.admission) > (
                    -victim.arrival.priority,
                    victim.admission,
                ):
                    raise BrokenLaw(
                        f"request {victim.arrival.request_id} is retracted, not request "
                        f"{other.arrival.request_id}, which came later or counts less"
                    )
        if not kept and before:
            raise BrokenLaw("every running request was retracted")
        if self._pins.kept:
            raise BrokenLaw("a request is retracted, and a pinned text kept")

    def _check_need(self, victim: Request) -> None:
        """Whoever is retracted had to be: nothing is in flight, and what comes next has no room."""
        if victim.finish_reason is not None or not self.check:
            return
        # Alone, on what it shares: what it shares is in its way.
        alone = self._scheduler.num_running == 1 and victim.shared_len > 0
        self._begins_anew = victim if alone else None
        if self._flying:
            raise BrokenLaw("a request is retracted while results are still to come")
        ledger = self._ledger
        running = [r for r in self._scheduler.requests() if r.row]
        ready = [r for r in running if r.prefilled_len == r.prefill_len]
        if ready:
            rows = [r.row for r in ready]
            slots = ledger.tokens_required(rows, self._scheduler.round_shapes.latest(rows))
            need = slots // self._P
        else:
            first = running[0]
            left = first.prefill_len - first.prefilled_len - bool(first.siblings)
            end = first.prefilled_len + min(left, self.scenario.settings.prefill_tokens)
            held = np.array([ledger.allocated_len(g)[first.row] for g in range(len(self._P))])
            need = -(-np.maximum(end - held, 0) // self._P)
        free = [ledger.free_pages(g) for g in range(len(self._P))]
        reclaimable = np.array([ledger.reclaimable_pages(g) for g in range(len(self._P))])
        # A row that a turn has taken is idle in the ledger up to its first step.
        is_taken = ledger.idle[[r.row for r in running]].any()
        if (reclaimable[need > free] > 0).any() and not is_taken:
            raise BrokenLaw(
                f"request {victim.request_id} is retracted, and sessions keep "
                f"{reclaimable.tolist()} pages between their turns"
            )
        if (need <= free).all():
            raise BrokenLaw(
                f"request {victim.request_id} is retracted, though the next step needs "
                f"{need.tolist()} pages and {free} are free"
            )

    def _check_step(self, step: Step) -> None:
        """A plan is of the rows that its requests have, within the limits."""
        plan, settings = step.plan, self.scenario.settings
        rows, epochs, los = plan.rows.tolist(), plan.epochs.tolist(), plan.lo.tolist()
        begins = plan.start.tolist()
        shapes = plan.shapes.tolist()
        for i, request in enumerate(step.requests):
            if (request.row, request.epoch) != (rows[i], epochs[i]):
                raise BrokenLaw(
                    f"step {plan.step} has row {rows[i]} at epoch {epochs[i]} for request "
                    f"{request.request_id}, which has row {request.row} at {request.epoch}"
                )
            if request.request_id not in self._watches:
                raise BrokenLaw(f"step {plan.step} has request {request.request_id}, which ended")
            watch = self._watches[request.request_id]
            watch.last_step = self._turn
            if plan.kind == "extend":
                if watch.starts and begins[i] not in watch.starts:
                    raise BrokenLaw(
                        f"request {request.request_id} is prefilled from {begins[i]} on, it shares "
                        f"{watch.starts} tokens"
                    )
                watch.starts = ()
                continue
            wanted = request.shape_index
            if request.choices is not None:
                assert step.choice is not None
                wanted = request.choices[self._candidates.index(step.choice.shape)]
            most = watch.arrival.most_steps
            if most is not None and (steps := self._ledger.shapes[shapes[i]].num_steps) > most:
                raise BrokenLaw(
                    f"request {request.request_id} drafts {steps} steps, {most} steps at most"
                )
            if shapes[i] != wanted:
                raise BrokenLaw(
                    f"request {request.request_id} runs with shape {shapes[i]}, not {wanted}"
                )
            if settings.reads_tokens and shapes[i]:
                known = len(request.tokens) - 1
                if not los[i] == plan.hi[i] == known:
                    raise BrokenLaw(
                        f"step {plan.step} drafts from {known} tokens of request "
                        f"{request.request_id}, its root is in {los[i]} .. {plan.hi[i]}"
                    )
        num_tokens = int((plan.new_len - plan.start).sum()) if plan.kind == "extend" else 0
        if num_tokens > settings.prefill_tokens and step.handles is None:
            raise BrokenLaw(f"step {plan.step} prefills {num_tokens} tokens")

    def _look_around(self, has_launched: bool) -> None:
        """After a turn: who has ended, does everybody get on, do the sums hold."""
        self._idle_turns += 1
        for watch in list(self._watches.values()):
            request = watch.request
            num_tokens = len(request.tokens)
            if num_tokens != watch.num_tokens:
                is_cut = watch.arrival.stop_text is not None and request.finish_reason == "stop"
                if num_tokens < watch.num_tokens and not is_cut:
                    raise BrokenLaw(
                        f"request {request.request_id} had {watch.num_tokens} tokens, and has "
                        f"{num_tokens}"
                    )
                watch.num_tokens, self._idle_turns = num_tokens, 0
            if request.finish_reason is not None:
                self._idle_turns = 0
                self._check_ended(watch)
                self._talks.ends(watch, self._turn, self.tally)
                del self._watches[watch.arrival.request_id]
                self._ended.append(watch)
                self.tally.tokens += request.num_output_tokens
                self.tally.aborts += request.finish_reason == "abort"
                self.tally.retractions += request.num_retractions
            elif not has_launched or not request.row or request.prefilled_len < request.prefill_len:
                watch.last_step = self._turn
            elif self.check and self._turn - watch.last_step > _MOST_LEFT_OUT:
                raise BrokenLaw(
                    f"request {request.request_id} could decode, and was left out for "
                    f"{self._turn - watch.last_step} turns"
                )
        self._check_progress()
        self._talks.check()
        if self.check >= 2:
            self._ledger.check()
            if self._host is not None:
                self._host.check()
        if self.check:
            self._check_sums()

    def _check_progress(self) -> None:
        """Between two new tokens lies no more than everybody's prefill."""
        tokens = sum(watch.num_tokens for watch in self._watches.values())
        chunks = tokens // self.scenario.settings.prefill_tokens + len(self._watches)
        if self._idle_turns > 8 + 4 * chunks:
            raise BrokenLaw(f"livelock: no new token for {self._idle_turns} turns")

    def _check_sums(self) -> None:
        """Every page is free, fenced, a running row's or a pin's; every request waits or runs."""
        running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
        for watch in (
            self._watches.values() if self._has_samples else ()
        ):  # they wait with the first
            waiting += sum(r.finish_reason is None for r in watch.request.siblings)
        if running + waiting != len(self._watches):
            raise BrokenLaw(
                f"{running} requests run and {waiting} wait, {len(self._watches)} have not ended"
            )
        rows = [watch.request.row for watch in self._watches.values() if watch.request.row]
        if len(rows) != running or len(set(rows)) != running:
            raise BrokenLaw(f"{running} requests run in rows {rows}")
        idle = self._talks.idle_rows
        if not set(idle).isdisjoint(rows):
            raise BrokenLaw(f"rows {rows} run and rows {idle} are idle at once")
        settings, rows = self.scenario.settings, rows + idle
        if len(idle) > settings.max_sessions:
            raise BrokenLaw(f"{len(idle)} sessions keep KV, {settings.max_sessions} may")
        for g, num_pages in enumerate(settings.num_pages):
            held = int(self._ledger.allocated_len(g)[rows].sum()) // int(self._P[g])
            if settings.windows[g] is not None:  # checkpoints are held outside the table
                held = self._num_held(g, rows)
            elif self.tally.forks or self.tally.pins or self.tally.session_forks:
                held = self._pins.num_held(g, rows)
            free, fenced = self._ledger.free_pages(g), self._ledger.fenced_pages(g)
            if free + fenced + held != num_pages:
                raise BrokenLaw(
                    f"group {g}: {free} pages free, {fenced} fenced, {held} held by running "
                    f"requests, {num_pages} in all"
                )

    def _check_ended(self, watch: Watch) -> None:
        """It ended as it would alone, or by what was done to it; its text is its own."""
        request, reason = watch.request, watch.request.finish_reason
        name = f"request {watch.arrival.request_id}"
        end, planned = watch.arrival.end
        num_tokens = len(request.tokens)
        if request.tokens != watch.text.tokens[:num_tokens]:
            at = next(i for i in range(num_tokens) if request.tokens[i] != watch.text.tokens[i])
            raise BrokenLaw(f"{name} speaks otherwise than alone, from position {at} on")
        if watch.arrival.is_pin and planned == reason and not self._fills_pages(watch.arrival):
            raise BrokenLaw(f"{name} is pinned with {watch.arrival.prompt_len} tokens")
        if reason == planned and num_tokens == end and request.error is None:
            self.tally.stop_strings += request.watch is not None and request.watch.hit is not None
            return
        if reason in watch.may_end and num_tokens <= watch.arrival.most_tokens:
            return
        if watch.arrival.is_pin and request.error == "interrupted":  # while it was being pinned
            return
        if watch.arrival.is_pin and not self._fills_pages(watch.arrival) and reason == "error":
            return
        raise BrokenLaw(
            f"{name} ended after {num_tokens} tokens by {reason} ({request.error}), alone it would "
            f"after {end} by {planned}; besides, {sorted(watch.may_end)} may end it"
        )

    def _fills_pages(self, arrival: Arrival) -> bool:
        """Whether the prompt fills a page in every group."""
        return all(arrival.prompt_len >= P for P in self.scenario.settings.page_sizes)

    def _is_empty(self, when: str) -> None:
        """Nothing is held and nothing fenced but what is pinned."""
        ledger = self._ledger
        free = tuple(ledger.free_pages(g) for g in range(len(self._P)))
        idle = self._talks.idle_rows
        if self._pins.kept or idle:
            free = tuple(n + self._num_held(g, idle) for g, n in enumerate(free))
        num_free_rows = ledger.num_free_rows + len(idle)
        if free != self.scenario.settings.num_pages or num_free_rows != ledger.num_rows:
            raise BrokenLaw(
                f"leak {when}: {free} of {self.scenario.settings.num_pages} pages and "
                f"{ledger.num_free_rows} of {ledger.num_rows} rows are free"
            )
        if ledger.steps():
            raise BrokenLaw(f"{when} steps are in flight: {ledger.steps()}")

    def _num_held(self, g: int, rows: list[int]) -> int:
        """Pages of pins and these rows; of a window group, checkpoints may keep some more."""
        window = self.scenario.settings.windows[g]
        if window is None:
            return self._pins.num_held(g, rows)
        held = int((self._ledger.ownership_map(g)[2][1:] > 0).sum())
        pages = self._ledger.page_table(g)[rows]
        in_table = len(np.unique(pages[pages > 0]))
        most = in_table + len(rows) * (-(-(window - 1) // int(self._P[g])) + 1)
        if not in_table <= held <= most:
            raise BrokenLaw(
                f"group {g}: {held} pages are held, rows {rows} have {in_table} in the table, and "
                f"with their checkpoints {most} at most"
            )
        return held

    def _check_end(self) -> None:
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
        self._is_empty("at the end")
        for pinned in list(self._pins.kept):
            self._unpin(pinned)
        self._is_empty("with nothing pinned")
        for watch in self._ended:
            if len(watch.request.tokens) != watch.num_tokens:
                raise BrokenLaw(f"request {watch.arrival.request_id} went on after its end")

    def _note(self, event: str) -> None:
        if self._keeps_trace:
            self.trace.append(f"turn {self._turn}: {event}")
