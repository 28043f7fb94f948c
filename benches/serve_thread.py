"""`python -m benches.serve_thread`: the server with its engine in a thread of the front's process.

`python -m benches serve` compares it with `specpool serve`, whose engine has a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from specpool.engine.config import EngineConfig
from specpool.serve.config import ServeConfig


class ThreadEngine:
    """An engine in a thread: messages go through queues, as objects, without pickling."""

    def __init__(self, loading: Mapping[str, Any], threads: int) -> None:
        self._in: deque[Any] = deque()
        self._came = threading.Event()
        self._out: deque[list[Any]] = deque()
        self._hear: Callable[[list[Any]], None] | None = None
        self._running: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, args=(dict(loading), threads))
        self._thread.start()

    # --- the front's end

    async def listen(self, hear: Callable[[list[Any]], None]) -> None:
        self._hear, self._running = hear, asyncio.get_running_loop()
        self._tell()
        await asyncio.to_thread(self._thread.join)

    def send(self, message: Any) -> None:
        self._in.append(message)
        self._came.set()

    def close(self) -> None:
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
        if self._running is not None:
            self._running.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        while self._out and self._hear is not None:
            self._hear(self._out.popleft())

    def _run(self, loading: dict[str, Any], threads: int) -> None:
        import torch

        from specpool.engine.engine import Engine
        from specpool.serve.bridge.runner import Runner

        torch.set_num_threads(threads)
        with Engine.from_pretrained(**loading) as engine:
            Runner(engine, _Far(self)).run()


class _Far:
    """The engine's end of the queues, with the names that `Runner` calls."""

    def __init__(self, engine: ThreadEngine) -> None:
        self.poll, self.recv, self.send = engine.poll, engine.take, engine.put


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
