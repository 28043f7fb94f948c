"""Trees on a GPU: the prefix by torch's flash kernel without a mask, joined with the tree's part.

The kernel runs on a GPU alone (`tests/device/test_device_attention.py`); here is a double of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fake_cuda import Kernels
from flashinfer_kit import Pages, Rig, verify_view
from fused_kit import Ops, inputs, reading, use_doubles
from specpool import Shape, kernels
from specpool.engine.attention import AttentionView, attend, fused, torch_backend, trees
from specpool.engine.attention import view as view_module
from specpool.engine.attention.view import OwnCells
from specpool.engine.draft.branches import DenseBranches
from specpool.kernels import launch

#: starts, and nodes of each lane
TREES = {
    "one": ([30], 7),
    "equal": ([5, 40, 23], 16),
    "ragged": ([5, 40, 23], [16, 3, 40]),
    "a page's edge": ([16, 32, 48], 16),
    "no prefix": ([0, 9, 0], 5),
}


@pytest.fixture
def doubles(monkeypatch) -> list[str]:
    return use_doubles(monkeypatch)


def both_ways(view: AttentionView, by_mask: AttentionView, pages: Pages, other: Pages) -> None:
    """Attend by the parts and by the mask over all columns: the same result and the same pages."""
    q, k, v = inputs(view, 6, torch.bfloat16, 8)
    view.mask_for = None  # type: ignore[assignment]
    by_mask.own_cells = None
    one = attend(view, *pages.buffers, q, k, v, scaling=0.3)
    two = attend(by_mask, *other.buffers, q, k, v, scaling=0.3)
    torch.testing.assert_close(one.float(), two.float(), atol=2e-2, rtol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(pages.buffers, other.buffers, strict=True))


def two_pages(page_size: int, num_rows: int, window: int | None = None) -> list[Pages]:
    rig = Rig(None, torch.device("cpu"), torch.bfloat16, 8, 1e-5)
    return [Pages(rig, page_size, num_rows, window=window) for _ in range(2)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("slack", [0, 5], ids=["exact", "bounds"])
@pytest.mark.parametrize("case", TREES)
def test_a_tree_sees_what_its_mask_shows(doubles, case, slack, page_size):
    """Law: the prefix and the own cells, joined, give what the mask over all columns gives."""
    starts, nodes = TREES[case]
    pages, other = two_pages(page_size, len(starts))
    views = [verify_view(of, starts, nodes, slack=slack) for of in (pages, other)]
    both_ways(*views, pages, other)
    assert doubles == ["flash"]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_tree_reads_live_pages_only(doubles, page_size, is_bounded):
    """Law: a verify of 16 bits reads ceil(start / P) pages a lane; the rest may hold anything."""
    starts = [9, 40, 23]
    pages, other = two_pages(page_size, 3)
    views = [verify_view(of, starts, 8, slack=5) for of in (pages, other)]
    live = sum(-(-start // page_size) for start in starts)
    room = live if is_bounded else sum(-(-(start + 5 + 8) // page_size) for start in starts)
    views[0].most_pages = live if is_bounded else None
    read: list[tuple[int, int]] = []
    views[0].reader = reading(read, page_size)
    both_ways(*views, pages, other)
    assert read == [(live, room)]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_branches_of_the_dense_layout_have_no_mask(doubles, page_size, exact):
    """Each step's queries see cells that earlier steps wrote."""
    shape = Shape.eagle(3, 2, 4)
    both = two_pages(page_size, 3)
    branches = [
        DenseBranches(of, 0, of.lanes([9, 40, 23], 1, slack=4), shape, exact)  # type: ignore[arg-type]
        for of in both
    ]
    parents = torch.tensor([[0, 1], [1, 1], [1, 0]], dtype=torch.int32)
    for step in range(3):
        both_ways(*(branch.view(step, parents) for branch in branches), *both)
    assert doubles == ["flash"] * 3


@pytest.mark.parametrize(
    ("why", "options", "window"),
    [
        ("a window goes by position", {}, 6),
        ("a soft cap", {"softcap": 2.0}, None),
        ("sinks", {"sinks": torch.zeros(6)}, None),
    ],
)
def test_what_the_parts_lack_has_a_mask(doubles, why, options, window):
    (pages, _) = two_pages(4, 3, window)
    view = verify_view(pages, [9, 40, 23], 8)
    q, k, v = inputs(view, 6, torch.bfloat16, 8)
    out = attend(view, *pages.buffers, q, k, v, scaling=0.3, window=window, **options)
    assert doubles == [] and out.isfinite().all(), why


