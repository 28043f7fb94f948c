"""Python processes that have torch and transformers from their start, in no time.

A new interpreter takes four seconds to import them. `Popen` and `run` are those of `subprocess`
for a command that begins with `sys.executable`; the process is a child of one that has imported
both, and nothing of specpool. What an interpreter reads at its own start (`PYTHONHASHSEED`), or
torch when it is imported (`OMP_NUM_THREADS`), is as in the test's process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("warm_process.py")


@functools.cache
def _line() -> socket.socket:
    """A connection to the process that has the imports; both end with this process."""
    here, there = socket.socketpair()
    command = [sys.executable, str(_SCRIPT), str(there.fileno())]
    process = subprocess.Popen(
        command,
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # it is not interrupted with the tests
    )
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process as of `subprocess.Popen`; of its options only those of pipes, text, cwd and env."""

    _ended = -1  # gives the status

    def _execute_child(self, *arguments: Any) -> None:
        command, folder, environment = arguments[0], arguments[5], arguments[6]
        streams = [arguments[10], arguments[13], arguments[15]]  # the child's ends
        assert command[0] == sys.executable, command
        self._ended, status = os.pipe()
        fds = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        variables = dict(os.environ if environment is None else environment)
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        folder = str(folder or os.getcwd())
        frame = json.dumps([command[1:], folder, variables, max_files]).encode()
        socket.send_fds(_line(), [frame], [*fds, status])
        self.pid = int.from_bytes(_line().recv(8), "little")
        assert self.pid, "the process with the imports has ended"
        for fd in {status, *streams} - {-1}:
            os.close(fd)
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._ended], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._ended, 4)
        os.close(self._ended)
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    command: list[str], *, capture_output: bool = False, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what came of it, as text; options as of `Popen`."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) if capture_output else {}
    with Popen(command, text=True, **pipes, **options) as process:
        out, err = process.communicate()
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
