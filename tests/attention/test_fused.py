"""Causal lanes on a GPU: torch's fused kernels get every lane's length, and no mask is built.

The kernels run on a GPU alone (`tests/device/test_device_attention.py`). Here are doubles of them,
written from their documentation, and torch's own fake tensors, which check what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fake_cuda import Kernels
from flashinfer_kit import Pages, Rig
from fused_kit import Ops, inputs, reading, use_doubles
from graph_kit import graphs_run
from scripted import Scripted
from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import resolve
from specpool.engine.attention import AttentionView, attend, fused, torch_backend
from specpool.engine.attention import view as view_module
from specpool.engine.attention.cudnn import without_cudnn
from specpool.engine.attention.lanes import causal_view, chain_views, last_view, own_view
from specpool.engine.draft import EagleDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models import target as target_module
from specpool.engine.worker import worker
from specpool.engine.worker.forward import Forward
from specpool.engine.worker.graphs.round_graph import RoundGraph
from specpool.kernels import launch

CPU = Rig(None, torch.device("cpu"), torch.float32, 8, 1e-5)
#: starts and widths of the lanes
CASES = {
    "one prompt": ([0], [7]),
    "equal": ([3, 17], [4, 4]),
    "ragged": ([0, 11, 30], [7, 1, 3]),
    "long": ([0, 2], [40, 35]),
    "an even page": ([16, 0], [16, 32]),
}


@pytest.fixture
def doubles(monkeypatch) -> list[str]:
    return use_doubles(monkeypatch)


def view_of(pages: Pages, case: str) -> AttentionView:
    starts, widths = CASES[case]
    return causal_view(pages, 0, pages.lanes(starts, widths))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_reads_what_its_mask_would_show(doubles, case, page_size, window, dtype):
    """In a window group each lane's pages begin where its own window does."""
    rig = Rig(None, torch.device("cpu"), dtype, 8, 1e-5)
    results = []
    for by_mask in (False, True):
        pages = Pages(rig, page_size, len(CASES[case][0]), window=window)
        view = view_of(pages, case)
        assert view.is_causal
        if by_mask:
            view.is_causal, view.causal_lens = False, None
        q, k, v = inputs(view, 6, dtype, 8)
        out = attend(view, *pages.buffers, q, k, v, scaling=0.3, window=window)
        results.append((out.float(), *pages.buffers))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0][0], results[1][0], atol=tolerance, rtol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))
    assert doubles == ["efficient" if dtype == torch.float32 else "flash"]


