"""`Scheduler`: decides which requests run, and prepares their steps.

It does admission, chunked prefill, decode rounds, retraction and the ends of requests, and knows no
model and no device. The loop launches the prepared steps in order and brings back their results.
Under overlap (D = 1) the next step is prepared before these results arrive.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger
from specpool.arrays import Int32
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.scheduler.admission import Admission
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.exports import Exports
from specpool.engine.scheduler.pins import Pin
from specpool.engine.scheduler.prefill import Prefill
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Conversation, Request, TokenLogprob
from specpool.engine.scheduler.rows import costing_speed
from specpool.engine.scheduler.state import State
from specpool.engine.scheduler.step import Step, StepResult
from specpool.errors import (
    ConfigError,
    NotReady,
    OutOfMemory,
    OutOfPages,
    ShapeError,
    SpecpoolError,
)

if TYPE_CHECKING:
    from specpool.engine.shapes import Controller


# A lane of a result: its request, tokens, accept length and log probabilities.
_Lane = tuple[Request, list[int], int, list[TokenLogprob] | None]


class Journal(Protocol):
    """Notes every call from outside before the scheduler makes it."""

    def begin(self, scheduler: Scheduler) -> None:
        """Take the scheduler whose calls are noted from here on."""

    def note(self, call: str, *args: Any) -> None:
        """Note a call that asks for something, or refuse it with an error."""

    def note_end(self, call: str, *args: Any) -> None:
        """Note a call that ends something, which is made in any case."""


class Scheduler:
    """The scheduler of an engine: its state, and the parts that change it.

    Requests get rows by priority (greater first), then by arrival. A retracted request keeps its
    place by arrival. The last admitted request of the least priority is retracted first.

    Attributes:
        state: the requests and their rows; every part works on it.
        exports: the rows on their way to another engine.
        conversations, counts, handles, pins, prefix_cache, round_shapes, rows: as in `State`.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: SchedulerConfig,
        *,
        host: HostTier | None = None,
        controller: Controller | None = None,
        is_promising: Callable[[Request], bool] | None = None,
        before_release: Callable[[Request], None] = lambda request: None,
        journal: Journal | None = None,
    ) -> None:
        """Schedule on `ledger`.

        Args:
            ledger: the rows and pages; the scheduler takes its overlap depth.
            config: the options.
            host: keeps KV of retracted requests and idle conversations; None if there is no tier.
            controller: chooses the shape of each round for requests that name none; None if
                every request has a fixed shape.
            is_promising: says whether the next round of a request is worth drafting; if not, its
                row decodes plainly. None if it always is.
            before_release: called with a request that is about to lose its row.
            journal: notes every call from outside; None for no journal.
        """
        state = State(ledger, config, host=host, controller=controller)
        self.state, self._is_promising = state, is_promising
        self._is_starved = False  # a round found no pages: freed pages are for it alone
        self.round_shapes, self.counts = state.round_shapes, state.counts
        self.pins, self.handles, self.rows = state.pins, state.handles, state.rows
        self.conversations, self.prefix_cache = state.conversations, state.prefix_cache
        self._reclaim = Reclaim(state, before_release)
        self._admission = Admission(state, self._reclaim)
        self._prefill = Prefill(state, self._reclaim)
        self.exports = Exports(state, self._reclaim)
        self._journal = journal
        if journal is not None:
            journal.begin(self)

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; `fits` must be true for it.

        Its `siblings`, further samples of the same prompt, run on forks of its row.

        Raises:
            ConfigError: the request, or another with its number, has been submitted already.
        """
        state = self.state
        is_known = request.request_id in state.running.requests
        if request.finish_reason or is_known or state.waiting.has_number_of(request):
            raise ConfigError(f"request {request.request_id} has been submitted already")
        self._note("submit", request)
        for sample in (request, *request.siblings):
            sample.times.queued = time.perf_counter()
        state.waiting.add(request)
        self.conversations.begin(request)  # last: only a queued request is ended

    def fits(self, request: Request) -> bool:
        """Return whether an empty pool would hold the request to its end."""
        return bool((self.max_pages(request) <= self.state.needs.num_pages).all())

    def max_pages(self, request: Request) -> npt.NDArray[np.int64]:
        """Return the most pages of each group that the request can hold, int64 [num_groups]."""
        last_root = max(request.prompt_len, request.max_len - 1)
        last_root = min(last_root, self.state.ledger.max_context_len - 1)
        return self.state.needs.max_pages(
            min(request.prompt_len, last_root), last_root, request.shape_index
        )

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a running or waiting request. A second call does nothing."""
        if request.finish_reason is None:
            self._note_end("abort", request.request_id)
            self._reclaim.end(request, reason)

    def open(self, tokens: Sequence[int] = ()) -> Conversation:
        """Open a conversation that begins with these tokens."""
        self._note("open", list(tokens))
        return self.conversations.new(list(tokens))

    def fork(self, conversation: Conversation) -> Conversation:
        """Open a conversation with the same tokens; see `Conversations.fork`."""
        self._note("fork", conversation.number)
        return self.conversations.fork(conversation)

    def cut(self, conversation: Conversation, num_tokens: int) -> int:
        """Cut a conversation; return how many of its tokens have KV."""
        self._note("cut", conversation.number, num_tokens)
        return self.conversations.cut(conversation, num_tokens)

    def close(self, conversation: Conversation) -> None:
        """Close an idle conversation. A second call does nothing."""
        self._note_end("close", conversation.number)
        self.conversations.close(conversation)

    def unpin(self, pin: Pin) -> None:
        """Drop a pinned text. A second call does nothing."""
        self._note_end("unpin", pin.prefix)
        self.pins.drop(pin)

    def forget(self, salt: bytes | None = None) -> None:
        """Drop the texts of the prefix cache, of one salt or all."""
        self._note_end("forget", salt)
        self.prefix_cache.forget(salt)

    def abort_all(self) -> list[str]:
        """End every request; return a message for each row that could not be given back.

        Such a row stays out of use.
        """
        failures = []
        while requests := self.requests():  # the end of one may queue its siblings
            for request in requests:
                try:
                    self._reclaim.end(request, request.finish_reason or "abort")
                except SpecpoolError as error:
                    failures.append(f"the row of request {request.request_id}: {error}")
        return failures

    def quarantine(self, row: int, why: str) -> None:
        """Take a row out of use for good, and end its request with the error `why`.

        The row's pages are not given back.
        """
        if self.state.ledger.is_live(row):
            self.rows.quarantine(row)
        self.prefix_cache.forget()  # nobody knows since when the row's KV is wrong
        self.conversations.forget(row)
        request: Request | None = self.state.running.by_row[row]
        if request is not None:
            request.error = why
            self._reclaim.end(request, "error")

    def requests(self) -> list[Request]:
        """Return all requests, running ones first; sorts the waiting ones."""
        return [*self.state.running, *self.state.waiting]

    @property
    def has_requests(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self.state.running or self.state.waiting)

    @property
    def running(self) -> list[Request]:
        """The requests with a row, in the order of admission."""
        return list(self.state.running)

    @property
    def num_running(self) -> int:
        """The number of requests with a row."""
        return len(self.state.running)

    @property
    def num_retracted(self) -> int:
        """The number of retractions so far."""
        return self.state.num_retracted

    @property
    def num_ended(self) -> int:
        """The number of requests that have ended; the end of one may queue its siblings."""
        return self.counts.end_cts.total()

    @property
    def num_waiting(self) -> int:
        """The number of requests without a row."""
        return len(self.state.waiting)

    # --- a turn of the loop ---------------------------------------------------------------------

    def schedule(self) -> list[Step]:
        """Prepare the steps that can run now: a reload, a prefill and a round, or some of them.

        Launch them in this order. If there are none, take over the steps in flight and call again;
        if nothing is in flight either, there is nothing to do.

        Raises:
            ConfigError: the controller chose a shape that is not a candidate; nothing is prepared.
        """
        state = self.state
        num_retracted = state.num_retracted
        while True:
            was_starved, num_ended = self._is_starved, self.num_ended
            # Whoever is retracted here waits for a step of the others, and takes nothing from it.
            if not was_starved and (state.num_retracted == num_retracted or not state.running):
                self._admission.admit()
            limits, spare = state.running.limits, self._admission.spare
            chosen = self.round_shapes.choose(limits, spare)  # first: it may raise
            prepared = [] if was_starved else [self._prefill.reload(), self._prefill.chunk()]
            prepared.append(self._decode(*chosen))
            steps = [step for step in prepared if step is not None]
            state.in_flight += len(steps)
            if steps or state.in_flight:
                return steps
            if (was_starved and not self._is_starved) or self.num_ended > num_ended:
                continue  # rows that pages were kept for have ended, or some for lack of memory
            if not state.running and not (state.waiting and self.pins):
                return steps
            self._reclaim.make_room()

    def launch(self, step: Step) -> None:
        """Mark a step as launched; call it before its forward is enqueued."""
        self.state.ledger.launch(step.plan.step)
        if not step.is_decode and step.handles is None:
            for request in step.requests:
                if request.prefilled_len >= request.prefill_len:
                    self.state.running.decode(request)

    def cancel(self, step: Step) -> None:
        """Undo the newest step, which will not be launched."""
        self.state.ledger.cancel(step.plan.step)
        self.state.in_flight -= 1
        if not step.is_decode:
            for request, start in zip(step.requests, step.plan.start.tolist(), strict=True):
                request.prefilled_len = start

    def take_over(self, step: Step, result: StepResult) -> None:
        """Take over the results of a launched step; call it for the oldest step first.

        The step and all steps before it must have run on the device, because pages that it frees
        may be handed out at once.
        """
        state = self.state
        plan, rows, requests, is_decode = step.plan, step.plan.rows, step.requests, step.is_decode
        alive = self.rows.alive(plan)  # before the ledger changes the epochs
        if is_decode:
            state.ledger.resolve(plan.step, result.accept_len)
        state.ledger.complete(plan.step)
        state.in_flight -= 1
        # Drop lanes whose row was given back since: their request may have another row by now.
        if not alive.all():
            rows, result = rows[alive], result.select(alive)
            requests = [*compress(requests, alive.tolist())]
        if step.handles is not None:
            for request, end in zip(requests, plan.new_len[alive].tolist(), strict=True):
                try:
                    self._finish_reload(request, end)
                except BaseException as error:
                    self._reclaim.fault(request, error)
            return
        accept_len, accept_lens = result.accept_len, result.accept_len.tolist()
        if is_decode:
            shapes = plan.shapes[alive]
            num_drafts = self.counts.round(accept_len, shapes)
            for request, num, length in zip(requests, num_drafts, accept_lens, strict=True):
                request.num_drafts += num
                if request.forced:
                    self.counts.forced(len(request.forced), length - 1)
            self.round_shapes.learn(step.choice, shapes, accept_len, requests)
            if state.ledger.overlap_depth:
                state.running.accept_len[rows] = accept_len
        else:
            self.counts.prefill(plan.start, plan.new_len, accept_len)
            for request, end in zip(requests, plan.new_len[alive].tolist(), strict=True):
                with costing_speed():
                    self.prefix_cache.index(request, end)
                if request.siblings and end == request.prefill_len - 1 and not request.tainted:
                    self._admission.fork(request)
        at_limit = state.running.grow(rows, accept_len)
        lanes: Iterable[_Lane]
        if is_decode and result.logprobs is None and self._is_promising is None:
            may_end = (at_limit | result.not_finite).tolist()
            lanes = self._append_fast(requests, result.tokens, accept_lens, may_end)
        else:
            lanes = zip(
                requests,
                result.tokens,
                accept_lens,
                result.logprobs or repeat(None, len(requests)),
                strict=True,
            )
        for request, tokens, length, logprobs in lanes:
            try:
                self._add_tokens(request, tokens, length, logprobs, is_decode=is_decode)
            except BaseException as error:
                self._reclaim.fault(request, error)
        if state.config.trims_rounds and is_decode:
            self._trim(requests)

    def _append_fast(
        self,
        requests: list[Request],
        tokens: list[list[int]],
        accept_lens: list[int],
        may_end: list[bool],
    ) -> list[_Lane]:
        """Append a round's tokens to the lanes that need nothing else; return the other lanes.

        It does what `_add_tokens` does, for lanes that no token can end or steer. It runs for every
        row of every round.
        """
        slow_lanes: list[_Lane] = []
        lanes = zip(requests, tokens, accept_lens, may_end, strict=True)
        for request, new, accept_len, ends in lanes:
            if (
                ends
                or request.watch is not None
                or request.matcher is not None
                or not request.stop_ids.isdisjoint(new)
            ):
                slow_lanes.append((request, new, accept_len, None))
            else:
                request.accept_lens.append(accept_len)  # tokens last: see `Request.append`
                request.tokens += new
        return slow_lanes

    def _add_tokens(
        self,
        request: Request,
        tokens: list[int],
        accept_len: int,
        logprobs: list[TokenLogprob] | None,
        *,
        is_decode: bool,
    ) -> None:
        """Give a request `accept_len` new tokens, and end it if they finish it."""
        if accept_len:
            request.append(
                tokens,
                accept_len=accept_len if is_decode else None,
                logprobs=logprobs,
            )
        if request.shape_index and (self._is_promising or request.matcher):
            drafts = self._is_promising is None or self._is_promising(request)
            self.round_shapes.look_ahead(request, drafts)
        if request.finish_reason is not None:
            if request.wants_pin and request.error is None:
                self._pin(request)
            else:
                self._reclaim.end(request, request.finish_reason)

    def _trim(self, requests: list[Request]) -> None:
        """Give back the slots that a round had reserved for these requests and did not use."""
        state = self.state
        for request in requests:
            if request.finish_reason is None:
                state.ledger.trim(request.row, int(state.ledger.resolved_len[request.row]))
                request.epoch = int(state.ledger.epoch[request.row])

    def fail(self, step: Step, error: BaseException) -> None:
        """End the requests of a launched step whose forward failed; all others go on.

        Call it when nothing of the step runs on the device any more.
        """
        state = self.state
        plan = step.plan
        for request, lives in zip(step.requests, self.rows.alive(plan).tolist(), strict=True):
            if lives and step.handles is None:  # a reload's lanes are prefilled instead
                request.error = f"a step failed: {type(error).__name__}: {error}"
                request.tainted = True
                self._reclaim.end(request, "error")
        state.ledger.abandon(plan.step)
        state.ledger.complete(plan.step)
        state.in_flight -= 1
        for request in [r for r in state.running if state.ledger.epoch[r.row] != r.epoch]:
            self._reclaim.requeue(request)  # a page copy into its row was lost with the step
        self.conversations.forget_lost()
        self.handles.forget_failed([*self.requests(), *self.conversations.open.values()])

    def recover(self, why: str, reason: str = "abort") -> None:
        """End all running requests, after Ctrl-C at any point; waiting requests stay queued."""
        state = self.state
        ended = [request for request in state.waiting if request.finish_reason is not None]
        for request in [*state.running, *ended]:
            request.tainted = True
            if request.finish_reason is None or request.wants_pin:
                request.error = why
            with contextlib.suppress(SpecpoolError):  # its row is then out of use
                self._reclaim.end(request, request.finish_reason or reason)
        self.rows.abort_all(is_owned=self.conversations.owns)
        for number, _, phase in reversed(state.ledger.steps()):
            if phase in ("prepared", "stale"):
                state.ledger.cancel(number)
        for number, _, phase in state.ledger.steps():
            if phase == "launched":
                state.ledger.abandon(number)
            state.ledger.complete(number)
        self.pins.recover(self.exports.prefixes)
        self.conversations.forget_lost()
        state.in_flight, self._is_starved = 0, False
        state.running.clear_rows()
        state.waiting.tidy()
        for request in state.waiting:
            request.row = 0
        self.handles.recover([*self.requests(), *self.conversations.open.values()])

    # --- helpers --------------------------------------------------------------------------------

    def _note(self, call: str, *args: Any) -> None:
        if self._journal is not None:
            self._journal.note(call, *args)

    def _note_end(self, call: str, *args: Any) -> None:
        if self._journal is not None:
            self._journal.note_end(call, *args)

    def _pin(self, request: Request) -> None:
        """Pin the text of a request that has computed its KV, and end the request."""
        try:
            request.pin = self.pins.take(request.row, request.tokens[: request.prefill_len])
            self.pins.keep(request.pin)
        except (ShapeError, NotReady, OutOfMemory) as error:
            request.error = str(error)
        self._reclaim.end(request, "stop" if request.pin else "error")

    def _finish_reload(self, request: Request, length: int) -> None:
        """Note that a reload has brought back `length` tokens; after the last, prefill the rest."""
        handle = request.handle
        if handle is not None and length == handle.length:
            request.handle = None
            if not handle.is_lent:  # of a text, all is of use
                length = self.conversations.start(request, request.row)
            self.state.running.go_on(request, length)
            if request.prefilled_len == request.prefill_len - 1:  # no prefill will fork them
                self.state.waiting.part(request)

    def _most_with_states(self, shortage: OutOfPages, num_rows: int) -> int:
        """Return how many rows' rounds may find state slots if that many found too few.

        Rows that share a state part with their next round. Where slots lack, some do so later: of
        the last two that share one, the second can write it.
        """
        if all(shortage.group != states.name for states in self.state.ledger.states):
            return 0
        num_lacking = shortage.need - shortage.free - shortage.cached
        return max(num_rows - max(num_lacking, 1), 0)

    def _decode(self, shape_of: Int32, order: npt.NDArray[np.int64]) -> Step | None:
        """Prepare one round of every row that is ready; see `RoundShapes.choose`."""
        state, max_rows = self.state, self.state.ledger.max_batch
        while True:
            rows = state.running.ready(shape_of, order)[:max_rows]
            self._is_starved = False
            if not len(rows):
                return None
            shapes = shape_of[rows]
            writes_draft = state.config.keeps_draft_kv and bool(state.running.shapes[rows].any())
            try:
                plan = state.ledger.prepare_decode(rows, shapes, writes_draft=writes_draft)
            except OutOfPages as shortage:
                if narrowed := self.round_shapes.narrow(state.running.limits):
                    shape_of, order = narrowed  # width gives way before any row
                elif not self._reclaim.drop_idle(shortage):
                    max_rows = self._most_with_states(shortage, len(rows))
                    if not max_rows:
                        self._is_starved = True
                        return None
            except OutOfMemory as shortage:
                self._reclaim.give_up(state.running.by_row[rows].tolist(), shortage)
                return None
            else:
                requests = state.running.by_row[rows].tolist()
                return Step(plan, requests, choice=self.round_shapes.run())
