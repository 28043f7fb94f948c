"""A ledger whose disk fills, in a process of its own (test_event_log.py runs it).

Usage: full_disk.py LOG room|close. No file may be longer than LIMIT bytes; after the first refusal
there is room again, or the ledger is closed.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from specpool import Group, Ledger, OrderError, RecordError
from specpool._core import Replay

LIMIT = 100_000


def disk(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def refused(error: type[Exception], call, *args) -> str:
    try:
        call(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"{call} went through")


class Server:
    def __init__(self, path: Path) -> None:
        self.path, self.num_events, self.refusal = path, 0, ""
        groups = [Group("kv", page_size=4, num_pages=900)]
        self.ledger = Ledger(groups, [], num_rows=800, max_context_len=16, record=path)

    def state(self):
        ledger = self.ledger
        free = [ledger.free_pages(0), ledger.num_free_rows]
        return ledger.state_hash(), ledger.digest, ledger.steps(), free

    def turn(self) -> None:
        """Run one request; the disk may fill at any of the verbs."""
        ledger = self.ledger
        row = self.verb(ledger.admit, "a tag of fifty letters " + "y" * 27)
        step = self.verb(ledger.prepare_extend, [row], [5]).step
        self.verb(ledger.launch, step)
        self.verb(ledger.complete, step)
        self.verb(ledger.finish, row)

    def verb(self, call, *args):
        before = self.state()
        try:
            given = call(*args)
        except RecordError as error:
            assert self.state() == before, "a refused call changes nothing"
            assert not self.refusal, "it works again once there is room"
            self.refusal = str(error)
            assert "File too large" in self.refusal, self.refusal
            assert f"{LIMIT} bytes are written" in self.refusal, self.refusal
            raise
        self.num_events += 1
        return given

    def is_shut(self) -> None:
        """Every verb is refused while the disk is full; queries go on."""
        ledger, before = self.ledger, self.state()
        for call, *args in (
            (ledger.admit,),
            (ledger.prepare_extend, [1], [3]),
            (ledger.finish, 1),
            (ledger.trim, 1, 0),
            (ledger.fork, 1),
            (ledger.snapshot,),
        ):
            refused(RecordError, call, *args)
            assert self.state() == before
        ledger.check()

    def replays(self) -> None:
        replay, num_events = Replay(self.path), 0
        while replay.advance() is not None:
            num_events += 1
        assert replay.end == "closed" and num_events == self.num_events
        assert replay.ledger.digest == self.ledger.digest
        assert replay.ledger.state_hash() == self.ledger.state_hash()


def main(path: Path, mode: str) -> None:
    server = Server(path)
    disk(LIMIT)
    try:
        while server.num_events < 20_000:
            server.turn()
    except RecordError:
        server.is_shut()
    assert server.refusal
    if mode == "room":
        disk(resource.RLIM_INFINITY)
        server.turn()
    else:
        refused(RecordError, server.ledger.close)
        assert server.ledger.closed
        refused(OrderError, server.ledger.admit)
        assert server.ledger.free_pages(0) + server.ledger.fenced_pages(0) >= 898
        disk(resource.RLIM_INFINITY)
    server.ledger.close()
    server.replays()
    print(server.num_events)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
