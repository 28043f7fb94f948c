"""`Forms`: requests that wait until the form of their text is compiled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.text.structured.compiler import MAX_COMPILED, MAX_SECONDS, Compiler
from specpool.engine.text.structured.grammar import Grammar
from specpool.engine.text.structured.trial import Trial
from specpool.errors import ConfigError, one_line
from specpool.serve.bridge.messages import Submit

#: Seconds that each form gets at first. A form that needs more queues behind the other slow ones.
QUICK_SECONDS = 0.5
#: Forms that are compiled side by side: quick ones, and slow ones.
_QUICK, _SLOW = 2, 1
#: Slow forms that may wait.
MOST_SLOW = 8


class Forms:
    """Compiles forms beside the rounds, each within `MAX_SECONDS`.

    A form is first tried in a second process, which is killed when its time is over. So a slow form
    blocks neither a core nor other forms: a quick one waits at most `QUICK_SECONDS` for each form
    before it. The results of the latest `MAX_COMPILED` forms are remembered.
    """

    def __init__(self, compiler: Compiler, compile: Callable[[SamplingParams], None]) -> None:
        """Compile by `compile` what `compiler` can compile."""
        self._compiler, self._compile = compiler, compile
        self._quick = ThreadPoolExecutor(_QUICK, thread_name_prefix="compile")
        self._slow = ThreadPoolExecutor(_SLOW, thread_name_prefix="compile-slow")
        self._trials: list[Trial] = []
        self._per_thread = threading.local()  # each thread's trial
        self._lock = threading.Lock()
        self._num_slow = 0
        # Why each form cannot be compiled; None if it can.
        self._failures: OrderedDict[Grammar, str | None] = OrderedDict()
        self._waiting: list[tuple[Future[None], Submit]] = []

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        return bool(self._waiting)

    def add(self, message: Submit) -> None:
        """Compile a request's form."""
        compiled: Future[None] = Future()
        self._waiting.append((compiled, message))
        self._quick.submit(self._work, compiled, message.params, QUICK_SECONDS)

    def drop(self, key: int) -> bool:
        """Forget the request of this key; return whether it waited."""
        for waiting in self._waiting:
            if waiting[1].key == key:
                self._waiting.remove(waiting)
                waiting[0].cancel()
                return True
        return False

    def take(self) -> list[tuple[Future[None], Submit]]:
        """Return the requests whose forms are done, each with a future that has its error."""
        compiled = [waiting for waiting in self._waiting if waiting[0].done()]
        if compiled:
            self._waiting = [waiting for waiting in self._waiting if not waiting[0].done()]
        return compiled

    def close(self) -> None:
        """End the threads and their processes."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _work(self, compiled: Future[None], params: SamplingParams, seconds: float) -> None:
        """Try a form for some seconds, and then compile it for the engine."""
        if compiled.cancelled():
            return
        grammar = params.structured
        assert grammar is not None
        try:
            if not self._is_passed(grammar):
                self._trial().check(grammar, seconds)
                self._note(grammar, None)
            self._compile(params)
            error: Exception | None = None
        except TimeoutError:
            if seconds < MAX_SECONDS and self._go_on(compiled, params):
                return
            error = self._too_slow(grammar, seconds)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # a panic of a library: the request must not wait for ever
            error = RuntimeError(one_line(raised))
        if compiled.set_running_or_notify_cancel():
            if error is None:
                compiled.set_result(None)
            else:
                compiled.set_exception(error)

    def _go_on(self, compiled: Future[None], params: SamplingParams) -> bool:
        """Let a slow form go on behind the others; return whether there is room."""
        with self._lock:
            if self._num_slow >= MOST_SLOW:
                return False
            self._num_slow += 1

        def work() -> None:
            try:
                self._work(compiled, params, MAX_SECONDS)
            finally:
                with self._lock:
                    self._num_slow -= 1

        self._slow.submit(work)
        return True

    def _too_slow(self, grammar: Grammar, seconds: float) -> ConfigError:
        failure = (
            f"structured: a {grammar.kind} of {len(grammar.text)} characters took more than "
            f"{seconds:g} s to compile"
        )
        if seconds < MAX_SECONDS:
            return ConfigError(f"{failure}, and {MOST_SLOW} slow forms wait: try again later")
        self._note(grammar, f"{failure}: make it smaller")
        return ConfigError(f"{failure}: make it smaller")

    def _is_passed(self, grammar: Grammar) -> bool:
        """Return whether a form is known to compile; raise if it is known to be too slow."""
        with self._lock:
            if grammar not in self._failures:
                return False
            self._failures.move_to_end(grammar)
            failure = self._failures[grammar]
        if failure is not None:
            raise ConfigError(failure)
        return True

    def _note(self, grammar: Grammar, failure: str | None) -> None:
        with self._lock:
            self._failures[grammar] = failure
            if len(self._failures) > MAX_COMPILED:
                self._failures.popitem(last=False)

    def _trial(self) -> Trial:
        """Return this thread's second process."""
        if not hasattr(self._per_thread, "trial"):
            self._per_thread.trial = Trial(self._compiler.vocabulary)
            self._trials.append(self._per_thread.trial)
        trial: Trial = self._per_thread.trial
        return trial