def rounds(pages: Pages) -> dict[str, list[AttentionView]]:
    """Views of rounds whose lengths the host knows to 5 tokens."""
    lanes = pages.lanes([9, 40, 23], 4, slack=5)
    padded = pages.lanes([9, 40, 23], 4, slack=5, lens=[1, 4, 2])
    return {
        "plain": [causal_view(pages, 0, pages.lanes([9, 40, 23], 1, slack=5))],
        "chain": [causal_view(pages, 0, lanes)],
        "draft-extend": [causal_view(pages, 0, padded)],
        "its last tokens": [last_view(pages, 0, padded)],
        "draft steps": chain_views(pages, 0, lanes),
    }


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    "kind", ["plain", "chain", "draft-extend", "its last tokens", "draft steps"]
)
@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_round_reads_live_pages_only(doubles, kind, window, page_size, is_bounded):
    """The host knows bounds, as within a graph: pages past a lane's length are not even named.

    Law: a causal round of 16 bits reads ceil(length / P) pages a lane, and builds no mask. It has
    room for the pages that the host allows for, not for lanes times columns.
    """
    rig = Rig(None, torch.device("cpu"), torch.bfloat16, 8, 1e-5)
    results, read = [], []
    for by_mask in (False, True):
        pages = Pages(rig, page_size, 3, window=window)
        for view in rounds(pages)[kind]:
            assert not view.is_causal and view.decode_len is None
            q, k, v = inputs(view, 6, torch.bfloat16, 8)
            q = q[: view.num_queries]
            if by_mask:
                view.causal_lens = None
            else:
                view.mask_for = None  # type: ignore[assignment]
                view.reader = reading(read, page_size)
                live = int((-(-view.causal_lens() // page_size)).sum())
                view.most_pages = live if is_bounded else None
            out = attend(view, *pages.buffers, q, k, v, scaling=0.3, window=window)
            kept = 0 if kind != "draft-extend" else [0, *range(4, 8), 8, 9]
            results.append(out.float() if kept == 0 else out.float()[kept])
            if not by_mask:
                room = live
                if not is_bounded:
                    columns = view.read_pages.shape[1]
                    lens = [columns * page_size] * 3 if view.kv_lens is None else view.kv_lens
                    room = sum(min(-(-int(n) // page_size), columns) for n in lens)
                assert read.pop() == (live, room)
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    assert doubles == ["flash"] * half


@pytest.mark.parametrize(
    ("why", "options", "dim"),
    [
        ("a soft cap", {"softcap": 2.0}, 8),
        ("sinks", {"sinks": torch.zeros(4)}, 8),
        ("heads of 12 bytes", {}, 3),
    ],
)
def test_what_the_kernels_lack_has_a_mask(doubles, why, options, dim):
    pages = Pages(Rig(None, torch.device("cpu"), torch.float32, dim, 1e-5), 4, 3)
    view = view_of(pages, "ragged")
    q, k, v = inputs(view, 4, torch.float32, dim)
    out = attend(view, *pages.buffers, q, k, v, scaling=0.3, **options)
    assert doubles == [] and out.isfinite().all(), why


@pytest.mark.parametrize("queries", [32, 33, 64])
def test_no_call_has_both_a_mask_and_groups_of_heads(monkeypatch, queries):
    """Torch has no fused kernel for both on a GPU, so a large tree's heads go group by group."""
    calls = []

    def noting(q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        calls.append(options.get("enable_gqa", False) or q.shape[1] != keys.shape[1])
        return attention(q, keys, values, **options)

    attention = torch_backend.scaled_dot_product_attention
    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", noting)
    own = torch.rand(2, queries, queries, generator=torch.Generator().manual_seed(0)) < 0.5
    own |= torch.eye(queries, dtype=torch.bool)
    outputs = []
    for device in ("cpu", "cuda"):  # the second: as on a GPU
        monkeypatch.setattr(torch_backend, "_NO_GROUPS", "cpu" if device == "cuda" else "none")
        pages = Pages(CPU, 4, 2)
        lanes = pages.lanes([5, 30], queries)
        nodes = torch.arange(queries, dtype=torch.int32).expand(2, -1) + lanes.starts[:, None]
        slots = lanes.slots(pages, 0)  # type: ignore[arg-type]
        view = own_view(pages, 0, lanes, slots, own, nodes, nodes)  # type: ignore[arg-type]
        q, k, v = inputs(view, 6, torch.float32, 8)
        outputs.append(attend(view, *pages.buffers, q, k, v, scaling=0.3))
        assert device == "cpu" or not any(calls)
        calls.clear()
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.bfloat16, "_flash_attention_forward"),
        (torch.float16, "_flash_attention_forward"),
        (torch.float32, "_efficient_attention_forward"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["exact", "bounds"])
def test_torch_takes_the_call_and_no_mask_is_made(known, dtype, kernel, monkeypatch):
    """Torch's fake tensors say that they are on a GPU, and check the arguments of its kernels.

    A wait for the device raises, because a fake tensor holds no numbers.
    """
    width = 7 if dtype != torch.float32 else 40

    def no_mask(window: int | None) -> Tensor:
        raise AssertionError("a mask is built")

    def upload(device: torch.device, *arrays: Any) -> list[Tensor]:
        return [torch.empty_like(torch.from_numpy(array), device=device) for array in arrays]

    for module in (fused, view_module):
        monkeypatch.setattr(module, "upload", upload)
    # Fake tensors have no addresses for the kernel that writes.
    monkeypatch.setattr(torch_backend, "write_kv", lambda keys, values, slots, k, v: (k, v))
    lens = np.array([7, 12, 19], np.int32)
    monkeypatch.setattr(launch, "_cuda", Kernels())
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: 0)
    with FakeTensorMode(allow_non_fake_inputs=True), Ops() as ops:
        gpu = {"device": "cuda", "dtype": dtype}
        k_buffer, v_buffer = (torch.empty(640, 2, 96, **gpu) for _ in range(2))
        slots = torch.zeros(width + 4, dtype=torch.int64, device="cuda")
        pages = torch.zeros(3, 5, dtype=torch.int32, device="cuda")
        view = AttentionView(4, slots, pages, [width, 1, 3], no_mask, kv_lens=lens, is_causal=known)
        view.causal_lens = lambda: torch.empty(3, dtype=torch.int32, device="cuda")
        q, k, v = (torch.empty(width + 4, heads, 96, **gpu) for heads in (8, 2, 2))
        out = attend(view, k_buffer, v_buffer, q, k, v, scaling=0.3, window=6)
    assert out.shape == (width + 4, 8, 96) and out.device.type == "cuda" and out.dtype == dtype
    assert ops.names.count(kernel) == 1
    assert not [name for name in ops.names if "scaled_dot_product" in name or "cudnn" in name]


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_off_within_the_block_alone(enabled):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with pytest.raises(KeyError), without_cudnn(torch.device("cuda", 0)):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
        with without_cudnn(torch.device("cpu")):
            assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("first_out", [0, 1])
def test_cudnn_is_off_until_the_last_of_two_engines_is_done(first_out, enabled):
    """Each serves in a thread of its own, and torch's switch is one for all threads."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with ThreadPoolExecutor(2) as threads:
            blocks = [without_cudnn(torch.device("cuda", 0)) for _ in range(2)]
            for block in blocks:
                threads.submit(block.__enter__).result()
            for block in (blocks[first_out], blocks[1 - first_out]):
                assert not torch.backends.cuda.cudnn_sdp_enabled()
                threads.submit(block.__exit__, None, None, None).result()
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_every_forward_of_an_engine_is_without_cudnn(monkeypatch):
    """Prompts, rounds and the capture of graphs alike."""
    devices, depth = [], []

    @contextlib.contextmanager
    def noting(device: torch.device) -> Iterator[None]:
        devices.append(device)
        depth.append(1)
        yield
        depth.pop()

    def replay(self: Any, *args: Any) -> Any:  # the double of a graph runs the work once more
        depth.append(1)
        try:
            return replayed(self, *args)
        finally:
            depth.pop()

    def inside(cls: Any, name: str) -> None:
        run = getattr(cls, name)

        def checked(*args: Any, **options: Any) -> Any:
            ran.add(name)
            assert depth, name
            return run(*args, **options)

        monkeypatch.setattr(cls, name, checked)

    replayed, ran = RoundGraph.replay, set()
    monkeypatch.setattr(worker, "without_cudnn", noting)
    monkeypatch.setattr(RoundGraph, "replay", replay)
    inside(Forward, "run")
    for name in ("propose", "extend", "catch_up"):
        inside(EagleDrafter, name)
    # After a plain round the head catches up, before the graph of the next round is replayed.
    script = Scripted([Shape.eagle(3, 1, 4), Shape.none()])
    with (
        graphs_run() as capture,
        Engine.from_pretrained(
            draft="specpool/tiny-eagle",
            adaptive=script.config(),
            max_context_len=64,
            max_batch=1,
            graph_sizes=(1,),
        ) as engine,
    ):
        script.take_over(engine)
        (output,) = engine.generate(["a"], SamplingParams(max_new_tokens=20, ignore_eos=True))
        assert output.error is None and engine.stats().graphs.replay_ct and capture.recordings
    assert len(devices) > 1 and ran == {"run", "propose", "extend", "catch_up"}


def test_the_probe_of_a_model_is_without_cudnn(monkeypatch):
    """A model's first forwards are before any worker; each would plan for its own length."""
    depth, ran = [], []

    @contextlib.contextmanager
    def noting(device: torch.device) -> Iterator[None]:
        depth.append(device)
        yield
        depth.pop()

    with TargetModel.from_pretrained(resolve("specpool/tiny")) as target:
        kind: Any = type(target.decoder)
    forward = kind.forward

    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if self.config._attn_implementation != "eager":  # transformers' own, by products
            ran.append(depth[-1])
        return forward(self, *args, **options)

    monkeypatch.setattr(kind, "forward", checked)
    monkeypatch.setattr(target_module, "without_cudnn", noting)
    with TargetModel.from_pretrained(resolve("specpool/tiny")) as target:
        assert len(ran) > 1 and {*ran} == {target.device} and not depth
