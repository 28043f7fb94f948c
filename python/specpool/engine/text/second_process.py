"""`SecondProcess`: a process for work that may take too much time or memory; it can be killed.

It imports a module and calls its `serve`, which answers each JSON line of its standard input with
one on its standard output.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from typing import Any

#: What the process runs: it imports from where its parent does.
_BEGIN = """
import importlib, json, sys
sys.path[:] = json.loads(sys.stdin.readline())
importlib.import_module(sys.argv[1]).serve()
"""

_ENDED = "the process for it ended"


class ProcessError(Exception):
    """There was no answer.

    Attributes:
        is_late: the process was killed because it took too long.
    """

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


class SecondProcess:
    """The process. It starts with the first request, and again after it has ended.

    Any thread may ask; one request is answered at a time. It ends with this process.
    """

    def __init__(self, module: str, start_seconds: float) -> None:
        """Start nothing yet.

        Args:
            module: its `serve` answers. It first prints the line `true`.
            start_seconds: the most seconds until then.
        """
        self._module, self._start_seconds = module, start_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that started it; a forked child starts its own
        self._is_closing = False
        atexit.register(self.close)

    def ask(self, request: Any, seconds: float, first: Any = None) -> Any:
        """Return the answer to one request.

        Args:
            request: anything that JSON can say.
            seconds: the process is killed if it takes longer.
            first: a request that comes first in each new process, and counts as its start; None if
                there is none.

        Raises:
            ProcessError: there was no answer in time, or the process cannot run.
        """
        line = json.dumps(request)
        with self._lock:
            self._start(first)
            return self._say(line, seconds)

    def _say(self, line: str, seconds: float) -> Any:
        """Send a line and return the answer; end the process if none comes in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:  # the process is gone, perhaps within a line
            self._end()
            reason = _ENDED
            if late.is_set():
                reason = f"it has not ended after {seconds:g} s, and was stopped"
            raise ProcessError(reason, is_late=late.is_set()) from error
        except BaseException:  # Ctrl-C: the next request must not get this answer
            self._end()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process; a caller that waits for its answer gets a `ProcessError`."""
        self._is_closing = True  # first: who has the lock may be about to start another process
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()  # so that the thread that has the lock releases it
        with self._lock:
            self._end()
            self._is_closing = False

    def _start(self, first: Any) -> None:
        if self._owner != os.getpid():
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self._end()  # the system has ended it between two requests, for want of memory
        if self._process is None:
            more = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _BEGIN, self._module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env={**os.environ, **more},
                    start_new_session=True,  # so that Ctrl-C does not reach it
                )
            except OSError as error:
                raise ProcessError(f"no process for it: {error}") from error
            if self._is_closing:
                self._end()
                raise ProcessError(_ENDED)
            self._say(json.dumps([path for path in sys.path if path]), self._start_seconds)
            if first is not None:
                self._say(json.dumps(first), self._start_seconds)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more than it has now, if the system supports it."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        return
