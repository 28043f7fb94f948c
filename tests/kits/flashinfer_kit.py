"""Where the flashinfer tests run: over an emulation on the CPU, and on a GPU with the wheel."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specpool import kernels
from specpool.engine.attention import AttentionView, torch_backend
from specpool.engine.attention.flashinfer import backend as flashinfer_backend
from specpool.engine.attention.flashinfer.backend import FlashInfer
from specpool.engine.attention.lanes import Lanes, own_view
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.memory.kv_cache import KVCache

ROW_WIDTH = 160


@dataclass
class Rig:
    """One flashinfer, and what a test may ask of it.

    Attributes:
        library: the module, or its emulation.
        device: of the pages.
        dtype: of keys and values.
        head_dim: that its kernels take.
        tolerance: how far two back ends may be apart.
    """

    library: Any
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    tolerance: float

    @cached_property
    def backend(self) -> FlashInfer:
        """One back end for all views, because its working memory is large."""
        return FlashInfer(self.library, self.device)


def on_a_card() -> Rig:
    """Return the rig of a real GPU with the wheel; skip the test where there is none."""
    lack = flashinfer_backend.missing()
    if lack is not None:
        pytest.skip(lack)
    import flashinfer

    return Rig(flashinfer, torch.device("cuda:0"), torch.float16, 64, 5e-3)


class Pages:
    """The part of a `KVCache` that a view needs: one group of shuffled pages full of numbers."""

    def __init__(
        self,
        rig: Rig,
        page_size: int,
        num_rows: int,
        *,
        seed: int = 0,
        window: int | None = None,
        kv_heads: int = 2,
        row_width: int = ROW_WIDTH,
    ) -> None:
        per_row = -(-row_width // page_size)
        ids = list(range(1, num_rows * per_row + 1))
        random.Random(seed).shuffle(ids)
        table = np.zeros((num_rows + 1, per_row), np.int32)
        table[1:] = np.array(ids).reshape(num_rows, per_row)
        self.device, self.dtype = rig.device, rig.dtype
        self.page_sizes, self.windows, self.chunks = [page_size], [window], [None]
        self.sinks, self.num_sinks = [0], [0]
        self.tables = [torch.from_numpy(table).to(rig.device)]
        self.reader, self.attend_with, self.scratch = None, None, None
        self.bound: int | None = None  # of the pages of all lanes
        generator = torch.Generator().manual_seed(seed)
        size = ((len(ids) + 1) * page_size, kv_heads, rig.head_dim)
        self.buffers = [
            torch.randn(size, generator=generator).to(rig.device, rig.dtype) for _ in range(2)
        ]

    def most_pages(self, group: int, num_lanes: int) -> int | None:
        return self.bound

    def pages_of(self, *args: Any) -> Any:
        return KVCache.pages_of(self, *args)  # type: ignore[arg-type]

    def window_pages(self, *args: Any) -> Any:
        return KVCache.window_pages(self, *args)  # type: ignore[arg-type]

    @property
    def fields(self) -> kernels.Fields:
        return kernels.Fields.of(self.buffers, self.page_sizes[0])

    def lanes(
        self,
        starts: Sequence[int],
        widths: Sequence[int] | int,
        *,
        slack: int = 0,
        lens: Sequence[int] | None = None,
    ) -> Lanes:
        """Rows 1, 2, ... from `starts` on; the host knows them to `slack` tokens."""
        on_device = torch.tensor(starts, dtype=torch.int32, device=self.device)
        lens_of = np.array(starts, np.int32)
        lo = lens_of if slack == 0 else np.maximum(lens_of - slack, 0)
        hi = lens_of if slack == 0 else lens_of + slack
        return Lanes(
            torch.arange(1, len(starts) + 1, dtype=torch.int32, device=self.device),
            SeqLens(on_device, lo, hi),
            widths if isinstance(widths, int) else np.array(widths, np.int32),
            None if lens is None else torch.tensor(lens, dtype=torch.int32, device=self.device),
        )


def compare(
    rig: Rig,
    pages: Pages,
    view: AttentionView,
    *,
    groups: int = 2,
    seed: int = 0,
    counts: Tensor | None = None,
    backend: FlashInfer | None = None,
    **options: Any,
) -> None:
    """Both back ends give the same, and write the same, over one view.

    `counts`: bool [T], the queries whose result is read; None = all.
    """
    generator = torch.Generator().manual_seed(seed)
    q_lens = view.q_lens
    num_queries = q_lens * view.num_lanes if isinstance(q_lens, int) else sum(q_lens)
    kv_heads = pages.buffers[0].shape[1]

    def numbers(num_tokens: int, heads: int) -> Tensor:
        size = (num_tokens, heads, rig.head_dim)
        return torch.randn(size, generator=generator).to(rig.device, rig.dtype)

    q = numbers(num_queries, kv_heads * groups)
    k, v = (numbers(view.num_tokens, kv_heads) for _ in range(2))
    outputs, written = [], []
    for run in (torch_backend.attend, (backend or rig.backend).attend):
        buffers = [buffer.clone() for buffer in pages.buffers]
        outputs.append(run(view, *buffers, q, k, v, scaling=0.3, **options))
        written.append(buffers)
    keep = slice(None) if counts is None else counts
    torch.testing.assert_close(
        outputs[1][keep], outputs[0][keep], atol=rig.tolerance, rtol=rig.tolerance
    )
    for pages_a, pages_b in zip(*written, strict=True):
        assert torch.equal(pages_a[view.page_size :], pages_b[view.page_size :])  # but for the sink


def random_tree(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bool [N, N], who sees whom, and int32 [N] depths; parents come first."""
    mask, depths = np.eye(size, dtype=bool), np.zeros(size, np.int32)
    for node in range(1, size):
        parent = rng.integers(node)
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return mask, depths


def verify_view(pages: Pages, starts, widths, *, slack=0, seed=0):
    """Random trees behind each prefix; `widths` are their nodes, one number or ragged."""
    rng = np.random.default_rng(seed)
    lanes = pages.lanes(starts, widths, slack=slack)
    lane_widths = [widths] * len(starts) if isinstance(widths, int) else widths
    max_width = max(lane_widths)
    mask = np.zeros((len(starts), max_width, max_width), bool)
    positions = np.zeros((len(starts), max_width), np.int32)
    for lane, (start, size) in enumerate(zip(starts, lane_widths, strict=True)):
        mask[lane, :size, :size], depths = random_tree(rng, size)
        positions[lane, :size] = start + depths
    slots = lanes.slots(pages, 0)
    mask, positions = (torch.from_numpy(a).to(pages.device) for a in (mask, positions))
    return own_view(pages, 0, lanes, slots, mask, positions, positions)
