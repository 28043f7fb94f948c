"""What the decode side of a disaggregated pair of SGLang 0.5.1 to 0.5.4 is given here.

The KV of a prompt and its first token come from the prefill side: they are written turns after the
row was allocated. A transfer that is aborted writes nothing any more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang_device import KV

from lab.engines.content import digest
from lab.engines.shim import Hollow


class DecodeMemory(KV):  # type: ignore[misc] # no stubs
    """Slots whose KV comes from outside, and leaves for the host when its request is retracted."""

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Nothing: transfers are played."""
        return [], [], []

    def maybe_get_custom_mem_pool(self) -> None:
        """Nothing: no allocator of a transport."""

    def get_cpu_copy(self, slots: Any) -> Any:
        """Return what slots hold."""
        return self.held[slots.numpy()].copy()

    def load_cpu_copy(self, kept: Any, slots: Any) -> None:
        """Write what was kept."""
        self.held[slots.numpy()] = kept


class LateReceiver:
    """One request's transfer, by the number of its room, which is the request's id."""

    loop: Any = None

    def __init__(self, bootstrap_room: int, **_: Any) -> None:
        self.name = str(bootstrap_room)
        self.pages: Any = None  # where its KV is to be, since its row was allocated
        self.at = self.due = 0  # where its first token is to be, and the turn
        self.has_failed = self.has_landed = False

    def init(self, kv_indices: Any, aux_index: int, *_: Any) -> None:
        """Its row is allocated, and the other side starts to write."""
        settings, tick = self.loop.settings, self.loop.traffic.tick
        self.pages, self.at = kv_indices, aux_index
        self.due = tick + 1 + digest(self.loop.seed, int(self.name)) % settings["latest"]

    def poll(self) -> Any:
        """Say how far it is."""
        if self.has_failed:
            return KVPoll.Failed
        if self.pages is None:
            return KVPoll.WaitingForInput
        if self.loop.traffic.tick < self.due:
            return KVPoll.Transferring
        if not self.has_landed:
            self._land()
        return KVPoll.Success

    def abort(self) -> None:
        """Its request is aborted."""
        self.has_failed = True

    def failure_exception(self) -> None:
        """Say why it failed."""
        raise RuntimeError("aborted")

    def _land(self) -> None:
        self.has_landed = True
        device, page = self.loop.simulated, self.loop.settings["page"]
        text = self.loop.tp_worker.texts[self.name]
        slots = (self.pages[:, None] * page + np.arange(page)).reshape(-1)[: text.num_prompt]
        keys = text.keys(0, text.num_prompt)
        device.write(device.target, slots, keys, f"{self.name} transfer")
        said = self.loop.disagg_metadata_buffers.output_ids
        said[self.at][0] = text.token(text.num_prompt)


def install(loop: Any) -> None:
    """Let a scheduler that is about to be made have these transfers."""
    LateReceiver.loop = loop
    kinds = {decode.KVClassType.RECEIVER: LateReceiver}
    parts: dict[str, Any] = {
        "get_kv_class": lambda _, kind: kinds.get(kind, Hollow),
        "get_attention_tp_size": lambda: 1,
        "poll_and_all_reduce": lambda pollers, _: [int(poller.poll()) for poller in pollers],
    }
    vars(decode).update(parts)


def num_queued(loop: Any) -> int:
    """Return how many requests wait for a row or for their KV."""
    queue = loop.disagg_decode_prealloc_queue
    transfers = loop.disagg_decode_transfer_queue
    return len(queue.queue) + len(queue.retracted_queue) + len(transfers.queue)


def make_rows(settings: dict[str, Any], width: int) -> Any:
    """The table of rows, of which some are for requests whose KV is to come."""
    return decode.DecodeReqToTokenPool(
        settings["rows"], width, "cpu", False, settings["rows_to_come"]
    )
