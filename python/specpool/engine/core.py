"""`EngineCore`: the scheduler, loop and lock that an engine shares with its sessions."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specpool.checks import shown
from specpool.engine.assembly.assembly import Assembly
from specpool.engine.draft import Choosy, Drafter
from specpool.engine.loop.loop import Loop
from specpool.engine.loop.scrub import scrub_request
from specpool.engine.output import Chunk, Report, RequestOutput
from specpool.engine.prompts import Prompts
from specpool.engine.ranks.journal import RankJournal
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.text.structured.compiler import Compiler
from specpool.errors import ConfigError, SpecpoolError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnItem = Callable[[int, Chunk | RequestOutput], None]


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A request of `submit`, and the callback that gets its chunks and output."""

    request: Request
    report: Report
    on_item: OnItem | None


def _judge(drafters: Sequence[Drafter]) -> Callable[[Request], bool] | None:
    """Return a check whether a request's drafter wants its next round; None if all always do."""
    by_drafter = [drafter if isinstance(drafter, Choosy) else None for drafter in drafters]
    if not any(by_drafter):
        return None

    def is_promising(request: Request) -> bool:
        drafter = by_drafter[request.drafter]
        return drafter is None or drafter.is_promising(request.tokens)

    return is_promising


_CORES: weakref.WeakSet[EngineCore] = weakref.WeakSet()


def _renew_locks() -> None:
    """Give every engine a free lock: in a forked child, the thread that held it does not exist."""
    for core in _CORES:
        core.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)


