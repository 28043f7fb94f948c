"""`Laws`: the rules that every turn of a simulation must keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.sim.arrivals import Arrival
from lab.sim.broken_law import BrokenLaw
from lab.sim.indexed import Indexed
from lab.sim.source import Scenario
from lab.sim.talks import Talks
from lab.sim.watch import Pinned, Pins, Tally, Watch, shared_len
from specpool._core import Ledger, Shape
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step

# The most turns that may leave out a row that could decode: for its rounds in flight, a drain, a
# retraction and late results.
_MOST_LEFT_OUT = 16


@dataclass(eq=False, kw_only=True)
class Laws:
    """The laws of one simulation; each raises `BrokenLaw`.

    Attributes:
        check: see `Simulation`.
        candidates: the controller's candidates; () if there is no controller.
        watches: request id -> watch, for requests that have not ended.
        note: records what happens.
    """

    scenario: Scenario
    check: int
    ledger: Ledger
    scheduler: Scheduler
    host: HostTier | None
    candidates: Sequence[Shape]
    talks: Talks
    pins: Pins
    indexed: Indexed
    watches: dict[int, Watch]
    tally: Tally
    note: Callable[[str], None]
    _admissions: int = field(default=0, init=False)
    _begins_anew: Request | None = field(default=None, init=False)
    _num_released: int = field(default=0, init=False)  # rows in this turn
    _idle_turns: int = field(default=0, init=False)  # since the last new token or end of a request

    def __post_init__(self) -> None:
        self._has_samples = any(arrival.sample_of for arrival in self.scenario.arrivals)
        self._P = np.array(self.scenario.settings.page_sizes)

    def admit(self, watch: Watch, starts: Sequence[int], turn: int) -> None:
        """Record that a request got a row; its first prefill must begin at one of `starts`."""
        self._admissions += 1
        watch.admission = self._admissions
        watch.taken = watch.request.row, watch.request.epoch
        watch.last_step, watch.starts = turn, starts
        watch.admitted_len = len(watch.request.tokens)

    def check_admission(self, pinned: list[Pinned], turn: int) -> None:
        """Check that no waiting request precedes an admitted one, and that not too many run.

        `pinned` are the pins before the turn; some may have been dropped since.
        """
        admitted, waiting = [], []
        for watch in self.watches.values():
            if not watch.request.row:
                watch.admission, watch.taken = 0, None
                if watch.request.finish_reason is None:
                    waiting.append(watch)
            elif watch.taken != (watch.request.row, watch.request.epoch):
                admitted.append(watch)
        if admitted:
            if self._has_samples:
                forks = {r.request_id for w in self.watches.values() for r in w.request.siblings}
                waiting = [w for w in waiting if w.arrival.request_id not in forks]
            admitted.sort(key=lambda watch: watch.order)
            for watch in admitted:
                self.admit(watch, self._starts(watch, pinned), turn)
            self.note(f"admitted: {[w.arrival.request_id for w in admitted]}")
            first = min(waiting, key=lambda watch: watch.order, default=None)
            if first is not None and first.order < admitted[-1].order:
                raise BrokenLaw(
                    f"request {admitted[-1].arrival.request_id} was admitted before request "
                    f"{first.arrival.request_id}, retracted {first.request.num_retractions} times"
                )
        if self.scheduler.num_running > self.scenario.settings.max_batch:
            raise BrokenLaw(f"{self.scheduler.num_running} requests run at once")

    def _starts(self, watch: Watch, pinned: list[Pinned]) -> Sequence[int]:
        """Return how many tokens with KV a request may have found when it was admitted."""
        request, known_len = watch.request, 0
        if request.handle is not None and not request.handle.is_lent:
            return (0,)
        if not request.skips_cache:
            needs_draft = self.scenario.settings.keeps_draft_kv and bool(request.shape_index)
            known_len = self.indexed.known_len(
                request.tokens, request.salt, needs_draft=needs_draft
            )
        row_lens = self.talks.start(watch, known_len)
        if row_lens is not None:
            return row_lens
        starts = {shared_len(request.tokens, pins) for pins in (pinned, self.pins.pinned)}
        if known_len:
            starts = {max(start, known_len) for start in starts}
            if (
                self.scenario.settings.may_go_back or self.indexed.has_changed
            ):  # some of it may be gone
                return range(max(starts) + 1)
        return tuple(starts)

    def check_drop(self, pinned: list[Pinned], *, is_flying: bool) -> None:
        """Check that dropped pins were the oldest, and that nothing was in flight."""
        num_gone = len(pinned) - len(self.pins.pinned)
        self.tally.dropped_pins += num_gone
        self.note(f"{num_gone} pins are dropped")
        if pinned[num_gone:] != self.pins.pinned:
            raise BrokenLaw(f"{num_gone} pins were dropped, but they are not the oldest")
        if is_flying:
            raise BrokenLaw("a pin is dropped while results are still to come")

    def check_retraction(
        self, before: list[tuple[Watch, tuple[int, int]]], steps: list[Step]
    ) -> None:
        """Check that the last admitted of the least priority was retracted, and one request stays.

        `before` are the requests that ran, with their rows and the rows' epochs; `steps` are this
        turn's steps.
        """
        staying = [w for w, row_epoch in before if (w.request.row, w.request.epoch) == row_epoch]
        gone = [w for w, _ in before if w not in staying and w.request.finish_reason is None]
        self.note(f"retracted: {[w.arrival.request_id for w in gone]}")
        if not staying and len(gone) == 1 and self._begins_anew == gone[0].request:
            return
        users = {id(request) for step in steps for request in step.requests}
        for victim in gone:
            if victim.request.row and users.isdisjoint(id(w.request) for w in staying):
                raise BrokenLaw(
                    f"request {victim.arrival.request_id} was retracted, and has a row again "
                    "before anybody could use its pages"
                )
            for other in staying:
                if (-other.arrival.priority, other.admission) > (
                    -victim.arrival.priority,
                    victim.admission,
                ):
                    raise BrokenLaw(
                        f"request {victim.arrival.request_id} is retracted, not request "
                        f"{other.arrival.request_id}, which came later or counts less"
                    )
        if not staying and before:
            raise BrokenLaw("every running request was retracted")
        if self.pins.pinned:
            raise BrokenLaw("a request is retracted, and a pinned text kept")

    def check_need(self, victim: Request, *, is_flying: bool) -> None:
        """Check that a retraction was needed: nothing in flight, and no room for the next step."""
        self._num_released += 1  # in this turn
        if self._num_released > 8 + 2 * len(self.watches):
            raise BrokenLaw(f"livelock: {self._num_released} rows are given back in one turn")
        if victim.finish_reason is not None or not self.check:
            return
        # A request that runs alone may be short of pages because of those that it shares.
        alone = self.scheduler.num_running == 1 and victim.shared_len > 0
        self._begins_anew = victim if alone else None
        if is_flying:
            raise BrokenLaw("a request is retracted while results are still to come")
        ledger = self.ledger
        running = [r for r in self.scheduler.requests() if r.row]
        ready = [r for r in running if r.prefilled_len == r.prefill_len]
        if ready:
            rows = [r.row for r in ready]
            slots = ledger.tokens_required(rows, self.scheduler.round_shapes.latest(rows))
            need = slots // self._P
        else:
            first = running[0]
            left = first.prefill_len - first.prefilled_len - bool(first.siblings)
            end = first.prefilled_len + min(left, self.scenario.settings.prefill_tokens)
            held = np.array([ledger.allocated_len(g)[first.row] for g in range(len(self._P))])
            need = -(-np.maximum(end - held, 0) // self._P)
        free = [ledger.free_pages(g) + ledger.cached_pages(g) for g in range(len(self._P))]
        reclaimable = np.array([ledger.reclaimable_pages(g) for g in range(len(self._P))])
        # The row that a turn has taken stays idle in the ledger until its first step.
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

    def check_step(self, step: Step, turn: int) -> None:
        """Check that a plan has its requests' rows and keeps the limits."""
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
            if request.request_id not in self.watches:
                raise BrokenLaw(f"step {plan.step} has request {request.request_id}, which ended")
            watch = self.watches[request.request_id]
            watch.last_step = turn
            if plan.kind == "extend":
                if watch.starts and begins[i] not in watch.starts:
                    raise BrokenLaw(
                        f"request {request.request_id} is prefilled from {begins[i]} on, it shares "
                        f"{watch.starts} tokens"
                    )
                watch.starts = ()
                continue
            wanted = request.shape_index
            if request.choices is not None and self.scheduler.round_shapes.budget is not None:
                if shapes[i] in request.choices:
                    wanted = shapes[i]
            elif request.choices is not None:
                assert step.choice is not None
                wanted = request.choices[self.candidates.index(step.choice.shape)]
            max_steps = watch.arrival.most_steps
            if (
                max_steps is not None
                and (steps := self.ledger.shapes[shapes[i]].num_steps) > max_steps
            ):
                raise BrokenLaw(
                    f"request {request.request_id} drafts {steps} steps, {max_steps} steps at most"
                )
            if settings.mixes_drafters and request.shape_index:
                wanted = self._judged(watch, wanted)
            if shapes[i] != wanted:
                raise BrokenLaw(
                    f"request {request.request_id} runs with shape {shapes[i]}, not {wanted}"
                )
            if settings.reads_tokens and watch.arrival.reads_tokens and shapes[i]:
                known = len(request.tokens) - 1
                if not los[i] == plan.hi[i] == known:
                    raise BrokenLaw(
                        f"step {plan.step} drafts from {known} tokens of request "
                        f"{request.request_id}, its root is in {los[i]} .. {plan.hi[i]}"
                    )
        num_tokens = int((plan.new_len - plan.start).sum()) if plan.kind == "extend" else 0
        if num_tokens > settings.prefill_tokens and step.handles is None:
            raise BrokenLaw(f"step {plan.step} prefills {num_tokens} tokens")

    def _judged(self, watch: Watch, shape: int) -> int:
        """Return the shape of a round by its drafter's judgement when the round was prepared."""
        judged, num_tokens = watch.planned
        if judged != (watch.request.row, watch.request.epoch, num_tokens):
            if num_tokens == watch.admitted_len:  # no token has come since its admission
                return shape
            raise BrokenLaw(
                f"request {watch.arrival.request_id} has {num_tokens} tokens, its drafter judged "
                f"{judged[2]}"
            )
        return shape if watch.arrival.is_promising(num_tokens) else 0

    def check_each(self, watch: Watch, turn: int, *, has_launched: bool) -> None:
        """Check that a request goes on, or has ended in an allowed way."""
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
        elif not has_launched or not request.row or request.prefilled_len < request.prefill_len:
            watch.last_step = turn
        elif self.check and turn - watch.last_step > _MOST_LEFT_OUT:
            raise BrokenLaw(
                f"request {request.request_id} could decode, and was left out for "
                f"{turn - watch.last_step} turns"
            )

    def check_turn(self) -> None:
        """Check, after a turn, that requests make progress and that the sums hold."""
        self._check_progress()
        self._num_released = 0
        self.talks.check()
        if self.check >= 2:
            self.ledger.check()
            if self.host is not None:
                self.host.check()
        if self.check:
            self._check_sums()

    def _check_progress(self) -> None:
        """Check that no more than all requests' prefills pass between two new tokens."""
        tokens = sum(watch.num_tokens for watch in self.watches.values())
        chunks = tokens // self.scenario.settings.prefill_tokens + len(self.watches)
        if self._idle_turns > 8 + 4 * chunks:
            raise BrokenLaw(f"livelock: no new token for {self._idle_turns} turns")
        self._idle_turns += 1

    def _check_sums(self) -> None:
        """Check that every page has a place (free, fenced, row, pin) and every request too."""
        running, waiting = self.scheduler.num_running, self.scheduler.num_waiting
        for watch in self.watches.values() if self._has_samples else ():  # siblings wait too
            waiting += sum(r.finish_reason is None for r in watch.request.siblings)
        if running + waiting != len(self.watches):
            raise BrokenLaw(
                f"{running} requests run and {waiting} wait, {len(self.watches)} have not ended"
            )
        rows = [watch.request.row for watch in self.watches.values() if watch.request.row]
        if len(rows) != running or len(set(rows)) != running:
            raise BrokenLaw(f"{running} requests run in rows {rows}")
        idle = self.talks.idle_rows
        if not set(idle).isdisjoint(rows):
            raise BrokenLaw(f"rows {rows} run and rows {idle} are idle at once")
        settings, rows = self.scenario.settings, rows + idle
        if len(idle) > settings.max_sessions:
            raise BrokenLaw(f"{len(idle)} sessions keep KV, {settings.max_sessions} may")
        for g, num_pages in enumerate(settings.num_pages):
            held = int(self.ledger.allocated_len(g)[rows].sum()) // int(self._P[g])
            if settings.windows[g] is not None:  # checkpoints are held outside the table
                held = self._num_held(g, rows)
            elif (
                self.indexed.is_on
                or self.tally.forks
                or self.tally.pins
                or self.tally.session_forks
            ):
                held = self.pins.num_held(g, rows, self.indexed.pages(g))
            free, fenced = self.ledger.free_pages(g), self.ledger.fenced_pages(g)
            cached = self.ledger.cached_pages(g)
            if free + fenced + cached + held != num_pages:
                raise BrokenLaw(
                    f"group {g}: {free} pages free, {fenced} fenced, {cached} cached, {held} held "
                    f"by running requests, {num_pages} in all"
                )

    def _check_ended(self, watch: Watch) -> None:
        """Check that a request ended as it would alone or by its fault, with its own text."""
        request, reason = watch.request, watch.request.finish_reason
        name = f"request {watch.arrival.request_id}"
        end, planned = watch.arrival.end
        num_tokens = len(request.tokens)
        if request.tokens != watch.text.tokens[:num_tokens]:
            position = next(
                i for i in range(num_tokens) if request.tokens[i] != watch.text.tokens[i]
            )
            raise BrokenLaw(f"{name} speaks otherwise than alone, from position {position} on")
        if watch.arrival.is_pin and planned == reason and not self._fills_pages(watch.arrival):
            raise BrokenLaw(f"{name} is pinned with {watch.arrival.prompt_len} tokens")
        if reason == planned and num_tokens == end and request.error is None:
            self.tally.stop_strings += request.watch is not None and request.watch.hit is not None
            return
        if reason in watch.may_end and num_tokens <= watch.arrival.most_tokens:
            return
        if watch.arrival.is_pin and request.error == "interrupted":  # during its pin
            return
        if watch.arrival.is_pin and not self._fills_pages(watch.arrival) and reason == "error":
            return
        raise BrokenLaw(
            f"{name} ended after {num_tokens} tokens by {reason} ({request.error}), alone it would "
            f"after {end} by {planned}; besides, {sorted(watch.may_end)} may end it"
        )

    def _fills_pages(self, arrival: Arrival) -> bool:
        """Return whether the prompt fills a page in every group."""
        return all(arrival.prompt_len >= P for P in self.scenario.settings.page_sizes)

    def check_empty(self, when: str) -> None:
        """Check that no page is held or fenced, except for pins."""
        ledger = self.ledger
        groups = range(len(self._P))
        free = tuple(ledger.free_pages(g) + ledger.cached_pages(g) for g in groups)
        idle = self.talks.idle_rows
        if self.pins.pinned or idle:
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
        """Count the pages of pins and rows; in window groups checkpoints may keep more."""
        window = self.scenario.settings.windows[g]
        indexed = self.indexed.pages(g)
        if window is None:
            return self.pins.num_held(g, rows, indexed)
        holders = self.ledger.ownership_map(g)[2].copy()
        holders[indexed] -= 1
        held = int((holders[1:] > 0).sum())
        pages = self.ledger.page_table(g)[rows]
        in_table = len(np.unique(pages[pages > 0]))
        max_held = in_table + len(rows) * (-(-(window - 1) // int(self._P[g])) + 1)
        if not in_table <= held <= max_held:
            raise BrokenLaw(
                f"group {g}: {held} pages are held, rows {rows} have {in_table} in the table, and "
                f"with their checkpoints {max_held} at most"
            )
        return held
