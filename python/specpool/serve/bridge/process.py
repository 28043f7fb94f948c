"""`EngineProcess`: the process in which the engine runs, and its way to the front.

The engine's process ends with the front's: its socket breaks then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specpool.engine.ranks.environment import world_of_environment
from specpool.errors import ConfigError
from specpool.serve import garbage
from specpool.serve.bridge.frames import HEAD, SocketLine, frame_of
from specpool.serve.bridge.messages import Failed

if TYPE_CHECKING:
    from specpool.engine.ranks.group import Ranks

log = logging.getLogger("specpool.serve")


def run_engine(
    sock: socket.socket, loading: Mapping[str, Any], threads: int, rank_variables: Mapping[str, str]
) -> None:
    """Load an engine and serve it on the socket; the target of the process.

    `rank_variables` go into the environment; they say which rank the engine is.
    """
    os.environ.update(rank_variables)
    # Ctrl-C and a service manager's signal reach all processes of a group: the front decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    line = SocketLine(sock)
    try:
        import torch
        from transformers.utils import logging as hf_logging

        torch.set_num_threads(threads)
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        from specpool.engine.engine import Engine
        from specpool.serve.bridge.runner import Runner

        ranks = join_ranks(loading, line)
        with ranks or contextlib.nullcontext():
            with Engine.from_pretrained(**loading, ranks=ranks) as engine:
                garbage.settle()
                Runner(engine, line).run()
    except (BrokenPipeError, ConnectionResetError):  # the front has died
        return
    except BaseException as error:
        is_users = isinstance(error, ConfigError)
        if not is_users:
            log.exception("the engine has ended")
        with contextlib.suppress(OSError):
            line.send([Failed(f"{type(error).__name__}: {error}", is_users)])


def join_ranks(loading: Mapping[str, Any], line: SocketLine) -> Ranks | None:
    """Join the ranks that share the target, as rank 0; None if there are none.

    Raises:
        RankError: not all ranks came.
    """
    if world_of_environment()[1] == 1:
        return None
    from specpool.engine.ranks.group import Ranks

    os.dup2(2, 1)  # gloo prints from C++, and the front has the standard output
    ranks = Ranks(loading["device"])

    def end(message: str) -> None:
        with contextlib.suppress(OSError):
            line.send([Failed(message, False)])
        log.error("%s", message)
        os._exit(1)

    ranks.on_lost = end
    return ranks


class EngineProcess:
    """A process with an engine."""

    def __init__(
        self,
        loading: Mapping[str, Any],
        threads: int,
        rank_variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; it loads the engine and then sends `Ready` or `Failed`.

        Args:
            loading: the arguments of `Engine.from_pretrained`; they must be picklable.
            threads: CPU threads of torch.
            rank_variables: environment variables of its ranks; None leaves the environment alone.
        """
        self._near, far = socket.socketpair()
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(far, dict(loading), threads, dict(rank_variables or {})),
            name="specpool-engine",
        )
        self._process.start()
        far.close()
        self._early: list[bytes] = []  # said before `listen`
        self._writer: asyncio.StreamWriter | None = None

    async def listen(self, hear: Callable[[list[Any]], None]) -> None:
        """Give each list of messages to `hear`; return when the process is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._near, limit=1 << 24)
        self._writer.writelines(self._early)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(HEAD), "little")
                hear(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            self._writer.close()

    def send(self, message: Any) -> None:
        """Send a message. It never waits: what the engine has not read yet is kept."""
        frame = frame_of([message])
        if self._writer is None:
            self._early.append(frame)
        elif not self._writer.is_closing():
            self._writer.write(frame)

    def close(self, seconds: float = 10.0) -> None:
        """Wait for the process, which ends after `Stop` or when its socket breaks; then kill it."""
        with contextlib.suppress(OSError):
            self._near.close()
        self._process.join(seconds)
        if self._process.is_alive():
            log.warning("the engine did not stop within %s s: killed", seconds)
            self._process.kill()
            self._process.join()
