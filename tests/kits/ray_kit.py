"""A Ray cluster of its own on this machine, and replicas on it. All addresses are loopback's."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

# The cluster lives as long as this program, and the program as long as its standard input.
_DRIVER = """
import os, sys
import ray

context = ray.init(
    num_cpus=8, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=int(sys.argv[1]),
    _node_ip_address="127.0.0.1", object_store_memory=100 << 20, log_to_driver=False,
    _temp_dir=sys.argv[2],
)
print("ready", flush=True)
sys.stdin.read()
from ray import serve
serve.shutdown()
ray.shutdown()
"""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A Ray cluster with a dashboard, and replicas that `specpool deploy` puts on it."""

    def __init__(self, folder: Path) -> None:
        dashboard, self.port = free_port(), free_port()
        self.address = f"http://127.0.0.1:{dashboard}"
        self._token = secrets.token_hex(32)
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._log = tempfile.TemporaryFile("w+")
        self._driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(dashboard), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self.environment,
        )
        assert self._driver.stdout is not None
        if self._driver.stdout.readline() != "ready\n":
            self._driver.kill()
            self._log.seek(0)
            why = self._log.read()[-3000:]
            self.close()
            raise AssertionError(f"no cluster: {why}")

    def deploy(self, *words: str, seconds: float = 300) -> str:
        """`specpool deploy --apply`; returns what it prints."""
        run = subprocess.run(
            [
                *(sys.executable, "-m", "specpool", "deploy", "--apply"),
                *("--address", self.address, "--port", str(self.port), *words),
            ],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=self.environment,
        )
        assert run.returncode == 0, run.stderr
        return run.stderr

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """One request to the proxy; returns (status, JSON or text)."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            content = None if body is None else json.dumps(body)
            given = {"content-type": "application/json"} | (headers or {})
            connection.request(method, path, content, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in answer.headers.get("content-type", "")
            return answer.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def replicas(self) -> dict[str, int]:
        """The running replicas: tag -> process id."""
        connection = HTTPConnection("127.0.0.1", int(self.address.rsplit(":", 1)[1]), timeout=30)
        try:
            token = {"authorization": f"Bearer {self._token}"}
            connection.request("GET", "/api/serve/applications/", headers=token)
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        parts = answer["applications"].get("specpool", {}).get("deployments", {}).values()
        return {
            replica["replica_id"]: replica["pid"]
            for part in parts
            for replica in part["replicas"]
            if replica["state"] == "RUNNING"
        }

    def wait_for(self, number: int, seconds: float = 120, but: set[str] | None = None) -> None:
        """Wait until so many replicas run, none of them of `but`."""
        end = time.monotonic() + seconds
        while len(running := self.replicas()) != number or set(running) & (but or set()):
            assert time.monotonic() < end, running
            time.sleep(0.2)

    def open_sessions(self, number: int) -> list[str]:
        """Open sessions; their ids."""
        idents = []
        for _ in range(number):
            status, body = self.ask("POST", "/v1/sessions", {})
            assert status == 200, body
            idents.append(body["id"])
        return idents

    def turn(self, ident: str, offset: int, prompt: str, **more: Any) -> tuple[int, Any]:
        """One greedy turn of a session."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "session_offset": offset}
        return self.ask("POST", "/v1/completions", body | more, {"x-session-id": ident})

    def close(self) -> None:
        """End the cluster."""
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.close()
        try:
            self._driver.wait(60)
        except subprocess.TimeoutExpired:
            self._driver.kill()
        self._driver.stdout.close()
        self._log.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def engine_of(pid: int) -> int:
    """The process id of the engine that a replica has started."""
    children = _children(pid, b"spawn_main")
    assert children, f"the replica {pid} has no engine"
    return children[0]


def followers_of(pid: int) -> list[int]:
    """The process ids of ranks 1, 2, .. that a replica has started."""
    return _children(pid, b"specpool\0serve")


def _children(pid: int, words: bytes) -> list[int]:
    """The children of a process whose command has these words."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        match = re.search(r"\) \w (\d+) ", stat)
        if match and int(match[1]) == pid and words in command:
            children.append(int(folder.name))
    return sorted(children)


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)
