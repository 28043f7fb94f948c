"""Imports what takes seconds, then runs Python commands in children; `warm_kit` asks for them."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

#: Nothing of specpool's own, so that a command imports it anew.
IMPORTS = ("torch", "transformers.models.llama.modeling_llama", "torch.distributed.tensor")


def _command(line: socket.socket) -> list[str] | None:
    """Return the next command in the child that shall run it; None when nobody asks any more."""
    while True:
        frame, fds, _, _ = socket.recv_fds(line, 1 << 20, 4)
        if not frame:
            return None
        arguments, folder, environment, max_files = json.loads(frame)
        *streams, ended = fds
        pid_reader, pid_writer = os.pipe()
        if os.fork():  # its child waits for the command, so that nobody else has to
            for fd in (*fds, pid_writer):
                os.close(fd)
            line.sendall(os.read(pid_reader, 8))
            os.close(pid_reader)
            continue
        line.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if child := os.fork():
            os.write(pid_writer, child.to_bytes(8, "little"))
            for fd in (*streams, pid_reader, pid_writer):
                os.close(fd)
            os.closerange(0, 3)
            _, status = os.waitpid(child, 0)
            os.write(ended, status.to_bytes(4, "little"))
            os._exit(0)
        for fd in (ended, pid_reader, pid_writer):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, max_files)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        return arguments


def _keep_spare() -> None:
    """Keep a child that becomes the first one which `multiprocessing` spawns."""
    here, there = socket.socketpair()
    if not (spare := os.fork()):
        here.close()
        frame, fds, _, _ = socket.recv_fds(there, 1 << 20, 8)
        if not frame:
            os._exit(0)
        there.close()
        arguments, numbers, environment = json.loads(frame)
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(*numbers, *fds) + 1) for fd in fds]
        for number, copy in zip(numbers, copies, strict=True):
            os.dup2(copy, number, inheritable=False)
        for fd in {*fds, *copies} - {*numbers}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        _become(arguments)
    there.close()
    spawn, spares = multiprocessing.util.spawnv_passfds, [spare]

    def spawn_or_wake(path: bytes, arguments: list[str], fds: list[int]) -> int:
        if not spares or "spawn_main" not in arguments[-2]:
            return spawn(path, arguments, fds)
        frame = json.dumps([arguments[-3:], [*fds], dict(os.environ)]).encode()
        socket.send_fds(here, [frame], fds)
        here.close()
        return spares.pop()

    multiprocessing.util.spawnv_passfds = spawn_or_wake


def _become(arguments: list[str]) -> NoReturn:
    """Run a command as a new interpreter would, without the end of one, which takes a second."""
    sys.stdin = sys.__stdin__ = open(0)
    sys.stdout = sys.__stdout__ = open(1, "w")
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace")
    code = 0
    try:
        _run(*arguments)
    except SystemExit as end:
        code = 1 if isinstance(end.code, str) else end.code or 0
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed
            stream.flush()
    os._exit(code)


def _run(kind: str, *rest: str) -> None:
    if kind == "-m":
        sys.argv, sys.path[0] = [*rest], os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [kind, *rest], os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # a search for garbage would copy every page
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        command = _command(connection)
    if command is not None:
        _keep_spare()
        _become(command)