def test_a_window_that_hides_nothing_needs_no_mask(doubles):
    pages, _ = two_pages(4, 3)
    view = verify_view(pages, [9, 40, 23], 8)
    q, k, v = inputs(view, 6, torch.bfloat16, 8)
    attend(view, *pages.buffers, q, k, v, scaling=0.3, window=500)
    assert doubles == ["flash"]


def test_a_node_that_sees_nothing_gets_finite_numbers(doubles):
    """Padding of a graph: its result is dropped, but its KV is written."""
    pages, _ = two_pages(4, 2)
    view = verify_view(pages, [0, 9], 3)
    assert view.own_cells is not None
    view.own_cells.mask[0] = False
    q, k, v = inputs(view, 6, torch.bfloat16, 8)
    assert attend(view, *pages.buffers, q, k, v, scaling=0.3).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_takes_the_call(dtype, monkeypatch):
    """Fake tensors on a GPU check the kernel's arguments; a wait for the device would raise."""

    def upload(device: torch.device, *arrays: Any) -> list[Tensor]:
        return [torch.empty_like(torch.from_numpy(array), device=device) for array in arrays]

    def no_mask(window: int | None) -> Tensor:
        raise AssertionError("a mask is built")

    for module in (fused, view_module):
        monkeypatch.setattr(module, "upload", upload)
    # Fake tensors have no addresses for the kernel that writes.
    monkeypatch.setattr(torch_backend, "write_kv", lambda keys, values, slots, k, v: (k, v))
    lens = np.array([17, 22, 29], np.int32)
    monkeypatch.setattr(launch, "_cuda", Kernels())
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: 0)
    with FakeTensorMode(allow_non_fake_inputs=True), Ops() as ops:
        gpu = {"device": "cuda", "dtype": dtype}
        k_buffer, v_buffer = (torch.empty(640, 2, 96, **gpu) for _ in range(2))
        slots = torch.zeros(30, dtype=torch.int64, device="cuda")
        pages = torch.zeros(3, 8, dtype=torch.int32, device="cuda")
        own = OwnCells(
            lambda: torch.empty(3, dtype=torch.int32, device="cuda"),
            torch.empty(3, 10, 10, dtype=torch.bool, device="cuda"),
            lambda view: slots.view(3, 10),
        )
        view = AttentionView(4, slots, pages, 10, no_mask, kv_lens=lens, own_cells=own)
        q, k, v = (torch.empty(30, heads, 96, **gpu) for heads in (8, 2, 2))
        out = attend(view, k_buffer, v_buffer, q, k, v, scaling=0.3)
    assert out.shape == (30, 8, 96) and out.device.type == "cuda" and out.dtype == dtype
    assert ops.names.count("_flash_attention_forward") == 1
    assert "clone" not in ops.names
    assert not [name for name in ops.names if "scaled_dot_product" in name or "cudnn" in name]


@pytest.mark.parametrize("nodes", [10, [10, 3, 7]], ids=["equal", "ragged"])
def test_a_layer_copies_its_own_cells_once_for_all_heads(doubles, nodes):
    """Law: keys and values of a tree are read once, however many query heads share them."""
    (pages, _) = two_pages(4, 3)
    view = verify_view(pages, [9, 40, 23], nodes)
    q, k, v = inputs(view, 6, torch.bfloat16, 8)
    attend(view, *pages.buffers, q, k, v, scaling=0.3)  # what the layers share
    heads_of: list[int] = []
    bmm = torch.bmm

    def noting(one: Tensor, other: Tensor) -> Tensor:
        heads_of.append(len(other))
        return bmm(one, other)

    with pytest.MonkeyPatch.context() as patch, Ops() as ops:
        patch.setattr(trees.torch, "bmm", noting)
        trees.attend_trees(view, *pages.buffers, q, 0.3)
    assert heads_of == [3 * 2] * 2
    double = 3 if isinstance(nodes, list) else 2  # of the double of the flash kernel
    assert ops.names.count("clone") <= double


def test_the_own_cells_of_ragged_lanes_are_their_nodes():
    """A narrower lane's padding names a slot that exists; no query sees it."""
    (pages, _) = two_pages(4, 3)
    view = verify_view(pages, [5, 40, 23], [4, 1, 6])
    assert view.own_cells is not None and view.own_cells.slots(view).shape == (3, 6)
    table, size = pages.tables[0], pages.page_sizes[0]
    for lane, (start, nodes) in enumerate(((5, 4), (40, 1), (23, 6))):
        rows = torch.tensor([lane + 1], dtype=torch.int32)
        at = torch.tensor([start], dtype=torch.int32)
        count = torch.tensor([nodes], dtype=torch.int32)
        found = kernels.slot_ranges(table, size, rows, at, count, hi=np.array([nodes], np.int32))
        assert view.own_cells.slots(view)[lane, :nodes].tolist() == found.tolist()
