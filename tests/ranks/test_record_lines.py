"""`Lines`: rank 0 takes the calls of its own ranks alone, and what it sends comes whole."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from specpool.engine.ranks.lines import Lines
from specpool.engine.ranks.record import Record
from specpool.errors import RankError


class Board:
    """A store in this process, that waits for a text as the group's does."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._news = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._news:
            self._texts[key] = value
            self._news.notify_all()

    def get(self, key: str) -> bytes:
        with self._news:
            assert self._news.wait_for(lambda: key in self._texts, 30)
            return self._texts[key].encode()


def _in_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Run `act` beside the test; call the result to wait for what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except RankError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> Any:
        thread.join(60)
        return found[0]

    return ended


def _call(board: Board, said: Callable[[bytes], bytes]) -> socket.socket:
    """Call rank 0 with these bytes, which may know the secret."""
    port, token = board.get("records").decode().split()
    line = socket.create_connection(("127.0.0.1", int(port)), 30)
    line.sendall(said(bytes.fromhex(token)))
    return line


STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "another secret": lambda token: bytes(32) + struct.pack("<I", 1),
    "rank 0": lambda token: token + struct.pack("<I", 0),
    "a rank that is none": lambda token: token + struct.pack("<I", 3),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_who_is_no_rank_of_the_group_gets_no_record(stranger: str) -> None:
    board = Board()
    opened = _in_thread(lambda: Lines.open(board, 0, 3, None, 30))
    with _call(board, STRANGERS[stranger]) as line:
        assert line.recv(1) == b""  # closed at once
    others = [Lines.open(board, rank, 3, None, 30) for rank in (2, 1)]
    first = opened()
    record = Record(7, 5, [["forget", bytes(1 << 20)]])
    sent = _in_thread(lambda: first.send(record.to_bytes(first.key)))
    for each in others:
        assert Record.of_bytes(each.receive(), each.key) == record
    sent()
    first.close()
    with pytest.raises(ConnectionResetError, match="the connection was closed"):
        others[0].receive()
    for each in others:
        each.close()


def _pair(secrets: tuple[bytes, bytes]) -> tuple[Lines, Lines]:
    """Rank 0's lines and rank 1's, which know these secrets."""
    board = Board()
    opened = _in_thread(lambda: Lines.open(board, 0, 2, None, 30, secrets[0]))
    other = Lines.open(board, 1, 2, None, 30, secrets[1])
    return opened(), other


def test_each_group_has_a_key_of_its_own() -> None:
    """Law: it is made of the store's secret, and of the one that is never sent."""
    pairs = [_pair((b"one", b"one")), _pair((b"one", b"one")), _pair((b"one", b"two"))]
    keys = [lines.key for pair in pairs for lines in pair]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert keys[4] != keys[5]
    for pair in pairs:
        for lines in pair:
            lines.close()


def test_records_that_come_together_or_in_pieces_are_told_apart() -> None:
    first, other = _pair((b"", b""))
    records = [Record(n, n, [["forget", bytes(n * n)]]) for n in range(1, 400, 7)]
    frames = b"".join(record.to_bytes(first.key) for record in records)

    def send() -> None:
        for at in range(0, len(frames), 999):
            first.send(frames[at : at + 999])

    sent = _in_thread(lambda: send() or first)
    assert [Record.of_bytes(other.receive(), other.key) for _ in records] == records
    sent()
    first.close()
    with pytest.raises(ConnectionResetError, match="the connection was closed"):
        other.receive()
    other.close()


def test_a_rank_that_calls_twice_is_taken_once() -> None:
    board = Board()
    opened = _in_thread(lambda: Lines.open(board, 0, 3, None, 30))
    first = Lines.open(board, 1, 3, None, 30)
    with _call(board, lambda token: token + struct.pack("<I", 1)) as again:
        assert again.recv(1) == b""
    second = Lines.open(board, 2, 3, None, 30)
    for each in (opened(), first, second):
        each.close()


def test_a_rank_that_does_not_call_is_named() -> None:
    board = Board()
    opened = _in_thread(lambda: Lines.open(board, 0, 3, None, 1))
    with _call(board, lambda token: token + struct.pack("<I", 2)):
        error = opened()
    assert isinstance(error, RankError)
    assert str(error) == "ranks [1] did not call within 1 s"
