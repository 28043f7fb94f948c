"""`LateConnector`: a connector of vLLM that has prefixes of some prompts, and is in no hurry.

An asynchronous load starts when its step is launched and waits for no step; its KV arrives turns
later, and then vLLM is told. A synchronous load is a part of its step. Of a load that fails, the KV
of its blocks from some one on never comes, and vLLM is told which.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from lab.engines.content import digest
from lab.engines.device import LateDevice, LateWrite
from lab.engines.vllm_worker import Worker, group_keys


class LateConnector(KVConnectorBase_V1):  # type: ignore[misc] # no stubs
    """The scheduler's side, and what the workers' side does to the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[str, int] = {}  # computed tokens in front of what is here, by request
        self.asked: list[tuple[str, list[int], int, int]] = []  # loads of this step
        self.under_way: list[tuple[int, LateWrite]] = []  # the turn of each landing
        self.lost: dict[str, set[int]] = {}  # blocks whose KV never comes, by request, untold

    def serve(self, worker: Worker, device: LateDevice, seed: int, settings: Any) -> None:
        """Take what the engine does not give a connector."""
        self.worker, self.device, self.seed = worker, device, seed
        self.wanted, self.block = settings["connector"], settings["groups"][0]["block"]
        self.is_async: bool = self.wanted["is_async"]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Whole blocks of the prompt, all but its last token."""
        name = request.request_id
        has = digest(self.seed, int(name), 17) % 100 < self.wanted["hits"]
        end = (request.num_prompt_tokens - 1) // self.block * self.block if has else 0
        self.found[name] = num_computed_tokens
        count = max(0, end - num_computed_tokens)
        return count, bool(count) and self.is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a load."""
        if num_external_tokens:
            name = request.request_id
            begin = self.found[name]
            row = list(blocks.get_block_ids()[0])
            self.asked.append((name, row, begin, begin + num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Nothing is told by way of the scheduler's output."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Nothing is sent, so the blocks are free."""
        return False, None

    def begin(self, _: Any, turn: int, __: dict[str, set[int]]) -> list[LateWrite]:
        """Start the loads of a step that is to be launched; return those that are its part."""
        mine = []
        for name, row, begin, end in self.asked:
            slots = [
                (row[position // self.block], position % self.block)
                for position in range(begin, end)
            ]
            keys = group_keys(self.worker.text(name).keys(begin, end), 0)
            if digest(self.seed, int(name), turn, 19) % 100 < self.wanted.get("fails", 0):
                num_blocks = digest(self.seed, int(name), turn, 23) % ((end - begin) // self.block)
                arriving = num_blocks * self.block
                self.lost[name] = {block for block, _ in slots[arriving:]}
                slots, keys = slots[:arriving], keys[:arriving]
            write = LateWrite(name, self.worker.target, slots, keys)
            if self.is_async:
                self.device.start_late(write)
                delay = digest(self.seed, int(name), turn) % self.wanted["latest"]
                self.under_way.append((turn + 1 + delay, write))
            else:
                mine.append(write)
        self.asked.clear()
        return mine

    def land(self, turn: int, owned: dict[str, set[int]]) -> set[str]:
        """Let what is due arrive; return whose it is."""
        due = [write for at, write in self.under_way if at <= turn]
        self.under_way = [(at, write) for at, write in self.under_way if at > turn]
        for write in due:
            self.device.land(write, owned.get(write.writer, set()))
        return {write.writer for write in due}

    def told(self) -> None:
        """The workers tell nothing of their own."""

    def take_lost(self, names: set[str]) -> set[int]:
        """Return the blocks of these requests whose KV never came, once."""
        return set().union(*(self.lost.pop(name, set()) for name in names))

    # The side of a worker, which is not called here.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not called."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not called."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Not called."""

    def wait_for_save(self) -> None:
        """Not called."""


KVConnectorFactory.register_connector("LateConnector", __name__, "LateConnector")
