"""Which requests run: admission, chunked prefill, decode rounds, retraction, and their ends.

The scheduler knows no model and no device. It prepares steps, whoever runs them launches them in
order and brings back what they gave; under overlap (D = 1) the next step is prepared before that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import compress, repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger
from specpool.arrays import Int32
from specpool.errors import (
    ConfigError,
    NotReady,
    OutOfMemory,
    OutOfPages,
    OutOfRows,
    ShapeError,
    SpecpoolError,
)
from specpool.memory.host.tier import HostTier
from specpool.memory.page_needs import PageNeeds
from specpool.scheduler.conversation import Conversation
from specpool.scheduler.conversations import Conversations
from specpool.scheduler.counts import Counts
from specpool.scheduler.pins import Pins
from specpool.scheduler.prefills import Prefills
from specpool.scheduler.request import Request, TokenLogprob
from specpool.scheduler.round_shapes import RoundShapes
from specpool.scheduler.step import Step, StepResult
from specpool.scheduler.waiting import Waiting

if TYPE_CHECKING:
    from specpool.adaptive import Controller


_Lane = tuple[Request, list[int], list[TokenLogprob] | None]


class Scheduler:
    """The waiting queue and the running rows.

    Order is by priority (the greater first), then by arrival; who is retracted comes back before
    whoever arrived later. Retracted are the last admitted of the least priority.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_batch: int,
        prefill_tokens: int,
        keeps_draft_kv: bool = False,
        reads_tokens: bool = False,
        trims_rounds: bool = False,
        shares_prompts: bool = True,
        headroom: int = 0,
        max_idle: int = 0,
        idle_pages: int | None = None,
        host: HostTier | None = None,
        is_promising: Callable[[list[int]], bool] | None = None,
        controller: Controller | None = None,
        before_release: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """Schedule on `ledger`.

        Args:
            ledger: which rows and pages there are; its overlap depth is the scheduler's.
            max_batch: rows that run at once.
            prefill_tokens: tokens of one prefill step at most; longer prompts come in chunks.
            keeps_draft_kv: the drafter writes draft KV of what a step keeps.
            reads_tokens: the drafter reads the rows' tokens: a row that drafts has one round in
                flight at most.
            trims_rounds: each row gives back, after a round, what that had reserved (v1).
            shares_prompts: a prompt's samples run on forks of its row; else each computes it.
            headroom: tokens beyond its next round that every row must have room for before another
                request is admitted.
            max_idle: rows that conversations keep between their turns, at most.
            idle_pages: pages of each group that these rows may keep for themselves; None = all.
            host: keeps KV of retracted requests and of conversations; None = nobody does.
            is_promising: whether the next round of a row with these tokens is worth drafting; where
                it is not, the row decodes plainly. None = it always is.
            controller: chooses the shape of each round for requests that leave it to it; None =
                there are none.
            before_release: called while the request still has its row.
        """
        self._ledger = ledger
        self._max_batch = max_batch
        self._keeps_draft_kv, self._reads_tokens = keeps_draft_kv, reads_tokens
        self._trims_rounds, self._is_promising = trims_rounds, is_promising
        self._before_release = before_release
        self._waiting = Waiting(shares_prompts=shares_prompts)
        self._running: list[Request] = []  # in the order in which they were admitted
        self._num_pages = np.array([group.num_pages for group in ledger.groups])
        self._in_flight = 0  # steps prepared and not finished
        self._is_starved = False  # a round found no pages: nothing else may take what comes back
        # By row: its request, tokens that the host knows (0 = a free row), tokens at most (0 while
        # it cannot decode), and index of its shape.
        num_rows = ledger.num_rows + 1
        self._by_row = np.full(num_rows, None, object)
        self._accept_len = np.ones(num_rows, np.int32)  # of its latest round
        self._lens, self._limits, self._shapes = np.zeros((3, num_rows), np.int32)
        self.round_shapes = RoundShapes(ledger.shapes, num_rows, controller)
        self._num_admitted = 0
        self._prefills = Prefills(
            ledger,
            prefill_tokens=prefill_tokens,
            keeps_draft_kv=keeps_draft_kv,
            host=host,
            reclaim=self._reclaim,
            give_up=self._give_up,
        )
        self._needs = PageNeeds(ledger, headroom, self.round_shapes.all_choices)
        self.pins = Pins(ledger)
        self.conversations = Conversations(
            ledger,
            max_idle=max_idle,
            max_pages=idle_pages,
            keeps_draft_kv=keeps_draft_kv,
            host=host,
        )
        self._host = host
        self._quarantined: dict[int, int] = {}  # rows out of use, and the epoch of each
        self.num_retracted = 0
        self.counts = Counts(max(shape.max_accept_len for shape in ledger.shapes))

    # --- what comes in --------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request that fits: `fits` says so.

        Its `siblings`, the same prompt to be gone on with otherwise, run on forks of its row.

        Raises:
            ConfigError: it has been submitted already, or another with its number.
        """
        is_known = any(r.request_id == request.request_id for r in self._running)
        if request.finish_reason or is_known or self._waiting.has_number_of(request):
            raise ConfigError(f"request {request.request_id} has been submitted already")
        for sample in (request, *request.siblings):
            sample.times.queued = time.perf_counter()
        self._waiting.add(request)
        self.conversations.begin(request)  # last: before, nobody would end it

    def fits(self, request: Request) -> bool:
        """Whether an empty pool would hold the request to its end."""
        return bool((self.pages_at_most(request) <= self._num_pages).all())

    def pages_at_most(self, request: Request) -> npt.NDArray[np.int64]:
        """Pages of each group that the request can ever hold, int64 [num_groups]."""
        last_root = max(request.prompt_len, request.max_len - 1)
        last_root = min(last_root, self._ledger.max_context_len - 1)
        return self._needs.at_most(
            min(request.prompt_len, last_root), last_root, request.shape_index
        )

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request, wherever it is; twice is once."""
        if request.finish_reason is None:
            self._end(request, reason)

    def abort_all(self) -> list[str]:
        """End every request; returns what could not be given back, which stays out of use."""
        failures = []
        while requests := self.requests():  # the end of one may queue its siblings
            for request in requests:
                try:
                    self._end(request, request.finish_reason or "abort")
                except SpecpoolError as error:
                    failures.append(f"the row of request {request.request_id}: {error}")
        return failures

    def quarantine(self, row: int, why: str) -> None:
        """Take a row out of use, for good: what it holds is not given back, its request ends."""
        if self._ledger.is_live(row):
            self._quarantined[row] = int(self._ledger.epoch[row])
        self.conversations.forget(row)
        request: Request | None = self._by_row[row]
        if request is not None:
            request.error = why
            self._end(request, "error")

    def is_quarantined(self, row: int) -> bool:
        """Whether the row is out of use."""
        return self._quarantined.get(row) == self._ledger.epoch[row] and self._ledger.is_live(row)

    def requests(self) -> list[Request]:
        """All requests, running ones first; sorts those that wait."""
        return [*self._running, *self._waiting]

    @property
    def has_requests(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> list[Request]:
        """Requests that have a row, in the order of admission."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none."""
        return len(self._waiting)

    # --- a turn of the loop ---------------------------------------------------------------------

    def schedule(self) -> list[Step]:
        """Prepare what can run now: a reload, a prefill step, a decode step, any of them or none.

        They are to be launched in this order. None, and steps in flight: finish those first. None
        and nothing in flight: there is nothing to do.

        Raises:
            ConfigError: the controller chose what it may not; nothing has been prepared.
        """
        while True:
            was_starved, num_requests = self._is_starved, self.num_running + self.num_waiting
            if not was_starved:
                self._admit()
            chosen = self.round_shapes.choose(self._limits)  # it may raise: before all else
            prepared = [] if was_starved else [self._prefills.reload(), self._prefills.chunk()]
            prepared.append(self._decode(*chosen))
            steps = [step for step in prepared if step is not None]
            self._in_flight += len(steps)
            if steps or self._in_flight:
                return steps
            if was_starved and not self._is_starved:
                continue  # whoever the pages were kept for has ended
            if self.num_running + self.num_waiting < num_requests:
                continue  # some have ended for lack of memory
            if not self._running and not (self._waiting and self.pins):
                return steps
            self._make_room()

    def launch(self, step: Step) -> None:
        """The step's forward is about to be enqueued."""
        self._ledger.launch(step.plan.step)
        if not step.is_decode and step.handles is None:
            for request in step.requests:
                if request.prefilled_len >= request.prefill_len:
                    self._limits[request.row] = request.max_len
                    self._prefills.drop(request.row)

    def cancel(self, step: Step) -> None:
        """The newest step is not to be launched after all."""
        self._ledger.cancel(step.plan.step)
        self._in_flight -= 1
        if not step.is_decode:
            for request, start in zip(step.requests, step.plan.start.tolist(), strict=True):
                request.prefilled_len = start

    def finish(self, step: Step, result: StepResult) -> None:
        """Take over what a launched step gave, the oldest first.

        It has run on the device, as has every step before it: what it frees is written by later
        forwards of the same stream only.
        """
        plan, rows, requests = step.plan, step.plan.rows, step.requests
        tokens, accept_len, logprobs = result.tokens, result.accept_len, result.logprobs
        is_decode = step.is_decode
        # Lanes whose row was given back since are dropped: their request may have another by now.
        alive = self._ledger.epoch[rows] == plan.epochs
        if self._quarantined:
            alive &= self._in_use(rows)
        if is_decode:
            self._ledger.resolve(plan.step, accept_len)
        self._ledger.complete(plan.step)
        self._in_flight -= 1
        lens = self._lens[rows]
        if not alive.all():
            lens = lens[alive]
            rows, accept_len, lives = rows[alive], accept_len[alive], alive.tolist()
            requests, tokens = [*compress(requests, lives)], [*compress(tokens, lives)]
            logprobs = None if logprobs is None else [*compress(logprobs, lives)]
        if step.handles is not None:
            for request, end in zip(requests, plan.new_len[alive].tolist(), strict=True):
                self._come_back(request, end)
            return
        if is_decode:
            lens += accept_len
            self.counts.round(accept_len)
            if step.choice is not None:
                self.round_shapes.learn(step.choice, plan.shapes[alive], accept_len)
            if self._ledger.overlap_depth:
                self._accept_len[rows] = accept_len
        else:
            drawn = np.array([bool(new) for new in tokens], np.int32)
            lens += drawn
            self.counts.prefill(plan.start, plan.new_len, drawn)
            for request, end in zip(requests, plan.new_len[alive].tolist(), strict=True):
                if request.siblings and end == request.prefill_len - 1 and not request.tainted:
                    self._fork(request)
        self._lens[rows] = lens
        may_end = (lens >= self._limits[rows]).tolist()
        lanes: list[_Lane]
        if is_decode and logprobs is None and self._is_promising is None:
            lanes = self._append(requests, tokens, may_end)
        else:
            entries_of = logprobs or repeat(None, len(requests))
            lanes = list(zip(requests, tokens, entries_of, strict=True))
        for request, new, entries in lanes:
            request.append(new, entries, is_decode)
            if self._is_promising is not None and request.shape_index:
                drafts = self._is_promising(request.tokens)
                own = request.choices or request.shape_index
                self.round_shapes.put(request.row, own if drafts else 0)
            if request.finish_reason is not None:
                if request.wants_pin and request.error is None:
                    self._pin(request)
                else:
                    self._end(request, request.finish_reason)
        if self._trims_rounds and is_decode:
            for request in requests:
                if request.finish_reason is None:
                    self._ledger.trim(request.row, int(self._ledger.resolved_len[request.row]))
                    request.epoch = int(self._ledger.epoch[request.row])

    def _append(
        self, requests: list[Request], tokens: list[list[int]], may_end: list[bool]
    ) -> list[_Lane]:
        """Take over a round's tokens where there is nothing else to do; returns the other lanes.

        This runs for every row of every round, and mostly for all of them.
        """
        others: list[_Lane] = []
        for request, new, ends in zip(requests, tokens, may_end, strict=True):
            if (
                ends
                or new[-1] < 0
                or request.watch is not None
                or not request.stop_ids.isdisjoint(new)
            ):
                others.append((request, new, None))
            else:
                if not request.forwards:
                    request.times.first_token = time.perf_counter()
                request.forwards.append(len(new))  # first: see `Request.append`
                request.tokens += new
        return others

    def fail(self, step: Step, error: BaseException) -> None:
        """A launched step's forward has failed: its requests end, all others go on.

        Call it once nothing of the step runs on the device any more.
        """
        plan = step.plan
        alive = (self._ledger.epoch[plan.rows] == plan.epochs) & self._in_use(plan.rows)
        for request, lives in zip(step.requests, alive.tolist(), strict=True):
            if lives and step.handles is None:  # the others are prefilled
                request.error = f"a step failed: {type(error).__name__}: {error}"
                request.tainted = True
                self._end(request, "error")
        self._ledger.abandon(plan.step)
        self._ledger.complete(plan.step)
        self._in_flight -= 1
        for request in [r for r in self._running if self._ledger.epoch[r.row] != r.epoch]:
            self._requeue(request)  # a page copy into its row was lost with the step
        self.conversations.forget_lost()
        self._forget_handles()

    def recover(self, why: str, reason: str = "abort") -> None:
        """End whatever runs: Ctrl-C came, between any two calls, so nothing is known of it."""
        over = [request for request in self._waiting if request.finish_reason is not None]
        for request in [*self._running, *over]:
            request.error, request.tainted = why, True
            with contextlib.suppress(SpecpoolError):  # its row is out of use
                self._end(request, request.finish_reason or reason)
        for row in range(1, self._ledger.num_rows + 1):
            # Taken, but not yet given to its request, or its conversation
            is_owned = self.is_quarantined(row) or self.conversations.owns(row)
            if self._ledger.is_live(row) and not is_owned:
                try:
                    self._ledger.abort(row)
                except SpecpoolError:
                    self._quarantined[row] = int(self._ledger.epoch[row])
        for number, _, state in reversed(self._ledger.steps()):
            if state in ("prepared", "stale"):
                self._ledger.cancel(number)
        for number, _, state in self._ledger.steps():
            if state == "launched":
                self._ledger.abandon(number)
            self._ledger.complete(number)
        self.pins.recover()
        self.conversations.forget_lost()
        self._in_flight, self._is_starved = 0, False
        self._lens[:] = self._limits[:] = 0
        self._by_row[:] = None
        self._prefills.clear()
        self._waiting.tidy()
        for request in self._waiting:
            request.row = 0
        if self._host is not None:
            kept = [owner.handle for owner in self._owners() if owner.handle is not None]
            self._host.recover(kept)
            self._forget_handles()

    # --- how it is done -------------------------------------------------------------------------

    def _in_use(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """[B]: the rows that are not quarantined."""
        return np.array([not self.is_quarantined(row) for row in rows.tolist()])

    def _admit(self) -> None:
        """Take rows for who is next, while what every row needs next fits beside them."""
        claimed = None
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting.first
            need = self._needs.of(len(request.tokens), request.shape_index)
            if claimed is None:
                free = [
                    self._ledger.free_pages(g) + self._ledger.reclaimable_pages(g)
                    for g in range(len(self._num_pages))
                ]
                rows = np.flatnonzero(self._lens)
                claimed = self._needs.of_all(self._lens[rows], self._shapes[rows])
            claimed = claimed + need
            if self._running and ((need > free) | (claimed > self._num_pages)).any():
                return
            place = self.conversations.take(request) or self._take_row(request)
            if place is None:
                return
            row, length = place
            self._start(request, row, length)
            self._waiting.remove(request)
            if length == len(request.tokens) - 1:  # no prefill ends there: a pin is all they share
                self._waiting.part(request)

    def _take_row(self, request: Request) -> tuple[int, int] | None:
        """A free row, and how many of the request's tokens have KV there, thanks to a pin."""
        self.conversations.take_handle(request)
        pins = self.pins.shared_with(request.tokens) if request.handle is None else []
        while True:
            pin, length = pins[0] if pins else (None, 0)
            try:
                row = self._ledger.admit(
                    str(request.request_id),
                    prefix=None if pin is None else pin.prefix,
                    length=None if pin is None else length,
                )
            except NotReady:  # a window below the length is not held
                del pins[0]
            except OutOfRows:  # they are fenced
                return None
            except OutOfPages as shortage:
                if not self._reclaim(shortage):
                    return None
            except OutOfMemory as shortage:
                if not self._running:  # nobody will give any back
                    self._give_up([request], shortage)
                return None
            else:
                return row, length

    def _start(self, request: Request, row: int, prefilled_len: int) -> None:
        """The request has a row, with KV of its first tokens."""
        if request.times.started is None:
            request.times.started = time.perf_counter()
        request.row, request.epoch = row, int(self._ledger.epoch[row])
        request.prefilled_len, request.prefill_len = prefilled_len, len(request.tokens)
        request.shared_len = prefilled_len
        if request.handle is None:
            self._count_start(request)
        self._by_row[row] = request
        self._lens[row], self._accept_len[row] = len(request.tokens), 1
        self._shapes[row] = request.shape_index
        shapes = request.choices or request.shape_index
        self.round_shapes.admit(row, shapes, self._num_admitted)
        self._prefills.add(request)
        self._num_admitted += 1
        self._running.append(request)

    def _count_start(self, request: Request) -> None:
        """It is prefilled from here on: what is before has KV."""
        if not request.num_retractions:
            request.num_reused = request.prefilled_len
        if request.conversation is not None:
            request.conversation.reused_token_ct += request.prefilled_len
            num_computed = request.prefill_len - request.prefilled_len
            request.conversation.computed_token_ct += num_computed

    def _fork(self, request: Request) -> None:
        """All but the prompt's last token is there: the siblings share it, as far as rows go."""
        while request.siblings:
            sibling, row = request.siblings[0], 0
            if sibling.finish_reason is None and len(self._running) < self._max_batch:
                with contextlib.suppress(OutOfRows, OutOfPages, OutOfMemory):
                    row = self._ledger.fork(request.row, str(sibling.request_id))
            if row:
                self._start(sibling, row, request.prefilled_len)
            else:
                self._waiting.add(sibling)
            del request.siblings[0]

    def _pin(self, request: Request) -> None:
        """The text that was to be pinned is there; the row is not needed for it."""
        try:
            request.pin = self.pins.take(request.row, request.tokens[: request.prefill_len])
            self.pins.keep(request.pin)
        except (ShapeError, NotReady, OutOfMemory) as error:
            request.error = str(error)
        self._end(request, "stop" if request.pin else "error")

    def _come_back(self, request: Request, length: int) -> None:
        """A reload has come to so many tokens; from the last of them on, the rest is prefilled."""
        if request.handle is not None and length == request.handle.length:
            request.handle = None
            request.prefilled_len = self.conversations.start(request, request.row)
            request.epoch = int(self._ledger.epoch[request.row])
            self._count_start(request)
            if request.prefilled_len == request.prefill_len - 1:  # no prefill ends there
                self._waiting.part(request)

    def _owners(self) -> list[Request | Conversation]:
        """Whoever may have something on the host."""
        return [*self.requests(), *self.conversations.open.values()]

    def _forget_handles(self) -> None:
        """Some copies failed: what they were to bring back is prefilled."""
        if self._host is not None:
            for owner in self._owners():
                if owner.handle is not None and not self._host.holds(owner.handle):
                    owner.handle = None

    def _decode(self, shape_of: Int32, order: npt.NDArray[np.int64]) -> Step | None:
        """One round of every row that is ready for it; see `RoundShapes.choose`."""
        in_flight = self._ledger.in_flight
        # Who will be at the limit if what is in flight gives as much as the latest round did needs
        # no other: it would be lost, while who is left out of a round only comes a round later.
        if self._ledger.overlap_depth:
            wanted = self._lens + in_flight * self._accept_len < self._limits
            wanted &= in_flight <= self._ledger.overlap_depth
        else:
            wanted = (self._lens < self._limits) & (in_flight == 0)
        if self._reads_tokens:  # only where the host knows the root
            known = self._lens == self._ledger.resolved_len + 1
            wanted &= (in_flight == 0) & known | (shape_of == 0)
        (rows,) = wanted.nonzero()
        if not len(rows):
            self._is_starved = False
            return None
        rows = rows[order[rows].argsort()]
        shapes = shape_of[rows]
        writes_draft = self._keeps_draft_kv and bool(self._shapes[rows].any())
        while True:
            try:
                plan = self._ledger.prepare_decode(rows, shapes, writes_draft=writes_draft)
            except OutOfPages as shortage:
                if self._reclaim(shortage):
                    continue
                self._is_starved = True
                return None
            except OutOfMemory as shortage:
                self._give_up(self._by_row[rows].tolist(), shortage)
                self._is_starved = False
                return None
            self._is_starved = False
            return Step(plan, self._by_row[rows].tolist(), choice=self.round_shapes.run())

    def _reclaim(self, shortage: OutOfPages) -> bool:
        """Take an idle row's pages, unless enough of them are on their way back anyway."""
        if self._in_flight and shortage.need <= shortage.free + shortage.fenced:
            return False
        return self.conversations.reclaim(shortage)

    def _give_up(self, requests: list[Request], shortage: OutOfMemory) -> None:
        """End whom a call was for that the ledger has no memory for: it has changed nothing."""
        for request in requests:
            request.error = f"a step was not prepared: {type(shortage).__name__}: {shortage}"
            self._end(request, "error")

    def _make_room(self) -> None:
        """Nothing is in flight and no step finds its pages: somebody has to give some back."""
        if self.pins:
            self.pins.drop_oldest()
            return
        victim = min(reversed(self._running), key=lambda request: request.priority)
        is_alone = len(self._running) == 1
        if is_alone and not victim.shared_len:
            needs = self._needs.of(len(victim.tokens), victim.shape_index).tolist()
            victim.error = (
                f"kv_exhausted: alone it needs {needs} pages for its next round, the groups have "
                f"{self._num_pages.tolist()}"
            )
            self._end(victim, "error")
            return
        self._before_release(victim)
        self._give_way(victim, is_alone)
        self._requeue(victim)

    def _give_way(self, victim: Request, is_alone: bool) -> None:
        """Take the row of who is retracted; what can come back without a prefill is kept."""
        conversation = victim.conversation
        # At its checkpoint it would give nothing back, and come again for the same. Alone, a copy
        # of what it shares may wait for its next step, and hold a page that this step needs.
        checkpoint = self._ledger.checkpoint_len(victim.row) or 0
        is_ahead = int(self._ledger.resolved_len[victim.row]) > checkpoint
        if is_ahead and not is_alone and self.conversations.fall_back(victim):
            return
        if conversation is not None or is_alone or victim.handle is not None or victim.tainted:
            self._ledger.retract(victim.row)
        else:
            victim.handle = self.conversations.release(victim.row)
        if conversation is not None:
            self.conversations.count_drop(conversation)

    def _requeue(self, request: Request) -> None:
        """A request without its row any more waits again; its text goes on where it was."""
        self._leave_row(request)
        request.post()
        request.num_retractions += 1
        self.num_retracted += 1
        if request.conversation is not None:
            request.conversation.retraction_ct += 1
        self._waiting.add(request)  # first: who is in neither when Ctrl-C comes would be lost
        self._running.remove(request)

    def _end(self, request: Request, reason: str) -> None:
        """End a request that runs or waits.

        Raises:
            SpecpoolError: the ledger refuses to take its row back, which is out of use then.
        """
        request.post()  # first: Ctrl-C may come between
        request.finish_reason = reason
        request.times.ended = time.perf_counter()
        is_whole = reason in ("stop", "length")
        if is_whole:
            self.conversations.end(request)
        self._waiting.part(request)
        is_running, is_waiting = request in self._running, request in self._waiting
        if not (is_running or is_waiting):  # Ctrl-C came before it was queued
            return
        self.counts.end(reason, None if request.wants_pin else request.times)
        self.conversations.return_handle(request)
        if is_waiting:  # in both lists if Ctrl-C has stopped it between them
            self._waiting.remove(request)
        if not is_running:
            return
        if request.row and not self.is_quarantined(request.row):
            self._before_release(request)
            if self._ledger.is_live(request.row):  # but for a Ctrl-C right behind its retraction
                try:
                    self._give_back(request, is_whole)
                except SpecpoolError:
                    self._quarantined[request.row] = int(self._ledger.epoch[request.row])
                    self.conversations.forget(request.row)
                    self._leave_row(request)
                    self._running.remove(request)
                    raise
        self._leave_row(request)
        self._running.remove(request)

    def _give_back(self, request: Request, is_whole: bool) -> None:
        """The row of a request that is over goes back, or to its conversation."""
        # What is tainted has been scrubbed.
        if is_whole and request.conversation is not None and not request.tainted:
            self.conversations.keep(request.conversation, request.row, len(request.tokens))
        elif is_whole:
            self._ledger.finish(request.row)
        elif not self.conversations.fall_back(request):
            self._ledger.abort(request.row)

    def _leave_row(self, request: Request) -> None:
        """The row has been given back."""
        self._by_row[request.row] = None
        self._prefills.drop(request.row)
        self._lens[request.row] = self._limits[request.row] = request.row = 0
