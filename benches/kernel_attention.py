"""Attention of few queries over live KV, by our kernel and by torch's flash kernel after a gather.

A case's bytes are those of the live KV, each read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benches.kernel_cases import Case
from specpool import kernels
from specpool.engine.attention import AttentionView, fused
from specpool.kernels import Fields, PagedCells

PAGE_SIZE = 16
BATCHES, CONTEXTS, QUERIES = (1, 8, 64, 128), (1500, 8192), (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's layer; bfloat16."""

    name: str
    kv_heads: int
    group: int  # query heads of a KV head
    dim: int


HEADS = (Heads("8B", 8, 4, 128), Heads("70B", 8, 8, 128))
OTHER_DIMS = (Heads("heads of 64", 8, 4, 64), Heads("heads of 256", 8, 4, 256))


class LiveKV:
    """One layer's KV of rows of equal length, on pages in random order."""

    def __init__(self, heads: Heads, batch: int, context: int, device: torch.device) -> None:
        columns = -(-context // PAGE_SIZE)
        shape = ((batch * columns + 1) * PAGE_SIZE, heads.kv_heads, heads.dim)
        self.heads, self.context = heads, context
        self.keys, self.values = (
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)
        )
        pages = 1 + np.random.default_rng(batch).permutation(batch * columns)
        self.pages = torch.from_numpy(pages.astype(np.int32).reshape(batch, columns)).to(device)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that a forward must read."""
        heads = self.heads
        return 4 * heads.kv_heads * heads.dim * self.context * len(self.lens)

    def queries(self, count: int) -> Tensor:
        """Return `count` queries of each row, [T, H, D]."""
        shape = (len(self.lens) * count, self.heads.kv_heads * self.heads.group, self.heads.dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.lens.device).normal_()

    def case(self, count: int) -> Case:
        """One call of our kernel for `count` queries of each row."""
        q, batch = self.queries(count), len(self.lens)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * count
        cells = PagedCells(self.pages, PAGE_SIZE, self.lens, starts, count, self.context)
        attend = partial(kernels.attend_pages, q, self.keys, self.values, cells)
        run = partial(attend, scaling=q.shape[2] ** -0.5, out=torch.empty_like(q))
        return Case(f"attend_pages, {self.heads.name}, Q={count}", run, self.num_bytes)

    def by_flash(self, count: int) -> Callable[[], object]:
        """Return the same by gathering pages, as an engine does, and torch's flash kernel."""
        q, batch = self.queries(count), len(self.lens)
        rows_of = [kv.view(-1, PAGE_SIZE * kv[0].numel()) for kv in (self.keys, self.values)]
        by_page = Fields.of(rows_of, 1)
        space = by_page.empty(self.pages.numel())

        def read(keys: Tensor, values: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
            kernels.gather_kv(by_page, pages, out=space)
            rows = [buffer.view(torch.bfloat16) for buffer in space.buffers]
            return rows[0], rows[1]

        view = AttentionView(
            page_size=PAGE_SIZE,
            write_slots=torch.zeros(batch * count, dtype=torch.int64, device=q.device),
            read_pages=self.pages,
            q_lens=count,
            mask_for=lambda window: np.zeros(0, bool),
            reader=read,
            causal_lens=lambda: self.lens,
        )
        scaling = q.shape[2] ** -0.5
        return lambda: fused.attend_fused(view, self.keys, self.values, q, scaling, None)


def live_kv(
    device: torch.device, batches: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator[tuple[LiveKV, int, tuple[int, ...]]]:
    """Yield KV, its number of rows, and the queries of a row to time."""
    for batch in batches:
        for context in contexts:
            for heads in HEADS:
                yield LiveKV(heads, batch, context, device), batch, QUERIES
    for heads in OTHER_DIMS:
        yield LiveKV(heads, batches[-1], contexts[0], device), batches[-1], QUERIES[1:2]
