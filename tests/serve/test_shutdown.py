"""The end of a server: streams end whole or with an error, and never as if they were whole."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from http.client import HTTPException

import pytest

from serve_kit import Server, events

BODY = {"prompt": "seq: 2, 4, ", "temperature": 0, "stream": True, "ignore_eos": True}


def streams(server, count, max_tokens):
    """Start streams in threads; returns the threads and a list for their answers."""
    answers = []

    def ask():
        body = BODY | {"max_tokens": max_tokens}
        try:
            answers.append(server.ask("POST", "/v1/completions", body))
        except (OSError, HTTPException):  # the server was killed
            answers.append((0, "", {}))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2000
    while True:  # all have come, and one at least runs
        metrics = server.metrics()
        running = metrics["specpool_running_requests"]
        if running and running + metrics["specpool_waiting_requests"] + len(answers) >= count:
            return threads, answers
        assert time.monotonic() < end


def lasts(threads, answers):
    for thread in threads:
        thread.join(300)
    assert len(answers) == len(threads)
    return [list(events(text))[-1] for status, text, _ in answers if status == 200]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_running_streams_end_whole_and_new_ones_are_refused(number):
    with Server("--batch", "4") as server:
        threads, answers = streams(server, 4, 400)
        server.process.send_signal(number)
        refusals = set()
        while server.process.poll() is None:
            try:
                status, body, _ = server.ask("POST", "/v1/completions", BODY | {"max_tokens": 1})
                refusals |= {(status, body["error"]["code"])} if status != 200 else set()
                assert server.ask("GET", "/health")[0] in (200, 503)
            except OSError:  # it has closed its port
                break
        assert server.process.wait(200) == 0
        assert refusals == {(503, "server_shutting_down")}
        assert lasts(threads, answers) == ["[DONE]"] * 4


def test_streams_that_do_not_end_in_time_end_with_an_error():
    with Server("--batch", "4", "--drain-timeout", "0.3") as server:
        threads, answers = streams(server, 8, 1900)
        assert server.stop() == 0
        codes = [last["error"]["code"] for last in lasts(threads, answers)]
        assert codes and set(codes) == {"server_shutting_down"}


def test_a_second_signal_ends_the_drain():
    with Server("--batch", "4", "--drain-timeout", "600") as server:
        threads, answers = streams(server, 4, 1900)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.stop() == 0
        assert all(last == "[DONE]" or last["error"] for last in lasts(threads, answers))


def test_a_dead_engine_is_told_and_ends_the_server():
    """Exit code 2, so that whoever started the server starts it again."""
    with Server("--batch", "4") as server:
        threads, answers = streams(server, 4, 1900)
        (engine,) = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        codes = [last["error"]["code"] for last in lasts(threads, answers)]
        assert codes == ["engine_gone"] * 4
        assert server.process.wait(200) == 2
        server.log("error: the engine has ended")


def test_a_dead_front_ends_the_engine():
    with Server("--batch", "4", warm=False) as server:
        threads, answers = streams(server, 1, 1900)
        (engine,) = children(server.process.pid)
        server.process.kill()
        server.process.wait(200)
        end = time.monotonic() + 200
        while os.path.exists(f"/proc/{engine}") and not is_zombie(engine):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert lasts(threads, answers) == [] and answers[0][0] == 0


def children(pid):
    """The engine's process: the child whose command is a spawned one, or that of `warm_kit`."""
    engine_pids = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline") as file:
                command = file.read()
        except (OSError, ValueError):
            continue
        if parent == pid and re.search("spawn_main|warm_process", command):
            engine_pids.append(int(name))
    return engine_pids


def is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
