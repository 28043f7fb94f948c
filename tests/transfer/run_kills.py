"""Kill the sender or the receiver of rows with SIGKILL, and audit the other side.

    python tests/transfer/run_kills.py --kills 1000

Half of the victims die at a random line of the code that moves rows, half at a random time. The
other side lives on to the next kill. After each one it must hold whole rows or none, no page, no
descriptor and no shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

from parcel_kit import Parcel, Side
from specpool import TransferError
from specpool.engine import transfer
from specpool.engine.transfer import shared_memory, tcp

KEY = b"sixteen bytes at least"
FORK = multiprocessing.get_context("fork")  # a new interpreter takes half a second
#: The lengths of the rows that are sent, in turn; the n-th row is filled by the seed n.
LENGTHS = (3, 23, 60, 41, 9, 60, 1, 33)
TRACED = (
    str(Path(transfer.__file__).parent),
    str(Path(__file__).parents[1] / "kits/parcel_kit.py"),
)
#: Lines of these files that a victim runs before it dies, at most: two to three rows.
MOST_LINES = 900
#: Seconds after which a victim dies that is killed from outside, at most.
MOST_SECONDS = 0.02


def contents() -> list[list[bytes]]:
    side = Side()
    return [side.content(filled(side, at)) for at in range(len(LENGTHS)) if not clear(side)]


def filled(side: Side, at: int) -> int:
    return side.fill(LENGTHS[at], at)


def clear(side: Side) -> None:
    for row in range(1, side.ledger.num_rows + 1):
        if side.ledger.is_live(row):
            side.ledger.finish(row)


def die_after(num_lines: int) -> None:
    """Kill this process when it has run so many lines of the code that moves rows."""
    left = num_lines

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_process(before: int) -> None:
    """Check that nothing of a row is left: no descriptor, and no shared memory."""
    deadline = time.monotonic() + 20
    while num_open() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert num_open() == before, os.listdir("/proc/self/fd")
    assert "specpool-row" not in Path("/proc/self/maps").read_text()


@contextlib.contextmanager
def receiver_of(way: str, side: Side, take_in: Any, folder: str) -> Iterator[str | int]:
    """Listen, and give the place where."""
    if way == "shared":
        path = str(Path(folder) / "rows")
        with shared_memory.SharedMemoryReceiver(take_in, side.layout, path, timeout=5.0):
            yield path
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    receiver = tcp.TcpReceiver(take_in, side.layout, key=KEY, timeout=5.0)
    asyncio.run_coroutine_threadsafe(receiver.start(), loop).result()
    yield receiver.port
    asyncio.run_coroutine_threadsafe(receiver.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def receive(line: Connection, way: str, folder: str, lines: int | None) -> None:
    """A receiver: it takes rows in until it dies, or audits itself each time it is asked."""
    known, side = contents(), Side(num_rows=8)
    lock = threading.Lock()  # the audit and the thread that takes in

    def take_in(data: Any, wait: Any = None) -> Any:
        with lock:
            undo = side.take_in(data, wait)
            if len(side.rows) > 2:  # the engine has finished it
                side.ledger.finish(side.rows.pop(0))

        def undone() -> None:
            with lock:
                undo()

        return undone

    if lines is not None:
        die_after(lines)
    with receiver_of(way, side, take_in, folder) as where:
        line.send(where)
        line.recv()  # the first sender connects now: what the event loop needs, it has
        before = num_open()
        line.send("ready")
        while line.recv() == "audit":
            check_process(before)
            with lock:
                rows = [side.content(row) for row in side.rows]
                assert all(row in known for row in rows), "half a row has come in"
                for row in side.rows:
                    side.ledger.finish(row)
                side.rows.clear()
                side.check_empty()
            line.send(len(rows))


def send(line: Connection, way: str, lines: int | None) -> None:
    """A sender: for each place that it is told it sends rows until one does not arrive."""
    side = Side()
    line.send("ready")
    while where := line.recv():
        before, outcomes = num_open(), Counter[str]()
        if lines is not None:
            die_after(lines)
        with contextlib.suppress(TransferError), sending(way, where) as send_one:
            for at in range(1 << 20):
                at %= len(LENGTHS)
                parcel = Parcel(side, filled(side, at), list(range(LENGTHS[at] + 1)))
                try:
                    send_one(parcel)
                finally:
                    outcomes[str(parcel.outcome)] += 1
                    side.check_empty()
        check_process(before)
        line.send(dict(outcomes))


@contextlib.contextmanager
def sending(way: str, where: Any) -> Iterator[Any]:
    if way == "shared":
        with shared_memory.SharedMemorySender(where, timeout=20.0) as sender:
            yield sender.send
    else:
        yield lambda parcel: asyncio.run(
            tcp.send(parcel, "127.0.0.1", where, key=KEY, timeout=20.0)
        )


def started(target: Any, *options: Any) -> tuple[BaseProcess, Connection]:
    here, there = FORK.Pipe()
    process = FORK.Process(target=target, args=(there, *options), daemon=True)
    process.start()
    there.close()
    return process, here


def answer(line: Connection) -> Any:
    assert line.poll(60), "a process does not answer"
    return line.recv()


def die(process: BaseProcess, line: Connection, seconds: float | None) -> None:
    """Wait for the end of a victim; after some seconds kill it, if no line of its own does."""
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, f"the victim ended with {process.exitcode}"
    process.close()
    line.close()


def kill_senders(way: str, num_kills: int, source: random.Random, folder: str) -> Counter[str]:
    tally = Counter[str]()
    receiver, line = started(receive, way, folder, None)
    where = answer(line)
    line.send("begin")
    answer(line)
    for at in range(num_kills):
        lines = source.randrange(1, MOST_LINES) if at % 2 else None
        victim, to_victim = started(send, way, lines)
        answer(to_victim)
        to_victim.send(where)
        die(victim, to_victim, source.uniform(0, MOST_SECONDS) if lines is None else None)
        line.send("audit")
        tally["whole rows that a killed sender left"] += answer(line)
        tally[f"{way}: senders killed"] += 1
    line.send("end")
    receiver.join(60)
    assert receiver.exitcode == 0
    return tally


def kill_receivers(way: str, num_kills: int, source: random.Random, folder: str) -> Counter[str]:
    tally = Counter[str]()
    sender, line = started(send, way, None)
    answer(line)
    for at in range(num_kills):
        lines = source.randrange(40, MOST_LINES) if at % 2 else None
        victim, to_victim = started(receive, way, folder, lines)
        try:
            where = answer(to_victim)
            to_victim.send("begin")
            answer(to_victim)
        except EOFError:  # it died before the first row
            die(victim, to_victim, None)
            tally["receivers killed before the first row"] += 1
            continue
        line.send(where)
        die(victim, to_victim, source.uniform(0, MOST_SECONDS) if lines is None else None)
        outcomes = answer(line)
        assert set(outcomes) <= {"arrived", "back"} and outcomes.get("back", 0) <= 1
        tally["rows that went on at the sender"] += outcomes.get("back", 0)
        tally[f"{way}: receivers killed"] += 1
    line.send("")
    sender.join(60)
    assert sender.exitcode == 0
    return tally


def run(num_kills: int, seed: int) -> Counter[str]:
    """Kill so many processes, a quarter of each kind; raise if anything is left of a row."""
    source, tally = random.Random(seed), Counter[str]()
    shared = sorted(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        for way in ("shared", "tcp"):
            tally += kill_senders(way, num_kills // 4, source, folder)
            tally += kill_receivers(way, num_kills // 4, source, folder)
    assert sorted(os.listdir("/dev/shm")) == shared
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    for name, count in sorted(run(options.kills, options.seed).items()):
        print(f"{count:6} {name}")
    print(f"nothing is left; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
