"""Few queries on a GPU: our kernel reads the pages in place, and torch gathers nothing.

The kernel runs on the host runner here; on a GPU, `tests/device/test_device_attention.py` attends.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cuda_host
from device_kit import kernels_run
from flashinfer_kit import Pages, Rig, verify_view
from fused_kit import Ops
from specpool.engine.attention import AttentionView, attend
from specpool.engine.attention.few_queries import MOST_ROWS, serves_few_queries
from specpool.engine.attention.lanes import causal_view, chain_views, last_view

pytestmark = pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())

DIM = 64
Build = Callable[[Pages], AttentionView]
#: lanes' views: plain decoding at equal and unlike lengths, chains, draft-extend, trees
VIEWS: dict[str, Build] = {
    "equal": lambda pages: causal_view(pages, 0, pages.lanes([20, 20], 1)),  # type: ignore[arg-type]
    "plain": lambda pages: causal_view(pages, 0, pages.lanes([20, 0], 1, slack=5)),  # type: ignore[arg-type]
    "chain": lambda pages: causal_view(pages, 0, pages.lanes([20, 3], 4, slack=5)),  # type: ignore[arg-type]
    "exact": lambda pages: causal_view(pages, 0, pages.lanes([20, 3], 4)),  # type: ignore[arg-type]
    "ragged": lambda pages: causal_view(pages, 0, pages.lanes([20, 3], [1, 5])),  # type: ignore[arg-type]
    "last": lambda pages: last_view(pages, 0, pages.lanes([20, 3], 4)),  # type: ignore[arg-type]
    "step": lambda pages: chain_views(pages, 0, pages.lanes([20, 3], 3, slack=2))[2],  # type: ignore[arg-type]
    "tree": lambda pages: verify_view(pages, [20, 0], 8, slack=3),
    "ragged tree": lambda pages: verify_view(pages, [20, 3], [8, 2]),
}


def pages_of(page_size: int, window: int | None = None) -> Pages:
    rig = Rig(None, torch.device("cpu"), torch.bfloat16, DIM, 0)
    return Pages(rig, page_size, 2, window=window, row_width=48)


def inputs(view: AttentionView, heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (view.num_queries, heads), (view.num_tokens, 2), (view.num_tokens, 2)
    return [
        torch.randn(n, num_heads, DIM, generator=generator).to(torch.bfloat16)
        for n, num_heads in sizes
    ]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("case", VIEWS)
def test_it_attends_as_the_mask_says(case, window, page_size):
    """Law: the kernel gives what torch gives with the view's mask, and writes the same KV."""
    if window and "tree" in case:
        pytest.skip("a tree's window goes by position")
    outs, written = [], []
    for runs in (True, False):
        pages = pages_of(page_size, window)
        view = VIEWS[case](pages)
        q, k, v = inputs(view)
        if runs:
            view.mask_for = None  # type: ignore[assignment]
            with kernels_run() as launches:
                outs.append(attend(view, *pages.buffers, q, k, v, scaling=0.2, window=window))
            assert launches["attend_64"] == 1
        else:
            view.own_cells = view.causal_lens = None
            outs.append(attend(view, *pages.buffers, q, k, v, scaling=0.2, window=window))
        written.append(pages.buffers)
    torch.testing.assert_close(outs[0].float(), outs[1].float(), atol=2e-2, rtol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))


def test_layers_share_what_a_view_says():
    """Law: from the second layer on, a view costs no launch but the kernel's own."""
    pages = pages_of(4)
    view = verify_view(pages, [20, 3], 8)
    q, k, v = inputs(view)
    with kernels_run():
        attend(view, *pages.buffers, q, k, v, scaling=0.2)
        with Ops() as ops:
            attend(view, *pages.buffers, q, k, v, scaling=0.2)
    views = {"alias", "as_strided", "detach", "empty", "select", "slice", "view"}
    assert set(ops.names) <= views, ops.names


def test_what_it_does_not_serve():
    """Law: other dtypes, widths, masks and many queries go by other ways."""
    pages = pages_of(4)
    keys, values = pages.buffers
    view = causal_view(pages, 0, pages.lanes([20, 3], 4))  # type: ignore[arg-type]
    tree = verify_view(pages, [20, 3], 8)
    q, _, _ = inputs(view)
    assert not serves_few_queries(view, q, keys, values, None), "no kernels run on this device"
    most = MOST_ROWS // view.max_q_len * 2
    wide, too_wide = (q[:, :1].expand(-1, heads, -1) for heads in (most, most + 2))
    with kernels_run():
        for served in (
            (view, q, keys, values, None),
            (view, q, keys, values, 3),
            (view, wide, keys, values, None),
            (tree, q, keys, values, None),
            (tree, q, keys, values, 500),
        ):
            assert serves_few_queries(*served)
        for left in (
            (view, too_wide, keys, values, None),
            (view, q.float(), keys, values, None),
            (view, q[:, :, :32], keys, values, None),
            (view, q, keys.half(), values.half(), None),
            (view, q, keys, values[:, :, :32], None),
            (tree, q, keys, values, 3),  # nodes of a lane have several positions
        ):
            assert not serves_few_queries(*left)
        view.causal_lens, view.is_causal = None, False
        assert not serves_few_queries(view, q, keys, values, None)
