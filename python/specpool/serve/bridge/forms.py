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

#: Seconds that each form gets at once. One that needs more goes on behind the other slow ones.
QUICK_SECONDS = 0.5
#: Forms that are compiled side by side: quick ones, and slow ones.
_QUICK, _SLOW = 2, 1
#: Slow forms that may wait.
MOST_SLOW = 8


class Forms:
    """Compiles forms beside the rounds, each within `MAX_SECONDS`.

    A form is first tried in a second process, which is killed when its time is over. So slow forms
    keep neither a core nor the forms of others: a quick one waits for `QUICK_SECONDS` of each that
    came before it at most. What a form has shown is remembered for the latest `MAX_COMPILED`.
    """

    def __init__(self, compiler: Compiler, compile: Callable[[SamplingParams], None]) -> None:
        """Compile by `compile` what `compiler` can compile."""
        self._compiler, self._compile = compiler, compile
        self._quick = ThreadPoolExecutor(_QUICK, thread_name_prefix="compile")
        self._slow = ThreadPoolExecutor(_SLOW, thread_name_prefix="compile-slow")
        self._trials: list[Trial] = []
        self._own = threading.local()  # each thread's trial
        self._lock = threading.Lock()
        self._num_slow = 0
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # None = it can be compiled
        self._waiting: list[tuple[Future[None], Submit]] = []

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        return bool(self._waiting)

    def add(self, message: Submit) -> None:
        """Compile a request's form."""
        done: Future[None] = Future()
        self._waiting.append((done, message))
        self._quick.submit(self._work, done, message.params, QUICK_SECONDS)

    def drop(self, key: int) -> bool:
        """Forget the request of this key; return whether it waited."""
        for each in self._waiting:
            if each[1].key == key:
                self._waiting.remove(each)
                each[0].cancel()
                return True
        return False

    def take(self) -> list[tuple[Future[None], Submit]]:
        """Return the requests whose forms are done, each with what is wrong with it."""
        done = [each for each in self._waiting if each[0].done()]
        if done:
            self._waiting = [each for each in self._waiting if not each[0].done()]
        return done

    def close(self) -> None:
        """End the threads and their processes."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _work(self, done: Future[None], params: SamplingParams, seconds: float) -> None:
        """Try a form for some seconds, and then compile it for the engine."""
        if done.cancelled():
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
            if seconds < MAX_SECONDS and self._go_on(done, params):
                return
            error = self._too_slow(grammar, seconds)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # a panic of a library: the request must not wait for ever
            error = RuntimeError(one_line(raised))
        if done.set_running_or_notify_cancel():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _go_on(self, done: Future[None], params: SamplingParams) -> bool:
        """Let a slow form go on behind the others; return whether there is room."""
        with self._lock:
            if self._num_slow >= MOST_SLOW:
                return False
            self._num_slow += 1

        def work() -> None:
            try:
                self._work(done, params, MAX_SECONDS)
            finally:
                with self._lock:
                    self._num_slow -= 1

        self._slow.submit(work)
        return True

    def _too_slow(self, grammar: Grammar, seconds: float) -> ConfigError:
        told = (
            f"structured: a {grammar.kind} of {len(grammar.text)} characters took more than "
            f"{seconds:g} s to compile"
        )
        if seconds < MAX_SECONDS:
            return ConfigError(f"{told}, and {MOST_SLOW} slow forms wait: try again later")
        self._note(grammar, f"{told}: make it smaller")
        return ConfigError(f"{told}: make it smaller")

    def _is_passed(self, grammar: Grammar) -> bool:
        """Return whether a form is known to compile; raise if it is known to be too slow."""
        with self._lock:
            if grammar not in self._known:
                return False
            self._known.move_to_end(grammar)
            told = self._known[grammar]
        if told is not None:
            raise ConfigError(told)
        return True

    def _note(self, grammar: Grammar, told: str | None) -> None:
        with self._lock:
            self._known[grammar] = told
            if len(self._known) > MAX_COMPILED:
                self._known.popitem(last=False)

    def _trial(self) -> Trial:
        """Return this thread's second process."""
        if not hasattr(self._own, "trial"):
            self._own.trial = Trial(self._compiler.vocabulary)
            self._trials.append(self._own.trial)
        trial: Trial = self._own.trial
        return trial
