"""`Ranks`: one process of the group that shares a model, and its connections to the others.

The launcher (torchrun, Ray) gives each process its rank by the environment, as torch does. The
model's own collectives run on the default process group; records have sockets of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from specpool.engine.ranks.environment import (
    KEY_VARIABLE,
    local_world,
    timeout_of_environment,
    world_of_environment,
)
from specpool.engine.ranks.lines import Lines
from specpool.errors import ConfigError, RankError, one_line

log = logging.getLogger("specpool")

#: Seconds between two signs of life, and without one until a rank counts as dead.
BEAT_SECONDS, SILENT_SECONDS = 0.5, 10.0
#: Seconds that rank 0 waits after an error, for the others to read it: its store goes with it.
_LINGER_SECONDS = 4.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _exit(message: str) -> None:
    """End the process, because its main thread may wait for ever for a rank that is gone."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class Ranks:
    """This process's place in a group of ranks.

    Attributes:
        rank: its number, from 0.
        world: how many there are.
        device: where this rank's part of the model lives.
        key: seals the group's records; another `SPECPOOL_RANKS_KEY` gives another one.
        now: seconds of rank 0's clock at the latest record.
        on_lost: called from another thread when a rank gives no sign of life, with the reason;
            it must end the process.
    """

    def __init__(self, device: str = "cpu") -> None:
        """Join the group of the environment; returns when all ranks have joined.

        Raises:
            ConfigError: the environment names no group, or the device cannot be used.
            RankError: not all ranks came within the timeout.
        """
        self.rank, self.world = world_of_environment()
        if self.world < 2:
            raise ConfigError("there is one rank alone: start several, for example with torchrun")
        self.on_lost: Callable[[str], None] = _exit
        self.now = 0.0
        self.device = self._own_device(device)
        seconds = timeout_of_environment()
        timeout = timedelta(seconds=seconds)
        host = None if _keep_local(self.world) else os.environ["MASTER_ADDR"]
        try:
            store, rank, world = next(rendezvous("env://", timeout=timeout))
            self._store = PrefixStore("specpool", store)
            beats = store.clone() if hasattr(store, "clone") else store
            self._beats = PrefixStore("specpool", beats)
            self._beats.set(f"beat/{self.rank}", "0")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.startswith("cuda") else "gloo",
                store=PrefixStore("group", store),
                rank=rank,
                world_size=world,
                timeout=timeout,
            )
            secret = _key(os.environ.get(KEY_VARIABLE, ""))
            self._lines = Lines.open(self._store, rank, world, host, seconds, secret)
            self.key = self._lines.key
        except Exception as error:
            raise RankError(
                f"rank {self.rank} of {self.world} found no group at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {one_line(error)}"
            ) from error
        self._ended = threading.Event()
        self._closed = self._failed = False
        self._why = ""  # the reason that an ended rank left
        self._log: Path | None = None
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @classmethod
    def join(cls, device: str = "cpu") -> Ranks | None:
        """Join the group of the environment; None if this process is alone. See `Ranks`."""
        return cls(device) if world_of_environment()[1] > 1 else None

    @property
    def num_sharers(self) -> int:
        """How many ranks share the memory of this one's device."""
        return local_world(self.world) if self.device == "cpu" else 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone has clients and a clock."""
        return self.rank == 0

    def least(self, value: int) -> int:
        """Return the least of all ranks' values. All ranks must call it together."""
        reduced = torch.tensor([value], dtype=torch.int64)
        with self._collective("the ranks' memory"):
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
        return int(reduced[0])

    def broadcast_first(self, value: float) -> float:
        """Return rank 0's value. All ranks must call it together."""
        shared = torch.tensor([value], dtype=torch.float64)
        with self._collective("rank 0's measurements"):
            dist.broadcast(shared, 0)
        return float(shared[0])

    def agree(self, facts: Mapping[str, str]) -> None:
        """Check that these facts are the same on all ranks, which must call it together.

        Raises:
            ConfigError: one differs; the message has its name, both values and the rank.
        """
        frame = msgspec.msgpack.encode(dict(facts))
        key = os.environ.get(KEY_VARIABLE, "")
        sealed = hashlib.blake2b(frame, key=_key(key), digest_size=32).digest()
        frame = sealed + frame
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(frame)
        with self._collective("the ranks' configuration"):
            dist.all_reduce(sizes)
            largest = int(sizes.max())
            own_frame = torch.zeros(largest, dtype=torch.uint8)
            own_frame[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            frames = [torch.zeros(largest, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(frames, own_frame)
        facts_of_rank = [
            bytes(data[:size].numpy()) for data, size in zip(frames, sizes.tolist(), strict=True)
        ]
        first = facts_of_rank[0]
        for rank, data in enumerate(facts_of_rank):
            seal = hashlib.blake2b(data[32:], key=_key(key), digest_size=32).digest()
            if seal != data[:32]:
                raise ConfigError(f"rank {rank} has another {KEY_VARIABLE} than rank {self.rank}")
            if data != first:
                _refuse(rank, *(msgspec.msgpack.decode(part[32:]) for part in (first, data)))

    def send(self, frame: bytes) -> None:
        """Send a record from rank 0 to all others.

        Raises:
            RankError: a rank has gone.
        """
        with self._collective("a record"):
            self._lines.send(frame)

    def receive(self) -> bytes:
        """Wait for rank 0's next record.

        Raises:
            RankError: a rank has gone, or what came is not a record.
        """
        with self._collective("a record"):
            return self._lines.receive()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends; they may be waiting for it."""
        self._failed = True
        with contextlib.suppress(Exception):
            self._store.set(f"fail/{self.rank}", one_line(error, 2000))

    def explain(self, error: RuntimeError) -> Exception:
        """Return an error of a forward, or one that names the rank whose end has caused it."""
        reason = self._lost_rank()
        return RankError(f"{reason} (a forward: {one_line(error, 200)})") if reason else error

    def keep_log(self, path: Path | None) -> None:
        """Tell the others where this rank's event log is."""
        self._log = path
        with contextlib.suppress(Exception):
            self._store.set(f"log/{self.rank}", str(path or os.environ.get("SPECPOOL_RECORD", "")))

    def log_of(self, rank: int) -> str:
        """Return where the event log of a rank is."""
        with contextlib.suppress(Exception):
            return self._stored_text(f"log/{rank}")
        return f"the log of rank {rank}"

    def forget_log(self) -> None:
        """Remove this rank's event log, which nobody needs."""
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join(2 * BEAT_SECONDS)
        with contextlib.suppress(Exception):
            for key in (f"left/{self.rank}", f"knows/{self.rank}"):
                self._store.set(key, "1")
        self._lines.close()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if self._failed and self.leads:
            self._await_readers()

    def __enter__(self) -> Ranks:
        """Return the place itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the group; after an error, tell the others why."""
        if error is not None:
            self.fail(error)
        self.close()

    # --- lost ranks -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _collective(self, purpose: str) -> Iterator[None]:
        """Turn the error of a collective into one that names the rank that has gone."""
        if self._closed:
            raise RankError(f"rank {self.rank} has left its group")
        try:
            yield
        except (RuntimeError, OSError) as error:
            reason = self._lost_rank() or "a rank did not answer in time, though all are alive"
            raise RankError(f"{reason} ({purpose}: {one_line(error, 200)})") from error

    def _lost_rank(self) -> str:
        """Find out which rank has gone, in a second or two; "" if none has."""
        self._ended.set()  # the caller tells it: this rank ends
        if self._why:
            return self._why
        peers = [rank for rank in range(self.world) if rank != self.rank]
        try:
            before = {rank: self._beats.get(f"beat/{rank}") for rank in peers}
            end = time.monotonic() + 3 * BEAT_SECONDS
            while time.monotonic() < end:
                for rank in peers:
                    if last_words := self._stored_text(f"fail/{rank}"):
                        return f"rank {rank} has ended: {last_words}"
                time.sleep(0.1)
            still = [rank for rank in peers if self._beats.get(f"beat/{rank}") == before[rank]]
            left = [rank for rank in peers if self._stored_text(f"left/{rank}")]
        except Exception:
            return "the group's store is gone, and with it the launcher or rank 0"
        if still or left:
            return f"rank {(still or left)[0]} is gone"
        return ""

    def _read_why(self, rank: int) -> None:
        """Save the reason that an ended rank left, because the store may end with it."""
        if not self._why and (last_words := self._stored_text(f"fail/{rank}")):
            self._why = f"rank {rank} has ended: {last_words}"
            self._beats.set(f"knows/{self.rank}", "1")

    def _await_readers(self) -> None:
        """Wait until the others have read from the store why this rank ends."""
        keys, end = [f"knows/{rank}" for rank in range(1, self.world)], time.monotonic()
        end += _LINGER_SECONDS
        with contextlib.suppress(Exception):
            while not self._beats.check(keys) and time.monotonic() < end:
                time.sleep(0.05)

    def _stored_text(self, key: str) -> str:
        return self._beats.get(key).decode(errors="replace") if self._beats.check([key]) else ""

    def _watch(self) -> None:
        """Give signs of life, and look for those of the others."""
        seen = {rank: ("", time.monotonic()) for rank in range(self.world) if rank != self.rank}
        count = 0
        while not self._ended.wait(BEAT_SECONDS):
            count += 1
            try:
                self._beats.set(f"beat/{self.rank}", str(count))
                for rank, (value, since) in seen.items():
                    self._read_why(rank)
                    latest, now = self._stored_text(f"beat/{rank}"), time.monotonic()
                    if latest != value or self._stored_text(f"left/{rank}"):
                        seen[rank] = latest, now
                    elif now - since > SILENT_SECONDS:
                        silent = f"rank {rank} has been silent for {now - since:.1f} s"
                        self._report_loss(f"{self._why or silent}; rank {self.rank} ends")
            except Exception as error:
                store = f"the group's store is gone: {one_line(error)}"
                self._report_loss(f"rank {self.rank} ends: {self._why or store}")

    def _report_loss(self, message: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.on_lost(message)

    def _own_device(self, device: str) -> str:
        """Return the device of this rank: on CUDA one of its own."""
        if not device.startswith("cuda"):
            return device
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        if device != "cuda":
            raise ConfigError(f"device {device}: with ranks give 'cuda', each takes one of its own")
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {self.rank} would take cuda:{local}, this machine has "
                f"{torch.cuda.device_count()} CUDA devices: start one rank for each, or take "
                "device 'cpu'"
            )
        torch.cuda.set_device(local)
        return f"cuda:{local}"


def _keep_local(world: int) -> bool:
    """Return whether all ranks are on this machine; if so, keep gloo and nccl off the network."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        is_local = local_world(world) == world
    else:
        is_local = os.environ["MASTER_ADDR"] in _LOOPBACK
    if is_local:
        name = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    return is_local


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _refuse(rank: int, first: Any, other: Any) -> None:
    if isinstance(first, dict) and isinstance(other, dict):
        for name in {**first, **other}:
            first_value, value = first.get(name), other.get(name)
            if first_value != value:
                raise ConfigError(
                    f"the ranks differ in {name}: rank 0 has {first_value!s:.300}, rank {rank} "
                    f"{value!s:.300}"
                )
    raise ConfigError(f"rank {rank} says something else than rank 0")
