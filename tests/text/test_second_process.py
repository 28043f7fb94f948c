"""Laws of `SecondProcess`: whatever it does, its parent goes on."""

from __future__ import annotations

import threading
import time

import pytest

from specpool.engine.text.second_process import ProcessError, SecondProcess

#: Answers the first request, and none after it.
SILENT = """
import sys, time

def serve():
    print("true", flush=True)
    print(sys.stdin.readline(), end="", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "silent_process.py").write_text(SILENT)
    monkeypatch.syspath_prepend(tmp_path)
    process = SecondProcess("silent_process", 60)
    assert process.ask([1, "a"], 60) == [1, "a"]
    return process


def test_it_can_be_closed_while_it_is_asked(process):
    """Law: who closes it does not wait for an answer, and who asked is told."""
    errors = []

    def ask() -> None:
        try:
            process.ask(2, 600)
        except ProcessError as error:
            errors.append(error)

    threads = [threading.Thread(target=act, daemon=True) for act in (ask, process.close)]
    for thread in threads:
        thread.start()
        while not process._lock.locked() and not errors:  # until it is asked
            time.sleep(0.001)
    for thread in threads:
        thread.join(120)
    assert [thread.is_alive() for thread in threads] == [False, False]
    (error,) = errors
    assert str(error) == "the process for it ended" and not error.is_late


def test_a_close_before_the_request_is_sent_ends_it_too(process, monkeypatch):
    closer, start = threading.Thread(target=process.close, daemon=True), process._start

    def start_late(first) -> None:
        closer.start()
        while process._process.poll() is None:  # until the other thread has killed it
            time.sleep(0.001)
        start(first)

    with monkeypatch.context() as patch:
        patch.setattr(process, "_start", start_late)
        with pytest.raises(ProcessError, match="the process for it ended"):
            process.ask(2, 60)
    closer.join(60)
    assert not closer.is_alive() and process._process is None
    assert process.ask(3, 60) == 3  # a request after it starts another
    process.close()


def test_it_is_killed_when_it_is_late_and_starts_again(process):
    with pytest.raises(ProcessError, match=r"not ended after 0\.2 s") as caught:
        process.ask(2, 0.2)
    assert caught.value.is_late
    assert process.ask(3, 60) == 3
    process.close()


def test_the_next_request_does_not_pay_for_its_end(process):
    """Law: if the system has ended it between two requests, a new one answers."""
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.ask(3, 60) == 3
    process.close()