class EngineCore:
    """One scheduler, the loop that runs its steps, and the lock around both.

    Attributes:
        lock: hold it to run a turn or to change what runs. It is reentrant, for callbacks.
        scheduler: decides which requests run.
        loop: runs the scheduler's steps on the worker.
        journal: tells other ranks what they must do too; None if this process is alone.
        prompts: makes requests of prompts.
        compiler: compiles the forms of texts.
        tokenizer: turns tokens into text; None if there is none.
        worker: runs the forwards.
        host: the host tier; None if there is none.
    """

    def __init__(self, parts: Assembly, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Put a scheduler and a loop on the parts of an engine; nothing runs yet.

        No part refers to the core, so Python frees the core with its last user.
        """
        target, config = parts.target, parts.config
        self.lock = threading.RLock()
        _CORES.add(self)
        self.tokenizer, self.worker, self.host = tokenizer, parts.worker, parts.host
        self.journal = None if parts.ranks is None else RankJournal(parts.ledger, parts.ranks)
        self.scheduler: Scheduler = Scheduler(
            parts.ledger,
            parts.scheduler_config(),
            host=parts.host,
            controller=parts.controller,
            is_promising=_judge([*parts.drafters.values()]),
            before_release=partial(scrub_request, parts.ledger, parts.cache),
            journal=self.journal,
        )
        self.loop: Loop = parts.loop(
            self.scheduler, busy_check=config.busy_check, journal=self.journal
        )
        self.compiler = Compiler(tokenizer, target.vocab_size, target.eos_token_ids)
        self.prompts = Prompts(
            target,
            tokenizer,
            self.scheduler,
            shape=parts.shape,
            shapes=parts.ledger.shapes,
            num_pages=[group.num_pages for group in parts.ledger.groups],
            max_context_len=parts.max_context_len,
            compiler=self.compiler,
            drafters=parts.drafters,
        )
        self._submitted: dict[int, _Submitted] = {}
        # Submitted requests that lost their row and may have news.
        self._mailbox: dict[int, Request] = {}

    def news(
        self, requests: Sequence[Request], tell: bool = False
    ) -> Generator[tuple[int, list[Chunk | RequestOutput]]]:
        """Run until these requests are done.

        Yields:
            The index of a request with news, and the news if `tell` is set.
        """
        reports = [Report(request, self.tokenizer) for request in requests] if tell else []
        self.prompts.check_open()  # a stream may be read late
        seen_lens = [0] * len(requests)  # output tokens that the caller knows of
        pending = {request.request_id: index for index, request in enumerate(requests)}
        mailbox: dict[int, Request] = {}
        try:
            with self.lock:
                for request in requests:
                    request.mailbox = mailbox
                    if request.sample == 0:  # `submit` also queues its siblings
                        self.scheduler.submit(request)
            while pending:
                # Other calls' turns may have moved our requests on, so look before each turn. Look
                # at running requests only: waiting ones have no news, and may be thousands.
                with self.lock:
                    moved = {*mailbox, *(request.request_id for request in self.scheduler.running)}
                    mailbox.clear()
                for index in sorted(pending[number] for number in moved & pending.keys()):
                    request, news = requests[index], list[Chunk | RequestOutput]()
                    with self.lock:
                        seen_len, seen_lens[index] = seen_lens[index], request.num_output_tokens
                        is_over = request.finish_reason is not None
                        if is_over:
                            del pending[request.request_id]
                        if seen_lens[index] == seen_len and not is_over:
                            continue
                        if tell:
                            news += reports[index].news()
                            self.end_undecoded(request, reports[index])
                    yield index, news
                with self.lock:
                    # Since the look, another call's turn may have finished all of ours.
                    if any(requests[index].finish_reason is None for index in pending.values()):
                        self.loop.turn()
        finally:
            with self.lock, self.loop.recovering():
                for request in requests:
                    self.scheduler.abort(request)
                self.loop.drain_if_idle()

    def end_undecoded(self, request: Request, report: Report) -> None:
        """End a request whose tokens the tokenizer cannot decode; its output is reported next."""
        if report.error is not None:
            with self.loop.recovering():
                self.scheduler.abort(request)

    def compile(self, params: SamplingParams | None) -> None:
        """Compile the form that parameters name; making a request then takes no time.

        Call it without the lock, because compiling may take seconds.

        Raises:
            ConfigError: the form is wrong; see `Compiler.matcher`.
        """
        if isinstance(params, SamplingParams) and params.structured is not None:
            self.compiler.matcher(params.structured)

    def submit(self, request: Request, on_item: OnItem | None, decodes: bool = True) -> int:
        """Queue a request and its siblings for `turn`; returns its number. Hold the lock.

        If an exception stops this, call `take_back`.
        """
        for sample in (request, *request.siblings):
            sample.mailbox = self._mailbox
            report = Report(sample, self.tokenizer, decodes=decodes)
            self._submitted[sample.request_id] = _Submitted(sample, report, on_item)
        self.scheduler.submit(request)
        return request.request_id

    def take_back(self, request: Request) -> None:
        """Forget a request whose caller never got its number, wherever its `submit` stopped."""
        with self.lock:
            number = request.request_id
            known = [self._submitted.get(number + i) for i in range(request.params.n)]
            for sample in [
                request,
                *(submitted.request for submitted in known if submitted is not None),
            ]:
                with self.loop.recovering():
                    self.scheduler.abort(sample)
                self._submitted.pop(sample.request_id, None)
                self._mailbox.pop(sample.request_id, None)

    def submitted(self, number: object) -> Request:
        """Return a submitted request by its number.

        Raises:
            ConfigError: no submitted request has this number, or its output has been delivered.
        """
        if not isinstance(number, int) or number not in self._submitted:
            raise ConfigError(f"no request {shown(number)} is running or waiting")
        return self._submitted[number].request

    def first_sample(self, request: Request) -> Request:
        """Return the first sample of a submitted request's prompt; itself if that has ended."""
        submitted = self._submitted.get(request.request_id - request.sample)
        return request if submitted is None else submitted.request

    def abort(self, number: int) -> None:
        """Abort a submitted request; see `Engine.abort`.

        Raises:
            ConfigError: no submitted request has this number, or its output has been delivered.
        """
        with self.lock:
            request = self.submitted(number)
            with self.loop.recovering():
                self.scheduler.abort(request)

    def turn(self) -> bool:
        """Run one turn for all requests; return False when nothing is left to do.

        Raises:
            Exception: the first error of an `on_item`, after every other one was called.
        """
        with self.lock:
            self.loop.turn()
            # A waiting request has no news, and thousands may wait.
            running = {request.request_id for request in self.scheduler.running}
            failure: Exception | None = None
            for number in sorted(running | self._mailbox.keys()):
                submitted = self._submitted.get(number)
                if submitted is not None:
                    try:
                        self._deliver(number, submitted)
                    except Exception as error:  # of an `on_item`: report to the others first
                        failure = failure or error
                        continue  # the next turn tells the rest
                    if number in self._submitted and submitted.request.finish_reason is not None:
                        continue  # its own `on_item` ended it: the next turn gives its output
                self._mailbox.pop(number, None)  # last: after Ctrl-C the next turn tells the rest
            if failure is not None:
                raise failure
            return bool(self.scheduler.has_requests or self.loop.num_flying or self._submitted)

    def end_everything(self) -> list[str]:
        """End all requests, pins and sessions; return a message per part that refused."""
        with self.loop.recovering():
            failures = self.scheduler.abort_all()
            try:
                self.loop.drain()
            except SpecpoolError as error:
                failures.append(f"the steps on their way: {error}")
            failures += self.scheduler.pins.drop_all()
            failures += self.scheduler.conversations.close_all()
            self.scheduler.prefix_cache.forget()
            if self.host is not None:
                self.host.close()
        return failures

    def _deliver(self, number: int, submitted: _Submitted) -> None:
        """Pass a submitted request's new chunks and output to its callback."""
        if submitted.on_item is None and submitted.request.finish_reason is None:
            return  # nobody reads the text of a turn, so it is not decoded
        for item in submitted.report.news():
            if isinstance(item, RequestOutput):
                del self._submitted[number]
            if submitted.on_item is not None:
                submitted.on_item(number, item)
        self.end_undecoded(submitted.request, submitted.report)
