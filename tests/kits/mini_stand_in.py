"""A scheduler with the interface of mini-sglang's: handles that are locked, lines of slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specpool.testing import BlockDevice


@dataclass(eq=False)
class Waiting:
    """A request without a line."""

    number: int
    input_ids: torch.Tensor
    output_len: int

    @property
    def input_len(self) -> int:
        return len(self.input_ids)


@dataclass(eq=False)
class Req:
    """A request with a line of the page table; its last chunk may not have come yet."""

    number: int
    all_ids: torch.Tensor  # the prompt, and what was generated
    input_ids: torch.Tensor  # up to the end of the chunk
    table_idx: int
    cached_len: int  # tokens with KV
    most_tokens: int
    cache_handle: Any

    @property
    def device_len(self) -> int:
        return len(self.input_ids)


class MiniScheduler:
    """A request is admitted only if its text fits to its end, so nobody is ever retracted."""

    def __init__(self, make: Any, num_blocks: int, block_size: int, device: BlockDevice) -> None:
        self.block_size, self.device, self.budget = block_size, device, 24
        self.table = torch.zeros((4, num_blocks * block_size), dtype=torch.int32)
        self.manager = make(num_blocks, block_size, self.table, "radix")
        self.pool = self.manager.pool
        self.lines = list(range(len(self.table)))
        self.waiting: list[Waiting] = []
        self.running: list[Req] = []
        self.reused = 0

    def submit(self, request: int, tokens: list[int], max_new_tokens: int) -> None:
        ids = torch.tensor(tokens, dtype=torch.int32)
        self.waiting.append(Waiting(request, ids, max_new_tokens))

    def abort(self, request: int) -> None:
        self.waiting = [req for req in self.waiting if req.number != request]
        for req in [req for req in self.running if req.number == request]:
            self.free(req)

    def free(self, req: Req) -> None:
        self.running.remove(req)
        self.lines.append(req.table_idx)
        self.manager.cache_req(req, finished=True)

    def admit(self) -> None:
        size = self.block_size
        while self.waiting and self.lines:
            req = self.waiting[0]
            handle = self.manager.match_req(req).cuda_handle
            owed = sum(-(-r.most_tokens // size) * size - r.cache_handle.held * size
                       for r in self.running)  # fmt: skip
            new_tokens = -(-(req.input_len + req.output_len) // size) * size - handle.cached_len
            self.manager.lock(handle)
            if new_tokens + owed > self.manager.available_size:
                self.manager.unlock(handle)
                return
            line = self.lines.pop()
            self.table[line] = 0
            self.table[line, : handle.cached_len] = handle.get_matched_indices()
            self.reused += handle.cached_len
            del self.waiting[0]
            known = req.input_ids[: handle.cached_len]
            max_tokens = req.input_len + req.output_len
            self.running.append(
                Req(req.number, req.input_ids, known, line, handle.cached_len, max_tokens, handle)
            )

    def step(self) -> bool:
        self.admit()
        for req in self.running:
            req.input_ids = req.all_ids[: req.cached_len + self.budget]
        self.manager.allocate_paged(self.running)
        for req in list(self.running):
            slots = self.table[req.table_idx, :: self.block_size] // self.block_size
            tokens = req.input_ids.tolist()
            token = self.device.forward(tokens, slots.tolist(), req.cached_len)
            was_prefill, req.cached_len = len(req.all_ids) - req.cached_len > 1, req.device_len
            if req.cached_len < len(req.all_ids):
                continue
            req.all_ids = torch.cat([req.all_ids, torch.tensor([token], dtype=torch.int32)])
            if len(req.all_ids) >= req.most_tokens:
                self.free(req)
            elif was_prefill:
                self.manager.cache_req(req, finished=False)
        return bool(self.waiting or self.running)
