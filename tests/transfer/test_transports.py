"""Laws of the ways that carry rows: a row arrives whole or not at all, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import re
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from parcel_kit import Parcel, Side
from specpool import ConfigError, TransferError
from specpool.engine.transfer import shared_memory, tcp

KEY = b"sixteen bytes at least"
TOKENS = list(range(64))


def parcel_of(side: Side, length: int = 23, seed: int = 1) -> tuple[Parcel, list[bytes]]:
    row = side.fill(length, seed)
    content = side.content(row)
    return Parcel(side, row, TOKENS[: length + 1]), content


def finish_all(side: Side) -> None:
    for row in side.rows:
        side.ledger.finish(row)
    side.rows.clear()
    side.check_empty()


async def receiver_of(side: Side, **options) -> tcp.TcpReceiver:
    receiver = tcp.TcpReceiver(side.take_in, side.layout, key=KEY, **{"timeout": 2.0} | options)
    await receiver.start()
    return receiver


def test_a_row_goes_over_tcp():
    async def main() -> None:
        one, two = Side(), Side()
        receiver = await receiver_of(two)
        parcel, content = parcel_of(one)
        await tcp.send(parcel, "127.0.0.1", receiver.port, key=KEY)
        assert parcel.outcome == "arrived"
        await receiver.close()
        assert [two.content(row) for row in two.rows] == [content]
        one.check_empty()
        finish_all(two)

    asyncio.run(main())


class Cutter:
    """Carries bytes between a sender and a receiver, and cuts the connection after some of them."""

    def __init__(self, port: int, up: int | None, down: int | None) -> None:
        self._port, self._left = port, [up, down]

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ends = (writer, other_writer)

        async def pump(at, source, sink) -> None:
            try:
                while piece := await source.read(4096):
                    if self._left[at] is not None:
                        piece = piece[: self._left[at]]
                        self._left[at] -= len(piece)
                    sink.write(piece)
                    await sink.drain()
                    if self._left[at] == 0:
                        for end in ends:
                            end.transport.abort()
                        return
                if sink.can_write_eof():
                    sink.write_eof()
            except OSError:
                pass

        await asyncio.gather(pump(0, reader, other_writer), pump(1, other_reader, writer))
        for end in ends:
            end.transport.abort()

    async def close(self) -> None:
        self._server.close()


@pytest.mark.parametrize("num_kills", [250, pytest.param(1000, marks=pytest.mark.full)])
def test_a_connection_that_is_cut_anywhere_leaks_nothing(num_kills):
    """Cuts at random bytes, of either direction."""
    tally = {"arrived": 0, "back": 0}

    async def main() -> None:
        rng = random.Random(1)
        one, two = Side(), Side()
        receiver = await receiver_of(two)
        for kill in range(num_kills):
            parcel, content = parcel_of(one, rng.choice([3, 23, 60]), kill)
            up = rng.randrange(64 + parcel.num_bytes + 40)
            cut = (up, None) if rng.random() < 0.7 else (None, rng.randrange(110))
            cutter = Cutter(receiver.port, *cut)
            port = await cutter.start()
            try:
                await tcp.send(parcel, "127.0.0.1", port, key=KEY, timeout=2.0)
            except TransferError:
                pass
            await cutter.close()
            assert parcel.outcome in tally
            tally[parcel.outcome] += 1
            while receiver._peers:
                await asyncio.sleep(0)
            assert all(two.content(row) == content for row in two.rows)
            # Whoever was cut off between the answer and the end undoes it: nobody has it twice.
            assert len(two.rows) <= (parcel.outcome == "arrived")
            one.check_empty()
            finish_all(two)
        await receiver.close()

    asyncio.run(main())
    assert tally["back"] > num_kills * 0.8, tally


def test_a_wrong_key_is_refused_by_both_sides():
    async def main() -> None:
        one, two = Side(), Side()
        receiver = await receiver_of(two)
        parcel, _ = parcel_of(one)
        with pytest.raises(TransferError, match="did not arrive"):
            await tcp.send(parcel, "127.0.0.1", receiver.port, key=KEY[::-1])
        assert parcel.outcome == "back"
        while receiver._peers:
            await asyncio.sleep(0)
        assert receiver.failures == ["TransferError: a peer has a wrong key"]
        await receiver.close()

        async def liar(reader, writer) -> None:
            writer.write(bytes(64))
            await reader.read()
            await hang_up(writer)

        server = await asyncio.start_server(liar, "127.0.0.1", 0)
        parcel, _ = parcel_of(one)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransferError, match="has another key"):
            await tcp.send(parcel, "127.0.0.1", port, key=KEY)
        server.close()
        await asyncio.sleep(0.05)
        one.check_empty()
        two.check_empty()

    asyncio.run(main())


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def test_a_peer_that_sends_garbage_or_nothing_is_hung_up_on():
    async def main() -> None:
        two = Side()
        receiver = await receiver_of(two, timeout=0.2, max_peers=2)
        rng = random.Random(2)
        for size in (0, 1, 64, 5000):
            reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
            writer.write(rng.randbytes(size))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 120)  # to the end
            await hang_up(writer)
        assert len(receiver.failures) == 4
        peers = [await asyncio.open_connection("127.0.0.1", receiver.port) for _ in range(2)]
        for reader, _ in peers:
            await reader.readexactly(32)
        peers.append(await asyncio.open_connection("127.0.0.1", receiver.port))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await peers[2][0].readexactly(32)  # one peer too many
        await receiver.close()
        for _, writer in peers:
            await hang_up(writer)
        two.check_empty()

    asyncio.run(main())


def test_what_the_receiver_refuses_goes_back_with_the_reason():
    async def main() -> None:
        one, two = Side(), Side(num_rows=1)
        two.ledger.admit()
        receiver = await receiver_of(two)
        parcel, _ = parcel_of(one)
        with pytest.raises(TransferError, match=r"refused the row: .*rows"):
            await tcp.send(parcel, "127.0.0.1", receiver.port, key=KEY)
        assert parcel.outcome == "back"
        two.layout = type(two.layout)("another model", 64, two.layout.groups)
        await receiver.close()
        receiver = await receiver_of(two)
        parcel, _ = parcel_of(one)
        with pytest.raises(TransferError, match="models, weights, dtype"):
            await tcp.send(parcel, "127.0.0.1", receiver.port, key=KEY)
        await receiver.close()
        one.check_empty()

    asyncio.run(main())


def test_bad_settings_are_one_error_each():
    async def main() -> None:
        side = Side()
        for key in (b"short", "a text of enough length", None):
            with pytest.raises(ConfigError, match="16 secret bytes"):
                tcp.TcpReceiver(side.take_in, side.layout, key=key)
        with pytest.raises(ConfigError, match="port"):
            tcp.TcpReceiver(side.take_in, side.layout, key=KEY, port=1 << 16)
        receiver = await receiver_of(side)
        with pytest.raises(ConfigError, match=r"cannot be received at 127\.0\.0\.1"):
            await receiver_of(side, port=receiver.port)
        port = receiver.port
        await receiver.close()
        parcel, _ = parcel_of(side)
        with pytest.raises(TransferError, match=f"did not arrive at 127.0.0.1:{port}"):
            await tcp.send(parcel, "127.0.0.1", port, key=KEY)
        parcel, _ = parcel_of(side)
        with pytest.raises(ConfigError, match="16 secret bytes"):
            await tcp.send(parcel, "127.0.0.1", port, key=b"")
        assert parcel.outcome == "back"
        side.check_empty()

    asyncio.run(main())


needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux's")


@needs_memfd
def test_a_row_goes_through_shared_memory(tmp_path):
    one, two = Side(), Side()
    path = tmp_path / "rows"
    with shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=2.0):
        assert path.stat().st_mode & 0o777 == 0o600
        contents = []
        for seed in range(3):
            parcel, content = parcel_of(one, seed=seed)
            contents.append(content)
            shared_memory.send(parcel, path)
            assert parcel.outcome == "arrived"
        with pytest.raises(ConfigError, match="cannot be received at"):
            shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path)
    assert [two.content(row) for row in two.rows] == contents
    assert not path.exists()
    parcel, _ = parcel_of(one)
    with pytest.raises(TransferError, match="did not arrive"):
        shared_memory.send(parcel, path)
    one.check_empty()
    finish_all(two)


@needs_memfd
def test_one_connection_carries_rows_in_the_same_memory(tmp_path, monkeypatch):
    one, two = Side(), Side(num_rows=8)
    sizes = []
    monkeypatch.setattr(
        shared_memory, "_new", lambda size, new=shared_memory._new: sizes.append(size) or new(size)
    )
    path, contents = tmp_path / "rows", []
    before = len(os.listdir("/proc/self/fd"))
    with (
        shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=2.0),
        shared_memory.SharedMemorySender(path) as sender,
    ):
        for seed, length in enumerate([23, 60, 3, 60]):
            parcel, content = parcel_of(one, length, seed)
            contents.append(content)
            sender.send(parcel)
            assert parcel.outcome == "arrived"
    # New memory where a row does not fit, twice as large as that row; else the same.
    assert len(sizes) == 2 and sizes[1] > sizes[0]
    assert len(os.listdir("/proc/self/fd")) == before
    assert "specpool-row" not in Path("/proc/self/maps").read_text()
    assert [two.content(row) for row in two.rows] == contents
    one.check_empty()
    finish_all(two)


@needs_memfd
def test_a_receiver_that_starts_again_gets_the_next_row(tmp_path):
    """Also where a killed one has left its socket."""
    one, path = Side(), tmp_path / "rows"
    with shared_memory.SharedMemorySender(path) as sender:
        for seed in range(3):
            two = Side()
            with shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=2.0):
                parcel, content = parcel_of(one, seed=seed)
                sender.send(parcel)
            assert [two.content(row) for row in two.rows] == [content]
            left = socket.socket(socket.AF_UNIX)
            left.bind(str(path))
            left.close()
            assert path.is_socket()
    path.unlink()
    path.write_text("a file of somebody else")
    with pytest.raises(ConfigError, match="cannot be received at"):
        shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path)
    assert path.read_text() == "a file of somebody else"
    one.check_empty()


@needs_memfd
def test_several_senders_are_served_and_one_too_many_is_hung_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MAX_PEERS", 3)
    one, two, path = Side(), Side(num_rows=8), tmp_path / "rows"
    with (
        shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=2.0),
        contextlib.ExitStack() as open_until_the_end,
    ):
        for _ in range(3):
            sender = open_until_the_end.enter_context(shared_memory.SharedMemorySender(path))
            sender.send(parcel_of(one)[0])
        parcel, _ = parcel_of(one)
        with pytest.raises(TransferError):
            shared_memory.send(parcel, path)
        assert parcel.outcome == "back"
    assert len(two.rows) == 3
    one.check_empty()
    finish_all(two)


@needs_memfd
def test_a_sender_that_hangs_up_before_its_last_word_leaves_no_row(tmp_path):
    """It has not said that it gave the row up, so the receiver undoes its own."""
    one, two = Side(), Side()
    path = str(tmp_path / "rows")
    parcel, _ = parcel_of(one)
    with shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=2.0) as receiver:
        descriptor, memory = shared_memory._new(parcel.num_bytes)
        parcel.write(memory)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            socket.send_fds(peer, [b"\1"], [descriptor])
            peer.sendall(b"\3\3")
            assert peer.recv(5) == b"\1\0\0\0\0" and len(two.rows) == 1
        while receiver._peers:
            time.sleep(0.001)
    os.close(descriptor)
    assert receiver.failures == ["TransferError: the sender did not settle its row"]
    two.check_empty()


@needs_memfd
@pytest.mark.parametrize(
    ("said", "hangs_up", "why"),
    [
        (b"", True, "the sender is gone after run 0 of 2"),
        (b"\3", True, "the sender is gone after run 1 of 2"),
        (b"\3", False, "the sender is silent after run 1 of 2"),
        (b"\3x", False, "the sender says b'x' after run 1 of 2"),
        (b"\1", False, "the sender says b'\\\\x01' after run 0 of 2"),
    ],
)
def test_a_sender_that_stops_between_two_runs_leaves_no_row(tmp_path, said, hangs_up, why):
    one, two = Side(), Side()
    path = str(tmp_path / "rows")
    parcel, _ = parcel_of(one)
    with shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=0.3) as receiver:
        descriptor, memory = shared_memory._new(parcel.num_bytes)
        parcel.write(memory)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            socket.send_fds(peer, [b"\1"], [descriptor])
            for byte in said:
                peer.sendall(bytes([byte]))
                time.sleep(0.02)
            if not hangs_up:
                assert re.search(why.encode(), peer.recv(1000))
        end = time.monotonic() + 10
        while (receiver._peers or not receiver.failures) and time.monotonic() < end:
            time.sleep(0.001)
    os.close(descriptor)
    assert len(receiver.failures) == 1 and re.search(why, receiver.failures[0])
    two.check_empty()


@needs_memfd
def test_the_receiver_takes_runs_in_while_the_sender_writes(tmp_path):
    """The sender writes its last run only when the receiver has had the one before."""
    one, two = Side(), Side()
    parcel, content = parcel_of(one)
    read, write = threading.Event(), parcel.write

    def take_in(data: np.ndarray, wait):
        def waits(num_runs: int) -> None:
            if num_runs == 2:
                read.set()
            wait(num_runs)

        return two.take_in(data, waits)

    def slow(image: np.ndarray, told) -> None:
        def tells(num_runs: int) -> None:
            told(num_runs)
            if num_runs == 1:
                assert read.wait(120), "the receiver waits for the whole image"

        write(image, tells)

    parcel.write = slow
    path = tmp_path / "rows"
    with shared_memory.SharedMemoryReceiver(take_in, two.layout, path, timeout=2.0):
        shared_memory.send(parcel, path)
    assert [two.content(row) for row in two.rows] == [content]
    one.check_empty()
    finish_all(two)


@needs_memfd
def test_memory_that_its_sender_can_cut_is_refused(tmp_path):
    two = Side()
    path = str(tmp_path / "rows")
    parcel, _ = parcel_of(Side())
    with shared_memory.SharedMemoryReceiver(two.take_in, two.layout, path, timeout=0.5) as receiver:

        def answer(kind: bytes, sent: list[int]) -> bytes:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path)
                socket.send_fds(peer, [kind], sent)
                return peer.recv(1000)

        for seals in (0, fcntl.F_SEAL_SHRINK):
            descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
            os.write(descriptor, parcel.image())
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            assert b"not sealed" in answer(b"\1", [descriptor])
            os.close(descriptor)
        sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        for size, why in ((0, b"empty"), (1000, b"the memory has 1000 bytes, the header says")):
            descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
            os.write(descriptor, parcel.image()[:size])
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sealed)
            assert why in answer(b"\1", [descriptor])
            os.close(descriptor)
        huge = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(huge, 1 << 31)  # of which nothing is taken yet: its reader would take it
        fcntl.fcntl(huge, fcntl.F_ADD_SEALS, sealed)
        assert b"has 2147483648 bytes, a row of this layout needs" in answer(b"\1", [huge])
        os.close(huge)
        plain = os.open(os.devnull, os.O_RDONLY)
        for kind, sent in ((b"\1", [plain]), (b"\1", []), (b"\2", []), (b"x", [])):
            assert answer(kind, sent)[:1] == b"\0"
        os.close(plain)
        while receiver._peers:
            time.sleep(0.001)
    assert len(receiver.failures) == 9
    two.check_empty()


@needs_memfd
def test_memory_that_changes_while_it_is_read_is_found(tmp_path):
    """The checksum is of what was written to the pages, not of what lay there before."""
    one, two = Side(), Side()

    def changed(data: np.ndarray, wait):
        wait(2)
        lying = data.copy()
        lying[-1] ^= 1
        return two.take_in(lying)

    path = tmp_path / "rows"
    with shared_memory.SharedMemoryReceiver(changed, two.layout, path, timeout=2.0):
        parcel, _ = parcel_of(one)
        with pytest.raises(TransferError, match="run 1 of 2 of the image is damaged"):
            shared_memory.send(parcel, path)
    assert parcel.outcome == "back"
    one.check_empty()
    two.check_empty()


def test_a_receiver_that_closes_in_mid_row_undoes_it():
    async def main() -> None:
        one, two = Side(), Side()
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(data: np.ndarray):
            loop.call_soon_threadsafe(started.set)
            time.sleep(0.1)
            return two.take_in(data)

        receiver = tcp.TcpReceiver(slow, two.layout, key=KEY)
        await receiver.start()
        parcel, _ = parcel_of(one)
        sending = asyncio.ensure_future(tcp.send(parcel, "127.0.0.1", receiver.port, key=KEY))
        await started.wait()
        await receiver.close()
        with pytest.raises(TransferError):
            await sending
        assert parcel.outcome == "back"
        one.check_empty()
        two.check_empty()

    asyncio.run(main())
