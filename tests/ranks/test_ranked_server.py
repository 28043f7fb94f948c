"""`specpool serve` on two ranks: rank 0 has the front, and everything ends together."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ranks_kit import Group, free_port

OPTIONS = ("--page-size", "4", "--max-context-len", "256", "--num-pages", "256", "--batch", "4")


def _post(port: int, path: str, body: dict[str, Any], **headers: str) -> Any:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as link:
        link.request("POST", path, json.dumps(body), {"content-type": "application/json"} | headers)
        answer = link.getresponse()
        found = json.loads(answer.read())
    assert answer.status == 200, found
    return found


def _complete(port: int, session: str = "", **more: Any) -> str:
    body = {"model": "specpool/tiny", "prompt": "seq: 2, 4, ", "max_tokens": 16, "temperature": 0}
    headers = {"x-session-id": session} if session else {}
    text: str = _post(port, "/v1/completions", body | more, **headers)["choices"][0]["text"]
    return text


def _is_up(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as link:
        try:
            link.request("GET", "/health")
            return link.getresponse().status == 200
        except OSError:
            return False


@pytest.fixture
def served() -> Iterator[tuple[Group, int]]:
    port = free_port()
    group = Group(["-m", "specpool", "serve", "--port", str(port), *OPTIONS])
    try:
        end = time.monotonic() + 400
        while not _is_up(port):
            if time.monotonic() > end or group.processes[0].poll() is not None:
                pytest.fail("\n".join(ended.err for ended in group.wait(5)))
            time.sleep(0.2)
        yield group, port
    finally:
        for process in group.processes:
            process.kill()
            process.communicate()


def test_two_ranks_serve_texts_and_end_with_their_front(served: tuple[Group, int]) -> None:
    group, port = served
    first = _complete(port)
    assert _complete(port) == first
    session = _post(port, "/v1/sessions", {})["id"]
    assert _complete(port, session, session_offset=0)
    time.sleep(2.5)  # idle: rank 0 keeps the other one informed
    assert _complete(port, temperature=1, seed=3, n=2)
    group.processes[0].send_signal(signal.SIGTERM)
    for ended in group.wait(150):
        assert ended.code == 0, ended.err


@pytest.mark.full
def test_a_rank_that_dies_while_all_is_idle_ends_the_server(served: tuple[Group, int]) -> None:
    group, port = served
    _complete(port)
    group.processes[1].kill()
    _, err = group.processes[0].communicate(timeout=150)  # less than ranks wait for each other
    assert group.processes[0].returncode != 0
    assert "rank 1 is gone" in err or "rank 1 has been silent" in err


@pytest.mark.full
def test_a_front_that_dies_ends_the_other_ranks(served: tuple[Group, int]) -> None:
    group, port = served
    _complete(port)
    group.processes[0].kill()
    group.processes[1].communicate(timeout=150)  # raises if it goes on


@pytest.mark.full
def test_a_second_server_on_the_port_is_refused(served: tuple[Group, int]) -> None:
    _, port = served
    other = Group(["-m", "specpool", "serve", "--port", str(port), *OPTIONS])
    _, err = other.processes[0].communicate(timeout=400)
    assert other.processes[0].returncode == 2
    assert f"port: {port} of 127.0.0.1 cannot be taken" in err
    other.processes[1].kill()  # a launcher does so
    other.processes[1].communicate()
    assert _complete(port)
