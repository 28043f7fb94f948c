"""Start a script on several ranks, as a launcher does, and wait for what they say. On loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import warm_kit


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank that has ended."""

    code: int
    out: str
    err: str
    seconds: float  # since the start


class Group:
    """Some ranks that run the same command, each with its number in the environment."""

    def __init__(
        self,
        command: Sequence[str],
        world: int = 2,
        *,
        own: Sequence[Sequence[str]] = (),
        environments: Sequence[dict[str, str]] = (),
    ) -> None:
        """Start; `own` are further arguments of each rank, `environments` further variables."""
        self.port = free_port()
        self._started = time.monotonic()
        self.processes = []
        for rank in range(world):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "OMP_NUM_THREADS": "1",
                "SPECPOOL_RANKS_TIMEOUT": "200",
            }
            more = environments[rank] if environments else {}
            self.processes.append(
                warm_kit.Popen(
                    [sys.executable, *command, *(own[rank] if own else ())],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | variables | more,
                )
            )

    def wait(self, timeout: float = 240) -> list[Ended]:
        """Wait until all have ended; kill those that have not in time."""
        ended, end = [], time.monotonic() + timeout
        for process in self.processes:
            try:
                out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                err += f"\nkilled after {timeout} s"
            seconds = time.monotonic() - self._started
            err = "\n".join(line for line in err.splitlines() if "[Gloo]" not in line)
            ended.append(Ended(process.returncode, out, err, seconds))
        return ended


def script(name: str) -> str:
    """Return the path of a script beside this file."""
    return str(Path(__file__).with_name(name))


def free_port() -> int:
    """Return a port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
