"""A server in a process of its own, and what its tests ask of it. All on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from types import TracebackType
from typing import Any

import warm_kit

#: Pages small enough that requests of a test meet their limits.
SMALL = ("--page-size", "4", "--max-context-len", "256", "--num-pages", "512", "--batch", "8")


class Server:
    """`specpool serve` with options, on a port of its own; `warm` as in `warm_kit`, or not."""

    def __init__(
        self, *options: str, environment: dict[str, str] | None = None, warm: bool = True
    ) -> None:
        command = [sys.executable, "-m", "specpool", "serve", "--port", "0", *options]
        self.process = (warm_kit.Popen if warm else subprocess.Popen)(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        self.key: str | None = None  # for `metrics`
        self.port = self._wait_for_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def _wait_for_port(self) -> int:
        end = time.monotonic() + 500
        while time.monotonic() < end:
            match = re.search(r"http://[\w.\[\]:]+?:(\d+)/v1", "".join(self.out))
            if match:
                return int(match[1])
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        self.process.wait(20)
        self._close()
        raise AssertionError("no server:\n" + "".join(self.out + self.err))

    def log(self, wanted: str) -> str:
        """What stands in the log, once `wanted` stands there: a line may come after its answer."""
        end = time.monotonic() + 120
        while wanted not in (text := "".join(self.err)):
            assert time.monotonic() < end, f"no {wanted!r} in the log:\n{text}"
            time.sleep(0.02)
        return text

    def _close(self) -> None:
        for reader in self._readers:
            reader.join(20)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """One request; returns (status, JSON or text, headers)."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = raw if raw is not None else None if body is None else json.dumps(body)
            given = {"content-type": "application/json"} | (headers or {})
            connection.request(method, path, content, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in answer.headers.get("content-type", "")
            return answer.status, json.loads(text) if is_json else text, dict(answer.headers)
        finally:
            connection.close()

    def raw(self, content: bytes, timeout: float = 30) -> bytes:
        """Send bytes and return what comes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as sock:
            sock.sendall(content)
            answer = b""
            while part := sock.recv(65536):
                answer += part
            return answer

    def metrics(self) -> dict[str, float]:
        """The samples of `/metrics`, by name and labels as they stand there."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        lines = self.ask("GET", "/metrics", headers=headers)[1].splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and line[0] != "#")
        return {name: float(value) for name, _, value in pairs}

    def idle(self, seconds: float = 200) -> dict[str, float]:
        """The metrics once nothing runs or waits; no page is held then."""
        end = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            if not (metrics["specpool_running_requests"] or metrics["specpool_waiting_requests"]):
                return metrics
            assert time.monotonic() < end, "requests are left"
            time.sleep(0.05)

    def check_no_leak(self) -> None:
        """Every page is free or cached, and every row is back."""
        metrics = self.idle()
        for group in ("target", "draft"):
            label = f'{{group="{group}"}}'
            free = metrics[f"specpool_group_free_pages{label}"]
            cached = metrics[f"specpool_group_cached_pages{label}"]
            assert free + cached == metrics[f"specpool_group_pages{label}"], group
        assert metrics["specpool_free_rows"] == metrics["specpool_rows"]

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(5)
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._close()
        assert not re.search("Traceback|ASGI callable", text := "".join(self.err)), text


def events(text: str) -> Iterator[Any]:
    """The events of a stream; `[DONE]` as it is."""
    for block in text.split("\n\n"):
        if block:
            data = block.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
