"""Attention on a GPU in the dtypes that are served: prompts, rounds and trees, at many lengths.

The reference is the same view in float32 on a CPU, where the laws of `tests/attention` hold.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from flashinfer_kit import Pages, Rig
from specpool.attention import attend
from specpool.attention.cudnn import without_cudnn
from specpool.attention.lanes import causal_view, chain_views

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: starts and widths; few enough positions for the rows of `flashinfer_kit`
CASES = {
    "prompts": ([0, 0, 0], [64, 1, 33]),
    "chunks": ([10, 90, 3], [40, 17, 64]),
    "equal": ([5, 60], [50, 50]),
    "decode": ([5, 60, 120], 1),
    "extend": ([5, 60, 120], 4),
}


def both(case: str, dtype: torch.dtype, page_size: int, window: int | None, dim: int) -> None:
    starts, widths = CASES[case]
    outs = []
    for device, of in (("cuda", dtype), ("cpu", torch.float32)):
        rig = Rig(None, torch.device(device), of, dim, 0)
        pages = Pages(rig, page_size, len(starts))
        pages.buffers = [buffer.to(dtype).to(of) for buffer in pages.buffers]  # rounded alike
        view = causal_view(pages, 0, pages.lanes(starts, widths))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        q, k, v = (
            torch.randn(view.num_tokens, n, dim, generator=generator).to(dtype).to(device, of)
            for n in (8, 2, 2)
        )
        with without_cudnn(q.device):
            outs.append(attend(view, *pages.buffers, q, k, v, scaling=0.2, window=window))
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(outs[0].cpu().float(), outs[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_attends_as_a_cpu_does_cuda(case, dtype, page_size, window, dim):
    both(case, dtype, page_size, window, dim)


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
