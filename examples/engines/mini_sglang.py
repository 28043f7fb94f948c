"""mini-sglang's `CacheManager` and radix tree on `specpool.BlockPool`: its scheduler is unchanged.

Import `CacheManager` from here in `minisgl/scheduler/scheduler.py`. A request holds its own blocks,
so no line of the page table points at a block that was given away.
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

    def slots(self, blocks: Any) -> torch.Tensor:
        slots = np.asarray(blocks, np.int32)[:, None] * self.page_size + np.arange(self.page_size)
        return torch.from_numpy(slots.ravel()).to(self.page_table, non_blocking=True)

    @property
    def available_size(self) -> int:
        return (self.pool.num_free + self.pool.num_cached) * self.page_size

    def match_req(self, req: Any) -> Any:
        blocks = self.pool.match(req.input_ids, limit=req.input_len - 1).tolist()
        found = SimpleNamespace(blocks=blocks, cached_len=len(blocks) * self.page_size)
        found.get_matched_indices = lambda hit=tuple(blocks): self.slots(hit)
        return SimpleNamespace(cuda_handle=found)

    def lock(self, handle: Any) -> None:
        self.pool.take(0, handle.blocks)

    def unlock(self, handle: Any) -> None:
        self.pool.drop(handle.blocks)

    def allocate_paged(self, reqs: list[Any]) -> None:
        size = self.page_size
        spans = [(r, len(r.cache_handle.blocks), -(-r.device_len // size)) for r in reqs]
        spans = [span for span in spans if span[2] > span[1]]
        blocks = self.pool.take(sum(end - start for _, start, end in spans))
        first = 0
        for req, start, end in spans:
            new, first = blocks[first : first + end - start], first + end - start
            req.cache_handle.blocks += new.tolist()
            self.page_table[req.table_idx, start * size : end * size] = self.slots(new)

    def cache_req(self, req: Any, *, finished: bool) -> None:
        handle, end = req.cache_handle, req.cached_len
        self.pool.put(req.input_ids[:end], handle.blocks, handle.cached_len // self.page_size)
        handle.cached_len = end // self.page_size * self.page_size
        if finished:
            self.pool.drop(handle.blocks)

    def check_integrity(self) -> None:
        self.pool.check()
        if self.available_size != self.pool.num_blocks * self.page_size:
            raise RuntimeError(f"blocks {self.pool.taken().tolist()} are still held")
