"""`python -m benches.serve_thread`: the server with its engine in a thread of the front's process.

`python -m benches serve` compares it with `specpool serve`, whose engine has a process of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from specpool.config import EngineConfig
from specpool.serve.bridge.messages import Stop
from specpool.serve.config import ServeConfig


class ThreadEngine:
    """An engine in a thread: messages go through queues, as objects, without pickling."""

    def __init__(self, loading: Mapping[str, Any], threads: int) -> None:
        self._in: deque[Any] = deque()
        self._came = threading.Event()
        self._out: deque[list[Any]] = deque()
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(dict(loading), threads))
        self._thread.start()

    # --- the front's end

    def fileno(self) -> int:
        return self._reader

    def recv(self) -> list[Any]:
        os.read(self._reader, 1)
        return self._out.popleft()

    def send(self, message: Any) -> None:
        self._in.append(message)
        self._came.set()

    def close(self) -> None:
        self.send(Stop())
        self._thread.join()

    # --- the engine's end

    def poll(self, timeout: float | None) -> bool:
        if timeout is None and not self._in:
            self._came.wait()
        self._came.clear()
        return bool(self._in)

    def take(self) -> list[Any]:
        return [self._in.popleft() for _ in range(len(self._in))]

    def put(self, messages: list[Any]) -> None:
        self._out.append(messages)
        os.write(self._writer, b".")

    def _run(self, loading: dict[str, Any], threads: int) -> None:
        import torch

        from specpool.engine.engine import Engine
        from specpool.serve.bridge.runner import Runner

        torch.set_num_threads(threads)
        with Engine.from_pretrained(**loading) as engine:
            Runner(engine, _Far(self)).run()


class _Far:
    """The engine's end of the queues, with the names that `Runner` calls."""

    def __init__(self, of: ThreadEngine) -> None:
        self.poll, self.recv, self.send = of.poll, of.take, of.put


def main() -> None:
    """Serve the embedded pair until a signal."""
    from specpool.serve.server import serve

    config = ServeConfig(port=0, access_log=False, max_queue=20_000)
    loading = {
        "target": "specpool/tiny",
        "draft": "specpool/tiny-eagle",
        "trust_remote_code": False,
        "max_batch": int(sys.argv[1]),
        "busy_check": EngineConfig().busy_check,
    }
    serve(config, loading, tell=lambda line: print(line, flush=True), start=ThreadEngine)


if __name__ == "__main__":
    main()
