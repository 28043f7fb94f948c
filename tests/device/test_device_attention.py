"""Attention on a GPU in the dtypes that are served: prompts, rounds and trees, at many lengths.

The reference is the same view in float32 on a CPU, where the laws of `tests/attention` hold. Our
kernel takes few queries of heads of 64 and 128, torch's the rest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashinfer_kit import Pages, Rig, verify_view
from specpool.engine.attention import AttentionView, attend
from specpool.engine.attention.cudnn import without_cudnn
from specpool.engine.attention.lanes import causal_view, chain_views

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROW_WIDTH = 2200
#: starts and widths
CASES = {
    "prompts": ([0, 0, 0], [64, 1, 33]),
    "chunks": ([10, 90, 3], [40, 17, 64]),
    "equal": ([5, 60], [50, 50]),
    "long": ([2000, 0, 711], [130, 1500, 1]),
    "decode": ([5, 60, 2100], 1),
    "extend": ([5, 60, 1500], 4),
}
TREES = {"small": ([5, 60, 120], 8), "large": ([5, 1999, 64], 64), "one": ([300], 16)}
Build = Callable[[Pages], list[AttentionView]]


def both(
    build: Build, num_rows: int, dtype: torch.dtype, page_size: int, window: int | None, dim: int
) -> None:
    """The views' attention on the GPU is that of a CPU in float32."""
    outs: list[list[Tensor]] = []
    for device, of in (("cuda", dtype), ("cpu", torch.float32)):
        rig = Rig(None, torch.device(device), of, dim, 0)
        pages = Pages(rig, page_size, num_rows, window=window, row_width=ROW_WIDTH)
        pages.buffers = [buffer.to(dtype).to(of) for buffer in pages.buffers]  # rounded alike
        generator = torch.Generator().manual_seed(2)
        outs.append([])
        for view in build(pages):
            q, k, v = (
                torch.randn(n, heads, dim, generator=generator).to(dtype).to(device, of)
                for n, heads in ((view.num_queries, 8), (view.num_tokens, 2), (view.num_tokens, 2))
            )
            with without_cudnn(q.device):
                out = attend(view, *pages.buffers, q, k, v, scaling=0.2, window=window)
            outs[-1].append(out.cpu().float())
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("slack", [0, 7], ids=["exact", "bounds"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_attends_as_a_cpu_does_cuda(case, dtype, slack, page_size, window, dim):
    starts, widths = CASES[case]

    def build(pages: Pages) -> list[AttentionView]:
        lanes = pages.lanes(starts, widths, slack=slack)
        chain = chain_views(pages, 0, lanes) if isinstance(widths, int) else []  # type: ignore[arg-type]
        return [causal_view(pages, 0, lanes), *chain]  # type: ignore[arg-type]

    both(build, len(starts), dtype, page_size, window, dim)


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TREES)
def test_a_gpu_verifies_trees_as_a_cpu_does_cuda(case, dtype, page_size, window, dim):
    starts, size = TREES[case]
    both(
        lambda pages: [verify_view(pages, starts, size, slack=3)],
        len(starts),
        dtype,
        page_size,
        window,
        dim,
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_new_length_costs_no_plan_cuda(dtype):
    """cuDNN would take tenths of a second for each new length; a kernel takes microseconds."""
    rig = Rig(None, torch.device("cuda"), dtype, 128, 0)
    pages = Pages(rig, 16, 4)
    rng, seconds = random.Random(0), []
    for _ in range(20):
        starts = [rng.randrange(100) for _ in range(4)]
        (view,) = chain_views(pages, 0, pages.lanes(starts, 1))  # type: ignore[arg-type]
        q, k, v = (torch.randn(4, n, 128, device="cuda", dtype=dtype) for n in (8, 2, 2))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with without_cudnn(q.device):
            attend(view, *pages.buffers, q, k, v, scaling=0.2)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    assert sorted(seconds)[10] < 0.05
