"""`HostTier`: what the workers of vLLM's own `OffloadingConnector` do, over a `LateDevice`.

vLLM's connector decides what is stored and loaded, and its own manager where in the host's memory.
A store starts a step after it is asked for, waits for the steps that were launched before, and
reads its blocks when it ends, turns later; a step that is told to flush it waits for it. A load
waits for launched steps too, and arrives turns later.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)

from lab.engines.content import digest
from lab.engines.device import UNWRITTEN, LateDevice, LateWrite, LaunchedStep, SlotMemory
from lab.engines.vllm_worker import Worker


@dataclasses.dataclass
class Transfer:
    """Blocks of the host and of the device, pair by pair, under way until `due`."""

    job: int
    name: str  # the request
    is_store: bool
    host: list[int]
    blocks: list[int]
    due: int = 0  # the turn
    after: LaunchedStep | None = None  # the last step that it waits for


class HostTier:
    """The workers' side of a connector, and the memory of the host."""

    def __init__(self, worker: Worker, device: LateDevice, seed: int, settings: Any) -> None:
        self.worker, self.device, self.seed = worker, device, seed
        wanted = settings["connector"]
        self.latest, self.is_async = wanted["latest"], True
        size = settings["groups"][0]["block"]
        self.memory = device.add(SlotMemory("host KV", wanted["host_blocks"], size))
        self.asked: list[Transfer] = []  # stores that start with the next step
        self.under_way: list[Transfer] = []
        self.completed: list[int] = []  # jobs, untold
        self.by_step: deque[list[int]] = deque()  # jobs that launched steps end, untold
        self.landed: set[str] = set()  # requests whose loads ended, untold

    def begin(self, metadata: Any, turn: int, owned: dict[str, set[int]]) -> list[LateWrite]:
        """Start what a step starts, and end what it waits for; return loads that are its part.

        Args:
            metadata: what vLLM's connector tells its workers with the step.
            turn: the turn of the step.
            owned: the blocks that each request holds.
        """
        flushed = metadata.jobs_to_flush or set()
        stores = [
            _transfer(job, entry, is_store=True) for job, entry in metadata.store_jobs.items()
        ]
        self._start([*self.asked, *(store for store in stores if store.job in flushed)], turn)
        self.asked = [store for store in stores if store.job not in flushed]
        told, self.completed = self.completed, []
        for transfer in [started for started in self.under_way if started.job in flushed]:
            self._end(transfer, owned)
        loads = [
            (_transfer(job, entry, is_store=False), getattr(entry, "sync", False))
            for job, entry in metadata.load_jobs.items()
        ]
        self._start([load for load, is_sync in loads if not is_sync], turn)
        parts = [load for load, is_sync in loads if is_sync]
        self.by_step.append(self.completed + [load.job for load in parts])
        self.completed = told
        return [self._written(load) for load in parts]

    def _start(self, transfers: list[Transfer], turn: int) -> None:
        for transfer in transfers:
            transfer.due = turn + 1 + digest(self.seed, transfer.job, turn) % self.latest
            transfer.after = self.device.queue[-1] if self.device.queue else None
        self.under_way += transfers

    def land(self, turn: int, owned: dict[str, set[int]]) -> set[str]:
        """End what is due; return the requests whose loads are."""
        due = [transfer for transfer in self.under_way if transfer.due <= turn]
        for transfer in due:
            self._end(transfer, owned)
        landed, self.landed = self.landed, set()
        return landed

    def _end(self, transfer: Transfer, owned: dict[str, set[int]]) -> None:
        if transfer.after is not None:
            self.device.run_through(transfer.after)
        if transfer.is_store:
            size = self.memory.keys.shape[1]
            self.memory.keys[transfer.host] = self.worker.target.keys[transfer.blocks, :size]
        else:
            self.device.land(self._written(transfer), owned.get(transfer.name, set()))
            self.landed.add(transfer.name)
        self.under_way.remove(transfer)
        self.completed.append(transfer.job)

    def _written(self, load: Transfer) -> LateWrite:
        slots = [(block, at) for block in load.blocks for at in range(self.memory.keys.shape[1])]
        keys = self.memory.keys[load.host].reshape(-1)
        if (keys == UNWRITTEN).any():
            self.device.fault("cache truth", "host", f"{load.name} loads what nobody stored")
        return LateWrite(load.name, self.worker.target, slots, keys)

    def told(self) -> Any:
        """Return what the workers tell with the next step's result of jobs that ended, once.

        What a step ends is told with its own result, behind which the scheduler may be a step.
        """
        completed, self.completed = self.by_step.popleft() + self.completed, []
        return OffloadingWorkerMetadata(dict.fromkeys(completed, 1)) if completed else None

    def take_lost(self, names: set[str]) -> set[int]:
        """Return no block: the host loses nothing."""
        return set()


def _transfer(job: int, entry: Any, is_store: bool) -> Transfer:
    """Return a job of the connector's metadata; until 0.25 its two sides were a pair."""
    pair = getattr(entry, "transfer_spec", None)
    source, target = pair if pair is not None else (entry.src_spec, entry.dst_spec)
    host, device = (target, source) if is_store else (source, target)
    return Transfer(job, entry.req_id, is_store, host.block_ids.tolist(), device.block_ids.tolist())
