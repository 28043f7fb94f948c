"""`EngineProcess`: the process in which the engine runs, and its way to the front.

The engine's process ends with the front's: its line breaks then.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from specpool.errors import ConfigError
from specpool.serve.bridge.messages import Failed, Stop

log = logging.getLogger("specpool.serve")


def run_engine(line: Connection, loading: Mapping[str, Any], threads: int) -> None:
    """Load an engine and serve it on the line; the target of the process."""
    # Ctrl-C and a service manager's signal reach all processes of a group: the front decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        import torch
        from transformers.utils import logging as hf_logging

        torch.set_num_threads(threads)
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        from specpool.engine.engine import Engine
        from specpool.serve.bridge.runner import Runner

        with Engine.from_pretrained(**loading) as engine:
            Runner(engine, line).run()
    except (BrokenPipeError, ConnectionResetError):  # the front has died
        return
    except BaseException as error:
        log.exception("the engine has ended")
        try:
            line.send([Failed(f"{type(error).__name__}: {error}", isinstance(error, ConfigError))])
        except OSError:
            return


class EngineProcess:
    """A process with an engine. `send` never waits; `line.fileno()` says when there is news."""

    def __init__(self, loading: Mapping[str, Any], threads: int) -> None:
        """Start the process; it loads the engine and then sends `Ready` or `Failed`.

        Args:
            loading: the arguments of `Engine.from_pretrained`; they must be picklable.
            threads: CPU threads of torch.
        """
        context = multiprocessing.get_context("spawn")
        self.line, far = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(far, dict(loading), threads), name="specpool-engine"
        )
        self._process.start()
        far.close()
        # Writes wait while the engine computes and the pipe is full, so a thread does them.
        self._outbox: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="to-engine", daemon=True)
        self._writer.start()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with news, or when the engine is gone."""
        return self.line.fileno()

    def recv(self) -> list[Any]:
        """Return the next list of messages. EOFError or OSError: the process is gone."""
        found: list[Any] = self.line.recv()
        return found

    def send(self, message: Any) -> None:
        """Send a message; never waits."""
        self._outbox.put([message])

    def close(self, seconds: float = 10.0) -> None:
        """Stop the engine; kill the process if it has not ended after `seconds`."""
        self.send(Stop())
        self._outbox.put(None)
        self._process.join(seconds)
        if self._process.is_alive():
            log.warning("the engine did not stop within %s s: killed", seconds)
            self._process.kill()
            self._process.join()
        self.line.close()

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return self._process.pid

    def _write(self) -> None:
        while (messages := self._outbox.get()) is not None:
            try:
                self.line.send(messages)
            except (OSError, ValueError):  # gone; the reader finds out
                return
