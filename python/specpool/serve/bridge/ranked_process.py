"""`RankedProcess`: an engine's process with further ones, its ranks, which share the target.

The engine is rank 0. Each other rank is a `specpool serve` of the same options on this machine, as
torchrun would start it. If one of them ends, the engine ends; if the engine ends, they all do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specpool.engine.ranks.environment import KEY_VARIABLE
from specpool.serve.bridge.messages import Failed
from specpool.serve.bridge.process import EngineProcess

log = logging.getLogger("specpool.serve")

_LOOPBACK = "127.0.0.1"
#: Seconds between two looks at the ranks.
_LOOK = 0.25
#: Seconds in which the engine says by itself why it ends, once a rank has ended.
_GRACE = 5.0


class RankedProcess(EngineProcess):
    """The processes of one engine.

    Attributes:
        followers: the processes of ranks 1, 2, ..
    """

    def __init__(
        self, loading: Mapping[str, Any], threads: int, words: Sequence[str], world: int
    ) -> None:
        """Start the processes; the engine sends `Ready` or `Failed` when all of them have loaded.

        Args:
            loading: the arguments of `Engine.from_pretrained`; they must be picklable.
            threads: CPU threads of torch, in each process.
            words: the options of `specpool serve` that make this `loading`.
            world: the number of ranks, from 2 on.
        """
        group = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(_free_port()),
            KEY_VARIABLE: secrets.token_hex(16),  # so that no other group is met on the port
        }
        super().__init__(loading, threads, {**group, "RANK": "0", "LOCAL_RANK": "0"})
        command = [sys.executable, "-m", "specpool", "serve", *words]
        self.followers = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(1, world)
        ]

    async def listen(self, hear: Callable[[list[Any]], None]) -> None:
        """Give each list of messages to `hear`; return when the engine or a rank is gone."""
        watching = asyncio.create_task(self._watch(hear))
        try:
            await super().listen(hear)
        finally:
            watching.cancel()

    def close(self, seconds: float = 10.0) -> None:
        """Wait for the processes, which end with the engine; then kill those that are left."""
        super().close(seconds)
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.followers, 1):
            try:
                process.wait(max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                log.warning("rank %d did not stop within %s s: killed", rank, seconds)
                process.kill()
                process.wait()

    async def _watch(self, hear: Callable[[list[Any]], None]) -> None:
        """End the engine if a rank has ended before it, also while it loads."""
        while all(process.poll() is None for process in self.followers):
            await asyncio.sleep(_LOOK)
        ended = next(
            i for i, process in enumerate(self.followers) if process.returncode is not None
        )
        await asyncio.sleep(_GRACE)  # then `listen` has returned, unless the engine waits in vain
        code = self.followers[ended].returncode
        hear([Failed(f"RankError: rank {ended + 1} has ended with exit code {code}", False)])
        await asyncio.to_thread(super().close, 0)


def _free_port() -> int:
    """Return a port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
