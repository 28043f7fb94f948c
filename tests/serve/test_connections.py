"""Connections of clients that read nothing, or ask nothing: none is held for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
import uvicorn

from specpool.serve.config import ServeConfig
from specpool.serve.front import Front
from specpool.serve.guard.protocol import guarded

SIZE = 16 << 20


left = []  # paths whose client has left


async def answers(scope, receive, send):
    """The answer to `/large` is more than the buffers of the system hold.

    That to `/never` does not come, and that to `/begun` has no end.
    """
    if scope["path"] in ("/never", "/begun"):
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"xx", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.append(scope["path"])
        return
    size = SIZE if scope["path"] == "/large" else 2
    head = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"x" * size})


def with_front(test, **limits):
    """Run `test(connect)` in a thread beside a server with these limits."""

    async def run():
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        http = guarded(ServeConfig(**limits))
        front = Front(uvicorn.Config(answers, http=http, lifespan="off", log_config=None))
        served = asyncio.create_task(front.serve(sockets=[listener]))
        while not front.started:
            await asyncio.sleep(0.01)
        held = []

        def connect():
            held.append(socket.socket())
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            held[-1].settimeout(120)
            held[-1].connect(listener.getsockname())
            return held[-1]

        connect.open = front.server_state.connections
        try:
            await asyncio.to_thread(test, connect)
        finally:
            for sock in held:
                sock.close()
            front.should_exit = True
            await served

    asyncio.run(run())


def get(path, *lines):
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def asks(sock):
    """A short request on an open connection."""
    sock.sendall(get("/short"))
    answered(sock)


def answered(sock):
    """Read a short answer."""
    answer = sock.recv(65536)
    while not answer.endswith(b"xx"):
        answer += sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")


def rest_of(sock):
    """The number of bytes until the end, however it comes."""
    count = 0
    try:
        while part := sock.recv(1 << 20):
            count += len(part)
    except ConnectionResetError:
        pass
    return count


@pytest.mark.parametrize("lines", [(), ("Connection: close",)], ids=["kept", "closed"])
def test_a_whole_answer_that_nobody_reads_is_cut_off(lines):
    def test(connect):
        sock = connect()
        sock.sendall(get("/large", *lines))
        assert sock.recv(1)
        end = time.monotonic() + 120
        while connect.open:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert rest_of(sock) < SIZE - 1

    with_front(test, write_timeout=0.5)


def test_one_who_reads_slowly_gets_the_whole_answer():
    """It takes several times `write_timeout`."""

    def test(connect):
        sock, count = connect(), 0
        sock.sendall(get("/large", "Connection: close"))
        begin = time.monotonic()
        while time.monotonic() < begin + 3:
            count += len(sock.recv(1 << 14))
            time.sleep(0.01)
        assert count < SIZE < count + rest_of(sock)

    with_front(test, write_timeout=1)


def test_the_connection_that_is_idle_for_the_longest_time_makes_room():
    def test(connect):
        busy = connect()
        busy.sendall(get("/large", "Connection: close"))
        assert busy.recv(1 << 10)
        held = [connect() for _ in range(5)]
        for sock in held:
            asks(sock)
        asks(held[0])  # now the second is idle for the longest time
        asks(connect())
        assert rest_of(held[1]) == 0
        for sock in (held[0], *held[2:]):
            asks(sock)
        assert rest_of(busy) > 0

    with_front(test, max_connections=6, write_timeout=20)


def test_a_server_full_of_requests_takes_no_further_connection():
    def test(connect):
        busy = [connect() for _ in range(3)]
        for sock in busy:
            sock.sendall(get("/large", "Connection: close"))
            assert sock.recv(1 << 10)
        assert not rest_of(connect())
        assert all(rest_of(sock) for sock in busy)

    with_front(test, max_connections=3, write_timeout=20)


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (get("/short", "Content-Length: 99"), b"x"),
        (get("/short", "Transfer-Encoding: chunked"), b"5\r\nab"),
        (get("/short"), b"\r\n"),
    ],
    ids=["body", "chunks", "empty lines"],
)
def test_what_comes_behind_an_answer_and_is_no_request_holds_no_connection(head, rest):
    """Law: it makes room for others, and ends within `read_timeout`."""

    def hold(connect):
        sock = connect()
        sock.sendall(head)
        answered(sock)
        sock.sendall(rest)
        time.sleep(0.1)  # for the rest to come
        return sock

    def makes_room(connect):
        held = [hold(connect) for _ in range(2)]
        asks(connect())
        assert rest_of(held[0]) == 0

    def ends(connect):
        assert rest_of(hold(connect)) == 0

    with_front(makes_room, max_connections=2)
    with_front(ends, read_timeout=0.5)


def test_a_body_that_nobody_reads_keeps_the_next_request_from_nothing():
    def test(connect):
        sock = connect()
        sock.sendall(get("/short", "Content-Length: 3"))
        answered(sock)
        sock.sendall(b"abc\r\n")
        time.sleep(0.1)
        asks(sock)
        time.sleep(1)  # longer than what is no request may take
        asks(sock)

    with_front(test, read_timeout=0.5)


@pytest.mark.parametrize("path", ["/never", "/begun"])
@pytest.mark.parametrize("behind", [b"", get("/short"), get("/short") * 3 + b"GET /sh"])
def test_a_request_hears_that_its_client_has_left_whatever_stands_behind_it(path, behind):
    """Law: a text is aborted also if its client has sent the next request already."""

    def test(connect):
        left.clear()
        sock = connect()
        sock.sendall(get(path) + behind)
        if path == "/begun":
            assert sock.recv(1)
        time.sleep(0.1)  # for the rest to come
        sock.close()
        end = time.monotonic() + 60
        while left != [path]:
            assert time.monotonic() < end
            time.sleep(0.01)

    with_front(test)


def test_what_is_no_request_becomes_no_part_of_an_answer_that_has_begun():
    def test(connect):
        sock = connect()
        sock.sendall(get("/begun"))
        answer = b""
        while not answer.endswith(b"xx\r\n"):
            answer += sock.recv(1 << 10)
        sock.sendall(b"\0\r\n\r\n")
        assert rest_of(sock) == 0

    with_front(test)


def test_a_head_counts_once_however_it_comes():
    """Law: the limit is the same for a head in one piece, in parts, and behind other requests."""
    fields = [f"X-{i}: {'y' * 91}" for i in range(30)]  # about 3,000 bytes

    def test(connect):
        for lines, status in ((fields, b"200"), (fields * 2, b"431")):
            for size in (1 << 20, 700):
                sock, head = connect(), get("/short", *lines)
                with contextlib.suppress(OSError):  # refused meanwhile
                    for start in range(0, len(head), size):
                        sock.sendall(head[start : start + size])
                        time.sleep(0.02)  # so that it comes as a part
                assert sock.recv(1 << 10).startswith(b"HTTP/1.1 " + status)
        sock, many = connect(), 200  # together they are more than the most of one head
        content = get("/short") * many
        sock.sendall(content[:-9])
        time.sleep(0.1)
        sock.sendall(content[-9:])
        answer = b""
        while answer.count(b"HTTP/1.1 200") < many or not answer.endswith(b"xx"):
            part = sock.recv(1 << 16)
            assert part, answer[-200:]
            answer += part

    with_front(test, max_header=4096)
