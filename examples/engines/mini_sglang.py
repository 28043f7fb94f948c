"""mini-sglang's cache manager on `BlockPool`: import it in `minisgl/scheduler/scheduler.py`.

A request holds its own blocks, so no line of the page table points at one that was given away.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specpool import BlockPool


class CacheManager:
    """The interface of mini-sglang's own class; `type` is "radix", or "naive" for no cache."""

    def __init__(self, num_pages: int, page_size: int, page_table: torch.Tensor, type: str) -> None:
        self.page_size, self.page_table = page_size, page_table
        self.pool = BlockPool(num_pages, page_size, caching=type != "naive")
        self.lazy_free_region = nullcontext

    def slots(self, firsts: Any) -> torch.Tensor:
        slots = np.add.outer(firsts, np.arange(self.page_size)).ravel()
        return torch.from_numpy(slots).to(self.page_table.device, non_blocking=True)

    @property
    def available_size(self) -> int:
        return (self.pool.num_free + self.pool.num_cached) * self.page_size

    def match_req(self, req: Any) -> Any:
        hit, size = self.pool.match(req.input_ids, limit=req.input_len - 1), self.page_size
        blocks = np.resize(hit, -(-(req.input_len + req.output_len) // size))  # `held` of them
        handle = SimpleNamespace(blocks=blocks, held=len(hit), cached_len=len(hit) * size)
        handle.get_matched_indices = lambda: self.slots(hit * size)
        return SimpleNamespace(cuda_handle=handle)

    def lock(self, handle: Any) -> None:
        self.pool.take(0, handle.blocks[: handle.held])

    def unlock(self, handle: Any) -> None:
        self.pool.drop(handle.blocks[: handle.held])

    def allocate_paged(self, reqs: list[Any]) -> None:
        size, width = self.page_size, self.page_table.stride(0)
        reqs = [req for req in reqs if req.device_len > req.cache_handle.held * size]
        if not reqs:
            return
        spans = [(req, req.cache_handle, -(-req.device_len // size)) for req in reqs]
        counts = np.array([end - handle.held for _, handle, end in spans], np.int64)
        new, ends = self.pool.take(int(counts.sum())), counts.cumsum()
        first = np.array([r.table_idx * width + h.held * size for r, h, _ in spans], np.int64)
        cells = np.repeat(first - (ends - counts) * size, counts) + np.arange(len(new)) * size
        self.page_table.view(-1)[self.slots(cells)] = self.slots(new * size).int()
        for (_, handle, end), last in zip(spans, ends.tolist(), strict=True):
            handle.blocks[handle.held : end] = new[last - end + handle.held : last]
            handle.held = end

    def cache_req(self, req: Any, *, finished: bool) -> None:
        handle, end, size = req.cache_handle, req.cached_len, self.page_size
        self.pool.put(req.input_ids[:end], handle.blocks[: handle.held], handle.cached_len // size)
        handle.cached_len = end // size * size
        if finished:
            self.unlock(handle)

    def check_integrity(self) -> None:
        self.pool.check()
        if self.available_size != self.pool.num_blocks * self.page_size:
            raise RuntimeError(f"blocks {self.pool.taken().tolist()} are still held")
