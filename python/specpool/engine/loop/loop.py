"""`Loop`: runs the turns of an engine: prepare, launch, take over results.

A failed forward ends only its own requests. Under overlap (D = 1) a turn launches its steps before
it reads the results of the turn before.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, compress, repeat

import torch

from specpool._core import Ledger
from specpool.engine.loop.busy_check import BusyCheck
from specpool.engine.loop.clock import Clock
from specpool.engine.loop.scrub import scrub_free
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.ranks.journal import RankJournal
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step, StepResult
from specpool.engine.worker.graphs.capture import is_out_of_memory
from specpool.engine.worker.results import PendingStep
from specpool.engine.worker.worker import Worker
from specpool.errors import CorruptState, SpecpoolError, StalePlan

# The running average of prefill seconds gives the newest prefill a weight of 1 / _OBSERVED.
_OBSERVED = 8


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step that was launched, and its results to come."""

    turn: int
    step: Step
    pending: PendingStep | None  # None means a reload from the host tier, which gives no tokens
    started: float  # `time.perf_counter` at the launch


class Loop:
    """The loop that runs a scheduler's steps on a worker.

    Attributes:
        scheduler: decides the steps.
        busy_check: runs before each turn.
        clock: measures seconds by phase.
        peak_pages: the most pages of each group that were taken at once.
    """

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Scheduler,
        worker: Worker,
        cache: KVCache,
        busy_check: BusyCheck,
        *,
        overlap_depth: int,
        mixed_chunks: bool,
        host: HostTier | None = None,
        journal: RankJournal | None = None,
    ) -> None:
        """Start with no step on its way; `EngineConfig` explains the options.

        `journal` informs other ranks, which run the same steps; None if there are none.
        """
        self._host, self._journal = host, journal
        self._ledger, self.scheduler, self._worker = ledger, scheduler, worker
        self._cache, self.busy_check = cache, busy_check
        self._overlap_depth, self._mixed_chunks = overlap_depth, mixed_chunks
        self._turns = 0
        self._flying: deque[_Flying] = deque()  # what is on its way, oldest first
        self._num_pages = [group.num_pages for group in ledger.groups]
        self.clock = Clock()
        self._num_lost = 0  # steps that failed, or were never launched
        self.peak_pages = [0] * len(self._num_pages)

    @property
    def num_flying(self) -> int:
        """The number of steps whose results are still to come."""
        return len(self._flying)

    def drain_if_idle(self) -> None:
        """Drain if no request is left."""
        if not self.scheduler.has_requests:
            self.drain()

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """End all running requests if an exception such as Ctrl-C stops the block.

        No step stays on its way then. The exception goes on to the caller. If memory ran out, the
        requests end with an error, otherwise they are aborted.
        """
        try:
            yield
        except GeneratorExit:  # the block itself did not fail: nothing was stopped halfway
            raise
        except BaseException as error:
            if self._journal is not None:
                self._journal.report_failure(error)
            self._flying.clear()
            self._synchronize()
            reason = "error" if is_out_of_memory(error) else "abort"
            self.scheduler.recover(f"a step was stopped: {type(error).__name__}: {error}", reason)
            raise

    def turn(self) -> None:
        """Run one turn if there is a request, else drain."""
        if self.scheduler.has_requests:
            self._run_turn()
        else:
            self.drain()

    def drain(self) -> None:
        """Wait for all steps on their way and take over their results; no page is fenced then."""
        if self._flying and self._journal is not None:
            self._journal.note_end("drain")
        with self.recovering():
            while self._flying:
                self._take_over(self._flying.popleft())

    def _run_turn(self) -> None:
        """Launch the steps that can run now, then take over the results of earlier turns.

        Under overlap (D = 1) the results of this turn's steps stay on their way.

        If a forward fails, only its requests end. If anything else fails, all running requests
        end. Lack of memory is then not raised: the outputs that ended carry it, and waiting
        requests go on. If it ended no request, it is raised, because the next turn would meet it
        again. With other ranks every error is raised: they cannot know of it.
        """
        num_ended = self.scheduler.num_ended
        try:
            noted = contextlib.nullcontext() if self._journal is None else self._journal.turn()
            with self.recovering(), noted:
                self._run_steps()
        except (MemoryError, RuntimeError) as error:
            can_continue = is_out_of_memory(error) and self._journal is None
            if self.scheduler.num_ended == num_ended or not can_continue:
                raise

    def _run_steps(self) -> None:
        """Do the work of `_run_turn`, without its handling of errors."""
        self._run_busy_check()
        before = [flying.step for flying in self._flying]
        started, num_lost = time.perf_counter(), self._num_lost
        with self.clock.schedule:
            steps = self.scheduler.schedule()
        if not self.scheduler.has_requests:  # the busy check has ended the last requests
            return
        if not steps and not self._flying:
            out_of_use = f"{len(self.busy_check.rows)} of {self._ledger.num_rows} rows"
            raise CorruptState(f"no request can run: {out_of_use} are out of use")
        self._turns += 1
        reloads = [step for step in steps if step.handles is not None]
        forwards = [step for step in steps if step.handles is None]
        runs_together = len(forwards) > 1 and self._mixed_chunks
        groups = [forwards] if runs_together else [[step] for step in forwards]
        later_groups = deque([*([step] for step in reloads), *groups])
        while later_groups:
            self._launch(later_groups.popleft(), later_groups)
        last = self._turns - (self._overlap_depth if steps else 1)
        while self._flying and self._flying[0].turn <= last:
            self._take_over(self._flying.popleft())
        if self._num_lost == num_lost:
            self._observe_round(before, steps, time.perf_counter() - started)

    def _run_busy_check(self) -> None:
        """Run the busy check before a step is prepared; raise what it says must be raised."""
        finding_ct = self.busy_check.finding_ct
        error = self.busy_check.look()
        if error is None and self.busy_check.finding_ct == finding_ct:
            return
        try:
            self.drain()  # so that no step under way has a row that is out of use
        except SpecpoolError as failure:
            raise (error or failure) from failure
        if error is not None:
            raise error

    def _launch(self, steps: list[Step], later_groups: deque[list[Step]]) -> None:
        """Enqueue the forward of one step, or of a prefill and a round side by side.

        If a step cannot be launched, undo it and the steps of `later_groups`, which are then gone.
        """
        for group, num_pages in enumerate(self._num_pages):
            available = self._ledger.free_pages(group) + self._ledger.cached_pages(group)
            used = num_pages - available
            self.peak_pages[group] = max(self.peak_pages[group], used)
        launched = list[Step]()
        for step in steps:
            try:
                self.scheduler.launch(step)
            except StalePlan:  # an earlier forward of this turn failed and released one of its rows
                lost = [*steps[len(launched) :], *chain(*later_groups)]
                self._num_lost += len(lost)
                for lost_step in reversed(lost):
                    self.scheduler.cancel(lost_step)
                later_groups.clear()
                break
            launched.append(step)
        if not launched:
            return
        started, pending = time.perf_counter(), list[PendingStep | None]()
        try:
            with self.clock.launch:
                for step in launched:
                    self.busy_check.forget_tables()
                    self._cache.apply_delta(step.plan.step)
                    self.busy_check.note_tables(step.plan.step)
                    self._cache.copy_pages(step.plan.page_copies)
                if launched[0].handles is None:
                    pending += self._worker.run(launched)
                elif self._host is not None:
                    self._host.restore(launched[0].plan, launched[0].handles)
                    pending.append(None)
        except Exception as error:
            if self._journal is not None:
                raise self._journal.failed(launched[0].plan.step, error) from error
            for step in launched:
                self._fail(step, error)
        else:
            if self._cache.device.type == "cpu":  # the forward has run
                self._observe(launched, time.perf_counter() - started)
            turns = repeat(self._turns), launched, pending, repeat(started)
            self._flying += map(_Flying, *turns)

    def _take_over(self, flying: _Flying) -> None:
        """Wait for a step's results and give them to the scheduler."""
        if flying.pending is None:
            no_tokens = StepResult.of_lanes([[]] * len(flying.step.requests))
            self.scheduler.take_over(flying.step, no_tokens)
            return
        try:
            with self.clock.wait:
                result = flying.pending.result()
            if self._cache.device.type != "cpu":
                self._observe([flying.step], time.perf_counter() - flying.started)
        except Exception as error:
            if self._journal is not None:
                raise self._journal.failed(flying.step.plan.step, error) from error
            self._fail(flying.step, error)
            return
        if self._journal is not None:
            self._journal.result(flying.step.plan.step, result)
        with self.clock.finish:
            if not result.not_finite.any():
                self.scheduler.take_over(flying.step, result)
                return
            plan = flying.step.plan
            for request in compress(flying.step.requests, result.not_finite.tolist()):
                request.tainted = True
            lost = result.not_finite & (self._ledger.epoch[plan.rows] != plan.epochs)
            self.scheduler.take_over(flying.step, result)
            scrub_free(self._ledger, self._cache, all_groups=bool(lost.any()))

    def _observe(self, steps: list[Step], seconds: float) -> None:
        """Update the average seconds of one prefill token, if the forward was one prefill alone."""
        plan = steps[0].plan
        if len(steps) == 1 and plan.kind == "extend" and steps[0].handles is None:
            latest = seconds / int((plan.new_len - plan.start).sum())
            handles = self.scheduler.handles
            known = handles.token_seconds or latest
            handles.token_seconds = known + (latest - known) / _OBSERVED

    def _observe_round(self, before: list[Step], steps: list[Step], seconds: float) -> None:
        """Report the seconds of a turn that ran one round alone to the choice of shapes.

        Under overlap, a GPU spends the turn on the steps that were on their way `before` it.
        """
        runs_here = self._cache.device.type == "cpu" or not self._overlap_depth
        timed_steps = steps if runs_here else before
        alone = len(timed_steps) == len(steps) == 1 and steps[0].choice is not None
        if alone and (choice := timed_steps[0].choice) is not None:
            shapes = timed_steps[0].plan.shapes

            def observe(seconds: float) -> None:
                self.scheduler.round_shapes.observe(choice, shapes, seconds)

            if self._journal is None:
                observe(seconds)
            else:
                self._journal.measured(observe, seconds)

    def _fail(self, step: Step, error: Exception) -> None:
        """End the requests of a failed forward, after taking over all steps launched before it."""
        self._num_lost += 1
        self._synchronize()
        while self._flying and self._flying[0].step.plan.step < step.plan.step:
            self._take_over(self._flying.popleft())
        self.scheduler.fail(step, error)

    def _synchronize(self) -> None:
        if self._cache.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a lost device has nothing to wait for
                torch.cuda.synchronize(self._cache.device)
